"""What tests of recorded steps share: a driver in place of CUDA's, values that last, and a group that sends late."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dion_core.collectives import Handle, message
from dion_core.cuda_driver import DriverKernel
from dion_core.recorder import Recording
from dion_core.recording import Launch, recorder
from dion_core.tape import Tape

CPU = torch.device("cpu")
KERNEL = DriverKernel(7, 32, 0, ["Q", "Q", "i"], [0, 8, 16])


class Driver:
    """Doubles `number` floats of one address into another."""

    def __init__(self) -> None:
        self.launched: list[tuple[int, int, int]] = []

    def cuLaunchKernelEx(self, start: int, function: int, parameters: Any, extra: None) -> int:
        assert function == 7
        source, target = (ctypes.c_uint64.from_address(parameters[place]).value for place in (0, 1))
        number = ctypes.c_int32.from_address(parameters[2]).value
        self.launched.append((source, target, number))
        for place in range(number):
            value = ctypes.c_float.from_address(source + 4 * place)
            ctypes.c_float.from_address(target + 4 * place).value = 2 * value.value
        return 0


def double(source: Tensor, target: Tensor, number: int, descriptors: tuple[Any, ...] = ()) -> None:
    """Launches the kernel as `launching.launch` does; a descriptor stands for the address of the source."""
    packed = [descriptor.base.data_ptr() for descriptor in descriptors]
    arguments = [target, number] if descriptors else [source, target, number]
    values = [each.data_ptr() if isinstance(each, Tensor) else each for each in arguments]
    told = recorder()
    if told is None:
        KERNEL.launch(1, 1, 0, [*packed, *values])
    else:
        told.launch(Launch(KERNEL, None, (1, 1), 0, descriptors, packed, arguments, values))


def recorded(work: Callable[[], None], foreign: tuple[Tensor, ...] = ()) -> tuple[Tape | None, str]:
    recording = Recording(CPU, [each.untyped_storage().data_ptr() for each in foreign])
    return recording.record(work), recording.reason


def taped(work: Callable[[], None]) -> Tape:
    made, reason = recorded(work)
    assert made is not None, reason
    return made


class Values:
    """What lasts from step to step."""

    def __init__(self, number: int = 64) -> None:
        self.given = torch.zeros(number)
        self.result = torch.zeros(number)

    def renew(self, seed: int) -> Tensor:
        return self.given.copy_(torch.randn(len(self.given), generator=torch.Generator().manual_seed(seed)))


class Arriving(NamedTuple):
    """Values that get to where they belong when they are waited for."""

    target: Tensor
    values: Tensor

    def wait(self) -> None:
        self.target.copy_(self.values)


class Late:
    """A group whose messages arrive when they are waited for."""

    def __init__(self) -> None:
        self.sent = self.prepared = 0

    @message
    def broadcast(self, tensors: list[Tensor], source: int) -> Callable[[], Handle]:
        self.prepared += 1

        def launch() -> Handle:
            self.sent += 1
            return Arriving(tensors[0], tensors[0] + source)  # not recorded: the whole message is

        return launch
