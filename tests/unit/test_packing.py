"""Slots, whole matrices and the way back against loops, with every rank and its messages simulated."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dion_core.compaction import compact
from dion_core.layout import Axis, Layout
from dion_core.packing import SlotPlan, SlotRule, orthogonalize_received
from dion_core.transport import Bucket
from tests.unit.test_layout import CPU, Holders, chunk_holders, fake_group, layout_of, random_holders, rows_of


def doubled_by(plan: SlotPlan, received: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The matrices that an owner makes of what it received, and what it sends back if it doubles them."""
    seen = []

    def double(matrices: Tensor) -> Tensor:
        seen.append(matrices.clone())
        return 2 * matrices

    answer = orthogonalize_received(plan, received, counts, double)
    [matrices] = seen
    return matrices, answer


Chosen = Sequence[Sequence[int]]  # by matrix, the chosen global rows, ascending


def bucket_of(layout: Layout, owners: Sequence[int], max_rows: int, total_rows: int) -> Bucket:
    return Bucket(layout, tuple(owners), max_rows, total_rows, torch.float64, CPU, "bucket")


def seen_from(bucket: Bucket, rank: int) -> Bucket:
    size = bucket.layout.group.size
    return replace(bucket, layout=replace(bucket.layout, group=fake_group(rank, size)))


def full_slots(bucket: Bucket) -> SlotRule:
    return bucket.layout.rows


def offered_slots(bucket: Bucket) -> SlotRule:
    return bucket.offered


def random_chosen(seed: int, holders: Holders, most: int) -> list[list[int]]:
    """Up to `most` rows a matrix, none of some."""
    rng = random.Random(seed)
    rows = range(len(holders[0]))
    return [sorted(rng.sample(rows, min(len(rows), rng.choice([0, most, rng.randint(0, most)])))) for _ in holders]


def bucket_for(holders: Holders, size: int, owners: Sequence[int], most: int) -> Bucket:
    """A bucket of which at most `most` rows a matrix are chosen."""
    shards = [len(rows_of(holders, rank, matrix)) for rank in range(size) for matrix in range(len(holders))]
    return bucket_of(layout_of(holders, 0, size, 3), owners, min(most, max(shards)), most)


def all_to_all(messages: Sequence[Tensor], splits: Sequence[Sequence[int]]) -> list[Tensor]:
    """What every rank receives when rank r sends piece i of its message, splits[r][i] long, to rank i."""
    pieces = [torch.split(message, list(lengths)) for message, lengths in zip(messages, splits, strict=True)]
    return [torch.cat([sent[receiver] for sent in pieces]) for receiver in range(len(messages))]


def round_trip(bucket: Bucket, holders: Holders, chosen: Chosen, rule: Callable[[Bucket], SlotRule]) -> None:
    """Rows travel to their owners, are checked there, are doubled, and travel back."""
    size, num_matrices = bucket.layout.group.size, len(holders)
    columns = bucket.shape[1]
    whole = torch.randn(num_matrices, *bucket.shape, dtype=torch.float64) + 5
    here = [
        [[row for row in rows_of(holders, rank, n) if row in chosen[n]] for n in range(num_matrices)]
        for rank in range(size)
    ]
    counts = torch.tensor([list(map(len, of_rank)) for of_rank in here])
    plans = [SlotPlan.of(seen_from(bucket, rank), rule(bucket)) for rank in range(size)]
    buffers = []
    for rank, plan in enumerate(plans):
        used = [int(slot) for n in range(num_matrices) for slot in plan.slot[n, : len(here[rank][n])]]
        assert len(set(used)) == len(used)
        assert max(used, default=-1) < plan.num_slots
        buffer = torch.full((plan.num_slots + 1, columns), torch.nan, dtype=torch.float64)
        for n, of_matrix in enumerate(here[rank]):
            buffer[plan.slot[n, : len(of_matrix)]] = whole[n, of_matrix]
        buffers.append(buffer)
    sent, received = [plan.elements_sent for plan in plans], [plan.elements_received for plan in plans]
    assert received == [[sent[source][owner] for source in range(size)] for owner in range(size)]
    arrived, answers = all_to_all([buffer[:-1].flatten() for buffer in buffers], sent), []
    for owner, (plan, message) in enumerate(zip(plans, arrived, strict=True)):
        matrices, answer = doubled_by(plan, message, counts)
        answers.append(answer)
        owned = tuple(n for n in range(num_matrices) if bucket.owners[n] == owner)
        assert plan.bucket.owned(owner) == owned
        assert matrices.shape == (len(owned), bucket.total_rows, columns)
        for matrix, n in zip(matrices, owned, strict=True):
            by_rank = [row for of_rank in here for row in of_rank[n]]
            # Where a rank holds one run of rows, rank order is global row order.
            assert list(holders[n]) != sorted(holders[n]) or by_rank == list(chosen[n])
            assert torch.equal(matrix[: len(by_rank)], whole[n, by_rank])
            assert not matrix[len(by_rank) :].any()
    returned = all_to_all(answers, received)
    for rank, plan in enumerate(plans):
        result = returned[rank].view(plan.num_slots, columns)
        for n, of_matrix in enumerate(here[rank]):
            assert torch.equal(result[plan.slot[n, : len(of_matrix)]], 2 * whole[n, of_matrix])


def test_the_example_of_compact() -> None:
    source, valid = compact(torch.tensor([[2], [1]]), torch.tensor([[0], [4]]), 4)
    assert source.tolist() == [[0, 1, 4, 0]]
    assert valid.tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("seed", range(20))
