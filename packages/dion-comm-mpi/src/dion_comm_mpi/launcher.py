"""How the processes were started, and which device is whose."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import TracebackType

import torch

from dion_comm_mpi._imports import MPI

_LAUNCHERS = {
    "OMPI_COMM_WORLD_SIZE": "mpirun of Open MPI",
    "SLURM_STEP_ID": "srun",
    "PMI_SIZE": "mpirun of MPICH (Hydra)",
    "HYDI_CONTROL_FD": "mpirun of MPICH (Hydra)",
}
"""By a variable that each sets for its processes; srun sets those of PMI too, so it comes before them."""


def launcher() -> str | None:
    """What started this process as one rank of several; None if nothing did that is known."""
    return next((name for variable, name in _LAUNCHERS.items() if variable in os.environ), None)


def local_device(communicator: MPI.Intracomm | None = None) -> torch.device:
    """The device of this rank: the GPUs of a machine are dealt out among its ranks; the CPU where there are none.

    Args:
        communicator: of the ranks; None takes the world. Collective.
    """
    on_node = (communicator or MPI.COMM_WORLD).Split_type(MPI.COMM_TYPE_SHARED)
    rank = on_node.Get_rank()
    on_node.Free()
    if not torch.cuda.is_available():
        return torch.device("cpu")
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
        MPI.COMM_WORLD.Abort(1)

    hook.aborts = True  # type: ignore[attr-defined]
    sys.excepthook = hook
