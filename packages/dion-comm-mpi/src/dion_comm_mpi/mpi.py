"""A group of ranks that communicate by MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from dion_comm_mpi._imports import MPI
from dion_comm_mpi.buffers import Staged
from dion_comm_mpi.communicators import Communicators, abandoned, communicators, done_within
from dion_comm_mpi.launch import abort_together
from dion_core.collectives import Handle, Reduction, TransportError, adjacent, num_bytes, report_call

TIMEOUT = 600.0
"""Seconds that a collective may take if nothing else is said, as with torch's NCCL groups."""
_HALF = (torch.bfloat16, torch.float16)
_TYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
}


def mpi_group(communicator: MPI.Intracomm | None = None, *, timeout: float = TIMEOUT) -> MpiGroup:
    """The ranks of a communicator as a group whose messages meet no others. Collective.

    Ranks are numbered as torch.distributed numbers them where it is initialized, else as the communicator does. An
    error that ends one process ends all of them from then on.

    Args:
        communicator: an intracommunicator of mpi4py; None takes the world.
        timeout: seconds that a collective may take, and the making of a communicator.

    Raises:
        ValueError: the timeout is not positive, the communicator is none of this rank, the MPI library was started for
            fewer threads than needed, or torch.distributed has other ranks.
        TransportError: a rank did not come within the time-out.
    """
    if not timeout > 0:
        raise ValueError(f"timeout={timeout!r} is not allowed: a number of seconds > 0")
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise ValueError(
            'MPI was started for one thread only; set `mpi4py.rc.thread_level = "serialized"` (or "multiple", the '
            "default) before MPI is imported, since a step may run on another thread than the main one"
        )
    given = communicator if communicator is not None else MPI.COMM_WORLD
    if not isinstance(given, MPI.Intracomm) or given == MPI.COMM_NULL:
        raise ValueError(f"{given!r} is not allowed: an intracommunicator of which this rank is one")
    abort_together()
    number = dist.get_rank() if dist.is_initialized() else given.Get_rank()
    made = communicators(given, number, timeout)
    return MpiGroup(made, made.numbers, timeout)


