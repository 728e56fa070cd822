"""`slots`, `write_headers_` and `read_headers` in one launch each, and `rows_by_pair` in one a bucket.

Legend: N matrices, B owned matrices, K slots a matrix, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dion_comm_capped.pool import COUNT_BYTES, Chunks, PoolTables
from dion_core.launching import cdiv, launch, power_of_two
from dion_core.rows import RowSelection

BLOCK = 1024
"""Slots or matrices that one program handles at a time."""
MATRICES = 32
"""Matrices whose counts one program writes."""
TILE = 2048
"""Counts by rank and matrix that one program holds at a time."""
SHORT = 32
"""What is not longer takes one compiled kernel."""

_COUNT_BYTES = tl.constexpr(COUNT_BYTES)


@triton.jit
def _rows_before(count, offered, members, number, packed, BLOCK: tl.constexpr):
    """Rows of a pool before those of its matrix `number`: those admitted, or all slots if not packed."""
    before, first = tl.full([], 0, tl.int64), 0
    while first < number:
        member = first + tl.arange(0, BLOCK)
        matrix = tl.load(members + member, mask=member < number, other=0)
        before += tl.sum(tl.load(count + matrix, mask=packed & (member < number), other=0), 0)
        before += tl.sum(tl.load(offered + matrix, mask=(not packed) & (member < number), other=0), 0)
        first += BLOCK
    return before


@triton.jit(do_not_specialize=["num_slots", "sent_rows", "returned_rows"])
def _slots_kernel(
    count, owner, number, offered, order, pool_start, forward_first, back_first, header_first, slot, back,
    num_slots, sent_rows, returned_rows, BLOCK: tl.constexpr,
):  # fmt: skip
    """One matrix: its slots on both ways.

    Example: the second matrix of a packed pool whose first one has 3 rows, with 2 rows in 3 slots; chunks start at rows
    10 and 20, of 40 that are sent and 30 that come back: slots 13 14 40, and 23 24 30 on the way back.
    """
    matrix = tl.program_id(0).to(tl.int64)
    pool, place = tl.load(owner + matrix), tl.load(number + matrix).to(tl.int32)
    packed = tl.load(header_first + pool) >= 0
    before = _rows_before(count, offered, order + tl.load(pool_start + pool), place, packed, BLOCK)
    forward, backward = tl.load(forward_first + pool) + before, tl.load(back_first + pool) + before
    used, first, start = tl.load(count + matrix), matrix * num_slots, 0
    while start < num_slots:
        entry = start + tl.arange(0, BLOCK)
        admitted, listed = entry < used, entry < num_slots
        tl.store(slot + first + entry, tl.where(admitted, forward + entry, sent_rows), mask=listed)
        tl.store(back + first + entry, tl.where(admitted, backward + entry, returned_rows), mask=listed)
        start += BLOCK


def slots(
    selection: RowSelection, tables: PoolTables, chunks: Chunks, *, sent_rows: int, returned_rows: int
) -> tuple[Tensor, Tensor]:
    """The same as `dion_comm_capped.places.slots` gives, in one launch."""
    shape, device = selection.index.shape, selection.index.device
    slot, back = (torch.empty(shape, dtype=torch.int64, device=device) for _ in range(2))
    launch(
        _slots_kernel, shape[0], device,
        selection.count.contiguous(), tables.owner, tables.number, tables.offered, tables.order, tables.pool_start,
        chunks.forward_first, chunks.back_first, chunks.header_first, slot, back,
        shape[1], sent_rows, returned_rows,
        warps=4, BLOCK=BLOCK,
    )  # fmt: skip
    return slot, back


@triton.jit(do_not_specialize=["num_matrices"])
def _write_headers_kernel(values, count, owner, number, header_first, num_matrices, MATRICES: tl.constexpr):
    """Some matrices: their counts, byte by byte.

    Example: a count of 258 of the second matrix of a pool whose header starts at byte 100: 2 1 0 0 from byte 104 on.
    """
    matrix = tl.program_id(0) * MATRICES + tl.arange(0, MATRICES)
    here = matrix < num_matrices
    header = tl.load(header_first + tl.load(owner + matrix, mask=here, other=0), mask=here, other=-1)
    place = tl.load(number + matrix, mask=here, other=0)
    rows = tl.load(count + matrix, mask=here, other=0).to(tl.int32)
    byte = values.to(tl.pointer_type(tl.uint8)) + header + place * _COUNT_BYTES
    for part in tl.static_range(_COUNT_BYTES):
        tl.store(byte + part, ((rows >> (8 * part)) & 0xFF).to(tl.uint8), mask=header >= 0)


def write_headers_(values: Tensor, count: Tensor, tables: PoolTables, chunks: Chunks) -> None:
    """The same as `dion_comm_capped.places.write_headers_` does, in one launch."""
    launch(
        _write_headers_kernel, cdiv(len(count), MATRICES), values.device,
        values, count.contiguous(), tables.owner, tables.number, chunks.header_first, len(count),
        warps=1, MATRICES=MATRICES,
    )  # fmt: skip


@triton.jit
def _told(arrived, header, place, here):
    """int64 counts that headers hold from byte `header` on, for matrices `place`; 0 where not `here`."""
    byte = arrived.to(tl.pointer_type(tl.uint8)) + header + place.to(tl.int64) * _COUNT_BYTES
    told = tl.load(byte, mask=here, other=0).to(tl.int32)
    for number in tl.static_range(1, _COUNT_BYTES):
        told |= tl.load(byte + number, mask=here, other=0).to(tl.int32) << (8 * number)
    return told.to(tl.int64)


def _columns(length: int, rows: int) -> int:
    """Columns of a tile of so many rows that goes through `length`; few short lengths have one of their own."""
    return max(1, min(power_of_two(max(length, SHORT)), TILE // rows))


@triton.jit(do_not_specialize=["num_matrices", "num_owned", "num_ranks", "max_rows", "total_rows"])
def _read_headers_kernel(
    arrived, count_by_rank, owned, slot_start, capacity, forward_first, back_first, header_first, count, start, back,
    num_matrices, num_owned, num_ranks, max_rows, total_rows, RANKS: tl.constexpr, OWNED: tl.constexpr,
):  # fmt: skip
    """The only program: counts by source and matrix, and where their rows start on both ways.

    Example: one source with room for 5 rows, whose header says 3, 9 and -1, at most 4 rows each: 3, 4 and 0 are taken
    for told, which end at rows 3, 7 and 7; of them 3, 2 and 0 lie in the chunk, from its rows 0, 3 and 7 on.
    """
    rank = tl.arange(0, RANKS)
    exists = rank < num_ranks
    room = tl.load(capacity + rank, mask=exists, other=0)[:, None]
    forward = tl.load(forward_first + rank, mask=exists, other=0)[:, None]
    backward = tl.load(back_first + rank, mask=exists, other=0)[:, None]
    header = tl.load(header_first + rank, mask=exists, other=-1)[:, None]
    packed = header >= 0
    told_before = tl.zeros([RANKS], tl.int64)
    first = 0
    while first < num_owned:
        place = first + tl.arange(0, OWNED)
        matrix = tl.load(owned + place, mask=place < num_owned, other=0)
        here = exists[:, None] & (place < num_owned)[None, :]
        known = count_by_rank + rank[:, None] * num_matrices + matrix[None, :]
        told = _told(arrived, header, place[None, :], here & packed)
        told += tl.load(known, mask=here & (header < 0), other=0)
        told = tl.minimum(tl.maximum(told, 0), max_rows)
        end = told_before[:, None] + tl.cumsum(told, 1)
        inside = tl.minimum(end, room) - tl.minimum(end - told, room)
        whole = tl.cumsum(inside, 0)
        inside = tl.minimum(whole, total_rows) - tl.minimum(whole - inside, total_rows)
        entry = rank[:, None] * num_owned + place[None, :]
        before = tl.where(packed, end - told, tl.load(slot_start + entry, mask=here, other=0))
        tl.store(count + entry, inside, mask=here)
        tl.store(start + entry, forward + before, mask=here)
        tl.store(back + entry, backward + before, mask=here)
        told_before += tl.sum(told, 1)
        first += OWNED


def read_headers(
    arrived: Tensor, count_by_rank: Tensor, tables: PoolTables, chunks: Chunks, *, max_rows: int, total_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same as `dion_comm_capped.places.read_headers` gives, in one launch."""
    num_ranks, num_owned = tables.slot_start.shape
    count, start, back = torch.empty(3, num_ranks, num_owned, dtype=torch.int64, device=arrived.device).unbind()
    ranks = power_of_two(num_ranks)
    launch(
        _read_headers_kernel, min(num_owned, 1), arrived.device,
        arrived, count_by_rank.contiguous(), tables.owned, tables.slot_start,
        chunks.capacity, chunks.forward_first, chunks.back_first, chunks.header_first, count, start, back,
        count_by_rank.shape[1], num_owned, num_ranks, max_rows, total_rows,
        warps=8, RANKS=ranks, OWNED=_columns(num_owned, ranks),
    )  # fmt: skip
    return count, start, back


