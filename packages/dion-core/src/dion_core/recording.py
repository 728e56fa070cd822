"""What is told of a step while it is recorded: its launches, its messages, and what is other in every step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, Protocol

P = ParamSpec("P")


class Handle(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Makes the results usable on the current stream (NCCL) or on the host (gloo)."""


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel through the driver.

    Attributes:
        kernel: a `cuda_driver.DriverKernel`.
        compiled: the kernel as Triton compiled it.
        grid: how many programs along the first and the second axis.
        stream: its address.
        descriptors: of Triton, in the place of the first parameters.
        packed: the parameters that stand for the descriptors.
        arguments: the other ones that are no constants: tensors and numbers.
        values: of these, what the driver is given.
    """

    kernel: Any
    compiled: Any
    grid: tuple[int, int]
    stream: int
    descriptors: Sequence[Any]
    packed: Sequence[Any]
    arguments: Sequence[Any]
    values: Sequence[Any]


class Recorder(Protocol):
    """Who is told; each method does what it is told of."""

    def launch(self, launch: Launch) -> None:
        """Launches."""

    def message(self, prepare: Callable[..., Callable[[], Handle]], arguments: tuple[Any, ...]) -> Handle:
        """Prepares a collective and launches it."""

    def varying(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Calls the function with the arguments."""

    def refuse(self, reason: str) -> None:
        """There is something that cannot be recorded."""


class _Thread(threading.local):
    """What is recorded of one thread."""

    recorder: Recorder | None = None


_thread = _Thread()


def recorder() -> Recorder | None:
    """Who records what this thread does now."""
    return _thread.recorder


@contextmanager
def recorded_by(recorder: Recorder | None) -> Iterator[None]:
    """Inside the block the recorder is told what this thread does."""
    before, _thread.recorder = _thread.recorder, recorder
    try:
        yield
    finally:
        _thread.recorder = before


def message(prepare: Callable[P, Callable[[], Handle]]) -> Callable[P, Handle]:
    """Makes a collective of a `Group` of what prepares it and returns what launches it.

    When it is recorded, it is prepared once for all replays, so preparing must not look at values.
    """
    known = signature(prepare)

    @wraps(prepare)
    def told(*arguments: P.args, **names: P.kwargs) -> Handle:
        if _thread.recorder is None:
            return prepare(*arguments, **names)()
        return _thread.recorder.message(prepare, known.bind(*arguments, **names).args)

    return told


def varying(function: Callable[..., None], *arguments: Any) -> None:
    """Calls a function with what is other in every step: the arguments, given anew to every replay."""
    if _thread.recorder is None:
        function(*arguments)
    else:
        _thread.recorder.varying(function, arguments)
