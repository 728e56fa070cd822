"""What a step does on the device, written down while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dion_core.block import Block, Region, Use, arranged
from dion_core.cuda_driver import DriverError
from dion_core.recording import Handle, Launch, recorded_by
from dion_core.tape import Entry, Launches, Message, Operation, RecordedLaunch, Spot, Tape, Varying, Wait

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

_OF_RESULTS = {"dtype", "layout", "device", "pin_memory"}
"""Arguments that say of what kind a result is, which a tensor that is there says itself."""
_UNKNOWN_SHAPE = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


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
        if number is None or self._storages[number].expired():
            return None
        return Region(number, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())

    def spot(self, address: int) -> Spot | None:
        """Where an address lies in a buffer; None if it is elsewhere."""
        for start, number in self._live.items():
            if start <= address < start + self._sizes[number] and not self._storages[number].expired():
                return number, address - start
        return None

    def block(self, device: torch.device, before: Sequence[int]) -> tuple[Block, list[int]]:
        """A block for all buffers but those that are still in use, after the step; these stay what they are.

        Takes the order in which buffers of an earlier step were placed, and returns that of these.
        """
        self._look()
        uses = {number: Use(self._sizes[number], number, end) for number, end in self._ends.items()}
        starts, num_bytes, order = arranged(list(uses.values()), before)
        others = {n: torch.UntypedStorage._new_with_weak_ptr(self._storages[n].cdata) for n in self._live.values()}
        return Block(num_bytes, dict(zip(uses, starts, strict=True)), others, device), order

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

    is_over = False

    def wait(self) -> None:
        with self.recording.paused():
            self.handle.wait()
        if not self.is_over:
            self.recording.entries.append(Wait(self.number))
        self.is_over = True


class Recording(TorchDispatchMode):
    """Sees every operation of torch, is told the rest, and writes down what a step does.

    Args:
        device: of the step.
        foreign: addresses of storages that may be others in the next step, which nothing that is recorded may keep.
        order: in which buffers of an earlier step were placed, if there was one.

    Attributes:
        order: after the step, in which those of this one are placed.
    """

    def __init__(self, device: torch.device, foreign: Iterable[int], order: Sequence[int] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[Entry] = []
        self.reason = ""
        """Why the step cannot be recorded; empty if it can."""
        self._device, self._foreign, self.order = device, frozenset(foreign), order
        self._memory, self._num_messages, self._paused = _Memory(), 0, False
        self._constants: list[StorageWeakRef] = []

    def record(self, work: Callable[[], None]) -> Tape | None:
        """Does the work; None if it cannot be done again."""
        with recorded_by(self), self:
            work()
        if self.reason:
            return None
        try:
            block, self.order = self._memory.block(self._device, self.order)
            return Tape(self.entries, block)
        except torch.OutOfMemoryError as error:  # the work is done all the same
            self.refuse(f"there is no room for its memory in one block: {error}")
        except DriverError as error:
            self.refuse(str(error))
        return None

    def launch(self, launch: Launch) -> None:
        launch.kernel.launch(*launch.grid, launch.stream, [*launch.packed, *launch.values])
        arguments = [self._kept(argument) for argument in launch.arguments]
        spots = {n: (each.buffer, each.offset) for n, each in enumerate(arguments) if isinstance(each, Region)}
        addresses = (descriptor.base.data_ptr() for descriptor in launch.descriptors)
        described = {n: spot for n, address in enumerate(addresses) if (spot := self._memory.spot(address)) is not None}
        last = self.entries[-1] if self.entries else None
        if not isinstance(last, Launches) or last.launches[0].launch.stream != launch.stream:
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
        if self._paused:
            return result
        if func is torch.ops.aten.lift_fresh.default:
            self._constants.append(StorageWeakRef(result.untyped_storage()))
        elif func.is_view:
            pass
        elif func.namespace != "aten":
            self.refuse(f"{func} is no operation of torch itself")
        elif func._schema.is_mutable:
            self._check_targets(func, args, names)
            self._note(func, args, names)
        elif not isinstance(result, Tensor):
            self.refuse(f"{func} has other results than one tensor")
        elif result.device != self._device:
            self.refuse(f"{func} brings values to {result.device}")
        elif not _shares_memory(result, (args, names)):  # else a view, such as _unsafe_view
            self._memory.add(result)
            if func in _COPIES:
                self._note(torch.ops.aten.copy_.default, (result, args[0]), {})
            elif func not in _EMPTY:
                self._note_result(func, args, names, result)
        return result

    def _check_targets(self, operation: Any, arguments: tuple[Any, ...], names: dict[str, Any]) -> None:
        """Refuses to write to what is made of numbers of the host in every step: it would be made once for all."""
        constants = {storage.cdata for storage in self._constants if not storage.expired()}
        schema = operation._schema.arguments
        given = {argument.name: value for argument, value in zip(schema, arguments, strict=False)} | names
        for argument in schema:
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = tree_leaves(given.get(argument.name))
                if any(isinstance(each, Tensor) and each.untyped_storage()._cdata in constants for each in written):
                    self.refuse(f"{operation} writes to a tensor that is made of numbers of the host")

    def _note_result(self, operation: Any, arguments: tuple[Any, ...], names: dict[str, Any], result: Tensor) -> None:
        """Writes down the operation in the form in which it writes to a tensor that is there."""
        found = _writing(operation)
        if found is None or _has_unknown_shape(operation, arguments):
            self.refuse(f"{operation} cannot write to a tensor that is there")
            return
        writing, target = found
        known = {argument.name for argument in writing._schema.arguments}
        kept = {name: value for name, value in names.items() if name in known}
        self._note(writing, arguments, {**kept, target: result})

    def _note(self, operation: Any, arguments: tuple[Any, ...], names: dict[str, Any]) -> None:
        kept = {name: self._kept(value) for name, value in names.items()}
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


def _shares_memory(tensor: Tensor, arguments: Any) -> bool:
    """Whether some argument lies in the same storage."""
    address = tensor.untyped_storage().data_ptr()
    others = (each for each in tree_leaves(arguments) if isinstance(each, Tensor))
    return address != 0 and any(other.untyped_storage().data_ptr() == address for other in others)


@cache
def _writing(operation: Any) -> tuple[Any, str] | None:
    """The overload that does the same and writes to a tensor, and the name of that argument; None if there is none."""
    wanted = _inputs(operation)
    for name in operation._overloadpacket.overloads():
        overload = getattr(operation._overloadpacket, name)
        outs = [argument.name for argument in overload._schema.arguments if argument.is_out]
        if len(outs) == 1 and _inputs(overload) == wanted:
            return overload, outs[0]
    return None


def _inputs(operation: Any) -> list[tuple[str, str]]:
    """Names and types of what an operation works on."""
    arguments = operation._schema.arguments
    return [(each.name, str(each.type)) for each in arguments if not each.is_out and each.name not in _OF_RESULTS]


def _has_unknown_shape(operation: Any, arguments: tuple[Any, ...]) -> bool:
    """Whether the shape of the result follows from values."""
    if operation is torch.ops.aten.index.Tensor:
        return any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in arguments[1])
    return bool(_UNKNOWN_SHAPE & set(operation.tags))
