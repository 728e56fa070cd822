"""How the processes were started, and which device is whose."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Literal

import torch

from dion_comm_mpi._imports import MPI

_LOCAL_RANK = {
    "mpirun of Open MPI": "OMPI_COMM_WORLD_LOCAL_RANK",
    "mpirun of MPICH": "MPI_LOCALRANKID",
    "srun": "SLURM_LOCALID",
}
"""The variable in which each launcher says it."""

_TO_FORWARD = 0.5
"""Seconds in which mpirun passes on what was printed; once the job is aborted it drops the rest."""

Launcher = Literal["mpirun of Open MPI", "mpirun of MPICH", "srun"]


def launcher(environment: Mapping[str, str] | None = None) -> Launcher | None:
    """What started this process as a rank of a job; None if nothing did that is known.

    The mpiruns come first: inside of a Slurm allocation they set their own variables beside those of Slurm.

    Args:
        environment: variables; None takes those of this process.
    """
    known = os.environ if environment is None else environment
    if "OMPI_COMM_WORLD_SIZE" in known and "OMPI_COMM_WORLD_RANK" in known:
        return "mpirun of Open MPI"
    if "HYDI_CONTROL_FD" in known or ("PMI_SIZE" in known and "SLURM_PROCID" not in known):
        return "mpirun of MPICH"
    if "SLURM_PROCID" in known and "SLURM_STEP_ID" in known:
        return "srun"
    return "mpirun of MPICH" if "PMI_RANK" in known else None


def local_rank(environment: Mapping[str, str] | None = None) -> int | None:
    """This rank's number among those of its machine, by the variables of the launcher; None if they do not say it.

    Args:
        environment: variables; None takes those of this process.
    """
    known = os.environ if environment is None else environment
    name = _LOCAL_RANK.get(launcher(known) or "")
    return int(known[name]) if name is not None and name in known else None


def local_device(communicator: MPI.Intracomm | None = None) -> torch.device:
    """The device of this rank: the GPUs of a machine are dealt out among its ranks; the CPU where there are none.

    The launcher says which rank of its machine this one is; where it does not, MPI is asked.

    Args:
        communicator: of the ranks; None takes the world. Collective.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    rank = local_rank() if communicator is None else None
    if rank is None:
        on_node = (communicator or MPI.COMM_WORLD).Split_type(MPI.COMM_TYPE_SHARED)
        rank = on_node.Get_rank()
        on_node.Free()
    return torch.device("cuda", rank % torch.cuda.device_count())


def abort_together() -> None:
    """From now on an error that ends this process ends all ranks, which would wait for it forever."""
    if MPI.COMM_WORLD.Get_size() == 1 or getattr(sys.excepthook, "aborts", False):
        return
    before: Callable[..., object] = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(_TO_FORWARD)
        MPI.COMM_WORLD.Abort(1)

    hook.aborts = True  # type: ignore[attr-defined]
    sys.excepthook = hook
