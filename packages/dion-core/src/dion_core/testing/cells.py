"""The cells of the conformance suite: what a transport is asked to move, and proof that a cell is what it says.

A cell is a `Case`. `problems` turns it into the same buckets and momentum matrices on every rank, and `vacuous`
says where a cell does not test what its name promises.

Legend: N matrices, R rows and C columns of a whole matrix, K slots a matrix, W ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from dion_core.collectives import Group
from dion_core.layout import Axis, Layout, RowTables, Segment, shard_segments
from dion_core.ownership import assign_owners, newton_schulz_cost
from dion_core.rows import RowSelection, accumulation_dtype
from dion_core.rules import selector
from dion_core.selection import Selector
from dion_core.transport import Bucket, Scope, Transport

Shards = Literal["even", "uneven", "empty", "skewed", "few", "ragged"]
"""How the split axis lies on the ranks: one has none of it (empty); one has all winners, or most rows where all
shards give some (skewed); fewer rows than ranks (few); every matrix differently (ragged, as heads do)."""

Twist = Literal["plain", "inactive", "idle", "short", "zeros", "permuted", "together", "steps"]
"""What is special besides: no row is chosen of one matrix (inactive), of any (idle), or fewer than there may be
(short); nearly all rows are zero; compared with the result of the rows in another order; three unlike buckets
are in flight; three steps."""

NUM_STEPS = 3
_FRACTION = 0.25  # of the rows, where rows are chosen
_SHARD = 6  # rows (or columns) of an even shard
_OTHER = 10  # length of the axis that is not split
_TWISTS: tuple[Twist, ...] = ("inactive", "idle", "short", "zeros", "permuted", "together", "steps")
_DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Case:
    """One cell. Its text names it in failures and seeds its matrices."""

    scope: Scope
    axis: Axis
    shards: Shards
    num_matrices: int
    dtype: torch.dtype
    twist: Twist = "plain"

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        twist = "" if self.twist == "plain" else f" {self.twist}"
        return f"{self.scope} {self.axis} {self.shards} x{self.num_matrices} {dtype}{twist}"


def cases(transport: Transport | type[Transport], world_size: int) -> Iterator[Case]:
    """Every cell that the transport is to pass on so many ranks: all scopes and axes that it serves.

    One rank has nothing to split, hence even shards alone.
    """
    for scope, axis in product(sorted(transport.scopes), sorted(transport.axes)):
        splits = world_size > 1 and axis in (Axis.ROWS, Axis.COLUMNS)
        kinds: tuple[Shards, ...] = ("even", "uneven", "empty", "skewed") if splits else ("even",)
        for shards, num_matrices, dtype in product(kinds, (1, 3, 5), _DTYPES):
            yield Case(scope, axis, shards, num_matrices, dtype)
        for twist in _TWISTS:
            # Another order or number of rows changes the rounding, which fp64 tells from an error.
            dtype = torch.float64 if twist in ("permuted", "short") else torch.float32
            yield Case(scope, axis, "uneven" if splits else "even", 3, dtype, twist)
        if splits:
            yield Case(scope, axis, "few", 3, torch.float32)
        if splits and axis is Axis.ROWS:
            yield Case(scope, axis, "ragged", 3, torch.float32)


@dataclass(frozen=True)
class Problem:
    """One bucket, and the matrices that are to be orthogonalized in a step.

    Attributes:
        bucket: as a transport opens it.
        selector: which rows are chosen.
        whole: (N, R, C) the whole momentum matrices, fp64 or fp32, alike on every rank.
        active: (N,) bool, the matrices of which rows are chosen.
        fewer: (N,) int64, how many of them every rank leaves out again, if it has so many.
    """

    bucket: Bucket
    selector: Selector
    whole: Tensor
    active: Tensor
    fewer: Tensor

    @cached_property
    def tables(self) -> RowTables:
        """Where the rows lie."""
        return RowTables(self.bucket.layout, self.bucket.device)

    def local(self, whole: Tensor) -> list[Tensor]:
        """Copies of this rank's part of each of the (N, R, C) matrices."""
        layout = self.bucket.layout
        dim = {Axis.ROWS: 0, Axis.COLUMNS: 1}.get(layout.axis)
        if dim is None:
            return [matrix.clone() for matrix in whole]
        parts = zip(whole, layout.segments[layout.group.rank], strict=True)
        return [torch.cat([matrix.narrow(dim, *piece) for piece in pieces], dim) for matrix, pieces in parts]

    @cached_property
    def selected(self) -> RowSelection:
        """The rows chosen by their L1 norms, which need no communication here."""
        dtype = accumulation_dtype(self.whole.dtype)
        scores = self.whole.abs().sum(dim=2, dtype=dtype)
        if not self.selector.needs_all_scores:
            scores = torch.cat([scores.flatten(), scores.new_zeros(1)])[self.tables.position]
        chosen = self.selector.select(scores, self.tables, self.active)
        by_rank = (chosen.count_by_rank - self.fewer).clamp(min=0)
        return RowSelection.unranked(chosen.index, by_rank[self.bucket.layout.group.rank], by_rank)


