"""Normalization of whole matrices in two passes over memory: one reads, one reads and writes.

Numbers are scaled by a power of two before they are squared, so that nothing overflows or vanishes at any scale
and the scaling itself is exact. The sum of squares of a row is kept with the row's own power of two.

Example: rows (3, 4) and (0.25, 0). Largest entries 4 and 0.25, powers 1/4 and 4, scaled rows (0.75, 1) and (1, 0),
sums of squares 1.5625 and 1. The matrix has the power 1/4: total 1.5625 + 1 * ((1/4) / 4)^2 = 1.56640625, and every
entry is multiplied by 1/4 and then by 1 / sqrt(total) = 0.7990: (0.599, 0.799), (0.050, 0).

Legend: B matrices of R rows and C columns, S rows of a buffer.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from dion_core.launching import cdiv, launch, power_of_two

_BLOCK = 8192
_HELD_BLOCK, _MOST_HELD = 1024, 20
"""Size and highest number of the blocks of a row that is held in registers while its largest entry is looked for."""


@triton.jit
def _power_of_two(largest):
    """A power of two that brings `largest` into [1, 2), or below 1 if it is subnormal; finite and not 0."""
    exponent = largest.to(tl.int32, bitcast=True) >> 23 & 255
    return (tl.minimum(tl.maximum(254 - exponent, 1), 253) << 23).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["eighths", "num_cleared"])
def _row_norms_kernel(
    x, place, largest, squares, cleared, eighths, num_cleared,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, HELD: tl.constexpr, CLEARED: tl.constexpr,
):  # fmt: skip
    """Writes the largest absolute value of a row, and its sum of squares once scaled; the first one clears counters."""
    row = tl.program_id(0).to(tl.int64)
    if row == 0:
        counter = tl.arange(0, CLEARED)
        tl.store(cleared + counter, tl.zeros((CLEARED,), tl.int32), mask=counter < num_cleared)
    source = tl.load(place + row)
    # The factor tells the compiler that rows begin at multiples of 16 bytes; a row that is nowhere has no columns.
    columns = tl.where(source >= 0, eighths, 0) * 8
    start = x + source * (eighths * 8)
    offsets = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float32)
    tops = tl.zeros((BLOCK,), tl.float32)
    if HELD:
        held = ()
        for block in tl.static_range(BLOCKS):
            inside = block * BLOCK + offsets < columns
            held = held + (tl.load(start + block * BLOCK + offsets, mask=inside, other=0),)  # type: ignore[assignment]  # noqa: RUF005
        for block in tl.static_range(BLOCKS):
            tops = tl.maximum(tops, tl.abs(held[block].to(tl.float32)))
        top = tl.max(tops)
        for block in tl.static_range(BLOCKS):
            values = held[block].to(tl.float32) * _power_of_two(top)
            sums += values * values
    else:
        for block in range(BLOCKS):
            inside = block * BLOCK + offsets < columns
            values = tl.load(start + block * BLOCK + offsets, mask=inside, other=0).to(tl.float32)
            tops = tl.maximum(tops, tl.abs(values))
        top = tl.max(tops)
        for block in range(BLOCKS):
            inside = block * BLOCK + offsets < columns
            values = tl.load(start + block * BLOCK + offsets, mask=inside, other=0).to(tl.float32)
            values *= _power_of_two(top)
            sums += values * values
    tl.store(largest + row, top)
    tl.store(squares + row, tl.sum(sums))


@triton.jit(do_not_specialize=["rows", "eighths"])
def _normalize_kernel(
    x, place, out, largest, squares, rows, eighths,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, STATS: tl.constexpr, STAT_BLOCKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Writes ROWS rows over the Frobenius norm of their matrix; a matrix of zeros stays one.

    From the last row to the first: what was read last may still be in the cache, and what is read next will be.
    """
    matrix = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    columns = eighths * 8
    at = tl.arange(0, STATS)
    tops = tl.zeros((STATS,), tl.float32)
    for block in range(STAT_BLOCKS):
        row = block * STATS + at
        tops = tl.maximum(tops, tl.load(largest + matrix * rows + row, mask=row < rows, other=0))
    power = _power_of_two(tl.max(tops))
    sums = tl.zeros((STATS,), tl.float32)
    for block in range(STAT_BLOCKS):
        row = block * STATS + at
        own = _power_of_two(tl.load(largest + matrix * rows + row, mask=row < rows, other=0))
        # A row far smaller than the largest counts for nothing: the square of the ratio may vanish.
        sums += tl.load(squares + matrix * rows + row, mask=row < rows, other=0) * (power / own) * (power / own)
    total = tl.sum(sums)
    inverse = tl.where(total == 0, 0.0, 1 / tl.sqrt(tl.where(total == 0, 1.0, total)))
    offsets = tl.arange(0, BLOCK)
    for local in range(ROWS):
        row = first + local
        source = tl.load(place + matrix * rows + row, mask=row < rows, other=-1)
        target = out + (matrix * rows + row) * columns
        for block in range(BLOCKS):
            inside = (block * BLOCK + offsets < columns) & (row < rows)
            values = tl.load(x + source * columns + block * BLOCK + offsets, mask=inside & (source >= 0), other=0).to(
                tl.float32
            )
            tl.store(target + block * BLOCK + offsets, (values * power * inverse).to(out.dtype.element_ty), mask=inside)


