"""Steps that repeat what was recorded of an earlier one, so that the host does not work out again what stays the same.

A step launches the same kernels on the same buffers as the one before it, as long as nothing changes on the host: what
it reads of gradients and options lies in tables on the device. So while the second of two steps that are alike runs,
all it launches is written down, and which memory it takes for how long. Every later one does what was written, in one
block of memory, which is free between steps as the memory of a step is that runs as it is. After a change that ends
replays the first step is written down at once: it is likely that the next ones are alike.

What is written down: launches through the driver, messages, and operations of torch. What cannot be is found while
recording, and such steps go on as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from dion_core.block import Block, Region, Use, arranged
from dion_core.recording import Handle, Launch, recorded_by
from dion_core.tape import Entry, Launches, Message, Operation, RecordedLaunch, Spot, Tape, Varying, Wait

logger = logging.getLogger("dion_core")

_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
    torch.ops.aten.empty_like.default,
}
"""Operations that only allocate."""

_COPIES = {torch.ops.aten.clone.default, torch.ops.aten._to_copy.default}
"""Operations whose result is a copy, perhaps in another dtype."""


class _Memory:
    """What a step allocates: buffers, numbered in the order of their allocation."""

    def __init__(self) -> None:
        self._storages: list[StorageWeakRef] = []
        self._sizes: list[int] = []
        self._ends: dict[int, int] = {}
        self._live: dict[int, int] = {}
        """By address the number of the buffer that is there now."""

    def add(self, tensor: Tensor) -> None:
        """The tensor is new."""
        self._look()
        storage, number = tensor.untyped_storage(), len(self._storages)
        if storage.nbytes():
            self._storages.append(StorageWeakRef(storage))
            self._sizes.append(storage.nbytes())
            self._live[storage.data_ptr()] = number

    def region(self, tensor: Tensor) -> Region | None:
        """Where a tensor lies in a buffer; None if it is elsewhere."""
        number = self._live.get(tensor.untyped_storage().data_ptr())
        if number is None:
            return None
        return Region(number, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    def spot(self, address: int) -> Spot | None:
        """Where an address lies in a buffer; None if it is elsewhere."""
        for start, number in self._live.items():
            if start <= address < start + self._sizes[number]:
                return number, address - start
        return None

    def block(self, device: torch.device) -> Block:
        """A block for all buffers but those that are still in use, after the step; these stay what they are."""
        self._look()
        uses = {number: Use(self._sizes[number], number, end) for number, end in self._ends.items()}
        starts, num_bytes = arranged(list(uses.values()))
        others = {n: torch.UntypedStorage._new_with_weak_ptr(self._storages[n].cdata) for n in self._live.values()}
        return Block(num_bytes, dict(zip(uses, starts, strict=True)), others, device)

    def _look(self) -> None:
        """Buffers that nothing refers to any more end now."""
        for address in [address for address, number in self._live.items() if self._storages[number].expired()]:
            self._ends[self._live.pop(address)] = len(self._storages)


@dataclass
class _WaitedFor:
    """A handle whose wait is recorded."""

    handle: Handle
    number: int
    recording: Recording

    def wait(self) -> None:
        with self.recording.paused():
            self.handle.wait()
        self.recording.entries.append(Wait(self.number))


class Recording(TorchDispatchMode):
    """Sees every operation of torch, is told the rest, and writes down what a step does.

    Args:
        device: of the step.
        foreign: addresses of storages that may be others in the next step, which nothing that is recorded may keep.
    """

    def __init__(self, device: torch.device, foreign: Iterable[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[Entry | Launches] = []
        self.reason = ""
        """Why the step cannot be recorded; empty if it can."""
        self._device, self._foreign = device, frozenset(foreign)
        self._memory, self._num_messages, self._paused = _Memory(), 0, False

    def record(self, work: Callable[[], None]) -> Tape | None:
        """Does the work; None if it cannot be done again."""
        with recorded_by(self), self:
            work()
        return None if self.reason else Tape(self.entries, self._memory.block(self._device))

    def launch(self, launch: Launch) -> None:
        launch.kernel.launch(*launch.grid, launch.stream, [*launch.packed, *launch.values])
        arguments = [self._kept(argument) for argument in launch.arguments]
        spots = {n: (each.buffer, each.offset) for n, each in enumerate(arguments) if isinstance(each, Region)}
        addresses = (descriptor.base.data_ptr() for descriptor in launch.descriptors)
        described = {n: spot for n, address in enumerate(addresses) if (spot := self._memory.spot(address)) is not None}
        last = self.entries[-1] if self.entries else None
        if not isinstance(last, Launches):
            last = Launches([])
            self.entries.append(last)
        last.launches.append(RecordedLaunch(replace(launch, arguments=arguments), spots, described))

    def message(self, prepare: Callable[..., Callable[[], Handle]], arguments: tuple[Any, ...]) -> Handle:
        number, self._num_messages = self._num_messages, self._num_messages + 1
        self.entries.append(Message(prepare, self._kept(arguments), number))
        with self.paused():
            return _WaitedFor(prepare(*arguments)(), number, self)

    def varying(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.entries.append(Varying(function))
        with self.paused():
            function(*arguments)

    def refuse(self, reason: str) -> None:
        self.reason = self.reason or reason

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside the block nothing is recorded."""
        before, self._paused = self._paused, True
        try:
            with recorded_by(None):
                yield
        finally:
            self._paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        names = kwargs or {}
        result = func(*args, **names)
        if self._paused or func.is_view:
            return result
        if func.namespace != "aten":
            self.refuse(f"{func} is no operation of torch itself")
        elif func._schema.is_mutable:
            self._note(func, args, names)
        elif not isinstance(result, Tensor):
            self.refuse(f"{func} has other results than one tensor")
        elif result.device != self._device:
            self.refuse(f"{func} brings values to {result.device}")
        elif not any(_shares_memory(result, argument) for argument in args):  # else a view, such as _unsafe_view
            self._memory.add(result)
            if func in _COPIES:
                self._note(torch.ops.aten.copy_.default, (result, args[0]), {})
            elif func not in _EMPTY:
                self._note_result(func, args, names, result)
        return result

    def _note_result(self, operation: Any, arguments: tuple[Any, ...], names: dict[str, Any], result: Tensor) -> None:
        """Writes down the operation in the form in which it writes to a tensor that is there."""
        packet = operation._overloadpacket
        for name in (f"{operation._overloadname}_out", "out"):
            if name in packet.overloads():
                out = getattr(packet, name)
                known = {argument.name for argument in out._schema.arguments}
                self._note(out, arguments, {name: each for name, each in names.items() if name in known}, out=result)
                return
        self.refuse(f"{operation} cannot write to a tensor that is there")

    def _note(self, operation: Any, arguments: tuple[Any, ...], names: dict[str, Any], **others: Tensor) -> None:
        kept = {name: self._kept(value) for name, value in (names | others).items()}
        self.entries.append(Operation(operation, self._kept(arguments), kept))

    def _kept(self, value: Any) -> Any:
        """The value as it is kept: regions for tensors that the step has allocated, of which it must keep none."""
        if isinstance(value, list | tuple):
            return [self._kept(each) for each in value]
        if not isinstance(value, Tensor):
            return value
        if value.device != self._device:
            self.refuse(f"a tensor is on {value.device}")
        if value.untyped_storage().data_ptr() in self._foreign:
            self.refuse("a tensor that may be another one in the next step is used as it is")
        return self._memory.region(value) or value


