"""Where pooled rows lie: one chunk a pair of ranks, winners back to back, their counts in a header.

    chunk from rank r to owner d:  [ header: int32 counts | matrix 0: W W W | matrix 1: W | spare ]

A pair whose budget and header would be no shorter than all slots that the sender can offer is not packed: its
chunk holds every such slot in a fixed place, without a header, and nothing of it can be deferred.

Legend: N matrices, B owned matrices, C columns, K slots a matrix, W ranks, T rows of an assembled matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dion_core.transport import Bucket

COUNT_BYTES = 4
"""Bytes of one count in the header."""

Budgets = Sequence[Sequence[int]]
"""budgets[source][owner]: rows that the pair may send in a step."""


def offered_rows(bucket: Bucket, source: int, owner: int) -> int:
    """The most rows that a rank can have chosen of the matrices that another one owns."""
    return sum(bucket.offered(source, matrix) for matrix in bucket.owned(owner))


@dataclass(frozen=True)
class PoolPlan:
    """Sizes and places of all chunks of a bucket, for given budgets."""

    bucket: Bucket
    budgets: Budgets
    always_pack: bool

    @property
    def rank(self) -> int:
        return self.bucket.layout.group.rank

    @cached_property
    def owned(self) -> tuple[int, ...]:
        """The matrices that this rank owns."""
        return self.bucket.owned(self.rank)

    def header_rows(self, owner: int) -> int:
        """Rows that the counts of an owner's matrices take."""
        row_bytes = self.bucket.shape[1] * self.bucket.dtype.itemsize
        return -(-COUNT_BYTES * len(self.bucket.owned(owner)) // row_bytes)

    def packed(self, source: int, owner: int) -> bool:
        """Whether the pair sends a pool with a header, or every slot that the source can offer."""
        offered = offered_rows(self.bucket, source, owner)
        shorter = self.budgets[source][owner] + self.header_rows(owner) < offered
        return offered > 0 and (shorter or self.always_pack)

    def capacity(self, source: int, owner: int) -> int:
        """Rows of momentum that the pair can send in a step."""
        offered = offered_rows(self.bucket, source, owner)
        return min(self.budgets[source][owner], offered) if self.packed(source, owner) else offered

    def header(self, source: int, owner: int) -> int:
        """Rows of the pair's header; 0 if it is not packed."""
        return self.header_rows(owner) if self.packed(source, owner) else 0

    def forward_rows(self) -> tuple[list[int], list[int]]:
        """Rows of the chunks that this rank sends, by owner, and that it receives as an owner, by source."""
        sent = [self.header(self.rank, owner) + self.capacity(self.rank, owner) for owner in self._ranks]
        received = [self.header(source, self.rank) + self.capacity(source, self.rank) for source in self._ranks]
        return sent, received

    def back_rows(self) -> tuple[list[int], list[int]]:
        """The same for the results: rows that come back, by owner, and that are sent back, by source."""
        returned = [self.capacity(self.rank, owner) for owner in self._ranks]
        sent_back = [self.capacity(source, self.rank) for source in self._ranks]
        return returned, sent_back

    @property
    def _ranks(self) -> range:
        return range(self.bucket.layout.group.size)


@dataclass(frozen=True)
class SenderTables:
    """Static tables of a sender, by matrix (N,): turn counts into slots."""

    plan: PoolPlan

    @cached_property
    def order(self) -> Tensor:
        """(N,) int64: matrices in the order of the buffer, by owner and number."""
        bucket = self.plan.bucket
        ranks = range(bucket.layout.group.size)
        return self._tensor([matrix for owner in ranks for matrix in bucket.owned(owner)])

    @cached_property
    def pool_start(self) -> Tensor:
        """(N,) int64: the place in `order` where the pool of each matrix begins."""
        bucket = self.plan.bucket
        before = [sum(len(bucket.owned(rank)) for rank in range(owner)) for owner in bucket.owners]
        return self._tensor(before)

    @cached_property
    def forward_first(self) -> Tensor:
        """(N,) int64: the first row of momentum in the chunk to each matrix's owner."""
        sent, _ = self.plan.forward_rows()
        header = [self.plan.header(self.plan.rank, owner) for owner in range(len(sent))]
        return self._tensor([sum(sent[:owner]) + header[owner] for owner in self.plan.bucket.owners])

    @cached_property
    def back_first(self) -> Tensor:
        """(N,) int64: the first row of the chunk that comes back from each matrix's owner."""
        returned, _ = self.plan.back_rows()
        return self._tensor([sum(returned[:owner]) for owner in self.plan.bucket.owners])

    @cached_property
    def packed(self) -> Tensor:
        """(N,) bool: whether the pair is packed."""
        owners = self.plan.bucket.owners
        return self._tensor([self.plan.packed(self.plan.rank, owner) for owner in owners]).bool()

    @cached_property
    def capacity(self) -> Tensor:
        """(W,) int64: rows that this rank can send to each owner."""
        ranks = range(self.plan.bucket.layout.group.size)
        return self._tensor([self.plan.capacity(self.plan.rank, owner) for owner in ranks])

    @cached_property
    def header_place(self) -> Tensor:
        """(N, 4) int64: bytes of the send buffer that hold each matrix's count; empty rows if none is packed."""
        plan, bucket = self.plan, self.plan.bucket
        row_bytes = bucket.shape[1] * bucket.dtype.itemsize
        sent, _ = plan.forward_rows()
        first = [
            sum(sent[:owner]) * row_bytes + COUNT_BYTES * bucket.owned(owner).index(matrix)
            for matrix, owner in enumerate(bucket.owners)
        ]
        return self._tensor(first)[:, None] + torch.arange(COUNT_BYTES, device=bucket.device)

    def offsets(self, count: Tensor) -> Tensor:
        """(N,) int64: rows of the same pool before each matrix's, for counts (N,) (packed) or all slots (not)."""
        used = torch.where(self.packed, count, self._offered)[self.order]
        before = used.cumsum(0) - used
        offsets = torch.empty_like(before)
        offsets[self.order] = before
        return offsets - before[self.pool_start.clamp(max=max(len(before) - 1, 0))]

    @cached_property
    def _offered(self) -> Tensor:
        bucket = self.plan.bucket
        return self._tensor([bucket.offered(self.plan.rank, matrix) for matrix in range(bucket.num_matrices)])

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.plan.bucket.device)


