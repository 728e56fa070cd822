"""What is done to the orthogonalized rows before they are applied: nothing, or NorMuon's normalization.

A normalizer gives one factor a row; the rows themselves are read again only where they are applied.
Legend: N matrices, R local rows, K slots a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dion_core.collectives import Group, split
from dion_core.layout import Axis
from dion_core.neurons import message_lengths
from dion_core.ops import neuron_factors_, neuron_factors_of_rows_, neuron_scale, sums_of_squares
from dion_core.rows import Rows, RowSelection, accumulation_dtype
from dion_core.steps import Steps
from dion_core.transport import Bucket


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
        columns = bucket.shape[1]
        if bucket.layout.column_groups:
            sums = sums_of_squares(rows, selection)
            for group in bucket.layout.column_groups:
                sums = yield from _over_columns(sums, group, bucket.name)
            factor, message = neuron_factors_(second_moment, selection, sums, columns=columns, beta2=beta2)
        else:
            factor, message = neuron_factors_of_rows_(second_moment, selection, rows, columns=columns, beta2=beta2)
        if bucket.layout.axis is not Axis.ROWS:  # this rank has all rows
            slots = factor.shape[1]
            return neuron_scale(factor, message, slots=[slots], first_slot=bucket.first_slot[:1], total=slots)
        # The counts travel along: how many rows another rank was admitted is known to that rank alone.
        gathered = yield from _gather(message, bucket)
        return neuron_scale(
            factor, gathered, slots=bucket.slots_by_rank, first_slot=bucket.first_slot, total=bucket.total_rows
        )


def _over_columns(sums: Tensor, group: Group, name: str) -> Steps[Tensor]:
    """(N, K) sums over whole rows: the sum of all ranks' sums, in rank order."""
    group = group.named(f"row statistics of {name}")
    gathered = sums.new_empty(group.size, sums.numel())
    handle = group.all_gather(gathered.unbind(), sums.flatten())
    yield
    handle.wait()
    return gathered.sum(dim=0).view(sums.shape)


def _gather(message: Tensor, bucket: Bucket) -> Steps[Tensor]:
    """The messages of all ranks, flat, by rank."""
    group = bucket.group.named(f"row statistics of {bucket.name}")
    lengths = message_lengths(bucket.num_matrices, bucket.slots_by_rank)
    gathered = message.new_empty(sum(lengths))
    handle = group.all_gather(split(gathered, lengths), message)
    yield
    handle.wait()
    return gathered
