"""What the kernels on rows share: where rows and their columns lie, in what blocks they are read, and scalars.

Legend: N matrices of a bucket, R local rows and C local columns of one, K slots a matrix, S rows of a buffer.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dion_core.launching import cdiv, power_of_two
from dion_core.matrices import ALIGNMENT, Matrices

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
"""The dtypes of rows that the kernels read and write, as Triton names them."""

VECTOR = 8
"""Columns that one thread reads side by side: 16 bytes of bf16 and fp16, two times 16 of fp32."""

# How the columns of a row lie: apart, side by side, or side by side from a multiple of `ALIGNMENT` bytes on.
APART, ADJACENT, ALIGNED = 0, 1, 2
_ADJACENT, _ALIGNED = tl.constexpr(ADJACENT), tl.constexpr(ALIGNED)


@triton.jit
def row_start(addresses, matrix, row, stride, DTYPE: tl.constexpr, ACCESS: tl.constexpr):
    """Pointer to a row of a matrix, whose address stands in a table; offsets have 64 bits.

    Where rows are aligned the compiler is told so, hence accesses are 16 bytes wide.

    Example: addresses [4096, 8192], matrix 1, row 3, stride 100 and fp32 give 8192 + 4 * 300 = 9392.
    """
    start = tl.load(addresses + matrix).to(tl.pointer_type(DTYPE)) + row.to(tl.int64) * stride
    if ACCESS == _ALIGNED:
        start = tl.multiple_of(start, 16)
    return start


@triton.jit
def buffer_row(values, slot, stride, ACCESS: tl.constexpr):
    """Pointer to a row of a buffer: row 3 of rows 100 elements apart starts at element 300."""
    start = values + slot.to(tl.int64) * stride
    if ACCESS == _ALIGNED:
        start = tl.multiple_of(start, 16)
    return start


@triton.jit
def offset(column, step, ACCESS: tl.constexpr):
    """Elements from the start of a row to its columns, in 64 bits where columns lie apart."""
    if ACCESS < _ADJACENT:
        column = column.to(tl.int64) * step
    return column


def access(aligned: bool, step: int) -> int:
    """How columns lie whose rows are aligned or not."""
    if aligned:
        return ALIGNED
    return ADJACENT if step == 1 else APART


def operand(matrices: Matrices) -> tuple[Tensor, int, int, Any, int]:
    """What a kernel is told of N matrices: addresses (N,), row and column stride, dtype, and how columns lie."""
    stride, step = matrices.stride
    return matrices.addresses, stride, step, DTYPES[matrices.dtype], access(matrices.aligned, step)


def buffer(values: Tensor) -> tuple[Tensor, int, int, int]:
    """What a kernel is told of (S, C) rows: the tensor, row and column stride, and how columns lie."""
    stride, step = values.stride()
    even = step == 1 and stride * values.itemsize % ALIGNMENT == 0 and values.data_ptr() % ALIGNMENT == 0
    return values, stride, step, access(even, step)


def entries(table: Tensor) -> tuple[Tensor, int]:
    """An (N, K) table with adjacent entries, and the elements from one matrix to the next (0 for one that repeats)."""
    if table.shape[1] > 1 and table.stride(1) != 1:
        table = table.contiguous()
    return table, table.stride(0)


def row_block(columns: int) -> tuple[int, int]:
    """(columns of a block, warps) for a program that goes through a row in blocks and keeps nothing of them."""
    warps = min(4, power_of_two(cdiv(columns, 32 * 2 * VECTOR)))
    return warps * 32 * 2 * VECTOR, warps


def device_scalar(value: float | Tensor, device: torch.device) -> Tensor:
    """A 0-dim tensor on the device: `value` itself if it is one, so that a captured graph sees it change."""
    if isinstance(value, Tensor) and value.device == device:
        return value
    return torch.full((), float(value), dtype=torch.float64, device=device)
