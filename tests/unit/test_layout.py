"""Segments, layouts and row tables against plain loops over rows."""

import random
from collections.abc import Sequence
from itertools import groupby

import pytest
import torch

from dion_core.collectives import SoloGroup
from dion_core.layout import Axis, Layout, RowTables, Segment, shard_segments, split_layout

CPU = torch.device("cpu")
Holders = Sequence[Sequence[int]]  # by matrix and row (or column), the rank that holds it


def fake_group(rank: int, size: int) -> SoloGroup:
    """One of several ranks, as far as numbers go; its collectives must not be used."""
    return SoloGroup(rank, size, tuple(range(size)))


def layout_of(holders: Holders, rank: int, size: int, other_side: int, axis: Axis = Axis.ROWS) -> Layout:
    """The layout, seen from `rank`, where each rank holds the rows (or columns) that `holders` says."""
    segments = []
    for each in range(size):
        of_rank = []
        for matrix in holders:
            runs = [list(run) for _, run in groupby(range(len(matrix)), key=lambda row: matrix[row])]
            of_rank.append(tuple((run[0], len(run)) for run in runs if matrix[run[0]] == each))
        segments.append(tuple(of_rank))
    shape = (len(holders[0]), other_side) if axis is Axis.ROWS else (other_side, len(holders[0]))
    return Layout(fake_group(rank, size), axis, shape, tuple(segments))


def random_holders(seed: int, num_matrices: int, length: int, size: int) -> list[list[int]]:
    """Rows scattered over the ranks in runs of 1 to 3, differently for every matrix; some ranks stay empty."""
    rng = random.Random(seed)
    holders = []
    for _ in range(num_matrices):
        ranks = rng.sample(range(size), rng.randint(1, size))
        matrix: list[int] = []
        while len(matrix) < length:
            matrix += [rng.choice(ranks)] * rng.randint(1, 3)
        holders.append(matrix[:length])
    return holders


def chunk_holders(num_matrices: int, length: int, size: int) -> list[list[int]]:
    """Row r on the rank of the r-th element's chunk, as torch.chunk cuts."""
    chunks = torch.arange(length).chunk(size) if length else ()
    return [[rank for rank, chunk in enumerate(chunks) for _ in chunk] for _ in range(num_matrices)]


def rows_of(holders: Holders, rank: int, matrix: int) -> list[int]:
    """The global rows that a rank holds, ascending."""
    return [row for row, holder in enumerate(holders[matrix]) if holder == rank]


def test_segments_are_those_of_torch_chunk() -> None:
    for length in [*range(41), 97, 128, 1000]:
        for size in [*range(1, 13), 33, 64]:
            chunks = torch.arange(length).chunk(size) if length else ()
            expected = [(int(chunk[0]), len(chunk)) for chunk in chunks if len(chunk)]
            segments = shard_segments(length, size)
            assert len(segments) == size
            assert [piece for piece in segments if piece[1]] == expected
            assert all(piece == (length, 0) for piece in segments[len(expected) :])


def test_fewer_rows_than_ranks_times_the_shard() -> None:
    assert [rows for _, rows in shard_segments(18, 8)] == [3, 3, 3, 3, 3, 3, 0, 0]
    assert [offset for offset, _ in shard_segments(18, 8)] == [0, 3, 6, 9, 12, 15, 18, 18]
    assert shard_segments(1, 3) == ((0, 1), (1, 0), (1, 0))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("rows", "columns"), [(18, 5), (8, 12), (1, 1), (3, 64)])
def test_split_layouts(rows: int, columns: int, size: int) -> None:
    matrix = torch.empty(rows, columns)
    for rank in range(size):
        group = fake_group(rank, size)
        for axis in Axis:
            if axis in (Axis.REPLICATED, Axis.WHOLE):
                expected = (rows, columns)
            else:
                dim = 0 if axis is Axis.ROWS else 1
                chunks = matrix.chunk(size, dim)
                empty = (0, columns) if axis is Axis.ROWS else (rows, 0)
                expected = tuple(chunks[rank].shape) if rank < len(chunks) else empty
            layout = split_layout(group, axis, (rows, columns))
            assert layout.num_matrices == 1
            assert layout.local_shape() == expected
            assert (layout.rows(rank, 0), layout.columns(rank)) == expected
            assert layout.max_rows(rank) == expected[0]


def test_a_stack_repeats_the_layout() -> None:
    one = layout_of([[1, 0, 0, 1, 2]], 1, 3, 4)
    assert one.stack(3) == layout_of([[1, 0, 0, 1, 2]] * 3, 1, 3, 4)
    assert one.stack(1) == one
    assert hash(one.stack(3)) != hash(one)
    assert layout_of([[1, 0, 0, 1, 2]], 0, 3, 4) != one


