"""What is done to the orthogonalized rows before they are applied: nothing, or NorMuon's normalization.

A normalizer gives one factor a row; the rows themselves are read again only where they are applied.
Legend: N matrices, R local rows, C columns, K slots a matrix, W ranks, T chosen rows of a whole matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dion_core.collectives import split
from dion_core.compaction import compact
from dion_core.layout import Axis
from dion_core.ops import sums_of_squares, update_second_moment_
from dion_core.rows import Rows, RowSelection, accumulation_dtype
from dion_core.steps import Steps
from dion_core.transport import Bucket

NEURON_EPSILON = 1e-8
"""Added to the root of the second moment (Li et al. 2025, NorMuon)."""


class Normalizer(Protocol):
    """A rule that scales the orthogonalized rows."""

    has_second_moment: bool
    """Whether it keeps one fp32 value a row."""

    def row_scale(
        self,
        rows: Rows,
        selection: RowSelection,
        second_moment: Sequence[Tensor],
        bucket: Bucket,
        *,
        beta2: float | Tensor,
    ) -> Steps[Tensor]:
        """(N, K) factors of the rows of `selection`; `second_moment` (N tensors (R, 1)) is updated."""


class NoNormalizer:
    """Rows are applied as they come: Muon and Dion2."""

    has_second_moment = False

    def row_scale(
        self,
        rows: Rows,
        selection: RowSelection,
        second_moment: Sequence[Tensor],
        bucket: Bucket,
        *,
        beta2: float | Tensor,
    ) -> Steps[Tensor]:
        dtype = accumulation_dtype(rows.values.dtype)
        return torch.ones(selection.index.shape, dtype=dtype, device=rows.values.device)
        yield


class NeuronNormalizer:
    """Divides each row by the root of its second moment and keeps the Frobenius norm of the whole update.

    v = beta2 * v + (1 - beta2) * mean(row^2), for applied rows alone (Li et al. 2025, NorMuon). Sums over rows
    run over gathered per-row values in global row order, so that they do not depend on the number of ranks.
    """

    has_second_moment = True

    def row_scale(
        self,
        rows: Rows,
        selection: RowSelection,
        second_moment: Sequence[Tensor],
        bucket: Bucket,
        *,
        beta2: float | Tensor,
    ) -> Steps[Tensor]:
        before = yield from _over_columns(sums_of_squares(rows, selection), bucket)
        moment = update_second_moment_(second_moment, selection, before / bucket.shape[1], beta2=beta2)
        factor = (moment.sqrt() + NEURON_EPSILON).reciprocal()
        after = torch.where(selection.valid(), before * factor.square(), 0)
        total_before, total_after = yield from _over_rows(torch.stack([before, after]), selection, bucket)
        ratio = torch.where(total_after > 0, (total_before / total_after).sqrt(), 1)
        return factor * ratio[:, None]


def _over_columns(sums: Tensor, bucket: Bucket) -> Steps[Tensor]:
    """(N, K) sums over whole rows: where columns are split, the sum of all ranks' sums, in rank order."""
    if bucket.layout.axis is not Axis.COLUMNS:
        return sums
    group = bucket.group.named(f"row statistics of {bucket.name}")
    gathered = sums.new_empty(group.size, sums.numel())
    handle = group.all_gather(gathered.unbind(), sums.flatten())
    yield
    handle.wait()
    return gathered.sum(dim=0).view(sums.shape)


def _over_rows(values: Tensor, selection: RowSelection, bucket: Bucket) -> Steps[Tensor]:
    """(2, N) sums over the rows of whole matrices, in global row order, of (2, N, K) values of this rank."""
    if bucket.layout.axis is not Axis.ROWS:
        return values.sum(dim=2)
    num_matrices = bucket.num_matrices
    group = bucket.group.named(f"row statistics of {bucket.name}")
    # The counts travel along: how many rows another rank was admitted is known to that rank alone.
    message = torch.cat([selection.count.to(values.dtype), values.flatten()])
    lengths = [num_matrices * (1 + 2 * slots) for slots in bucket.slots_by_rank]
    gathered = values.new_empty(sum(lengths))
    pieces = split(gathered, lengths)
    handle = group.all_gather(pieces, message)
    yield
    handle.wait()
    count_by_rank = torch.stack([piece[:num_matrices] for piece in pieces]).long()
    by_row = torch.cat([piece[num_matrices:].view(2, num_matrices, -1) for piece in pieces], dim=2)
    # Every rank holds its first count values; compacted they stand in global row order, whatever W is.
    source, valid = compact(count_by_rank, bucket.first_slot, bucket.total_rows)
    return torch.where(valid, by_row.gather(2, source.expand(2, -1, -1)), 0).sum(dim=2)