def problems(case: Case, group: Group, device: torch.device, step: int = 0) -> list[Problem]:
    """The buckets of one optimizer for this cell, with the momentum of that step."""
    parts: list[tuple[Shards, int, torch.dtype]] = [(case.shards, case.num_matrices, case.dtype)]
    if case.twist == "together":
        other: Shards = "even" if group.size == 1 else "skewed"
        parts += [("even", 2, torch.float64), (other, 1, torch.bfloat16)]
    layouts = [_layout(case, shards, number, group) for shards, number, _ in parts]
    selectors = [selector(case.scope, _FRACTION, case.axis) for _ in parts]
    costs = [
        newton_schulz_cost(rule.total(layout, 0), layout.shape[1])
        for rule, layout in zip(selectors, layouts, strict=True)
        for _ in range(layout.num_matrices)
    ]
    owners = iter(assign_owners(costs, [group] * len(costs))[0])
    made = []
    for number, ((shards, _, dtype), layout, rule) in enumerate(zip(parts, layouts, selectors, strict=True)):
        bucket = _bucket(layout, rule, [next(owners) for _ in range(layout.num_matrices)], dtype, device)
        active = torch.full((bucket.num_matrices,), case.twist != "idle", device=device)
        if case.twist == "inactive":
            active[1] = False
        fewer = torch.arange(bucket.num_matrices, device=device) * (case.twist == "short")
        whole = _momentum(case, shards, bucket, zlib.crc32(f"{case} {step} {number}".encode()))
        made.append(Problem(bucket, rule, whole, active, fewer))
    return made


def vacuous(case: Case, problem: Problem, chosen: RowSelection) -> Iterator[str]:
    """Says where the cell's first problem is not what the name of the cell promises."""
    layout, group = problem.bucket.layout, problem.bucket.layout.group
    counts = chosen.count_by_rank.cpu()
    rows = counts.sum(dim=0) if layout.axis is Axis.ROWS else counts[0]
    if case.twist == "short" and not ((rows > 0) & (rows < problem.bucket.total_rows)).any():
        yield f"vacuous: not short: {rows.tolist()} of at most {problem.bucket.total_rows} rows"
    if group.size == 1 or layout.axis not in (Axis.ROWS, Axis.COLUMNS) or case.twist == "idle":
        return
    share = counts.sum(dim=1).tolist()
    sizes = [sum(length for _, length in layout.segments[rank][0]) for rank in range(group.size)]
    if layout.axis is Axis.COLUMNS:
        share = sizes  # the winners are the same everywhere, so only the columns can be shared unfairly
    promised = {
        "even": len(set(sizes)) == 1,
        "uneven": len(set(sizes)) > 1 and min(sizes) > 0,
        "empty": min(sizes) == 0,
        "skewed": max(share) * group.size > sum(share) and (min(share) == 0 or not _winners_skew(case)),
        "few": sum(sizes) < group.size,
        "ragged": len({tuple(of_rank) for of_rank in zip(*layout.segments, strict=True)}) > 1,
    }
    if not promised[case.shards]:
        yield f"vacuous: not {case.shards}: shards {sizes}, winners by rank {share}"
    owners = torch.tensor(problem.bucket.owners)
    if not sum(int(counts[rank, owners != rank].sum()) for rank in range(group.size)):
        yield "vacuous: no chosen row lies on another rank than its owner"
    if case.num_matrices < group.size and len(set(problem.bucket.owners)) == group.size:
        yield "vacuous: every rank owns one of fewer matrices than ranks"


