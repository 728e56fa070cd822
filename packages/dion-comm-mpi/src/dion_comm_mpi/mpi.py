"""A group of ranks that communicate by MPI."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from dion_comm_mpi._imports import MPI
from dion_comm_mpi.launch import abort_together
from dion_core.collectives import Handle, Reduction, TransportError, adjacent, num_bytes, report_call

logger = logging.getLogger("dion_core")

TIMEOUT = 600.0
"""Seconds that a collective may take if nothing else is said, as with torch's NCCL groups."""
_SPIN = 1e-3
"""Seconds that a wait asks without a pause."""
_PAUSE = 5e-5
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
        timeout: seconds that a collective may take.

    Raises:
        ValueError: the timeout is not positive, or the MPI library was started for fewer threads than needed, or
            torch.distributed has other ranks.
    """
    if not timeout > 0:
        raise ValueError(f"timeout={timeout!r} is not allowed: a number of seconds > 0")
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise ValueError(
            'MPI was started for one thread only; set `mpi4py.rc.thread_level = "serialized"` (or "multiple", the '
            "default) before MPI is imported, since a step may run on another thread than the main one"
        )
    abort_together()
    own = _own_communicator(communicator if communicator is not None else MPI.COMM_WORLD)
    numbers = tuple(own.allgather(dist.get_rank() if dist.is_initialized() else own.Get_rank()))
    if len(set(numbers)) < len(numbers):
        raise ValueError(
            f"torch.distributed numbers the ranks of the communicator {list(numbers)}: initialize it on all of them "
            "or on none, with rank=communicator.Get_rank()"
        )
    return MpiGroup(_Communicators(own, numbers), numbers, timeout)


def _own_communicator(communicator: MPI.Intracomm) -> MPI.Intracomm:
    """A duplicate that only this package sends through, made once for every communicator."""
    key = _keyval()
    known = communicator.Get_attr(key)
    if isinstance(known, MPI.Intracomm):
        return known
    own = communicator.Dup()
    communicator.Set_attr(key, own)
    return own


@lru_cache(maxsize=1)
def _keyval() -> int:
    return MPI.Comm.Create_keyval()


class _Communicators:
    """The communicators of a group and of its parts, each made when something is sent through it first.

    Plans are compared over the whole group before that, so that a rank that cannot make its plan leaves no other one
    waiting for it here.
    """

    def __init__(self, whole: MPI.Intracomm, numbers: tuple[int, ...]) -> None:
        self.whole = whole
        self.numbers = numbers
        self._made: dict[tuple[int, ...], MPI.Intracomm] = {numbers: whole}

    def of(self, ranks: tuple[int, ...]) -> MPI.Intracomm:
        """That of some of the ranks, which call together where it is new."""
        if ranks not in self._made:
            part = self.whole.Get_group().Incl([self.numbers.index(rank) for rank in ranks])
            self._made[ranks] = self.whole.Create_group(part)
        return self._made[ranks]


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

    communicators: _Communicators
    ranks: tuple[int, ...]
    timeout: float = TIMEOUT
    label: str = field(default="", compare=False)

    waits_on_host = True
    """So that a step cannot be captured."""

    @property
    def communicator(self) -> MPI.Intracomm:
        """Of these ranks. Collective where it is used first."""
        return self.communicators.of(self.ranks)

    @cached_property
    def number(self) -> int:
        """The global number of this rank."""
        return self.communicators.numbers[self.communicators.whole.Get_rank()]

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

        def start(sent: _Staged, received: _Staged) -> MPI.Request:
            return self.communicator.Iallgatherv(sent.buffer, [received.buffer, lengths, _starts(lengths), MPI.BYTE])

        def finish() -> None:
            if whole is None:
                for output, part in zip(outputs, target.split([len(output) for output in outputs]), strict=True):
                    output.copy_(part)

        return self._launch("all_gather", [num_bytes(tensor)] * self.size, tensor, target, start, finish)

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> Handle:
        wide = tensor.float() if tensor.dtype in _HALF else tensor

        def start(sent: _Staged, received: _Staged) -> MPI.Request:
            return self.communicator.Iallreduce(
                MPI.IN_PLACE, [received.buffer, _TYPES[wide.dtype]], _operation(reduction)
            )

        sizes = [num_bytes(tensor)] * self.size
        return self._launch("all_reduce", sizes, wide, wide, start, lambda: _keep(tensor, wide))

    def reduce_scatter(self, output: Tensor, tensor: Tensor, reduction: Reduction) -> Handle:
        wide = tensor.float() if tensor.dtype in _HALF else tensor
        target = output if wide is tensor else torch.empty(output.shape, dtype=wide.dtype, device=output.device)

        def start(sent: _Staged, received: _Staged) -> MPI.Request:
            kind = _TYPES[wide.dtype]
            return self.communicator.Ireduce_scatter_block(
                [sent.buffer, kind], [received.buffer, kind], _operation(reduction)
            )

        sizes = [num_bytes(output)] * self.size
        return self._launch("reduce_scatter", sizes, wide, target, start, lambda: _keep(output, target))

    def broadcast(self, tensor: Tensor, source: int) -> Handle:
        def start(sent: _Staged, received: _Staged) -> MPI.Request:
            return self.communicator.Ibcast([received.buffer, MPI.BYTE], root=source)

        return self._launch("broadcast", [num_bytes(tensor) * (source == self.rank)] * self.size, tensor, tensor, start)

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Handle:
        received_sizes, sent_sizes = (
            [split * tensor.element_size() for split in splits] for splits in (output_splits, input_splits)
        )

        def start(sent: _Staged, received: _Staged) -> MPI.Request:
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
        start: Callable[[_Staged, _Staged], MPI.Request],
        finish: Callable[[], None] = lambda: None,
    ) -> Handle:
        report_call(name, self.size, sizes, self.label)
        what = f"{name} for {self.label or 'the optimizer'} on rank {self.number} among ranks {self.ranks}"
        sent = _Staged(tensor.detach(), filled=True)
        received = sent if target is tensor else _Staged(target.detach(), filled=False)
        try:
            request = start(sent, received)
        except MPI.Exception as error:
            raise TransportError(f"{what} failed: {error}") from error
        return _Pending(request, (sent, received), finish, what, self.timeout)


class _Staged:
    """What MPI reads or writes for a tensor: its own memory, or pinned host memory that stands for it."""

    def __init__(self, tensor: Tensor, *, filled: bool) -> None:
        self._tensor, self._host = tensor, tensor
        if tensor.is_cuda:
            if not knows_gpus():
                self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                if filled:
                    self._host.copy_(tensor, non_blocking=True)
            torch.cuda.current_stream(tensor.device).synchronize()
        self.buffer = MPI.buffer.fromaddress(self._host.data_ptr(), num_bytes(self._host))

    def bring(self) -> None:
        """Copies what has arrived to where it belongs, on the current stream."""
        if self._host is not self._tensor:
            self._tensor.copy_(self._host, non_blocking=True)


class _Pending:
    """A request to wait for."""

    def __init__(
        self, request: MPI.Request, ends: tuple[_Staged, _Staged], finish: Callable[[], None], what: str, timeout: float
    ) -> None:
        self._request: MPI.Request | None = request
        self._ends, self._finish, self._what = ends, finish, what
        self._timeout = timeout

    def wait(self) -> None:
        if self._request is None:
            return
        start = time.monotonic()
        try:
            while not self._request.Test():
                waited = time.monotonic() - start
                if waited > self._timeout:
                    raise TransportError(f"{self._what} failed: it did not end within {self._timeout:g} s")
                if waited > _SPIN:
                    time.sleep(_PAUSE)
        except MPI.Exception as error:
            raise TransportError(f"{self._what} failed: {error}") from error
        self._request = None
        self._ends[1].bring()
        self._finish()


def _keep(tensor: Tensor, result: Tensor) -> None:
    if tensor is not result:
        tensor.copy_(result)


def _starts(lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[:number]) for number in range(len(lengths))]


def _operation(reduction: Reduction) -> MPI.Op:
    return MPI.SUM if reduction == "sum" else MPI.MAX


@lru_cache(maxsize=1)
def knows_gpus() -> bool:
    """Whether the MPI library reads and writes GPU memory; where it does not that is logged, once."""
    library, answer = ctypes.CDLL(None), ctypes.c_int()
    supported = False
    if hasattr(library, "MPIX_Query_cuda_support"):  # Open MPI
        supported = bool(library.MPIX_Query_cuda_support())
    elif hasattr(library, "MPIX_GPU_query_support"):  # MPICH; 0 is CUDA
        supported = library.MPIX_GPU_query_support(0, ctypes.byref(answer)) == 0 and bool(answer.value)
    if not supported:
        name = MPI.Get_library_version().splitlines()[0]
        logger.warning("%s does not know GPUs: their tensors travel through pinned host memory", name)
    return supported
