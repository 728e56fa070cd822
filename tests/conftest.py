"""One thread a process, as in the pool of ranks: bits of a sum on a CPU depend on the number of threads."""

from __future__ import annotations

import os

import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels then run on the CPU; read when triton is imported
