"""How long chosen rows have been waiting that a transport did not let through.

A row starts to wait when it is chosen and refused, and waits, chosen again or not, until it is applied. Waiting
times are state: one int32 a row, where the transport may defer at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dion_core.rows import RowSelection


def with_age(selection: RowSelection, waited: Sequence[Tensor]) -> RowSelection:
    """The selection with the waiting times of its rows, from N tensors (R, 1)."""
    if not waited:
        return selection
    ages = torch.zeros_like(selection.age)
    for matrix, steps in enumerate(waited):
        index = _existing(selection, matrix, steps)
        ages[matrix, : len(index)] = steps[:, 0].index_select(0, index)
    return replace(selection, age=ages)


def wait_(waited: Sequence[Tensor], chosen: RowSelection, admitted: RowSelection) -> None:
    """Lengthens the waiting times of rows that were refused or wait already, and clears those of admitted rows.

    A matrix that takes no part in the step is left as it is.

    Args:
        waited: N tensors (R, 1) int32, changed in place.
        chosen: the choice of the step.
        admitted: what the transport let through.
    """
    took_part = chosen.count_by_rank.sum(dim=0) > 0
    for matrix, steps in enumerate(waited):
        refused, applied = (torch.zeros_like(steps, dtype=torch.bool) for _ in range(2))
        for mask, selection in ((refused, chosen), (applied, admitted)):
            index = _existing(selection, matrix, steps)
            mask[:, 0].index_copy_(0, index, selection.valid()[matrix, : len(index)])
        longer = torch.where(applied, 0, steps + ((refused | (steps > 0)) & ~applied))
        steps.copy_(torch.where(took_part[matrix], longer, steps))


def _existing(selection: RowSelection, matrix: int, steps: Tensor) -> Tensor:
    """The entries of the selection that name rows of the matrix: where another one has more rows here, not all do."""
    return selection.index[matrix, : len(steps)]