@dataclass(frozen=True)
class MpiGroup:
    """A `Group` on an MPI communicator. CPU tensors are sent from where they lie.

    GPU tensors are too if the MPI library knows GPUs; else they travel through pinned host memory, which is said once.
    MPI knows no streams, so that a collective of GPU tensors first waits for the current one.

    Attributes:
        communicators: of its own, so that no other messages come in between.
        ranks: the global numbers of the group's ranks, in group order.
        timeout: seconds that a collective may take.
        label: what collectives are for, in errors.
    """

    communicators: Communicators
    ranks: tuple[int, ...]
    timeout: float = TIMEOUT
    label: str = field(default="", compare=False)

    waits_on_host = True
    """So that a step cannot be captured."""

    @property
    def communicator(self) -> MPI.Intracomm:
        """Of these ranks. Collective where it is used first."""
        return self.communicators.of(self.ranks, self.timeout)

    @property
    def number(self) -> int:
        """The global number of this rank."""
        return self.communicators.number

    def meet(self, what: str) -> None:
        """Returns once all ranks of the group have called it; a TransportError says who did not, and what they make."""
        self.communicators.meet(self.ranks, what, self.timeout)

    @cached_property
    def rank(self) -> int:
        return self.ranks.index(self.number)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def named(self, label: str) -> MpiGroup:
        return replace(self, label=label)

    def subgroup(self, ranks: Sequence[int]) -> MpiGroup:
        """The group of some of the ranks (global numbers, in this order).

        Raises:
            ValueError: torch.distributed numbers this rank in another way: it was initialized after the group was made.
        """
        if dist.is_initialized() and dist.get_rank() != self.number:
            raise ValueError(
                f"torch.distributed calls this rank {dist.get_rank()} and the MPI group {self.number}: initialize "
                "torch.distributed before the group is made"
            )
        return replace(self, ranks=tuple(ranks))

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Handle:
        lengths = [num_bytes(output) for output in outputs]
        whole = adjacent(outputs)
        target = tensor.new_empty(sum(output.numel() for output in outputs)) if whole is None else whole

        def start(sent: Staged, received: Staged) -> MPI.Request:
            pieces = [received.buffer, lengths, _starts(lengths), MPI.BYTE]
            return self.communicator.Iallgatherv([sent.buffer, MPI.BYTE], pieces)

        def finish() -> None:
            if whole is None:
                for output, part in zip(outputs, target.split([len(output) for output in outputs]), strict=True):
                    output.copy_(part)

        return self._launch("all_gather", [num_bytes(tensor)] * self.size, tensor, target, start, finish)

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> Handle:
        wide = tensor.float() if tensor.dtype in _HALF else tensor

        def start(sent: Staged, received: Staged) -> MPI.Request:
            return self.communicator.Iallreduce(
                MPI.IN_PLACE, [received.buffer, _TYPES[wide.dtype]], _operation(reduction)
            )

        sizes = [num_bytes(tensor)] * self.size
        return self._launch("all_reduce", sizes, wide, wide, start, lambda: _keep(tensor, wide))

    def reduce_scatter(self, output: Tensor, tensor: Tensor, reduction: Reduction) -> Handle:
        wide = tensor.float() if tensor.dtype in _HALF else tensor
        target = output if wide is tensor else torch.empty(output.shape, dtype=wide.dtype, device=output.device)

        def start(sent: Staged, received: Staged) -> MPI.Request:
            kind = _TYPES[wide.dtype]
            return self.communicator.Ireduce_scatter_block(
                [sent.buffer, kind], [received.buffer, kind], _operation(reduction)
            )

        sizes = [num_bytes(output)] * self.size
        return self._launch("reduce_scatter", sizes, wide, target, start, lambda: _keep(output, target))

    def broadcast(self, tensor: Tensor, source: int) -> Handle:
        def start(sent: Staged, received: Staged) -> MPI.Request:
            return self.communicator.Ibcast([received.buffer, MPI.BYTE], root=source)

        return self._launch("broadcast", [num_bytes(tensor) * (source == self.rank)] * self.size, tensor, tensor, start)

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Handle:
        received_sizes, sent_sizes = (
            [split * tensor.element_size() for split in splits] for splits in (output_splits, input_splits)
        )

        def start(sent: Staged, received: Staged) -> MPI.Request:
            return self.communicator.Ialltoallv(
                [sent.buffer, sent_sizes, _starts(sent_sizes), MPI.BYTE],
                [received.buffer, received_sizes, _starts(received_sizes), MPI.BYTE],
            )

        return self._launch("all_to_all", sent_sizes, tensor, output, start)

    def _launch(
        self,
        name: str,
        sizes: Sequence[int],
        tensor: Tensor,
        target: Tensor,
        start: Callable[[Staged, Staged], MPI.Request],
        finish: Callable[[], None] = lambda: None,
    ) -> Handle:
        report_call(name, self.size, sizes, self.label)
        what = f"{name} for {self.label or 'the optimizer'} on rank {self.number} among ranks {self.ranks}"
        sent = Staged(tensor.detach(), filled=True)
        received = sent if target is tensor else Staged(target.detach(), filled=False)
        try:
            request = start(sent, received)
        except MPI.Exception as error:
            raise TransportError(f"{what} failed: {error}") from error
        return _Pending(request, (sent, received), finish, what, self.timeout)


class _Pending:
    """A request to wait for."""

    def __init__(
        self, request: MPI.Request, ends: tuple[Staged, Staged], finish: Callable[[], None], what: str, timeout: float
    ) -> None:
        self._request: MPI.Request | None = request
        self._ends, self._finish, self._what = ends, finish, what
        self._timeout = timeout

    def wait(self) -> None:
        if self._request is None:
            return
        try:
            if not done_within(self._timeout, self._request.Test):
                raise TransportError(f"{self._what} failed: it did not end within {self._timeout:g} s")
        except MPI.Exception as error:
            raise TransportError(f"{self._what} failed: {error}") from error
        self._request = None
        self._ends[1].bring()
        self._finish()

    def __del__(self) -> None:
        """MPI may still write to the memory of what nobody waits for any more, which then stays."""
        if self._request is not None:
            abandoned.append((self._request, self._ends))


def _keep(tensor: Tensor, result: Tensor) -> None:
    if tensor is not result:
        tensor.copy_(result)


def _starts(lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[:number]) for number in range(len(lengths))]


def _operation(reduction: Reduction) -> MPI.Op:
    return MPI.SUM if reduction == "sum" else MPI.MAX
