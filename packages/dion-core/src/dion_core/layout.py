"""Where the rows of a matrix lie: which axis is split, over which ranks, and at which offsets.

Everything is computed from shapes and placements. No collective is needed, hence none can hang.

On a mesh of several axes the ranks of a layout's group are one line of the mesh. An `OuterAxis` stands for the lines
beside it, which hold the same rows: as copies, or other columns of them. All ranks of all lines share the work.

Legend: N matrices of a bucket, R rows and C columns of one whole matrix, W ranks of the group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

import torch
from torch import Tensor

from dion_core.collectives import Group


class Axis(StrEnum):
    """Which axis of a matrix is split over the ranks of its group."""

    ROWS = "rows"  # every rank holds some rows: Shard(0)
    COLUMNS = "columns"  # every rank holds some columns of every row: Shard(1)
    REPLICATED = "replicated"  # every rank holds the whole matrix, and the ranks share the work
    WHOLE = "whole"  # this rank holds the whole matrix and works alone


Segment = tuple[int, int]  # (offset, length) along the split axis


def shard_segments(length: int, world_size: int) -> tuple[Segment, ...]:
    """The (offset, length) of every rank's shard when `length` is split as DTensor's `Shard` splits it.

    Every rank gets ceil(length / world_size) until nothing is left: 18 over 8 gives 3, 3, 3, 3, 3, 3, 0, 0.
    """
    size = -(-length // world_size)
    offsets = [min(rank * size, length) for rank in range(world_size)]
    return tuple((offset, min(size, length - offset)) for offset in offsets)


@dataclass(frozen=True)
class OuterAxis:
    """Ranks that hold the same rows as this one does, each on a line of the mesh of its own.

    Attributes:
        group: those ranks, this one included.
        axis: REPLICATED, if they hold copies; COLUMNS, if they hold other columns.
        columns: the (offset, length) of the columns that each of them holds; empty where they hold copies.
    """

    group: Group
    axis: Axis
    columns: tuple[Segment, ...] = ()


@dataclass(frozen=True)
class Layout:
    """How N matrices of one shape lie on the ranks of a group.

    Attributes:
        group: the ranks that hold parts of the matrices. Their order is that of their rows, or of their columns.
        axis: which axis is split over them.
        shape: (R, C) of one whole matrix.
        segments: segments[rank][matrix] = the (offset, length) pieces of that matrix on that rank along the
            split axis, ascending. Where nothing is split every rank has the one piece (0, R).
        outer: the other axes of the mesh, outermost first: copies, then columns.
        workers: the global ranks that share the work, an outer axis changing slower than what is inside it; empty
            where they are those of the group.
    """

    group: Group
    axis: Axis
    shape: tuple[int, int]
    segments: tuple[tuple[tuple[Segment, ...], ...], ...]
    outer: tuple[OuterAxis, ...] = ()
    workers: tuple[int, ...] = ()

    @property
    def num_matrices(self) -> int:
        return len(self.segments[0])

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that share the work."""
        return self.workers or self.group.ranks

    @property
    def num_workers(self) -> int:
        """How many ranks share the work."""
        return math.prod(outer.group.size for outer in self.outer) * self.group.size

    @property
    def worker(self) -> int:
        """This rank's number among those that share the work."""
        number = 0
        for group in (*(outer.group for outer in self.outer), self.group):
            number = number * group.size + group.rank
        return number

    @property
    def column_groups(self) -> tuple[Group, ...]:
        """The groups whose ranks hold other columns of the same rows."""
        groups = [outer.group for outer in self.outer if outer.axis is Axis.COLUMNS]
        return (*groups, self.group) if self.axis is Axis.COLUMNS else tuple(groups)

    def rows(self, rank: int, matrix: int) -> int:
        """How many rows (whole ones, or pieces of rows where columns are split) the rank holds."""
        return self.shape[0] if self.axis is Axis.COLUMNS else self._held[rank][matrix]

    @cached_property
    def _held(self) -> tuple[tuple[int, ...], ...]:
        """What every rank holds of every matrix along the split axis, which for most is one piece."""
        return tuple(
            tuple(pieces[0][1] if len(pieces) == 1 else sum(length for _, length in pieces) for pieces in of_rank)
            for of_rank in self.segments
        )

    def max_rows(self, rank: int) -> int:
        """The most rows that the rank holds of any matrix."""
        return self._max_rows[rank]

    @cached_property
    def _max_rows(self) -> tuple[int, ...]:
        matrices = range(self.num_matrices)
        return tuple(
            max((self.rows(rank, matrix) for matrix in matrices), default=0) for rank in range(self.group.size)
        )

    def columns(self, rank: int) -> int:
        """How many columns the rank holds of every row."""
        if self.axis is not Axis.COLUMNS:
            held = [outer.columns[outer.group.rank][1] for outer in self.outer if outer.axis is Axis.COLUMNS]
            return held[0] if held else self.shape[1]
        return sum(length for _, length in self.segments[rank][0]) if self.num_matrices else 0

    def local_shape(self, matrix: int = 0) -> tuple[int, int]:
        """The shape of this rank's part of a matrix."""
        return self.rows(self.group.rank, matrix), self.columns(self.group.rank)

    @cached_property
    def num_holders(self) -> int:
        """How many ranks hold rows of the first matrix; the size of the group where they are not split."""
        held = [self.rows(rank, 0) > 0 for rank in range(self.group.size)]
        return sum(held) if self.axis is Axis.ROWS else self.group.size

    def stack(self, num_matrices: int) -> Layout:
        """The layout of `num_matrices` matrices that all lie as the one matrix of this layout does."""
        return replace(self, segments=tuple(of_rank * num_matrices for of_rank in self.segments))

    def share(self, first: int, last: int) -> Layout:
        """The layout of matrices first to last - 1, to the ranks that lie on one line of the outermost axis."""
        segments = tuple(of_rank[first:last] for of_rank in self.segments)
        return replace(self, segments=segments, outer=self.outer[1:], workers=())


