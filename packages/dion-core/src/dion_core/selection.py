"""Which rows of a momentum matrix are orthogonalized in a step.

A selector is mathematics alone: from row scores it makes the same `RowSelection` on every rank, on the device.
Legend: N matrices, R rows of a whole matrix, K slots a matrix, W ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dion_core.layout import Axis, Layout, RowTables, shard_segments
from dion_core.rows import SKIPPED_SCORE, RowSelection


def rows_to_select(fraction: float, rows: int) -> int:
    """How many of `rows` rows a fraction means: at least 1, else the ceiling; 0 of no rows.

    A small term keeps 0.07 of 100 at 7, although 0.07 * 100 is a little above 7 in floating point.
    """
    return max(1, math.ceil(fraction * rows - 1e-9 * rows)) if rows else 0


class Selector(Protocol):
    """A rule that chooses rows."""

    needs_all_scores: bool
    """Whether the scores of other ranks are needed to choose."""

    def offered(self, layout: Layout, rank: int, matrix: int) -> int:
        """The most rows of a matrix that the rank can have chosen."""

    def total(self, layout: Layout, matrix: int) -> int:
        """The most rows of a matrix that all ranks together can have chosen."""

    def select(self, scores: Tensor, tables: RowTables, active: Tensor) -> RowSelection:
        """The rows chosen.

        Args:
            scores: (N, R) of the whole matrices if all scores are needed, else (N, R local).
            tables: where the rows lie.
            active: (N,) bool; of a matrix that is not active no row is chosen.
        """


@dataclass(frozen=True)
class AllRows:
    """Every row: Muon and NorMuon."""

    needs_all_scores = False

    def offered(self, layout: Layout, rank: int, matrix: int) -> int:
        return layout.rows(rank, matrix)

    def total(self, layout: Layout, matrix: int) -> int:
        return layout.shape[0]

    def select(self, scores: Tensor, tables: RowTables, active: Tensor) -> RowSelection:
        num_matrices, rows = scores.shape
        index = torch.arange(rows, device=scores.device).expand(num_matrices, rows)
        return _selection(index, tables.num_rows * active, tables.layout.group.rank)


@dataclass(frozen=True)
class LocalRows:
    """The rows of the highest score of every shard: cheap, and dependent on the number of ranks.

    Every shard gives the same number of rows, the count for ceil(R / W) rows, or all it has if that is fewer.
    For matrices whose rows are split; elsewhere a local choice is the global one.
    """

    fraction: float
    needs_all_scores = False

    def offered(self, layout: Layout, rank: int, matrix: int) -> int:
        _, rows = shard_segments(layout.shape[0], layout.group.size)[0]
        return min(rows_to_select(self.fraction, rows), layout.rows(rank, matrix))

    def total(self, layout: Layout, matrix: int) -> int:
        return sum(self.offered(layout, rank, matrix) for rank in range(layout.group.size))

    def select(self, scores: Tensor, tables: RowTables, active: Tensor) -> RowSelection:
        layout = tables.layout
        count_by_rank = torch.tensor(
            [
                [self.offered(layout, rank, matrix) for matrix in range(layout.num_matrices)]
                for rank in range(layout.group.size)
            ],
            device=scores.device,
        ).view(layout.group.size, layout.num_matrices)
        most = max(
            (self.offered(layout, layout.group.rank, matrix) for matrix in range(layout.num_matrices)),
            default=0,
        )
        count_by_rank = count_by_rank * active
        count = count_by_rank[layout.group.rank]
        here = torch.arange(scores.shape[1], device=scores.device) < tables.num_rows[layout.group.rank][:, None]
        order = torch.where(here, scores, -torch.inf).argsort(dim=1, descending=True, stable=True)
        wanted = torch.arange(scores.shape[1], device=scores.device) < count[:, None]
        chosen = torch.zeros_like(wanted).scatter_(1, order, wanted)
        return _selection(_chosen_first(chosen)[:, :most], count_by_rank, layout.group.rank)


@dataclass(frozen=True)
class GlobalRows:
    """Exactly the rows of the highest score of the whole matrix, ties to the lower row, whatever W is."""

    fraction: float
    needs_all_scores = True

    def offered(self, layout: Layout, rank: int, matrix: int) -> int:
        return min(rows_to_select(self.fraction, layout.shape[0]), layout.rows(rank, matrix))

    def total(self, layout: Layout, matrix: int) -> int:
        return rows_to_select(self.fraction, layout.shape[0])

    def select(self, scores: Tensor, tables: RowTables, active: Tensor) -> RowSelection:
        layout = tables.layout
        num_matrices, rows = scores.shape
        best = scores.argsort(dim=1, descending=True, stable=True)[:, : self.total(layout, 0)]
        chosen = torch.zeros(num_matrices, rows, dtype=torch.bool, device=scores.device)
        chosen.scatter_(1, best, active[:, None].expand(best.shape))
        nowhere = chosen.new_zeros(1)
        here = torch.cat([chosen.flatten(), nowhere])[tables.position]
        most = min(self.total(layout, 0), here.shape[1])
        count_by_rank = _count_by_rank(chosen, tables)
        return _selection(_chosen_first(here)[:, :most], count_by_rank, layout.group.rank)


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


def _selection(index: Tensor, count_by_rank: Tensor, rank: int) -> RowSelection:
    return RowSelection(index, count_by_rank[rank], count_by_rank)


def whole_scores(local: Tensor, pieces: Sequence[Tensor], tables: RowTables) -> Tensor:
    """(N, R) scores of the whole matrices, bit-equal on all ranks.

    Args:
        local: (N, R local) scores of this rank, which are whole already where no axis is split.
        pieces: by rank, its (N * R local,) scores as gathered; empty where no axis is split.
        tables: where the rows lie.
    """
    layout = tables.layout
    num_matrices, rows = layout.num_matrices, layout.shape[0]
    if layout.axis is Axis.COLUMNS:  # a rank's score covers its columns only; summed in rank order
        parts = torch.stack([piece.view(num_matrices, rows) for piece in pieces])
        return torch.where((parts == SKIPPED_SCORE).any(dim=0), SKIPPED_SCORE, parts.sum(dim=0))
    if layout.axis is Axis.ROWS:
        whole = local.new_empty(num_matrices * rows + 1)
        whole.index_copy_(0, tables.gathered_position, torch.cat(list(pieces)))
        return whole[:-1].view(num_matrices, rows)
    return local
