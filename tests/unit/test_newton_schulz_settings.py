"""What Newton-Schulz can be told, by name or by fields, and the segments that follow from it."""

from __future__ import annotations

import math

import pytest
import torch

from dion_core.newton_schulz import POLAR_EXPRESS, QUINTIC, NewtonSchulz, orthogonalizer

F16 = torch.float16
CLASSICAL = NewtonSchulz(restart_after=None)


def test_orthogonalizer_by_name_or_object() -> None:
    assert orthogonalizer("auto") == orthogonalizer("polar_express") == NewtonSchulz()
    assert orthogonalizer("quintic") == NewtonSchulz(coefficients=QUINTIC)
    for thing in (CLASSICAL, torch.clone):
        assert orthogonalizer(thing) is thing


@pytest.mark.parametrize("value", ["muon", "", 5, None, NewtonSchulz], ids=repr)
def test_unknown_orthogonalizer_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="orthogonalizer must be 'auto', 'polar_express', 'quintic'") as error:
        orthogonalizer(value)
    assert repr(value) in str(error.value)


def test_equal_settings_have_equal_hash_and_repr() -> None:
    from_file = NewtonSchulz([[2, -1.5, 0.5], [2, -1.5, 0.5]], restart_after=2, compute_dtype=F16)
    direct = NewtonSchulz(((2.0, -1.5, 0.5),) * 2, restart_after=2, compute_dtype=F16)
    assert from_file == direct
    assert hash(from_file) == hash(direct)
    assert (
        repr(from_file)
        == repr(direct)
        == (
            "NewtonSchulz(coefficients=((2.0, -1.5, 0.5), (2.0, -1.5, 0.5)), restart_after=2, "
            "compute_dtype=torch.float16)"
        )
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"coefficients": (), "restart_after": None}, "coefficients must have at least one step"),
        ({"restart_after": 0}, "restart_after must be 'auto', None or 1 to 5, got 0"),
        ({"restart_after": 6}, "restart_after must be 'auto', None or 1 to 5, got 6"),
        ({"coefficients": QUINTIC[:1], "restart_after": 2}, "restart_after must be 'auto', None or 1 to 1, got 2"),
        ({"restart_after": True}, "restart_after must be 'auto', None or 1 to 5, got True"),
        ({"restart_after": 2.0}, "restart_after must be 'auto', None or 1 to 5, got 2.0"),
        ({"coefficients": ((2.0, math.nan, 0.5),) * 2}, "coefficients must be finite"),
        ({"restart_after": "never"}, "restart_after must be 'auto', None or 1 to 5, got 'never'"),
        ({"compute_dtype": torch.int32}, "compute_dtype must be .*float16.*, got torch.int32"),
    ],
)
def test_fields_out_of_range_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NewtonSchulz(**fields)


def test_segments_follow_the_shape() -> None:
    def lengths(iteration: NewtonSchulz, rows: int, columns: int) -> list[int]:
        return [len(segment.coefficients) for segment in iteration.segments(rows, columns)]

    assert lengths(NewtonSchulz(), 8, 9) == lengths(NewtonSchulz(), 9, 8) == [2, 3]
    assert lengths(NewtonSchulz(), 8, 8) == lengths(CLASSICAL, 8, 9) == [1] * 5
    assert lengths(NewtonSchulz(restart_after=5), 8, 9) == [5]
    assert lengths(NewtonSchulz(restart_after=3), 8, 9) == [3, 2]
    assert lengths(NewtonSchulz(restart_after=1), 8, 9) == [1, 4]


def test_segments_of_the_kernels_end_with_two_steps() -> None:
    def lengths(iteration: NewtonSchulz, rows: int, columns: int) -> list[int]:
        segments = iteration.kernel_segments(rows, columns)
        assert tuple(step for steps in segments for step in steps) == iteration.coefficients
        return [len(steps) for steps in segments]

    assert lengths(NewtonSchulz(), 8, 9) == lengths(NewtonSchulz(), 9, 8) == [3, 2]
    assert lengths(NewtonSchulz(), 8, 8) == [1, 2, 2]
    for count, wide, square in ((1, [1], [1]), (2, [2], [2]), (4, [2, 2], [2, 2]), (7, [3, 2, 2], [1, 2, 2, 2])):
        coefficients = (POLAR_EXPRESS[2],) * count
        assert lengths(NewtonSchulz(coefficients), 8, 9) == wide
        assert lengths(NewtonSchulz(coefficients), 8, 8) == square
    # What was asked for is what the kernels take too.
    assert lengths(NewtonSchulz(restart_after=2), 8, 9) == [2, 3]
    assert lengths(NewtonSchulz(restart_after=2), 8, 8) == lengths(CLASSICAL, 8, 9) == [1] * 5
