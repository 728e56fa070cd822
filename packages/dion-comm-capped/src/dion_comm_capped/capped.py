"""The capped transport: globally chosen rows in pooled messages of fixed size, without a host read.

Winners of all matrices that one rank owns are packed back to back into one chunk a pair of ranks, behind a
header with their counts, which the owner parses. What does not fit is deferred before anything is decayed: it
keeps its momentum and wins again. Exact as long as nothing is deferred.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dion_comm_capped.budgets import LearnedBudgets, fixed_budgets
from dion_comm_capped.ops import admit, read_headers, rows_by_pair, slots, write_headers_
from dion_comm_capped.pool import COUNT_BYTES, Budgets, PoolPlan, PoolTables
from dion_core.events import recorded_event
from dion_core.layout import Axis
from dion_core.newton_schulz import Orthogonalizer
from dion_core.ops import spread_
from dion_core.packing import SlotExchange, SlotPlan, orthogonalize_rows
from dion_core.rows import Rows, RowSelection
from dion_core.steps import Steps, done
from dion_core.transport import Bucket, Exchange, Scope, Session, Traffic, Transport

DELAY = 8
"""Steps from those that were counted to the first that uses the counts, when their copy is normally long done."""


@dataclass(frozen=True)
class PooledRows(Rows):
    """Rows in the send buffer.

    Attributes:
        back: (N, K) int64, the row of each entry among those that come back.
    """

    back: Tensor


class PooledExchange(Exchange):
    """The rows of one bucket in pools; `plan` holds their sizes, which change when budgets do.

    Attributes:
        has_choice: whether winners can lie on other ranks than they do.
    """

    def __init__(self, bucket: Bucket, options: Capped) -> None:
        self.bucket = bucket
        self._options = options
        self.tables = PoolTables.of(bucket)
        # Until budgets are known every slot is sent.
        self.use(bucket.offered_by_pair)
        offered = map(sum, zip(*bucket.offered_by_rank, strict=True))
        self.has_choice = max(offered, default=0) > bucket.total_rows
        self._lowest = bucket.lowest_rows.to(bucket.device)

    def use(self, budgets: Budgets) -> None:
        """Takes new budgets, alike on every rank at the same step."""
        self.plan = PoolPlan(self.bucket, budgets, self._options.always_pack)
        self._to_owners, self._from_sources = self.plan.chunks()

    def tells(self, selection: RowSelection) -> Tensor:
        """() bool: whether the counts tell anything about the steps to come.

        Where gradients are zero all rows are equal and the lowest win, which fill one rank's shard after the other.
        """
        count = selection.count_by_rank
        return ((count != self._lowest).any(dim=0) & (count > 0).any(dim=0)).any()

    def admit(self, selection: RowSelection) -> RowSelection:
        return admit(selection, self.tables, self._to_owners, max_wait=self._options.max_wait)

    def num_results(self) -> int:
        return sum(self.plan.back_rows[0])

    def result_slot(self, selection: RowSelection) -> Tensor:
        return self._slots(selection)[1]

    def _slots(self, selection: RowSelection) -> tuple[Tensor, Tensor]:
        sizes = {"sent_rows": sum(self.plan.forward_rows[0]), "returned_rows": self.num_results()}
        return slots(selection, self.tables, self._to_owners, **sizes)

    def reserve(self, selection: RowSelection) -> Rows:
        bucket, sent = self.bucket, sum(self.plan.forward_rows[0])
        slot, back = self._slots(selection)
        # What is not admitted goes past the rows that are sent, and so does a count that has no header.
        spare = -(-COUNT_BYTES // (bucket.shape[1] * bucket.dtype.itemsize))
        values = torch.empty(sent + spare, bucket.shape[1], dtype=bucket.dtype, device=bucket.device)
        return PooledRows(values, slot, back)

    def orthogonalize(self, rows: Rows, selection: RowSelection, orthogonalizer: Orthogonalizer) -> Steps[Rows]:
        assert isinstance(rows, PooledRows)
        bucket, group, columns = self.bucket, self.bucket.group, self.bucket.shape[1]
        write_headers_(rows.values, selection.count, self.tables, self._to_owners)
        sent, received = ([size * columns for size in sizes] for sizes in self.plan.forward_rows)
        leaving = rows.values.flatten()[: sum(sent)]
        # A few elements more, so that a count is read even where no pair has a header.
        arrived = rows.values.new_empty(sum(received) + COUNT_BYTES)
        handle = group.all_to_all(arrived[:-COUNT_BYTES], leaving, received, sent)
        yield
        handle.wait()
        limits = {"max_rows": bucket.max_rows, "total_rows": bucket.total_rows}
        count, start, back_start = read_headers(
            arrived, selection.count_by_rank, self.tables, self._from_sources, **limits
        )
        arrived_rows = arrived[:-COUNT_BYTES].view(-1, columns)
        results = orthogonalize_rows(orthogonalizer, arrived_rows, count, start, bucket.total_rows, spare=rows.values)
        # Results travel in the buffers that the rows came in, which are longer by the headers.
        returned_rows, sent_rows = self.plan.back_rows
        back, returned = arrived_rows[: sum(sent_rows)], rows.values[: sum(returned_rows)]
        spread_(back, results, count, back_start)
        del results
        sizes = [size * columns for size in returned_rows], [size * columns for size in sent_rows]
        handle = group.all_to_all(returned.flatten(), back.flatten(), *sizes)
        yield
        handle.wait()
        return Rows(rows.values, rows.back)

    def traffic(self) -> Traffic:
        row_bytes = self.bucket.shape[1] * self.bucket.dtype.itemsize
        (sent, _), (_, sent_back) = self.plan.forward_rows, self.plan.back_rows
        forward, back = (tuple(size * row_bytes for size in sizes) for sizes in (sent, sent_back))
        return Traffic(forward, back, collectives=2)


def exchange_of(bucket: Bucket, options: Capped) -> Exchange:
    """The exchange of a bucket, which sends every slot until it is told budgets."""
    if bucket.layout.axis is Axis.ROWS:
        return PooledExchange(bucket, options)
    return SlotExchange(bucket, SlotPlan.of(bucket, bucket.offered))  # all ranks know the same rows: nothing to pool


class CappedSession(Session):
    """All buckets of one optimizer, and the budgets that they learn together."""

    def __init__(self, buckets: Sequence[Bucket], options: Capped) -> None:
        super().__init__([exchange_of(bucket, options) for bucket in buckets])
        self._options = options
        self._learned = LearnedBudgets(
            [torch.tensor(fixed_budgets(exchange.bucket, 1.0)).flatten() for exchange in self._pooled]
        )
        self._stretched = False
        self.host_reads = 1 if options.on_overflow == "varlen" and self._pooled else 0
        self._copies: deque[_Copy] = deque()
        self._spare: _Copy | None = None
        self._needed: Tensor | None = None
        if options.capacity != "learned":
            self._apply(self._budgets)

    def begin(self, selections: Sequence[RowSelection]) -> Steps[None]:
        pooled = [
            (exchange, selection)
            for exchange, selection in zip(self.exchanges, selections, strict=True)
            if isinstance(exchange, PooledExchange)
        ]
        if pooled:
            counts = [selection.count_by_rank for _, selection in pooled]
            needed = rows_by_pair(
                counts,
                [exchange.tables.place for exchange, _ in pooled],
                [len(exchange.bucket.working) for exchange, _ in pooled],
            )
            if self._stretched:
                self._apply(self._budgets)
            if self._options.capacity == "learned" and self._learned.started:
                self._needed = needed  # kept for `end`; a replayed step writes to the same tensor
            elif self._options.capacity == "learned":
                tell = [exchange.tells(selection) for exchange, selection in pooled if exchange.has_choice]
                self._start(needed, torch.stack(tell).any() if tell else needed.new_ones(()))
            if self._options.on_overflow == "varlen":
                self._stretch(needed.tolist())
        return done(None)

    def end(self) -> None:
        if self._needed is None:
            return
        copy, self._spare = self._spare or _Copy(self._needed, pinned=self._needed.is_cuda), None
        copy.start(self._needed)
        self._copies.append(copy)
        if len(self._copies) == DELAY:
            self._spare = copy = self._copies.popleft()
            self.host_waits += not copy.arrived
            if self._learned.observe(copy.values()):
                self._apply(self._learned.budgets)

    def state_dict(self) -> dict[str, Any]:
        """The learned budgets and the counts that are still to be used. Waits for the device."""
        return {
            "pairs": self._shapes,
            "learned": self._learned.state_dict(),
            "pending": [copy.values().tolist() for copy in self._copies],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._options.capacity != "learned" or state_dict.get("pairs") != self._shapes:
            return
        self._learned.load_state_dict(state_dict["learned"])
        self._copies = deque()
        for counts in map(torch.tensor, state_dict["pending"]):
            self._copies.append(_Copy(counts, pinned=self._pooled[0].bucket.device.type == "cuda"))
            self._copies[-1].start(counts)
        if self._learned.started:
            self._apply(self._learned.budgets)

    def _start(self, needed: Tensor, clear: Tensor) -> None:
        """Sets the first budgets by the counts of this step if they tell something: read on the host, until then."""
        *counts, told = torch.cat([needed, clear.long()[None]]).tolist()
        if self._learned.observe(torch.tensor(counts), clear=bool(told)):
            self._apply(self._learned.budgets)
        else:
            self.sizes += 1  # they stay, but the next step reads too and cannot be captured

    def _stretch(self, needed: Sequence[int]) -> None:
        """Lengthens the messages of this one step where the budgets are too low, so that nothing is deferred."""
        longer = tuple(map(max, needed, self._budgets))
        self._stretched = longer != self._budgets
        if self._stretched:
            self._apply(longer)

    @property
    def _budgets(self) -> tuple[int, ...]:
        """The budgets of all pairs between stretched steps, bucket after bucket."""
        if self._options.capacity == "learned":
            return self._learned.budgets
        return tuple(pair for exchange in self._pooled for row in self._fixed(exchange) for pair in row)

    def _fixed(self, exchange: PooledExchange) -> Budgets:
        pinned = None if isinstance(self._options.capacity, str) else self._options.capacity
        return fixed_budgets(exchange.bucket, pinned)

    def _apply(self, of_all: Sequence[int]) -> None:
        self.sizes += 1
        budgets = list(of_all)
        for exchange, (ranks, owners) in zip(self._pooled, self._shapes, strict=True):
            of_bucket, budgets = budgets[: ranks * owners], budgets[ranks * owners :]
            exchange.use([of_bucket[rank * owners : (rank + 1) * owners] for rank in range(ranks)])

    @property
    def _shapes(self) -> list[list[int]]:
        """[W, D] of every bucket with pools: its pairs are those of a source and a rank that owns a matrix."""
        return [[each.bucket.group.size, len(each.bucket.working)] for each in self._pooled]

    @property
    def _pooled(self) -> list[PooledExchange]:
        return [exchange for exchange in self.exchanges if isinstance(exchange, PooledExchange)]


class _Copy:
    """Counts on their way to the host, where there is room for them.

    Args:
        like: such counts.
        pinned: whether they come from a GPU.
    """

    def __init__(self, like: Tensor, *, pinned: bool) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = torch.empty(like.shape, dtype=like.dtype, pin_memory=pinned)

    def start(self, counts: Tensor) -> None:
        """Sends counts on their way; those of before are no longer needed."""
        self._host.copy_(counts, non_blocking=counts.is_cuda)
        self._event = recorded_event(counts.device.index) if counts.is_cuda else None

    @property
    def arrived(self) -> bool:
        """Whether the host can read the counts without a wait."""
        return self._event is None or self._event.query()

    def values(self) -> Tensor:
        """The counts on the host; waits where they are still on their way."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.clone()


