"""The plan of ranks that need not exist, made by the code that the optimizers run, and its bytes by link.

Legend: W ranks, N matrices.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dion_core.buckets import MatrixBucket
from dion_core.builtin import LocalExchange, ReplicatedExchange
from dion_core.collectives import Group
from dion_core.keeping import LikeParameters
from dion_core.layout import Axis, Layout, OuterAxis
from dion_core.newton_schulz import NewtonSchulz, kernel_workspace
from dion_core.optimizer import MatrixOptimizer
from dion_core.optimizers import Dion2, Muon, NorDion2, NorMuon
from dion_core.options import OPTIMIZER_WIDE
from dion_core.plan import Plan
from dion_core.prediction.meshes import MeshShape, Seat, as_rank, placed
from dion_core.prediction.models import Groups
from dion_core.report import Report, make_report, workspace_bytes
from dion_core.rows import RowSelection
from dion_core.steps import run
from dion_core.transport import Bucket, Transport

OPTIMIZERS: Mapping[str, type[MatrixOptimizer]] = {
    kind.__name__.lower(): kind for kind in (Muon, NorMuon, Dion2, NorDion2)
}
ALL_RANKS = 16
"""Up to so many ranks every one is looked at; of more, those that send most and least."""


@dataclass(frozen=True)
class Question:
    """What is to be planned.

    Attributes:
        groups: parameters on the meta device, by group.
        mesh: the ranks.
        optimizer: a name of `OPTIMIZERS`.
        options: of the optimizer that are not its defaults, such as fraction and scope.
    """

    groups: Groups
    mesh: MeshShape
    optimizer: str = "nordion2"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> type[MatrixOptimizer]:
        return OPTIMIZERS[self.optimizer]


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank sends, by where they go."""

    itself: int = 0
    in_node: int = 0
    between: int = 0

    @property
    def total(self) -> int:
        return self.itself + self.in_node + self.between

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.itself + other.itself, self.in_node + other.in_node, self.between + other.between)


@dataclass(frozen=True)
class BucketTraffic:
    """Bytes of one bucket that one rank sends in a step."""

    forward: Sent
    back: Sent


@dataclass(frozen=True)
class RankPlan:
    """The plan of one rank.

    Attributes:
        rank: its number.
        plan: as the optimizer would make it.
        at_start: the report of that optimizer before its first step.
        typical: the report in a step whose chosen rows are spread evenly over the shards.
        traffic: by bucket, of the typical step.
        workspace: bytes that it needs besides what stays, as on a GPU with the kernels of Newton-Schulz.
    """

    rank: int
    plan: Plan
    at_start: Report
    typical: Report
    traffic: Sequence[BucketTraffic]
    workspace: int

    @property
    def sent(self) -> Sent:
        """Of all buckets, both ways."""
        return sum((each.forward + each.back for each in self.traffic), Sent())


def plans(question: Question, transport: str | Transport) -> list[RankPlan]:
    """The plans of all ranks, or of those that matter where there are many: `ALL_RANKS`. By rank.

    Nothing is allocated but tables of numbers.

    Raises:
        ValueError: a layout, an option or a scope that is not supported or that the transport does not serve.
        TransportError: the transport is not installed.
    """
    mesh, found = question.mesh, dict[int, RankPlan]()
    wanted, rank = set(range(mesh.world_size)) if mesh.world_size <= ALL_RANKS else None, 0
    while wanted is None or wanted - set(found):
        if wanted is not None:
            rank = min(wanted - set(found))
        with as_rank(mesh, rank) as device_mesh, torch.no_grad():
            plan = _made(question, transport, device_mesh)
            wanted = _outermost(plan, mesh.world_size) if wanted is None else wanted
            spread = [even_counts(entry.bucket) for entry in plan.transported]
            found[rank] = _seen(plan, mesh, rank, spread)
            for other in sorted(wanted - set(found)):
                if _take_seats(plan, other):
                    found[other] = _seen(plan, mesh, other, spread)
    return [found[rank] for rank in sorted(found)]


def _made(question: Question, transport: str | Transport, device_mesh: DeviceMesh | None) -> Plan:
    groups, replicas = placed(question.groups, question.mesh, device_mesh)
    names = {parameter: name for group in groups for name, parameter in group["params"]}
    options = {"algorithm": "matrix", **defaults(question.kind), **question.options}
    full = [{**options, **group, "params": [p for _, p in group["params"]]} for group in groups]
    return LikeParameters().make_plan(full, names, question.kind.rule, replicas, transport)


def _take_seats(plan: Plan, rank: int) -> bool:
    """Makes this process another rank in all groups of the plan; False where it is in other groups."""
    groups = [entry.bucket.layout.group for entry in plan.buckets]
    seats = [group for group in groups if isinstance(group, Seat)]
    if len(seats) < len(groups) or any(rank not in seat.ranks for seat in seats):
        return False
    for seat in seats:
        seat.take(rank)
    return True


def _seen(plan: Plan, mesh: MeshShape, rank: int, spread: Sequence[Tensor]) -> RankPlan:
    """The plan as it is on a rank whose seats are taken, opened there; a step chooses the rows of `spread`."""
    for entry in plan.buckets:
        _bring_to_host(entry)
    plan.open()
    at_start = _report(plan)
    if plan.session is not None:
        run(plan.session.begin(list(map(_choice, plan.transported, spread))))
    traffic = [_traffic(entry, number, plan, mesh, rank) for number, entry in enumerate(plan.buckets)]
    typical = _report(plan)
    return RankPlan(rank, plan, at_start, typical, traffic, _workspace(plan, typical))


