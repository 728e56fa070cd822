"""Exchanges on meshes of several axes: the lines of an outer axis share the matrices of a bucket among them.

The transport moves rows along one axis of the mesh. Beside it other lines hold the same rows, as copies (HSDP) or
other columns of them (tiles of FSDP2 and tensor parallelism). Every line works on a share of the matrices, so that
each matrix is orthogonalized once in the world:

    copies   each line sends only the rows of its share through the transport; results go to the other lines.
    columns  the columns of a share's rows come together on the line that works on it, go through the transport as
             whole rows, and results go back in parts.

All ranks choose and admit rows of all matrices, hence know the sizes of all shares. Rows travel between lines in the
form in which the transport gives results back (`Exchange.result_slot`), so that a cheap transport stays cheap.

Legend: N matrices, K slots a matrix, C columns, S rows of a buffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from dion_core.collectives import Group, split
from dion_core.layout import Axis
from dion_core.newton_schulz import Orthogonalizer
from dion_core.rows import Rows, RowSelection
from dion_core.steps import Steps
from dion_core.transport import Bucket, Exchange, Traffic


def shares(bucket: Bucket) -> list[Bucket]:
    """What each line of the outermost axis works on: slices of the bucket, some of which may be empty."""
    per_line = bucket.layout.num_workers // bucket.layout.outer[0].group.size
    lines = [owner // per_line for owner in bucket.owners]
    assert lines == sorted(lines), "the matrices of a bucket stand line after line"
    starts = [lines.index(line) if line in lines else None for line in range(bucket.layout.outer[0].group.size)]
    made = []
    for line, start in enumerate(starts):
        first = 0 if start is None else start
        last = first + lines.count(line)
        owners = tuple(owner % per_line for owner in bucket.owners[first:last])
        made.append(replace(bucket, layout=bucket.layout.share(first, last), owners=owners))
    return made


def innermost(bucket: Bucket) -> list[Bucket]:
    """What a transport is opened for: the bucket, or its shares that hold matrices, in their order."""
    if not bucket.layout.outer:
        return [bucket]
    return [leaf for share in shares(bucket) if share.owners for leaf in innermost(share)]


@dataclass(frozen=True)
class Part:
    """Some matrices of a bucket: those from `first` to `last` - 1, of which this rank offers up to `slots` rows each.

    That may be fewer than of others: of one head no rank of a line may hold rows that holds some of another.
    """

    first: int
    last: int
    slots: int

    def of(self, selection: RowSelection) -> RowSelection:
        """The selection of those matrices."""
        matrices, entries = slice(self.first, self.last), slice(self.slots)
        return RowSelection(
            selection.index[matrices, entries],
            selection.count[matrices],
            selection.count_by_rank[:, matrices].contiguous(),
            selection.ratio[matrices, entries],
            selection.age[matrices, entries],
        )

    def with_rest(self, entries: Tensor, whole: Tensor) -> Tensor:
        """(n, K) of (n, `slots`) entries, followed by those of an (N, K) table that name no row of these matrices."""
        return torch.cat([entries, whole[self.first : self.last, self.slots :]], dim=1)


def parts_of(buckets: Sequence[Bucket]) -> list[Part]:
    """What each of the buckets, which stand one behind the other, is of the bucket that they are made of."""
    ends = pairwise(accumulate([len(bucket.owners) for bucket in buckets], initial=0))
    slots = [bucket.slots_by_rank[bucket.layout.group.rank] for bucket in buckets]
    return [Part(*bounds, each) for bounds, each in zip(ends, slots, strict=True)]


@dataclass(frozen=True)
class NestedRows(Rows):
    """Rows of which those of one share go through the transport.

    Attributes:
        inner: where those are written.
    """

    inner: Rows | None


class NestedExchange(Exchange):
    """What the exchanges of both kinds of outer axes have in common.

    Attributes:
        bucket: of all matrices.
        inner: by line the exchange of its share; None where it is empty.
        rounds: the collectives over the outer axis in a step.
    """

    rounds: ClassVar[int]

    def __init__(self, bucket: Bucket, inner: Sequence[Exchange | None]) -> None:
        self.bucket = bucket
        self.inner = inner
        self._outer = bucket.layout.outer[0]
        self._parts = parts_of(shares(bucket))
        self._known: tuple[list[Tensor], Tensor] | None = None

    @property
    def group(self) -> Group:
        """The ranks of the outer axis."""
        return self._outer.group.named(self.bucket.name)

    @property
    def mine(self) -> Exchange | None:
        """The exchange that this rank's line sends rows through."""
        return self.inner[self.group.rank]

    def parts(self, selection: RowSelection) -> list[RowSelection]:
        """The selection by line."""
        return [part.of(selection) for part in self._parts]

    def admit(self, selection: RowSelection) -> RowSelection:
        parts = self.parts(selection)
        admitted = [
            each if exchange is None else exchange.admit(each) for exchange, each in zip(self.inner, parts, strict=True)
        ]
        if all(one is other for one, other in zip(parts, admitted, strict=True)):
            return selection
        both = list(zip(self._parts, admitted, strict=True))
        return replace(
            selection,
            index=torch.cat([part.with_rest(each.index, selection.index) for part, each in both]),
            count=torch.cat([each.count for each in admitted]),
            ratio=torch.cat([part.with_rest(each.ratio, selection.ratio) for part, each in both]),
            age=torch.cat([part.with_rest(each.age, selection.age) for part, each in both]),
        )

    def num_results(self) -> int:
        return sum(self.rows_by_line())

    def rows_by_line(self) -> list[int]:
        """How many rows of results each line's share has in this step."""
        return [0 if exchange is None else exchange.num_results() for exchange in self.inner]

    def result_slot(self, selection: RowSelection) -> Tensor:
        parts, rows = self.parts(selection), self.rows_by_line()
        working = [(line, exchange) for line, exchange in enumerate(self.inner) if exchange is not None]
        given = [exchange.result_slot(parts[line]) for line, exchange in working]
        known = self._known
        if known is not None and all(one is other for one, other in zip(given, known[0], strict=True)):
            return known[1]  # slots that do not change are joined once
        starts = list(accumulate(rows, initial=0))
        moved = []
        for slot, (line, _) in zip(given, working, strict=True):
            nowhere = sum(rows)
            wide = pad(slot, (0, selection.index.shape[1] - slot.shape[1]), value=nowhere)
            moved.append(torch.where(wide < rows[line], wide + starts[line], nowhere))
        self._known = given, torch.cat(moved)
        return self._known[1]

    @property
    def columns(self) -> int:
        """Columns of the rows on this rank."""
        return self.bucket.layout.columns(self.bucket.layout.group.rank)

    def buffer(self) -> Tensor:
        """(S + 1, C), for the results of all shares; the last row takes what has no slot."""
        shape = (self.num_results() + 1, self.columns)
        return torch.empty(shape, dtype=self.bucket.dtype, device=self.bucket.device)

    def bytes_by_line(self) -> list[int]:
        """Bytes on this rank of the results of each line's share."""
        return [rows * self.columns * self.bucket.dtype.itemsize for rows in self.rows_by_line()]

    def idle(self) -> Steps[None]:
        """Yields as often as the lines that have something to send.

        Else lines would issue the collectives of several buckets, which are under way together, in different orders.
        """
        for _ in range(_rounds(self) - self.rounds):
            yield

    def inner_traffic(self) -> Traffic:
        """That of this line's share."""
        return Traffic() if self.mine is None else self.mine.traffic()


