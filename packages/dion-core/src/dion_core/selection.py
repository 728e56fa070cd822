"""Which rows of a momentum matrix are orthogonalized in a step.

A selector is mathematics alone: from row scores it makes the same `RowSelection` on every rank, on the device.
Legend: N matrices, R rows of a whole matrix, K slots a matrix, W ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from dion_core.layout import Layout, RowTables
from dion_core.matrices import ALIGNMENT
from dion_core.ops import choose, choose_local
from dion_core.rows import SKIPPED_SCORE, RowSelection


def rows_to_select(fraction: float, rows: int) -> int:
    """How many of `rows` rows a fraction means: at least 1, else the ceiling; 0 of no rows.

    A small term keeps 0.07 of 100 at 7, although 0.07 * 100 is a little above 7 in floating point.
    """
    return max(1, math.ceil(fraction * rows - 1e-9 * rows)) if rows else 0


class Selector(Protocol):
    """A rule that chooses rows."""

    needs_scores: bool
    """Whether the scores of this rank's rows are needed to choose."""
    needs_all_scores: bool
    """Whether the scores of other ranks' rows are needed to choose."""

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
    """Every row: Muon, NorMuon, and Dion2 with scope "all"."""

    needs_scores, needs_all_scores = False, False

    def offered(self, layout: Layout, rank: int, matrix: int) -> int:
        return layout.rows(rank, matrix)

    def total(self, layout: Layout, matrix: int) -> int:
        return layout.shape[0]

    def select(self, scores: Tensor, tables: RowTables, active: Tensor) -> RowSelection:
        count_by_rank = tables.num_rows * active
        index, ratio, age = tables.every_row
        return RowSelection(index, count_by_rank[tables.layout.group.rank], count_by_rank, ratio, age)


