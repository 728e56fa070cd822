"""Negative controls of the conformance suite: a sound exchange, and what has one fault each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from dion_comm_nccl import FullShard
from dion_core.layout import Axis
from dion_core.newton_schulz import Orthogonalizer
from dion_core.process_groups import TorchGroup
from dion_core.rows import Rows, RowSelection
from dion_core.steps import Steps
from dion_core.transport import Bucket, Exchange, Scope, Session, Traffic, Transport


class Opened(Session):
    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        self.exchanges = exchanges


class Sound(Exchange):
    """`full`, step by step, for its faulty children to spoil."""

    def __init__(self, inner: Exchange, bucket: Bucket) -> None:
        self.inner, self.bucket = inner, bucket

    def admit(self, selection: RowSelection) -> RowSelection:
        return self.inner.admit(selection)

    def reserve(self, selection: RowSelection) -> Rows:
        return self.inner.reserve(selection)

    def orthogonalize(self, rows: Rows, selection: RowSelection, orthogonalizer: Orthogonalizer) -> Steps[Rows]:
        results = yield from self.inner.orthogonalize(rows, selection, orthogonalizer)
        return self.spoil(results, rows, selection)

    def spoil(self, results: Rows, rows: Rows, selection: RowSelection) -> Rows:
        return results

    def traffic(self) -> Traffic:
        return self.inner.traffic()


class DropsARow(Sound):
    def spoil(self, results: Rows, rows: Rows, selection: RowSelection) -> Rows:
        results.values[results.slot[selection.valid()][-1:]] = 0
        return results


class ReturnsRowsInWrongSlots(Sound):
    def spoil(self, results: Rows, rows: Rows, selection: RowSelection) -> Rows:
        return Rows(results.values[:-1].roll(1, 0), results.slot)


class ReadsUnusedSlots(Sound):
    def spoil(self, results: Rows, rows: Rows, selection: RowSelection) -> Rows:
        # 1e30 would not show; only NaN does.
        return Rows(results.values + 0 * rows.values.sum(), results.slot)


class ReadsLargeUnusedValues(Sound):
    def spoil(self, results: Rows, rows: Rows, selection: RowSelection) -> Rows:
        # NaN compares false, so that only 1e30 shows.
        return Rows(results.values + (rows.values > 1e29).any(), results.slot)


class ReservesAUsedSlotForAnUnusedRow(Sound):
    def reserve(self, selection: RowSelection) -> Rows:
        rows = self.inner.reserve(selection)
        return Rows(rows.values, torch.where(selection.valid(), rows.slot, rows.slot[:, :1]))


class ChangesTheSelection(Sound):
    def spoil(self, results: Rows, rows: Rows, selection: RowSelection) -> Rows:
        selection.count_by_rank.add_(1)
        return results


class ChangesChosenIndexInPlace(Sound):
    def admit(self, selection: RowSelection) -> RowSelection:
        copy = selection.index.clone()
        selection.index.zero_()
        return replace(selection, index=copy)


class TalksToItselfOnRankZero(Sound):
    """Communicates in a group of one rank, which does not hang."""

    def __init__(self, inner: Exchange, bucket: Bucket) -> None:
        super().__init__(inner, bucket)
        self.alone = dist.new_group([0])

    def reserve(self, selection: RowSelection) -> Rows:
        if self.bucket.layout.group.rank == 0:
            TorchGroup(self.alone).all_reduce(torch.zeros(1), "sum").wait()
        return self.inner.reserve(selection)


class PlansTooFewBytes(Sound):
    def traffic(self) -> Traffic:
        planned = self.inner.traffic()
        return replace(planned, forward=tuple(each // 2 for each in planned.forward))


class PlansWithoutTheWayBack(Sound):
    def traffic(self) -> Traffic:
        return replace(self.inner.traffic(), back=(), collectives=1)


class OrthogonalizesPaddingRows(Sound):
    def orthogonalize(self, rows: Rows, selection: RowSelection, orthogonalizer: Orthogonalizer) -> Steps[Rows]:
        def padded(matrices: Tensor) -> Tensor:
            return orthogonalizer(torch.nn.functional.pad(matrices, (0, 0, 0, 1)))[:, :-1]

        return (yield from self.inner.orthogonalize(rows, selection, padded))


class OrthogonalizesTwice(Sound):
    def orthogonalize(self, rows: Rows, selection: RowSelection, orthogonalizer: Orthogonalizer) -> Steps[Rows]:
        def twice(matrices: Tensor) -> Tensor:
            orthogonalizer(matrices)
            return orthogonalizer(matrices)

        return (yield from self.inner.orthogonalize(rows, selection, twice))


class DefersWithoutSayingSo(Sound):
    def admit(self, selection: RowSelection) -> RowSelection:
        by_rank = selection.count_by_rank.clamp(max=1)  # every rank sends its first row of every matrix
        return RowSelection.unranked(selection.index, by_rank[self.bucket.layout.group.rank], by_rank)


class AdmitsWhatWasNotChosen(Sound):
    def admit(self, selection: RowSelection) -> RowSelection:
        layout = self.bucket.layout
        return replace(selection, index=(selection.index + 1) % layout.rows(layout.group.rank, 0))


class AdmitsInDescendingOrder(Sound):
    def admit(self, selection: RowSelection) -> RowSelection:
        place = torch.arange(selection.index.shape[1]).expand_as(selection.index)
        last = selection.count[:, None] - 1
        turned = torch.where(place <= last, last - place, place)
        return replace(selection, index=selection.index.gather(1, turned))


class RanksDisagreeOnCounts(Sound):
    def admit(self, selection: RowSelection) -> RowSelection:
        by_rank = selection.count_by_rank.clone()
        by_rank[1 - self.bucket.layout.group.rank] = 0
        return RowSelection.unranked(selection.index, selection.count, by_rank)


class ReturnsAnotherDtype(Sound):
    def spoil(self, results: Rows, rows: Rows, selection: RowSelection) -> Rows:
        return Rows(results.values.double(), results.slot)


class ReturnsTheFirstStepAgain(Sound):
    kept: Rows | None = None

    def spoil(self, results: Rows, rows: Rows, selection: RowSelection) -> Rows:
        self.kept = results if self.kept is None else self.kept
        return self.kept


class OrthogonalizesShardsAlone(Sound):
    def orthogonalize(self, rows: Rows, selection: RowSelection, orthogonalizer: Orthogonalizer) -> Steps[Rows]:
        values = rows.values.clone()
        for slot, count in zip(rows.slot, selection.count.tolist(), strict=True):
            values[slot[:count]] = orthogonalizer(rows.values[slot[:count]][None])[0]
        return Rows(values, rows.slot)
        yield


class Raises(Sound):
    def reserve(self, selection: RowSelection) -> Rows:
        raise RuntimeError("out of slots")


FAULTS: dict[type[Sound], str] = {
    DropsARow: "values: matrix",
    ReturnsRowsInWrongSlots: "values: matrix",
    ReadsUnusedSlots: "unused slots:",
    ReadsLargeUnusedValues: "unused slots:",
    ReservesAUsedSlotForAnUnusedRow: "values: matrix",
    ChangesTheSelection: "modified:",
    ChangesChosenIndexInPlace: "modified:",
    TalksToItselfOnRankZero: "collectives: not the same",
    PlansTooFewBytes: "traffic: planned forward",
    PlansWithoutTheWayBack: "traffic: 1 collectives planned, 2 issued",
    OrthogonalizesPaddingRows: "shapes:",
    OrthogonalizesTwice: "shapes:",
    DefersWithoutSayingSo: "without may_defer",
    AdmitsWhatWasNotChosen: "were chosen",
    AdmitsInDescendingOrder: "not ascending",
    RanksDisagreeOnCounts: "the ranks do not know the same counts",
    ReturnsAnotherDtype: "form: results is torch.float64",
    ReturnsTheFirstStepAgain: "values: matrix",
    OrthogonalizesShardsAlone: "vacuous: nothing was sent",
    Raises: "raised RuntimeError: out of slots",
}


@dataclass(frozen=True)
class Faulty(Transport):
    """`full` with the exchanges of a class."""

    kind: type[Sound]
    scopes: ClassVar[frozenset[Scope]] = frozenset({"global"})
    default_scope: ClassVar[Scope] = "global"
    axes: ClassVar[frozenset[Axis]] = frozenset({Axis.ROWS})

    def open(self, buckets: Sequence[Bucket]) -> Session:
        inner = FullShard().open(buckets).exchanges
        return Opened([self.kind(each, bucket) for each, bucket in zip(inner, buckets, strict=True)])
