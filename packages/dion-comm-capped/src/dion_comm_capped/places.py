"""What is written to pools and read from them beside the rows: slots, and counts in headers. Plain torch.

Legend: N matrices, B owned matrices, C columns, K slots a matrix, W ranks, S rows of a buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dion_comm_capped.pool import COUNT_BYTES, Chunks, PoolTables
from dion_core.rows import RowSelection


def slots(
    selection: RowSelection, tables: PoolTables, chunks: Chunks, *, sent_rows: int, returned_rows: int
) -> tuple[Tensor, Tensor]:
    """(N, K) int64 rows of the send buffer for the entries of the selection, and (N, K) rows where results come back.

    Args:
        selection: the rows admitted.
        tables: of the bucket.
        chunks: to every owner.
        sent_rows: rows that are sent; entries that are not admitted are past them.
        returned_rows: rows that come back; likewise.
    """
    size, owner, count = len(chunks.capacity), tables.owner[:, None], selection.count
    used = torch.where(chunks.packed[tables.owner], count, tables.offered)
    by_owner = torch.zeros(len(count), size, dtype=torch.int64, device=count.device).scatter_(1, owner, used[:, None])
    offset = (by_owner.cumsum(0) - by_owner).gather(1, owner)
    place = offset + torch.arange(selection.index.shape[1], device=count.device)
    valid = selection.valid()
    slot = torch.where(valid, chunks.forward_first[owner] + place, sent_rows)
    back = torch.where(valid, chunks.back_first[owner] + place, returned_rows)
    return slot, back


def write_headers_(values: Tensor, count: Tensor, tables: PoolTables, chunks: Chunks) -> None:
    """Writes the counts in front of the rows, bit-cast; bytes are copied, so that no value can become a NaN.

    Args:
        values: (S, C) the send buffer; past what is sent it has `COUNT_BYTES` at least, where anything may be written.
        count: (N,) int64, the rows admitted of every matrix.
        tables: of the bucket.
        chunks: to every owner.
    """
    counts = count.to(torch.int32).view(torch.uint8).view(-1, COUNT_BYTES)
    # Where a pair is not packed there is no header: its count goes past what is sent.
    spare = values.numel() * values.element_size() - COUNT_BYTES
    first = chunks.header_first[tables.owner]
    first = torch.where(first >= 0, first + COUNT_BYTES * tables.number, spare)
    place = first[:, None] + torch.arange(COUNT_BYTES, device=values.device)
    values.view(torch.uint8).flatten().index_copy_(0, place.flatten(), counts.flatten())


def read_headers(
    arrived: Tensor, count_by_rank: Tensor, tables: PoolTables, chunks: Chunks, *, max_rows: int, total_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(W, B) int64 each: rows of every source and matrix, where they start in what was received, and on the way back.

    Rows are clipped so that none lies outside its chunk or matrix, whatever a header says.

    Args:
        arrived: flat, what was received, and at least `COUNT_BYTES` more.
        count_by_rank: (W, N) int64, the rows chosen, which all ranks know; right where a pair is not packed.
        tables: of the bucket.
        chunks: from every source.
        max_rows: the most rows of one source and matrix.
        total_rows: the most rows of one matrix.
    """
    packed = chunks.packed[:, None]
    header = chunks.header_first[:, None] + COUNT_BYTES * torch.arange(len(tables.owned), device=arrived.device)
    place = torch.where(packed, header, 0)[:, :, None] + torch.arange(COUNT_BYTES, device=arrived.device)
    told = arrived.view(torch.uint8)[place.flatten()].view(torch.int32).long()
    known = count_by_rank.index_select(1, tables.owned)
    told = torch.where(packed, told.view(known.shape), known).clamp(0, max_rows)
    end = told.cumsum(1)
    count = end.minimum(chunks.capacity[:, None]).diff(dim=1, prepend=torch.zeros_like(end[:, :1]))
    count = count.cumsum(0).clamp(max=total_rows).diff(dim=0, prepend=torch.zeros_like(count[:1]))
    before = torch.where(packed, end - told, tables.slot_start)
    return count, chunks.forward_first[:, None] + before, chunks.back_first[:, None] + before


def rows_by_pair(counts: Sequence[Tensor], places: Sequence[Tensor], num_owners: Sequence[int]) -> Tensor:
    """Flat int64: for every bucket (W, D) rows chosen by source and owner.

    Args:
        counts: of every bucket (W, N) int64, the rows chosen by source and matrix.
        places: of every bucket (N,) int64, the place of every matrix' owner among the D.
        num_owners: of every bucket D.
    """
    pairs = []
    for count, place, owners in zip(counts, places, num_owners, strict=True):
        by_owner = count.new_zeros(len(count), owners)
        pairs.append(by_owner.index_add_(1, place, count).flatten())
    return torch.cat(pairs)
