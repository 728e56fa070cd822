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
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from dion_core.collectives import split
from dion_core.layout import Axis
from dion_core.newton_schulz import Orthogonalizer
from dion_core.ops import collect, places, spread_
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
        # Tables start at multiples of 16 bytes, whatever their lengths: kernels are compiled for that.
        if len(numbers) % 2:
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

    Plain numbers on the host: a step whose sizes are its own makes plans anew.

    Attributes:
        slots: slots[rank][matrix] = how many slots the rank has of the matrix.
    """

    bucket: Bucket
    slots: Sequence[Sequence[int]]

    @classmethod
    def of(cls, bucket: Bucket, rule: SlotRule) -> Self:
        """The plan with as many slots as the rule says."""
        ranks, matrices = range(bucket.group.size), range(bucket.num_matrices)
        return cls(bucket, [[rule(rank, matrix) for matrix in matrices] for rank in ranks])

    @property
    def rank(self) -> int:
        return self.bucket.group.rank

    def rows_between(self, source: int, owner: int) -> int:
        """How many rows rank `source` sends to rank `owner`: its slots of the matrices owned there."""
        return sum(map(self.slots[source].__getitem__, self.bucket.owned(owner)))

    @cached_property
    def rows_sent(self) -> list[int]:
        """Rows that this rank sends to every owner, by owner."""
        return [self.rows_between(self.rank, owner) for owner in self._ranks]

    @cached_property
    def rows_received(self) -> list[int]:
        """Rows that this rank receives as an owner, by sender."""
        return [self.rows_between(source, self.rank) for source in self._ranks]

    @cached_property
    def elements_sent(self) -> list[int]:
        """Elements that this rank sends to every owner, by owner."""
        columns = self.bucket.layout.columns(self.rank)
        return [rows * columns for rows in self.rows_sent]

    @cached_property
    def elements_received(self) -> list[int]:
        """Elements that this rank receives as an owner, by sender."""
        layout = self.bucket.layout
        return [rows * layout.columns(source) for source, rows in enumerate(self.rows_received)]

    @cached_property
    def num_slots(self) -> int:
        """S: rows of this rank's send buffer."""
        return sum(self.rows_sent)

    @cached_property
    def tables(self) -> SlotTables:
        """The tables on the device, brought there for this plan alone; `bring` does it for many in one copy."""
        bring([self])
        return self.tables

    @cached_property
    def slot(self) -> Tensor:
        """(N, K) int64: row of the send buffer for entry k of matrix n.

        Where this rank offers fewer than K rows of a matrix, the rest point to the spare row S, which is not sent.
        """
        place = torch.arange(self.bucket.slots_by_rank[self.rank], device=self.bucket.device)
        first, used = self.tables.first[:, None], self.tables.used[:, None]
        return torch.where(place < used, first + place, self.num_slots)

    def host_tables(self) -> tuple[list[int], Sequence[int], list[int]]:
        """What `SlotTables` holds, on the host and flat."""
        slots, owned = self.slots[self.rank], self.bucket.owned(self.rank)
        first, start = [0] * len(slots), list[int]()
        for owner, chunk in zip(self._ranks, piece_starts(self.rows_sent), strict=True):
            matrices = self.bucket.owned(owner)
            for matrix, before in zip(matrices, piece_starts(map(slots.__getitem__, matrices)), strict=True):
                first[matrix] = chunk + before
        for source, chunk in zip(self._ranks, piece_starts(self.rows_received), strict=True):
            start += [chunk + before for before in piece_starts(map(self.slots[source].__getitem__, owned))]
        return first, slots, start

    @property
    def _ranks(self) -> range:
        return range(self.bucket.group.size)


def bring(plans: Sequence[SlotPlan]) -> None:
    """Brings the tables of all plans, which are of one device, there in one copy."""
    if not plans:
        return
    tables = iter(on_device((table for plan in plans for table in plan.host_tables()), plans[0].bucket.device))
    for plan in plans:
        first, used, start = next(tables), next(tables), next(tables)
        shape = plan.bucket.group.size, len(plan.bucket.owned(plan.rank))
        plan.tables = SlotTables(first, used, start.view(shape))


def piece_starts(lengths: Iterable[int]) -> list[int]:
    """Where pieces of these lengths start that lie one behind the other."""
    return list(accumulate(lengths, initial=0))[:-1]


