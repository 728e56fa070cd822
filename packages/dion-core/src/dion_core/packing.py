"""Arithmetic of packed rows that several transports need: slots at the sender, whole matrices at the owner.

A sender's buffer holds its slots ordered by owner, then by matrix. An owner receives one piece from every rank,
each holding the slots of the matrices that it owns. All sizes are known at construction; how many slots are
used is known on the device alone.

Legend: N matrices, B owned matrices, C columns, K slots a matrix, W ranks, S rows of a buffer, T rows of an
assembled matrix.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, Self

import torch
from torch import Tensor

from dion_core.collectives import split
from dion_core.layout import Axis
from dion_core.newton_schulz import Orthogonalizer
from dion_core.ops import collect, spread
from dion_core.rows import Rows, RowSelection
from dion_core.steps import Steps
from dion_core.transport import Bucket, Exchange, Traffic

SlotRule = Callable[[int, int], int]
"""How many slots (rank, matrix) has."""


def on_device(tables: Iterable[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Each table as (length,) int64 on the device, all brought there by one copy that the host does not wait for."""
    numbers, starts = array("q"), []
    for table in tables:
        starts.append((len(numbers), len(table)))
        numbers.extend(table)
        if (
            len(numbers) % 2
        ):  # tables start at multiples of 16 bytes, whatever their lengths: kernels are compiled for it
            numbers.append(0)
    if not numbers:
        return [torch.empty(0, dtype=torch.int64, device=device) for _ in starts]
    host = torch.frombuffer(numbers, dtype=torch.int64)
    # The host allocator of torch keeps pinned memory from reuse until the copy is done.
    there = host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
    return [there[start : start + length] for start, length in starts]


@dataclass(frozen=True)
class SlotTables:
    """Where slots lie, int64 on the device.

    Attributes:
        first: (N,) the row of the send buffer where the slots of each matrix start.
        used: (N,) how many slots each matrix has.
        start: (W, B) the row of the receive buffer where every sender's slots of an owned matrix start.
    """

    first: Tensor
    used: Tensor
    start: Tensor


@dataclass(eq=False)
class SlotPlan:
    """Where every slot lies in the buffers of a bucket, for a given number of slots by rank and matrix.

    Attributes:
        slots: (W, N) int64 on the host, how many slots each rank has of each matrix.
    """

    bucket: Bucket
    slots: Tensor

    @classmethod
    def of(cls, bucket: Bucket, rule: SlotRule) -> Self:
        """The plan with as many slots as the rule says."""
        matrices, ranks = range(bucket.num_matrices), range(bucket.group.size)
        slots = [rule(rank, matrix) for rank in ranks for matrix in matrices]
        return cls(bucket, torch.tensor(slots, dtype=torch.int64).view(len(ranks), len(matrices)))

    @property
    def rank(self) -> int:
        return self.bucket.group.rank

    @cached_property
    def slots_by_pair(self) -> Tensor:
        """(W, W) int64 on the host: how many slots each rank has of the matrices of each owner."""
        size = self.bucket.group.size
        return torch.zeros(size, size, dtype=torch.int64).index_add_(1, self._owner, self.slots)

    @cached_property
    def chunks(self) -> Tensor:
        """(W, W) int64 on the host: how many rows each rank sends to each owner."""
        return self.slots_by_pair

    @cached_property
    def elements_sent(self) -> list[int]:
        """Elements that this rank sends to every owner, by owner."""
        columns = self.bucket.layout.columns(self.rank)
        rows: list[int] = self.chunks[self.rank].tolist()
        return [length * columns for length in rows]

    @cached_property
    def elements_received(self) -> list[int]:
        """Elements that this rank receives as an owner, by sender."""
        columns = self.bucket.layout.columns
        rows: list[int] = self.chunks[:, self.rank].tolist()
        return [length * columns(source) for source, length in enumerate(rows)]

    @cached_property
    def num_slots(self) -> int:
        """S: rows of this rank's send buffer."""
        return int(self.chunks[self.rank].sum())

    @cached_property
    def tables(self) -> SlotTables:
        """The tables on the device, of this plan alone; `bring` does it for many in one copy."""
        bring([self])
        return self.tables

    @cached_property
    def slot(self) -> Tensor:
        """(N, K) int64: row of the send buffer for entry k of matrix n.

        Where this rank offers fewer than K rows of a matrix, the rest point to the spare row S, which is not sent.
        """
        most = self.bucket.slots_by_rank[self.rank]
        place = torch.arange(most, device=self.bucket.device)
        first, used = self.tables.first[:, None], self.tables.used[:, None]
        return torch.where(place < used, first + place, self.num_slots)

    def host_tables(self) -> list[Tensor]:
        """What `SlotTables` holds, on the host and flat."""
        bucket, rank = self.bucket, self.rank
        order = torch.tensor(bucket.by_owner, dtype=torch.int64)
        owner, slots = self._owner, self.slots[rank]
        before = slots[order].cumsum(0) - slots[order]  # in the order of the buffer, without spare rows
        before = torch.empty_like(before).scatter_(0, order, before)
        spare = _before(self.chunks[rank], 0) - _before(self.slots_by_pair[rank], 0)
        owned = self.slots[:, list(bucket.owned(rank))]
        start = _before(self.chunks[:, rank], 0)[:, None] + _before(owned, 1)
        return [before + spare[owner], slots, start.flatten()]

    @cached_property
    def _owner(self) -> Tensor:
        return torch.tensor(self.bucket.owners, dtype=torch.int64)


