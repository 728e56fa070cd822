"""Which rank keeps which parameter's state, and where in its flat buffers: planned from sizes and costs alone.

Parameters are walked in one order and cut into buckets. Of every bucket each rank has one shard, a flat buffer in which
the parameters that it keeps lie back to back, whole. Costs decide who keeps what, so that the updates end together;
a limit on the elements of a shard keeps the memory even.

Example: two ranks, elements 192, 192, 256 with costs of the same numbers, one bucket. The longest, 256, goes to rank 0,
192 to rank 1, and the other 192 to rank 1 too, at element 192: rank 0 holds 256 elements in it, rank 1 384.

Legend: W ranks, each with one shard of every bucket.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from dion_core.ownership import PARTS, SMALLEST_PART

ALIGNMENT = 64
"""Elements: every parameter starts at a multiple of it, so that rows are read and written in the widest accesses."""
SLACK = Fraction(13, 10)
"""The elements of a shard may be so many times those of an even one, before memory decides and not cost."""


@dataclass(frozen=True)
class Entry:
    """One parameter to place.

    Attributes:
        numel: elements of it that are stored.
        cost: of its update, from the full shape: a weight that is gathered for it counts with its gathered size.
        pair: parameters whose pairs are equal and not None are tied and stay on one rank.
    """

    numel: int
    cost: int
    pair: Hashable = None

    @property
    def length(self) -> int:
        """Elements that it takes in a flat buffer."""
        return -(-self.numel // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class FlatBucket:
    """Parameters whose state lies in one flat buffer a rank.

    Attributes:
        numbers: of the entries, in the order of the walk.
        ranks: the rank that keeps each.
        starts: the element at which each starts in that rank's buffer.
        lengths: by rank, the elements of its buffer.
    """

    numbers: tuple[int, ...]
    ranks: tuple[int, ...]
    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """What the bucket takes if every shard is as long as the longest."""
        return max(self.lengths) * len(self.lengths)

    def kept_by(self, rank: int) -> list[int]:
        """The places among `numbers` of what the rank keeps, as they lie in its buffer."""
        return sorted((place for place, keeper in enumerate(self.ranks) if keeper == rank), key=self.starts.__getitem__)


def even_buckets(entries: Sequence[Entry], world_size: int) -> int:
    """The elements of a bucket that cut the entries into a few, and into one where a rank has little work in all."""
    work = sum(entry.cost for entry in entries) / world_size
    parts = max(1, min(PARTS, math.ceil(work / SMALLEST_PART)))
    return math.ceil(sum(entry.length for entry in entries) / parts)


def plan_shards(
    entries: Sequence[Entry], *, bucket_elements: int, loads: Sequence[int], homes: Mapping[Hashable, int]
) -> tuple[list[FlatBucket], list[int]]:
    """The buckets of the entries, and the cost of every rank then.

    Args:
        entries: in the order of the walk.
        bucket_elements: a bucket is closed once it has so many, and nothing more fits in beside its longest shard.
        loads: by rank, the cost of what it keeps already; they go on from bucket to bucket, elements do not.
        homes: by pair, the rank that keeps the tied parameter already.
    """
    now, known = list(loads), dict(homes)
    return [_placed(numbers, entries, now, known) for numbers in _cut(entries, len(now), bucket_elements)], now


def _cut(entries: Sequence[Entry], world_size: int, bucket_elements: int) -> list[list[int]]:
    """The entries of every bucket, in the order of the walk.

    A bucket that is large enough takes in what would otherwise be unused: parameters that fit beside the longest shard.
    This estimate puts every parameter on the smallest shard as it comes, which is exact where all are equally large;
    where sizes are mixed, the longest go first in the end, and a bucket can become larger by what it takes in.
    """
    buckets: list[list[int]] = []
    current: list[int] = []
    estimate = [0] * world_size
    for number, entry in enumerate(entries):
        fits = min(estimate) + entry.length <= max(estimate)
        if sum(estimate) >= bucket_elements and not fits:
            buckets.append(current)
            current, estimate = [], [0] * world_size
        estimate[estimate.index(min(estimate))] += entry.length
        current.append(number)
    return [*buckets, current] if current else buckets


def _placed(
    numbers: Sequence[int], entries: Sequence[Entry], loads: list[int], homes: dict[Hashable, int]
) -> FlatBucket:
    """One bucket: the dearest first onto the least loaded shard that has room, else onto the emptiest.

    Ties go to the earlier parameter and the lower rank, so that every rank plans alike. `loads` and `homes` go on.
    """
    limit = SLACK * sum(entries[number].length for number in numbers) / len(loads)
    cursors = [0] * len(loads)
    place: dict[int, tuple[int, int]] = {}
    for number in sorted(numbers, key=lambda number: -entries[number].cost):
        entry = entries[number]
        rank = _home(entry, cursors, loads, homes, limit)
        place[number] = rank, cursors[rank]
        cursors[rank] += entry.length
        loads[rank] += entry.cost
        if entry.pair is not None:
            homes[entry.pair] = rank
    ranks, starts = zip(*(place[number] for number in numbers), strict=True)
    return FlatBucket(tuple(numbers), ranks, starts, tuple(cursors))


def _home(
    entry: Entry, cursors: Sequence[int], loads: Sequence[int], homes: Mapping[Hashable, int], limit: Fraction
) -> int:
    """The rank that keeps the entry."""
    if entry.pair in homes:
        return homes[entry.pair]
    ranks = range(len(loads))
    roomy = [rank for rank in ranks if cursors[rank] + entry.length <= limit]
    return min(roomy, key=lambda rank: loads[rank]) if roomy else min(ranks, key=lambda rank: cursors[rank])