def normalize(matrices: Tensor, *, out: Tensor, cleared: Tensor | None = None) -> Tensor:
    """Returns `out`, holding each matrix over its Frobenius norm.

    Args:
        matrices: (B, R, C), float32, bfloat16 or float16; C a multiple of 8, none of the sizes 0.
        out: (B, R, C), contiguous, of any of these dtypes.
        cleared: see `normalize_rows`.
    """
    place = _in_order(*matrices.shape[:2], matrices.device)
    return normalize_rows(matrices.contiguous().flatten(0, 1), place, out=out, cleared=cleared)


@cache
def _no_counters(device: torch.device) -> Tensor:
    """(1,) int32, of which none is cleared."""
    return torch.empty(1, dtype=torch.int32, device=device)


@cache  # for good: graphs in which launches were captured read it at its address
def _in_order(batch: int, rows: int, device: torch.device) -> Tensor:
    """(B, R) int64: matrix after matrix, row after row."""
    return torch.arange(batch * rows, device=device).view(batch, rows)


def normalize_rows(buffer: Tensor, place: Tensor, *, out: Tensor, cleared: Tensor | None = None) -> Tensor:
    """Returns `out`, holding each matrix over its Frobenius norm.

    Args:
        buffer: (S, C), contiguous, float32, bfloat16 or float16: the rows of all matrices; C a multiple of 8.
        place: (B, R) int64, contiguous: where in the buffer each row of each matrix is; -1 for a row of zeros.
        out: (B, R, C), contiguous, of any of these dtypes; none of the sizes 0.
        cleared: 1-D int32 that is set to 0, for which no launch of its own is needed.
    """
    batch, rows, columns = out.shape
    block = min(power_of_two(columns), _BLOCK)
    blocks = cdiv(columns, block)
    stats = min(power_of_two(rows), 1024)
    # Each program that scales sums up the norms of its matrix once: fewer programs where there are many rows.
    own = 8 if rows > 512 else 2
    norms = torch.empty((2, batch * rows), dtype=torch.float32, device=out.device)
    largest, squares = norms.unbind()
    num_cleared = 0 if cleared is None else len(cleared)
    short = min(block, _HELD_BLOCK)
    held = cdiv(columns, short) <= _MOST_HELD
    length = short if held else block
    launch(
        _row_norms_kernel, batch * rows, out.device, buffer, place, largest, squares,
        _no_counters(out.device) if cleared is None else cleared, columns // 8, num_cleared,
        BLOCK=length, BLOCKS=cdiv(columns, length), HELD=held, CLEARED=max(power_of_two(num_cleared), 64),
        warps=4 if held else 8, contracted=True,
    )  # fmt: skip
    launch(
        _normalize_kernel, cdiv(rows, own), out.device, buffer, place, out, largest, squares, rows, columns // 8,
        BLOCK=block, BLOCKS=blocks, STATS=stats, STAT_BLOCKS=cdiv(rows, stats), ROWS=own,
        second=batch, warps=4 if block <= 2048 else 8, contracted=True,
    )  # fmt: skip
    return out