def bring(plans: Sequence[SlotPlan]) -> None:
    """Brings the tables of all plans, which are of one device, there in one copy."""
    if not plans:
        return
    tables = iter(on_device([each.tolist() for plan in plans for each in plan.host_tables()], plans[0].bucket.device))
    for plan in plans:
        first, used, start = next(tables), next(tables), next(tables)
        plan.tables = SlotTables(first, used, start.view(plan.bucket.group.size, -1))


def _before(lengths: Tensor, dim: int) -> Tensor:
    """Where pieces of these lengths start that lie one behind the other along `dim`."""
    return lengths.cumsum(dim) - lengths


def binomial_capacity(expected_rows: float, world_size: int) -> float:
    """The slots to provide over the rows expected, if winners scatter at random: 1 + 2 * sqrt((1 - 1 / W) / n).

    Two standard deviations of a binomial count above its mean n (Dion2 review, pooled capped transport).
    """
    return 1 + 2 * math.sqrt((1 - 1 / world_size) / expected_rows)


class Assembly(Protocol):
    """Turns what an owner received into whole matrices, and results into what it sends back."""

    def assemble(self, received: Tensor, count_by_rank: Tensor) -> Tensor:
        """(B, T, C) matrices in fresh storage, of the flat elements received; rows that do not exist are zero."""

    def disassemble(self, matrices: Tensor, count_by_rank: Tensor) -> Tensor:
        """The flat elements to send back: every row in the place where it was received."""


@dataclass(frozen=True)
class RowAssembly:
    """Whole matrices of rows that lie on several ranks, in rank order, hence in global row order."""

    plan: SlotPlan

    def assemble(self, received: Tensor, count_by_rank: Tensor) -> Tensor:
        plan = self.plan
        rows = received.view(-1, plan.bucket.shape[1])
        return collect(rows, count_by_rank, plan.tables.start, plan.bucket.total_rows, plan.bucket.owned_index)

    def disassemble(self, matrices: Tensor, count_by_rank: Tensor) -> Tensor:
        num_rows = sum(self.plan.elements_received) // self.plan.bucket.shape[1]
        return spread(matrices, count_by_rank, self.plan.tables.start, num_rows, self.plan.bucket.owned_index)


@dataclass(frozen=True)
class ColumnAssembly:
    """Whole matrices of columns that lie on several ranks: each sends the same rows, its columns of them."""

    plan: SlotPlan

    def assemble(self, received: Tensor, count_by_rank: Tensor) -> Tensor:
        pieces = split(received, self.plan.elements_received)
        matrices = torch.cat([piece.view(self._shape(rank)) for rank, piece in enumerate(pieces)], dim=2)
        count = count_by_rank[0].index_select(0, self.plan.bucket.owned_index)
        row = torch.arange(self.plan.bucket.total_rows, device=received.device)
        return matrices.masked_fill_((row >= count[:, None])[:, :, None], 0)

    def disassemble(self, matrices: Tensor, count_by_rank: Tensor) -> Tensor:
        widths = [self._shape(rank)[2] for rank in range(len(count_by_rank))]
        return torch.cat([piece.flatten() for piece in torch.split_with_sizes(matrices, widths, dim=2)])

    def _shape(self, rank: int) -> tuple[int, int, int]:
        bucket = self.plan.bucket
        return len(bucket.owned(self.plan.rank)), bucket.total_rows, bucket.layout.columns(rank)


def assembly(plan: SlotPlan) -> Assembly:
    """The assembly that fits the axis that is split."""
    return ColumnAssembly(plan) if plan.bucket.layout.axis is Axis.COLUMNS else RowAssembly(plan)


class SlotExchange(Exchange):
    """Rows in slots whose places a `SlotPlan` gives; the owner takes the used ones, by the counts.

    One all-to-all takes the rows to the owners and one takes the results back. A transport sets `plan` once, or
    anew in each step before rows are reserved.
    """

    def __init__(self, bucket: Bucket, plan: SlotPlan) -> None:
        self.bucket = bucket
        self.plan = plan

    def reserve(self, selection: RowSelection) -> Rows:
        bucket = self.bucket
        columns = bucket.layout.columns(bucket.group.rank)
        # One row more than is sent takes what has no slot.
        values = torch.empty(self.plan.num_slots + 1, columns, dtype=bucket.dtype, device=bucket.device)
        return Rows(values, self.plan.slot)

    def orthogonalize(self, rows: Rows, selection: RowSelection, orthogonalizer: Orthogonalizer) -> Steps[Rows]:
        group, whole = self.bucket.group, assembly(self.plan)
        sent, received = self.plan.elements_sent, self.plan.elements_received
        arrived = rows.values.new_empty(sum(received))
        handle = group.all_to_all(arrived, rows.values[:-1].flatten(), received, sent)
        yield
        handle.wait()
        matrices = whole.assemble(arrived, selection.count_by_rank)
        results = whole.disassemble(orthogonalizer(matrices), selection.count_by_rank)
        returned = torch.empty_like(rows.values)
        handle = group.all_to_all(returned[:-1].flatten(), results, sent, received)
        yield
        handle.wait()
        return Rows(returned, rows.slot)

    def traffic(self) -> Traffic:
        size = torch.empty(0, dtype=self.bucket.dtype).element_size()
        forward = tuple(count * size for count in self.plan.elements_sent)
        back = tuple(count * size for count in self.plan.elements_received)
        return Traffic(forward, back, collectives=2)
