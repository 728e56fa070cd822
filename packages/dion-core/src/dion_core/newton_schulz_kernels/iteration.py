"""Newton-Schulz on a Hopper GPU: normalization to float16 in two launches, and all products in one.

Legend: B matrices of R rows and C columns, m the shorter side and n the longer one; a slot is where a matrix of each
part of the batch is worked on, one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from dion_core.launching import Descriptors, cdiv, compiles_only, launch
from dion_core.newton_schulz_kernels.choices import Choice, choose
from dion_core.newton_schulz_kernels.listing import BLOCK, Kind, list_products, parts_of, triangle
from dion_core.newton_schulz_kernels.normalize import normalize, normalize_rows
from dion_core.newton_schulz_kernels.products import products_kernel
from dion_core.step_pairs import Coefficients

_TMA_BYTES = 16
"""The copy engine reads and writes tensors that start at multiples of so many bytes."""
_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
Segments = tuple[tuple[Coefficients, ...], ...]


def runs_on(device: torch.device, rows: int, columns: int) -> bool:
    """Whether this module can be used: on Hopper, for sizes that the copy engine can address."""
    return rows % 8 == 0 and columns % 8 == 0 and _properties(device.index).capability == (9, 0)


def choice_for(device: torch.device, batch: int, rows: int, columns: int) -> Choice:
    """The settings for B matrices of that size; the same on every rank with such a device."""
    m, n = sorted((rows, columns))
    return choose(_properties(device.index).name, parts_of(batch, m, n)[0], m, n)


def orthogonalize(matrices: Tensor, segments: Segments) -> Tensor:
    """Returns `matrices` normalized and after all steps, (B, R, C) in new storage and in their dtype.

    Args:
        matrices: (B, R, C) float32, bfloat16 or float16, of any strides, for which `runs_on` is true.
        segments: (a, b, c) of each step, by segment.
    """
    x = torch.empty(matrices.shape, dtype=torch.float16, device=matrices.device)
    counters = make_counters(matrices.shape, device=matrices.device)
    normalize(matrices, out=x, cleared=counters)
    choice = choice_for(matrices.device, *matrices.shape)
    return iterate(x, counters, segments, dtype=matrices.dtype, choice=choice)


def orthogonalize_rows(rows: Tensor, place: Tensor, segments: Segments, spare: Tensor | None = None) -> Tensor:
    """Returns the matrices whose rows lie in a buffer, normalized and after all steps.

    Args:
        rows: (S, C), contiguous, float32, bfloat16 or float16. May be overwritten.
        place: (B, R) int64, contiguous: the row of the buffer that is each row of each matrix; -1 for a row of zeros.
        segments: (a, b, c) of each step, by segment.
        spare: contiguous, on the same device, what may be overwritten too; None if there is nothing.

    Returns:
        (B, R, C) in the dtype of `rows`, in new storage or in that of `spare`.
    """
    shape = (*place.shape, rows.shape[1])
    x = _copy_of_x(shape, rows.device, spare)
    counters = make_counters(shape, device=rows.device)
    normalize_rows(rows, place, out=x, cleared=counters)
    choice = choice_for(rows.device, *shape)
    return iterate(x, counters, segments, dtype=rows.dtype, choice=choice, spare=rows)


def preparations(
    batch: int, rows: int, columns: int, segments: Segments, *, dtype: torch.dtype, device: torch.device
) -> list[Callable[[], None]]:
    """What to call for `orthogonalize_rows` to find its kernels compiled; the longest first, each in any thread.

    Args:
        batch: B.
        rows: R.
        columns: C.
        segments: as there.
        dtype: of the rows.
        device: of the rows.
    """
    choice, one = choice_for(device, batch, rows, columns), (1, rows, columns)
    m = min(rows, columns)

    def nothing(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
        return torch.empty(1, dtype=dtype, device=device).expand(shape)  # of that shape, but for its memory

    def compile_products() -> None:
        plan = _plan(segments, one, choice, device)
        x, out, counters = nothing(*one), nothing(*one, dtype=_narrow(dtype)), nothing(2, dtype=torch.int32)
        with compiles_only():
            _run(plan, (x, x), out, nothing(plan.buffers, 1, m, m), counters, choice)

    def compile_norms() -> None:
        counters = make_counters((batch, rows, columns), device=device)
        place = nothing(1, rows, dtype=torch.int64)
        with compiles_only():
            normalize_rows(nothing(1, columns, dtype=dtype), place, out=nothing(*one), cleared=counters)

    return [compile_products, compile_norms]


def make_counters(shape: Sequence[int], *, device: torch.device) -> Tensor:
    """(slots and 1,) int32, uninitialized, for `iterate`, which needs them cleared."""
    batch, rows, columns = shape
    slots = parts_of(batch, *sorted((rows, columns)))[0]
    return torch.empty(slots + 1, dtype=torch.int32, device=device)


def iterate(
    x: Tensor, counters: Tensor, segments: Segments, *, dtype: torch.dtype, choice: Choice, spare: Tensor | None = None
) -> Tensor:
    """Returns (B, R, C): the matrices of `x` after all steps of all segments, in new storage or in that of `x`.

    Args:
        x: (B, R, C) float16, normalized. Overwritten.
        counters: from `make_counters`, zeros. Overwritten.
        segments: (a, b, c) of each step, by segment.
        dtype: of the result, float16 or bfloat16; any other is cast from float16.
        choice: from `choice_for`.
        spare: contiguous, on the same device, what may be overwritten but does not become the result.
    """
    (batch, rows, columns), device, last = x.shape, x.device, len(segments) - 1
    m, plan = min(rows, columns), _plan(segments, (batch, rows, columns), choice, device)
    work = torch.empty((plan.buffers, plan.slots, m, m), dtype=torch.float16, device=device)
    copies = (x, _copy_of_x(x.shape, device, spare) if last else x)
    # What the last product does not read: the other copy, if it may become the result, or a buffer of that size.
    if last % 2 or (last and spare is None):
        out = copies[(last + 1) % 2]
    else:
        out = work[plan.unread] if x.shape == work.shape[1:] and spare is not None else torch.empty_like(x)
    out = out.view(_narrow(dtype))
    _run(plan, copies, out, work, counters, choice)
    return out.to(dtype)


def _narrow(dtype: torch.dtype) -> torch.dtype:
    """The dtype of results in memory, of which others are cast."""
    return dtype if dtype in _DTYPES else torch.float16


def _copy_of_x(shape: Sequence[int], device: torch.device, spare: Tensor | None) -> Tensor:
    """Uninitialized float16 memory, of the spare tensor if it has as much as is needed."""
    size = 2 * math.prod(shape)
    if spare is None or spare.nbytes < size or spare.data_ptr() % _TMA_BYTES:
        return torch.empty(tuple(shape), dtype=torch.float16, device=device)
    return spare.flatten().view(torch.uint8)[:size].view(torch.float16).view(*shape)


@dataclass(frozen=True)
class _Plan:
    """What does not change from call to call for a shape.

    Attributes:
        table: the listing, on the device.
        slots: how many matrices are worked on together.
        buffers: m x m buffers of the listing.
        unread: one of them that the last product does not read.
        total: tiles of all products.
    """

    table: Tensor
    slots: int
    buffers: int
    unread: int
    total: int


@cache  # for good: graphs in which launches were captured read the listings at their addresses
def _plan(segments: Segments, shape: tuple[int, int, int], choice: Choice, device: torch.device) -> _Plan:
    """What is worked through; copies the listing to the device, so that a first call cannot be captured."""
    batch, rows, columns = shape
    listing, parts = list_products(segments), parts_of(batch, *sorted((rows, columns)))
    table = torch.tensor(listing.table(parts), dtype=torch.int32, device=device)
    applied = sum(product.kind == Kind.APPLY for product in listing.products)
    symmetric = len(listing.products) - applied
    tiles = symmetric * triangle(min(rows, columns), choice.wide) + applied * _rectangle(rows, columns, choice.wide)
    return _Plan(table, parts[0], listing.buffers, int(listing.products[-1].left == 0), batch * tiles)


def _run(
    plan: _Plan, copies: tuple[Tensor, Tensor], out: Tensor, work: Tensor, counters: Tensor, choice: Choice
) -> None:
    """Works through the products of a plan.

    Args:
        plan: says which.
        copies: (B, R, C) float16, X and where Q X goes, and from there on in turn.
        out: (B, R, C), where the result goes.
        work: (buffers, slots, m, m) float16, overwritten.
        counters: (slots + 1,) int32 zeros.
        choice: how the kernel works.
    """
    x, other = copies
    batch, rows, columns = x.shape
    device, (m, n) = x.device, sorted((rows, columns))
    addresses = (x.data_ptr(), other.data_ptr(), out.data_ptr(), work.data_ptr())
    (buffers, slots), total = work.shape[:2], plan.total
    descriptors = _describe(addresses, (batch, rows, columns, buffers * slots), out.dtype, choice)
    launch(
        products_kernel, min(total, _properties(device.index).multiprocessors), device,
        plan.table, counters, total, slots, m, n, choice.band,
        WIDE=choice.wide, TK=choice.depth, TALL=rows > columns, STAGES=choice.stages,
        descriptors=descriptors, warps=4, contracted=True,
    )  # fmt: skip


class _Address:
    """Stands for a tensor in a descriptor, without keeping its memory."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address = address
        self.dtype = dtype

    def data_ptr(self) -> int:
        return self.address


