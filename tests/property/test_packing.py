"""What packing promises for arbitrary shards, owners and counts: every row arrives, and comes back."""

from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dion_core.compaction import compact
from dion_core.packing import SlotPlan, SlotRule
from dion_core.transport import Bucket
from tests.unit.test_layout import chunk_holders, random_holders
from tests.unit.test_packing import bucket_for, full_slots, offered_slots, random_chosen, round_trip, seen_from

Rule = Callable[[Bucket], SlotRule]

seeds = st.integers(0, 2**31)
rules = st.sampled_from([full_slots, offered_slots])
bounded = settings(deadline=None, max_examples=60)
counts = st.integers(0, 4)


@bounded
@given(data=st.data(), rule=rules, scattered=st.booleans(), seed=seeds)
def test_every_row_goes_to_its_owner_and_back(data: st.DataObject, rule: Rule, scattered: bool, seed: int) -> None:
    size, num_matrices, rows = (data.draw(st.integers(1, most)) for most in (5, 5, 13))
    holders = random_holders(seed, num_matrices, rows, size) if scattered else chunk_holders(num_matrices, rows, size)
    owners = data.draw(st.lists(st.integers(0, size - 1), min_size=num_matrices, max_size=num_matrices))
    most = data.draw(st.integers(1, rows))
    round_trip(bucket_for(holders, size, owners, most), holders, random_chosen(seed, holders, most), rule)


@bounded
@given(size=st.integers(1, 6), num_matrices=st.integers(1, 6), rows=st.integers(1, 12), seed=seeds, rule=rules)
def test_slots_are_numbered_once_without_gaps(size: int, num_matrices: int, rows: int, seed: int, rule: Rule) -> None:
    holders = random_holders(seed, num_matrices, rows, size)
    bucket = bucket_for(holders, size, [(seed + n * n) % size for n in range(num_matrices)], rows)
    for rank in range(size):
        plan = SlotPlan.of(seen_from(bucket, rank), rule(bucket))
        slots = plan.slot.flatten()
        assert sorted(slots[slots < plan.num_slots].tolist()) == list(range(plan.num_slots))
        assert sum(plan.elements_sent) == plan.num_slots * bucket.shape[1]


@settings(deadline=None)
@given(count=st.lists(st.tuples(counts, counts, counts), min_size=1, max_size=6), spare=st.integers(0, 3))
def test_compact_keeps_every_used_row_once_and_in_order(count: list[tuple[int, ...]], spare: int) -> None:
    """Senders' pieces of 4 slots a matrix lie one behind the other, so that source rows ascend."""
    used = torch.tensor(count)
    start = torch.arange(used.numel()).view(used.shape) * 4
    total = int(used.sum(dim=0).max()) + spare
    source, valid = compact(used, start, total)
    for matrix in range(3):
        rows = source[matrix][valid[matrix]].tolist()
        assert rows == sorted(set(rows))
        assert rows == [row for row in range(used.numel() * 4) if _is_used(row, matrix, count)]
        assert valid[matrix].tolist() == sorted(valid[matrix].tolist(), reverse=True)


def _is_used(row: int, matrix: int, count: list[tuple[int, ...]]) -> bool:
    sender, of_sender = divmod(row, 12)
    of_matrix, place = divmod(of_sender, 4)
    return of_matrix == matrix and place < count[sender][matrix]
