"""The sequence of tiles: every tile once, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from dion_core.newton_schulz_kernels.schedule import _square_row, rectangle_tile, triangle_tile  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


BLOCK = 256


@triton.jit
def _triangle(out, tiles, count, band, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, column = triangle_tile(tl.minimum(place, tiles - 1), count, band, WIDE)
    tl.store(out + 2 * place, row, mask=place < tiles)
    tl.store(out + 2 * place + 1, column, mask=place < tiles)


@triton.jit
def _rectangle(out, rows, columns, band):
    row, column = rectangle_tile(tl.program_id(0), rows, columns, band)
    tl.store(out + 2 * tl.program_id(0), row)
    tl.store(out + 2 * tl.program_id(0) + 1, column)


def triangle(count: int, wide: int, band: int) -> list[tuple[int, int]]:
    tiles = sum(row // wide + 1 for row in range(count))
    out = torch.full((tiles, 2), -1, dtype=torch.int32, device=DEVICE)
    _triangle[(-(-tiles // BLOCK),)](out, tiles, count, band, wide, BLOCK)
    return [(row, column) for row, column in out.tolist()]


@pytest.mark.parametrize("wide", [1, 2])
@pytest.mark.parametrize("band", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 12, 13])
def test_every_tile_of_a_triangle_comes_once(count: int, wide: int, band: int) -> None:
    tiles = triangle(count, wide, band)
    assert sorted(tiles) == [(row, column) for row in range(count) for column in range(row // wide + 1)]


def test_the_order_is_the_documented_one() -> None:
    expected = [(0, 0), (1, 0), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1), (2, 2), (3, 2), (3, 3)]
    assert triangle(4, 1, 2) == expected


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 5), (8, 2), (9, 4)])
@pytest.mark.parametrize("band", [2, 8])
def test_every_tile_of_a_rectangle_comes_once(rows: int, columns: int, band: int) -> None:
    out = torch.full((rows * columns, 2), -1, dtype=torch.int32, device=DEVICE)
    _rectangle[(rows * columns,)](out, rows, columns, band)
    assert sorted(map(tuple, out.tolist())) == [(row, column) for row in range(rows) for column in range(columns)]


def test_a_large_triangle_has_no_gaps() -> None:
    count = 140
    assert sorted(triangle(count, 2, 4)) == [(row, column) for row in range(count) for column in range(row // 2 + 1)]


@triton.jit
def _rows_of(out, places, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + number, _square_row(tl.load(places + number), WIDE))


@pytest.mark.parametrize("wide", [1, 2])
def test_rows_of_squares_where_roots_in_float32_are_off_by_one(wide: int) -> None:
    """The first and the last tile of each row."""
    count = 64 * BLOCK
    rows = torch.arange(1, count + 1)
    first = wide * rows * (rows + 1) // 2
    places = torch.cat([first, first - 1]).to(torch.int32)
    root = (8 * (places // wide) + 1).float().sqrt()
    assert ((root * 0.5 - 0.5).int() != torch.cat([rows, rows - 1])).any()
    out = torch.empty(2 * count, dtype=torch.int32, device=DEVICE)
    _rows_of[(2 * count // BLOCK,)](out, places.to(DEVICE), wide, BLOCK)
    assert torch.equal(out.cpu(), torch.cat([rows, rows - 1]).int())
