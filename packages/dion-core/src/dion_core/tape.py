"""What a step does on the device, written down so that it can be done again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from dion_core.block import Block
from dion_core.cuda_driver import LaunchGraph, described
from dion_core.recording import Handle, Launch


@dataclass
class Run:
    """One replay: what varies, and the messages under way."""

    arguments: tuple[Any, ...]
    handles: dict[int, Handle] = field(default_factory=dict)


class Entry(Protocol):
    """One thing that a step does, with regions in place of the tensors that it has allocated."""

    def bound(self, block: Block) -> Callable[[Run], None]:
        """What does it with the tensors of a block."""


class Operation(NamedTuple):
    """An operation of torch that writes to tensors which are there."""

    operation: Callable[..., Any]
    arguments: list[Any]
    names: dict[str, Any]

    def bound(self, block: Block) -> Callable[[Run], None]:
        operation, arguments = self.operation, block.tensors(self.arguments)
        names = {name: block.tensors(value) for name, value in self.names.items()}

        def do(run: Run) -> None:
            operation(*arguments, **names)

        return do


class Message(NamedTuple):
    """A collective that is launched."""

    prepare: Callable[..., Callable[[], Handle]]
    arguments: list[Any]
    number: int

    def bound(self, block: Block) -> Callable[[Run], None]:
        number, launch = self.number, self.prepare(*block.tensors(self.arguments))

        def do(run: Run) -> None:
            run.handles[number] = launch()

        return do


class Wait(NamedTuple):
    """The wait for a message."""

    number: int

    def bound(self, block: Block) -> Callable[[Run], None]:
        return lambda run: run.handles.pop(self.number).wait()


class Varying(NamedTuple):
    """What gets the arguments of the step."""

    function: Callable[..., None]

    def bound(self, block: Block) -> Callable[[Run], None]:
        return lambda run: self.function(*run.arguments)


Spot = tuple[int, int]
"""The number of a buffer, and a byte in it."""


class RecordedLaunch(NamedTuple):
    """A launch of which some parameters are addresses in what the step has allocated.

    Attributes:
        launch: the launch, with regions for tensors that the step has allocated, of which it keeps none.
        arguments: for numbers of parameters where they point to.
        descriptors: the same for the descriptors before them.
    """

    launch: Launch
    arguments: Mapping[int, Spot]
    descriptors: Mapping[int, Spot]


class BoundLaunches:
    """Launches that are ready as one graph, which is filled anew where the block has moved."""

    def __init__(self, launches: Sequence[RecordedLaunch], block: Block) -> None:
        self._graph = LaunchGraph([(each.launch.kernel, each.launch.grid) for each in launches])
        self._stream, self._launches = launches[0].launch.stream, [_BoundLaunch(each, block) for each in launches]

    def __call__(self, run: Run) -> None:
        self._graph.start(self._stream)

    def move(self, start: int) -> None:
        """The block starts there now."""
        for number, launch in enumerate(self._launches):
            self._graph.fill(number, launch.values(start))


class _BoundLaunch:
    """What a launch is given, by where the block is."""

    def __init__(self, recorded: RecordedLaunch, block: Block) -> None:
        self._launch = recorded.launch
        self._addresses = [descriptor.base.data_ptr() for descriptor in recorded.launch.descriptors]
        self._offsets, self._described = (_offsets(each, block) for each in (recorded.arguments, recorded.descriptors))

    def values(self, start: int) -> list[Any]:
        """All parameters where the block starts there."""
        launch, offsets = self._launch, self._offsets
        values = [start + offsets[n] if n in offsets else value for n, value in enumerate(launch.values)]
        packed = list(launch.packed) if not self._described else list[Any]()
        if self._described:
            for number, (descriptor, address) in enumerate(zip(launch.descriptors, self._addresses, strict=True)):
                moved = start + self._described[number] if number in self._described else address
                packed += described(descriptor, launch.compiled, number, moved)
        return [*packed, *values]


def _offsets(spots: Mapping[int, Spot], block: Block) -> dict[int, int]:
    """Of parameters that point into the block how far in it."""
    starts = {number: block.offset(buffer) for number, (buffer, _) in spots.items()}
    return {number: start + spots[number][1] for number, start in starts.items() if start is not None}


class Launches(NamedTuple):
    """Launches that follow each other on one stream."""

    launches: list[RecordedLaunch]

    def bound(self, block: Block) -> BoundLaunches:
        return BoundLaunches(self.launches, block)


class Tape:
    """A step that can be done again, in a block of memory that it has only while it runs."""

    def __init__(self, entries: Sequence[Entry], block: Block) -> None:
        self._block, self._start = block, -1
        self._steps = [entry.bound(block) for entry in entries]
        self._launches = [step for step in self._steps if isinstance(step, BoundLaunches)]
        block.give_back()

    def replay(self, arguments: tuple[Any, ...]) -> bool:
        """Does it again; False if there is no room for its memory: then nothing was done.

        Args:
            arguments: for what varies.
        """
        try:
            start = self._block.take()
        except torch.OutOfMemoryError:
            return False
        run = Run(arguments)
        try:
            if start != self._start:
                for launches in self._launches:
                    launches.move(start)
                self._start = start
            for step in self._steps:
                step(run)
        except BaseException:
            self._start = -1
            for handle in run.handles.values():  # what is under way must not write to memory of others
                with suppress(Exception):
                    handle.wait()
            raise
        finally:
            self._block.give_back()
        return True
