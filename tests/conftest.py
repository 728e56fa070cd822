"""One thread a process, as in the pool of ranks: bits of a sum on a CPU depend on the number of threads.

Without a GPU, Triton's kernels run in its interpreter, which has to be known before anything imports triton.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)
