"""Flags of gradients: what captured steps read stays where it is."""

from __future__ import annotations

import torch

from dion_core.presence import _complete, _flags

CPU = torch.device("cpu")


def test_flags_of_complete_gradients_stay_where_they_are() -> None:
    kept = _complete(3, CPU)
    assert kept.tolist() == _flags((True, True, True), CPU).tolist() == [1, 1, 1, 0]
    for number in range(4, 104):
        assert _complete(number, CPU).sum() == number
        _flags(tuple(place == number % 7 for place in range(8)), CPU)
    assert _complete(3, CPU) is kept
