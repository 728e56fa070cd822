"""Owners: cost, longest first to the least loaded rank, the known bound, and the figures of the specification."""

import itertools
import random
from collections.abc import Sequence
from fractions import Fraction
from itertools import permutations
from statistics import mean
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dion_comm_nccl import FullShard, LocalTopRows
from dion_core.collectives import Group, SoloGroup
from dion_core.layout import Axis, split_layout
from dion_core.ownership import (
    PARTS,
    SMALLEST_PART,
    SMALLEST_PRODUCTS,
    assign_owners,
    cut,
    imbalance,
    in_order,
    newton_schulz_cost,
)
from dion_core.planning import block_assignment_payload
from dion_core.selection import GlobalRows, LocalRows, Selector
from dion_core.transport import Bucket, Transport
from tests.unit.test_layout import CPU, fake_group

INVENTORY = {"5120x8": [(33, 5120, 5120), (16, 20480, 5120)]}  # (matrices, rows, columns)
FRACTION = 0.25


def assign(costs: Sequence[int], size: int) -> tuple[list[int], list[int]]:
    group = fake_group(0, size)
    owners, loads = assign_owners(costs, [group] * len(costs))
    return owners, loads[group.ranks]


def loads_of(owners: Sequence[int], costs: Sequence[int], size: int) -> list[int]:
    return [sum(cost for owner, cost in zip(owners, costs, strict=True) if owner == rank) for rank in range(size)]


@pytest.mark.parametrize(
    ("rows", "columns", "cost"),
    [(1, 1, 1), (2, 5, 20), (5, 2, 20), (3, 3, 27), (1280, 5120, 5120 * 1280**2), (5120, 5120, 5120**3)],
)
def test_the_cost_is_the_longer_side_times_the_shorter_squared(rows: int, columns: int, cost: int) -> None:
    assert newton_schulz_cost(rows, columns) == cost


def test_longest_first_to_the_least_loaded() -> None:
    """9, 8, 7 open the ranks, 6 joins 7, 5 joins 8, 4 joins 9; then 2, 2, 1 by load and rank."""
    costs = [2, 7, 9, 4, 8, 5, 6, 2, 1]
    owners, loads = assign(costs, 3)
    assert owners == [0, 2, 0, 0, 1, 1, 2, 1, 2]
    assert loads == [15, 15, 14]


def test_ties_go_to_the_earlier_matrix_and_the_lower_rank() -> None:
    assert assign([5, 5, 5, 5, 5], 3) == ([0, 1, 2, 0, 1], [10, 10, 5])
    assert assign([1, 3, 1, 3], 2) == ([0, 0, 1, 1], [4, 4])


@pytest.mark.parametrize(("costs", "size"), [([], 3), ([7], 4), ([3, 9], 4), ([4, 4, 4], 8)])
def test_fewer_matrices_than_ranks(costs: list[int], size: int) -> None:
    owners, loads = assign_owners(costs, [fake_group(0, size)] * len(costs))
    assert len(set(owners)) == len(costs)
    for load in loads.values():
        assert sorted(load) == sorted(costs + [0] * (size - len(costs)))


@pytest.mark.parametrize(("load", "expected"), [([5], 1.0), ([3, 3], 1.0), ([6, 2, 1], 2.0), ([4, 0, 0, 0], 4.0)])
def test_the_imbalance_is_the_largest_load_over_the_mean(load: list[int], expected: float) -> None:
    assert imbalance(load) == expected


def test_no_load_is_balanced() -> None:
    assert imbalance([0, 0, 0]) == 1.0


def test_one_running_load_over_all_shapes() -> None:
    """Three large matrices over two ranks leave one behind; the small ones of another shape fill it up."""
    large, small = newton_schulz_cost(64, 64), newton_schulz_cost(32, 32)
    owners, loads = assign([small] * 8 + [large] * 3, 2)
    assert owners == [1] * 8 + [0, 1, 0]
    assert loads == [2 * large, large + 8 * small]


def test_every_group_has_a_load_of_its_own() -> None:
    groups: list[Group] = [fake_group(1, 2), SoloGroup(0, 2, (4, 5))]
    owners, loads = assign_owners([9, 9, 5, 5, 4, 1], [groups[n % 2] for n in range(6)])
    assert owners == [0, 0, 1, 1, 1, 1]
    assert loads == {groups[0].ranks: [9, 9], groups[1].ranks: [9, 6]}