def _rounds(exchange: Exchange) -> int:
    """How often a rank that sends something waits for others in `orthogonalize`."""
    if not isinstance(exchange, NestedExchange):
        return exchange.traffic().collectives
    return exchange.rounds + _rounds(next(inner for inner in exchange.inner if inner is not None))


class CopiesExchange(NestedExchange):
    """Lines that hold copies: each sends its share through the transport, and all gather the results."""

    rounds = 1

    def reserve(self, selection: RowSelection) -> Rows:
        mine, part, slot = self.mine, self._parts[self.group.rank], torch.full_like(selection.index, -1)
        if mine is None:
            empty = torch.empty(0, self.columns, dtype=self.bucket.dtype, device=self.bucket.device)
            return NestedRows(empty, slot, None)
        rows = mine.reserve(part.of(selection))
        slot[part.first : part.last, : part.slots] = rows.slot
        return NestedRows(rows.values, slot, rows)

    def orthogonalize(self, rows: Rows, selection: RowSelection, orthogonalizer: Orthogonalizer) -> Steps[Rows]:
        assert isinstance(rows, NestedRows)
        mine, own = self.mine, self.rows_by_line()[self.group.rank]
        message = rows.values.new_empty(0)
        if mine is not None and rows.inner is not None:
            results = yield from mine.orthogonalize(rows.inner, self.parts(selection)[self.group.rank], orthogonalizer)
            message = results.values[:own].flatten()
        else:
            yield from self.idle()
        values = self.buffer()
        sizes = [number * self.columns for number in self.rows_by_line()]
        handle = self.group.all_gather(split(values[:-1].flatten(), sizes), message)
        yield
        handle.wait()
        return Rows(values, self.result_slot(selection))

    def traffic(self) -> Traffic:
        inner, own = self.inner_traffic(), self.bytes_by_line()[self.group.rank]
        gathered = (own,) * self.group.size
        return replace(inner, collectives=inner.collectives + 1, outer_back=(*inner.outer_back, gathered))


