"""`choose` and `choose_local` as one launch each: one program finds and lists the chosen rows of one matrix.

Scores become integer keys of the same order. The total-th highest key is found bit by bit, from the highest: a bit is
set if enough keys are at least that high. Where more rows tie with it than are wanted, the row before which enough
of them lie is found in the same way. After that every row decides by itself whether it is chosen.

Example, total 2 of the scores 3 5 3 -1 3, in 3 bits as if they were their own keys: at least 4 are too few (1), at
least 2 are enough (4), at least 3 are enough (4), so the threshold is 3. One row is above it, hence one of three ties
is wanted, and the one before row 1 is: rows 0 and 1 are chosen. A rank that holds rows 1 to 4 lists rows 0 | 1 2 3.

Legend: N matrices, R rows of a whole matrix (of this rank's part in `choose_local`), K slots a matrix, W ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dion_core.kernels.launching import launch
from dion_core.layout import Axis, RowTables
from dion_core.rows import SKIPPED_SCORE, RowSelection

MOST_KEYS = 32768
"""Keys that one program keeps in registers; of more rows they are made anew from the scores each time."""
KEYS_AT_A_TIME = 16384
"""Of so many then: more of them and their count do not fit."""
KEYS_A_WARP = 512
CHUNK = 4096
"""Rows that are listed at a time: fewer than 2^15, since two counts of them share 32 bits."""

_SKIPPED = tl.constexpr(SKIPPED_SCORE)
_NUMBERS = ["num_matrices", "num_ranks", "rank", "num_rows", "total", "num_slots"]


@triton.jit
def _keys(scores, row, num_rows):
    """Integers in the order of the scores: -inf is 0, a row that was left out 1, zero 2; no row is -1."""
    exists = row < num_rows
    score = tl.load(scores + row, mask=exists, other=0)
    INTEGER: tl.constexpr = tl.int64 if score.dtype == tl.float64 else tl.int32
    bits = tl.abs(score).to(INTEGER, bitcast=True)
    key = tl.where(score >= 0, bits + 2, (score == _SKIPPED).to(INTEGER))
    return tl.where(exists, key, -1)


@triton.jit
def _at_least(keys, scores, num_rows, low, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    """How many keys are at least `low`, which is not negative."""
    if WHOLE:
        return tl.sum((keys >= low).to(tl.int32), 0)
    found = tl.zeros([BLOCK], tl.int32)
    start = 0
    while start < num_rows:
        found += (_keys(scores, start + tl.arange(0, BLOCK), num_rows) >= low).to(tl.int32)
        start += BLOCK
    return tl.sum(found, 0)


@triton.jit
def _ties_before(keys, scores, num_rows, key, end, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    """How many of the rows before row `end` have the key."""
    row = tl.arange(0, BLOCK)
    if WHOLE:
        return tl.sum(((keys == key) & (row < end)).to(tl.int32), 0)
    found = tl.zeros([BLOCK], tl.int32)
    start = 0
    while start < end:
        found += ((_keys(scores, start + row, num_rows) == key) & (start + row < end)).to(tl.int32)
        start += BLOCK
    return tl.sum(found, 0)


@triton.jit
def _threshold(scores, num_rows, total, BITS: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    """The total-th highest key, and the row before which rows with this key are chosen."""
    keys = _keys(scores, tl.arange(0, BLOCK), num_rows)
    one = tl.full([], 1, keys.dtype)
    threshold = one - one
    for step in range(BITS):
        candidate = threshold | (one << (BITS - 1 - step))
        enough = _at_least(keys, scores, num_rows, candidate, WHOLE, BLOCK) >= total
        threshold = tl.where(enough, candidate, threshold)
    end = num_rows
    too_many = _at_least(keys, scores, num_rows, threshold, WHOLE, BLOCK) - total
    if too_many > 0:
        wanted = _ties_before(keys, scores, num_rows, threshold, num_rows, WHOLE, BLOCK) - too_many
        end = 0
        size = 1
        while size < num_rows:
            size *= 2
        while size > 0:
            enough = _ties_before(keys, scores, num_rows, threshold, end + size, WHOLE, BLOCK) > wanted
            end = tl.where(enough, end, end + size)
            size = size // 2
    return threshold, end


@triton.jit
def _listed(scores, row, num_rows, threshold, end, takes_part):
    """The keys of rows, and which of them are chosen."""
    key = _keys(scores, row, num_rows)
    return key, takes_part & ((key > threshold) | ((key == threshold) & (row < end)))


@triton.jit
def _ratio(key, threshold, DTYPE: tl.constexpr):
    """The score that a key stands for over the one of the threshold, correctly rounded; 0 for a score of 0 or less."""
    score = (tl.maximum(key, 2) - 2).to(DTYPE, bitcast=True)
    lowest = (tl.maximum(threshold, 2) - 2).to(DTYPE, bitcast=True)
    if score.dtype == tl.float32:
        ratio = tl.div_rn(score, lowest + tl.zeros_like(score))  # a plain quotient would not be correctly rounded
    else:
        ratio = score / lowest
    return tl.where(key > 2, ratio, 0)


@triton.jit
def _chosen_by_rank(
    scores, ranks, num_rows, num_ranks, threshold, end, takes_part, CHUNK: tl.constexpr, RANKS: tl.constexpr
):
    """(RANKS,) how many of the chosen rows every rank holds; what belongs to none is past the last rank."""
    counts = tl.zeros([RANKS], tl.int32)
    start = 0
    while start < num_rows:
        row = start + tl.arange(0, CHUNK)
        _, chosen = _listed(scores, row, num_rows, threshold, end, takes_part)
        holder = tl.load(ranks + row, mask=chosen, other=num_ranks)
        counts += tl.histogram(holder.to(tl.int32), RANKS)
        start += CHUNK
    return counts


@triton.jit(do_not_specialize=_NUMBERS)
def _choose_kernel(
    scores,
    active,
    rank_of_row,
    rows_by_rank,
    index,
    count_by_rank,
    ratio,
    age,
    num_matrices,
    num_ranks,
    rank,
    num_rows,
    total,
    num_slots,
    LOCAL: tl.constexpr,
    SPLIT: tl.constexpr,
    BITS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Chooses in matrix `program_id`; SPLIT: ranks hold different rows; LOCAL: each chooses alone."""
    matrix = tl.program_id(0)
    takes_part = tl.load(active + matrix) != 0
    scores += matrix.to(tl.int64) * num_rows
    ranks = rank_of_row + matrix.to(tl.int64) * num_rows
    slots = matrix.to(tl.int64) * num_slots
    each = tl.arange(0, RANKS)
    exists = each < num_ranks
    if LOCAL:
        rows_of_each = tl.load(rows_by_rank + each * num_matrices + matrix, mask=exists, other=0)
        counts = tl.minimum(rows_of_each, total).to(tl.int32) * takes_part.to(tl.int32)
        num_rows = tl.sum(tl.where(each == rank, rows_of_each, 0), 0).to(tl.int32)
        total = tl.minimum(total, num_rows)
    threshold, end = _threshold(scores, num_rows, total, BITS, WHOLE, BLOCK)
    if not LOCAL:
        if SPLIT:
            counts = _chosen_by_rank(scores, ranks, num_rows, num_ranks, threshold, end, takes_part, CHUNK, RANKS)
        else:
            counts = tl.zeros([RANKS], tl.int32) + total * takes_part.to(tl.int32)
    tl.store(count_by_rank + each * num_matrices + matrix, counts.to(tl.int64), mask=exists)
    count = tl.sum(tl.where(each == rank, counts, 0), 0)
    num_here, num_chosen, start = 0, 0, 0
    while start < num_rows:
        row = start + tl.arange(0, CHUNK)
        key, chosen = _listed(scores, row, num_rows, threshold, end, takes_part)
        here = row < num_rows
        if SPLIT and not LOCAL:
            here = tl.load(ranks + row, mask=here, other=-1) == rank
        both = here.to(tl.int32) + ((here & chosen).to(tl.int32) << 16)
        before = tl.cumsum(both, 0) - both
        local, chosen_before = num_here + (before & 0xFFFF), num_chosen + (before >> 16)
        slot = tl.where(chosen, chosen_before, count + local - chosen_before)
        listed = here & (slot < num_slots)
        tl.store(index + slots + slot, local.to(tl.int64), mask=listed)
        tl.store(age + slots + slot, tl.zeros([CHUNK], tl.int32), mask=listed)
        if LOCAL:
            tl.store(ratio + slots + slot, tl.full([CHUNK], 1, tl.float32), mask=listed)
        else:
            tl.store(ratio + slots + slot, _ratio(key, threshold, scores.dtype.element_ty), mask=listed)
        in_chunk = tl.sum(both, 0)
        num_here += in_chunk & 0xFFFF
        num_chosen += in_chunk >> 16
        start += CHUNK
    # Slots past the last local row of this matrix, where another one has more, name rows that do not exist.
    start = num_here
    while start < num_slots:
        slot = start + tl.arange(0, 64)
        left = slot < num_slots
        tl.store(index + slots + slot, slot.to(tl.int64), mask=left)
        tl.store(age + slots + slot, tl.zeros([64], tl.int32), mask=left)
        tl.store(ratio + slots + slot, tl.full([64], 1 if LOCAL else 0, ratio.dtype.element_ty), mask=left)
        start += 64


