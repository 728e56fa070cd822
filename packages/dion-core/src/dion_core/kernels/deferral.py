"""`with_age` and `wait_` as one launch each.

Legend: N matrices of a bucket, R local rows of one, K slots a matrix, W ranks.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from dion_core.launching import cdiv, launch
from dion_core.matrices import Matrices
from dion_core.rows import RowSelection

BLOCK = 1024
"""Rows or slots that one program handles at a time."""


@triton.jit
def _steps_of(addresses, matrix, row, stride):
    """Pointers to the waiting times of rows of a matrix, which is (R, 1) int32 at an address."""
    return tl.load(addresses + matrix).to(tl.pointer_type(tl.int32)) + row.to(tl.int64) * stride


@triton.jit(do_not_specialize=["stride", "num_rows", "num_slots", "num_blocks"])
def _with_age_kernel(addresses, stride, index, age, num_rows, num_slots, num_blocks, BLOCK: tl.constexpr):
    """Looks up the waiting times of some slots of one matrix.

    Example: waiting times [0, 3, 1] and index [2, 0] give the ages [1, 0].
    """
    matrix = (tl.program_id(0) // num_blocks).to(tl.int64)
    slot = (tl.program_id(0) % num_blocks) * BLOCK + tl.arange(0, BLOCK)
    listed = slot < num_slots
    row = tl.load(index + matrix * num_slots + slot, mask=listed, other=0)
    steps = tl.load(_steps_of(addresses, matrix, row, stride), mask=listed & (row < num_rows), other=0)
    tl.store(age + matrix * num_slots + slot, steps, mask=listed)


@triton.jit(do_not_specialize=["stride", "num_rows", "num_slots", "num_matrices"])
def _wait_kernel(
    addresses,
    stride,
    chosen,
    chosen_count,
    admitted,
    admitted_count,
    count_by_rank,
    num_rows,
    num_slots,
    num_matrices,
    num_ranks: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Brings the waiting times of one matrix one step further.

    Example: of waiting times [0, 2, 1, 0], rows 0, 1 and 3 chosen and row 1 admitted give [1, 0, 2, 1]: first those
    that wait already are lengthened, then those that were chosen wait at least 1, then those admitted wait no longer.
    """
    matrix = tl.program_id(0).to(tl.int64)
    rows_chosen = tl.full([], 0, tl.int64)
    for rank in range(num_ranks):
        rows_chosen += tl.load(count_by_rank + rank * num_matrices + matrix)
    if rows_chosen > 0:
        start = 0
        while start < num_rows:
            row = start + tl.arange(0, BLOCK)
            place = _steps_of(addresses, matrix, row, stride)
            steps = tl.load(place, mask=row < num_rows, other=0)
            tl.store(place, steps + 1, mask=(row < num_rows) & (steps > 0))
            start += BLOCK
        tl.debug_barrier()  # what the threads of this program wrote is seen by all of them
        start, count = 0, tl.load(chosen_count + matrix).to(tl.int32)
        while start < count:
            slot = start + tl.arange(0, BLOCK)
            row = tl.load(chosen + matrix * num_slots + slot, mask=slot < count, other=0)
            place = _steps_of(addresses, matrix, row, stride)
            steps = tl.load(place, mask=slot < count, other=0)
            tl.store(place, tl.maximum(steps, 1), mask=slot < count)
            start += BLOCK
        tl.debug_barrier()
        start, count = 0, tl.load(admitted_count + matrix).to(tl.int32)
        while start < count:
            slot = start + tl.arange(0, BLOCK)
            row = tl.load(admitted + matrix * num_slots + slot, mask=slot < count, other=0)
            place = _steps_of(addresses, matrix, row, stride)
            tl.store(place, tl.zeros([BLOCK], tl.int32), mask=slot < count)
            start += BLOCK


def with_age(selection: RowSelection, waited: Matrices) -> RowSelection:
    """The same as `dion_core.deferral.with_age` gives, in one launch."""
    if not len(waited):
        return selection
    index = selection.index.contiguous()
    num_matrices, num_slots = index.shape
    age = torch.empty(index.shape, dtype=torch.int32, device=index.device)
    num_blocks = cdiv(num_slots, BLOCK)
    launch(
        _with_age_kernel,
        num_matrices * num_blocks,
        index.device,
        waited.addresses,
        waited.stride[0],
        index,
        age,
        waited.shape[0],
        num_slots,
        num_blocks,
        warps=4,
        BLOCK=BLOCK,
    )
    return replace(selection, age=age)


def wait_(waited: Matrices, chosen: RowSelection, admitted: RowSelection) -> None:
    """The same as `dion_core.deferral.wait_` does, in one launch."""
    launch(
        _wait_kernel,
        len(waited),
        chosen.index.device,
        waited.addresses,
        waited.stride[0],
        chosen.index.contiguous(),
        chosen.count.contiguous(),
        admitted.index.contiguous(),
        admitted.count.contiguous(),
        chosen.count_by_rank.contiguous(),
        waited.shape[0],
        chosen.index.shape[1],
        len(waited),
        warps=4,
        num_ranks=len(chosen.count_by_rank),
        BLOCK=BLOCK,
    )
