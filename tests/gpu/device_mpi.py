"""A communicator of one rank as a CUDA-aware MPI library has it, on torch: what it is handed are views of GPU memory.

It copies from where it is told to read to where it is told to write, taking both by DLPack as mpi4py does, and keeps
what it was told.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor


class Handed(NamedTuple):
    """A buffer: the collective it was for, its address, bytes and device."""

    name: str
    address: int
    num_bytes: int
    device: str


class DeviceCommunicator:
    """Non-blocking collectives of one rank, which are over when they return.

    Attributes:
        handed: all buffers so far.
    """

    def __init__(self) -> None:
        self.handed: list[Handed] = []

    def Get_rank(self) -> int:
        return 0

    def of(self, ranks: Sequence[int], timeout: float) -> "DeviceCommunicator":
        """In place of `Communicators` too."""
        return self

    number, numbers = 0, (0,)

    def _view(self, name: str, given: Any) -> Tensor:
        taken = torch.from_dlpack(given)
        assert taken.dtype is torch.uint8, "a view of bytes, or MPI would take the type from it"
        assert given.__dlpack_device__()[0] == (2 if taken.is_cuda else 1), "kDLCUDA"
        if taken.is_cuda:
            assert given.__cuda_array_interface__["data"][0] == taken.data_ptr()
        self.handed.append(Handed(name, taken.data_ptr(), taken.numel(), str(taken.device)))
        return taken

    def _copy(self, name: str, sent: Any, received: Any) -> MPI.Request:
        """From one buffer to the other: [buffer, counts, starts, type], or [buffer, type], or the buffer alone."""
        parts = []
        for given in (sent, received):
            buffer, *told = given if isinstance(given, list) else [given]
            view = self._view(name, buffer)
            if len(told) == 3:
                (count,), (start,) = told[:2]
                view = view[start : start + count]
            parts.append(view)
        assert parts[0].numel() == parts[1].numel()
        parts[1].copy_(parts[0])
        if parts[1].is_cuda:
            torch.cuda.synchronize()
        return MPI.REQUEST_NULL

    def Iallgatherv(self, sent: Any, received: Any) -> MPI.Request:
        return self._copy("all_gather", sent, received)

    def Ialltoallv(self, sent: Any, received: Any) -> MPI.Request:
        return self._copy("all_to_all", sent, received)

    def Ireduce_scatter_block(self, sent: Any, received: Any, operation: MPI.Op) -> MPI.Request:
        assert sent[1] == received[1] != MPI.BYTE
        return self._copy("reduce_scatter", sent, received)

    def Iallreduce(self, sent: Any, received: Any, operation: MPI.Op) -> MPI.Request:
        assert sent is MPI.IN_PLACE
        assert received[1] != MPI.BYTE
        return self._copy("all_reduce", received, received)

    def Ibcast(self, given: Any, root: int) -> MPI.Request:
        assert root == 0
        return self._copy("broadcast", given, given)
