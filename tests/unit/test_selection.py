"""Row choice against loops, with every rank simulated: counts, ties, scattered layouts, agreement of ranks."""

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from dion_core.layout import Axis, RowTables, split_layout
from dion_core.rows import SKIPPED_SCORE, RowSelection
from dion_core.selection import AllRows, GlobalRows, LocalRows, Selector, WholeScores, added_scores, rows_to_select
from tests.unit.test_layout import CPU, Holders, chunk_holders, fake_group, layout_of, random_holders, rows_of

LAYOUTS = [
    pytest.param(chunk_holders(3, 12, 1), 1, id="one rank"),
    pytest.param(chunk_holders(3, 12, 4), 4, id="even"),
    pytest.param(chunk_holders(1, 10, 4), 4, id="uneven"),
    pytest.param(chunk_holders(2, 18, 8), 8, id="empty shards"),
    pytest.param(chunk_holders(5, 2, 4), 4, id="fewer rows than ranks"),
    pytest.param([[0, 1, 2] * 4, [2, 2, 1, 1, 0, 0] * 2], 3, id="strided"),
    *(pytest.param(random_holders(seed, 3, 17, 4), 4, id=f"random {seed}") for seed in range(4)),
]
FRACTIONS = [0.01, 0.25, 0.5, 0.99, 1.0]


def scores_of(seed: int, holders: Holders) -> list[list[float]]:
    """Few different values, so that many are equal, and some rows that are to be chosen last."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(-1, 4, (len(holders), len(holders[0])), generator=generator)  # SKIPPED_SCORE is -1
    scores: list[list[float]] = whole.float().tolist()
    return scores


def local_scores(scores: list[list[float]], holders: Holders, rank: int) -> Tensor:
    """(N, R local) as a rank has them; the places of rows that it lacks hold what must not be looked at."""
    rows = [[scores[matrix][row] for row in rows_of(holders, rank, matrix)] for matrix in range(len(holders))]
    most = max(map(len, rows))
    padded = [of_matrix + [torch.inf] * (most - len(of_matrix)) for of_matrix in rows]
    return torch.tensor(padded, dtype=torch.float32).view(len(holders), most)


def best(scores: Sequence[float], candidates: Sequence[int], count: int) -> list[int]:
    """The candidates of highest score, ties to the lower row, ascending."""
    return sorted(sorted(candidates, key=lambda row: (-scores[row], row))[:count])


def select_everywhere(
    selector: Selector, scores: list[list[float]], holders: Holders, size: int, active: Sequence[bool]
) -> list[RowSelection]:
    """What every rank derives from the scores it has."""
    selections = []
    for rank in range(size):
        layout = layout_of(holders, rank, size, 1)
        if selector.needs_all_scores:
            pieces = [local_scores(scores, holders, each).flatten() for each in range(size)]
            starts = tuple(accumulate(map(len, pieces), initial=0))[:-1]
            known = WholeScores().of_rows(torch.cat(pieces), {0: starts}, {0: RowTables(layout, CPU)})[0]
        else:
            known = local_scores(scores, holders, rank)
        selections.append(selector.select(known, RowTables(layout, CPU), torch.tensor(active)))
    return selections


def check(selector: Selector, selections: Sequence[RowSelection], holders: Holders, chosen: Holders) -> None:
    """Every rank's selection names exactly its part of the `chosen` global rows (by matrix, ascending)."""
    size, num_matrices = len(selections), len(holders)
    for rank, selection in enumerate(selections):
        layout = layout_of(holders, rank, size, 1)
        offered = [selector.offered(layout, rank, matrix) for matrix in range(num_matrices)]
        assert selection.index.shape == (num_matrices, max(offered))
        assert selection.index.dtype is torch.int64
        assert torch.equal(selection.count_by_rank, selections[0].count_by_rank)
        assert torch.equal(selection.count, selection.count_by_rank[rank])
        for matrix in range(num_matrices):
            held = rows_of(holders, rank, matrix)
            index = selection.index[matrix].tolist()
            count = int(selection.count[matrix])
            assert count <= offered[matrix] <= len(held)
            assert [held[row] for row in index[:count]] == [row for row in chosen[matrix] if row in held]
            assert len(set(index)) == len(index)
            assert all(row < len(held) for row in index[: len(held)])
            assert selection.valid()[matrix].tolist() == [entry < count for entry in range(len(index))]
    for matrix in range(num_matrices):
        total = selector.total(layout_of(holders, 0, size, 1), matrix)
        assert int(selections[0].count_by_rank[:, matrix].sum()) == len(chosen[matrix]) <= total


@pytest.mark.parametrize(("holders", "size"), LAYOUTS)
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_global_rows(holders: Holders, size: int, fraction: float) -> None:
    num_matrices, rows = len(holders), len(holders[0])
    scores = scores_of(size, holders)
    count = rows_to_select(fraction, rows)
    active = [matrix != 1 for matrix in range(num_matrices)]
    chosen = [best(scores[matrix], range(rows), count * active[matrix]) for matrix in range(num_matrices)]
    selector = GlobalRows(fraction)
    check(selector, select_everywhere(selector, scores, holders, size, active), holders, chosen)
    assert all(len(of_matrix) == count * on for of_matrix, on in zip(chosen, active, strict=True))


