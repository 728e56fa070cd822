"""Launches of Triton kernels at a small part of the usual host time.

Triton works out anew at every call what its arguments have in common with those of earlier calls, which takes longer
than most launches here may. So what was compiled is kept by that which the compiler is told of the arguments.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
import triton
from torch import Tensor

_ALIGNMENT = 16
"""Bytes: of a pointer the compiler is told whether it is a multiple of it."""

_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
"""Kernels by what they were compiled for, with their constants in the order of their parameters."""

_is_constant: dict[int, tuple[bool, ...]] = {}
"""By kernel (its id, since its hash is slow), for every parameter whether it is a compile-time constant."""


def launch(
    kernel: Any, programs: int, device: torch.device, *arguments: Any, warps: int, second: int = 1,
    contracted: bool = False, told: Hashable = None, **constants: Any,
) -> None:  # fmt: skip
    """Starts `programs` (perhaps no) programs of the kernel, times `second`, on the device's current stream.

    Args:
        kernel: a `triton.jit` or `gluon.jit` function whose integers are all in `do_not_specialize`.
        programs: how many along the first axis of the grid.
        device: of all tensors.
        arguments: the first ones, in order.
        warps: of one program.
        second: how many programs along the second axis of the grid.
        contracted: whether products and sums may be contracted, always the same for a kernel. If they may not, results
            are those of the definitions, bit for bit.
        told: all that the compiler is told of the arguments, where the caller knows it; None: it is looked up.
        constants: the other arguments, compile-time constants, in the same order at every call.
    """
    if programs == 0:
        return
    if not isinstance(kernel, triton.JITFunction):  # the interpreter
        kernel[(programs, second)](*arguments, **constants, num_warps=warps)
        return
    if device.index is not None and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(
                kernel, programs, device, *arguments,
                warps=warps, second=second, contracted=contracted, told=told, **constants,
            )  # fmt: skip
        return
    if told is None:
        told = tuple(map(_told, arguments, _is_constant.get(id(kernel)) or _look(kernel)))
    key = (id(kernel), device, warps, told, *constants.values())
    known = _compiled.get(key)
    if known is None:
        options = {"num_warps": warps, "enable_fp_fusion": contracted}
        _compiled[key] = _compile(kernel, (programs, second), arguments, constants, options)
    else:
        compiled, in_order = known
        compiled[(programs, second, 1)](*arguments, *in_order)


def cdiv(length: int, size: int) -> int:
    """How many pieces of `size` cover `length`; Triton's own function takes a hundred times as long."""
    return -(-length // size)


def power_of_two(number: int) -> int:
    """The lowest power of 2 that is not below `number`, at least 1."""
    return 1 << max(number - 1, 0).bit_length()


def _look(kernel: Any) -> tuple[bool, ...]:
    return _is_constant.setdefault(id(kernel), tuple(parameter.is_constexpr for parameter in kernel.params))


def _told(argument: Any, is_constant: bool) -> Any:
    """What the compiler is told of an argument: the constant, the type of a number, or dtype and alignment."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % _ALIGNMENT == 0
    if is_constant:
        return argument
    return isinstance(argument, float) or -(2**31) <= argument < 2**31


def _compile(
    kernel: Any,
    grid: tuple[int, int],
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    options: dict[str, Any],
) -> tuple[Any, tuple[Any, ...]]:
    """Launches through Triton, which compiles if it has to; what it launched, and the constants in order."""
    for parameter, argument in zip(kernel.params, arguments, strict=False):
        # Else another value would be launched with what was compiled for 1 or for multiples of 16.
        known = parameter.is_constexpr or parameter.do_not_specialize or not isinstance(argument, int)
        assert known, f"{parameter.name} of {kernel.__name__} has to be in do_not_specialize"
    compiled = kernel[grid](*arguments, **constants, **options)
    return compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