@dataclass(frozen=True)
class LocalRows:
    """The rows of the highest score of every shard: cheap, and dependent on the number of ranks.

    Every shard gives the same number of rows, the count for ceil(R / W) rows, or all it has if that is fewer.
    For matrices whose rows are split; elsewhere a local choice is the global one.

    Attributes:
        fraction: of the rows of a shard.
        shards: W, where it is not the size of the group: of one of many heads few ranks hold rows.
    """

    fraction: float
    shards: int | None = field(default=None, repr=False)
    needs_scores, needs_all_scores = True, False

    def offered(self, layout: Layout, rank: int, matrix: int) -> int:
        return min(self._share(layout), layout.rows(rank, matrix))

    def total(self, layout: Layout, matrix: int) -> int:
        return sum(self.offered(layout, rank, matrix) for rank in range(layout.group.size))

    def select(self, scores: Tensor, tables: RowTables, active: Tensor) -> RowSelection:
        return choose_local(scores, tables, active, share=self._share(tables.layout))

    def _share(self, layout: Layout) -> int:
        """The rows that a full shard gives."""
        return rows_to_select(self.fraction, -(-layout.shape[0] // (self.shards or layout.group.size)))


@dataclass(frozen=True)
class GlobalRows:
    """Exactly the rows of the highest score of the whole matrix, ties to the lower row, whatever W is."""

    fraction: float
    needs_scores, needs_all_scores = True, True

    def offered(self, layout: Layout, rank: int, matrix: int) -> int:
        return min(rows_to_select(self.fraction, layout.shape[0]), layout.rows(rank, matrix))

    def total(self, layout: Layout, matrix: int) -> int:
        return rows_to_select(self.fraction, layout.shape[0])

    def select(self, scores: Tensor, tables: RowTables, active: Tensor) -> RowSelection:
        total = self.total(tables.layout, 0)
        return choose(scores, tables, active, total=total, offer=total)


@dataclass(frozen=True)
class SlackRows:
    """The best rows of the union of what every shard offers: its own best, `slack` times its share.

    All ranks find the same rows from the gathered scores. With slack 1 it is the local choice, where W divides R
    and the share is a whole number; from slack 1 / fraction on it is the global one.
    """

    fraction: float
    slack: float
    shards: int | None = field(default=None, repr=False)
    needs_scores, needs_all_scores = True, True

    def offered(self, layout: Layout, rank: int, matrix: int) -> int:
        return min(self._offer(layout), layout.rows(rank, matrix))

    def total(self, layout: Layout, matrix: int) -> int:
        offered = sum(self.offered(layout, rank, matrix) for rank in range(layout.group.size))
        return min(rows_to_select(self.fraction, layout.shape[0]), offered)

    def select(self, scores: Tensor, tables: RowTables, active: Tensor) -> RowSelection:
        best = scores.argsort(dim=1, descending=True, stable=True)
        best = best.gather(1, tables.rank_of_row.gather(1, best).argsort(dim=1, stable=True))  # shard by shard
        rank = tables.rank_of_row.gather(1, best)
        place = torch.arange(best.shape[1], device=best.device) - _rows_before(tables).gather(1, rank)
        candidate = torch.zeros_like(scores, dtype=torch.bool)
        candidate.scatter_(1, best, place < self._offer(tables.layout))
        masked = torch.where(candidate, scores, -torch.inf)
        total, offer = self.total(tables.layout, 0), self._offer(tables.layout)
        return choose(masked, tables, active, total=total, offer=offer)

    def _offer(self, layout: Layout) -> int:
        """The rows that a full shard offers."""
        share = rows_to_select(self.fraction, -(-layout.shape[0] // (self.shards or layout.group.size)))
        return math.ceil(self.slack * share - 1e-9)


def _rows_before(tables: RowTables) -> Tensor:
    """(N, W) int64: how many rows of each matrix lie on the ranks before."""
    rows = tables.num_rows.T
    return rows.cumsum(1) - rows


class WholeScores:
    """Puts the scores of all ranks together, by tables that are made once, since they are the same in every step."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], Tensor] = {}

    def of_rows(
        self, gathered: Tensor, starts: Mapping[int, Sequence[int]], tables: Mapping[int, RowTables]
    ) -> dict[int, Tensor]:
        """(N, R) scores of the whole matrices of several buckets whose rows are split, bit-equal on all ranks.

        Args:
            gathered: 1-D, the scores of all ranks.
            starts: by number of the bucket and by rank, where its (N, R local) scores begin in `gathered`; for the same
                buckets always the same.
            tables: by number of the bucket, where the rows lie.
        """
        places = self._places.get(tuple(starts))
        if places is None:
            of_each = [tables[number].place_in(each).flatten() for number, each in starts.items()]
            places = self._places[tuple(starts)] = torch.cat([_padded(each) for each in of_each])
        whole, start, found = gathered.take(places), 0, dict[int, Tensor]()
        for number in starts:
            layout = tables[number].layout
            size = layout.num_matrices * layout.shape[0]
            found[number] = whole[start : start + size].view(layout.num_matrices, layout.shape[0])
            start += size + -size % ALIGNMENT
        return found


def _padded(places: Tensor) -> Tensor:
    """So long that what follows starts at a multiple of 16 bytes: kernels are compiled for that."""
    return torch.nn.functional.pad(places, (0, -len(places) % ALIGNMENT))


def added_scores(local: Tensor, gathered: Tensor, starts: Sequence[int]) -> Tensor:
    """(N, R) scores of whole rows, where every rank has those of its columns: their sum, in rank order.

    A row that one rank left out is left out.

    Args:
        local: (N, R) scores of this rank.
        gathered: 1-D, the scores of all ranks.
        starts: by rank, where its scores begin in `gathered`.
    """
    parts = torch.stack([gathered[start : start + local.numel()] for start in starts])
    whole = torch.where((parts == SKIPPED_SCORE).any(dim=0), SKIPPED_SCORE, parts.sum(dim=0))
    return whole.view(local.shape)
