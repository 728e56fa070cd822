"""`admit` in two launches: one finds for every pool the last row that goes, one lists the rows of every matrix.

A pool with room for all rows is found so by their number alone. Of another one the last row that goes is found by
radix selection, digit by digit from the highest, as the choice of rows is made: rows become integer keys in the order
of urgency. After that every row decides by itself whether it goes.

Legend: N matrices, K slots a matrix, W ranks.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from dion_comm_capped.pool import Chunks, PoolTables
from dion_core.launching import launch
from dion_core.rows import RowSelection

DIGIT = 5
"""Bits of a key that are found in one pass: with 32 values, every thread of a warp counts one."""
MATRICES, SLOTS = 16, 256
"""Entries of a pool that one program looks at in one go: so many slots of so many matrices."""
BLOCK = 1024
"""Slots or matrices that one program handles at a time."""

_LARGEST = tl.constexpr(2**63 - 1)
_NAN_BITS = tl.constexpr(0x7FC00000)


@triton.jit
def _urgency(ratio, age, max_wait):
    """int64 keys in the order in which rows go: by the age of those that waited `max_wait` or more, then by ratio.

    Bits of floats that are not negative are in the order of their values. A NaN comes first, as it does in sorting.
    """
    bits = tl.where(ratio == ratio, ratio.to(tl.int32, bitcast=True), _NAN_BITS)
    overdue = tl.where(age >= max_wait, age, 0)
    return (overdue.to(tl.int64) << 32) | tl.maximum(bits, 0).to(tl.int64)


@triton.jit
def _entries(
    ratio, age, count, members, num_members, num_matrices, num_slots, max_wait, first, start,
    MATRICES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Keys of some slots of some matrices of a pool, -1 where no row is chosen; and their places, slot by slot."""
    lane = tl.arange(0, MATRICES * SLOTS)
    member, slot = first + lane // SLOTS, start + lane % SLOTS
    matrix = tl.load(members + member, mask=member < num_members, other=0)
    used = tl.load(count + matrix, mask=member < num_members, other=0)
    entry, chosen = matrix * num_slots + slot, slot < used
    key = _urgency(tl.load(ratio + entry, mask=chosen, other=0), tl.load(age + entry, mask=chosen, other=0), max_wait)
    return tl.where(chosen, key, -1), slot.to(tl.int64) * num_matrices + matrix