def test_every_rank_computes_the_same() -> None:
    costs = [random.Random(n).randint(1, 5) for n in range(40)]
    answers = [assign_owners(costs, [fake_group(rank, 4)] * 40)[0] for rank in range(4)]
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("seed", range(12))
def test_the_largest_load_is_within_the_bound_of_the_best(seed: int, size: int) -> None:
    """At most 4/3 - 1/(3 W) of the optimum (Graham 1969)."""
    rng = random.Random(seed)
    costs = [rng.randint(1, 20) for _ in range(rng.randint(1, 7))]
    owners, loads = assign(costs, size)
    assert loads == loads_of(owners, costs, size)
    every = itertools.product(range(size), repeat=len(costs))
    best = min(max(loads_of(assignment, costs, size)) for assignment in every)
    assert max(loads) <= (Fraction(4, 3) - Fraction(1, 3 * size)) * best


def test_the_bound_is_reached() -> None:
    """The worst case: 5, 5, 4, 4, 3, 3, 3 over three ranks gives 11 where 9 is possible."""
    assert sorted(assign([3, 3, 5, 4, 5, 4, 3], 3)[1]) == [8, 8, 11]


def planned_bytes(transport: Transport, selector: Selector, size: int) -> list[int]:
    """Bytes that every rank sends in a step, itself included, from the real plan; no matrix is made."""
    inventory = INVENTORY["5120x8"]
    layouts = [split_layout(fake_group(0, size), Axis.ROWS, shape) for _, *shape in inventory]
    costs = [
        newton_schulz_cost(selector.total(layout, 0), layout.shape[1])
        for (number, *_), layout in zip(inventory, layouts, strict=True)
        for _ in range(number)
    ]
    owners, _ = assign_owners(costs, [fake_group(0, size)] * len(costs))
    sent = []
    for rank in range(size):
        buckets, start = [], 0
        for (number, *shape), whole in zip(inventory, layouts, strict=True):
            layout = split_layout(fake_group(rank, size), Axis.ROWS, (shape[0], shape[1])).stack(number)
            offered = max(selector.offered(layout, each, 0) for each in range(size))
            of_bucket = tuple(owners[start : start + number])
            start += number
            buckets.append(Bucket(layout, of_bucket, offered, selector.total(whole, 0), torch.bfloat16, CPU, "bucket"))
        traffic = [exchange.traffic() for exchange in transport.open(buckets).exchanges]
        assert all(len(each.forward) == len(each.back) == size for each in traffic)
        sent.append(sum(each.num_bytes for each in traffic))
    assert len(owners) == 33 + 16
    return sent


@pytest.mark.parametrize(("size", "full", "local"), [(4, 2543, 636), (8, 1271, 318), (16, 636, 159)])
def test_bytes_of_the_specification(size: int, full: int, local: int) -> None:
    """Section 5, ours: mean over ranks in MB of 1e6 bytes, both directions, bf16, fraction 0.25."""
    by_full = planned_bytes(FullShard(), GlobalRows(FRACTION), size)
    by_local = planned_bytes(LocalTopRows(), LocalRows(FRACTION), size)
    assert round(mean(by_full) / 1e6) == full
    assert round(mean(by_local) / 1e6) == local


@pytest.mark.parametrize("size", [4, 8, 16])
def test_twice_the_fraction_is_twice_the_bytes_of_local(size: int) -> None:
    quarter = planned_bytes(LocalTopRows(), LocalRows(0.25), size)
    half = planned_bytes(LocalTopRows(), LocalRows(0.5), size)
    assert sum(half) == 2 * sum(quarter)


@pytest.mark.parametrize(
    ("world_size", "full", "local", "capped"),
    [(4, 2621, 655, 673), (8, 1363, 341, 361), (16, 734, 183.5, 205)],
)
def test_payloads_of_block_assignment(world_size: int, full: float, local: float, capped: float) -> None:
    """What the seeds report for inventory 5120x8, fraction 0.25, bf16, in MB: blocks a rank and shape, zero-padded."""
    shapes = {(5120, 5120): 33, (20480, 5120): 16}
    for way, expected in (("full", full), ("local", local), ("capped", capped)):
        payload = block_assignment_payload(shapes, world_size, way, fraction=0.25, element_bytes=2) / 1e6
        assert payload == pytest.approx(expected, abs=0.5)


def test_a_bucket_of_little_work_stays_whole() -> None:
    assert cut([0] * 3, (5120, 5120), [4 * SMALLEST_PART]) == [0, 0, 1]
    assert cut([0, 1, 2, 0], (5120, 5120), [8 * SMALLEST_PART] * 3) == [0, 0, 0, 0]
    assert cut([0] * 6, (1536, 1664), [0]) == [0] * 6
    assert cut([0] * 7, (1536, 1664), [0]) == [0] * 4 + [1] * 3
    assert cut([0] * 2, (20480, 20480), [21 * SMALLEST_PART]) == [0, 1]  # no part without a matrix


