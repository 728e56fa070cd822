"""Exchanges that need no plug-in: whole matrices on one rank, and replicated matrices (DDP)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dion_core.collectives import split
from dion_core.newton_schulz import Orthogonalizer
from dion_core.rows import Rows, RowSelection
from dion_core.steps import Steps, done
from dion_core.transport import Bucket, Exchange, Traffic


def _whole_buffer(bucket: Bucket, slot: Tensor) -> Rows:
    values = torch.empty(slot.numel(), bucket.shape[1], dtype=bucket.dtype, device=bucket.device)
    return Rows(values, slot)


def _slots(bucket: Bucket) -> Tensor:
    """(N, T) int64: matrix after matrix, row after row."""
    shape = (bucket.num_matrices, bucket.total_rows)
    return torch.arange(bucket.num_matrices * bucket.total_rows, device=bucket.device).view(shape)


def _matrices(rows: Rows, selection: RowSelection) -> Tensor:
    """(N, T, C): the chosen rows of all matrices, in place; rows past the count are zero."""
    return rows.values.view(*rows.slot.shape, -1).masked_fill_(~selection.valid()[:, :, None], 0)


@dataclass(frozen=True)
class LocalExchange(Exchange):
    """Matrices that lie whole on this rank, which also orthogonalizes them: the oracle of all other exchanges."""

    bucket: Bucket

    def reserve(self, selection: RowSelection) -> Rows:
        return _whole_buffer(self.bucket, self._slot)

    def orthogonalize(self, rows: Rows, selection: RowSelection, orthogonalizer: Orthogonalizer) -> Steps[Rows]:
        results = orthogonalizer(_matrices(rows, selection))
        return done(Rows(results.reshape(-1, self.bucket.shape[1]), rows.slot))

    def traffic(self) -> Traffic:
        return Traffic()

    @cached_property
    def _slot(self) -> Tensor:
        return _slots(self.bucket)


@dataclass(frozen=True)
class ReplicatedExchange(Exchange):
    """Matrices that every rank holds whole: each rank orthogonalizes those it owns, and all gather the results."""

    bucket: Bucket

    def reserve(self, selection: RowSelection) -> Rows:
        return _whole_buffer(self.bucket, self._slot)

    def orthogonalize(self, rows: Rows, selection: RowSelection, orthogonalizer: Orthogonalizer) -> Steps[Rows]:
        bucket, group = self.bucket, self.bucket.group
        results = orthogonalizer(_matrices(rows, selection).index_select(0, self._owned)).flatten()
        gathered = torch.empty_like(rows.values)
        elements = bucket.total_rows * bucket.shape[1]
        pieces = split(gathered.flatten(), [len(bucket.owned(rank)) * elements for rank in range(group.size)])
        handle = group.all_gather(pieces, results)
        yield
        handle.wait()
        return Rows(gathered, self._gathered_slot)

    def traffic(self) -> Traffic:
        bucket, group = self.bucket, self.bucket.group
        owned = len(bucket.owned(group.rank)) * bucket.total_rows * bucket.shape[1] * bucket.dtype.itemsize
        return Traffic(back=(owned,) * group.size, collectives=1)

    @cached_property
    def _slot(self) -> Tensor:
        return _slots(self.bucket)

    @cached_property
    def _owned(self) -> Tensor:
        owned = self.bucket.owned(self.bucket.group.rank)
        return torch.tensor(owned, dtype=torch.int64, device=self.bucket.device)

    @cached_property
    def _gathered_slot(self) -> Tensor:
        """(N, T) int64: the same rows where results lie owner after owner."""
        bucket = self.bucket
        order = [matrix for rank in range(bucket.group.size) for matrix in bucket.owned(rank)]
        slot = torch.empty_like(self._slot)
        slot[torch.tensor(order, dtype=torch.int64, device=bucket.device)] = self._slot
        return slot