@triton.jit
def _digits(
    ratio, age, count, members, num_members, num_matrices, num_slots, max_wait, most, wanted_key, shift, prefix,
    DIGIT: tl.constexpr, TIES: tl.constexpr, MATRICES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """How many entries have each value of the DIGIT bits above `shift`, among those with `prefix` above these.

    The bits are those of the keys; with TIES those of the places, counted from the last one so that the first ones
    come first, among the entries that have the wanted key.
    """
    found = tl.zeros([1 << DIGIT], tl.int32)
    first = 0
    while first < num_members:
        start = 0
        while start < most:
            key, place = _entries(
                ratio, age, count, members, num_members, num_matrices, num_slots, max_wait, first, start,
                MATRICES, SLOTS,
            )  # fmt: skip
            counted = key >= 0
            bits = key
            if TIES:
                counted = key == wanted_key
                bits = num_slots.to(tl.int64) * num_matrices - 1 - place
            digit = bits >> shift
            value = (digit & ((1 << DIGIT) - 1)).to(tl.int32)
            found += tl.histogram(value, 1 << DIGIT, mask=counted & ((digit >> DIGIT) == prefix))
            start += SLOTS
        first += MATRICES
    return found


@triton.jit
def _best(
    ratio, age, count, members, num_members, num_matrices, num_slots, max_wait, most, wanted_key, largest, wanted,
    DIGIT: tl.constexpr, TIES: tl.constexpr, MATRICES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The bits of the `wanted`-th best entry; how many entries with the same bits go, and how many there are."""
    shift = 0
    while (largest >> shift) > 0:
        shift += DIGIT
    prefix = tl.full([], 0, tl.int64)
    there = wanted + 1  # where all bits are 0 more have them than are wanted
    digit = tl.arange(0, 1 << DIGIT)
    while shift > 0:
        shift -= DIGIT
        found = _digits(
            ratio, age, count, members, num_members, num_matrices, num_slots, max_wait, most, wanted_key, shift, prefix,
            DIGIT, TIES, MATRICES, SLOTS,
        )  # fmt: skip
        at_least = tl.sum(found, 0) - tl.cumsum(found, 0) + found
        best = tl.max(tl.where(at_least >= wanted, digit, 0), 0)
        there = tl.sum(tl.where(digit == best, found, 0), 0)
        wanted -= tl.sum(tl.where(digit > best, found, 0), 0)
        prefix = (prefix << DIGIT) + best
    return prefix, wanted, there


@triton.jit
def _rows_of_pool(count, members, num_members, BLOCK: tl.constexpr):
    """How many rows of a pool are chosen, and how many of one matrix at most."""
    total, most, first = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64), 0
    while first < num_members:
        member = first + tl.arange(0, BLOCK)
        matrix = tl.load(members + member, mask=member < num_members, other=0)
        used = tl.load(count + matrix, mask=member < num_members, other=0)
        total += tl.sum(used, 0)
        most = tl.maximum(most, tl.max(used, 0))
        first += BLOCK
    return total, most.to(tl.int32)


@triton.jit(do_not_specialize=["num_matrices", "num_slots", "max_wait"])
def _last_admitted_kernel(
    ratio, age, count, order, pool_start, capacity, last_key, last_place, num_matrices, num_slots, max_wait,
    DIGIT: tl.constexpr, MATRICES: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One pool: rows go whose key is above `last_key`, or equal to it if their place is before `last_place`.

    Example: room for 3 of the keys 5 3 | 3 3 of two matrices. Key 3 is the last that goes, two of its three rows, and
    the places, slot by slot, are 0 2 | 1 3: those before place 3 go. Were there room for 4, `last_key` were -1.
    """
    pool = tl.program_id(0)
    first = tl.load(pool_start + pool)
    members, num_members = order + first, (tl.load(pool_start + pool + 1) - first).to(tl.int32)
    room = tl.load(capacity + pool)
    total, most = _rows_of_pool(count, members, num_members, BLOCK)
    key, end = tl.full([], -1, tl.int64), tl.full([], 0, tl.int64)
    if total > room:
        if room == 0:
            key = tl.full([], _LARGEST, tl.int64)
        else:
            largest, row = tl.full([], 0, tl.int64), 0
            while row < num_members:
                start = 0
                while start < most:
                    keys, _ = _entries(
                        ratio, age, count, members, num_members, num_matrices, num_slots, max_wait, row, start,
                        MATRICES, SLOTS,
                    )  # fmt: skip
                    largest = tl.maximum(largest, tl.max(keys, 0))
                    start += SLOTS
                row += MATRICES
            key, wanted, there = _best(
                ratio, age, count, members, num_members, num_matrices, num_slots, max_wait, most, key, largest,
                room.to(tl.int32), DIGIT, False, MATRICES, SLOTS,
            )  # fmt: skip
            end = num_slots.to(tl.int64) * num_matrices
            if there > wanted:
                from_last, wanted, there = _best(
                    ratio, age, count, members, num_members, num_matrices, num_slots, max_wait, most, key, end - 1,
                    wanted, DIGIT, True, MATRICES, SLOTS,
                )  # fmt: skip
                end -= from_last
    tl.store(last_key + pool, key)
    tl.store(last_place + pool, end)


@triton.jit
def _goes(ratio, age, slot, chosen, matrix, num_matrices, max_wait, last_key, last_place):
    """Whether the entries of a matrix go, by their keys and places."""
    key = _urgency(ratio, age, max_wait)
    first = slot.to(tl.int64) * num_matrices + matrix < last_place
    return chosen & ((key > last_key) | ((key == last_key) & first))


@triton.jit(do_not_specialize=["num_matrices", "num_slots", "max_wait"])
def _keep_kernel(
    index, ratio, age, count, owner, last_key, last_place, kept_index, kept_ratio, kept_age, kept_count,
    num_matrices, num_slots, max_wait, BLOCK: tl.constexpr,
):  # fmt: skip
    """One matrix: lists the entries that go, then the others, both in their order.

    Example: of the rows 4 7 8, of which only 7 does not go, 4 8 7 are listed, and 2 counted.
    """
    matrix = tl.program_id(0).to(tl.int64)
    pool = tl.load(owner + matrix)
    key, end = tl.load(last_key + pool), tl.load(last_place + pool)
    chosen = tl.load(count + matrix).to(tl.int32)
    first = matrix * num_slots
    num_going = chosen
    if key >= 0:
        num_going, start = chosen * 0, 0
        while start < chosen:
            slot = start + tl.arange(0, BLOCK)
            here = slot < chosen
            weight = tl.load(ratio + first + slot, mask=here, other=0)
            steps = tl.load(age + first + slot, mask=here, other=0)
            goes = _goes(weight, steps, slot, here, matrix, num_matrices, max_wait, key, end)
            num_going += tl.sum(goes.to(tl.int32), 0)
            start += BLOCK
    tl.store(kept_count + matrix, num_going.to(tl.int64))
    going_before, start = num_going * 0, 0
    while start < num_slots:
        slot = start + tl.arange(0, BLOCK)
        listed = slot < num_slots
        weight = tl.load(ratio + first + slot, mask=listed, other=0)
        steps = tl.load(age + first + slot, mask=listed, other=0)
        row = tl.load(index + first + slot, mask=listed, other=0)
        goes = _goes(weight, steps, slot, slot < chosen, matrix, num_matrices, max_wait, key, end)
        before = going_before + tl.cumsum(goes.to(tl.int32), 0) - goes.to(tl.int32)
        place = first + tl.where(goes, before, num_going + slot - before)
        tl.store(kept_index + place, row, mask=listed)
        tl.store(kept_ratio + place, weight, mask=listed)
        tl.store(kept_age + place, steps, mask=listed)
        going_before += tl.sum(goes.to(tl.int32), 0)
        start += BLOCK


def admit(selection: RowSelection, tables: PoolTables, chunks: Chunks, *, max_wait: int) -> RowSelection:
    """The same as `dion_comm_capped.admission.admit` gives, in two launches."""
    device, (num_matrices, num_slots) = selection.index.device, selection.index.shape
    index, ratio, age, count = (
        each.contiguous() for each in (selection.index, selection.ratio, selection.age, selection.count)
    )
    last_key, last_place = torch.empty(2, len(chunks.capacity), dtype=torch.int64, device=device)
    kept = replace(
        selection,
        index=torch.empty_like(index),
        ratio=torch.empty_like(ratio),
        age=torch.empty_like(age),
        count=torch.empty_like(count),
    )
    launch(
        _last_admitted_kernel, len(last_key), device,
        ratio, age, count, tables.order, tables.pool_start, chunks.capacity, last_key, last_place,
        num_matrices, num_slots, max_wait,
        warps=16, DIGIT=DIGIT, MATRICES=MATRICES, SLOTS=SLOTS, BLOCK=BLOCK,
    )  # fmt: skip
    launch(
        _keep_kernel, num_matrices, device,
        index, ratio, age, count, tables.owner, last_key, last_place, kept.index, kept.ratio, kept.age, kept.count,
        num_matrices, num_slots, max_wait,
        warps=4, BLOCK=BLOCK,
    )  # fmt: skip
    return kept
