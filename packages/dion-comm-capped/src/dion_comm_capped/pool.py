"""Where pooled rows lie: one chunk a pair of ranks, winners back to back, their counts in a header.

    chunk from rank r to owner d:  [ header: int32 counts | matrix 0: W W W | matrix 1: W | spare ]

A pair whose budget and header would be no shorter than all slots that the sender can offer is not packed: its
chunk holds every such slot in a fixed place, without a header, and nothing of it can be deferred.

Legend: N matrices, B owned matrices, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from torch import Tensor

from dion_core.packing import on_device, piece_starts
from dion_core.transport import Bucket

COUNT_BYTES = 4
"""Bytes of one count in the header."""

Budgets = Sequence[Sequence[int]]
"""budgets[source][d]: rows that the source may send in a step to rank `bucket.working[d]`."""


@dataclass(frozen=True)
class PoolPlan:
    """Sizes and places of all chunks of a bucket, for given budgets."""

    bucket: Bucket
    budgets: Budgets
    always_pack: bool

    @property
    def rank(self) -> int:
        return self.bucket.layout.group.rank

    def header_rows(self, owner: int) -> int:
        """Rows that the counts of an owner's matrices take."""
        return -(-COUNT_BYTES * len(self.bucket.owned(owner)) // self._row_bytes)

    def packed(self, source: int, owner: int) -> bool:
        """Whether the pair sends a pool with a header, or every slot that the source can offer."""
        offered = self._of_pair(self.bucket.offered_by_pair, source, owner)
        if not offered:
            return False
        return self.always_pack or self._of_pair(self.budgets, source, owner) + self.header_rows(owner) < offered

    def capacity(self, source: int, owner: int) -> int:
        """Rows of momentum that the pair can send in a step."""
        offered = self._of_pair(self.bucket.offered_by_pair, source, owner)
        return min(self._of_pair(self.budgets, source, owner), offered) if self.packed(source, owner) else offered

    def header(self, source: int, owner: int) -> int:
        """Rows of the pair's header; 0 if it is not packed."""
        return self.header_rows(owner) if self.packed(source, owner) else 0

    @cached_property
    def forward_rows(self) -> tuple[list[int], list[int]]:
        """Rows of the chunks that this rank sends, by owner, and that it receives as an owner, by source."""
        sent, received = ([self.header(*pair) + self.capacity(*pair) for pair in pairs] for pairs in self._pairs)
        return sent, received

    @cached_property
    def back_rows(self) -> tuple[list[int], list[int]]:
        """The same for the results: rows that come back, by owner, and that are sent back, by source."""
        returned, sent_back = ([self.capacity(*pair) for pair in pairs] for pairs in self._pairs)
        return returned, sent_back

    def chunks(self) -> tuple[Chunks, Chunks]:
        """The chunks between this rank and every owner, and those between every source and this rank."""
        tables: list[list[int]] = []
        for pairs, forward, back in zip(self._pairs, self.forward_rows, self.back_rows, strict=True):
            start = piece_starts(forward)
            tables += [
                back,
                [row + self.header(*pair) for row, pair in zip(start, pairs, strict=True)],
                piece_starts(back),
                [
                    row * self._row_bytes if self.packed(*pair) else NO_HEADER
                    for row, pair in zip(start, pairs, strict=True)
                ],
            ]
        there = on_device(tables, self.bucket.device)
        return Chunks(*there[:4]), Chunks(*there[4:])

    def _of_pair(self, by_pair: Sequence[Sequence[int]], source: int, owner: int) -> int:
        place = self.bucket.place_of_owner.get(owner)
        return 0 if place is None else by_pair[source][place]

    @property
    def _row_bytes(self) -> int:
        return self.bucket.shape[1] * self.bucket.dtype.itemsize

    @property
    def _pairs(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The pairs (source, owner) of which this rank is the source, and those of which it is the owner."""
        ranks = range(self.bucket.layout.group.size)
        return [(self.rank, owner) for owner in ranks], [(source, self.rank) for source in ranks]


NO_HEADER = -1
"""In place of a header's first byte, where a pair is not packed."""


@dataclass(frozen=True)
class Chunks:
    """The chunks of one rank in its buffers, by the other rank of the pair, each (W,) int64.

    Attributes:
        capacity: rows of momentum that fit.
        forward_first: the first of them in the buffer on the way to the owner.
        back_first: the first row of the chunk on the way back.
        header_first: the first byte of the header, or `NO_HEADER` where the pair is not packed.
    """

    capacity: Tensor
    forward_first: Tensor
    back_first: Tensor
    header_first: Tensor

    @property
    def packed(self) -> Tensor:
        """(W,) bool: whether the pair is packed."""
        return self.header_first >= 0


@dataclass(frozen=True)
class PoolTables:
    """What is the same for all budgets, int64 on the device.

    Attributes:
        owner: (N,) of every matrix.
        place: (N,) the place of the owner among the D that own matrices: `Bucket.working`.
        number: (N,) its place among those of the same owner.
        offered: (N,) the most rows of it that this rank can have chosen.
        order: (N,) the matrices by owner, then by number.
        pool_start: (W + 1,) where those of each owner start in `order`, and end.
        owned: (B,) the matrices that this rank owns.
        slot_start: (W, B) rows before those of an owned matrix in a source's chunk that is not packed.
    """

    owner: Tensor
    place: Tensor
    number: Tensor
    offered: Tensor
    order: Tensor
    pool_start: Tensor
    owned: Tensor
    slot_start: Tensor

    @classmethod
    def of(cls, bucket: Bucket) -> PoolTables:
        """The tables of a bucket, seen from its rank."""
        rank, ranks = bucket.group.rank, range(bucket.group.size)
        pools = [bucket.owned(owner) for owner in ranks]
        numbers = {matrix: number for pool in pools for number, matrix in enumerate(pool)}
        owner, place, number, offered, order, pool_start, owned, slot_start = on_device(
            [
                bucket.owners,
                [bucket.place_of_owner[owner] for owner in bucket.owners],
                [numbers[matrix] for matrix in range(bucket.num_matrices)],
                [bucket.offered(rank, matrix) for matrix in range(bucket.num_matrices)],
                [matrix for pool in pools for matrix in pool],
                list(accumulate(map(len, pools), initial=0)),
                pools[rank],
                [
                    row
                    for source in ranks
                    for row in piece_starts([bucket.offered(source, matrix) for matrix in pools[rank]])
                ],
            ],
            bucket.device,
        )
        slot_start = slot_start.view(len(ranks), len(pools[rank]))
        return cls(owner, place, number, offered, order, pool_start, owned, slot_start)