@pytest.mark.parametrize("seed", range(20))
def test_parts_are_within_the_limit_and_even(seed: int) -> None:
    rng = random.Random(seed)
    size, count = rng.randint(1, 5), rng.randint(1, 60)
    shape = rng.randint(300, 4000), rng.randint(300, 4000)
    cost = newton_schulz_cost(*shape)
    owners = [rng.randrange(size) for _ in range(count)]
    load = [owners.count(rank) * cost + rng.randint(0, 20 * SMALLEST_PART) for rank in range(size)]
    places = cut(owners, shape, load)
    smallest = max(2, -(-SMALLEST_PRODUCTS // min(shape) ** 2)) * cost
    limit = max(max(load) / PARTS, min(smallest, SMALLEST_PART))
    assert sorted(set(places)) == list(range(max(places) + 1))
    for rank in range(size):
        held = [
            places.count(part) and sum(o == rank and p == part for o, p in zip(owners, places, strict=True))
            for part in range(max(places) + 1)
        ]
        assert max(held) - min(held) <= 1
        assert max(held) * cost < limit + cost
    assert max(places) + 1 == -(-max(owners.count(rank) for rank in range(size)) * cost // limit)


def test_the_large_matrices_of_the_inventory_are_cut_in_two() -> None:
    """16 of 20480x5120 at fraction 0.25 over 4 ranks: four 5120x5120 a rank."""
    square, wide = (5120, 5120), (1280, 5120)
    owners, load = assign([newton_schulz_cost(*square)] * 16 + [newton_schulz_cost(*wide)] * 33, 4)
    assert [cut(owners[:16], square, load).count(part) for part in range(3)] == [8, 8, 0]
    assert set(cut(owners[16:], wide, load)) == {0}


class Line(NamedTuple):
    """Global ranks that share work."""

    ranks: tuple[int, ...]


def test_loads_from_before_count_by_global_rank() -> None:
    """Ranks 0 and 1 have 5 and 2 from a group of all, rank 3 has 4 and rank 2 has 1 from that and another one."""
    before = {(0, 1, 2, 3): [5, 2, 1, 0], (3, 2): [4, 0]}
    groups = [Line((0, 1))] * 2 + [Line((2, 3))] * 2
    owners, loads = assign_owners([3, 3, 3, 3], groups, before)
    assert owners == [1, 0, 0, 0]
    assert loads == {(0, 1): [8, 5], (2, 3): [7, 4]}


def step_memory(held: list[int], work: list[int], order: list[int]) -> int:
    """The most at one time, as the documented order of turns has it, and the messages of the first and the last.

    Of three: a sends, b sends, a computes, c sends, b computes, a has its results, c computes.
    """
    assert len(order) == 3
    (a, of_a), (b, of_b), (c, of_c) = ((held[number], work[number]) for number in order)
    return max(a + b + of_a, a + b + c + of_b, a - a // 2 + b + c + of_c) + a + c


def test_a_small_bucket_goes_between_large_ones() -> None:
    assert in_order([2, 2, 2], [1, 4, 4]) == [1, 0, 2]
    assert in_order([5], [7]) == [0]
    assert in_order([], []) == []
    assert in_order([5, 1], [7, 9]) == [0, 1]  # nothing to save
    assert in_order([3, 3, 3, 3], [2, 2, 2, 2]) == [0, 1, 2, 3]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 200)), min_size=3, max_size=3))
def test_no_order_of_three_buckets_is_better(sizes: list[tuple[int, int]]) -> None:
    held, work = [size for size, _ in sizes], [size for _, size in sizes]
    costs = [step_memory(held, work, list(order)) for order in permutations(range(3))]
    found = in_order(held, work)
    swaps = [[found[1], found[0], found[2]], [found[2], found[1], found[0]], [found[0], found[2], found[1]]]
    assert step_memory(held, work, found) <= min(step_memory(held, work, order) for order in [[0, 1, 2], *swaps])
    assert min(costs) <= step_memory(held, work, found) <= step_memory(held, work, [0, 1, 2])


def test_many_buckets_are_ordered_soon() -> None:
    held, work = [7 * n % 31 for n in range(60)], [11 * n % 97 for n in range(60)]
    order = in_order(held, work)
    assert sorted(order) == list(range(60))
    assert order != list(range(60))
