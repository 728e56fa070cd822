"""Whole matrices out of rows that several senders put into slots of their own, and back.

Legend: N matrices counted, B matrices to build, C columns, W senders, S rows of a buffer, T rows of one matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor


def compact(count: Tensor, start: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The rows that make up whole matrices, when every sender fills the first slots of its own.

    Args:
        count: (W, B) int64, used slots by sender and matrix.
        start: (W, B) int64, the row where they start.
        total: T, rows of one matrix.

    Returns:
        source (B, T) int64 and valid (B, T) bool: row t of matrix b is row source[b, t] where valid, ordered
        by sender; where not valid the matrix has fewer than T rows and source is 0.

    Example:
        count [[2], [1]] and start [[0], [4]] with total 4 give source [[0, 1, 4, 0]] and valid [[1, 1, 1, 0]].
    """
    end = count.T.cumsum(dim=1).contiguous()  # (B, W)
    place = torch.arange(total, device=count.device).expand(end.shape[0], total).contiguous()
    valid = place < end[:, -1:]
    sender = torch.searchsorted(end, place, right=True).clamp_(max=end.shape[1] - 1)
    source = (start.T - end + count.T).gather(1, sender) + place
    return torch.where(valid, source, 0), valid


def collect(rows: Tensor, count: Tensor, start: Tensor, total: int, owned: Tensor | None = None) -> Tensor:
    """(B, T, C) matrices in fresh storage: for each its used slots, sender after sender, then zero rows.

    Args:
        rows: (S, C), what was received, contiguous.
        count: (W, N) int64, used slots by sender and matrix; of one matrix at most T in all.
        start: (W, B) int64, the row where they start.
        total: T, rows of one matrix.
        owned: (B,) int64, which of the N counted matrices to build; None: all of them.
    """
    source, valid = compact(_of_owned(count, owned), start, total)
    if not rows.shape[0]:  # nothing was sent in this step
        return rows.new_zeros(*source.shape, rows.shape[1])
    matrices = rows.index_select(0, source.flatten()).view(*source.shape, rows.shape[1])
    return matrices.masked_fill_(~valid[:, :, None], 0)


def places(count: Tensor, start: Tensor, total: int, owned: Tensor | None = None) -> Tensor:
    """(B, T) int64: which row of the buffer is row t of matrix b, as in `collect`; -1 where there is none."""
    source, valid = compact(_of_owned(count, owned), start, total)
    return torch.where(valid, source, -1)


def spread_(rows: Tensor, matrices: Tensor, count: Tensor, start: Tensor, owned: Tensor | None = None) -> None:
    """The reverse of `collect`: writes the rows of (B, T, C) `matrices` to their slots in `rows` (S, C)."""
    place, valid = compact(_of_owned(count, owned), start, matrices.shape[1])
    padded = torch.cat([rows, rows.new_empty(1, rows.shape[1])])  # the last one takes what is not valid
    padded.index_copy_(0, torch.where(valid, place, len(rows)).flatten(), matrices.flatten(0, 1))
    rows.copy_(padded[:-1])


def _of_owned(count: Tensor, owned: Tensor | None) -> Tensor:
    return count if owned is None else count.index_select(1, owned)
