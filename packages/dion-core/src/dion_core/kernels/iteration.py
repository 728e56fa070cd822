"""Newton-Schulz on normalized float16 matrices on a Hopper GPU, in one launch or a few.

Legend: B matrices of R rows and C columns, m the shorter side and n the longer one, S segments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dion_core.kernels.choices import Choice, choose
from dion_core.kernels.listing import Coefficients, Kind, list_products
from dion_core.kernels.normalize import normalize
from dion_core.kernels.products import products_kernel

_BLOCK = 128
_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
Segments = tuple[tuple[Coefficients, ...], ...]


def runs_on(device: torch.device, rows: int, columns: int) -> bool:
    """Whether `iterate` can be used: on Hopper, for sizes that the copy engine can address."""
    return rows % 8 == 0 and columns % 8 == 0 and _multiprocessors(device.index or 0)[0] == (9, 0)


def choice_for(device: torch.device, batch: int, rows: int, columns: int) -> Choice:
    """The settings for B matrices of that size; the same on every rank with such a device."""
    m, n = sorted((rows, columns))
    return choose(_multiprocessors(device.index or 0)[2], batch, m, n)


def orthogonalize(matrices: Tensor, segments: Segments) -> Tensor:
    """Returns `matrices` normalized and after all steps, (B, R, C) in new storage and in their dtype.

    Args:
        matrices: (B, R, C) float32, bfloat16 or float16, of any strides, for which `runs_on` is true.
        segments: (a, b, c) of each step, by segment.
    """
    choice = choice_for(matrices.device, *matrices.shape)
    room = make_room(*matrices.shape, device=matrices.device, choice=choice)
    normalize(matrices.contiguous(), out=room[0])
    return iterate(room, segments, dtype=matrices.dtype, choice=choice)


def make_room(batch: int, rows: int, columns: int, *, device: torch.device, choice: Choice) -> Tensor:
    """(1 or 2, B, R, C) float16, uninitialized, for `iterate`: normalized matrices belong into the first part."""
    return torch.empty((2 if choice.apply_inside else 1, batch, rows, columns), dtype=torch.float16, device=device)


def iterate(room: Tensor, segments: Segments, *, dtype: torch.dtype, choice: Choice) -> Tensor:
    """Returns (B, R, C) in new storage: the matrices of ``room[0]`` after all steps of all segments.

    Args:
        room: (1 or 2, B, R, C) float16 from `make_room`, the first part filled. Overwritten.
        segments: (a, b, c) of each step, by segment.
        dtype: of the result, float16 or bfloat16; any other is cast from float16.
        choice: from `choice_for`, the one that `room` was made with.
    """
    narrow = dtype if dtype in _DTYPES else torch.float16
    if choice.apply_inside:
        return _run(room, segments, choice, narrow).to(dtype)
    x = room[0]
    del room
    tall = x.shape[1] > x.shape[2]
    for steps in segments[:-1]:
        polynomial = _run(x[None], (steps,), choice, None)
        x = torch.bmm(x, polynomial) if tall else torch.bmm(polynomial, x)
        del polynomial
    return _run(x[None], segments[-1:], choice, narrow).to(dtype)


@lru_cache(maxsize=256)
def _table(segments: Segments, apply_last: bool, device: torch.device) -> tuple[Tensor, int, int, tuple[int, int]]:
    """The listing on the device, its buffers, the target of the last product, and symmetric and other products."""
    listing = list_products(segments, apply_last=apply_last)
    rows = torch.tensor([product.fields() for product in listing.products], dtype=torch.int32, device=device)
    applied = sum(product.kind == Kind.APPLY for product in listing.products)
    return rows, listing.buffers, listing.products[-1].target, (len(listing.products) - applied, applied)


def _run(x: Tensor, segments: Segments, choice: Choice, dtype: torch.dtype | None) -> Tensor:
    """Works through the products for ``x[0]``; returns the result in `dtype`, or Q of a single segment if None."""
    _, batch, rows, columns = x.shape
    tall = rows > columns
    m, n = (columns, rows) if tall else (rows, columns)
    table, buffers, last, (symmetric, applied) = _table(segments, dtype is not None, x.device)
    work = torch.empty((buffers, batch, m, m), dtype=torch.float16, device=x.device)
    out = work if dtype is None else torch.empty((batch, rows, columns), dtype=dtype, device=x.device)
    counters = torch.zeros(batch, dtype=torch.int32, device=x.device)
    total = batch * (symmetric * _triangle(m, choice.wide) + applied * _rectangle(m, n, choice.wide, tall))
    programs = min(total, _multiprocessors(x.device.index or 0)[1])
    descriptors = _describe(x, out, work, choice, tall)
    launch = _launcher(programs, tall, dtype or torch.float16, choice, x.device)
    launch(*descriptors, table, counters, total, batch, m, n)
    return work[last] if dtype is None else out


def _describe(x: Tensor, out: Tensor, work: Tensor, choice: Choice, tall: bool) -> list[TensorDescriptor]:
    """How the kernel's operands lie in memory and in shared memory, in the order of its arguments."""
    copies, batch, rows, columns = x.shape
    m = work.shape[-1]
    depth, wide, half = choice.depth, choice.wide * _BLOCK, _BLOCK // 2
    x_flat, x_stack = ([copies * batch * rows, columns], [copies * batch, rows, columns])
    w_flat, w_stack = ([work.shape[0] * batch * m, m], [work.shape[0] * batch, m, m])
    stack_strides, w_strides = [rows * columns, columns, 1], [m * m, m, 1]
    out_shape = w_stack if out is work else [batch, rows, columns]
    flat, turned = (x_flat, [columns, 1]), (x_stack, stack_strides)

    def describe(base: Tensor, where: tuple[list[int], list[int]], block: list[int]) -> TensorDescriptor:
        return TensorDescriptor(base, *where, block, _layout(tuple(block), base.dtype))

    return [
        describe(x, turned if tall else flat, [1, depth, _BLOCK] if tall else [_BLOCK, depth]),
        describe(x, turned if tall else flat, [1, depth, wide] if tall else [wide, depth]),
        describe(x, flat if tall else turned, [_BLOCK, depth] if tall else [1, depth, wide]),
        describe(x, turned, [1, half, _BLOCK]),
        describe(out, (out_shape, w_strides if out is work else stack_strides), [1, half, _BLOCK]),
        describe(work, (w_flat, [m, 1]), [_BLOCK, depth]),
        describe(work, (w_flat, [m, 1]), [wide, depth]),
        describe(work, (w_flat, [m, 1]), [half, _BLOCK]),
        describe(work, (w_stack, w_strides), [1, half, _BLOCK]),
        describe(work, (w_stack, w_strides), [1, _BLOCK, half]),
        describe(work, (w_stack, w_strides), [1, half, half]),
    ]


