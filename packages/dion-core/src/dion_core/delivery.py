"""How updates get from the rank that computes them to the parameters: they are there, or their owners send them.

An owner sends the rows that change, with their numbers and factors, and every rank applies them to its own copy: the
bytes of the chosen rows, not of the weights. A message of rows holds, owner after owner and matrix after matrix, T rows
of C elements; a message of numbers, int32, holds in the same order the count of a matrix, its T row numbers and the
bits of its T factors. Both are gathered from all owners, so that they stand in the order of the matrices.

Example: matrices 0 and 1 of rank 0 and matrix 2 of rank 1, two chosen rows of each. Rank 0 sends rows 0 to 3 and
numbers [2, i, i, f, f, 2, i, i, f, f], rank 1 rows 4 and 5 and [2, i, i, f, f].

Legend: N matrices of a bucket, B of them on this rank, C columns, T chosen rows of one, W ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from dion_core.buckets import MatrixBucket, Member
from dion_core.collectives import Group, Handle, split
from dion_core.placements import local_tensor
from dion_core.rows import Rows, RowSelection, accumulation_dtype
from dion_core.steps import Steps, done
from dion_core.transport import Bucket, Traffic


@dataclass(frozen=True)
class Update:
    """What a step does to N matrices.

    Attributes:
        rows: the orthogonalized rows.
        selection: which rows of the matrices they are.
        row_scale: (N, K), the factor of each.
    """

    rows: Rows
    selection: RowSelection
    row_scale: Tensor


class Delivery(Protocol):
    """The way of the updates of one bucket."""

    def deliver(self, updates: Sequence[Update]) -> Steps[Update]:
        """The update of all matrices of the bucket, from what was computed on this rank."""

    def traffic(self, bucket: MatrixBucket) -> Traffic:
        """What one step of the bucket sends in all."""


class Here:
    """The rank that has the state has the parameters (or its rows of them) too."""

    def deliver(self, updates: Sequence[Update]) -> Steps[Update]:
        (update,) = updates
        return done(update)

    def traffic(self, bucket: MatrixBucket) -> Traffic:
        return bucket.exchange.traffic()


@dataclass(frozen=True)
class FromOwners:
    """Every rank has the parameters, and the owner of a matrix alone has its state: all gather the updates.

    Attributes:
        bucket: of N matrices, owner after owner.
    """

    bucket: Bucket

    def deliver(self, updates: Sequence[Update]) -> Steps[Update]:
        """The update of all N matrices, from the one of the B that this rank owns, or from none.

        Those are whole here, so that their rows lie matrix after matrix.
        """
        bucket = self.bucket
        num_matrices, total = bucket.num_matrices, bucket.total_rows
        rows = torch.empty(num_matrices * total, bucket.shape[1], dtype=bucket.dtype, device=bucket.device)
        numbers = torch.empty(num_matrices, self._num_numbers, dtype=torch.int32, device=bucket.device)
        sent = [update.rows.values.flatten() for update in updates] or [rows.new_empty(0)]
        told = [_numbers(update) for update in updates] or [numbers.new_empty(0)]
        handles = [self._gather(rows, sent[0]), self._gather(numbers, told[0])]
        yield
        for handle in handles:
            handle.wait()
        count, index, factor = torch.split_with_sizes(numbers, [1, total, self._num_numbers - 1 - total], dim=1)
        counts = count[:, 0].long()
        selection = RowSelection.unranked(index.long(), counts, counts.expand(bucket.group.size, -1))
        # In storage of its own: a factor of 8 bytes cannot be read from every place of a message of 4-byte numbers.
        row_scale = factor.clone(memory_format=torch.contiguous_format).view(accumulation_dtype(bucket.dtype))
        return Update(Rows(rows, self._slot), selection, row_scale)

    def traffic(self, bucket: MatrixBucket) -> Traffic:
        row_bytes = self.bucket.total_rows * self.bucket.shape[1] * self.bucket.dtype.itemsize
        owned = len(self.bucket.owned(self.bucket.group.rank))
        sent = owned * (row_bytes + self._num_numbers * torch.int32.itemsize)
        return Traffic(back=(sent,) * self.bucket.group.size, collectives=2)

    @cached_property
    def _num_numbers(self) -> int:
        """int32 numbers that tell all about one matrix."""
        factor = accumulation_dtype(self.bucket.dtype).itemsize // torch.int32.itemsize
        return 1 + self.bucket.total_rows * (1 + factor)

    @cached_property
    def _slot(self) -> Tensor:
        """(N, T) int64: row after row."""
        shape = (self.bucket.num_matrices, self.bucket.total_rows)
        return torch.arange(shape[0] * shape[1], device=self.bucket.device).view(shape)

    def _gather(self, whole: Tensor, mine: Tensor) -> Handle:
        """Starts to fill `whole`, of N equal pieces, with what every owner sends."""
        bucket, group = self.bucket, self.bucket.group
        lengths = [len(bucket.owned(rank)) * whole.numel() // bucket.num_matrices for rank in range(group.size)]
        return group.all_gather(split(whole.flatten(), lengths), mine)


def _numbers(update: Update) -> Tensor:
    """Flat int32: of every matrix the count, the numbers of its rows and the bits of their factors."""
    selection, factor = update.selection, update.row_scale.contiguous().view(torch.int32)
    return torch.cat([selection.count[:, None].int(), selection.index.int(), factor], dim=1).flatten()


@dataclass(frozen=True)
class Target:
    """Matrices whose parameters are updated together.

    Attributes:
        bucket: the matrices.
        number: of the bucket among all that are stepped (`Plan.stepped`).
        sources: the numbers of the buckets here that compute their updates.
        delivery: how these get to the parameters.
    """

    bucket: MatrixBucket
    number: int
    sources: tuple[int, ...]
    delivery: Delivery


@dataclass(frozen=True)
class SharedValues:
    """Parameters whose owners have updated them, on their way to all other ranks.

    Attributes:
        by_owner: by rank of the group, the parameters that it owns; all of one dtype.
        group: the ranks.
        name: for errors and reports.
    """

    by_owner: Sequence[Sequence[Member]]
    group: Group
    name: str

    def share(self) -> Steps[None]:
        """All ranks have the owners' values, bit for bit."""
        group, owned = self.group.named(self.name), self._parts[self.group.rank]
        message = torch.cat([part.reshape(-1) for part in owned]) if owned else self._like.new_empty(0)
        gathered = self._like.new_empty(sum(map(sum, self._sizes)))
        outputs = split(gathered, list(map(sum, self._sizes)))
        handle = group.all_gather(outputs, message)
        yield
        handle.wait()
        for rank, parts in enumerate(self._parts):
            if rank != group.rank and parts:
                values = split(outputs[rank], self._sizes[rank])
                shaped = [value.view(part.shape) for value, part in zip(values, parts, strict=True)]
                torch._foreach_copy_(parts, shaped)

    def traffic(self) -> Traffic:
        sent = sum(self._sizes[self.group.rank]) * self._like.itemsize
        return Traffic(back=(sent,) * self.group.size, collectives=1)

    @property
    def _parts(self) -> list[list[Tensor]]:
        """This rank's copies as they are now: a parameter may have been given another tensor."""
        return [[local_tensor(member.parameter) for member in members] for members in self.by_owner]

    @cached_property
    def _sizes(self) -> list[list[int]]:
        return [[local_tensor(member.parameter).numel() for member in members] for members in self.by_owner]

    @property
    def _like(self) -> Tensor:
        return next(local_tensor(member.parameter) for members in self.by_owner for member in members)
