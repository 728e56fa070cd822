"""Flags of gradients: what captured steps read stays where it is."""

from __future__ import annotations

import pytest
import torch

from dion_core.collectives import Handle, Reduction, SoloGroup
from dion_core.presence import Presence, _complete, _flags

CPU = torch.device("cpu")


def test_flags_of_complete_gradients_stay_where_they_are() -> None:
    kept = _complete(3, CPU)
    assert kept.tolist() == _flags((True, True, True), CPU).tolist() == [1, 1, 1, 0]
    for number in range(4, 104):
        assert _complete(number, CPU).sum() == number
        _flags(tuple(place == number % 7 for place in range(8)), CPU)
    assert _complete(3, CPU) is kept


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize(("found", "skips"), [(0.0, False), (1.0, True), (0.5, True), (torch.nan, True)])
def test_a_loss_scaler_skips_what_is_not_finite(found: float, skips: bool, shape: tuple[int, ...]) -> None:
    gradients = [torch.ones(2), None]
    scaled = torch.full(shape, found)
    presence = Presence(gradients, SoloGroup(), CPU, skip_nonfinite=False, found_inf=scaled)
    assert bool(presence.skipped) == skips
    assert bool(presence.proceed) != skips
    assert presence.active.tolist() == [not skips, False]
    assert [float(mask) for mask in presence.masks] == [float(not skips), 0.0]


class Beside(SoloGroup):
    """A group in which one other rank has these flags."""

    def __init__(self, other: list[int]) -> None:
        self.other = torch.tensor(other, dtype=torch.uint8)

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> Handle:
        assert reduction == "max"
        tensor.copy_(torch.maximum(tensor, self.other))
        return super().all_reduce(tensor, reduction)


@pytest.mark.parametrize("found_inf", [None, torch.zeros(())])
@pytest.mark.parametrize("here", [[True, True], [True, False], [False, False]])
def test_flags_that_are_kept_do_not_take_what_other_ranks_say(here: list[bool], found_inf: torch.Tensor | None) -> None:
    gradients = [torch.ones(2) if has else None for has in here]
    for other in ([1, 1, 0], [0, 1, 0], [1, 1, 1], [0, 0, 0]):
        presence = Presence(gradients, Beside(other), CPU, skip_nonfinite=False, found_inf=found_inf)
        skips = found_inf is not None and other[-1]  # without a scaler what others say of it does not matter
        expected = [(has or bool(there)) and not skips for has, there in zip(here, other, strict=False)]
        assert presence.active.tolist() == expected
        assert _complete(2, CPU).tolist() == [1, 1, 0]
        assert _flags(tuple(here), CPU).tolist() == [*map(int, here), 0]
