"""The interface between the optimizers and the packages that move rows between ranks.

A transport is a distributed implementation of one function: orthogonalize matrices whose rows (or columns) lie
on several ranks, and give every rank its own back. It does not know which optimizer calls it, and the
optimizer does not know which rank did the work. Legend: N matrices, W ranks, K slots a matrix.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from dion_core.collectives import Group
from dion_core.collectives import TransportError as TransportError
from dion_core.layout import Axis, Layout, RowTables
from dion_core.newton_schulz import Orthogonalizer
from dion_core.rows import Rows, RowSelection
from dion_core.steps import Steps, done

INTERFACE_VERSION = 1
"""The version of this interface. A transport made for another one is refused."""

Scope = Literal["all", "local", "global"]


@dataclass(frozen=True)
class Bucket:
    """N matrices of one shape, layout and dtype that are updated together.

    Attributes:
        layout: where the rows lie. A transport gets buckets without outer axes alone.
        owners: owners[i] = which of the ranks that share the work orthogonalizes matrix i.
        max_rows: K, the most rows that one rank offers of one matrix.
        total_rows: the most rows that all ranks together offer of one matrix.
        dtype: of the rows on the wire.
        device: where the rows lie.
        name: of the bucket, for errors and reports.
    """

    layout: Layout
    owners: tuple[int, ...]
    max_rows: int
    total_rows: int
    dtype: torch.dtype
    device: torch.device
    name: str

    @cached_property
    def group(self) -> Group:
        """The ranks that hold parts of the matrices; its collectives name the bucket."""
        return self.layout.group.named(self.name)

    @property
    def rank(self) -> int:
        """This rank's number among those that share the work, by which owners are numbered."""
        return self.layout.worker

    @property
    def num_matrices(self) -> int:
        return len(self.owners)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of one whole matrix."""
        return self.layout.shape

    def offered(self, rank: int, matrix: int) -> int:
        """The most rows of a matrix that the rank offers."""
        return self.offered_by_rank[rank][matrix]

    @cached_property
    def offered_by_rank(self) -> tuple[tuple[int, ...], ...]:
        """offered_by_rank[rank][matrix] = the most rows of a matrix that the rank offers."""
        matrices = range(self.num_matrices)
        return tuple(
            tuple(min(self.max_rows, self.layout.rows(rank, matrix)) for matrix in matrices)
            for rank in range(self.layout.group.size)
        )

    def owned(self, rank: int) -> tuple[int, ...]:
        """The matrices that the rank orthogonalizes, ascending."""
        return self._owned_by_rank[rank]

    @cached_property
    def _owned_by_rank(self) -> tuple[tuple[int, ...], ...]:
        owned: list[list[int]] = [[] for _ in range(self.layout.num_workers)]
        for matrix, owner in enumerate(self.owners):
            owned[owner].append(matrix)
        return tuple(map(tuple, owned))

    @cached_property
    def owned_index(self) -> Tensor:
        """(B,) int64 on the device: the matrices that this rank owns."""
        return torch.tensor(self.owned(self.rank), dtype=torch.int64, device=self.device)

    @cached_property
    def working(self) -> tuple[int, ...]:
        """The D ranks that own a matrix, ascending: of thousands of ranks only these are owners of a pair."""
        return tuple(sorted(set(self.owners)))

    @cached_property
    def place_of_owner(self) -> dict[int, int]:
        """For each rank that owns a matrix, its place in `working`."""
        return {owner: place for place, owner in enumerate(self.working)}

    @cached_property
    def offered_by_pair(self) -> tuple[tuple[int, ...], ...]:
        """offered_by_pair[source][d] = the most rows that a rank offers of all matrices that rank `working[d]` owns."""
        pools = [self.owned(owner) for owner in self.working]
        return tuple(tuple(sum(map(offered.__getitem__, pool)) for pool in pools) for offered in self.offered_by_rank)

    @cached_property
    def lowest_rows(self) -> Tensor:
        """(W, N) int64 on the CPU: the rows of each rank among the first ones that are taken of every matrix.

        That is who wins where all rows are equal. Only for matrices whose rows are split.
        """
        first = RowTables(self.layout, torch.device("cpu")).rank_of_row[:, : self.total_rows].T
        counts = torch.zeros(self.layout.group.size, self.num_matrices, dtype=torch.int64)
        return counts.scatter_add_(0, first, torch.ones_like(first))

    @cached_property
    def slots_by_rank(self) -> tuple[int, ...]:
        """The most rows that every rank offers of one matrix."""
        return tuple(min(self.max_rows, self.layout.max_rows(rank)) for rank in range(self.layout.group.size))

    @cached_property
    def first_slot(self) -> Tensor:
        """(W, N) int64: where each rank's slots start, the same for all matrices, if ranks lie side by side."""
        first = [sum(self.slots_by_rank[:rank]) for rank in range(self.layout.group.size)]
        return torch.tensor(first, device=self.device)[:, None].expand(-1, self.num_matrices)

    def describe(self) -> str:
        """One line for plans, reports and errors: the same on every rank."""
        rows, columns = self.shape
        size, dtype = self.layout.group.size, str(self.dtype).removeprefix("torch.")
        beside = "".join(f", {outer.axis} over {outer.group.size}" for outer in self.layout.outer)
        return (
            f"{self.num_matrices} x {rows}x{columns} {self.layout.axis} over {size} ranks{beside}, wire {dtype}, "
            f"at most {self.max_rows} rows a rank and {self.total_rows} in all, owners {list(self.owners)}"
        )


