"""The kernels that choose rows and build matrices, in triton's interpreter (on a GPU where there is one)."""

import pytest
import torch

pytest.importorskip("triton")

from dion_core.kernels import choice as kernels
from dion_core.kernels import compaction
from dion_core.layout import Axis, RowTables, split_layout
from tests.kernel_cases import (
    assert_same,
    check_choose,
    check_choose_local,
    check_collect_and_spread,
    check_scattered_choice,
    device,
    mixed_scores,
)
from tests.unit.test_layout import Holders, chunk_holders, fake_group, layout_of, random_holders

LAYOUTS = [
    pytest.param(chunk_holders(4, 12, 1), 1, id="one rank"),
    pytest.param(chunk_holders(4, 64, 4), 4, id="even"),
    pytest.param(chunk_holders(3, 18, 8), 8, id="empty shards"),
    pytest.param(chunk_holders(2, 1, 4), 4, id="fewer rows than ranks"),
    pytest.param(random_holders(1, 4, 197, 3), 3, id="scattered"),
]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MOST_KEYS", 128)
    monkeypatch.setattr(kernels, "KEYS_AT_A_TIME", 128)
    monkeypatch.setattr(kernels, "CHUNK", 64)


@pytest.mark.parametrize(("holders", "size"), LAYOUTS)
@pytest.mark.parametrize(("fraction", "dtype"), [(0.3, torch.float32), (0.01, torch.float64), (1.0, torch.float32)])
def test_scattered_rows(holders: Holders, size: int, fraction: float, dtype: torch.dtype) -> None:
    check_scattered_choice(holders, size, fraction, dtype)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_more_rows_than_a_block(dtype: torch.dtype) -> None:
    scores = mixed_scores(0, 3, 300, dtype)
    check_choose(scores, layout_of(random_holders(2, 3, 300, 3), 1, 3, 1), [True, True, True], 120, 120)
    check_choose_local(scores[:, :137].contiguous(), layout_of(chunk_holders(3, 274, 2), 1, 2, 1), [True] * 3, 50)


@pytest.mark.parametrize("axis", [Axis.COLUMNS, Axis.REPLICATED, Axis.WHOLE])
def test_where_every_rank_has_all_rows(axis: Axis) -> None:
    size = 1 if axis is Axis.WHOLE else 3
    layout = split_layout(fake_group(size - 1, size), axis, (37, 6)).stack(4)
    check_choose(mixed_scores(0, 4, 37, torch.float32), layout, [True, True, False, True], 11, 11)


def test_fewer_slots_than_chosen_rows_anywhere() -> None:
    """As for slack: rows of minus infinity come last, after those that were left out, and a rank offers few."""
    scores = torch.tensor([[-torch.inf, -1.0, 2.0, -torch.inf, -1.0, 0.0, 2.0, -torch.inf]])
    got = check_choose(scores, layout_of(chunk_holders(1, 8, 2), 0, 2, 1), [True], 4, 3)
    assert got.index.tolist() == [[1, 2, 0]]
    assert got.count_by_rank.tolist() == [[2], [2]]
    assert got.ratio.tolist() == [[0.0, torch.inf, 0.0]]


def test_scores_at_the_ends_of_the_range() -> None:
    tiny, huge = 2.0**-149, torch.finfo(torch.float32).max
    scores = torch.tensor([[huge, tiny, 0.0, torch.inf, 0.0, -1.0, tiny * 2, torch.inf]])
    layout = split_layout(fake_group(0, 1), Axis.WHOLE, (8, 1))
    for total in range(1, 9):
        check_choose(scores, layout, [True], total, total)


def test_no_matrices() -> None:
    layout = split_layout(fake_group(0, 2), Axis.ROWS, (8, 1)).stack(0)
    tables = RowTables(layout, device())
    active = torch.ones(0, dtype=torch.bool, device=device())
    chosen = kernels.choose(torch.empty(0, 8, device=device()), tables, active, total=2, offer=2)
    assert chosen.count_by_rank.shape == (2, 0)


def test_a_rank_without_rows_lists_none() -> None:
    layout = layout_of(chunk_holders(2, 3, 4), 3, 4, 1)
    assert check_choose(mixed_scores(1, 2, 3, torch.float32), layout, [True, True], 2, 2).index.shape == (2, 0)
    check_choose_local(torch.empty(2, 0), layout, [True, True], 1)


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize(
    ("columns", "dtype", "shift"),
    [
        (8, torch.bfloat16, 0),
        (264, torch.bfloat16, 0),
        (5, torch.float16, 0),
        (6, torch.bfloat16, 1),
        (7, torch.float32, 0),
        (8, torch.float32, 2),
        (300, torch.float64, 0),
        (3, torch.float64, 1),
    ],
)
def test_collect_and_spread(size: int, columns: int, dtype: torch.dtype, shift: int) -> None:
    check_collect_and_spread(columns, dtype, size=size, total=19, shift=shift)


def test_the_example_of_the_kernel() -> None:
    rows = torch.arange(5.0, device=device())[:, None]
    count, start = (torch.tensor(table, device=device()) for table in ([[2], [1]], [[0], [4]]))
    matrices = compaction.collect(rows, count, start, 4)
    assert matrices.flatten().tolist() == [0.0, 1.0, 4.0, 0.0]
    assert compaction.places(count, start, 4).tolist() == [[0, 1, 4, -1]]
    compaction.spread_(rows, matrices + 10, count, start)
    assert rows.flatten().tolist() == [10.0, 11.0, 2.0, 3.0, 14.0]


def test_nothing_was_received() -> None:
    count, start = (torch.zeros(2, 3, dtype=torch.int64, device=device()) for _ in range(2))
    assert_same(compaction.collect(torch.empty(0, 4, device=device()), count, start, 2), torch.zeros(3, 2, 4))
    compaction.spread_(torch.empty(0, 4, device=device()), torch.empty(3, 2, 4, device=device()), count, start)
