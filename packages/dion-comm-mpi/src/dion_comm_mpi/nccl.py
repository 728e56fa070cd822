"""A group of GPUs that communicate by NCCL through CuPy; MPI brings them together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from dion_comm_mpi._imports import MPI
from dion_comm_mpi.mpi import _HALF, TIMEOUT, MpiGroup, mpi_group
from dion_core.collectives import Handle, Reduction, adjacent, message, num_bytes, report_call, watch_work

_TYPES = {
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float32: 7,
    torch.float64: 8,
}
"""NCCL's numbers of the types; reductions of halves are of float32."""
_BYTES = 1
_SUM, _MAX = 0, 2


def nccl_group(communicator: MPI.Intracomm | None = None, *, timeout: float = TIMEOUT) -> NcclGroup:
    """The GPUs of the ranks of a communicator, each rank's current one. Collective.

    Raises:
        ImportError: CuPy is missing, or finds no NCCL.
        ValueError, TransportError: as `mpi_group`.
    """
    _nccl()
    return NcclGroup(mpi_group(communicator, timeout=timeout))


def _nccl() -> Any:
    try:
        from cupy.cuda import nccl

        nccl.get_version()
    except Exception as error:  # CuPy raises many kinds where a library is missing
        raise ImportError(
            f'group="nccl" needs CuPy and NCCL ({error}): `pip install cupy-cuda12x nvidia-nccl-cu12`, or '
            "cupy-cuda13x and nvidia-nccl-cu13, whichever matches torch.version.cuda"
        ) from error
    return nccl


nccl_group.check = _nccl  # type: ignore[attr-defined]  # so that `dion doctor` can tell what is missing


@dataclass(frozen=True)
class NcclGroup:
    """A `Group` on a NCCL communicator of CuPy, on torch's current stream.

    Attributes:
        host: the same ranks by MPI.
        label: what collectives are for, in errors.
        made: the communicators of CuPy by ranks.
    """

    host: MpiGroup
    label: str = field(default="", compare=False)
    made: dict[tuple[int, ...], Any] = field(default_factory=dict, compare=False, repr=False)

    replayable: ClassVar[bool] = True

    @property
    def communicator(self) -> Any:
        """Of these ranks, on the current device. Collective where it is used first."""
        if self.ranks not in self.made:
            nccl = _nccl()
            self.host.meet("a communicator of NCCL")
            name = self.host.communicator.bcast(nccl.get_unique_id() if self.rank == 0 else None)
            self.made[self.ranks] = nccl.NcclCommunicator(self.size, name, self.rank)
        return self.made[self.ranks]

    @property
    def rank(self) -> int:
        return self.host.rank

    @property
    def size(self) -> int:
        return self.host.size

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.host.ranks

    def named(self, label: str) -> NcclGroup:
        return replace(self, label=label)

    def subgroup(self, ranks: Sequence[int]) -> NcclGroup:
        """The group of some of the ranks (global numbers, in this order); raises as that of `MpiGroup`."""
        return replace(self, host=self.host.subgroup(ranks))

    @message
    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Callable[[], Handle]:
        whole = adjacent(outputs)

        def start(stream: int) -> None:
            if whole is not None:
                given, taken = tensor.data_ptr(), whole.data_ptr()
                self.communicator.allGather(given, taken, num_bytes(tensor), _BYTES, stream)
                return
            self._exchange([tensor] * self.size, outputs, stream)

        return partial(self._launch, "all_gather", [num_bytes(tensor)] * self.size, start, tensor)

    @message
    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> Callable[[], Handle]:
        def start(stream: int) -> None:
            wide = tensor.float() if tensor.dtype in _HALF else tensor
            place, kind = wide.data_ptr(), _TYPES[wide.dtype]
            self.communicator.allReduce(place, place, wide.numel(), kind, _operation(reduction), stream)
            if wide is not tensor:
                tensor.copy_(wide)

        return partial(self._launch, "all_reduce", [num_bytes(tensor)] * self.size, start, tensor)

    @message
    def reduce_scatter(self, output: Tensor, tensor: Tensor, reduction: Reduction) -> Callable[[], Handle]:
        def start(stream: int) -> None:
            wide = tensor.float() if tensor.dtype in _HALF else tensor
            target = output if wide is tensor else torch.empty(output.shape, dtype=wide.dtype, device=output.device)
            given, taken, kind = wide.data_ptr(), target.data_ptr(), _TYPES[wide.dtype]
            self.communicator.reduceScatter(given, taken, target.numel(), kind, _operation(reduction), stream)
            if target is not output:
                output.copy_(target)

        return partial(self._launch, "reduce_scatter", [num_bytes(output)] * self.size, start, output)

    @message
    def broadcast(self, tensor: Tensor, source: int) -> Callable[[], Handle]:
        def start(stream: int) -> None:
            place = tensor.data_ptr()
            self.communicator.broadcast(place, place, num_bytes(tensor), _BYTES, source, stream)

        return partial(
            self._launch, "broadcast", [num_bytes(tensor) * (source == self.rank)] * self.size, start, tensor
        )

    @message
    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Callable[[], Handle]:
        def start(stream: int) -> None:
            self._exchange(tensor.split(list(input_splits)), output.split(list(output_splits)), stream)

        return partial(
            self._launch, "all_to_all", [split * tensor.element_size() for split in input_splits], start, tensor
        )

    def _exchange(self, sent: Sequence[Tensor], received: Sequence[Tensor], stream: int) -> None:
        """Sends the r-th piece to rank r and receives the r-th piece from it, all at a time."""
        nccl = _nccl()
        nccl.groupStart()
        for rank, (given, taken) in enumerate(zip(sent, received, strict=True)):
            if given.numel():
                self.communicator.send(given.data_ptr(), num_bytes(given), _BYTES, rank, stream)
            if taken.numel():
                self.communicator.recv(taken.data_ptr(), num_bytes(taken), _BYTES, rank, stream)
        nccl.groupEnd()

    def _launch(self, name: str, sizes: Sequence[int], start: Callable[[int], None], tensor: Tensor) -> Handle:
        report_call(name, self.size, sizes, self.label)
        with _current_stream(tensor) as stream:
            _ = self.communicator  # made now if it is new, before calls are grouped
            start(stream)
            return self.watch(f"{name} for {self.label or 'the optimizer'}")

    def watch(self, what: str) -> Handle:
        """Bounds all that the current stream was given so far by the time-out."""
        where = f"{what} on rank {self.host.number} among ranks {self.ranks}"
        return watch_work(where, self.host.timeout, self.communicator.abort)


@contextmanager
def _current_stream(tensor: Tensor) -> Iterator[int]:
    """The address of torch's current stream on the device of the tensor, which is the current one inside the block."""
    if not tensor.is_cuda:
        raise ValueError(f'group="nccl" moves GPU tensors alone, got one on {tensor.device}; group="mpi" moves both')
    with torch.cuda.device(tensor.device):
        yield int(torch.cuda.current_stream().cuda_stream)


def _operation(reduction: Reduction) -> int:
    return _SUM if reduction == "sum" else _MAX
