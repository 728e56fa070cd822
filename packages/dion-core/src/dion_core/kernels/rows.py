"""The row operations of `dion_core.rows` in Triton, each one launch for all matrices of a bucket.

A program serves one row. Dtypes are those in `addressing.DTYPES`; arithmetic is in fp32 and rounded once. Sums over
a row run in fp64: they are exact for half-precision values unless magnitudes in a row lie more than 2^29 apart, so
that how a row lies in memory, or how many threads sum it, does not show.

Legend: N matrices of a bucket, R local rows and C local columns of one, K slots a matrix, S rows of a buffer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dion_core.kernels.addressing import (
    VECTOR,
    buffer,
    buffer_row,
    device_scalar,
    entries,
    offset,
    operand,
    row_block,
    row_start,
)
from dion_core.launching import cdiv, launch, power_of_two
from dion_core.matrices import Matrices
from dion_core.rows import SKIPPED_SCORE, Rows, RowSelection

_SKIPPED = tl.constexpr(SKIPPED_SCORE)

LONGEST = 32768
"""Columns of the longest row that is kept in registers between its sum and its store."""


def row_pieces(columns: int) -> tuple[int, int, int]:
    """(columns of a piece, pieces, warps) for a program that keeps a row in registers; 0 pieces: it is too long.

    A thread keeps up to 40 columns, beyond 20480 columns up to 64: more were slower for short rows on an H200.
    """
    warps = min(16, power_of_two(cdiv(columns, 32 * 40)))
    piece = warps * 32 * VECTOR
    return piece, cdiv(columns, piece) if columns <= LONGEST else 0, warps


@triton.jit
def _add(
    state, step, ACCESS: tl.constexpr, gradient, gradient_step, GRADIENT_ACCESS: tl.constexpr, column, inside, given,
    MAXIMIZE: tl.constexpr,
):  # fmt: skip
    """Columns of the momentum, and of its sum with the gradient as it would be stored."""
    kept = tl.load(state + offset(column, step, ACCESS), mask=inside, other=0)
    place = gradient + offset(column, gradient_step, GRADIENT_ACCESS)
    added = tl.load(place, mask=inside & given, other=0).to(tl.float32)
    if MAXIMIZE:
        added = -added
    return kept, (added + kept.to(tl.float32)).to(kept.dtype)


@triton.jit
def _size(values):
    return tl.abs(values.to(tl.float32)).to(tl.float64)


@triton.jit(do_not_specialize=["stride", "step", "gradient_stride", "gradient_step", "num_rows"])
def _accumulate_kernel(
    momentum, stride, step, MOMENTUM: tl.constexpr, ACCESS: tl.constexpr,
    gradients, gradient_stride, gradient_step, GRADIENT: tl.constexpr, GRADIENT_ACCESS: tl.constexpr,
    scores, left_out, proceed, num_rows,
    COLUMNS: tl.constexpr, MAXIMIZE: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """One row: sum, test, score and store. A row of up to PIECES pieces is read once, a longer one (0) twice.

    The sum of absolute values is finite only if all of them are: no sum of fp32 values overflows fp64.

    Example: momentum [1, -2] and gradient [3, 4] give momentum [4, 2] and score 6. Gradient [inf, 4] leaves
    momentum [1, -2], gives score -1 and counts 1.
    """
    program = tl.program_id(0).to(tl.int64)
    matrix, row = program // num_rows, program % num_rows
    state = row_start(momentum, matrix, row, stride, MOMENTUM, ACCESS)
    given = tl.load(gradients + matrix) != 0
    gradient = row_start(gradients, matrix, row, gradient_stride, GRADIENT, GRADIENT_ACCESS)
    proceeds = tl.load(proceed) != 0
    lane = tl.arange(0, PIECE)
    sums = tl.zeros((PIECE,), tl.float64)
    totals = ()
    if PIECES > 0:
        for piece in tl.static_range(PIECES):
            column = piece * PIECE + lane
            _, total = _add(state, step, ACCESS, gradient, gradient_step, GRADIENT_ACCESS, column, column < COLUMNS,
                            given, MAXIMIZE)  # fmt: skip
            sums += _size(total)
            totals = totals + (total,)  # type: ignore[assignment]  # noqa: RUF005 - Triton knows no starred tuple
    else:
        for first in range(0, COLUMNS, PIECE):
            column = first + lane
            _, total = _add(state, step, ACCESS, gradient, gradient_step, GRADIENT_ACCESS, column, column < COLUMNS,
                            given, MAXIMIZE)  # fmt: skip
            sums += _size(total)
    score = tl.sum(sums)
    finite = score < float("inf")
    skipped = given & (finite == 0)
    stores = given & finite & proceeds
    if PIECES > 0:
        for piece in tl.static_range(PIECES):
            column = piece * PIECE + lane
            tl.store(state + offset(column, step, ACCESS), totals[piece], mask=(column < COLUMNS) & stores)
    elif stores:
        for first in range(0, COLUMNS, PIECE):
            column = first + lane
            _, total = _add(state, step, ACCESS, gradient, gradient_step, GRADIENT_ACCESS, column, column < COLUMNS,
                            given, MAXIMIZE)  # fmt: skip
            tl.store(state + offset(column, step, ACCESS), total, mask=column < COLUMNS)
    if proceeds == 0:  # rare: the score is that of the momentum as it stays
        sums = tl.zeros((PIECE,), tl.float64)
        for first in range(0, COLUMNS, PIECE):
            column = first + lane
            sums += _size(tl.load(state + offset(column, step, ACCESS), mask=column < COLUMNS, other=0))
        score = tl.sum(sums)
    tl.store(scores + program, tl.where(skipped, _SKIPPED, score.to(tl.float32)))
    tl.atomic_add(left_out + matrix, 1, mask=skipped)


def accumulate_(
    momentum: Matrices, gradients: Matrices, left_out: Tensor, *, maximize: bool, proceed: Tensor
) -> Tensor:
    """Adds the gradients to the momentum, counts the rows left out, and returns the (N, R) fp32 row scores."""
    rows, columns = momentum.shape
    device = momentum.addresses.device
    scores = torch.empty(len(momentum), rows, dtype=torch.float32, device=device)
    piece, pieces, warps = row_pieces(columns)
    launch(
        _accumulate_kernel, len(momentum) * rows, device, *operand(momentum), *operand(gradients),
        scores, left_out, proceed, rows,
        COLUMNS=columns, MAXIMIZE=maximize, PIECE=piece, PIECES=pieces, warps=warps,
    )  # fmt: skip
    return scores


@triton.jit(do_not_specialize=[
    "stride", "step", "gradient_stride", "gradient_step", "row_stride", "row_step", "index_stride", "slot_stride",
    "count_stride", "slots",
])  # fmt: skip
def _take_and_decay_kernel(
    momentum, stride, step, MOMENTUM: tl.constexpr, ACCESS: tl.constexpr,
    gradients, gradient_stride, gradient_step, GRADIENT: tl.constexpr, GRADIENT_ACCESS: tl.constexpr,
    values, row_stride, row_step, ROW_ACCESS: tl.constexpr,
    index, index_stride, slot, slot_stride, count, count_stride, decay, slots,
    COLUMNS: tl.constexpr, NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One entry of the selection: its row goes to its slot and stays decayed. Entries past the count do nothing.

    With slot -1 the row is decayed alone.

    Example: decay 0.5, momentum row [4, -2] and slot 7 give values[7] = [4, -2] and momentum [2, -1]; with
    Nesterov and gradient [1, 1] values[7] = [3, 0].
    """
    program = tl.program_id(0).to(tl.int64)
    matrix, entry = program // slots, program % slots
    if entry >= tl.load(count + matrix * count_stride):
        return
    row = tl.load(index + matrix * index_stride + entry)
    place = tl.load(slot + matrix * slot_stride + entry)
    factor = tl.load(decay).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    state = row_start(momentum, matrix, row, stride, MOMENTUM, ACCESS)
    taken = buffer_row(values, place, row_stride, ROW_ACCESS)
    adds = False
    gradient = state
    if NESTEROV:
        adds = tl.load(gradients + matrix) != 0
        gradient = row_start(gradients, matrix, row, gradient_stride, GRADIENT, GRADIENT_ACCESS)
        if adds:  # a row of the gradient that is not finite counts as zero
            sums = tl.zeros((BLOCK,), tl.float64)
            for first in range(0, COLUMNS, BLOCK):
                column = first + lane
                place_of = gradient + offset(column, gradient_step, GRADIENT_ACCESS)
                sums += _size(tl.load(place_of, mask=column < COLUMNS, other=0))
            adds = adds & (tl.sum(sums) < float("inf"))
    written = place >= 0
    for first in range(0, COLUMNS, BLOCK):
        column = first + lane
        inside = column < COLUMNS
        kept = tl.load(state + offset(column, step, ACCESS), mask=inside, other=0).to(tl.float32)
        decayed = kept * factor
        if NESTEROV:
            place_of = gradient + offset(column, gradient_step, GRADIENT_ACCESS)
            kept = tl.load(place_of, mask=inside & adds, other=0).to(tl.float32)
            if MAXIMIZE:
                kept = -kept
            kept += decayed
        to = taken + offset(column, row_step, ROW_ACCESS)
        tl.store(to, kept.to(values.dtype.element_ty), mask=inside & written)
        tl.store(state + offset(column, step, ACCESS), decayed.to(MOMENTUM), mask=inside)


def take_and_decay_(
    momentum: Matrices,
    gradients: Matrices,
    selection: RowSelection,
    rows: Rows,
    *,
    decay: float | Tensor,
    nesterov: bool,
    maximize: bool,
) -> None:
    """Writes the chosen rows to their slots, in the wire's dtype, and decays them in the momentum."""
    columns = momentum.shape[1]
    slots = selection.index.shape[1]
    device = rows.values.device
    block, warps = row_block(columns)
    launch(
        _take_and_decay_kernel, len(momentum) * slots, device, *operand(momentum), *operand(gradients),
        *buffer(rows.values), *entries(selection.index), *entries(rows.slot), selection.count,
        selection.count.stride(0), device_scalar(decay, device), slots,
        COLUMNS=columns, NESTEROV=nesterov, MAXIMIZE=maximize, BLOCK=block, warps=warps,
    )  # fmt: skip