@dataclass(frozen=True)
class OwnerTables:
    """Static tables of an owner, by source and owned matrix: find the rows in what was received."""

    plan: PoolPlan

    @cached_property
    def forward_first(self) -> Tensor:
        """(W, 1) int64: the first row of momentum in the chunk of each source."""
        _, received = self.plan.forward_rows()
        header = [self.plan.header(source, self.plan.rank) for source in range(len(received))]
        return self._tensor([sum(received[:source]) + header[source] for source in range(len(received))])

    @cached_property
    def back_first(self) -> Tensor:
        """(W, 1) int64: the first row of the chunk that goes back to each source."""
        _, sent_back = self.plan.back_rows()
        return self._tensor([sum(sent_back[:source]) for source in range(len(sent_back))])

    @cached_property
    def packed(self) -> Tensor:
        """(W, 1) bool: whether the pair is packed."""
        ranks = range(self.plan.bucket.layout.group.size)
        return self._tensor([self.plan.packed(source, self.plan.rank) for source in ranks]).bool()

    @cached_property
    def capacity(self) -> Tensor:
        """(W, 1) int64: rows of momentum in the chunk of each source."""
        ranks = range(self.plan.bucket.layout.group.size)
        return self._tensor([self.plan.capacity(source, self.plan.rank) for source in ranks])

    @cached_property
    def header_place(self) -> Tensor:
        """(W, B, 4) int64: bytes of the receive buffer that hold the counts; byte 0 where a pair is not packed."""
        plan, bucket = self.plan, self.plan.bucket
        row_bytes = bucket.shape[1] * bucket.dtype.itemsize
        _, received = plan.forward_rows()
        first = [
            [
                sum(received[:source]) * row_bytes + COUNT_BYTES * place if plan.packed(source, plan.rank) else 0
                for place in range(len(plan.owned))
            ]
            for source in range(len(received))
        ]
        table = torch.tensor(first, dtype=torch.int64).view(len(received), len(plan.owned), 1)
        return (table + torch.arange(COUNT_BYTES)).to(bucket.device)

    @cached_property
    def owned(self) -> Tensor:
        """(B,) int64: the matrices that this rank owns (a list as an index would be copied to the device each time)."""
        return torch.tensor(self.plan.owned, dtype=torch.int64, device=self.plan.bucket.device)

    @cached_property
    def slot_start(self) -> Tensor:
        """(W, B) int64: rows before each matrix's in a chunk that is not packed."""
        bucket = self.plan.bucket
        ranks = range(bucket.layout.group.size)
        offered = [[bucket.offered(source, matrix) for matrix in self.plan.owned] for source in ranks]
        table = torch.tensor(offered, dtype=torch.int64).view(len(ranks), len(self.plan.owned))
        return (table.cumsum(1) - table).to(bucket.device)

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.plan.bucket.device)[:, None]