@lru_cache(maxsize=256)  # the same few addresses come again and again
def _describe(
    addresses: tuple[int, int, int, int], sizes: tuple[int, int, int, int], dtype: torch.dtype, choice: Choice
) -> Descriptors:
    """How the kernel's operands lie in memory and in shared memory, in the order of its arguments.

    Args:
        addresses: of both copies and of the result, (B, R, C), and of the workspace, so many (m, m).
        sizes: B, R, C and how many the workspace has.
        dtype: of the result.
        choice: says how large the blocks are.
    """
    batch, rows, columns, squares = sizes
    *copies, work = (_Address(addresses[at], torch.float16) for at in (0, 1, 3))
    out = _Address(addresses[2], dtype)
    m, tall = min(rows, columns), rows > columns
    depth, wide, half = choice.depth, choice.wide * BLOCK, BLOCK // 2
    flat = ([batch * rows, columns], [columns, 1])
    stack = ([batch, rows, columns], [rows * columns, columns, 1])
    w_flat = ([squares * m, m], [m, 1])
    w_stack = ([squares, m, m], [m * m, m, 1])

    def describe(base: _Address, where: tuple[list[int], list[int]], block: list[int]) -> TensorDescriptor:
        return TensorDescriptor(base, *where, block, gl.NVMMASharedLayout.get_default_for(block, _DTYPES[base.dtype]))

    of_copies = [
        (
            describe(x, stack if tall else flat, [1, depth, BLOCK] if tall else [BLOCK, depth]),
            describe(x, stack if tall else flat, [1, depth, wide] if tall else [wide, depth]),
            describe(x, flat if tall else stack, [BLOCK, depth] if tall else [1, depth, wide]),
            describe(x, stack, [1, half, BLOCK]),
        )
        for x in copies
    ]
    return Descriptors(
        (
            *of_copies[0],
            *of_copies[1],
            describe(out, stack, [1, half, BLOCK]),
            describe(work, w_flat, [BLOCK, depth]),
            describe(work, w_flat, [wide, depth]),
            describe(work, w_flat, [half, BLOCK]),
            describe(work, w_stack, [1, half, BLOCK]),
            describe(work, w_stack, [1, BLOCK, half]),
            describe(work, w_stack, [1, half, half]),
        ),
        form=out.dtype,
    )


class _Properties(NamedTuple):
    """What matters of a device."""

    capability: tuple[int, int]
    multiprocessors: int
    name: str


@lru_cache(maxsize=64)
def _properties(index: int) -> _Properties:
    """The properties of device number `index`."""
    properties = torch.cuda.get_device_properties(index)
    return _Properties((properties.major, properties.minor), properties.multi_processor_count, properties.name)


def _rectangle(rows: int, columns: int, wide: int) -> int:
    """Tiles of Q X or X Q of one matrix."""
    return cdiv(rows, BLOCK) * cdiv(columns, BLOCK * wide)