def choose(scores: Tensor, tables: RowTables, active: Tensor, *, total: int, offer: int) -> RowSelection:
    """The same as `dion_core.choice.choose` gives, in one launch."""
    num_slots = min(offer, tables.layout.max_rows(tables.layout.group.rank))
    return _choose(scores, tables, active, total=total, num_slots=num_slots, local=False)


def choose_local(scores: Tensor, tables: RowTables, active: Tensor, *, share: int) -> RowSelection:
    """The same as `dion_core.choice.choose_local` gives, in one launch."""
    return _choose(scores, tables, active, total=share, num_slots=min(share, scores.shape[1]), local=True)


def _choose(
    scores: Tensor, tables: RowTables, active: Tensor, *, total: int, num_slots: int, local: bool
) -> RowSelection:
    (num_matrices, num_rows), group = scores.shape, tables.layout.group
    shape = (num_matrices, num_slots)
    index = torch.empty(shape, dtype=torch.int64, device=scores.device)
    age = torch.empty(shape, dtype=torch.int32, device=scores.device)
    ratio = torch.empty(shape, dtype=torch.float32 if local else scores.dtype, device=scores.device)
    count_by_rank = torch.empty(group.size, num_matrices, dtype=torch.int64, device=scores.device)
    split = tables.layout.axis is Axis.ROWS
    block = max(triton.next_power_of_2(num_rows), 128)
    if block > MOST_KEYS:
        block = KEYS_AT_A_TIME
    launch(
        _choose_kernel,
        num_matrices,
        scores.device,
        scores.contiguous(),
        active.contiguous(),
        tables.rank_of_row if split and not local else index,
        tables.num_rows,
        index,
        count_by_rank,
        ratio,
        age,
        num_matrices,
        group.size,
        group.rank,
        num_rows,
        total,
        num_slots,
        warps=min(max(block // KEYS_A_WARP, 4), 32),
        LOCAL=local,
        SPLIT=split,
        BITS=8 * scores.itemsize - 1,
        WHOLE=num_rows <= block,
        BLOCK=block,
        CHUNK=min(block, CHUNK),
        RANKS=triton.next_power_of_2(group.size + 1),
    )
    return RowSelection(index, count_by_rank[group.rank], count_by_rank, ratio, age)