def _shares_memory(tensor: Tensor, argument: Any) -> bool:
    address = tensor.untyped_storage().data_ptr()
    return isinstance(argument, Tensor) and argument.untyped_storage().data_ptr() == address


class StepReplay:
    """Runs the device work of steps: as it is, and by replay where steps are alike."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._form: Hashable = None
        self._tape: Tape | None = None
        self._replayed, self._reason = False, ""

    def run(
        self,
        work: Callable[[], None],
        form: Hashable,
        arguments: tuple[Any, ...],
        foreign: Callable[[], Iterable[int]],
    ) -> None:
        """Does the work.

        Args:
            work: launches the same kernels on the same tensors as long as `form` is the same, but for those that are
                handed to `recording.varying`.
            form: whatever else the work depends on that is not read from the device.
            arguments: what is handed to `recording.varying`.
            foreign: gives the addresses of storages that may be others in the next step although the form is the same.
        """
        form, lasting = (form, self._stream()), self._replayed
        if form != self._form:
            self._form, self._tape, self._replayed, self._reason = form, None, False, ""
        else:
            lasting = True
        if self._tape is not None:
            self._tape.replay(arguments)
            self._replayed = True
        elif self._reason or not lasting:
            work()
        else:
            recording = Recording(self._device, foreign())
            self._tape, self._reason = recording.record(work), recording.reason
            if self._reason:
                logger.info("steps are not replayed: %s", self._reason)

    def _stream(self) -> int:
        """Where the work goes now: what is recorded goes there again."""
        stream: int = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
        return stream
