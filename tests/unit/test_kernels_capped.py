"""The kernels of the capped transport, in triton's interpreter (on a GPU where there is one)."""

import pytest
import torch

pytest.importorskip("triton")

from dion_comm_capped.kernels import admission as kernels
from dion_comm_capped.kernels import places
from dion_comm_capped.pool import PoolPlan, PoolTables
from dion_core.kernels import deferral
from dion_core.rows import RowSelection
from dion_core.transport import Bucket
from tests.capped_cases import (
    capped_bucket,
    check_admit,
    check_by_pair,
    check_read_headers,
    check_sending,
    check_waiting,
    device,
    plan_of,
    random_selection,
    refuse_some,
)

OWNERS = [0, 2, 1, 2, 2, 0, 2, 2, 0, 1]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small cases take more than one round of every loop."""
    monkeypatch.setattr(kernels, "MATRICES", 2)
    monkeypatch.setattr(kernels, "SLOTS", 16)
    for module in (kernels, places, deferral):
        monkeypatch.setattr(module, "BLOCK", 4)
    monkeypatch.setattr(places, "TILE", 8)
    monkeypatch.setattr(places, "MATRICES", 4)


def bucket_of(
    owners: list[int] = OWNERS, rows: int = 90, *, columns: int = 3, dtype: torch.dtype = torch.float32
) -> Bucket:
    return capped_bucket(owners, rows, rank=1, size=4, columns=columns, dtype=dtype)


@pytest.mark.parametrize("few_ratios", [False, True])
@pytest.mark.parametrize("late", [0.0, 0.3])
@pytest.mark.parametrize("room", [0.0, 0.02, 0.5, 0.97, 1.0])
def test_the_strongest_of_every_pool(few_ratios: bool, late: float, room: float) -> None:
    bucket = bucket_of()
    selection = random_selection(bucket, 1, few_ratios=few_ratios, late=late)
    rows = [int(selection.count[torch.tensor(OWNERS) == owner].sum()) for owner in range(4)]
    assert rows[3] == 0
    capacity = [int(room * of_pool) for of_pool in rows]
    admitted = check_admit(bucket, selection, capacity, 8)
    assert int(admitted.count.sum()) == sum(capacity)


def test_a_pool_that_overflows_beside_others_that_do_not() -> None:
    bucket = bucket_of()
    for seed, capacity in enumerate(([1000, 1000, 5, 0], [7, 1000, 1000, 1000], [1000, 0, 1000, 3])):
        check_admit(bucket, random_selection(bucket, seed, late=0.1), capacity, 1)


def test_equal_rows_go_slot_by_slot() -> None:
    bucket = bucket_of([0, 0, 0, 1])
    selection = RowSelection.unranked(torch.arange(23).expand(4, 23), torch.full((4,), 23), torch.full((4, 4), 23))
    for room in (1, 3, 10, 37, 68):
        admitted = check_admit(bucket, selection, [room, 99, 0, 0], 8)
        assert admitted.count.tolist() == [(room + 2) // 3, (room + 1) // 3, room // 3, 23]
    zero = RowSelection(selection.index, selection.count, selection.count_by_rank, selection.ratio * 0, selection.age)
    check_admit(bucket, zero, [31, 99, 0, 0], 8)


def test_ages_of_many_years() -> None:
    bucket = bucket_of()
    selection = random_selection(bucket, 5, few_ratios=True, late=0.5)
    selection.age[:, ::3] = 2**31 - 1
    check_admit(bucket, selection, [9, 9, 9, 9], 2**31 - 1)


@pytest.mark.parametrize(("columns", "dtype"), [(1, torch.bfloat16), (3, torch.float16), (5, torch.float32)])
@pytest.mark.parametrize("always_pack", [False, True])
def test_slots_and_headers(columns: int, dtype: torch.dtype, always_pack: bool) -> None:
    bucket = bucket_of(columns=columns, dtype=dtype)
    plan = plan_of(bucket, columns, always_pack=always_pack)
    packed = {plan.packed(1, owner) for owner in range(4)}
    assert packed == {True, False}  # also with `always_pack`, where no matrix is owned
    selection = random_selection(bucket, columns, share=0.5)
    check_sending(bucket, selection, plan)


@pytest.mark.parametrize("always_pack", [False, True])
@pytest.mark.parametrize("rank", [0, 2, 3])
def test_headers_of_all_kinds(rank: int, always_pack: bool) -> None:
    """Right counts, counts that are too large for chunk or matrix, and bytes of any kind."""
    bucket = capped_bucket(OWNERS, 90, rank=rank, size=4, columns=3, dtype=torch.float32)
    plan = plan_of(bucket, rank, always_pack=always_pack)
    selection = random_selection(bucket, rank)
    generator = torch.Generator().manual_seed(rank)
    length = sum(plan.forward_rows[1]) * 3 + 4
    for values in (
        torch.randint(-(2**31), 2**31, (length,), generator=generator),
        torch.randint(-3, 40, (length,), generator=generator),
        torch.full((length,), 2**31 - 1),
        torch.randint(0, 3, (length,), generator=generator),
    ):
        check_read_headers(bucket, selection, plan, values.int().view(torch.float32))


def test_what_is_written_is_read() -> None:
    bucket = capped_bucket([0] * 7, 24, rank=0, size=1, columns=3, dtype=torch.bfloat16)
    selection = random_selection(bucket, 1)
    plan = PoolPlan(bucket, [[1000]], True)
    sent = check_sending(bucket, selection, plan).flatten()
    arrived = torch.cat([sent, sent.new_zeros(4)])
    assert check_read_headers(bucket, selection, plan, arrived).tolist() == [selection.count.tolist()]


def test_the_example_of_the_headers() -> None:
    bucket = capped_bucket([0, 0, 0], 8, rank=0, size=1, columns=1, dtype=torch.float32)
    plan = PoolPlan(bucket, [[5]], True)
    arrived = torch.tensor([3, 9, -1] + [0] * 9, dtype=torch.int32).view(torch.float32)
    assert check_read_headers(bucket, random_selection(bucket, 0), plan, arrived).tolist() == [[3, 2, 0]]


def test_rows_by_pair_of_all_buckets() -> None:
    buckets = [bucket_of(), bucket_of([1]), capped_bucket([0, 0, 1], 9, rank=0, size=3, columns=1, dtype=torch.float64)]
    check_by_pair([(bucket, random_selection(bucket, seed)) for seed, bucket in enumerate(buckets)])


@pytest.mark.parametrize("step", [1, 3])
def test_waiting_times(step: int) -> None:
    bucket = bucket_of()
    chosen = random_selection(bucket, step)
    assert int((chosen.count_by_rank.sum(dim=0) == 0).sum()) > 0
    check_waiting(bucket, chosen, refuse_some(chosen, step), step=step)
    check_waiting(bucket, chosen, chosen, step=step)


def test_the_example_of_waiting() -> None:
    from dion_core.matrices import stacked

    waited = torch.tensor([[0], [2], [1], [0]], dtype=torch.int32, device=device())
    chosen, admitted = (
        RowSelection.unranked(*(torch.tensor(table, device=device()) for table in (index, [count], [[count]])))
        for index, count in (([[0, 1, 3]], 3), ([[1, 0, 3]], 1))
    )
    deferral.wait_(stacked([waited]), chosen, admitted)
    assert waited.flatten().tolist() == [1, 0, 2, 1]


def test_no_matrices_and_none_owned() -> None:
    bucket = bucket_of([])
    selection = random_selection(bucket, 0)
    check_admit(bucket, selection, [3, 3, 3, 3], 8)
    check_by_pair([(bucket, selection)])
    plan = plan_of(bucket, 0, always_pack=True)
    check_sending(bucket, selection, plan)
    assert check_read_headers(bucket, selection, plan, torch.zeros(4)).shape == (4, 0)


def test_tables_start_at_multiples_of_16_bytes() -> None:
    bucket = bucket_of()
    chunks = [each for side in plan_of(bucket, 0, always_pack=True).chunks() for each in vars(side).values()]
    tables = [*vars(PoolTables.of(bucket)).values(), *chunks]
    assert len({table.data_ptr() % 16 for table in tables}) == 1
