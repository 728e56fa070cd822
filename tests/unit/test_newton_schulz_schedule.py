"""The sequence of tiles: every tile once, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from dion_core.newton_schulz import NewtonSchulz  # noqa: E402
from dion_core.newton_schulz_kernels.listing import FIELDS, Kind, list_products  # noqa: E402
from dion_core.newton_schulz_kernels.schedule import (  # noqa: E402
    _square_row,
    find,
    rectangle_tile,
    triangle_tile,
)

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


@triton.jit
def _sequence(out, listing, total, m, n, WIDE: tl.constexpr, TALL: tl.constexpr):
    work = (listing, listing, total, 0, m, n, 2)
    place = tl.program_id(0)
    product, _, before, kind, slot, i, j = find(place, 0, 0, 0, work, WIDE, TALL)
    tl.store(out + 6 * place, product)
    tl.store(out + 6 * place + 1, before)
    tl.store(out + 6 * place + 2, kind)
    tl.store(out + 6 * place + 3, slot)
    tl.store(out + 6 * place + 4, i)
    tl.store(out + 6 * place + 5, j)


@pytest.mark.parametrize(("rows", "columns"), [(256, 384), (384, 256)])
@pytest.mark.parametrize("wide", [1, 2])
def test_a_slot_takes_a_matrix_of_each_part_one_after_the_other(rows: int, columns: int, wide: int) -> None:
    parts, (m, n) = [3, 3, 2], sorted((rows, columns))
    listing = list_products(NewtonSchulz().kernel_segments(rows, columns)[-1:])
    table = torch.tensor(listing.table(parts), dtype=torch.int32, device=DEVICE)
    triangular = [(row, column) for row in range(m // 128) for column in range(row // wide + 1)]
    size = (rows // 128, -(-columns // 128 // wide))
    rectangular = [(row, column) for row in range(size[0]) for column in range(size[1])]
    tiles = [rectangular if product.kind == Kind.APPLY else triangular for product in listing.products]
    total = sum(parts) * sum(map(len, tiles))
    out = torch.full((total, 6), -1, dtype=torch.int32, device=DEVICE)
    _sequence[(total,)](out, table, total, m, n, wide, rows > columns)
    done: dict[int, int] = dict.fromkeys(range(parts[0]), 0)
    places = iter(out.tolist())
    for part, count in enumerate(parts):
        for number, (product, of_product) in enumerate(zip(listing.products, tiles, strict=True)):
            row = part * len(listing.products) + number
            assert table[row * FIELDS : row * FIELDS + 1].tolist() == [product.kind]
            for slot in range(count):
                found = [next(places) for _ in of_product]
                # It waits for as many tiles as its slot had before, all of which come earlier.
                assert {tuple(each[:4]) for each in found} == {(row, done[slot], product.kind, slot)}
                assert sorted((i, j) for *_, i, j in found) == of_product
                done[slot] += len(of_product)
    assert next(places, None) is None


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
