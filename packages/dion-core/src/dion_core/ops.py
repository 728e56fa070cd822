"""The operations of a step on the device where its rows are: Triton kernels on CUDA, the definitions elsewhere.

The definitions in plain torch are in `rows` and `compaction`, the kernels under the same names in `kernels`.
"""

from __future__ import annotations

from dion_core.compaction import collect, spread
from dion_core.rows import accumulate_, sums_of_squares, take_and_decay_, update_, update_second_moment_

__all__ = [
    "accumulate_",
    "collect",
    "spread",
    "sums_of_squares",
    "take_and_decay_",
    "update_",
    "update_second_moment_",
]
