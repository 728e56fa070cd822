"""NorMuon's per-row statistics and factors, defined in plain torch, and the message by which ranks share them.

A rank's message holds, flat and in the dtype of the sums, N counts of chosen rows, then (N, K) sums of squares
before and (N, K) after the normalization; entries past a count are 0. The gathered messages stand rank after rank.

Legend: N matrices of a bucket, R local rows and C columns of a whole matrix, K slots a matrix, W ranks,
T chosen rows of a whole matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dion_core.compaction import compact
from dion_core.rows import Rows, RowSelection, sums_of_squares, update_second_moment_

NEURON_EPSILON = 1e-8
"""Added to the root of the second moment (Li et al. 2025, NorMuon)."""


def message_lengths(num_matrices: int, slots: Sequence[int]) -> list[int]:
    """Elements of every rank's message, whose slots a matrix are given by rank."""
    return [num_matrices * (1 + 2 * of_rank) for of_rank in slots]


def neuron_factors_(
    second_moment: Sequence[Tensor],
    selection: RowSelection,
    sums: Tensor,
    *,
    columns: int,
    beta2: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """The factor of every chosen row, before the norm of the whole update is restored, and this rank's message.

    Args:
        second_moment: N tensors (R, 1) fp32, moved towards the mean squares of the chosen rows.
        selection: which rows are chosen.
        sums: (N, K) sums of squares of whole rows; 0 past the count.
        columns: C, of a whole row.
        beta2: decay of the second moment.

    Returns:
        (N, K) factors 1 / (sqrt(v) + epsilon), finite also past the count, and the message.
    """
    moment = update_second_moment_(second_moment, selection, sums / columns, beta2=beta2)
    factor = (moment.sqrt() + NEURON_EPSILON).reciprocal()
    after = torch.where(selection.valid(), sums * factor.square(), 0)
    return factor, torch.cat([selection.count.to(sums.dtype), sums.flatten(), after.flatten()])


def neuron_factors_of_rows_(
    second_moment: Sequence[Tensor],
    selection: RowSelection,
    rows: Rows,
    *,
    columns: int,
    beta2: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """`neuron_factors_` of rows that lie whole on this rank: factors (N, K) and message."""
    return neuron_factors_(second_moment, selection, sums_of_squares(rows, selection), columns=columns, beta2=beta2)


def neuron_scale(factor: Tensor, gathered: Tensor, *, slots: Sequence[int], first_slot: Tensor, total: int) -> Tensor:
    """(N, K) final factors: those given times the ratio that keeps the Frobenius norm of each whole update.

    The sums run over compacted rows, which stand in global row order, so that they do not depend on W.

    Args:
        factor: (N, K), of this rank's rows.
        gathered: flat, the messages of all ranks that hold rows, by rank.
        slots: slots a matrix of every rank.
        first_slot: (W, N) int64, the sum of the slots of the ranks before.
        total: T, the most rows that all ranks have chosen of a matrix.
    """
    num_matrices = len(factor)
    pieces = torch.split_with_sizes(gathered, message_lengths(num_matrices, slots))
    count_by_rank = torch.stack([piece[:num_matrices] for piece in pieces]).long()
    by_row = torch.cat([piece[num_matrices:].view(2, num_matrices, -1) for piece in pieces], dim=2)
    source, valid = compact(count_by_rank, first_slot, total)
    sums = torch.where(valid, by_row.gather(2, source.expand(2, -1, -1)), 0)
    before, after = sums.sum(dim=2)
    ratio = torch.where(after > 0, (before / after).sqrt(), 1)
    return factor * ratio[:, None]
