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
        self.streams: list[int] = []
        """Of the graphs that were started."""
        self.mode, self.ready_error = 0, 0
        self.graphs: dict[int, list[tuple[int, int, int]]] = {}
        """Of graphs and of what they are ready as: what each node was given."""

    def cuLaunchKernelEx(self, config: Any, function: int, parameters: Any, extra: None) -> int:
        assert function == 7
        return self._run(_given(parameters))

    def cuGraphCreate(self, graph: Any, flags: int) -> int:
        return self._add(graph, [])

    def cuGraphAddKernelNode_v2(self, node: Any, graph: Any, after: Any, number: int, said: Any) -> int:
        nodes, of_kernel = self.graphs[graph.value], said._obj
        assert number == bool(nodes)
        assert not nodes or after._obj.value == len(nodes), "one comes after the other"
        assert (of_kernel.function, of_kernel.x, of_kernel.y, of_kernel.z) == (7, 1, 1, 1)
        assert (of_kernel.threads, of_kernel.threads_y, of_kernel.threads_z, of_kernel.shared) == (32, 1, 1, 0)
        nodes.append(_given(of_kernel.parameters))
        node._obj.value = len(nodes)
        return 0

    def cuGraphInstantiateWithFlags(self, ready: Any, graph: Any, flags: int) -> int:
        return self.ready_error or self._add(ready, list(self.graphs[graph.value]))

    def cuGraphExecKernelNodeSetParams_v2(self, ready: Any, node: Any, said: Any) -> int:
        self.graphs[ready.value][node.value - 1] = _given(said._obj.parameters)
        return 0

    def cuGraphLaunch(self, ready: Any, stream: int) -> int:
        self.streams.append(stream)
        return max(map(self._run, self.graphs[ready.value]))

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        self.mode, mode._obj.value = mode._obj.value, self.mode
        return 0

    def cuGraphExecDestroy(self, ready: Any) -> int:
        assert self.mode == 2, "else it may end a capture"
        del self.graphs[ready.value]
        return 0

    cuGraphDestroy = cuGraphExecDestroy

    def cuGetErrorString(self, error: int, text: Any) -> int:
        text._obj.value = b"out of memory"
        return 0

    def _add(self, handle: Any, nodes: list[tuple[int, int, int]]) -> int:
        handle._obj.value = max(self.graphs, default=0) + 1
        self.graphs[handle._obj.value] = nodes
        return 0

    def _run(self, given: tuple[int, int, int]) -> int:
        source, target, number = given
        self.launched.append(given)
        for place in range(number):
            value = ctypes.c_float.from_address(source + 4 * place)
            ctypes.c_float.from_address(target + 4 * place).value = 2 * value.value
        return 0


def _given(parameters: Any) -> tuple[int, int, int]:
    """Source, target and number."""
    source, target = (ctypes.c_uint64.from_address(parameters[place]).value for place in (0, 1))
    return source, target, ctypes.c_int32.from_address(parameters[2]).value


def double(source: Tensor, target: Tensor, number: int, descriptors: tuple[Any, ...] = (), stream: int = 0) -> None:
    """Launches the kernel as `launching.launch` does; a descriptor stands for the address of the source."""
    packed = [descriptor.base.data_ptr() for descriptor in descriptors]
    arguments = [target, number] if descriptors else [source, target, number]
    values = [each.data_ptr() if isinstance(each, Tensor) else each for each in arguments]
    told = recorder()
    if told is None:
        KERNEL.launch(1, 1, stream, [*packed, *values])
    else:
        told.launch(Launch(KERNEL, None, (1, 1), stream, descriptors, packed, arguments, values))


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
