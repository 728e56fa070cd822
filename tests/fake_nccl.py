"""The part of CuPy's NCCL that is used, over MPI on CPU memory: it is given addresses, counts and numbers."""

from types import SimpleNamespace
from typing import Any

from mpi4py import MPI

_SIZES = {1: 1, 2: 4, 4: 8, 7: 4, 8: 8}
_TYPES = {1: MPI.UINT8_T, 2: MPI.INT32_T, 4: MPI.INT64_T, 7: MPI.FLOAT, 8: MPI.DOUBLE}
_OPERATIONS = {0: MPI.SUM, 2: MPI.MAX}
_grouped: list[Any] = []
_state = {"depth": 0}


def memory(address: int, num_bytes: int) -> Any:
    return [MPI.buffer.fromaddress(address, num_bytes), MPI.BYTE]


class NcclCommunicator:
    """Of all ranks of the job, in any order."""

    def __init__(self, size: int, name: str, rank: int) -> None:
        assert name == f"id {size}"
        assert not _state["depth"], "made while calls are grouped"
        self._ranks = MPI.COMM_WORLD.Split(0, rank)
        assert (self._ranks.Get_size(), self._ranks.Get_rank()) == (size, rank)

    def allGather(self, sent: int, received: int, count: int, kind: int, stream: int) -> None:
        size = count * _SIZES[kind]
        self._ranks.Allgather(memory(sent, size), memory(received, size * self._ranks.Get_size()))

    def allReduce(self, sent: int, received: int, count: int, kind: int, how: int, stream: int) -> None:
        assert sent == received
        place = [MPI.buffer.fromaddress(received, count * _SIZES[kind]), _TYPES[kind]]
        self._ranks.Allreduce(MPI.IN_PLACE, place, _OPERATIONS[how])

    def reduceScatter(self, sent: int, received: int, count: int, kind: int, how: int, stream: int) -> None:
        size = count * _SIZES[kind]
        whole = [MPI.buffer.fromaddress(sent, size * self._ranks.Get_size()), _TYPES[kind]]
        self._ranks.Reduce_scatter_block(
            whole, [MPI.buffer.fromaddress(received, size), _TYPES[kind]], _OPERATIONS[how]
        )

    def broadcast(self, sent: int, received: int, count: int, kind: int, root: int, stream: int) -> None:
        assert sent == received
        self._ranks.Bcast(memory(received, count * _SIZES[kind]), root=root)

    def send(self, sent: int, count: int, kind: int, peer: int, stream: int) -> None:
        assert _state["depth"] > 0 < count
        _grouped.append(self._ranks.Isend(memory(sent, count * _SIZES[kind]), dest=peer))

    def recv(self, received: int, count: int, kind: int, peer: int, stream: int) -> None:
        assert _state["depth"] > 0 < count
        _grouped.append(self._ranks.Irecv(memory(received, count * _SIZES[kind]), source=peer))

    def abort(self) -> None:
        raise AssertionError("nothing takes that long")


def group_start() -> None:
    _state["depth"] += 1


def group_end() -> None:
    _state["depth"] -= 1
    MPI.Request.Waitall(_grouped)
    _grouped.clear()


def module(size: int) -> SimpleNamespace:
    """In place of `cupy.cuda.nccl`, for communicators of all ranks, which are so many."""
    return SimpleNamespace(
        get_version=lambda: 22700,
        get_unique_id=lambda: f"id {size}",
        NcclCommunicator=NcclCommunicator,
        groupStart=group_start,
        groupEnd=group_end,
    )