@lru_cache(maxsize=256)
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    """How a block lies in shared memory."""
    return gl.NVMMASharedLayout.get_default_for(list(block), _DTYPES[dtype])


@lru_cache(maxsize=256)
def _launcher(
    programs: int, tall: bool, dtype: torch.dtype, choice: Choice, device: torch.device
) -> Callable[..., None]:
    """Launches the kernel; after its first call without Triton's inspection of arguments, which takes longest."""
    constants = (choice.wide, choice.depth, choice.band, tall, choice.stages)
    compiled: list[Any] = []

    def launch(*arguments: Any) -> None:
        with torch.cuda.device(device):
            if compiled:
                compiled[0][(programs, 1, 1)](*arguments, *constants)
            else:
                kernel = products_kernel[(programs,)](
                    *arguments, *constants, num_warps=4, launch_cooperative_grid=True
                )
                compiled.append(kernel)

    return launch


@lru_cache(maxsize=64)
def _multiprocessors(index: int) -> tuple[tuple[int, int], int, str]:
    """Compute capability, number of multiprocessors, and name of a device."""
    properties = torch.cuda.get_device_properties(index)
    return (properties.major, properties.minor), properties.multi_processor_count, properties.name


def _triangle(m: int, wide: int) -> int:
    """Tiles of a symmetric product of one matrix."""
    count = triton.cdiv(m, _BLOCK)
    squares = count // wide
    return int(wide * squares * (squares + 1) // 2 + count % wide * (squares + 1))


def _rectangle(m: int, n: int, wide: int, tall: bool) -> int:
    """Tiles of Q X or X Q of one matrix."""
    rows, columns = (n, m) if tall else (m, n)
    return int(triton.cdiv(rows, _BLOCK) * triton.cdiv(columns, _BLOCK * wide))
