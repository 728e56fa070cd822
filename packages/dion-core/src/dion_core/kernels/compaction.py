"""`collect` and `spread` as one launch each: every program moves some rows of one matrix, as bytes.

Example: one matrix of T = 4 rows from W = 2 senders, count [[2], [1]], start [[0], [4]]. The senders' rows end before
places 2 and 3, so that places 0, 1 and 2 are the rows 0, 1 and 4 of the buffer, and no sender has a row for place 3.

Legend: N matrices counted, B matrices built, C columns, W senders, S rows of a buffer, T rows of one matrix. A word
is an integer that is moved; a unit is 16 bytes where all rows start at multiples of that, else one word.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from dion_core.launching import cdiv, launch, power_of_two
from dion_core.matrices import ALIGNMENT

ROWS = 8
"""Rows of one program."""
PLACES = 128
"""Rows that one program finds the places of."""
WORDS = 256
"""Words of each row that are under way at a time: with 128 threads, 8 accesses of 16 bytes a thread."""

_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64, 16: tl.int64}
_NUMBERS = [
    "num_blocks",
    "num_senders",
    "num_counted",
    "num_built",
    "total",
    "row_units",
    "matrix_units",
    "place_units",
]


@triton.jit
def _buffer_rows(
    count, start, owned, matrix, place, num_senders, num_counted, num_built, OWNED: tl.constexpr, SENDERS: tl.constexpr
):
    """The row of the buffer for each place of one matrix, and whether a sender has one for it."""
    sender = tl.arange(0, SENDERS)
    exists = sender < num_senders
    column = matrix.to(tl.int64)
    if OWNED:
        column = tl.load(owned + matrix)
    used = tl.load(count + sender * num_counted + column, mask=exists, other=0)
    first = tl.load(start + sender * num_built + matrix, mask=exists, other=0)
    end = tl.cumsum(used, 0)
    begin = end - used
    from_sender = (place[:, None] >= begin[None, :]) & (place[:, None] < end[None, :])
    row = tl.sum(tl.where(from_sender, (first - begin)[None, :], 0), 1) + place
    return row, place < tl.sum(used, 0)


@triton.jit(do_not_specialize=_NUMBERS)
def _move_kernel(
    rows,
    matrices,
    count,
    start,
    owned,
    num_blocks,
    num_senders,
    num_counted,
    num_built,
    total,
    row_units,
    matrix_units,
    place_units,
    COLLECT: tl.constexpr,
    OWNED: tl.constexpr,
    SENDERS: tl.constexpr,
    WORD: tl.constexpr,
    UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Moves rows between the buffer and one matrix; the latter's rows start `place_units` apart."""
    matrix = tl.program_id(0) // num_blocks
    place = (tl.program_id(0) % num_blocks) * ROWS + tl.arange(0, ROWS)
    row, valid = _buffer_rows(count, start, owned, matrix, place, num_senders, num_counted, num_built, OWNED, SENDERS)
    row_words = row_units * UNIT
    rows = rows.to(tl.pointer_type(WORD))
    matrices = matrices.to(tl.pointer_type(WORD))
    if UNIT == 2:
        rows, matrices = tl.multiple_of(rows, 16), tl.multiple_of(matrices, 16)
    # 64 bits throughout: buffers may hold more than 2^31 words.
    in_buffer = rows + (row * row_units * UNIT)[:, None]
    in_matrix = matrices + ((matrix.to(tl.int64) * matrix_units + place.to(tl.int64) * place_units) * UNIT)[:, None]
    column = 0
    while column < row_words:
        word = (column + tl.arange(0, WORDS))[None, :]
        here = valid[:, None] & (word < row_words)
        if COLLECT:
            values = tl.load(in_buffer + word, mask=here, other=0)
            tl.store(in_matrix + word, values, mask=(place < total)[:, None] & (word < row_words))
        else:
            tl.store(in_buffer + word, tl.load(in_matrix + word, mask=here, other=0), mask=here)
        column += WORDS


def collect(rows: Tensor, count: Tensor, start: Tensor, total: int, owned: Tensor | None = None) -> Tensor:
    """The same (B, T, C) as `dion_core.compaction.collect` gives, in one launch."""
    matrices = rows.new_empty(start.shape[1], total, rows.shape[1])
    _move(rows, matrices, count, start, owned, collect=True)
    return matrices


def spread_(rows: Tensor, matrices: Tensor, count: Tensor, start: Tensor, owned: Tensor | None = None) -> None:
    """The same as `dion_core.compaction.spread_` does, in one launch; `rows` is contiguous."""
    if matrices.stride(2) != 1:
        matrices = matrices.contiguous()
    _move(rows, matrices, count, start, owned, collect=False)


@triton.jit(do_not_specialize=["num_blocks", "num_senders", "num_counted", "num_built", "total"])
def _places_kernel(
    place,
    count,
    start,
    owned,
    num_blocks,
    num_senders,
    num_counted,
    num_built,
    total,
    OWNED: tl.constexpr,
    SENDERS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The row of the buffer for some rows of one matrix, or -1.

    Example: counts [2, 1] of two senders whose slots start at rows 0 and 4, total 4: place [0, 1, 4, -1].
    """
    matrix = tl.program_id(0) // num_blocks
    at = (tl.program_id(0) % num_blocks) * ROWS + tl.arange(0, ROWS)
    row, valid = _buffer_rows(count, start, owned, matrix, at, num_senders, num_counted, num_built, OWNED, SENDERS)
    tl.store(place + matrix.to(tl.int64) * total + at, tl.where(valid, row, -1), mask=at < total)


def places(count: Tensor, start: Tensor, total: int, owned: Tensor | None = None) -> Tensor:
    """The same (B, T) as `dion_core.compaction.places` gives, in one launch."""
    place = torch.empty(start.shape[1], total, dtype=torch.int64, device=count.device)
    count, start = count.contiguous(), start.contiguous()
    num_blocks = cdiv(total, PLACES)
    launch(
        _places_kernel,
        len(place) * num_blocks,
        count.device,
        place,
        count,
        start,
        start if owned is None else owned,
        num_blocks,
        len(count),
        count.shape[1],
        len(place),
        total,
        warps=4,
        OWNED=owned is not None,
        SENDERS=power_of_two(len(count)),
        ROWS=PLACES,
    )
    return place


def _move(rows: Tensor, matrices: Tensor, count: Tensor, start: Tensor, owned: Tensor | None, *, collect: bool) -> None:
    """Launches the kernel; (S, C) rows are contiguous, and so are the columns of (B, T, C) matrices."""
    num_matrices, total, columns = matrices.shape
    if not matrices.numel():
        return
    count, start = count.contiguous(), start.contiguous()
    size = matrices.itemsize
    strides = [columns * size, matrices.stride(0) * size, matrices.stride(1) * size]
    unit_bytes = math.gcd(ALIGNMENT, *strides, rows.data_ptr(), matrices.data_ptr())
    num_blocks = cdiv(total, ROWS)
    launch(
        _move_kernel,
        num_matrices * num_blocks,
        rows.device,
        rows,
        matrices,
        count,
        start,
        start if owned is None else owned,
        num_blocks,
        len(count),
        count.shape[1],
        num_matrices,
        total,
        *(stride // unit_bytes for stride in strides),
        warps=4,
        COLLECT=collect,
        OWNED=owned is not None,
        SENDERS=power_of_two(len(count)),
        WORD=_WORDS[unit_bytes],
        UNIT=2 if unit_bytes == 16 else 1,
        ROWS=ROWS,
        WORDS=WORDS,
    )
