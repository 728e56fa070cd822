"""`update_` of `dion_core.rows` in Triton: one pass over the parameters, after a small launch that finds the rows.

Legend: N matrices of a bucket, R local rows and C local columns of one, K slots a matrix, S rows of a buffer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dion_core.kernels.addressing import (
    buffer,
    buffer_row,
    device_scalar,
    entries,
    offset,
    operand,
    row_block,
    row_start,
)
from dion_core.launching import cdiv, launch
from dion_core.matrices import Matrices
from dion_core.rows import Rows, RowSelection

_BLOCK = 256  # rows that one program looks up


@triton.jit(do_not_specialize=[
    "index_stride", "slot_stride", "count_stride", "scale_stride", "num_rows", "blocks",
])  # fmt: skip
def _place_kernel(
    index, index_stride, slot, slot_stride, count, count_stride, row_scale, scale_stride, overall, learning_rate,
    place, factor, num_rows, blocks, HALVINGS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For every local row the slot of its update (-1: it has none) and the factor, by bisection: index ascends.

    Example: index [1, 4], count 2, slot [9, 3], row_scale [2, 4], overall scale 1, learning rate 0.5 and R = 5 give
    place [-1, 9, -1, -1, 3] and factor [0, 1, 0, 0, 2].
    """
    matrix = (tl.program_id(0) // blocks).to(tl.int64)
    row = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    chosen = tl.load(count + matrix * count_stride)
    index += matrix * index_stride
    low = tl.zeros((BLOCK,), tl.int64)
    high = low + chosen
    for _ in range(HALVINGS):
        middle = (low + high) // 2
        open = low < high
        before = tl.load(index + middle, mask=open, other=0) < row
        low = tl.where(open & before, middle + 1, low)
        high = tl.where(open & (before == 0), middle, high)
    found = low < chosen
    found &= tl.load(index + low, mask=found, other=-1) == row
    scale = tl.load(row_scale + matrix * scale_stride + low, mask=found, other=0).to(tl.float32)
    at = matrix * num_rows + row
    inside = row < num_rows
    tl.store(place + at, tl.load(slot + matrix * slot_stride + low, mask=found, other=-1), mask=inside)
    tl.store(factor + at, scale * overall * tl.load(learning_rate).to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["stride", "step", "row_stride", "row_step", "active_stride", "num_rows"])
def _update_kernel(
    parameters, stride, step, PARAMETER: tl.constexpr, ACCESS: tl.constexpr,
    values, row_stride, row_step, ROW_ACCESS: tl.constexpr,
    place, factor, learning_rate, weight_decay, active, active_stride, num_rows,
    COLUMNS: tl.constexpr, CAUTIOUS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of a parameter: decayed, less its update if it has one. Rows to which nothing happens are not read.

    Example: weight [1, 2], learning rate 0.1, weight decay 0.5, update [1, -1] and factor 0.1 give
    [0.85, 2.0]; cautious, where 2 and -1 differ in sign, [0.85, 2.1].
    """
    program = tl.program_id(0).to(tl.int64)
    matrix, row = program // num_rows, program % num_rows
    slot = tl.load(place + program)
    scale = tl.load(factor + program)
    keep = (1.0 - tl.load(learning_rate).to(tl.float64) * tl.load(weight_decay).to(tl.float64)).to(tl.float32)
    chosen = slot >= 0
    moves = (tl.load(active + matrix * active_stride) != 0) & (chosen | (keep != 1.0))
    if moves == 0:
        return
    weights = row_start(parameters, matrix, row, stride, PARAMETER, ACCESS)
    update = buffer_row(values, slot, row_stride, ROW_ACCESS)
    lane = tl.arange(0, BLOCK)
    for first in range(0, COLUMNS, BLOCK):
        column = first + lane
        inside = column < COLUMNS
        weight = tl.load(weights + offset(column, step, ACCESS), mask=inside, other=0).to(tl.float32)
        moved = tl.load(update + offset(column, row_step, ROW_ACCESS), mask=inside & chosen, other=0).to(tl.float32)
        moved *= scale
        decayed = weight * keep
        if CAUTIOUS:
            agree = ((moved > 0) & (weight > 0)) | ((moved < 0) & (weight < 0))
            decayed = tl.where(agree, decayed, weight)
        tl.store(weights + offset(column, step, ACCESS), (decayed - moved).to(PARAMETER), mask=inside)


def update_(
    parameters: Matrices,
    rows: Rows,
    selection: RowSelection,
    row_scale: Tensor,
    *,
    learning_rate: float | Tensor,
    weight_decay: float | Tensor,
    active: Tensor,
    cautious: bool,
    scale: float = 1.0,
) -> None:
    """Decays the parameters and subtracts the chosen rows, computed in fp32 and rounded once."""
    num_matrices, (num_rows, columns) = len(parameters), parameters.shape
    device = parameters.addresses.device
    learning_rate, weight_decay = device_scalar(learning_rate, device), device_scalar(weight_decay, device)
    place = torch.empty(num_matrices, num_rows, dtype=torch.int64, device=device)
    factor = torch.empty(num_matrices, num_rows, dtype=torch.float32, device=device)
    blocks = cdiv(num_rows, _BLOCK)
    launch(
        _place_kernel, num_matrices * blocks, device, *entries(selection.index), *entries(rows.slot),
        selection.count, selection.count.stride(0), *entries(row_scale), float(scale), learning_rate, place, factor,
        num_rows, blocks, HALVINGS=selection.index.shape[1].bit_length(), BLOCK=_BLOCK, warps=4,
    )  # fmt: skip
    block, warps = row_block(columns)
    launch(
        _update_kernel, num_matrices * num_rows, device, *operand(parameters), *buffer(rows.values),
        place, factor, learning_rate, weight_decay, active, active.stride(0), num_rows,
        COLUMNS=columns, CAUTIOUS=cautious, BLOCK=block, warps=warps,
    )  # fmt: skip
