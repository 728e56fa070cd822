"""`choose` and `choose_local` as one launch each: one program finds and lists the chosen rows of one matrix.

Scores become integer keys of the same order. The total-th highest key is found by radix selection, digit by digit
from the highest: of the keys that share the digits found so far, those of each value of the next one are counted. If
more rows have that key than are wanted, the last of these is found in the same way by its row number. After that
every row decides by itself whether it is chosen.

Example, total 3 of the scores 5 3 3 -1 3 in digits of one bit, as if they were their own keys: one score has bit 2, too
few, so the digit is 0 and two more are wanted; three of the others have bit 1, and all of these bit 0, so the key is 3.
Of its rows 1, 2 and 4, which are 3, 2 and 0 before the last, two are wanted: row 2 is the last of them, and rows 0, 1
and 2 are chosen. A rank that holds rows 1 to 4 lists its rows 0 and 1, then 2 and 3.

Legend: N matrices, R rows of a whole matrix (of this rank's part in `choose_local`), K slots a matrix, W ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dion_core.launching import launch, power_of_two
from dion_core.layout import Axis, RowTables
from dion_core.rows import SKIPPED_SCORE, RowSelection

MOST_KEYS = 32768
"""Keys that one program keeps in registers; of more rows they are made anew from the scores each time."""
KEYS_AT_A_TIME = 16384
"""Of so many then: more of them and their count do not fit."""
KEYS_A_WARP = 512
DIGIT = 5
"""Bits of a key that are found in one pass over all rows: with 32 values, every thread of a warp counts one."""
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
def _digits(keys, scores, num_rows, shift, prefix, DIGIT: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr):
    """How many keys have each value of the DIGIT bits above `shift`, among those that have `prefix` above these."""
    if not WHOLE:
        keys = _keys(scores, tl.arange(0, BLOCK), num_rows)
    digit = keys >> shift
    found = tl.histogram((digit & ((1 << DIGIT) - 1)).to(tl.int32), 1 << DIGIT, mask=(digit >> DIGIT) == prefix)
    if not WHOLE:
        start = BLOCK
        while start < num_rows:
            digit = _keys(scores, start + tl.arange(0, BLOCK), num_rows) >> shift
            value = (digit & ((1 << DIGIT) - 1)).to(tl.int32)
            found += tl.histogram(value, 1 << DIGIT, mask=(digit >> DIGIT) == prefix)
            start += BLOCK
    return found


@triton.jit
def _digits_of_ties(
    keys, scores, num_rows, key, shift, prefix, DIGIT: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr
):
    """The same of the numbers of the rows that have the key, counted from the last row, so that low rows come first."""
    found = tl.zeros([1 << DIGIT], tl.int32)
    start = 0
    while start < num_rows:
        row = start + tl.arange(0, BLOCK)
        if not WHOLE:
            keys = _keys(scores, row, num_rows)
        digit = (num_rows - 1 - row) >> shift
        value = digit & ((1 << DIGIT) - 1)
        found += tl.histogram(value, 1 << DIGIT, mask=(keys == key) & ((digit >> DIGIT) == prefix))
        start += BLOCK
    return found


@triton.jit
def _best_digit(found, wanted, DIGIT: tl.constexpr):
    """The highest digit that, with all higher ones, covers the wanted number; what of it is wanted, and there is."""
    digit = tl.arange(0, 1 << DIGIT)
    at_least = tl.sum(found, 0) - tl.cumsum(found, 0) + found
    best = tl.max(tl.where(at_least >= wanted, digit, 0), 0)
    there = tl.sum(tl.where(digit == best, found, 0), 0)
    return best, wanted - tl.sum(tl.where(digit > best, found, 0), 0), there


@triton.jit
def _threshold(
    scores, num_rows, wanted, BITS: tl.constexpr, DIGIT: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr
):
    """The key of the last of the `wanted` best rows, and the row before which rows with this key are chosen."""
    keys = _keys(scores, tl.arange(0, BLOCK), num_rows)
    threshold = tl.full([], 0, keys.dtype)
    there = num_rows
    for step in range((BITS + DIGIT - 1) // DIGIT):
        shift = ((BITS + DIGIT - 1) // DIGIT - 1 - step) * DIGIT
        found = _digits(keys, scores, num_rows, shift, threshold, DIGIT, WHOLE, BLOCK)
        best, wanted, there = _best_digit(found, wanted, DIGIT)
        threshold = (threshold << DIGIT) + best
    end = num_rows
    if there > wanted:
        shift = 0
        while num_rows >> shift > 0:
            shift += DIGIT
        from_last = 0
        while shift > 0:
            shift -= DIGIT
            found = _digits_of_ties(keys, scores, num_rows, threshold, shift, from_last, DIGIT, WHOLE, BLOCK)
            best, wanted, there = _best_digit(found, wanted, DIGIT)
            from_last = (from_last << DIGIT) + best
        end = num_rows - from_last
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
    DIGIT: tl.constexpr,
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
    threshold, end = _threshold(scores, num_rows, total, BITS, DIGIT, WHOLE, BLOCK)
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
    block = max(power_of_two(num_rows), 128)
    if block > MOST_KEYS:
        block = KEYS_AT_A_TIME
    launch(
        _choose_kernel, num_matrices, scores.device, scores.contiguous(), active.contiguous(),
        tables.rank_of_row if split and not local else index, tables.num_rows, index, count_by_rank, ratio, age,
        num_matrices, group.size, group.rank, num_rows, total, num_slots,
        LOCAL=local, SPLIT=split, BITS=8 * scores.itemsize - 1, DIGIT=DIGIT, WHOLE=num_rows <= block, BLOCK=block,
        CHUNK=min(block, CHUNK), RANKS=power_of_two(group.size + 1),
        warps=min(max(block // KEYS_A_WARP, 4), 32),
    )  # fmt: skip
    return RowSelection(index, count_by_rank[group.rank], count_by_rank, ratio, age)
