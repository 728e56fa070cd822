"""One thread a process, as in the pool of ranks: bits of a sum on a CPU depend on the number of threads."""

from __future__ import annotations

import os

import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels then run on the CPU; read when triton is imported


@pytest.fixture(scope="module")
def fresh_ranks() -> None:
    """The ranks of a module are processes of its own.

    After an error ranks go on with a new default process group, while torch keeps parts of meshes (`mesh["a"]`) whose
    groups went with the old one.
    """
    from dion_core.testing import ranks  # not before the environment is set

    ranks.close_pools()
