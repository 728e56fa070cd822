"""Launches of Triton kernels at a small part of the usual host time.

Triton works out anew at every call what its arguments have in common with those of earlier calls, which takes longer
than most launches here may. So what was compiled is kept by that which the compiler is told of the arguments, and
launched through the driver (`cuda_driver`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch import Tensor

from dion_core.cuda_driver import DriverKernel, described, load
from dion_core.recording import Launch, recorder

logger = logging.getLogger("dion_core")

_ALIGNMENT = 16
"""Bytes: of a pointer the compiler is told whether it is a multiple of it."""

_compiled: dict[tuple[Any, ...], tuple[DriverKernel | None, Any]] = {}
"""Kernels by what they were compiled for: as the driver launches them, and as Triton compiled them."""

_compiling: dict[tuple[Any, ...], threading.Lock] = {}
"""By the same: held by the thread that compiles it, while others wait for it."""

_is_constant: dict[int, tuple[bool, ...]] = {}
"""By kernel (its id, since its hash is slow), for every parameter whether it is a compile-time constant."""


class _Thread(threading.local):
    """What holds for the launches of one thread."""

    compiles_only = False


_thread = _Thread()


@contextmanager
def compiles_only() -> Iterator[None]:
    """Inside the block launches of this thread compile what they need and start nothing."""
    _thread.compiles_only = True
    try:
        yield
    finally:
        _thread.compiles_only = False


class Descriptors:
    """What tells a kernel's copy engine where its operands lie, kept from launch to launch.

    Attributes:
        descriptors: of Triton, for the first arguments of the one kernel that this is for.
        form: what the compiler is told of them that does not follow from the kernel's other arguments.
    """

    def __init__(self, descriptors: Sequence[Any], form: Hashable) -> None:
        self.descriptors, self.form = descriptors, form
        self._packed: list[Any] = []

    def packed(self, compiled: Any) -> list[Any]:
        """What the driver is given in their place."""
        if not self._packed:
            each = (
                described(descriptor, compiled, number, descriptor.base.data_ptr())
                for number, descriptor in enumerate(self.descriptors)
            )
            self._packed = [value for values in each for value in values]
        return self._packed


_NO_DESCRIPTORS = Descriptors((), None)


def launch(
    kernel: Any, programs: int, device: torch.device, *arguments: Any, warps: int, second: int = 1,
    contracted: bool = False, descriptors: Descriptors = _NO_DESCRIPTORS, **constants: Any,
) -> None:  # fmt: skip
    """Starts `programs` (perhaps no) programs of the kernel, times `second`, on the device's current stream.

    Args:
        kernel: a `triton.jit` or `gluon.jit` function whose integers are all in `do_not_specialize`, and that is given
            a tensor, an integer or a float in the same places at every call.
        programs: how many along the first axis of the grid.
        device: of all tensors.
        arguments: the first ones, in order, after the descriptors.
        warps: of one program.
        second: how many programs along the second axis of the grid.
        contracted: whether products and sums may be contracted, always the same for a kernel. If they may not, results
            are those of the definitions, bit for bit.
        descriptors: the very first arguments.
        constants: the other arguments, compile-time constants, in the same order at every call.
    """
    if programs == 0:
        return
    if not isinstance(kernel, triton.JITFunction):  # the interpreter
        if not _thread.compiles_only:
            kernel[(programs, second)](*descriptors.descriptors, *arguments, **constants, num_warps=warps)
        return
    current = torch.cuda.current_device()
    if device.index is not None and device.index != current:
        with torch.cuda.device(device):
            launch(
                kernel, programs, device, *arguments,
                warps=warps, second=second, contracted=contracted, descriptors=descriptors, **constants,
            )  # fmt: skip
        return
    given = descriptors.descriptors
    form, values = _look_at(arguments, (_is_constant.get(id(kernel)) or _look(kernel))[len(given) :])
    key = (id(kernel), current, warps, descriptors.form, form, *constants.values())
    known = _compiled.get(key)
    if known is None:
        options = {"num_warps": warps, "enable_fp_fusion": contracted}
        known = _compile_once(key, kernel, (*given, *arguments), constants, options)
    if _thread.compiles_only:
        return
    ready, compiled = known
    told = recorder()
    if ready is None:
        if told is not None:
            told.refuse(f"{kernel.__name__} is launched by Triton")
        in_order = [constants[name] for name in kernel.arg_names[len(given) + len(arguments) :]]
        compiled[(programs, second, 1)](*given, *arguments, *in_order)
        return
    packed = descriptors.packed(compiled) if given else []
    stream = torch._C._cuda_getCurrentRawStream(current)
    if told is None:
        ready.launch(programs, second, stream, packed + values)
        return
    constants_of = _look(kernel)[len(given) :]
    varied = [argument for argument, constant in zip(arguments, constants_of, strict=False) if not constant]
    told.launch(Launch(ready, compiled, (programs, second), stream, given, packed, varied, values))


def cdiv(length: int, size: int) -> int:
    """How many pieces of `size` cover `length`; Triton's own function takes a hundred times as long."""
    return -(-length // size)


def power_of_two(number: int) -> int:
    """The lowest power of 2 that is not below `number`, at least 1."""
    return 1 << max(number - 1, 0).bit_length()


def _look(kernel: Any) -> tuple[bool, ...]:
    return _is_constant.setdefault(id(kernel), tuple(parameter.is_constexpr for parameter in kernel.params))


def _look_at(arguments: Sequence[Any], is_constant: Sequence[bool]) -> tuple[tuple[Any, ...], list[Any]]:
    """What the compiler is told of arguments, and the values that a launch passes.

    It is told constants, the types of numbers, which integers need 64 bits, and of tensors the dtype and whether they
    start at a multiple of 16 bytes: for a tensor at address 72 in fp32, the constant 5 and the integers 2**40 and 7
    (torch.float32, 5, ("wide", 2), 2), where bit 1 of the last 2 says that the first value is not aligned.
    """
    form: list[Any] = []
    values: list[Any] = []
    unaligned = 0
    for argument, constant in zip(arguments, is_constant, strict=False):
        if constant:
            form.append(argument)
        elif type(argument) is int:
            values.append(argument)
            if not -(2**31) <= argument < 2**31:
                form.append(("wide", len(values)))
        elif isinstance(argument, Tensor):
            address = argument.data_ptr()
            values.append(address)
            form.append(argument.dtype)
            if address % _ALIGNMENT:
                unaligned |= 1 << len(values)
        else:
            values.append(argument)
            form.append(type(argument))
    form.append(unaligned)
    return tuple(form), values


def _compile_once(
    key: tuple[Any, ...], kernel: Any, arguments: Sequence[Any], constants: dict[str, Any], options: dict[str, Any]
) -> tuple[DriverKernel | None, Any]:
    """As `_compile`, kept under the key; of several threads one compiles."""
    with _compiling.setdefault(key, threading.Lock()):
        known = _compiled.get(key)
        if known is None:
            known = _compiled[key] = _compile(kernel, arguments, constants, options)
    return known


def _compile(
    kernel: Any, arguments: Sequence[Any], constants: dict[str, Any], options: dict[str, Any]
) -> tuple[DriverKernel | None, Any]:
    """The kernel compiled for such arguments, as the driver launches it (if it can) and as Triton does."""
    for parameter, argument in zip(kernel.params, arguments, strict=False):
        # Else another value would be launched with what was compiled for 1 or for multiples of 16.
        known = parameter.is_constexpr or parameter.do_not_specialize or not isinstance(argument, int)
        assert known, f"{parameter.name} of {kernel.__name__} has to be in do_not_specialize"
    compiled = kernel.run(*arguments, grid=(1,), warmup=True, **constants, **options)
    ready = load(compiled)
    if ready is None:
        logger.info("%s is launched by Triton, which takes longer: its parameters are others here", kernel.__name__)
    return ready, compiled