@triton.jit(do_not_specialize=["num_matrices", "num_owners"])
def _rows_by_pair_kernel(
    count, place, pairs, num_matrices, num_owners, OWNERS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One source: how many of its rows go to every owner.

    Example: counts 5 2 4 of matrices whose owners have places 1 0 1 give 2 9.
    """
    source = tl.program_id(0).to(tl.int64)
    owner = tl.arange(0, OWNERS)
    rows = tl.zeros([OWNERS], tl.int64)
    first = 0
    while first < num_matrices:
        matrix = first + tl.arange(0, BLOCK)
        chosen = tl.load(count + source * num_matrices + matrix, mask=matrix < num_matrices, other=0)
        of = tl.load(place + matrix, mask=matrix < num_matrices, other=-1)
        rows += tl.sum(tl.where(of[None, :] == owner[:, None], chosen[None, :], 0), 1)
        first += BLOCK
    tl.store(pairs + source * num_owners + owner, rows, mask=owner < num_owners)


def rows_by_pair(counts: Sequence[Tensor], places: Sequence[Tensor], num_owners: Sequence[int]) -> Tensor:
    """The same as `dion_comm_capped.places.rows_by_pair` gives, in one launch a bucket."""
    sizes = [len(count) * owners for count, owners in zip(counts, num_owners, strict=True)]
    pairs = torch.empty(sum(sizes), dtype=torch.int64, device=counts[0].device)
    for count, place, owners, of_bucket in zip(counts, places, num_owners, pairs.split(sizes), strict=True):
        num_ranks, num_matrices = count.shape
        block = power_of_two(owners)
        launch(
            _rows_by_pair_kernel, num_ranks, pairs.device,
            count.contiguous(), place, of_bucket, num_matrices, owners,
            warps=4, OWNERS=block, BLOCK=_columns(num_matrices, block),
        )  # fmt: skip
    return pairs
