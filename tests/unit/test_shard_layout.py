"""The layout of layer-wise state, planned on shapes alone: balance by cost, buckets, limits, pairs."""

from collections.abc import Callable, Sequence

import pytest

from dion_core.ownership import imbalance, newton_schulz_cost
from dion_core.shard_layout import ALIGNMENT, Entry, FlatBucket, plan_shards

Shape = tuple[int, int]

# (stored, true shape): three weights hold a 64th of the rows that are orthogonalized.
DENSE = [((128, 1024), (128, 1024)), ((256, 256), (256, 256)), ((256, 256), (256, 256))]
GATHERED = [((64, 256), (64 * 64, 256))] * 3
TAIL = [((64, 256), (64, 256))]


def planned(
    entries: Sequence[Entry], world_size: int, bucket_elements: int = 10**9
) -> tuple[list[FlatBucket], list[int]]:
    return plan_shards(entries, bucket_elements=bucket_elements, loads=[0] * world_size, homes={})


def ranks_by_number(buckets: Sequence[FlatBucket]) -> dict[int, int]:
    return {number: rank for bucket in buckets for number, rank in zip(bucket.numbers, bucket.ranks, strict=True)}


def of_equal_cost(numels: Sequence[int]) -> list[Entry]:
    """As vectors, whose cost is their size."""
    return [Entry(numel, numel) for numel in numels]


@pytest.mark.parametrize(
    ("cost_of", "shards_of_gathered", "low", "high"),
    [
        (lambda stored, true: stored[0] * stored[1], 1, 3.76, 3.77),
        (lambda stored, true: newton_schulz_cost(*true), 3, 1.33, 1.335),
    ],
    ids=["by size", "by cost"],
)
def test_cost_spreads_what_size_piles_up(
    cost_of: Callable[[Shape, Shape], int], shards_of_gathered: int, low: float, high: float
) -> None:
    walked = [*DENSE, *GATHERED, *TAIL][::-1]
    entries = [Entry(stored[0] * stored[1], cost_of(stored, true)) for stored, true in walked]
    (bucket,), _ = planned(entries, 4)
    loads = [0] * 4
    for (_, true), rank in zip(walked, bucket.ranks, strict=True):
        loads[rank] += newton_schulz_cost(*true)
    gathered = {rank for shapes, rank in zip(walked, bucket.ranks, strict=True) if shapes in GATHERED}
    assert len(gathered) == shards_of_gathered
    assert low <= imbalance(loads) <= high


def test_loads_go_on_from_bucket_to_bucket() -> None:
    """Each dear one is in a bucket of its own: with loads from 0 in every bucket all would go to rank 0."""
    entries = [entry for _ in range(3) for entry in (Entry(1024, 100), Entry(1024, 1), Entry(1024, 1))]
    buckets, loads = planned(entries, 3, bucket_elements=3 * 1024)
    assert [bucket.numbers for bucket in buckets] == [(0, 1, 2), (3, 4, 5), (6, 7, 8)]
    assert loads == [102, 102, 102]
    ranks = ranks_by_number(buckets)
    assert sorted(ranks[number] for number in (0, 3, 6)) == [0, 1, 2]
    assert all(min(bucket.starts) == 0 and bucket.lengths == (1024,) * 3 for bucket in buckets)


def test_a_plan_goes_on_where_another_ended() -> None:
    entries = of_equal_cost([640, 320])
    _, loads = planned(entries, 2)
    (more,), after = plan_shards(of_equal_cost([256, 256]), bucket_elements=10**6, loads=loads, homes={})
    assert (loads, after) == ([640, 320], [640 + 256, 320 + 256])
    assert more.ranks == (1, 0), "from loads of 0 it would be (0, 1)"