class ColumnsExchange(NestedExchange):
    """Lines that hold other columns: those of a share's rows come together on its line, and go back in parts."""

    rounds = 2

    def reserve(self, selection: RowSelection) -> Rows:
        return Rows(self.buffer(), self.result_slot(selection))

    def orthogonalize(self, rows: Rows, selection: RowSelection, orthogonalizer: Orthogonalizer) -> Steps[Rows]:
        group, mine, leaving = self.group, self.mine, rows.values[:-1].flatten()
        sent = [number * self.columns for number in self.rows_by_line()]
        received = [self.rows_by_line()[group.rank] * width for width in self._widths]
        arrived = rows.values.new_empty(sum(received))
        handle = group.all_to_all(arrived, leaving, received, sent)
        yield
        handle.wait()
        back = arrived
        if mine is not None:
            of_share = self.parts(selection)[group.rank]
            whole = mine.reserve(of_share)
            self._join(split(arrived, received), whole, mine.result_slot(of_share))
            results = yield from mine.orthogonalize(whole, of_share, orthogonalizer)
            own = results.values[: self.rows_by_line()[group.rank]]
            back = torch.cat([piece.flatten() for piece in own.split_with_sizes(self._widths, dim=1)])
        else:
            yield from self.idle()
        # Results come back into the buffer that the rows left in.
        handle = group.all_to_all(leaving, back, sent, received)
        yield
        handle.wait()
        return rows

    def traffic(self) -> Traffic:
        inner, own = self.inner_traffic(), self.rows_by_line()[self.group.rank]
        there = tuple(self.bytes_by_line())
        back = tuple(own * width * self.bucket.dtype.itemsize for width in self._widths)
        return replace(
            inner,
            collectives=inner.collectives + 2,
            outer_forward=(there, *inner.outer_forward),
            outer_back=(*inner.outer_back, back),
        )

    @property
    def _widths(self) -> list[int]:
        return [width for _, width in self._outer.columns]

    def _join(self, pieces: Sequence[Tensor], whole: Rows, slot: Tensor) -> None:
        """Writes the rows that arrived in parts to their places in the transport's buffer."""
        widths = zip(pieces, self._widths, strict=True)
        rows = torch.cat([piece.view(-1, width) for piece, width in widths if width], dim=1)
        if len(rows):
            # Past the count there is no row, and any will do.
            taken = rows.index_select(0, slot.flatten().clamp(max=len(rows) - 1))
            whole.values.index_copy_(0, whole.slot.flatten(), taken)


def nested(bucket: Bucket, exchanges: Iterator[Exchange]) -> Exchange:
    """The exchange of a bucket, from those of `innermost(bucket)`."""
    if not bucket.layout.outer:
        return next(exchanges)
    inner = [nested(share, exchanges) if share.owners else None for share in shares(bucket)]
    kind = CopiesExchange if bucket.layout.outer[0].axis is Axis.REPLICATED else ColumnsExchange
    return kind(bucket, inner)
