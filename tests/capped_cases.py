"""Checks of the capped transport's kernels, and of those for waiting times, against the definitions."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dion_comm_capped import admission, places
from dion_comm_capped.pool import Chunks, PoolPlan, PoolTables
from dion_core import deferral
from dion_core.layout import Axis, split_layout
from dion_core.matrices import stacked
from dion_core.rows import RowSelection
from dion_core.transport import Bucket
from tests.kernel_cases import CPU, assert_same, device
from tests.unit.test_layout import fake_group

OLDEST = 100  # of random ages


def capped_bucket(owners: list[int], rows: int, *, rank: int, size: int, columns: int, dtype: torch.dtype) -> Bucket:
    """Matrices of so many rows on `size` ranks, of which half the rows are chosen."""
    layout = split_layout(fake_group(rank, size), Axis.ROWS, (rows, columns)).stack(len(owners))
    total = -(-rows // 2)
    return Bucket(layout, tuple(owners), min(total, layout.max_rows(0)), total, dtype, CPU, "bucket")


def random_selection(
    bucket: Bucket, seed: int, *, few_ratios: bool = False, late: float = 0.0, share: float = 1.0
) -> RowSelection:
    """A choice in which some matrices have no rows and the counts of the ranks add up to at most `total_rows`.

    Args:
        bucket: of which rows are chosen.
        seed: of the random numbers.
        few_ratios: so that most of them are equal; others include infinity and NaN.
        late: the part of the rows that have waited.
        share: the part of the rows that are chosen, of those that may be.
    """
    generator = torch.Generator().manual_seed(seed)
    rank, size = bucket.group.rank, bucket.group.size
    num_matrices, slots = bucket.num_matrices, min(bucket.max_rows, bucket.layout.max_rows(rank))
    offered = [[bucket.offered(each, matrix) for matrix in range(num_matrices)] for each in range(size)]
    limits = torch.tensor(offered, dtype=torch.int64).view(size, num_matrices)
    by_rank = (torch.rand(limits.shape, generator=generator) * (limits * share + 0.999)).long().clamp(max=limits)
    by_rank = by_rank.cumsum(0).clamp(max=bucket.total_rows).diff(dim=0, prepend=torch.zeros_like(by_rank[:1]))
    by_rank[:, seed % max(num_matrices, 1) :: 4] = 0
    shape = (num_matrices, slots)
    rows = torch.rand(num_matrices, bucket.layout.rows(rank, 0) if num_matrices else slots, generator=generator)
    index = rows.argsort(dim=1)[:, :slots]
    ratio = 1 / torch.rand(shape, generator=generator)
    if few_ratios:
        values = torch.tensor([0.0, 1.0, 1.5, 2.0, torch.inf, torch.nan])
        ratio = values[torch.randint(0, len(values), shape, generator=generator)]
    age = torch.randint(0, OLDEST, shape, generator=generator, dtype=torch.int32)
    age *= torch.rand(shape, generator=generator) < late
    return RowSelection(index, by_rank[rank].clone(), by_rank, ratio, age)


def moved(value: RowSelection | Chunks | PoolTables) -> RowSelection | Chunks | PoolTables:
    """All tensors of a dataclass on the device where the kernels run."""
    return type(value)(**{name: tensor.to(device()) for name, tensor in vars(value).items()})


def check_admit(bucket: Bucket, selection: RowSelection, capacity: list[int], max_wait: int) -> RowSelection:
    """The kernels let through what the definition does, in the same order."""
    from dion_comm_capped.kernels import admission as kernels

    tables, room = PoolTables.of(bucket), torch.tensor(capacity)
    chunks = Chunks(room, room, room, room)
    expected = admission.admit(selection, tables, chunks, max_wait=max_wait)
    got = kernels.admit(moved(selection), moved(tables), moved(chunks), max_wait=max_wait)
    assert_same(got, expected)
    return expected


def plan_of(bucket: Bucket, seed: int, *, always_pack: bool) -> PoolPlan:
    """Random budgets, of which about half would be longer than all slots."""
    generator = torch.Generator().manual_seed(seed)
    most = torch.tensor(bucket.offered_by_pair)
    budgets = (most * torch.rand(most.shape, generator=generator) * 2).long()
    return PoolPlan(bucket, budgets.tolist(), always_pack)


def check_sending(bucket: Bucket, selection: RowSelection, plan: PoolPlan) -> Tensor:
    """The kernels give the slots of the definition and write the same headers, nothing else. Returns the rows sent."""
    from dion_comm_capped.kernels import places as kernels

    tables, (to_owners, _) = PoolTables.of(bucket), plan.chunks()
    there = moved(selection), moved(tables), moved(to_owners)
    rows = {"sent_rows": sum(plan.forward_rows[0]), "returned_rows": sum(plan.back_rows[0])}
    expected = places.slots(selection, tables, to_owners, **rows)
    for one, other in zip(kernels.slots(*there, **rows), expected, strict=True):
        assert_same(one, other)
    # Of one column of bf16 a count takes two rows.
    values = torch.full((rows["sent_rows"] + 2, bucket.shape[1]), 7.0, dtype=bucket.dtype)
    headed = values.to(device())
    places.write_headers_(values, selection.count, tables, to_owners)
    kernels.write_headers_(headed, there[0].count, *there[1:])
    sent = [each[: rows["sent_rows"]].contiguous().view(torch.uint8).cpu() for each in (headed, values)]
    assert torch.equal(*sent)
    return values[: rows["sent_rows"]]


def check_read_headers(bucket: Bucket, selection: RowSelection, plan: PoolPlan, arrived: Tensor) -> Tensor:
    """The kernel reads what the definition reads; the counts lie within chunks and matrices. Returns them."""
    from dion_comm_capped.kernels import places as kernels

    tables, (_, from_sources) = PoolTables.of(bucket), plan.chunks()
    limits = {"max_rows": bucket.max_rows, "total_rows": bucket.total_rows}
    expected = places.read_headers(arrived, selection.count_by_rank, tables, from_sources, **limits)
    there = arrived.to(device()), selection.count_by_rank.to(device())
    got = kernels.read_headers(*there, moved(tables), moved(from_sources), **limits)
    for one, other in zip(got, expected, strict=True):
        assert_same(one, other)
    count, start, _ = expected
    assert int(count.min() if count.numel() else 0) >= 0
    assert (count.sum(dim=0) <= bucket.total_rows).all()
    ends = torch.tensor(plan.forward_rows[1]).cumsum(0)[:, None].expand(count.shape)
    assert (start + count <= ends)[count > 0].all()
    return count


def check_by_pair(buckets: list[tuple[Bucket, RowSelection]]) -> None:
    """The kernel adds up what the definition does, for all buckets."""
    from dion_comm_capped.kernels import places as kernels

    counts = [selection.count_by_rank for _, selection in buckets]
    of_owner = [PoolTables.of(bucket).place for bucket, _ in buckets]
    num_owners = [len(bucket.working) for bucket, _ in buckets]
    there = [[each.to(device()) for each in tensors] for tensors in (counts, of_owner)]
    assert_same(kernels.rows_by_pair(*there, num_owners), places.rows_by_pair(counts, of_owner, num_owners))


def check_waiting(bucket: Bucket, chosen: RowSelection, admitted: RowSelection, *, step: int) -> None:
    """The kernels look up and change the waiting times as the definitions do; `step` elements apart."""
    from dion_core.kernels import deferral as kernels

    generator, rows = torch.Generator().manual_seed(step), bucket.layout.rows(bucket.group.rank, 0)
    shape = (bucket.num_matrices, rows, step)
    waited = torch.randint(0, 3, shape, generator=generator, dtype=torch.int32)
    there = waited.to(device())
    of_matrix = [each[:, :1] for each in waited]
    operand = stacked([each[:, :1] for each in there])
    assert_same(kernels.with_age(moved(chosen), operand), deferral.with_age(chosen, of_matrix))
    deferral.wait_(of_matrix, chosen, admitted)
    kernels.wait_(operand, moved(chosen), moved(admitted))
    assert_same(there, waited)


def refuse_some(chosen: RowSelection, seed: int) -> RowSelection:
    """The choice with every entry refused at random."""
    generator = torch.Generator().manual_seed(seed)
    going = chosen.valid() & (torch.rand(chosen.index.shape, generator=generator) < 0.5)
    return admission.keep(replace(chosen), going)
