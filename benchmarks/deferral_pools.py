"""The pools of all ranks of the capped transport, without ranks: its own sessions, plans and admission.

Legend: N matrices, R rows of a whole matrix, K slots a matrix, W ranks, T steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from dion_comm_capped.admission import keep, strongest
from dion_comm_capped.capped import Capped, PooledExchange
from dion_comm_capped.pool import PoolPlan
from dion_core.collectives import SoloGroup
from dion_core.layout import Axis, split_layout
from dion_core.ownership import assign_owners, newton_schulz_cost
from dion_core.rows import RowSelection
from dion_core.selection import GlobalRows, rows_to_select
from dion_core.steps import run
from dion_core.transport import Bucket

Capacity = float | Literal["learned", "binomial"]
CAPACITIES: tuple[Capacity, ...] = ("learned", "binomial", 1.0)
LONG_PAIR = 200
"""From this many rows a pair on, learned budgets are to stay within 1.15 times the winners."""


@dataclass(frozen=True)
class Shape:
    """N equal matrices."""

    matrices: int
    rows: int
    columns: int

    def __str__(self) -> str:
        return f"{self.matrices} x {self.rows} x {self.columns}"


def make_buckets(shapes: Sequence[Shape], world_size: int, fraction: float) -> list[Bucket]:
    """The buckets of an optimizer with these matrices, split by rows over the ranks, bf16, seen from rank 0."""
    group = SoloGroup(0, world_size, tuple(range(world_size)))
    costs = [
        newton_schulz_cost(rows_to_select(fraction, shape.rows), shape.columns)
        for shape in shapes
        for _ in range(shape.matrices)
    ]
    owners, _ = assign_owners(costs, [group] * len(costs))
    buckets = []
    for shape in shapes:
        layout = split_layout(group, Axis.ROWS, (shape.rows, shape.columns)).stack(shape.matrices)
        selector = GlobalRows(fraction)
        buckets.append(
            Bucket(
                layout=layout,
                owners=tuple(owners[: shape.matrices]),
                max_rows=selector.offered(layout, 0, 0),
                total_rows=selector.total(layout, 0),
                dtype=torch.bfloat16,
                device=torch.device("cpu"),
                name=str(shape),
            )
        )
        owners = owners[shape.matrices :]
    return buckets


@dataclass
class Tally:
    """What happened to the winners of one bucket; rows and slots of all ranks together, by step.

    Attributes:
        pair_rows: winners of an average pair of ranks that has any.
        header_rows: rows that the header of an average such pair takes.
        full: slots over winners if every slot is sent.
        winners: chosen rows.
        refused: those of them that were deferred.
        slots: rows sent over winners, headers included, mean of both ways.
    """

    pair_rows: float
    header_rows: float
    full: float
    winners: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    slots: list[float] = field(default_factory=list)

    def after(self, step: int) -> Tally:
        """The tally of the later steps."""
        return replace(self, winners=self.winners[step:], refused=self.refused[step:], slots=self.slots[step:])

    @property
    def deferred(self) -> float:
        """The share of winners that was deferred."""
        return sum(self.refused) / max(sum(self.winners), 1)

    @property
    def sent(self) -> float:
        """Bytes over those of the exact winners."""
        return sum(self.slots) / max(sum(self.winners), 1)

    @property
    def allowed(self) -> float:
        """What learned budgets may send at most, over the exact winners: their aim, never more than all slots."""
        header = self.header_rows / 2 / self.pair_rows  # it travels one way only
        margin = 0.15 if self.pair_rows >= LONG_PAIR else 2.5 / math.sqrt(self.pair_rows) + header
        return min(1 + margin, self.full)


class Pools:
    """A session of the capped transport and what its pools let through, for all ranks at once."""

    def __init__(self, buckets: Sequence[Bucket], capacity: Capacity) -> None:
        self.buckets = buckets
        self.transport = Capped(capacity=capacity)
        self._session = self.transport.open(buckets)
        self.tallies = [empty_tally(bucket) for bucket in buckets]
        self.changes: list[int] = []
        self._step = -1
        self._sizes: list[_Sizes] = []
        self._plans: list[PoolPlan] = []

    def begin(self, counts: Sequence[Tensor]) -> None:
        """Starts a step in which rank r has chosen counts[bucket][r, n] rows of matrix n."""
        if self._step >= 0:
            self._session.end()
        self._step += 1
        chosen = [RowSelection.unranked(torch.empty(0, 0), of_bucket[0], of_bucket) for of_bucket in counts]
        run(self._session.begin(chosen))
        plans = [exchange.plan for exchange in self._session.exchanges if isinstance(exchange, PooledExchange)]
        if not self._plans or any(new is not old for new, old in zip(plans, self._plans, strict=True)):
            sizes = [_Sizes.of(plan) for plan in plans]
            if self._sizes and any(not new.equals(old) for new, old in zip(sizes, self._sizes, strict=True)):
                self.changes.append(self._step)
            self._plans, self._sizes = plans, sizes

    def count(self, number: int, counts: Tensor, refused: int) -> None:
        """Notes what happened to the winners of a bucket in this step."""
        tally = self.tallies[number]
        tally.winners.append(int(counts.sum()))
        tally.refused.append(refused)
        tally.slots.append(self._sizes[number].slots)

    def excess(self, number: int, counts: Tensor) -> int:
        """How many winners of a bucket do not fit into its pools."""
        return int((self._needed(number, counts) - self._sizes[number].capacity).clamp(min=0).sum())

    def admit(self, number: int, whole: RowSelection) -> RowSelection:
        """What the pools let through of (N, K) chosen rows of whole matrices, all shards being equally long."""
        bucket = self.buckets[number]
        size, num_matrices = bucket.layout.group.size, bucket.num_matrices
        rank = whole.index // (bucket.shape[0] // size)
        before = whole.count_by_rank.cumsum(0) - whole.count_by_rank
        slot = torch.arange(whole.index.shape[1]) - before.T.gather(1, rank)
        place = rank * num_matrices + torch.arange(num_matrices)[:, None]  # as if every rank had matrices of its own
        shape = (size * num_matrices, bucket.max_rows)
        of_all = RowSelection(
            index=whole.index.new_zeros(shape).index_put_((place, slot), whole.index),
            count=whole.count_by_rank.flatten(),
            count_by_rank=whole.count_by_rank,
            ratio=whole.ratio.new_zeros(shape).index_put_((place, slot), whole.ratio),
            age=whole.age.new_zeros(shape).index_put_((place, slot), whole.age),
        )
        owner = (torch.arange(size)[:, None] * size + torch.tensor(bucket.owners)).flatten()
        capacity = self._sizes[number].capacity.flatten()
        admitted = strongest(of_all, owner, capacity, max_wait=self.transport.max_wait)
        return keep(whole, admitted[place, slot])

    def _needed(self, number: int, counts: Tensor) -> Tensor:
        owners = torch.tensor(self.buckets[number].owners)
        return counts.new_zeros(len(counts), len(counts)).index_add_(1, owners, counts)


@dataclass(frozen=True)
class _Sizes:
    """The pools of a plan: (W, W) int64 capacity by source and owner, and the rows sent, mean of both ways."""

    capacity: Tensor
    slots: float

    @classmethod
    def of(cls, plan: PoolPlan) -> _Sizes:
        ranks = range(plan.bucket.layout.group.size)
        capacity = torch.tensor([[plan.capacity(source, owner) for owner in ranks] for source in ranks])
        header = sum(plan.header(source, owner) for source in ranks for owner in ranks)
        return cls(capacity, int(capacity.sum()) + header / 2)

    def equals(self, other: _Sizes) -> bool:
        return torch.equal(self.capacity, other.capacity)


def empty_tally(bucket: Bucket) -> Tally:
    """A tally before the first step."""
    ranks = range(bucket.layout.group.size)
    plan = PoolPlan(bucket, [], always_pack=False)
    offered = {
        (source, owner): rows
        for source in ranks
        for owner, rows in zip(bucket.working, bucket.offered_by_pair[source], strict=True)
    }
    pairs = [pair for pair, rows in offered.items() if rows]
    winners = bucket.total_rows * bucket.num_matrices
    header = sum(plan.header_rows(owner) for _, owner in pairs) / len(pairs)
    return Tally(winners / len(pairs), header, sum(offered.values()) / winners)


def whole_selection(bucket: Bucket, selection: RowSelection) -> RowSelection:
    """A choice from whole matrices with the counts of all ranks, all shards being equally long."""
    size = bucket.layout.group.size
    rank = selection.index // (bucket.shape[0] // size)
    counts = torch.zeros(bucket.num_matrices, size, dtype=torch.int64)
    counts.scatter_add_(1, rank, torch.ones_like(rank))
    return replace(selection, count_by_rank=counts.T.contiguous())
