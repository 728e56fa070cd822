"""Groups of ranks that communicate through torch.distributed: NCCL and gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import ClassVar, Protocol, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions

from dion_core.collectives import (
    Group,
    Handle,
    Reduction,
    TransportError,
    adjacent,
    message,
    num_bytes,
    raise_failure,
    report_call,
    split,
    watch_work,
)
from dion_core.watchdog import WATCHDOG, Watched

T = TypeVar("T")


def _as_bytes(tensor: Tensor) -> Tensor:
    # gloo knows no bf16 in some collectives; bytes are moved alike by every backend. `detach` keeps autograd out.
    return tensor.detach().view(torch.uint8)


class _Pending:
    """Works to wait for, with the tensors that they read and write kept alive until then."""

    def __init__(
        self,
        works: Sequence[dist.Work] = (),
        tensors: Sequence[Tensor] = (),
        what: str = "",
        watched: Watched | None = None,
    ) -> None:
        self._works = works
        self._tensors = tensors
        self._what = what
        self._watched = watched

    def wait(self) -> None:
        raise_failure()
        try:
            for work in self._works:
                work.wait()  # on gloo bounded by the time-out of the process group
        except RuntimeError as error:
            raise _failure(self._what, error) from error
        if self._watched is not None:
            self._watched.waited()
        self._works, self._tensors, self._watched = (), (), None


class _Placing:
    """A collective whose results are to be copied to where they belong."""

    def __init__(self, handle: Handle, outputs: Sequence[Tensor], arrived: Sequence[Tensor]) -> None:
        self._handle, self._outputs, self._arrived = handle, outputs, arrived

    def wait(self) -> None:
        self._handle.wait()
        for output, piece in zip(self._outputs, self._arrived, strict=True):
            output.copy_(piece)
        self._outputs, self._arrived = (), ()


def _failure(what: str, error: RuntimeError) -> TransportError:
    """What to raise for an error of torch.distributed, which raises RuntimeError for time-outs and lost peers alike."""
    return TransportError(f"{what} failed: {error}")


@dataclass(frozen=True)
class TorchGroup:
    """A `Group` on a torch.distributed process group (NCCL or gloo). Equal if process group and order are the same.

    Every collective is bounded by the time-out that the process group was made with: on gloo the wait for it, on
    NCCL by a watchdog, since waiting there would block the host.

    Attributes:
        process_group: whose ranks communicate.
        label: what for.
        order: for each rank of this group its rank in the process group; empty where they are the same. A process
            group numbers its ranks as torch likes, while rows lie on a mesh in an order of their own. Here ranks
            are numbered as rows lie, so that nothing else has to know of the difference. NCCL sends from and to the
            same places in any order; only gloo needs copies for it.
    """

    process_group: dist.ProcessGroup
    label: str = field(default="", compare=False)
    order: tuple[int, ...] = ()

    replayable: ClassVar[bool] = True

    @cached_property
    def rank(self) -> int:
        rank = dist.get_rank(self.process_group)
        return self.order.index(rank) if self.order else rank

    @cached_property
    def size(self) -> int:
        return dist.get_world_size(self.process_group)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        ranks = dist.get_process_group_ranks(self.process_group)
        return tuple(ranks[place] for place in self.order) if self.order else tuple(ranks)

    def in_order(self, ranks: Sequence[int]) -> TorchGroup:
        """The same ranks, numbered as these global ranks follow each other."""
        given = dist.get_process_group_ranks(self.process_group)
        order = tuple(given.index(rank) for rank in ranks)
        return replace(self, order=() if order == tuple(range(len(given))) else order)

    def named(self, label: str) -> TorchGroup:
        return replace(self, label=label)

    # What NCCL does in every step calls the process group as functions of torch.distributed do, without their checks of
    # arguments, which take a third of the time of a launch.

    @message
    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Callable[[], Handle]:
        sent, whole = [num_bytes(tensor)] * self.size, adjacent(outputs) if tensor.is_cuda and not self.order else None
        if whole is not None:  # NCCL gathers straight into it; a list it would fill by copies
            gather, given = (
                self.process_group._allgather_base,
                (_as_bytes(whole), _as_bytes(tensor), AllgatherOptions()),
            )
            return self._prepared("all_gather", sent, lambda: [gather(*given)], tensor, *outputs)

        def start() -> list[dist.Work]:
            if len({output.numel() for output in outputs}) == 1:
                pieces = [_as_bytes(output) for output in self._as_processes(outputs)]
                return [dist.all_gather(pieces, _as_bytes(tensor), group=self.process_group, async_op=True)]
            # gloo gathers equal lengths only
            outputs[self.rank].copy_(tensor)
            return [self._broadcast(output, rank) for rank, output in enumerate(outputs) if output.numel()]

        return self._prepared("all_gather", sent, start, tensor, *outputs)

    @message
    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> Callable[[], Handle]:
        options = AllreduceOptions()
        options.reduceOp = _operation(reduction)
        reduce, given = self.process_group.allreduce, ([tensor], options)
        return self._prepared("all_reduce", [num_bytes(tensor)] * self.size, lambda: [reduce(*given)], tensor)

    @message
    def reduce_scatter(self, output: Tensor, tensor: Tensor, reduction: Reduction) -> Callable[[], Handle]:
        def start() -> list[dist.Work]:
            parts, operation = self._as_processes(tensor.chunk(self.size)), _operation(reduction)
            return [dist.reduce_scatter(output, parts, operation, group=self.process_group, async_op=True)]

        return self._prepared("reduce_scatter", [num_bytes(output)] * self.size, start, output, tensor)

    @message
    def broadcast(self, tensor: Tensor, source: int) -> Callable[[], Handle]:
        sent = [num_bytes(tensor) * (source == self.rank)] * self.size
        return self._prepared("broadcast", sent, lambda: [self._broadcast(tensor, source)], tensor)

    @message
    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Callable[[], Handle]:
        received, sent = ([split * tensor.element_size() for split in each] for each in (output_splits, input_splits))

        whole = (_as_bytes(output), _as_bytes(tensor))
        if self.order:
            return self._ordered_all_to_all(*(split(*each) for each in zip(whole, (received, sent), strict=True)))

        exchange, given = self.process_group.alltoall_base, (*whole, received, sent, AllToAllOptions())
        return self._prepared("all_to_all", sent, lambda: [exchange(*given)], output, tensor)

    def _ordered_all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Callable[[], Handle]:
        """Of bytes, a piece a rank."""
        sent = [len(piece) for piece in inputs]
        to, of = self._as_processes(outputs), self._as_processes(inputs)
        if inputs[0].is_cuda:
            return self._prepared(
                "all_to_all",
                sent,
                lambda: [dist.all_to_all(to, of, group=self.process_group, async_op=True)],
                *(*inputs, *outputs),
            )
        # gloo exchanges lists of equal lengths only
        lengths, given_lengths = [len(piece) for piece in to], [len(piece) for piece in of]
        arrived, given = inputs[0].new_empty(sum(lengths)), inputs[0].new_empty(sum(given_lengths))

        def start() -> list[dist.Work]:
            torch.cat(of, out=given)
            sizes = lengths, given_lengths
            return [dist.all_to_all_single(arrived, given, *sizes, group=self.process_group, async_op=True)]

        launch = self._prepared("all_to_all", sent, start, arrived, given)
        return lambda: _Placing(launch(), to, split(arrived, lengths))

    def _as_processes(self, by_rank: Sequence[T]) -> list[T]:
        """What is given by rank of this group, by rank of the process group."""
        if not self.order:
            return list(by_rank)
        return [by_rank[self.order.index(place)] for place in range(len(by_rank))]

    def _broadcast(self, tensor: Tensor, source: int) -> dist.Work:
        whole, source = _as_bytes(tensor), self.order[source] if self.order else source
        work: dist.Work = dist.broadcast(whole, group=self.process_group, async_op=True, group_src=source)
        return work

    def _prepared(
        self, name: str, sent: Sequence[int], start: Callable[[], list[dist.Work]], *tensors: Tensor
    ) -> Callable[[], Handle]:
        """What launches a collective that `start` starts."""
        what = f"{name} for {self.label or 'the optimizer'} on rank {dist.get_rank()} among ranks {self.ranks}"
        bound = self._bound(tensors[0].device) if tensors[0].is_cuda else None
        size, label = self.size, self.label

        def launch() -> Handle:
            report_call(name, size, sent, label)
            try:
                works = start()
            except RuntimeError as error:
                raise _failure(what, error) from error
            watched = None
            if bound is not None and not torch.cuda.is_current_stream_capturing():
                watched = Watched(works)
                WATCHDOG.watch([watched], what, *bound)
            return _Pending(works, tensors, what, watched)

        return launch

    def _bound(self, device: torch.device) -> tuple[float, Callable[[], None]]:
        """The seconds after which a watchdog ends what runs on the device, and how."""
        timeout: timedelta = self.process_group._get_backend(device).options._timeout
        return 0.9 * timeout.total_seconds(), self.process_group.abort  # before torch's own, which names no bucket


def watch_stream(group: Group, what: str, device: torch.device) -> None:
    """Bounds all that the current stream was given so far by the time-out of the group, if it has one on a GPU.

    For collectives that no call here launches: those of a captured graph that is replayed.
    """
    if hasattr(group, "watch"):  # another library's
        group.watch(what)
    elif isinstance(group, TorchGroup) and device.type == "cuda":
        watch_work(f"{what} on rank {dist.get_rank()} among ranks {group.ranks}", *group._bound(device))


def _operation(reduction: Reduction) -> dist.ReduceOp:
    return dist.ReduceOp(dist.ReduceOp.SUM if reduction == "sum" else dist.ReduceOp.MAX)


class Dividing(Group, Protocol):
    """A group that torch.distributed does not know, whose ranks form smaller ones."""

    def subgroup(self, ranks: Sequence[int]) -> Group:
        """The group of some of the ranks (global numbers), in this order; equal if they are. No communication."""


_stand_ins: dict[dist.ProcessGroup, Group] = {}
_through: list[Dividing] = []


def divides(group: Group) -> TypeGuard[Dividing]:
    """Whether the group serves its parts too, in place of process groups of the same ranks."""
    return hasattr(group, "subgroup")


@contextmanager
def through(group: Group) -> Iterator[None]:
    """Inside the block the ranks of process groups communicate through `group`, if it is none of torch.distributed."""
    given = [group] if divides(group) else []
    _through.extend(given)
    try:
        yield
    finally:
        del _through[len(_through) - len(given) :]


def in_order(group: Group, ranks: Sequence[int]) -> Group:
    """The ranks of a group, numbered as these global ranks follow each other."""
    if tuple(ranks) == group.ranks:
        return group
    if isinstance(group, TorchGroup):
        return group.in_order(ranks)
    if not divides(group):
        raise ValueError(
            f"rows lie on ranks {list(ranks)} in this order, and {group!r} has no `subgroup` to number them so"
        )
    return group.subgroup(ranks)


def part_of_all(ranks: Sequence[int]) -> Group | None:
    """These global ranks, in this order, of the group that all communicate through; None outside of `through`."""
    return _through[-1].subgroup(ranks) if _through else None


def group_of(process_group: dist.ProcessGroup) -> Group:
    """The ranks of a process group, which communicate through torch.distributed unless something stands in."""
    known = part_of_all(dist.get_process_group_ranks(process_group)) or _stand_ins.get(process_group)
    return known or TorchGroup(process_group)


def ordered_group_of(process_group: dist.ProcessGroup, ranks: Sequence[int]) -> Group:
    """As `group_of`, its ranks numbered as these global ranks follow each other (not where something stands in)."""
    group = group_of(process_group)
    return in_order(group, ranks) if isinstance(group, TorchGroup) or divides(group) else group


@contextmanager
def stand_in(process_group: dist.ProcessGroup, group: Group) -> Iterator[None]:
    """Inside the block `group` communicates in place of the process group, in optimizers that are made there."""
    _stand_ins[process_group] = group
    try:
        yield
    finally:
        del _stand_ins[process_group]
