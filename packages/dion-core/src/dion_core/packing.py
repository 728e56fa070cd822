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
from typing import Protocol

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
class SlotPlan:
    """Where every slot lies in the buffers of a bucket, for a fixed number of slots a rank and matrix."""

    bucket: Bucket
    slots: SlotRule

    @property
    def rank(self) -> int:
        return self.bucket.group.rank

    @cached_property
    def owned(self) -> tuple[int, ...]:
        """The matrices that this rank owns."""
        return self.bucket.owned(self.rank)

    @cached_property
    def owned_index(self) -> Tensor:
        """(B,) int64: the matrices that this rank owns."""
        return torch.tensor(self.owned, dtype=torch.int64, device=self.bucket.device)

    def rows_between(self, source: int, owner: int) -> int:
        """How many rows rank `source` sends to rank `owner`: its slots of the matrices owned there."""
        return sum(self.slots(source, matrix) for matrix in self.bucket.owned(owner))

    @cached_property
    def elements_sent(self) -> list[int]:
        """Elements that this rank sends to every owner, by owner."""
        columns = self.bucket.layout.columns(self.rank)
        return [self.rows_between(self.rank, owner) * columns for owner in self._ranks]

    @cached_property
    def elements_received(self) -> list[int]:
        """Elements that this rank receives as an owner, by sender."""
        layout = self.bucket.layout
        return [self.rows_between(source, self.rank) * layout.columns(source) for source in self._ranks]

    @cached_property
    def num_slots(self) -> int:
        """S: rows of this rank's send buffer."""
        return sum(self.rows_between(self.rank, owner) for owner in self._ranks)

    @cached_property
    def slot(self) -> Tensor:
        """(N, K) int64: row of the send buffer for entry k of matrix n.

        Where this rank offers fewer than K rows of a matrix, the rest point to the spare row S, which is not sent.
        """
        bucket = self.bucket
        most = max((bucket.offered(self.rank, m) for m in range(bucket.num_matrices)), default=0)
        first, used = [0] * bucket.num_matrices, [0] * bucket.num_matrices
        chunk = 0
        for owner in self._ranks:
            row = chunk
            for matrix in bucket.owned(owner):
                first[matrix], used[matrix] = row, self.slots(self.rank, matrix)
                row += used[matrix]
            chunk += self.rows_between(self.rank, owner)
        starts, ends = torch.tensor([first, used], device=bucket.device).view(2, -1, 1)
        place = torch.arange(most, device=bucket.device)
        return torch.where(place < ends, starts + place, self.num_slots)

    @cached_property
    def start(self) -> Tensor:
        """(W, B) int64: the row of the receive buffer where every sender's slots of an owned matrix start."""
        table = torch.zeros(len(self._ranks), len(self.owned), dtype=torch.int64)
        chunk = 0
        for source in self._ranks:
            row = chunk
            for place, matrix in enumerate(self.owned):
                table[source, place] = row
                row += self.slots(source, matrix)
            chunk += self.rows_between(source, self.rank)
        return table.to(self.bucket.device)

    @property
    def _ranks(self) -> range:
        return range(self.bucket.group.size)


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
        return collect(rows, count_by_rank, plan.start, plan.bucket.total_rows, plan.owned_index)

    def disassemble(self, matrices: Tensor, count_by_rank: Tensor) -> Tensor:
        num_rows = sum(self.plan.elements_received) // self.plan.bucket.shape[1]
        return spread(matrices, count_by_rank, self.plan.start, num_rows, self.plan.owned_index)


@dataclass(frozen=True)
class ColumnAssembly:
    """Whole matrices of columns that lie on several ranks: each sends the same rows, its columns of them."""

    plan: SlotPlan

    def assemble(self, received: Tensor, count_by_rank: Tensor) -> Tensor:
        pieces = split(received, self.plan.elements_received)
        matrices = torch.cat([piece.view(self._shape(rank)) for rank, piece in enumerate(pieces)], dim=2)
        count = count_by_rank[0].index_select(0, self.plan.owned_index)
        row = torch.arange(self.plan.bucket.total_rows, device=received.device)
        return matrices.masked_fill_((row >= count[:, None])[:, :, None], 0)

    def disassemble(self, matrices: Tensor, count_by_rank: Tensor) -> Tensor:
        widths = [self._shape(rank)[2] for rank in range(len(count_by_rank))]
        return torch.cat([piece.flatten() for piece in torch.split_with_sizes(matrices, widths, dim=2)])

    def _shape(self, rank: int) -> tuple[int, int, int]:
        bucket = self.plan.bucket
        return len(self.plan.owned), bucket.total_rows, bucket.layout.columns(rank)


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