def test_compact_equals_a_loop(seed: int) -> None:
    rng = random.Random(seed)
    size, num_matrices = rng.randint(1, 5), rng.randint(0, 4)
    count = [[rng.choice([0, 0, 1, 2, 5]) for _ in range(num_matrices)] for _ in range(size)]
    start = [[rng.randint(0, 99) for _ in range(num_matrices)] for _ in range(size)]
    most = max([sum(count[rank][n] for rank in range(size)) for n in range(num_matrices)], default=0)
    total = most + rng.randint(0, 2)
    shape = (size, num_matrices)
    source, valid = compact(
        torch.tensor(count, dtype=torch.int64).view(shape), torch.tensor(start, dtype=torch.int64).view(shape), total
    )
    assert source.shape == valid.shape == (num_matrices, total)
    for n in range(num_matrices):
        rows = [start[rank][n] + place for rank in range(size) for place in range(count[rank][n])]
        assert source[n].tolist() == rows + [0] * (total - len(rows))
        assert valid[n].tolist() == [place < len(rows) for place in range(total)]


def test_slots_by_hand() -> None:
    """Rank 1 of two has 2 rows of matrices 0 and 2 and 3 of matrix 1; rank 1 owns matrices 0 and 2."""
    holders = [[0, 0, 0, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 1, 1]]
    bucket = bucket_of(layout_of(holders, 1, 2, 7), (1, 0, 1), 3, 5)
    plan = SlotPlan.of(bucket, bucket.layout.rows)
    assert plan.bucket.owned(1) == (0, 2)
    assert plan.num_slots == 7
    assert plan.slot.tolist() == [[3, 4, 7], [0, 1, 2], [5, 6, 7]]  # 7 is no slot
    assert plan.elements_sent == [3 * 7, 4 * 7]
    assert plan.elements_received == [6 * 7, 4 * 7]
    assert plan.rows_between(0, 1) == 6
    assert plan.tables.start.tolist() == [[0, 3], [6, 8]]


CASES = [
    pytest.param(chunk_holders(4, 12, 1), 1, [0, 0, 0, 0], id="one rank"),
    pytest.param(chunk_holders(4, 12, 4), 4, [3, 2, 1, 0], id="even"),
    pytest.param(chunk_holders(5, 10, 4), 4, [2, 2, 2, 0, 2], id="uneven shards and owners"),
    pytest.param(chunk_holders(2, 9, 4), 4, [1, 3], id="fewer matrices than ranks"),
    pytest.param(chunk_holders(1, 2, 4), 4, [3], id="the owner has no rows"),
    pytest.param(chunk_holders(3, 18, 8), 8, [7, 0, 6], id="empty shards"),
    pytest.param(random_holders(1, 3, 11, 3), 3, [0, 2, 2], id="scattered"),
]


@pytest.mark.parametrize(("holders", "size", "owners"), CASES)
@pytest.mark.parametrize("rule", [full_slots, offered_slots])
@pytest.mark.parametrize("most", [1, 4, 99], ids=["one row", "some rows", "all rows"])
def test_rows_go_to_the_owner_and_back(
    holders: Holders, size: int, owners: list[int], rule: Callable[[Bucket], SlotRule], most: int
) -> None:
    most = min(most, len(holders[0]))
    bucket = bucket_for(holders, size, owners, most)
    for seed in range(3):
        round_trip(bucket, holders, random_chosen(seed, holders, most), rule)


def test_nobody_has_anything_to_send() -> None:
    holders = chunk_holders(2, 6, 3)
    round_trip(bucket_for(holders, 3, [1, 1], 6), holders, [[], []], full_slots)


@pytest.mark.parametrize("columns", [[4, 4, 4], [4, 4, 2], [1, 1, 0], [0, 5, 1]], ids=str)
@pytest.mark.parametrize("owners", [[0, 1, 2], [2, 2, 0, 2], [1]], ids=str)
def test_columns_go_to_the_owner_and_back(columns: list[int], owners: list[int]) -> None:
    """Every rank sends its columns of the same rows; what it sends past the count must not matter."""
    most, size, num_matrices = 5, len(columns), len(owners)
    holders = [[rank for rank, width in enumerate(columns) for _ in range(width)]] * num_matrices
    bucket = bucket_of(layout_of(holders, 0, size, 8, Axis.COLUMNS), owners, most, most)
    whole = torch.randn(num_matrices, most, sum(columns), dtype=torch.float64)
    count = torch.tensor([(3 * n + 5) % (most + 1) for n in range(num_matrices)])
    counts = count.expand(size, -1)
    plans = [SlotPlan.of(seen_from(bucket, rank), bucket.offered) for rank in range(size)]
    messages = []
    for rank, (plan, part) in enumerate(zip(plans, torch.split(whole, columns, dim=2), strict=True)):
        buffer = torch.full((plan.num_slots, columns[rank]), torch.nan, dtype=torch.float64)
        for n in range(num_matrices):
            for place in range(int(count[n])):
                buffer[plan.slot[n, place]] = part[n, place]
        messages.append(buffer.flatten())
    arrived = all_to_all(messages, [plan.elements_sent for plan in plans])
    answers = []
    for owner, plan in enumerate(plans):
        matrices, answer = doubled_by(plan, arrived[owner], counts)
        answers.append(answer)
        assert matrices.shape == (len(plan.bucket.owned(plan.rank)), most, sum(columns))
        for place, n in enumerate(plan.bucket.owned(plan.rank)):
            expected = whole[n].clone()
            expected[int(count[n]) :] = 0
            assert torch.equal(matrices[place], expected)
    returned = all_to_all(answers, [plan.elements_received for plan in plans])
    for rank, (plan, part) in enumerate(zip(plans, torch.split(whole, columns, dim=2), strict=True)):
        result = returned[rank].view(plan.num_slots, columns[rank])
        for n in range(num_matrices):
            for place in range(int(count[n])):
                assert torch.equal(result[plan.slot[n, place]], 2 * part[n, place])
