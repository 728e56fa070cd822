"""The communicators of a group and of its parts, which are made within a time-out."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable
from functools import lru_cache

import torch

from dion_comm_mpi._imports import MPI
from dion_core.collectives import TransportError

_SPIN = 1e-3
"""Seconds that a wait asks without a pause."""
_PAUSE = 5e-5
_TAGS = 2**14
"""Every MPI library has twice as many."""
_give_way: Callable[[], object] = getattr(os, "sched_yield", lambda: None)  # there may be more ranks than cores


def done_within(seconds: float, test: Callable[[], bool]) -> bool:
    """Whether the test came true in that time."""
    start = time.monotonic()
    while not test():
        waited = time.monotonic() - start
        if waited > seconds:
            return False
        if waited > _SPIN:
            time.sleep(_PAUSE)
        else:
            _give_way()
    return True


class Communicators:
    """The communicators of a group and of its parts, each made when something is sent through it first.

    Plans are compared over the whole group before that, so that a rank that cannot make its plan leaves no other one
    waiting for it here.

    Attributes:
        whole: of all ranks, and none but this package sends through it.
        numbers: by rank in it the global number.
    """

    def __init__(self, whole: MPI.Intracomm, numbers: tuple[int, ...]) -> None:
        self.whole, self.numbers = whole, numbers
        self._made: dict[tuple[int, ...], MPI.Intracomm] = {numbers: whole}

    @property
    def number(self) -> int:
        """The global number of this rank."""
        return self.numbers[self.whole.Get_rank()]

    def of(self, ranks: tuple[int, ...], timeout: float) -> MPI.Intracomm:
        """That of some of the ranks, which call together where it is new; raises as `meet`."""
        if ranks not in self._made:
            self.meet(ranks, "a communicator", timeout)
            whole = self.whole.Get_group()
            part = whole.Incl([self.numbers.index(rank) for rank in ranks])
            self._made[ranks] = self.whole.Create_group(part)
            part.Free()
            whole.Free()
        return self._made[ranks]

    def meet(self, ranks: tuple[int, ...], what: str, timeout: float) -> None:
        """Returns once all of the ranks have called it, since what they make next cannot be given up by those who wait.

        Raises:
            TransportError: some did not within the time-out, with their numbers.
        """
        tag = 2 * (zlib.crc32(repr(ranks).encode()) % _TAGS)
        for turn in range(2):  # who gives up in the first sends nothing in the second: a late rank gives up too
            self._exchange_signs(ranks, what, timeout, tag + turn)

    def _exchange_signs(self, ranks: tuple[int, ...], what: str, timeout: float, tag: int) -> None:
        """An empty message from each of the ranks to each."""
        nothing = bytearray()
        places = {rank: self.numbers.index(rank) for rank in ranks if rank != self.number}
        sent = [self.whole.Isend([nothing, MPI.BYTE], place, tag) for place in places.values()]
        missing = {rank: self.whole.Irecv([nothing, MPI.BYTE], place, tag) for rank, place in places.items()}

        def all_came() -> bool:
            for rank in [rank for rank, arrival in missing.items() if arrival.Test()]:
                del missing[rank]
            return not missing

        if not done_within(timeout, all_came):
            for arrival in missing.values():
                arrival.Cancel()
                arrival.Wait()
            raise TransportError(
                f"making {what} of ranks {ranks} on rank {self.number} failed: ranks {sorted(missing)} did not come "
                f"within {timeout:g} s"
            )
        MPI.Request.Waitall(sent)


abandoned: list[object] = []
"""Requests that nobody waits for any more, with the memory that MPI may still write to."""


def communicators(given: MPI.Intracomm, number: int, timeout: float) -> Communicators:
    """Those of all ranks of a communicator, made once for it. Collective.

    Args:
        given: of the user, whose messages and ours do not meet.
        number: the global one of this rank.
        timeout: seconds.

    Raises:
        TransportError: a rank did not come within the time-out.
        ValueError: ranks have the same number.
    """
    whole = given.Get_attr(_keyval())
    if not isinstance(whole, MPI.Intracomm):
        whole, duplicated = given.Idup()
        _wait_for_all(duplicated, given, timeout, kept=whole)
        given.Set_attr(_keyval(), whole)
    numbers = _all_numbers(whole, number, timeout)
    of_whole = whole.Get_attr(_keyval())
    known: dict[tuple[int, ...], Communicators] = of_whole if isinstance(of_whole, dict) else {}
    whole.Set_attr(_keyval(), known)
    return known.setdefault(numbers, Communicators(whole, numbers))


def _all_numbers(whole: MPI.Intracomm, number: int, timeout: float) -> tuple[int, ...]:
    by_rank = torch.empty(whole.Get_size(), dtype=torch.int64)
    own = torch.tensor([number])
    gathered = whole.Iallgather([own, MPI.INT64_T], [by_rank, MPI.INT64_T])
    _wait_for_all(gathered, whole, timeout, kept=(own, by_rank))
    numbers = tuple(by_rank.tolist())
    if len(set(numbers)) < len(numbers):
        raise ValueError(
            f"torch.distributed numbers the ranks of the communicator {list(numbers)}: initialize it on all of them "
            "or on none, with rank=communicator.Get_rank()"
        )
    return numbers


def _wait_for_all(request: MPI.Request, given: MPI.Intracomm, timeout: float, *, kept: object) -> None:
    if not done_within(timeout, request.Test):
        abandoned.append((request, kept))
        raise TransportError(
            f"making the group of the {given.Get_size()} ranks of a communicator failed on its rank "
            f"{given.Get_rank()}: another one did not come within {timeout:g} s"
        )


@lru_cache(maxsize=1)
def _keyval() -> int:
    return MPI.Comm.Create_keyval()