@dataclass(frozen=True)
class Capped(Transport):
    """`capped`: exact global choice at the price of local, in messages of fixed size.

    Attributes:
        capacity: "learned" follows what every pair of ranks needed; "binomial" provides for random scatter; a
            float >= 1 provides that many times what random scatter needs on average.
        on_overflow: "defer" leaves what does not fit to a later step. "varlen" reads the counts on the host in every
            step, and lengthens the messages of a step in which something would not fit: exact throughout.
        max_wait: from how many steps on a deferred row goes first.
        always_pack: pack pools even where all slots would be shorter (for tests).

    Raises:
        ValueError: an option is out of its range.
    """

    capacity: float | Literal["learned", "binomial"] = "learned"
    on_overflow: Literal["defer", "varlen"] = "defer"
    max_wait: int = 8
    always_pack: bool = False

    interface_version: ClassVar[int] = 1
    scopes: ClassVar[frozenset[Scope]] = frozenset({"global"})
    default_scope: ClassVar[Scope] = "global"
    axes: ClassVar[frozenset[Axis]] = frozenset({Axis.ROWS, Axis.COLUMNS})
    may_defer: ClassVar[bool] = True
    replayable: ClassVar[bool] = True
    outer_axes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.capacity, str):
            if self.capacity not in ("learned", "binomial"):
                raise ValueError(f"capacity={self.capacity!r} is not allowed: 'learned', 'binomial' or a number >= 1")
        elif not isinstance(self.capacity, int | float) or not self.capacity >= 1:
            raise ValueError(f"capacity={self.capacity!r} is not allowed: 'learned', 'binomial' or a number >= 1")
        if self.on_overflow not in ("defer", "varlen"):
            raise ValueError(f"on_overflow={self.on_overflow!r} is not allowed: 'defer' or 'varlen'")
        if not isinstance(self.max_wait, int) or self.max_wait < 1:
            raise ValueError(f"max_wait={self.max_wait!r} is not allowed: at least 1 step")

    def rehearsal(self, bucket: Bucket) -> Exchange:
        if bucket.layout.axis is Axis.ROWS:
            return PooledExchange(bucket, self)
        return SlotExchange(
            bucket, SlotPlan.of(bucket, bucket.offered)
        )  # all ranks know the same rows: nothing to pool

    def open(self, buckets: Sequence[Bucket]) -> Session:
        return CappedSession(buckets, self)