def binomial_capacity(expected_rows: float, world_size: int) -> float:
    """The slots to provide over the rows expected, if winners scatter at random: 1 + 2 * sqrt((1 - 1 / W) / n).

    Two standard deviations of a binomial count above its mean n (Dion2 review, pooled capped transport).
    """
    return 1 + 2 * math.sqrt((1 - 1 / world_size) / expected_rows)


def orthogonalize_rows(
    orthogonalizer: Orthogonalizer,
    rows: Tensor,
    count: Tensor,
    start: Tensor,
    total: int,
    owned: Tensor | None = None,
    spare: Tensor | None = None,
) -> Tensor:
    """(B, T, C) orthogonalized matrices of the rows that several senders put into (S, C) `rows`: see `collect`.

    On a GPU an orthogonalizer that offers `of_rows` reads them where they lie, and may overwrite them and `spare`.
    """
    of_rows: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = getattr(orthogonalizer, "of_rows", None)
    if rows.is_cuda and of_rows is not None:
        return of_rows(rows, places(count, start, total, owned), spare)
    return orthogonalizer(collect(rows, count, start, total, owned))


def orthogonalize_received(
    plan: SlotPlan,
    received: Tensor,
    count_by_rank: Tensor,
    orthogonalizer: Orthogonalizer,
    spare: Tensor | None = None,
) -> Tensor:
    """The flat elements that an owner sends back, every row in the place where it was received.

    Args:
        plan: of the step.
        received: flat; may be overwritten.
        count_by_rank: (W, N) int64, the rows that every rank has sent of every matrix, which lie first in its slots.
        orthogonalizer: gets (B, T, C) matrices, in rank order, hence in global row order, or joined by columns.
        spare: what may be overwritten beside `received`, such as the buffer of rows that have been sent.
    """
    bucket = plan.bucket
    if bucket.layout.axis is Axis.COLUMNS:
        return _orthogonalize_columns(plan, received, count_by_rank, orthogonalizer)
    rows, start, owned = received.view(-1, bucket.shape[1]), plan.tables.start, bucket.owned_index
    results = orthogonalize_rows(orthogonalizer, rows, count_by_rank, start, bucket.total_rows, owned, spare)
    spread_(rows, results, count_by_rank, start, owned)
    return received


def _orthogonalize_columns(
    plan: SlotPlan, received: Tensor, count_by_rank: Tensor, orthogonalizer: Orthogonalizer
) -> Tensor:
    """Every rank has sent the same rows, its columns of them."""
    bucket = plan.bucket
    owned, total = len(bucket.owned(plan.rank)), bucket.total_rows
    widths = [bucket.layout.columns(rank) for rank in range(len(count_by_rank))]
    pieces = split(received, plan.elements_received)
    shaped = [piece.view(owned, total, width) for piece, width in zip(pieces, widths, strict=True)]
    matrices = torch.cat(shaped, dim=2)
    count = count_by_rank[0].index_select(0, bucket.owned_index)
    row = torch.arange(total, device=received.device)
    matrices.masked_fill_((row >= count[:, None])[:, :, None], 0)
    results = orthogonalizer(matrices)
    del matrices, pieces, shaped
    return torch.cat([piece.flatten() for piece in torch.split_with_sizes(results, widths, dim=2)])


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
        group = self.bucket.group
        sent, received = self.plan.elements_sent, self.plan.elements_received
        arrived = rows.values.new_empty(sum(received))
        handle = group.all_to_all(arrived, rows.values[:-1].flatten(), received, sent)
        yield
        handle.wait()
        counts = selection.count_by_rank
        answer = orthogonalize_received(self.plan, arrived, counts, orthogonalizer, spare=rows.values)
        # Results come back into the buffer that the rows left in: one less is needed.
        handle = group.all_to_all(rows.values[:-1].flatten(), answer, sent, received)
        yield
        handle.wait()
        return rows

    def num_results(self) -> int:
        return self.plan.num_slots

    def result_slot(self, selection: RowSelection) -> Tensor:
        return self.plan.slot

    def traffic(self) -> Traffic:
        size = torch.empty(0, dtype=self.bucket.dtype).element_size()
        forward = tuple(count * size for count in self.plan.elements_sent)
        back = tuple(count * size for count in self.plan.elements_received)
        return Traffic(forward, back, collectives=2)
