"""Transports whose slots are fixed at construction: the full shard, or the rows that every shard gives.

One all-to-all takes the slots to the owners and one takes the results back. Sizes differ between peers (owners
are balanced by cost, shards may be uneven) but never between steps, and nothing is read on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from dion_core.layout import Axis
from dion_core.newton_schulz import Orthogonalizer
from dion_core.packing import SlotPlan, SlotRule, assembly
from dion_core.rows import Rows, RowSelection
from dion_core.steps import Steps
from dion_core.transport import Bucket, Exchange, Scope, Session, Traffic, Transport


class PaddedExchange(Exchange):
    """Rows in a fixed number of slots a rank and matrix; the owner takes the used ones, by the counts."""

    def __init__(self, bucket: Bucket, slots: SlotRule) -> None:
        self._bucket = bucket
        self._plan = SlotPlan(bucket, slots)
        self._assembly = assembly(self._plan)

    def reserve(self, selection: RowSelection) -> Rows:
        bucket = self._bucket
        columns = bucket.layout.columns(bucket.layout.group.rank)
        # One row more than is sent takes what has no slot.
        values = torch.empty(self._plan.num_slots + 1, columns, dtype=bucket.dtype, device=bucket.device)
        return Rows(values, self._plan.slot)

    def orthogonalize(self, rows: Rows, selection: RowSelection, orthogonalizer: Orthogonalizer) -> Steps[Rows]:
        group = self._bucket.layout.group
        sent, received = self._plan.elements_sent(), self._plan.elements_received()
        arrived = rows.values.new_empty(sum(received))
        handle = group.all_to_all(arrived, rows.values[:-1].flatten(), received, sent)
        yield
        handle.wait()
        matrices = self._assembly.assemble(arrived, selection.count_by_rank)
        results = self._assembly.disassemble(orthogonalizer(matrices), selection.count_by_rank)
        returned = torch.empty_like(rows.values)
        handle = group.all_to_all(returned[:-1].flatten(), results, sent, received)
        yield
        handle.wait()
        return Rows(returned, rows.slot)

    def traffic(self) -> Traffic:
        size = torch.empty(0, dtype=self._bucket.dtype).element_size()
        forward = tuple(count * size for count in self._plan.elements_sent())
        back = tuple(count * size for count in self._plan.elements_received())
        return Traffic(forward, back, collectives=2)


class PaddedSession(Session):
    """One padded exchange a bucket."""

    def __init__(self, exchanges: Sequence[PaddedExchange]) -> None:
        self.exchanges = exchanges


@dataclass(frozen=True)
class FullShard(Transport):
    """`full`: as many slots as the shard has rows. Exact, and as many bytes as the whole matrix."""

    interface_version: ClassVar[int] = 1
    scopes: ClassVar[frozenset[Scope]] = frozenset({"all", "global"})
    default_scope: ClassVar[Scope] = "global"
    axes: ClassVar[frozenset[Axis]] = frozenset({Axis.ROWS, Axis.COLUMNS})

    def open(self, buckets: Sequence[Bucket]) -> Session:
        return PaddedSession([PaddedExchange(bucket, _shard_slots(bucket)) for bucket in buckets])


@dataclass(frozen=True)
class LocalTopRows(Transport):
    """`local`: as many slots as every shard gives of its own best rows. Cheap, and dependent on W."""

    interface_version: ClassVar[int] = 1
    scopes: ClassVar[frozenset[Scope]] = frozenset({"local"})
    default_scope: ClassVar[Scope] = "local"
    axes: ClassVar[frozenset[Axis]] = frozenset({Axis.ROWS, Axis.COLUMNS})

    def open(self, buckets: Sequence[Bucket]) -> Session:
        return PaddedSession([PaddedExchange(bucket, bucket.offered) for bucket in buckets])


def _shard_slots(bucket: Bucket) -> SlotRule:
    # Where columns are split all ranks know the same rows, so that nothing but those needs a slot.
    return bucket.offered if bucket.layout.axis is Axis.COLUMNS else bucket.layout.rows
