"""Groups of ranks that communicate by MPI, or by NCCL, and need no store of torch.distributed.

`mpi_group` (name "mpi") works on CPU and GPU tensors, `nccl_group` (name "nccl") on GPU tensors alone.
"""

from dion_comm_mpi.launch import abort_together, launcher, local_device, local_rank
from dion_comm_mpi.mpi import MpiGroup, mpi_group
from dion_comm_mpi.nccl import NcclGroup, nccl_group

__all__ = [
    "MpiGroup",
    "NcclGroup",
    "abort_together",
    "launcher",
    "local_device",
    "local_rank",
    "mpi_group",
    "nccl_group",
]
