"""Transports whose sizes are those of the step: exactly the chosen rows travel, and nothing is deferred.

Every rank knows how many rows each rank has chosen of each matrix, since all have the gathered scores. The
counts of all buckets together are read on the host once a step; after that a step is a padded exchange with no
padding (`varlen`), or with all messages as long as the longest (`uniform`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from dion_core.layout import Axis
from dion_core.packing import SlotExchange, SlotPlan
from dion_core.rows import RowSelection
from dion_core.steps import Steps, done
from dion_core.transport import Bucket, Scope, Session, Transport


@dataclass(frozen=True)
class UniformPlan(SlotPlan):
    """Slots in chunks that are equally long for every pair of ranks: as long as the longest needs."""

    @cached_property
    def _longest(self) -> int:
        ranks = range(self.bucket.layout.group.size)
        return max(super(UniformPlan, self).rows_between(source, owner) for source in ranks for owner in ranks)

    def rows_between(self, source: int, owner: int) -> int:
        return self._longest


class CountedSession(Session):
    """Reads all counts of a step on the host in one copy, and plans each exchange by them."""

    host_reads = 1

    def __init__(self, buckets: Sequence[Bucket], plan: type[SlotPlan]) -> None:
        # Until rows are counted, and for good where columns are split, the plan is one of fixed slots.
        super().__init__([SlotExchange(bucket, SlotPlan(bucket, bucket.offered)) for bucket in buckets])
        self._exchanges = [exchange for exchange in self.exchanges if isinstance(exchange, SlotExchange)]
        self._plan = plan

    def begin(self, selections: Sequence[RowSelection]) -> Steps[None]:
        counts = torch.cat([selection.count_by_rank.flatten() for selection in selections]).tolist()
        for exchange, selection in zip(self._exchanges, selections, strict=True):
            num_ranks, num_matrices = selection.count_by_rank.shape
            of_bucket, counts = counts[: num_ranks * num_matrices], counts[num_ranks * num_matrices :]
            if exchange.bucket.layout.axis is Axis.ROWS:
                exchange.plan = self._plan(exchange.bucket, _Counts(of_bucket, num_matrices))
        return done(None)


@dataclass(frozen=True)
class _Counts:
    """The rows chosen in this step, by rank and matrix."""

    flat: Sequence[int]
    num_matrices: int

    def __call__(self, rank: int, matrix: int) -> int:
        return self.flat[rank * self.num_matrices + matrix]


@dataclass(frozen=True)
class Varlen(Transport):
    """`varlen`: exactly the chosen rows, in messages as long as they need to be."""

    interface_version: ClassVar[int] = 1
    scopes: ClassVar[frozenset[Scope]] = frozenset({"all", "global"})
    default_scope: ClassVar[Scope] = "global"
    axes: ClassVar[frozenset[Axis]] = frozenset({Axis.ROWS, Axis.COLUMNS})

    def open(self, buckets: Sequence[Bucket]) -> Session:
        return CountedSession(buckets, SlotPlan)


@dataclass(frozen=True)
class Uniform(Transport):
    """`uniform`: the chosen rows, in messages that are all as long as the longest pair of ranks needs."""

    interface_version: ClassVar[int] = 1
    scopes: ClassVar[frozenset[Scope]] = frozenset({"all", "global"})
    default_scope: ClassVar[Scope] = "global"
    axes: ClassVar[frozenset[Axis]] = frozenset({Axis.ROWS, Axis.COLUMNS})

    def open(self, buckets: Sequence[Bucket]) -> Session:
        return CountedSession(buckets, UniformPlan)
