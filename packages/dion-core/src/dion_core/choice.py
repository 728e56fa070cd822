"""The best rows of matrices by their scores, ties to the lower row, defined in plain torch.

Legend: N matrices, R rows of a whole matrix, K slots a matrix, W ranks.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dion_core.layout import Axis, RowTables
from dion_core.rows import RowSelection


def choose(scores: Tensor, tables: RowTables, active: Tensor, *, total: int, offer: int) -> RowSelection:
    """The `total` best rows of each matrix, of which this rank has at most `offer`.

    Args:
        scores: (N, R) of the whole matrices: >= 0, or `SKIPPED_SCORE`, or -inf, which come last in this order.
        tables: where the rows lie.
        active: (N,) bool; of a matrix that is not active no row is chosen.
        total: rows to choose of one matrix.
        offer: K, the most rows of one matrix that one rank can have chosen.
    """
    best = scores.argsort(dim=1, descending=True, stable=True)[:, :total]
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    chosen.scatter_(1, best, active[:, None].expand(best.shape))
    ratio = _ratio(scores, scores.gather(1, best[:, -1:]))
    index = _chosen_first(_here(chosen, tables))[:, :offer]
    count_by_rank = _count_by_rank(chosen, tables)
    selection = RowSelection.unranked(index, count_by_rank[tables.layout.group.rank], count_by_rank)
    return replace(selection, ratio=_here(ratio, tables).gather(1, index))


def choose_local(scores: Tensor, tables: RowTables, active: Tensor, *, share: int) -> RowSelection:
    """The best rows of every shard: `share` of each, or all it has if that is fewer.

    Args:
        scores: (N, R local), as in `choose`; past a matrix's last local row anything.
        tables: where the rows lie.
        active: (N,) bool; of a matrix that is not active no row is chosen.
        share: rows to choose of one shard.
    """
    rank = tables.layout.group.rank
    count_by_rank = tables.num_rows.clamp(max=share) * active
    place = torch.arange(scores.shape[1], device=scores.device)
    here = place < tables.num_rows[rank][:, None]
    order = torch.where(here, scores, -torch.inf).argsort(dim=1, descending=True, stable=True)
    wanted = place < count_by_rank[rank][:, None]
    chosen = torch.zeros_like(wanted).scatter_(1, order, wanted)
    return RowSelection.unranked(_chosen_first(chosen)[:, :share], count_by_rank[rank], count_by_rank)


def _chosen_first(chosen: Tensor) -> Tensor:
    """(N, R) row numbers, the chosen ones first, both parts ascending."""
    return (~chosen).to(torch.uint8).argsort(dim=1, stable=True)


def _count_by_rank(chosen: Tensor, tables: RowTables) -> Tensor:
    """(W, N): how many of the (N, R) chosen rows every rank holds (all of them where rows are not split)."""
    layout = tables.layout
    if layout.axis is not Axis.ROWS:
        return chosen.sum(dim=1).expand(layout.group.size, -1)
    counts = torch.zeros(layout.num_matrices, layout.group.size, dtype=torch.int64, device=chosen.device)
    return counts.scatter_add_(1, tables.rank_of_row, chosen.long()).T.contiguous()


def _here(whole: Tensor, tables: RowTables) -> Tensor:
    """(N, R local): what of (N, R) values lies on this rank; zero past a matrix's last local row."""
    return torch.cat([whole.flatten(), whole.new_zeros(1)])[tables.position]


def _ratio(scores: Tensor, threshold: Tensor) -> Tensor:
    """(N, R) scores over the (N, 1) threshold; 0 for scores of 0 and of rows that were left out."""
    return torch.where(scores > 0, scores / threshold.clamp(min=0), 0)
