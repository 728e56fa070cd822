"""What a step does with pools, on the device where the rows are: Triton kernels on CUDA, the definitions elsewhere.

The definitions in plain torch are in `admission` and `places`, the kernels under the same names in `kernels`. The
kernels serve ratios in fp32; with others admission goes to its definition.

Legend: N matrices, B owned matrices, K slots a matrix, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dion_comm_capped import admission, places
from dion_comm_capped.pool import Chunks, PoolTables
from dion_core.ops import has_triton
from dion_core.rows import RowSelection


def admit(selection: RowSelection, tables: PoolTables, chunks: Chunks, *, max_wait: int) -> RowSelection:
    """The rows that have room: see `admission.admit`."""
    if _on_device(selection.index) and selection.ratio.dtype == torch.float32:
        from dion_comm_capped.kernels import admission as kernels

        return kernels.admit(selection, tables, chunks, max_wait=max_wait)
    return admission.admit(selection, tables, chunks, max_wait=max_wait)


def slots(
    selection: RowSelection, tables: PoolTables, chunks: Chunks, *, sent_rows: int, returned_rows: int
) -> tuple[Tensor, Tensor]:
    """(N, K) slots on both ways: see `places.slots`."""
    rows = {"sent_rows": sent_rows, "returned_rows": returned_rows}
    if _on_device(selection.index):
        from dion_comm_capped.kernels import places as kernels

        return kernels.slots(selection, tables, chunks, **rows)
    return places.slots(selection, tables, chunks, **rows)


def write_headers_(values: Tensor, count: Tensor, tables: PoolTables, chunks: Chunks) -> None:
    """Writes the counts in front of the rows: see `places.write_headers_`."""
    if _on_device(values):
        from dion_comm_capped.kernels import places as kernels

        kernels.write_headers_(values, count, tables, chunks)
        return
    places.write_headers_(values, count, tables, chunks)


def read_headers(
    arrived: Tensor, count_by_rank: Tensor, tables: PoolTables, chunks: Chunks, *, max_rows: int, total_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(W, B) counts, and starts on both ways: see `places.read_headers`."""
    limits = {"max_rows": max_rows, "total_rows": total_rows}
    if _on_device(arrived):
        from dion_comm_capped.kernels import places as kernels

        return kernels.read_headers(arrived, count_by_rank, tables, chunks, **limits)
    return places.read_headers(arrived, count_by_rank, tables, chunks, **limits)


def rows_by_pair(counts: Sequence[Tensor], of_owner: Sequence[Tensor], num_owners: Sequence[int]) -> Tensor:
    """Flat rows chosen by bucket and pair: see `places.rows_by_pair`."""
    if all(map(_on_device, counts)):
        from dion_comm_capped.kernels import places as kernels

        return kernels.rows_by_pair(counts, of_owner, num_owners)
    return places.rows_by_pair(counts, of_owner, num_owners)


def _on_device(tensor: Tensor) -> bool:
    return tensor.is_cuda and has_triton()