def test_a_layout_by_hand() -> None:
    """Two matrices of 5 rows that differ: rank 0 has two pieces of the first, rank 2 nothing of the second."""
    segments: tuple[tuple[tuple[Segment, ...], ...], ...] = (
        (((0, 1), (3, 1)), ((2, 3),)),
        (((1, 2),), ((0, 2),)),
        (((4, 1),), ()),
    )
    layout = Layout(fake_group(1, 3), Axis.ROWS, (5, 2), segments)
    assert layout == layout_of([[0, 1, 1, 0, 2], [1, 1, 0, 0, 0]], 1, 3, 2)
    assert [[layout.rows(rank, matrix) for matrix in (0, 1)] for rank in range(3)] == [[2, 3], [2, 2], [1, 0]]
    assert [layout.max_rows(rank) for rank in range(3)] == [3, 2, 1]
    assert (layout.local_shape(0), layout.local_shape(1)) == ((2, 2), (2, 2))
    tables = RowTables(layout, CPU)
    assert tables.position.tolist() == [[1, 2], [5, 6]]
    assert tables.place_in((0, 6, 10)).tolist() == [[0, 6, 7, 1, 10], [8, 9, 3, 4, 5]]
    assert tables.place_in((5, 20, 30)).tolist() == [[5, 20, 21, 6, 30], [22, 23, 8, 9, 10]]
    assert tables.rank_of_row.tolist() == [[0, 1, 1, 0, 2], [1, 1, 0, 0, 0]]
    assert tables.num_rows.tolist() == [[2, 3], [2, 2], [1, 0]]


ROW_CASES = [
    pytest.param([[0] * 6], 1, id="one rank"),
    pytest.param(chunk_holders(3, 18, 8), 8, id="even with empty shards"),
    pytest.param(chunk_holders(2, 10, 4), 4, id="uneven"),
    pytest.param(chunk_holders(2, 2, 4), 4, id="fewer rows than ranks"),
    pytest.param([[0, 1, 2, 3] * 2, [3, 3, 2, 2, 1, 1, 0, 0]], 4, id="strided"),
    *(pytest.param(random_holders(seed, 3, 13, 4), 4, id=f"random {seed}") for seed in range(6)),
]


@pytest.mark.parametrize(("holders", "size"), ROW_CASES)
def test_row_tables_equal_loops(holders: Holders, size: int) -> None:
    num_matrices, rows = len(holders), len(holders[0])
    nowhere = num_matrices * rows
    every: list[int] = []
    starts: list[int] = []
    for rank in range(size):
        held = [rows_of(holders, rank, matrix) for matrix in range(num_matrices)]
        most = max(map(len, held))
        expected = [
            [matrix * rows + row for row in held[matrix]] + [nowhere] * (most - len(held[matrix]))
            for matrix in range(num_matrices)
        ]
        layout = layout_of(holders, rank, size, 5)
        position = RowTables(layout, CPU).position
        assert position.dtype is torch.int64
        assert position.shape == (num_matrices, most)
        assert position.tolist() == expected
        assert [layout.rows(rank, matrix) for matrix in range(num_matrices)] == [len(each) for each in held]
        assert layout.max_rows(rank) == most
        assert layout.local_shape(num_matrices - 1) == (len(held[-1]), 5)
        starts.append(len(every))
        every += [place for matrix in expected for place in matrix]
    for rank in range(size):
        tables = RowTables(layout_of(holders, rank, size, 5), CPU)
        places = tables.place_in(tuple(starts)).flatten().tolist()
        assert [every[place] for place in places] == list(range(nowhere))
        assert tables.rank_of_row.tolist() == [list(matrix) for matrix in holders]
        assert tables.num_rows.tolist() == [
            [len(rows_of(holders, each, matrix)) for matrix in range(num_matrices)] for each in range(size)
        ]
    assert sorted(place for place in every if place < nowhere) == list(range(nowhere))


@pytest.mark.parametrize("axis", [Axis.COLUMNS, Axis.REPLICATED, Axis.WHOLE])
def test_row_tables_where_every_rank_has_all_rows(axis: Axis) -> None:
    for rank in range(3):
        layout = split_layout(fake_group(rank, 3), axis, (4, 2)).stack(2)
        tables = RowTables(layout, CPU)
        assert tables.position.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert tables.num_rows.tolist() == [[4, 4]] * 3


def test_column_layouts_may_be_strided() -> None:
    layout = layout_of([[0, 1, 0, 2, 0, 1]], 0, 3, 7, Axis.COLUMNS)
    assert layout.shape == (7, 6)
    assert [layout.columns(rank) for rank in range(3)] == [3, 2, 1]
    assert [layout.rows(rank, 0) for rank in range(3)] == [7, 7, 7]
    assert layout.local_shape() == (7, 3)
