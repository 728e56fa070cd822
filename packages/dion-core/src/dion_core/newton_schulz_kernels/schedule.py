"""Which tile comes when, for the kernel of products.

All tiles of all products of all matrices form one sequence: part by part of the batch, within a part product by
product, within a product matrix by matrix, within a matrix in bands of rows of tiles, so that tiles that run at the
same time share operands in the L2 cache. Each matrix of a part has a slot, that is buffers and a counter, which goes on
to one of the next part.

Example: B = 2 matrices of m = 256 and tiles of one block: 3 tiles in a symmetric product, (0, 0), (1, 0), (1, 1).
Product 0 takes places 0 to 2 for matrix 0 and 3 to 5 for matrix 1, product 1 places 6 to 8 for matrix 0, and so on.

Legend: B matrices, m order of the symmetric matrices, n the longer side of X, T = 128 the side of a block; a tile is
one row of WIDE blocks (1 or 2); a band is so many rows of squares of WIDE x WIDE blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

T = tl.constexpr(128)
FIELDS = tl.constexpr(8)
"""Of a product in the table: kind, left, right, alpha, first and end of operations, first matrix, matrices."""
GRAM = tl.constexpr(0)
APPLY = tl.constexpr(2)


@triton.jit
def _square_row(place, WIDE: tl.constexpr):
    """The row of squares that holds tile `place`, counting the tiles on and below the diagonal row by row."""
    row = (tl.sqrt((8 * (place // WIDE) + 1).to(tl.float32)) * 0.5 - 0.5).to(tl.int32)
    row = tl.where(WIDE * row * (row + 1) // 2 > place, row - 1, row)
    return tl.where(WIDE * (row + 1) * (row + 2) // 2 <= place, row + 1, row)


@triton.jit
def triangle_tile(place, count, band, WIDE: tl.constexpr):
    """(row, column) of tile `place` on or below the diagonal, of `count` rows of tiles.

    Example: WIDE = 1, band = 2, count = 4: (0, 0), (1, 0), (1, 1), then (2, 0), (3, 0), (2, 1), (3, 1), (2, 2),
    (3, 2), (3, 3).
    """
    first = _square_row(place, WIDE) // band * band
    offset = place - WIDE * first * (first + 1) // 2
    height = tl.minimum(band * WIDE, count - first * WIDE)
    rest = offset - first * height  # of the band's own triangle, to the right of its full columns
    inside = tl.maximum(rest, 0)
    square = _square_row(inside, WIDE)
    in_row = inside - WIDE * square * (square + 1) // 2
    row = tl.where(rest < 0, offset % height, square * WIDE + in_row // (square + 1))
    column = tl.where(rest < 0, offset // height, first + in_row % (square + 1))
    return first * WIDE + row, column


@triton.jit
def is_narrow(kind, i, j, WIDE: tl.constexpr, TALL: tl.constexpr):
    """Whether the second block of tile (i, j) lies above the diagonal and is left out (not so if X is tall)."""
    return (kind != APPLY) & (WIDE * j + WIDE - 1 > i) & (not TALL)


@triton.jit
def rectangle_tile(place, rows, columns, band):
    """(row, column) of tile `place` of rows x columns tiles, in bands of `band` rows, column by column."""
    first = place // (columns * band) * band
    offset = place - first * columns
    height = tl.minimum(band, rows - first)
    return first + offset % height, offset // height


@triton.jit
def find(place, product, start, before, work, WIDE: tl.constexpr, TALL: tl.constexpr):
    """What lies at `place` of the sequence, searched for from an earlier product on.

    Returns the product, its first place, how many tiles a slot has in all products before it, its kind, the slot, and
    the row and column of the tile.
    """
    listing, _counters, _total, _slots, m, n, band = work
    count = tl.cdiv(m, T)
    squares = count // WIDE
    triangle = WIDE * squares * (squares + 1) // 2 + count % WIDE * (squares + 1)
    rows = tl.cdiv(n, T) if TALL else count
    columns = tl.cdiv(m, T * WIDE) if TALL else tl.cdiv(n, T * WIDE)
    kind = tl.load(listing + product * FIELDS)
    tiles = tl.where(kind == APPLY, rows * columns, triangle)
    end = start + tl.load(listing + product * FIELDS + 7) * tiles
    while place >= end:
        start = end
        before += tiles
        product += 1
        kind = tl.load(listing + product * FIELDS)
        tiles = tl.where(kind == APPLY, rows * columns, triangle)
        end = start + tl.load(listing + product * FIELDS + 7) * tiles
    slot = (place - start) // tiles
    if kind == APPLY:
        i, j = rectangle_tile((place - start) % tiles, rows, columns, band * 2)
    else:
        i, j = triangle_tile((place - start) % tiles, count, band, WIDE)
    return product, start, before, kind, slot, i, j
