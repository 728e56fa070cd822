"""Which rows of a head, a block or a slice a rank holds, and what a bucket of such matrices is."""

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from dion_comm_nccl import LocalTopRows
from dion_core import NorDion2
from dion_core.buckets import MatrixBucket, Member, Part, make_buckets
from dion_core.capture import check_capturable
from dion_core.collectives import SoloGroup
from dion_core.deferral import wait_, with_age
from dion_core.layout import Axis, Layout, RowTables, split_layout
from dion_core.matrices import Matrices
from dion_core.operands import Operands, _DeviceTable
from dion_core.plan import Plan
from dion_core.registry import Choice
from dion_core.rows import accumulate_
from dion_core.selection import AllRows, GlobalRows, LocalRows, SlackRows
from dion_core.views import Views, _rows_of
from tests.unit.test_report import MuteGroup

OPTIONS: dict[str, Any] = {
    "algorithm": "matrix",
    "fraction": 0.5,
    "scope": None,
    "momentum_dtype": None,
    "wire_dtype": None,
    "orthogonalizer": "auto",
    "scale": None,
}


def cut(layout: Layout, sizes: list[int]) -> list[Layout]:
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [_rows_of(layout, start, start + size) for start, size in zip(starts, sizes, strict=True)]


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_blocks_are_the_rows_that_ranks_hold(seed: int) -> None:
    """Against a list of the owner of every single row."""
    rng = random.Random(seed)
    sizes, world_size = [rng.randint(1, 9) for _ in range(rng.randint(1, 6))], rng.randint(1, 5)
    rows = sum(sizes)
    holders = [row // -(-rows // world_size) for row in range(rows)]
    for axis in Axis:
        layout = split_layout(MuteGroup(0, world_size, tuple(range(world_size))), axis, (rows, 7))
        start = 0
        for size, block in zip(sizes, cut(layout, sizes), strict=True):
            assert block.shape == (size, 7)
            for rank in range(world_size):
                held = holders[start : start + size].count(rank) if axis is Axis.ROWS else size
                assert block.rows(rank, 0) == held
                assert block.columns(rank) == layout.columns(rank)
            if axis is Axis.ROWS:
                [of_row] = RowTables(block, torch.device("cpu")).rank_of_row.tolist()
                assert of_row == holders[start : start + size]
                assert block.num_holders == len(set(of_row))
            start += size


def bucket_of_heads(selector_scope: str, rank: int) -> list[MatrixBucket]:
    """Three heads of 6 rows over 2 ranks, of which the second is cut in the middle."""
    group = MuteGroup(rank, 2, (0, 1))
    layouts = cut(split_layout(group, Axis.ROWS, (18, 4)), [6, 6, 6])
    here = tuple(layout.rows(rank, 0) for layout in layouts)
    views = Views("query", ("head 0", "head 1", "head 2"), rows=here)
    member = Member(torch.zeros(9, 4), "query", {**OPTIONS, "scope": selector_scope}, 0)
    parts = [Part(member, views, number) for number in range(3)]
    choice = Choice("local", LocalTopRows(), "for a test")
    return make_buckets(parts, layouts, NorDion2.rule, choice if selector_scope == "local" else None)[0]


def test_heads_of_one_shape_are_one_bucket_wherever_they_lie() -> None:
    for rank, here in ((0, [6, 3, 0]), (1, [0, 3, 6])):
        [bucket] = bucket_of_heads("all", rank)
        assert [bucket.bucket.layout.rows(rank, matrix) for matrix in range(3)] == here
        assert (bucket.bucket.max_rows, bucket.bucket.total_rows, bucket.ragged) == (6, 6, True)
        assert [part.name for part in bucket.parts] == [f"query (head {number})" for number in range(3)]
        assert [member.name for member in bucket.members] == ["query"]
        assert [part.member.number for part in bucket.parts] == [0, 0, 0]
        tensor = torch.arange(36.0).view(9, 4)
        matrices = bucket.matrices([tensor])
        assert [len(matrix) for matrix in matrices] == here
        assert torch.equal(torch.cat(list(matrices)), tensor)
        tensor.fill_(1)
        matrices[1].zero_()
        assert tensor.any(dim=1).nonzero().flatten().tolist() == [*range(here[0]), *range(here[0] + 3, 9)]
        assert bucket.matrices([None]) == [None] * 3


def test_the_local_share_of_a_head_counts_the_ranks_that_hold_it() -> None:
    """Half of 6 rows where one rank has them all; half of 3, rounded up, of each of two ranks."""
    whole, halves = bucket_of_heads("local", 0)
    assert [part.number for part in whole.parts] == [0, 2]
    assert [part.number for part in halves.parts] == [1]
    assert (whole.bucket.max_rows, whole.bucket.total_rows) == (3, 3)
    assert (halves.bucket.max_rows, halves.bucket.total_rows) == (2, 4)
    assert not halves.ragged
    assert SlackRows(0.5, 1.0, 1).total(whole.bucket.layout, 0) == 3
    assert LocalRows(0.5).total(halves.bucket.layout, 0) == LocalRows(0.5, 2).total(halves.bucket.layout, 0) == 4


def test_the_number_of_holders_changes_nothing_for_whole_weights() -> None:
    """Ranks without rows do not change ceil(R / W)."""
    for world_size in range(1, 9):
        for rows in range(1, 40):
            layout = split_layout(MuteGroup(0, world_size, tuple(range(world_size))), Axis.ROWS, (rows, 4))
            for fraction in (0.1, 0.5, 1.0):
                one, other = LocalRows(fraction), LocalRows(fraction, layout.num_holders)
                for rank in range(world_size):
                    assert one.offered(layout, rank, 0) == other.offered(layout, rank, 0)


def test_a_choice_from_heads_of_different_local_rows() -> None:
    """All three heads' best 3 rows of 6, on both ranks, from the definition of accumulate onwards."""
    torch.manual_seed(5)
    gradient = torch.randn(18, 4)
    best = [set((head.abs().sum(dim=1)).topk(3).indices.tolist()) for head in gradient.split(6)]
    scores = gradient.abs().sum(dim=1).view(3, 6)
    for rank in range(2):
        [bucket] = bucket_of_heads("global", rank)
        local = gradient[9 * rank : 9 * rank + 9]
        momentum = torch.zeros(9, 4)
        given = accumulate_(
            bucket.matrices([momentum]),
            bucket.matrices([local]),
            torch.zeros(3, dtype=torch.int64),
            maximize=False,
            proceed=torch.tensor(True),
        )
        assert torch.equal(momentum, local)
        assert given.shape == (3, 6)
        here = [bucket.bucket.layout.rows(rank, matrix) for matrix in range(3)]
        for matrix, rows in enumerate(here):
            assert not given[matrix, rows:].any()
            torch.testing.assert_close(given[matrix, :rows], bucket.matrices([local])[matrix].abs().sum(dim=1))
        selection = GlobalRows(0.5).select(scores, bucket.tables, torch.ones(3, dtype=torch.bool))
        for matrix, first in enumerate((0, 0, 0) if rank == 0 else (0, 3, 0)):
            chosen = selection.index[matrix, : int(selection.count[matrix])] + first
            held = set(range(first, first + here[matrix]))
            assert set(chosen.tolist()) == best[matrix] & held


@pytest.mark.parametrize("rank", [0, 1])
def test_waiting_times_of_heads_of_different_local_rows(rank: int) -> None:
    """Of every head the first chosen row is refused and the others are let through; rows it has not here are passed."""
    [bucket] = bucket_of_heads("all", rank)
    here = [bucket.bucket.layout.rows(rank, matrix) for matrix in range(3)]
    waited = [torch.full((rows, 1), 4, dtype=torch.int32) for rows in here]
    chosen = AllRows().select(torch.zeros(3, 6), bucket.tables, torch.ones(3, dtype=torch.bool))
    assert with_age(chosen, waited).age.tolist() == [[4] * rows + [0] * (6 - rows) for rows in here]
    order = torch.tensor([[*range(1, rows), 0, *range(rows, 6)] if rows else [*range(6)] for rows in here])
    count = (chosen.count - 1).clamp(min=0)
    wait_(waited, chosen, dataclasses.replace(chosen, index=order, count=count))
    assert [steps.flatten().tolist() for steps in waited] == [[5, *[0] * (rows - 1)] if rows else [] for rows in here]


def table_of(bucket: MatrixBucket, tensor: Tensor) -> Operands:
    """The operands that kernels would get of a bucket with one member."""
    matrices = bucket.matrices([tensor])
    scalars = {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.9, "beta2": 0.9}
    [made] = _DeviceTable([bucket], [0]).of_step([Operands(matrices, matrices, matrices, [], [], scalars)])
    return made


def test_kernels_get_even_matrices_by_address_and_uneven_ones_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    tensor = torch.randn(9, 4)
    with caplog.at_level("INFO", "dion_core"):
        [uneven] = bucket_of_heads("all", 0)
        made = table_of(uneven, tensor)
        assert not any(isinstance(getattr(made, role), Matrices) for role in ("parameters", "momentum", "gradients"))
        assert [len(matrix) for matrix in made.gradients if matrix is not None] == [6, 3, 0]
    assert caplog.text.count("query (head 0) and 2 more (6x4): ranks hold different numbers of rows") == 1
    _, even = bucket_of_heads("local", 0)
    made = table_of(even, tensor)
    assert isinstance(made.momentum, Matrices)
    assert list(made.momentum.starts) == [tensor[6:].data_ptr()]
    assert made.momentum.shape == (3, 4)


def test_a_captured_step_refuses_uneven_heads() -> None:
    [bucket] = bucket_of_heads("all", 0)
    plan = Plan([], [bucket], [], None, {}, [])
    with pytest.raises(ValueError, match=r"query \(head 0\) and 2 more .* more rows of one matrix than of another"):
        check_capturable(plan, SoloGroup(), nonfinite="rows")
    _, even = bucket_of_heads("local", 0)
    check_capturable(dataclasses.replace(plan, buckets=[even]), SoloGroup(), nonfinite="rows")
