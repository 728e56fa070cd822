"""How an MPI job ends where something goes wrong: `python -m tests.mpi_errors WHAT [FOLDER]`, started by `mpirun`."""

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mpi4py

if sys.argv[1] == "one_thread":
    mpi4py.rc.thread_level = "single"

import torch
from mpi4py import MPI
from torch import nn

from dion_comm_mpi import mpi_group
from dion_core import NorDion2, TransportError
from tests.mpi_ranks import leave_out_dynamo


def optimizer(timeout: float) -> NorDion2:
    parameter = nn.Parameter(torch.ones(4, 4))
    parameter.grad = torch.ones(4, 4)
    return NorDion2([parameter], group=mpi_group(timeout=timeout))


def one_raises() -> None:
    """A rank meets an error that the others cannot know of, and these wait for it."""
    made = optimizer(timeout=600.0)
    if MPI.COMM_WORLD.Get_rank() == 1:
        raise RuntimeError("the data of rank 1 are broken")
    made.step()


def one_is_interrupted() -> None:
    """As a user does it, while the others wait for that rank."""
    made = optimizer(timeout=600.0)
    if MPI.COMM_WORLD.Get_rank() == 1:
        signal.raise_signal(signal.SIGINT)
    made.step()


def one_is_absent() -> None:
    """A rank comes neither to a new communicator, nor to a new group, nor to the step."""
    MPI.COMM_WORLD.Barrier()  # no rank is late for what comes before
    group, other, made = mpi_group(timeout=0.5), MPI.COMM_WORLD.Dup(), optimizer(timeout=0.5)
    if MPI.COMM_WORLD.Get_rank() == 1:
        time.sleep(600)
    awaited: list[Callable[[], object]] = [
        lambda: group.subgroup((2, 1, 0)).all_reduce(torch.ones(1), "sum"),
        lambda: group.meet("a communicator of NCCL"),
        lambda: mpi_group(other, timeout=0.5),
        made.step,
    ]
    caught = []
    for call in awaited:
        try:
            call()
        except TransportError as error:
            caught.append(str(error))
    Path(sys.argv[2], f"{group.rank}.txt").write_text("\n".join(caught))
    while len(list(Path(sys.argv[2]).iterdir())) < 2:
        time.sleep(0.01)
    raise RuntimeError("a rank is absent")


def one_is_late() -> None:
    """A rank comes to a new communicator when the other one has given up."""
    MPI.COMM_WORLD.Barrier()
    group = mpi_group(timeout=0.5)
    MPI.COMM_WORLD.Barrier()
    if group.rank == 1:
        time.sleep(1.5)
    try:
        group.subgroup((1, 0)).all_reduce(torch.ones(1), "sum")
    except TransportError as error:
        Path(sys.argv[2], f"{group.rank}.txt").write_text(str(error))
    while len(list(Path(sys.argv[2]).iterdir())) < 2:
        time.sleep(0.01)
    raise RuntimeError("a rank was late")


def one_thread() -> None:
    """MPI was started for one thread."""
    optimizer(timeout=1.0)


if __name__ == "__main__":
    leave_out_dynamo()
    globals()[sys.argv[1]]()
