"""The few collectives that the optimizers and transports use, behind one small protocol.

Transports communicate through a `Group` and nothing else, so that another library (MPI, say) is one more
implementation and not one more transport. Messages are one-dimensional, contiguous, and move as bytes:
what arrives is bit for bit what was sent, in every dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, Self

import torch
from torch import Tensor

from dion_core.recording import Handle as Handle
from dion_core.recording import message as message
from dion_core.watchdog import WATCHDOG, Watched

Reduction = Literal["sum", "max"]


class TransportError(RuntimeError):
    """A transport that is missing or does not fit, ranks that disagree, or a collective that failed."""


class Group(Protocol):
    """Ranks that communicate. Every call is collective and returns at once with a handle to wait on.

    A group says by an attribute ``replayable = True`` that steps on GPUs may be replayed (module `replay`). Then each
    of its collectives is a method that prepares it without looking at values, returns what launches it, and is marked
    by `message`; it is prepared once for all replays, and launched in each. Handles keep their tensors until they are
    waited for.
    """

    @property
    def rank(self) -> int:
        """This process's number in the group, 0 <= rank < size."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global numbers of the group's ranks, in group order."""

    def named(self, label: str) -> Group:
        """The same group, whose collectives say what they are for in errors and when observed."""

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Handle:
        """Fills outputs[r] with rank r's `tensor`. Lengths may differ by rank, and may be 0."""

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> Handle:
        """Replaces `tensor` by its elementwise sum or maximum over the ranks."""

    def reduce_scatter(self, output: Tensor, tensor: Tensor, reduction: Reduction) -> Handle:
        """Fills `output` with this rank's part (all parts equally long) of the reduction of `tensor`."""

    def broadcast(self, tensor: Tensor, source: int) -> Handle:
        """Replaces `tensor` by the one of rank `source` of the group."""

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Handle:
        """Sends the r-th piece of `tensor` to rank r; `output` holds the pieces received, by rank."""


@dataclass(frozen=True)
class Call:
    """One collective that this rank issued: its name, the group's size, and the bytes sent to each peer.

    `sent` includes the bytes a rank sends to itself; a reduction counts its message once for every peer. `label`
    is what the group was named for.
    """

    name: str
    size: int
    sent: tuple[int, ...]
    label: str = ""


_observers: list[Callable[[Call], None]] = []


@contextmanager
def observe() -> Iterator[list[Call]]:
    """Collects every collective that this process issues inside the block, in order."""
    calls: list[Call] = []
    _observers.append(calls.append)
    try:
        yield calls
    finally:
        _observers.remove(calls.append)


def raise_failure() -> None:
    """Raises TransportError once a collective was aborted: what was sent since cannot be trusted."""
    if WATCHDOG.failure:
        raise TransportError(WATCHDOG.failure)


def report_call(name: str, size: int, sent: Sequence[int], label: str) -> None:
    """Tells observers of a collective; every implementation of `Group` calls it before it launches one."""
    raise_failure()
    for observer in _observers:
        observer(Call(name, size, tuple(sent), label))


class Done:
    """A collective that is over, or that the current stream waits for already."""

    def wait(self) -> None:
        raise_failure()


def watch_work(what: str, seconds: float, abort: Callable[[], None]) -> Handle:
    """A handle for work that the current stream was given already; its communicator is aborted if it takes longer.

    For groups that launch on the current stream, where nothing is to be waited for.
    """
    if not torch.cuda.is_current_stream_capturing():
        watched = Watched(())
        watched.waited()
        WATCHDOG.watch([watched], what, seconds, abort)
    return Done()


def num_bytes(tensor: Tensor) -> int:
    """Bytes of the elements of `tensor`."""
    return tensor.numel() * tensor.element_size()


def split(tensor: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Views of consecutive pieces of a 1-D tensor, which `lengths` cover exactly."""
    pieces: list[Tensor] = list(torch.split_with_sizes(tensor, list(lengths)))
    return pieces


def gathered_parts(part: Tensor, dim: int, lengths: Sequence[int], group: Group) -> list[Tensor]:
    """By rank the parts of a tensor that is divided along one dimension. Collective.

    Args:
        part: this rank's.
        dim: the dimension.
        lengths: by rank, how long the part is along it.
        group: the ranks, named for what is gathered.
    """
    parts = [part.new_empty((*part.shape[:dim], length, *part.shape[dim + 1 :])) for length in lengths]
    group.all_gather([each.view(-1) for each in parts], part.detach().contiguous().view(-1)).wait()
    return parts


def adjacent(outputs: Sequence[Tensor]) -> Tensor | None:
    """One tensor over all outputs where they are equally long and lie back to back, else None."""
    first, length = outputs[0], outputs[0].numel()
    size = length * first.element_size()
    for number, output in enumerate(outputs):
        if output.numel() != length or output.data_ptr() != first.data_ptr() + number * size:
            return None
    return first.as_strided((len(outputs) * length,), (1,))


@dataclass(frozen=True)
class SoloGroup:
    """The `Group` of one process that communicates with nobody: results are copies of what was given."""

    rank: int = 0
    size: int = 1
    ranks: tuple[int, ...] = (0,)

    replayable: ClassVar[bool] = True

    def named(self, label: str) -> SoloGroup:
        return self

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Handle:
        outputs[0].copy_(tensor)
        return Done()

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> Handle:
        return Done()

    def reduce_scatter(self, output: Tensor, tensor: Tensor, reduction: Reduction) -> Handle:
        output.copy_(tensor)
        return Done()

    def broadcast(self, tensor: Tensor, source: int) -> Handle:
        return Done()

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Handle:
        output.copy_(tensor)
        return Done()


class Silence:
    """The collectives of a group whose messages are not sent; what would arrive keeps its values."""

    def named(self, label: str) -> Self:
        return self

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Handle:
        return Done()

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> Handle:
        return Done()

    def reduce_scatter(self, output: Tensor, tensor: Tensor, reduction: Reduction) -> Handle:
        return Done()

    def broadcast(self, tensor: Tensor, source: int) -> Handle:
        return Done()

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Handle:
        return Done()