def test_mixed_sizes_can_make_a_bucket_larger() -> None:
    """By the walk both 128 fit beside 448; longest first they do not: 2 * 512 + 2 * 192, where 1280 were possible."""
    numels = [192, 192, 256, 128, 128, 192]
    buckets, _ = planned(of_equal_cost(numels), 2, bucket_elements=448)
    assert [bucket.numbers for bucket in buckets] == [(0, 1, 2, 3, 4), (5,)]
    assert sum(bucket.num_elements for bucket in buckets) == 1408
    closed_at_once = [planned(of_equal_cost(part), 2)[0][0] for part in (numels[:3], numels[3:])]
    assert sum(bucket.num_elements for bucket in closed_at_once) == 1280


def test_equal_sizes_fill_what_would_be_unused() -> None:
    """Five of a size over four ranks take in three more, since they need nothing; not a ninth."""
    buckets, _ = planned(of_equal_cost([256] * 12), 4, bucket_elements=5 * 256)
    assert [len(bucket.numbers) for bucket in buckets] == [8, 4]
    assert all(len(set(bucket.lengths)) == 1 for bucket in buckets)


def test_a_bucket_below_its_size_is_not_closed() -> None:
    buckets, _ = planned(of_equal_cost([256] * 4), 1, bucket_elements=3 * 256)
    assert [len(bucket.numbers) for bucket in buckets] == [3, 1]


def test_memory_limits_what_cost_wants() -> None:
    """Rank 0 has the dearest; all four cheap ones would go to rank 1, which has room for 1.3 * 5 * 640 / 2 = 2080."""
    entries = [Entry(640, 10**6), *[Entry(640, 1)] * 4]
    (bucket,), _ = planned(entries, 2)
    assert bucket.ranks == (0, 1, 1, 1, 0)
    assert max(bucket.lengths) == 3 * 640


def test_without_room_anywhere_the_emptiest_shard_takes_it() -> None:
    """The large one exceeds the limit, 1.3 * 30720 / 4; rank 2 is the first without elements, whatever its load is."""
    large = Entry(2 * 10240, 5)
    (bucket,), _ = plan_shards(
        [Entry(5120, 9), Entry(5120, 8), large], bucket_elements=10**6, loads=[0, 0, 100, 50], homes={}
    )
    assert bucket.ranks == (0, 1, 2)
    (alone,), _ = plan_shards([large], bucket_elements=1, loads=[3, 2, 1, 0], homes={})
    assert alone.ranks == (0,)


def test_a_tied_parameter_stays_where_its_pair_is() -> None:
    walked = [Entry(640, 640, pair="tied"), Entry(640, 640), Entry(640, 640, pair="tied"), Entry(640, 640)]
    for bucket_elements in (1, 640, 10**6):  # in one bucket, or in several
        buckets, _ = planned(walked, 2, bucket_elements)
        ranks = ranks_by_number(buckets)
        assert ranks[0] == ranks[2]
        assert ranks[1] != ranks[0] or ranks[3] != ranks[0]
    untied, _ = planned(of_equal_cost([640] * 4), 4)
    assert len(set(ranks_by_number(untied).values())) == 4
    (bucket,), _ = plan_shards(walked[:2], bucket_elements=1, loads=[0, 0, 0], homes={"tied": 2})
    assert bucket.ranks[0] == 2


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_nothing_overlaps_and_nothing_is_left_out(world_size: int) -> None:
    numels = [7, 64, 65, 0, 1000, 3, 128, 4096, 1, 700]
    buckets, loads = planned([Entry(numel, numel + 1) for numel in numels], world_size, bucket_elements=900)
    assert sorted(number for bucket in buckets for number in bucket.numbers) == list(range(len(numels)))
    assert sum(loads) == sum(numels) + len(numels)
    for bucket in buckets:
        for rank in range(world_size):
            end = 0
            for place in bucket.kept_by(rank):
                assert bucket.starts[place] == end
                assert bucket.starts[place] % ALIGNMENT == 0
                end += -(-numels[bucket.numbers[place]] // ALIGNMENT) * ALIGNMENT
            assert end == bucket.lengths[rank]
