"""Which winners go when a pool has too few slots.

Order: rows that have waited `max_wait` steps or more, oldest first; then the highest ratio of score to
threshold (scores of different matrices are not comparable as they are); then the lower row.

Legend: N matrices, K slots a matrix, W ranks.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dion_comm_capped.pool import Chunks, PoolTables
from dion_core.rows import RowSelection


def admit(selection: RowSelection, tables: PoolTables, chunks: Chunks, *, max_wait: int) -> RowSelection:
    """The selection with only the entries that their owner's pool has room for: see `strongest` and `keep`."""
    return keep(selection, strongest(selection, tables.owner, chunks.capacity, max_wait=max_wait))


def strongest(selection: RowSelection, owner: Tensor, capacity: Tensor, *, max_wait: int) -> Tensor:
    """(N, K) bool: the entries of the selection that their owner's pool has room for.

    Args:
        selection: the winners of this rank.
        owner: (N,) int64, the owner of each matrix.
        capacity: (W,) int64, rows that this rank can send to each owner.
        max_wait: from how many steps on a row goes first.
    """
    valid = selection.valid()
    # Slot by slot, so that among equals no matrix stands before the others.
    ratio = selection.ratio.T.flatten()
    age = selection.age.T.flatten()
    overdue = torch.where(age >= max_wait, age, 0)
    pool = torch.where(valid, owner[:, None], len(capacity)).T.flatten()
    order = ratio.argsort(descending=True, stable=True)
    order = order[overdue[order].argsort(descending=True, stable=True)]
    order = order[pool[order].argsort(stable=True)]
    size = torch.zeros(len(capacity) + 1, dtype=torch.int64, device=pool.device)
    size.scatter_add_(0, pool, torch.ones_like(pool))
    place = torch.arange(len(order), device=pool.device) - (size.cumsum(0) - size)[pool[order]]
    room = torch.cat([capacity, capacity.new_zeros(1)])
    admitted = torch.zeros_like(pool, dtype=torch.bool)
    admitted[order] = place < room[pool[order]]
    return admitted.view(selection.index.T.shape).T


def keep(selection: RowSelection, admitted: Tensor) -> RowSelection:
    """The selection with only the (N, K) admitted entries, ascending; the others follow as not chosen."""
    first = (~admitted).to(torch.uint8).argsort(dim=1, stable=True)
    return replace(
        selection,
        index=selection.index.gather(1, first),
        ratio=selection.ratio.gather(1, first),
        age=selection.age.gather(1, first),
        count=admitted.sum(dim=1),
    )
