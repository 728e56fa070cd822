"""The operations of a step on the device where its rows are: Triton kernels on CUDA, the definitions elsewhere.

The definitions in plain torch are in `rows`, `choice` and `compaction`, the kernels under the same names in `kernels`.
"""

from __future__ import annotations

from torch import Tensor

from dion_core import choice, compaction
from dion_core.layout import RowTables
from dion_core.rows import RowSelection, accumulate_, sums_of_squares, take_and_decay_, update_, update_second_moment_

__all__ = [
    "accumulate_",
    "choose",
    "choose_local",
    "collect",
    "spread",
    "sums_of_squares",
    "take_and_decay_",
    "update_",
    "update_second_moment_",
]


# What chooses rows and builds matrices of them. A kernel's module needs triton, so that only a GPU imports it.


def choose(scores: Tensor, tables: RowTables, active: Tensor, *, total: int, offer: int) -> RowSelection:
    """The `total` best rows of each matrix by (N, R) scores: see `choice.choose`."""
    if scores.is_cuda:
        from dion_core.kernels import choice as kernels

        return kernels.choose(scores, tables, active, total=total, offer=offer)
    return choice.choose(scores, tables, active, total=total, offer=offer)


def choose_local(scores: Tensor, tables: RowTables, active: Tensor, *, share: int) -> RowSelection:
    """The `share` best rows of each shard by (N, R local) scores: see `choice.choose_local`."""
    if scores.is_cuda:
        from dion_core.kernels import choice as kernels

        return kernels.choose_local(scores, tables, active, share=share)
    return choice.choose_local(scores, tables, active, share=share)


def collect(rows: Tensor, count: Tensor, start: Tensor, total: int, owned: Tensor | None = None) -> Tensor:
    """(B, T, C) matrices of (S, C) rows: see `compaction.collect`."""
    if rows.is_cuda:
        from dion_core.kernels import compaction as kernels

        return kernels.collect(rows, count, start, total, owned)
    return compaction.collect(rows, count, start, total, owned)


def spread(matrices: Tensor, count: Tensor, start: Tensor, num_rows: int, owned: Tensor | None = None) -> Tensor:
    """Flat (num_rows * C,) rows of (B, T, C) matrices: see `compaction.spread`."""
    if matrices.is_cuda:
        from dion_core.kernels import compaction as kernels

        return kernels.spread(matrices, count, start, num_rows, owned)
    return compaction.spread(matrices, count, start, num_rows, owned)
