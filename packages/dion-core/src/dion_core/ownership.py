"""Which rank orthogonalizes which matrix, so that all ranks end together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Protocol

from dion_core.steps import BUCKETS_IN_FLIGHT, Steps, interleave

PARTS = 4
"""A bucket that holds more than this part of a rank's work is cut, so that its messages overlap with its work."""
SMALLEST_PART = 2 * 5120**3
"""Work of a rank (see `newton_schulz_cost`) below which a cut costs a GPU more in idle processors than it saves, unless
some matrices have enough elements in their m x m products."""
SMALLEST_PRODUCTS = 6 * 1536**2
"""So many, of two matrices or more, of which one is worked on while the other's tiles wait for their products."""

FARTHEST_SWAP = 4
"""Buckets farther apart are not swapped, so that many are ordered soon."""


def newton_schulz_cost(rows: int, columns: int) -> int:
    """Relative cost of Newton-Schulz on one matrix of this shape: max(m, n) * min(m, n)^2 multiplications.

    The shape is the one really orthogonalized: the chosen rows of the whole matrix, not a local shard.
    """
    return max(rows, columns) * min(rows, columns) ** 2


Loads = dict[tuple[int, ...], list[int]]
"""For each set of global ranks the load of each."""


class Ranked(Protocol):
    """Ranks that share work: a group or a layout."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Their global numbers."""


def assign_owners(
    costs: Sequence[int], groups: Sequence[Ranked], before: Mapping[tuple[int, ...], Sequence[int]] | None = None
) -> tuple[list[int], Loads]:
    """The owner of every matrix, longest first to the least loaded rank, with one running load a group.

    Ties go to the earlier matrix and the lower rank, so that every rank computes the same answer.

    Args:
        costs: of every matrix of the optimizer, all shapes together.
        groups: the ranks that may own each matrix.
        before: loads that ranks have from other matrices, in sets that need not be those of `groups`.

    Returns:
        The owner's place among those ranks, by matrix; and for each set of ranks the final load by rank.
    """
    earlier: Counter[int] = Counter()
    for ranks, of_ranks in (before or {}).items():
        earlier.update(dict(zip(ranks, of_ranks, strict=True)))
    loads: Loads = {}
    owners = [0] * len(costs)
    for matrix in sorted(range(len(costs)), key=lambda number: -costs[number]):
        ranks = groups[matrix].ranks
        load = loads.setdefault(ranks, [earlier[rank] for rank in ranks])
        owner = load.index(min(load))
        owners[matrix] = owner
        load[owner] += costs[matrix]
    return owners, loads


def imbalance(load: Sequence[int]) -> float:
    """How many times the mean load of a rank the largest is; 1.0 where there is no load.

    The largest load is what all ranks wait for, so 1.0 is the best that any assignment can do: loads 8, 8, 8, 2 have
    a mean of 6.5 and an imbalance of 1.23.
    """
    return max(load) * len(load) / sum(load) if sum(load) else 1.0


def cut(owners: Sequence[int], shape: tuple[int, int], load: Sequence[int]) -> list[int]:
    """The part of a bucket that each matrix goes to, 0 for those of a bucket that stays whole.

    Messages of one part are under way while another is worked on, and only three parts hold buffers at a time. Every
    owner has about as many matrices in each part.

    Args:
        owners: of the matrices of one shape.
        shape: of what is orthogonalized of each.
        load: of every rank, all buckets together.
    """
    cost, enough = newton_schulz_cost(*shape), max(2, math.ceil(SMALLEST_PRODUCTS / min(shape) ** 2))
    limit = max(max(load) / PARTS, min(SMALLEST_PART, enough * cost))
    owned = Counter(owners)
    most = max(owned.values())
    parts = min(math.ceil(most * cost / limit), most)
    seen: Counter[int] = Counter()
    places = []
    for owner in owners:
        places.append(seen[owner] * parts // owned[owner])
        seen[owner] += 1
    return places


def in_order(held: Sequence[int], work: Sequence[int]) -> list[int]:
    """The numbers of buckets in an order in which a step needs little memory, found by swaps that each save some.

    While a bucket is worked on, the rows of others are under way, and the results of those before it. So large ones do
    not stand side by side where a small one can stand between. As much counts that the messages of the first and the
    last are under way while nothing is worked on.

    Example: of buckets that hold 2, 2 and 2 and take 1, 4 and 4 to be worked on, the first goes between the others:
    4 + 2 + 2 + 1 instead of 4 + 2 + 2 + 2, since of the first of three only the results are left when the third is
    worked on.

    Args:
        held: by bucket, the bytes of its messages, half of them sent and half received.
        work: by bucket, the bytes that it takes besides while it is worked on.
    """

    def cost(order: Sequence[int]) -> int:
        return most_at_once([(held[number], work[number]) for number in order]) + held[order[0]] + held[order[-1]]

    order = list(range(len(held)))
    improved = len(order) > 2
    while improved:
        improved = False
        for first, second in combinations(range(len(order)), 2):
            if second - first <= FARTHEST_SWAP:
                swapped = list(order)
                swapped[first], swapped[second] = order[second], order[first]
                if cost(swapped) < cost(order):
                    order, improved = swapped, True
    return order


def most_at_once(sizes: Sequence[tuple[int, int]]) -> int:
    """The most bytes that a step of buckets in this order needs at one time, each given by `held` and `work`."""
    now = most = 0

    def bucket(held: int, work: int) -> Steps[None]:
        nonlocal now, most
        now += held
        yield  # rows are under way
        most = max(most, now + work)
        yield  # results are
        now -= held // 2
        yield  # row statistics are
        now -= held - held // 2

    interleave([bucket(*each) for each in sizes], in_flight=BUCKETS_IN_FLIGHT)
    return most
