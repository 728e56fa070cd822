"""How an MPI job ends where something goes wrong: `python -m tests.mpi_errors WHAT`, started by `mpirun`."""

import sys
import time

import mpi4py

if sys.argv[1:] == ["one_thread"]:
    mpi4py.rc.thread_level = "single"

import torch
from mpi4py import MPI
from torch import nn

from dion_comm_mpi import mpi_group
from dion_core import NorDion2


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


def one_is_late() -> None:
    """A rank does not come to the step."""
    made = optimizer(timeout=1.0)
    if MPI.COMM_WORLD.Get_rank() == 1:
        time.sleep(600)
    made.step()


def one_thread() -> None:
    """MPI was started for one thread."""
    optimizer(timeout=1.0)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
