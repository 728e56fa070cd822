"""Transports whose slots are fixed at construction: the full shard, or the rows that every shard gives.

One all-to-all takes the slots to the owners and one takes the results back. Sizes differ between peers (owners
are balanced by cost, shards may be uneven) but never between steps, and nothing is read on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dion_core.layout import Axis
from dion_core.packing import SlotExchange, SlotPlan
from dion_core.transport import Bucket, Exchange, Scope, Session, Transport


@dataclass(frozen=True)
class FullShard(Transport):
    """`full`: as many slots as the shard has rows. Exact, and as many bytes as the whole matrix."""

    interface_version: ClassVar[int] = 1
    scopes: ClassVar[frozenset[Scope]] = frozenset({"all", "global"})
    default_scope: ClassVar[Scope] = "global"
    axes: ClassVar[frozenset[Axis]] = frozenset({Axis.ROWS, Axis.COLUMNS})
    outer_axes: ClassVar[bool] = True
    replayable: ClassVar[bool] = True

    def rehearsal(self, bucket: Bucket) -> Exchange:
        return _whole_shards(bucket)

    def open(self, buckets: Sequence[Bucket]) -> Session:
        return Session([_whole_shards(bucket) for bucket in buckets])


@dataclass(frozen=True)
class LocalTopRows(Transport):
    """`local`: as many slots as every shard gives of its own best rows. Cheap, and dependent on W.

    Attributes:
        slack: None: every shard gives exactly its share, its own best rows. A number c >= 1: every shard offers
            c times its share, and the best of all that is offered are taken, which is the global choice from
            1 / fraction on, at c times the bytes.

    Raises:
        ValueError: `slack` is below 1.
    """

    slack: float | None = None

    interface_version: ClassVar[int] = 1
    scopes: ClassVar[frozenset[Scope]] = frozenset({"local"})
    default_scope: ClassVar[Scope] = "local"
    axes: ClassVar[frozenset[Axis]] = frozenset({Axis.ROWS, Axis.COLUMNS})
    outer_axes: ClassVar[bool] = True
    replayable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.slack is not None and not self.slack >= 1:
            raise ValueError(f"slack={self.slack!r} is not allowed: None or a number >= 1")

    def local_slack(self) -> float | None:
        return self.slack

    def rehearsal(self, bucket: Bucket) -> Exchange:
        return _offers(bucket)

    def open(self, buckets: Sequence[Bucket]) -> Session:
        return Session([_offers(bucket) for bucket in buckets])


def _whole_shards(bucket: Bucket) -> SlotExchange:
    # Where columns are split all ranks know the same rows, so that nothing but those needs a slot.
    slots = bucket.offered if bucket.layout.axis is Axis.COLUMNS else bucket.layout.rows
    return SlotExchange(bucket, SlotPlan.of(bucket, slots))


def _offers(bucket: Bucket) -> SlotExchange:
    return SlotExchange(bucket, SlotPlan.of(bucket, bucket.offered))
