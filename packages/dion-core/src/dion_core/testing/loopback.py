"""One rank of a world of W on one device: collectives that copy the same bytes without leaving it.

Compute, memory and host time of a rank are thereby measured without a second device. What arrives has the right form
and size (a rank receives what it sent), but is not what other ranks would send: results mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dion_core.collectives import Group, Handle, Reduction, message
from dion_core.process_groups import stand_in


@dataclass(frozen=True)
class Wire:
    """A modelled wire: messages take their time on a stream of their own, one after the other.

    Attributes:
        bandwidth: bytes a second that leave a rank for others.
        latency: seconds a message takes besides.
    """

    bandwidth: float
    latency: float = 10e-6

    def seconds(self, num_bytes: int) -> float:
        """How long a message of so many bytes to others is under way."""
        return self.latency + num_bytes / self.bandwidth


class _Arrived:
    def wait(self) -> None:
        pass


class _UnderWay:
    """A message on the stream of the wire, which the current stream waits for; its tensors are kept until then."""

    def __init__(self, event: torch.cuda.Event, tensors: Any) -> None:
        self._event, self._tensors = event, tensors

    def wait(self) -> None:
        self._event.wait()
        self._tensors = None


@dataclass(frozen=True)
class LoopbackGroup:
    """A `Group` of `size` ranks of which this one exists; see the module.

    Attributes:
        size: how many ranks the group pretends to have.
        rank: which of them this one is.
        wire: a modelled wire (CUDA only), or None: messages take no longer than their copy.
    """

    size: int
    rank: int = 0
    wire: Wire | None = None
    _streams: dict[torch.device, torch.cuda.Stream] = field(default_factory=dict, compare=False, repr=False)

    replayable: ClassVar[bool] = True

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.size))

    def named(self, label: str) -> LoopbackGroup:
        return self

    @message
    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Callable[[], Handle]:
        return partial(self._send, [copy for output in outputs for copy in _fill(output, tensor)], tensor)

    @message
    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> Callable[[], Handle]:
        return partial(self._send, [], tensor)

    @message
    def reduce_scatter(self, output: Tensor, tensor: Tensor, reduction: Reduction) -> Callable[[], Handle]:
        return partial(self._send, [(output, tensor[: output.numel()])], tensor)

    @message
    def broadcast(self, tensor: Tensor, source: int) -> Callable[[], Handle]:
        return partial(self._send, [], tensor)

    @message
    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Callable[[], Handle]:
        if list(output_splits) == list(input_splits):
            return partial(self._send, [(output, tensor)], tensor)
        own = tensor.narrow(0, sum(input_splits[: self.rank]), input_splits[self.rank])
        copies, start = list[_Copy](), 0
        for length, group in groupby(output_splits):  # of equal lengths one copy fills all
            number = len(list(group))
            pieces = output.narrow(0, start, number * length).view(number, length)
            copies += (
                _fill(pieces, own) if length <= len(own) else [each for piece in pieces for each in _fill(piece, own)]
            )
            start += number * length
        return partial(self._send, copies, tensor)

    def _send(self, copies: list[_Copy], message: Tensor) -> Handle:
        if self.wire is None or not message.is_cuda:
            _do(copies)
            return _Arrived()
        stream = self._streams.setdefault(message.device, torch.cuda.Stream(message.device))
        stream.wait_stream(torch.cuda.current_stream(message.device))
        remote = message.numel() * message.element_size() * (self.size - 1) // self.size
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(self.wire.seconds(remote) * _cycles_per_second(message.device)))
            _do(copies)
            return _UnderWay(stream.record_event(), (message, copies))


_Copy = tuple[Tensor, Tensor]
"""To where, and what."""


def _do(copies: list[_Copy]) -> None:
    if len(copies) > 2:
        torch._foreach_copy_([output for output, _ in copies], [piece for _, piece in copies])
        return
    for output, piece in copies:
        output.copy_(piece)


def _fill(output: Tensor, piece: Tensor) -> list[_Copy]:
    """The copies that fill the last dimension of `output` by the start of the piece, or by the piece over and over."""
    length, own = output.shape[-1], len(piece)
    if not output.numel():
        return []
    if not own:
        return [(output, output.new_zeros(()))]
    if length <= own:
        return [(output, piece[:length])]
    whole = length // own * own
    return [(output[:whole].view(-1, own), piece), *_fill(output[whole:], piece)]


_CYCLES: dict[torch.device, float] = {}


def _cycles_per_second(device: torch.device) -> float:
    """The clock by which `torch.cuda._sleep` counts, measured once."""
    if device not in _CYCLES:
        cycles = 20_000_000
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        before.record()
        torch.cuda._sleep(cycles)
        after.record()
        after.synchronize()
        _CYCLES[device] = cycles / before.elapsed_time(after) * 1e3
    return _CYCLES[device]


@contextmanager
def loopback(world_size: int, device: str, *, wire: Wire | None = None) -> Iterator[tuple[DeviceMesh, Group]]:
    """A mesh of `world_size` ranks, this one being rank 0, whose collectives are those of a `LoopbackGroup`.

    Optimizers of DTensors on that mesh then run as one rank of so many.

    Args:
        world_size: W.
        device: "cuda" or "cpu".
        wire: see `LoopbackGroup`.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        mesh = init_device_mesh(device, (world_size,))
        group = LoopbackGroup(world_size, wire=wire)
        with stand_in(mesh.get_group(), group):
            yield mesh, group
    finally:
        dist.destroy_process_group()
