"""What all kernels on rows share: where the columns of a row lie, scalars on the device, and the launch.

Legend: N matrices of a bucket, R local rows and C local columns of one, S rows of a buffer.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

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


def on_device(value: float | Tensor, device: torch.device) -> Tensor:
    """A 0-dim tensor on the device: `value` itself if it is one, so that a captured graph sees it change."""
    if isinstance(value, Tensor) and value.device == device:
        return value
    return torch.full((), float(value), dtype=torch.float64, device=device)


def launch(kernel: Any, programs: int, device: torch.device, *arguments: Any, warps: int, **constants: Any) -> None:
    """Starts `programs` programs of the kernel (perhaps none) on the device's current stream.

    Triton works out anew at every call what its arguments have in common with those of earlier calls, which takes
    longer than most launches here may. So what was compiled is kept by that which the compiler is told of them.
    Products and sums are not contracted, so that results are those of the definitions, bit for bit.

    Args:
        kernel: a `triton.jit` function whose integers are all in `do_not_specialize`.
        programs: how many.
        device: of all tensors.
        arguments: the first ones, in order.
        warps: of one program.
        constants: the others, which are compile-time constants.
    """
    if programs == 0:
        return
    if not isinstance(kernel, triton.JITFunction):  # the interpreter
        kernel[(programs,)](*arguments, **constants, num_warps=warps)
        return
    if device.index is not None and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, programs, device, *arguments, warps=warps, **constants)
        return
    is_constant = _is_constant.get(id(kernel)) or _look(kernel)
    key = (id(kernel), device, warps, *constants.values(), *map(_told, arguments, is_constant))
    known = _compiled.get(key)
    if known is None:
        _compile(kernel, programs, arguments, constants, key, warps=warps)
    else:
        compiled, in_order = known
        compiled[(programs, 1, 1)](*arguments, *in_order)


_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""Kernels by what they were compiled for, with their constants in the order of their parameters."""


_is_constant: dict[int, tuple[bool, ...]] = {}
"""By kernel (its id, since its hash is slow), for every parameter whether it is a compile-time constant."""


def _look(kernel: Any) -> tuple[bool, ...]:
    return _is_constant.setdefault(id(kernel), tuple(parameter.is_constexpr for parameter in kernel.params))


def _told(argument: Any, is_constant: bool) -> Any:
    """What the compiler is told of an argument: the constant, the type of a number, or dtype and alignment."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % ALIGNMENT == 0
    if is_constant:
        return argument
    return isinstance(argument, float) or -(2**31) <= argument < 2**31


def _compile(
    kernel: Any,
    programs: int,
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    key: tuple[Any, ...],
    *,
    warps: int,
) -> None:
    """Launches through Triton, which compiles if it has to, and keeps what it launched."""
    for parameter, argument in zip(kernel.params, arguments, strict=False):
        # Else another value would be launched with what was compiled for 1 or for multiples of 16.
        told = parameter.is_constexpr or parameter.do_not_specialize or not isinstance(argument, int)
        assert told, f"{parameter.name} of {kernel.__name__} has to be in do_not_specialize"
    compiled = kernel[(programs,)](*arguments, **constants, num_warps=warps, enable_fp_fusion=False)
    _compiled[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])


def cdiv(length: int, size: int) -> int:
    """How many pieces of `size` cover `length`; Triton's own function takes a hundred times as long."""
    return -(-length // size)


def power_of_two(number: int) -> int:
    """The lowest power of 2 that is not below `number`, at least 1."""
    return 1 << max(number - 1, 0).bit_length()
