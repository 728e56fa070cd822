"""The scale of an update, and the selector of a scope."""

import math

import pytest

from dion_core.layout import Axis
from dion_core.rules import SCALES, SCOPES, Scale, selector, update_scale
from dion_core.selection import AllRows, GlobalRows, LocalRows, Selector
from dion_core.transport import Scope


@pytest.mark.parametrize(
    ("scale", "rows", "columns", "expected"),
    [
        ("spectral_norm", 33, 32, 1.0155048005794951),  # not the 1.0607 of 36 padded rows
        ("spectral_norm", 4, 1, 2.0),
        ("spectral_norm", 1, 4, 0.5),
        ("spectral_norm", 7, 7, 1.0),
        ("rms_norm", 100, 4, 2.0),
        ("rms_norm", 4, 100, 2.0),
        ("rms_norm", 33, 32, 0.2 * math.sqrt(33)),
        (None, 33, 32, 1.0),
    ],
)
def test_update_scale(scale: Scale, rows: int, columns: int, expected: float) -> None:
    assert update_scale(scale, rows, columns) == pytest.approx(expected, rel=1e-12)
    assert scale in SCALES


@pytest.mark.parametrize("axis", list(Axis))
@pytest.mark.parametrize("scope", SCOPES)
def test_selector_of_a_scope(scope: Scope, axis: Axis) -> None:
    expected: dict[Scope, Selector] = {
        "all": AllRows(),
        "global": GlobalRows(0.25),
        "local": LocalRows(0.25) if axis is Axis.ROWS else GlobalRows(0.25),
    }
    assert selector(scope, 0.25, axis) == expected[scope]
