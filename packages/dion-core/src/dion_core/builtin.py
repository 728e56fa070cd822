"""Exchanges that need no plug-in: whole matrices on one rank, and replicated matrices (DDP)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dion_core.collectives import split
from dion_core.newton_schulz import Orthogonalizer
from dion_core.rows import Rows, RowSelection
from dion_core.steps import Steps
from dion_core.transport import Bucket, Exchange, Traffic


def _whole_buffer(bucket: Bucket) -> Rows:
    shape = (bucket.num_matrices, bucket.total_rows)
    slot = torch.arange(bucket.num_matrices * bucket.total_rows, device=bucket.device).view(shape)
    values = torch.empty(slot.numel(), bucket.shape[1], dtype=bucket.dtype, device=bucket.device)
    return Rows(values, slot)


def _matrices(rows: Rows, selection: RowSelection, numbers: Tensor) -> Tensor:
    """(B, K, C): the chosen rows of the matrices `numbers`; rows past the count are zero."""
    values = rows.values.view(*rows.slot.shape, -1).index_select(0, numbers)
    return values.masked_fill_(~selection.valid()[numbers][:, :, None], 0)


@dataclass(frozen=True)
class LocalExchange(Exchange):
    """Matrices that lie whole on this rank, which also orthogonalizes them. The oracle of every other exchange."""

    bucket: Bucket

    def reserve(self, selection: RowSelection) -> Rows:
        return _whole_buffer(self.bucket)

    def orthogonalize(self, rows: Rows, selection: RowSelection, orthogonalizer: Orthogonalizer) -> Steps[Rows]:
        numbers = torch.arange(self.bucket.num_matrices, device=self.bucket.device)
        results = orthogonalizer(_matrices(rows, selection, numbers))
        return Rows(results.reshape(-1, self.bucket.shape[1]), rows.slot)
        yield

    def traffic(self) -> Traffic:
        return Traffic()


@dataclass(frozen=True)
class ReplicatedExchange(Exchange):
    """Matrices that every rank holds whole: each rank orthogonalizes those it owns, and all gather the results."""

    bucket: Bucket

    def reserve(self, selection: RowSelection) -> Rows:
        return _whole_buffer(self.bucket)

    def orthogonalize(self, rows: Rows, selection: RowSelection, orthogonalizer: Orthogonalizer) -> Steps[Rows]:
        bucket, group = self.bucket, self.bucket.group
        by_owner = [bucket.owned(rank) for rank in range(group.size)]
        mine = torch.tensor(by_owner[group.rank], dtype=torch.int64, device=bucket.device)
        results = orthogonalizer(_matrices(rows, selection, mine)).flatten()
        gathered = torch.empty_like(rows.values)
        elements = bucket.total_rows * bucket.shape[1]
        pieces = split(gathered.flatten(), [len(owned) * elements for owned in by_owner])
        handle = group.all_gather(pieces, results)
        yield
        handle.wait()
        order = [matrix for owned in by_owner for matrix in owned]
        slot = torch.empty_like(rows.slot)
        slot[torch.tensor(order, dtype=torch.int64, device=bucket.device)] = rows.slot
        return Rows(gathered, slot)

    def traffic(self) -> Traffic:
        bucket, group = self.bucket, self.bucket.group
        size = torch.empty(0, dtype=bucket.dtype).element_size()
        owned = len(bucket.owned(group.rank)) * bucket.total_rows * bucket.shape[1] * size
        return Traffic(back=(owned,) * group.size, collectives=1)