@pytest.mark.parametrize(("holders", "size"), LAYOUTS)
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_local_rows(holders: Holders, size: int, fraction: float) -> None:
    num_matrices, rows = len(holders), len(holders[0])
    scores = scores_of(size, holders)
    count = rows_to_select(fraction, -(-rows // size))
    active = [matrix != 1 for matrix in range(num_matrices)]
    chosen = []
    for matrix in range(num_matrices):
        shards = [rows_of(holders, rank, matrix) for rank in range(size)]
        chosen.append(sorted(row for held in shards for row in best(scores[matrix], held, count * active[matrix])))
    selector = LocalRows(fraction)
    check(selector, select_everywhere(selector, scores, holders, size, active), holders, chosen)


@pytest.mark.parametrize(("holders", "size"), LAYOUTS)
def test_all_rows(holders: Holders, size: int) -> None:
    active = [matrix != 1 for matrix in range(len(holders))]
    chosen = [list(range(len(holders[0]) * on)) for on in active]
    scores = scores_of(size, holders)
    check(AllRows(), select_everywhere(AllRows(), scores, holders, size, active), holders, chosen)


@pytest.mark.parametrize("axis", [Axis.COLUMNS, Axis.REPLICATED, Axis.WHOLE])
@pytest.mark.parametrize("selector", [AllRows(), GlobalRows(0.3)], ids=repr)
def test_where_rows_are_not_split_every_rank_chooses_alike(axis: Axis, selector: Selector) -> None:
    scores = torch.tensor([[1.0, 5.0, 5.0, 0.0, 5.0, 2.0], [3.0, 3.0, 3.0, 3.0, 3.0, 3.0]])
    size = 1 if axis is Axis.WHOLE else 3
    expected = [[0, 1, 2, 3, 4, 5]] * 2 if isinstance(selector, AllRows) else [[1, 2], [0, 1]]
    for rank in range(size):
        layout = split_layout(fake_group(rank, size), axis, (6, 6)).stack(2)
        selection = selector.select(scores, RowTables(layout, CPU), torch.tensor([True, True]))
        assert selection.index.tolist() == expected
        assert selection.count_by_rank.tolist() == [[len(expected[0])] * 2] * size
        assert selector.offered(layout, rank, 0) == selector.total(layout, 0) == len(expected[0])


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_the_global_choice_does_not_depend_on_where_rows_lie(fraction: float) -> None:
    scores = scores_of(3, [[0] * 23] * 2)
    choices = []
    for size in range(1, 6):
        for holders in (chunk_holders(2, 23, size), random_holders(size, 2, 23, size)):
            selections = select_everywhere(GlobalRows(fraction), scores, holders, size, [True, True])
            rows = [
                sorted(
                    rows_of(holders, rank, matrix)[row]
                    for rank, each in enumerate(selections)
                    for row in each.index[matrix, : each.count[matrix]].tolist()
                )
                for matrix in range(2)
            ]
            choices.append(rows)
    assert all(choice == choices[0] for choice in choices)
    assert len(choices[0][0]) == rows_to_select(fraction, 23)


def test_a_skewed_global_choice_leaves_ranks_without_rows() -> None:
    holders, scores = chunk_holders(1, 8, 4), [[1.0, 1.1, 9.0, 9.1, 0.5, 0.5, 0.5, 0.5]]
    selections = select_everywhere(GlobalRows(0.25), scores, holders, 4, [True])
    assert selections[0].count_by_rank.tolist() == [[0], [2], [0], [0]]
    assert selections[1].index.tolist() == [[0, 1]]


def test_counts_of_the_formula() -> None:
    assert rows_to_select(0.07, 100) == 7
    assert rows_to_select(0.35, 17) == 6
    assert rows_to_select(0.25, 3) == 1
    assert rows_to_select(1e-12, 10**6) == 1
    assert [rows_to_select(1, rows) for rows in (0, 1, 18, 20480)] == [0, 1, 18, 20480]
    assert rows_to_select(0.5, 0) == 0


def test_whole_scores_of_split_columns_add_up() -> None:
    pieces = [torch.tensor([1.0, 2.0, 3.0, 4.0]) * 10**rank for rank in range(3)]
    whole = added_scores(pieces[1].view(2, 2), torch.cat(pieces), (0, 4, 8))
    assert whole.tolist() == [[111.0, 222.0], [333.0, 444.0]]


def test_a_row_that_one_rank_of_split_columns_leaves_out_comes_last() -> None:
    pieces = [torch.tensor([SKIPPED_SCORE, 0.0, 1.0]), torch.tensor([50.0, 0.0, SKIPPED_SCORE])]
    whole = added_scores(pieces[0].view(1, 3), torch.cat(pieces), (0, 3))
    assert whole.tolist() == [[SKIPPED_SCORE, 0.0, SKIPPED_SCORE]]


def test_scores_of_several_buckets_are_found_in_one_message() -> None:
    """Two buckets, whose rows two ranks hold in turn: of one matrix of 3 rows and of two of 2."""
    layouts = {4: layout_of([[0, 1, 0]], 0, 2, 1), 7: layout_of([[0, 1], [1, 0]], 0, 2, 1)}
    tables = {number: RowTables(layout, CPU) for number, layout in layouts.items()}
    gathered = torch.tensor([10.0, 12.0, 20.0, 31.0, 11.0, 21.0, 30.0])
    scores, starts = WholeScores(), {4: (0, 4), 7: (2, 5)}
    for factor in (1, 2, 3):
        whole = scores.of_rows(gathered * factor, starts, tables)
        assert (whole[4] / factor).tolist() == [[10.0, 11.0, 12.0]]
        assert (whole[7] / factor).tolist() == [[20.0, 21.0], [30.0, 31.0]]
        assert all(each.is_contiguous() for each in whole.values())
        assert all(each.data_ptr() % 16 == 0 for each in whole.values())
    other = scores.of_rows(gathered, {7: (2, 5)}, tables)
    assert other[7].tolist() == [[20.0, 21.0], [30.0, 31.0]]
