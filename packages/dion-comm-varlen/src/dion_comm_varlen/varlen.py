"""Transports whose sizes are those of the step: exactly the chosen rows travel, and nothing is deferred.

Every rank knows how many rows each rank has chosen of each matrix, since all have the gathered scores. The
counts of all buckets together are read on the host once a step; after that a step is a padded exchange with no
padding (`varlen`), or with all messages as long as the longest (`uniform`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import ClassVar

import torch

from dion_core.layout import Axis
from dion_core.packing import SlotExchange, SlotPlan, bring
from dion_core.rows import RowSelection
from dion_core.steps import Steps, done
from dion_core.transport import Bucket, Scope, Session, Transport


class UniformPlan(SlotPlan):
    """Slots in chunks that are equally long for every pair of ranks: as long as the longest needs."""

    @cached_property
    def _longest(self) -> int:
        longest = 0
        for of_source in self.slots:
            to_owner = dict.fromkeys(self.bucket.working, 0)
            for owner, rows in zip(self.bucket.owners, of_source, strict=True):
                to_owner[owner] += rows
            longest = max(longest, *to_owner.values())
        return longest

    def rows_between(self, source: int, owner: int) -> int:
        return self._longest


class CountedSession(Session):
    """Reads all counts of a step on the host in one copy, and plans each exchange by them."""

    def __init__(self, buckets: Sequence[Bucket], plan: type[SlotPlan]) -> None:
        # Until rows are counted, and for good where columns are split, the plan is one of fixed slots.
        exchanges = [SlotExchange(bucket, SlotPlan.of(bucket, bucket.offered)) for bucket in buckets]
        super().__init__(exchanges)
        self._exchanges = exchanges
        self._plan = plan
        self.host_reads = int(any(bucket.layout.axis is Axis.ROWS for bucket in buckets))

    def begin(self, selections: Sequence[RowSelection]) -> Steps[None]:
        counted = [
            (exchange, selection.count_by_rank)
            for exchange, selection in zip(self._exchanges, selections, strict=True)
            if exchange.bucket.layout.axis is Axis.ROWS
        ]
        if not counted:
            return done(None)
        counts: list[int] = torch.cat([count.flatten() for _, count in counted]).tolist()
        rest = iter(counts)
        for exchange, count in counted:
            num_ranks, num_matrices = count.shape
            by_rank = [list(islice(rest, num_matrices)) for _ in range(num_ranks)]
            exchange.plan = self._plan(exchange.bucket, by_rank)
        bring([exchange.plan for exchange, _ in counted])
        return done(None)


@dataclass(frozen=True)
class Varlen(Transport):
    """`varlen`: exactly the chosen rows, in messages as long as they need to be."""

    interface_version: ClassVar[int] = 1
    scopes: ClassVar[frozenset[Scope]] = frozenset({"all", "global"})
    default_scope: ClassVar[Scope] = "global"
    axes: ClassVar[frozenset[Axis]] = frozenset({Axis.ROWS, Axis.COLUMNS})
    outer_axes: ClassVar[bool] = True

    def open(self, buckets: Sequence[Bucket]) -> Session:
        return CountedSession(buckets, SlotPlan)


@dataclass(frozen=True)
class Uniform(Transport):
    """`uniform`: the chosen rows, in messages that are all as long as the longest pair of ranks needs."""

    interface_version: ClassVar[int] = 1
    scopes: ClassVar[frozenset[Scope]] = frozenset({"all", "global"})
    default_scope: ClassVar[Scope] = "global"
    axes: ClassVar[frozenset[Axis]] = frozenset({Axis.ROWS, Axis.COLUMNS})
    outer_axes: ClassVar[bool] = True

    def open(self, buckets: Sequence[Bucket]) -> Session:
        return CountedSession(buckets, UniformPlan)
