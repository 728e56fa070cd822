"""One thread a process, as in the pool of ranks: bits of a sum on a CPU depend on the number of threads."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