def in_pieces(layout: Layout) -> bool:
    """Whether a matrix lies in pieces on several ranks."""
    return layout.axis in (Axis.ROWS, Axis.COLUMNS)


def joined(layouts: Sequence[Layout]) -> Layout:
    """The layout of all the matrices of layouts that have their group, axis and shape in common."""
    first = layouts[0]
    by_rank = zip(*(layout.segments for layout in layouts), strict=True)
    return replace(first, segments=tuple(tuple(matrix for part in parts for matrix in part) for parts in by_rank))


def split_layout(group: Group, axis: Axis, shape: tuple[int, int]) -> Layout:
    """The layout of one matrix whose rows or columns are split evenly, as DTensor's `Shard` does."""
    length = shape[1] if axis is Axis.COLUMNS else shape[0]
    if axis in (Axis.REPLICATED, Axis.WHOLE):
        pieces: tuple[Segment, ...] = ((0, length),) * group.size
    else:
        pieces = shard_segments(length, group.size)
    return Layout(group, axis, shape, tuple((((offset, size),),) for offset, size in pieces))


@dataclass(frozen=True)
class RowTables:
    """Static tables that translate between a rank's rows and the rows of the whole matrices, on one device."""

    layout: Layout
    device: torch.device

    @cached_property
    def position(self) -> Tensor:
        """(N, R local) int64: place of every local row among the N * R rows of all matrices.

        Places past a matrix's last local row hold N * R, which is a place that no row has.
        """
        return self._position(self.layout.group.rank)

    def place_in(self, starts: Sequence[int]) -> Tensor:
        """(N, R) int64: the place of every row in a buffer where each rank's (N, R local) values begin at starts[rank].

        Only for matrices whose rows are split.
        """
        num_matrices, rows = self.layout.num_matrices, self.layout.shape[0]
        table = torch.empty(num_matrices * rows + 1, dtype=torch.int64, device=self.device)
        for rank, start in enumerate(starts):
            position = self._position(rank).flatten()
            table[position] = start + torch.arange(len(position), device=self.device)
        return table[:-1].view(num_matrices, rows)

    @cached_property
    def every_row(self) -> tuple[Tensor, Tensor, Tensor]:
        """(N, R local) each: the numbers of this rank's rows (int64), ones (fp32), and zeros (int32)."""
        shape = (self.layout.num_matrices, self.layout.max_rows(self.layout.group.rank))
        numbers = torch.arange(shape[1], device=self.device).expand(shape).contiguous()
        zeros = torch.zeros(shape, dtype=torch.int32, device=self.device)
        return numbers, torch.ones(shape, device=self.device), zeros

    @cached_property
    def rank_of_row(self) -> Tensor:
        """(N, R) int64: the rank that holds each row. Only for matrices whose rows are split."""
        pieces = sorted(
            (matrix, offset, length, rank)
            for rank, matrices in enumerate(self.layout.segments)
            for matrix, of_matrix in enumerate(matrices)
            for offset, length in of_matrix
        )
        length, rank = torch.tensor([piece[2:] for piece in pieces], dtype=torch.int64).view(-1, 2).T
        table: Tensor = rank.repeat_interleave(length).view(self.layout.num_matrices, self.layout.shape[0])
        return table.to(self.device)

    @cached_property
    def num_rows(self) -> Tensor:
        """(W, N) int64: how many rows every rank holds of every matrix."""
        layout = self.layout
        counts = [
            [layout.rows(rank, matrix) for matrix in range(layout.num_matrices)] for rank in range(layout.group.size)
        ]
        shape = (layout.group.size, layout.num_matrices)
        return torch.tensor(counts, dtype=torch.int64).reshape(shape).to(self.device)

    def _position(self, rank: int) -> Tensor:
        layout = self.layout
        num_matrices, rows = layout.num_matrices, layout.shape[0]
        table = torch.full((num_matrices, layout.max_rows(rank)), num_matrices * rows)
        for matrix in range(num_matrices):
            if layout.axis is Axis.ROWS:
                pieces = layout.segments[rank][matrix]
            else:
                pieces = ((0, rows),)
            numbers = [torch.arange(offset, offset + length) for offset, length in pieces]
            local = torch.cat(numbers) if numbers else torch.empty(0, dtype=torch.int64)
            table[matrix, : local.numel()] = local + matrix * rows
        return table.to(self.device)