def _winners_skew(case: Case) -> bool:
    """Whether skewed means the winners of even shards. Elsewhere every shard with rows has some."""
    return case.scope == "global" and case.axis is Axis.ROWS


def _lengths(case: Case, shards: Shards, world_size: int) -> tuple[int, ...]:
    """By rank, how long its shard of the split axis is."""
    if shards in ("uneven", "few"):
        length = world_size * _SHARD - 1 if shards == "uneven" else world_size - 1
        return tuple(size for _, size in shard_segments(length, world_size))
    if shards == "empty":  # in the middle where there is one; and owner 0 must not hold all rows
        empty = (world_size - 1) // 2
        return tuple(0 if rank == empty else _SHARD for rank in range(world_size))
    if shards == "ragged" or (shards == "skewed" and not _winners_skew(case)):
        return (1,) * (world_size - 1) + (_SHARD * world_size - (world_size - 1),)
    return (_SHARD,) * world_size


def _layout(case: Case, shards: Shards, num_matrices: int, group: Group) -> Layout:
    splits = case.axis in (Axis.ROWS, Axis.COLUMNS)
    lengths = _lengths(case, shards, group.size if splits else 1)
    length = sum(lengths)
    shape = (_OTHER, length) if case.axis is Axis.COLUMNS else (length, _OTHER)
    by_matrix = []
    for matrix in range(num_matrices):
        turn = matrix % group.size if shards == "ragged" else 0
        by_matrix.append(_pieces((*lengths[turn:], *lengths[:turn])) if splits else [((0, length),)] * group.size)
    return Layout(group, case.axis, shape, tuple(zip(*by_matrix, strict=True)))


def _pieces(lengths: Sequence[int]) -> list[tuple[Segment, ...]]:
    """By rank, its one piece of an axis that is cut into these lengths."""
    return [((sum(lengths[:rank]), length),) for rank, length in enumerate(lengths)]


def _bucket(layout: Layout, rule: Selector, owners: Sequence[int], dtype: torch.dtype, device: torch.device) -> Bucket:
    cells = product(range(layout.group.size), range(layout.num_matrices))
    return Bucket(
        layout=layout,
        owners=tuple(owners),
        max_rows=max(rule.offered(layout, rank, matrix) for rank, matrix in cells),
        total_rows=max(rule.total(layout, matrix) for matrix in range(layout.num_matrices)),
        dtype=dtype,
        device=device,
        name="bucket of a cell",
    )


def _momentum(case: Case, shards: Shards, bucket: Bucket, seed: int) -> Tensor:
    """(N, R, C), drawn on the CPU, so that all devices get the same."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(bucket.num_matrices, *bucket.shape, generator=generator, dtype=torch.float64)
    if shards == "skewed" and _winners_skew(case):
        rank_of_row = RowTables(bucket.layout, torch.device("cpu")).rank_of_row
        whole *= 4.0 ** rank_of_row[:, :, None]
    if case.twist == "zeros":  # too few other rows to fill the choice, and a matrix of zeros alone
        whole[:, 1:-1] = 0
        whole[0] = 0
    return whole.to(bucket.device, accumulation_dtype(bucket.dtype))
