"""What MPI reads and writes for tensors: views of their own memory, by DLPack, or pinned host memory in its place."""

from __future__ import annotations

import ctypes
import logging
from functools import lru_cache

import torch
from torch import Tensor

from dion_comm_mpi._imports import MPI

logger = logging.getLogger("dion_core")


class Staged:
    """What MPI reads or writes for a tensor: its own memory, or pinned host memory that stands for it.

    Attributes:
        buffer: (bytes,) uint8, a view that mpi4py takes by DLPack, on a GPU too. So the dtypes need not be known there,
            of which MPI has no bf16 and fp16.
    """

    def __init__(self, tensor: Tensor, *, filled: bool) -> None:
        if not tensor.is_contiguous():
            raise ValueError(f"a message lies in one piece; got one of strides {tensor.stride()}")
        self._tensor, self._host = tensor, tensor
        if tensor.is_cuda:
            if not knows_gpus():
                self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                if filled:
                    self._host.copy_(tensor, non_blocking=True)
            torch.cuda.current_stream(tensor.device).synchronize()
        self.buffer = self._host.view(-1).view(torch.uint8)

    def bring(self) -> None:
        """Copies what has arrived to where it belongs, on the current stream."""
        if self._host is not self._tensor:
            self._tensor.copy_(self._host, non_blocking=True)


@lru_cache(maxsize=1)
def knows_gpus() -> bool:
    """Whether the MPI library reads and writes GPU memory; where it does not that is logged, once."""
    library, answer = ctypes.CDLL(None), ctypes.c_int()
    supported = False
    if hasattr(library, "MPIX_Query_cuda_support"):  # Open MPI
        supported = bool(library.MPIX_Query_cuda_support())
    elif hasattr(library, "MPIX_GPU_query_support"):  # MPICH; 0 is CUDA
        supported = library.MPIX_GPU_query_support(0, ctypes.byref(answer)) == 0 and bool(answer.value)
    if not supported:
        name = MPI.Get_library_version().splitlines()[0]
        logger.warning("%s does not know GPUs: their tensors travel through pinned host memory", name)
    return supported