def defaults(kind: type[MatrixOptimizer]) -> dict[str, Any]:
    """The options of a group where none are given."""
    parameters = inspect.signature(kind.__init__).parameters.values()
    return {
        each.name: each.default
        for each in parameters
        if each.default is not inspect.Parameter.empty and each.name not in OPTIMIZER_WIDE
    }


def even_counts(bucket: Bucket) -> Tensor:
    """(W, N) int64: the rows that each rank has chosen if it holds its share of them; ties go to the lower rank.

    2 of 8 rows over three ranks with 3, 3, 2: shares are 0.75, 0.75, 0.5, and ranks 0 and 1 have one each.
    """
    layout = bucket.layout
    known: dict[Hashable, list[int]] = {}
    per_matrix = []
    for matrix in range(bucket.num_matrices):
        lies = tuple(of_rank[matrix] for of_rank in layout.segments)
        if lies not in known:
            known[lies] = _even_counts(layout, matrix, bucket.total_rows)
        per_matrix.append(known[lies])
    return torch.tensor(per_matrix, dtype=torch.int64).T.contiguous()


def _choice(entry: MatrixBucket, count_by_rank: Tensor) -> RowSelection:
    """The choice with these counts, as this rank has it."""
    bucket = entry.bucket
    shape = (bucket.num_matrices, bucket.slots_by_rank[bucket.group.rank])
    numbers = torch.zeros(1, dtype=torch.int64).expand(shape)
    ratio, age = torch.ones(1).expand(shape), torch.zeros(1, dtype=torch.int32).expand(shape)
    return RowSelection(numbers, count_by_rank[bucket.group.rank], count_by_rank, ratio, age)


def _even_counts(layout: Layout, matrix: int, total: int) -> list[int]:
    ranks = range(layout.group.size)
    if layout.axis is not Axis.ROWS:  # every rank knows and has all chosen rows
        return [total] * layout.group.size
    held = [layout.rows(rank, matrix) for rank in ranks]
    shares = [total * rows / max(1, sum(held)) for rows in held]
    counts = [int(share) for share in shares]
    for rank in sorted(ranks, key=lambda rank: counts[rank] - shares[rank])[: total - sum(counts)]:
        counts[rank] += 1
    return counts


def _bring_to_host(entry: MatrixBucket) -> None:
    """Tables and counters on the CPU: a transport reads and fills them, and no row is among them."""
    if entry.bucket.device.type != "cpu":  # on the next rank it is: what is the same there is computed once
        entry.bucket = replace(entry.bucket, device=torch.device("cpu"))
    entry.chosen, entry.applied, entry.nonfinite = torch.zeros(3, entry.bucket.num_matrices, dtype=torch.int64).unbind()
    if isinstance(entry.exchange, LocalExchange | ReplicatedExchange):  # opening gives the others new ones
        entry.exchange = type(entry.exchange)(entry.bucket)


def _report(plan: Plan) -> Report:
    return make_report(plan, {}, 0, torch.zeros(()), (0, 0, 0))


def _workspace(plan: Plan, typical: Report) -> int:
    buckets, orthogonalizer = [target.bucket.bucket for target in plan.targets], NewtonSchulz()
    shapes = [(each.total_rows, each.shape[1]) for each in buckets]
    owned = [len(each.owned(each.group.rank)) for each in buckets]
    inside = [
        kernel_workspace(batch, *shape, orthogonalizer.kernel_segments(*shape), copies=0)
        for batch, shape in zip(owned, shapes, strict=True)
    ]
    return workspace_bytes(plan, typical["buckets"], inside)


def _traffic(entry: MatrixBucket, number: int, plan: Plan, mesh: MeshShape, rank: int) -> BucketTraffic:
    target = plan.targets[number]
    planned, layout = target.delivery.traffic(entry), entry.bucket.layout
    columns = [outer for outer in layout.outer if outer.axis is Axis.COLUMNS]
    there = [(layout.group, planned.forward), *_over(columns, planned.outer_forward)]
    back = [(layout.group, planned.back), *_over(layout.outer, planned.outer_back[::-1])]
    return BucketTraffic(
        *(sum((_by_link(sent, group.ranks, mesh, rank) for group, sent in way), Sent()) for way in (there, back))
    )


def _over(axes: Sequence[OuterAxis], sent: Sequence[Sequence[int]]) -> list[tuple[Group, Sequence[int]]]:
    """What is sent over other axes of the mesh, by group, both outermost first; inner ones may have nothing to send."""
    return [(outer.group, each) for outer, each in zip(axes, sent, strict=False)]


def _by_link(sent: Sequence[int], peers: Sequence[int], mesh: MeshShape, rank: int) -> Sent:
    links: Counter[str] = Counter()
    for peer, num_bytes in zip(peers, sent, strict=False):
        same_node = mesh.node(peer) == mesh.node(rank)
        links["itself" if peer == rank else "in_node" if same_node else "between"] += num_bytes
    return Sent(**links)


def _outermost(plan: Plan, world_size: int) -> set[int]:
    """The first and last, and those that own most and least of each bucket and of all: nobody sends more or less."""
    found = {0, world_size - 1}
    for entry in plan.buckets:
        bucket = entry.bucket
        owned = [len(bucket.owned(rank)) for rank in range(bucket.layout.num_workers)]
        found |= {bucket.layout.ranks[owned.index(pick(owned))] for pick in (max, min)}
    for ranks, load in plan.loads.items():
        found |= {ranks[load.index(pick(load))] for pick in (max, min)}
    return found