@dataclass(frozen=True)
class Traffic:
    """What one step of a bucket sends, planned from its sizes.

    Attributes:
        forward: bytes to every rank (itself included) on the way to the owners.
        back: bytes to every rank (itself included) on the way back.
        collectives: how many collectives a step issues.
        outer_forward: bytes to the ranks of outer axes before all that, a collective each.
        outer_back: bytes to the ranks of outer axes after all that, a collective each.
    """

    forward: tuple[int, ...] = ()
    back: tuple[int, ...] = ()
    collectives: int = 0
    outer_forward: tuple[tuple[int, ...], ...] = ()
    outer_back: tuple[tuple[int, ...], ...] = ()

    @property
    def messages(self) -> list[tuple[int, ...]]:
        """The bytes to every rank of each collective, in the order of the step; one that sends nothing is left out."""
        return [each for each in (*self.outer_forward, self.forward, self.back, *self.outer_back) if each]

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank sends in one step."""
        return sum(map(sum, self.messages))


class Exchange(ABC):
    """The rows of one bucket on their way to the owners and back."""

    def admit(self, selection: RowSelection) -> RowSelection:
        """The rows that are sent in this step: all chosen ones, unless a transport defers some.

        Called before anything is decayed. No communication, no host read.
        """
        return selection

    @abstractmethod
    def reserve(self, selection: RowSelection) -> Rows:
        """The place where every admitted row is to be written; its values are not set yet."""

    @abstractmethod
    def orthogonalize(self, rows: Rows, selection: RowSelection, orthogonalizer: Orthogonalizer) -> Steps[Rows]:
        """The orthogonalized rows in the wire's dtype.

        The `slot` of the result says where each entry of `selection.index` lies, which may differ from that of
        `reserve`. Past the count nothing is defined.
        """

    def num_results(self) -> int:
        """How many rows come back in this step: the first ones of the buffer that `orthogonalize` gives.

        With `result_slot` it lets ranks of outer axes pass results on: see `Transport.outer_axes`.
        """
        raise NotImplementedError

    def result_slot(self, selection: RowSelection) -> Tensor:
        """(N, K) int64: the `slot` of the rows that `orthogonalize` gives, without it. No communication.

        Entries past the count may have a slot of `num_results` or above.
        """
        raise NotImplementedError

    @abstractmethod
    def traffic(self) -> Traffic:
        """The planned traffic of one step; where sizes are those of the step, of the last one."""


class Session:
    """A transport opened for all buckets of one optimizer; `exchanges` are in the order of the buckets."""

    host_reads: int = 0
    """How often every step waits for the device, for all buckets together."""
    host_waits: int = 0
    """How often so far a step had to wait for a copy to the host that is normally long done."""
    sizes: int = 0
    """Changes whenever message sizes change, which a captured or replayed step cannot follow."""

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        self.exchanges = exchanges

    def begin(self, selections: Sequence[RowSelection]) -> Steps[None]:
        """Called once a step with the choice of every bucket, before anything is admitted.

        A captured or replayed step repeats what was launched here, without another call.
        """
        return done(None)

    def end(self) -> None:
        """Called once a step after all of its work was launched, on the host alone: also after a replayed step.

        What `begin` left on the device may be read here, if that does not wait.
        """

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on as if it had never stopped: plain data for JSON, alike on every rank."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave; what was saved with another number of ranks is passed over."""


class Transport(ABC):
    """A way to move rows, registered under the entry-point group `dion.transports`.

    Options of a transport are the fields of its frozen dataclass; its repr is part of the plan that all ranks
    compare.

    Attributes:
        interface_version: the version of this interface that the transport was written for. It has no default,
            so that a transport that was not adapted to a new version is noticed.
        scopes: which choices of rows it serves.
        default_scope: the scope where none is asked for.
        axes: which splits of a matrix it serves.
        may_defer: whether `Exchange.admit` may refuse rows; their waiting times are then kept as state.
        replayable: whether its sessions and exchanges launch the same in every step while `Session.sizes` stays as it
            is, through this package and operations of torch alone, so that a step can be repeated on a GPU without
            calling them (`replay`).
        outer_axes: whether its exchanges say where results lie (`Exchange.result_slot`), which they must where
            matrices are replicated beside their split (HSDP), or split by rows and by columns (tiles). Its sizes may
            then depend on nothing but the buckets and the choices of the step, so that all ranks of an outer axis
            know them, and `orthogonalize` yields once for each of `Traffic.collectives`.
    """

    interface_version: ClassVar[int]
    scopes: ClassVar[frozenset[Scope]]
    default_scope: ClassVar[Scope]
    axes: ClassVar[frozenset[Axis]]
    may_defer: ClassVar[bool] = False
    replayable: ClassVar[bool] = False
    outer_axes: ClassVar[bool] = False

    def local_slack(self) -> float | None:
        """How many times its share a shard may offer in scope local; None: each gives exactly its share."""
        return None

    def rehearsal(self, bucket: Bucket) -> Exchange | None:
        """An exchange that launches what a step of the bucket does on whatever values, and reads none on the host.

        While an optimizer is built it is gone through once, without a launch and without a message, so that its kernels
        are compiled then. None: they are in the first step.
        """
        return None

    @abstractmethod
    def open(self, buckets: Sequence[Bucket]) -> Session:
        """Fixes sizes and allocates, for all buckets of one optimizer. Collective, in the order of the buckets."""
