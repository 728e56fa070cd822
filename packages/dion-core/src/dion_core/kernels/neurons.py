"""The statistics of `dion_core.neurons` in Triton: sums of squares, factors, and the ratio of whole updates.

Sums run in fp64, as in `kernels.rows`, and are rounded once to fp32.

Legend: N matrices of a bucket, R local rows and C local columns of one, K slots a matrix, W ranks, T chosen rows
of a whole matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dion_core.kernels.addressing import buffer, buffer_row, device_scalar, entries, offset, row_block
from dion_core.launching import cdiv, launch, power_of_two
from dion_core.matrices import Matrices
from dion_core.neurons import NEURON_EPSILON
from dion_core.rows import Rows, RowSelection

_EPSILON = tl.constexpr(NEURON_EPSILON)


@triton.jit
def _sum_of_squares(row, step, ACCESS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """fp32 sum of the squares of a row's columns."""
    lane = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), tl.float64)
    for first in range(0, COLUMNS, BLOCK):
        column = first + lane
        value = tl.load(row + offset(column, step, ACCESS), mask=column < COLUMNS, other=0).to(tl.float64)
        sums += value * value
    return tl.sum(sums).to(tl.float32)


@triton.jit(do_not_specialize=["row_stride", "row_step", "slot_stride", "count_stride", "slots"])
def _sums_of_squares_kernel(
    values, row_stride, row_step, ACCESS: tl.constexpr, slot, slot_stride, count, count_stride, sums, slots,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One entry of the selection: the sum of squares of its row, or 0 past the count.

    Example: count 1, slot [2, 0] and values[2] = [3, 4] give sums [25, 0].
    """
    program = tl.program_id(0).to(tl.int64)
    matrix, entry = program // slots, program % slots
    total = 0.0
    if entry < tl.load(count + matrix * count_stride):
        row = buffer_row(values, tl.load(slot + matrix * slot_stride + entry), row_stride, ACCESS)
        total = _sum_of_squares(row, row_step, ACCESS, COLUMNS, BLOCK)
    tl.store(sums + program, total)


def sums_of_squares(rows: Rows, selection: RowSelection) -> Tensor:
    """(N, K) fp32: the sum of squares of every chosen row as received; 0 past the count."""
    sums = torch.empty(rows.slot.shape, dtype=torch.float32, device=rows.values.device)
    columns = rows.values.shape[1]
    block, warps = row_block(columns)
    launch(
        _sums_of_squares_kernel, sums.numel(), sums.device, *buffer(rows.values), *entries(rows.slot),
        selection.count, selection.count.stride(0), sums, rows.slot.shape[1], columns,
        BLOCK=block, warps=warps,
    )  # fmt: skip
    return sums


@triton.jit(do_not_specialize=[
    "row_stride", "row_step", "slot_stride", "stride", "index_stride", "count_stride", "num_matrices", "slots",
])  # fmt: skip
def _factors_kernel(
    values, row_stride, row_step, ROW_ACCESS: tl.constexpr, slot, slot_stride,
    moment, stride, index, index_stride, count, count_stride, beta2,
    factor, message, num_matrices, slots,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One entry of the selection: second moment and factor of its row, and its two values in the message.

    With BLOCK 0 `values` holds the sums of squares (N, K) instead of the rows.

    Example: row [3, 4] (sum 25, mean 12.5), v = 2.5, beta2 0.9 give v = 3.5, factor 0.5345 and the values 25
    and 25 * 0.5345^2 = 7.143.
    """
    program = tl.program_id(0).to(tl.int64)
    entries_here = tl.maximum(slots, 1)  # with no slots one program a matrix is left, for the count
    matrix, entry = program // entries_here, program % entries_here
    chosen = tl.load(count + matrix * count_stride)
    if entry == 0:
        tl.store(message + matrix, chosen.to(tl.float32))
    if entry >= slots:
        return
    before, scale, after = 0.0, 0.0, 0.0
    if entry < chosen:
        if BLOCK > 0:
            row = buffer_row(values, tl.load(slot + matrix * slot_stride + entry), row_stride, ROW_ACCESS)
            before = _sum_of_squares(row, row_step, ROW_ACCESS, COLUMNS, BLOCK)
        else:
            before = tl.load(values + program)
        start = tl.load(moment + matrix).to(tl.pointer_type(tl.float32))
        place = start + tl.load(index + matrix * index_stride + entry) * stride
        kept = tl.load(beta2).to(tl.float64)
        mean = tl.math.div_rn(before, tl.full((), COLUMNS, tl.float32))
        new = tl.load(place) * kept.to(tl.float32) + mean * (1.0 - kept).to(tl.float32)
        tl.store(place, new)
        scale = tl.math.div_rn(1.0, tl.math.sqrt_rn(new) + _EPSILON)
        after = before * (scale * scale)
    tl.store(factor + program, scale)
    of_rows = message + num_matrices + program
    tl.store(of_rows, before)
    tl.store(of_rows + num_matrices.to(tl.int64) * slots, after)


def neuron_factors_(
    second_moment: Matrices, selection: RowSelection, sums: Tensor, *, columns: int, beta2: float | Tensor
) -> tuple[Tensor, Tensor]:
    """(N, K) fp32 factors (0 past the count) and this rank's message, from sums of squares of whole rows."""
    values = (sums.contiguous(), 0, 1, 0, selection.index, 0)
    return _factors(second_moment, selection, values, columns, 0, beta2)


def neuron_factors_of_rows_(
    second_moment: Matrices, selection: RowSelection, rows: Rows, *, columns: int, beta2: float | Tensor
) -> tuple[Tensor, Tensor]:
    """(N, K) fp32 factors (0 past the count) and this rank's message, from the rows."""
    values = (*buffer(rows.values), *entries(rows.slot))
    return _factors(second_moment, selection, values, columns, row_block(columns)[0], beta2)


def _factors(
    second_moment: Matrices,
    selection: RowSelection,
    values: tuple[Tensor, int, int, int, Tensor, int],
    columns: int,
    block: int,
    beta2: float | Tensor,
) -> tuple[Tensor, Tensor]:
    num_matrices, slots = selection.index.shape
    device = selection.index.device
    factor = torch.empty(num_matrices, slots, dtype=torch.float32, device=device)
    message = torch.empty(num_matrices * (1 + 2 * slots), dtype=torch.float32, device=device)
    launch(
        _factors_kernel, num_matrices * max(slots, 1), device, *values,
        second_moment.addresses, second_moment.stride[0], *entries(selection.index),
        selection.count, selection.count.stride(0), device_scalar(beta2, device),
        factor, message, num_matrices, slots,
        COLUMNS=columns, BLOCK=block, warps=row_block(columns)[1] if block else 1,
    )  # fmt: skip
    return factor, message


@triton.jit(do_not_specialize=["first_stride", "num_matrices", "slots", "all_slots", "total"])
def _scale_kernel(
    factor, gathered, first_slot, first_stride, scale, num_matrices, slots, all_slots, total,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, TOTAL_BLOCKS: tl.constexpr, SLOT_BLOCKS: tl.constexpr,
):  # fmt: skip
    """One matrix: the two sums over its chosen rows in global row order, and the final factors of this rank's.

    Row t is on the rank whose counts reach beyond t: counts [2, 1] put rows 0 and 1 on rank 0 and row 2 on rank 1.

    Example: N = 1, two ranks with one slot each and messages [1 | 9 | 1], [1 | 7 | 3]: sums 16 and 4, ratio 2.
    """
    matrix = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    before, after = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    for block in range(TOTAL_BLOCKS):
        row = block * BLOCK + lane
        at, width = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
        reached = tl.zeros((), tl.int64)
        first_of_rank = tl.zeros((), tl.int64)
        for rank in range(RANKS):
            first_of_next = all_slots.to(tl.int64)
            if rank + 1 < RANKS:
                first_of_next = tl.load(first_slot + (rank + 1) * first_stride)
            start = num_matrices * (rank + 2 * first_of_rank)
            slots_of_rank = first_of_next - first_of_rank
            count = tl.load(gathered + start + matrix).to(tl.int64)
            here = (row >= reached) & (row < reached + count)
            at = tl.where(here, start + num_matrices + matrix * slots_of_rank + row - reached, at)
            width = tl.where(here, num_matrices * slots_of_rank, width)
            reached += count
            first_of_rank = first_of_next
        valid = row < tl.minimum(reached, total)
        before += tl.load(gathered + at, mask=valid, other=0).to(tl.float64)
        after += tl.load(gathered + at + width, mask=valid, other=0).to(tl.float64)
    sum_before, sum_after = tl.sum(before).to(tl.float32), tl.sum(after).to(tl.float32)
    ratio = 1.0
    if sum_after > 0:
        ratio = tl.math.sqrt_rn(tl.math.div_rn(sum_before, sum_after))
    for block in range(SLOT_BLOCKS):
        entry = block * BLOCK + lane
        place = matrix * slots + entry
        value = tl.load(factor + place, mask=entry < slots, other=0)
        tl.store(scale + place, value * ratio, mask=entry < slots)


def neuron_scale(factor: Tensor, gathered: Tensor, *, slots: Sequence[int], first_slot: Tensor, total: int) -> Tensor:
    """(N, K) fp32 final factors, from the gathered messages of all ranks."""
    scale = torch.empty_like(factor)
    num_matrices, slots_here = factor.shape
    # The block decides the order of the sums: it may depend on the whole matrix alone, not on the ranks.
    block = min(4096, power_of_two(max(total, 256)))
    launch(
        _scale_kernel, num_matrices, factor.device, factor, gathered, first_slot, first_slot.stride(0), scale,
        num_matrices, slots_here, sum(slots), total, RANKS=len(slots), BLOCK=block,
        TOTAL_BLOCKS=cdiv(total, block), SLOT_BLOCKS=cdiv(slots_here, block), warps=block // 256,
    )  # fmt: skip
    return scale
