"""The work of one optimizer, fixed by its parameter list: buckets of matrices, elementwise groups, a transport.

Every rank makes the same plan from the same parameters, whatever gradients there will be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dion_core.buckets import MatrixBucket, Member, Part, make_buckets, stable_repr
from dion_core.collectives import Group
from dion_core.delivery import Here, SharedValues, Target
from dion_core.layout import Layout, in_pieces
from dion_core.matrices import ALIGNMENT
from dion_core.options import OPTIONS
from dion_core.presence import Presence
from dion_core.registry import Choice, choose_transport
from dion_core.rules import Rule
from dion_core.selection import WholeScores
from dion_core.sessions import open_session
from dion_core.transport import Scope, Session, Transport
from dion_core.views import VIEW_KEYS, parameter_matrices


@dataclass
class Plan:
    """All that one step does, in order.

    Attributes:
        members: every trainable parameter, in the order of the flags by which ranks agree.
        buckets: the matrices; those that need a transport come first, in the order of its session.
        elementwise: the other parameters, by group.
        choice: the transport, or None where no bucket needs one.
        loads: for each set of ranks its Newton-Schulz load by rank.
        groups: the parameter groups that it was made from.
        in_pieces: the numbers of the members whose matrices lie in pieces on several ranks.
        session: the open transport; None before `open`, and where no bucket needs one.
    """

    members: Sequence[Member]
    buckets: Sequence[MatrixBucket]
    elementwise: Sequence[Sequence[Member]]
    choice: Choice | None
    loads: Mapping[tuple[int, ...], Sequence[int]]
    groups: Sequence[Mapping[str, Any]]
    in_pieces: frozenset[int] = frozenset()
    session: Session | None = None

    state_mode = "like_parameters"
    """Where the state lies: see `layerwise` for the other one."""

    @cached_property
    def whole_scores(self) -> WholeScores:
        """What puts the scores of matrices together."""
        return WholeScores()

    @cached_property
    def targets(self) -> Sequence[Target]:
        """Whose parameters are updated, and from where: here, each bucket's by itself."""
        return [Target(bucket, number, (number,), Here()) for number, bucket in enumerate(self.buckets)]

    @cached_property
    def stepped(self) -> Sequence[MatrixBucket]:
        """The buckets, and after them those that have parameters here and no state."""
        return self.buckets

    def active(self, presence: Presence) -> list[Tensor]:
        """For every bucket that is stepped (N,) bool: which of its matrices are updated in this step."""
        active: dict[int, Tensor] = {}
        for device, (numbers, places) in self._numbers.items():
            of_device = presence.active.to(device).index_select(0, numbers)
            active |= {number: of_device[start:end] for number, (start, end) in places.items()}
        return [active[number] for number in range(len(self.stepped))]

    @cached_property
    def _numbers(self) -> dict[torch.device, tuple[Tensor, dict[int, tuple[int, int]]]]:
        """By device, int64, the numbers of the parameters of all matrices there; and where those of each bucket are."""
        numbers: dict[torch.device, list[int]] = {}
        places: dict[torch.device, dict[int, tuple[int, int]]] = {}
        for number, bucket in enumerate(self.stepped):
            of_device = numbers.setdefault(bucket.bucket.device, [])
            start = len(of_device)
            of_device += [part.member.number for part in bucket.parts]
            places.setdefault(bucket.bucket.device, {})[number] = start, len(of_device)
            # What is read of them, a byte each, starts at multiples of 16 bytes: kernels are compiled for that.
            of_device += [0] * (-len(of_device) % ALIGNMENT)
        return {device: (torch.tensor(each, device=device), places[device]) for device, each in numbers.items()}

    @property
    def shared(self) -> Sequence[SharedValues]:
        """Elementwise parameters that other ranks update or get."""
        return ()

    @property
    def transported(self) -> Sequence[MatrixBucket]:
        """The buckets whose rows travel through the transport."""
        return [bucket for bucket in self.buckets if in_pieces(bucket.bucket.layout)]

    @property
    def lines(self) -> Sequence[tuple[int, ...] | None]:
        """The sets of ranks that have the same buckets, in which collectives have one order: see `MatrixBucket.line`.

        What all ranks have comes first.
        """
        lines = dict.fromkeys(target.bucket.line for target in self.targets)
        return sorted(lines, key=lambda line: line is not None)

    @property
    def deferring(self) -> Sequence[Member]:
        """The parameters of which rows may have to wait; those too whose matrices all lie on other ranks."""
        may_defer = self.choice is not None and self.choice.transport.may_defer
        return [member for member in self.members if may_defer and member.number in self.in_pieces]

    def describe_own(self) -> dict[tuple[int, ...], list[str]]:
        """For each set of ranks that has matrices of its own the plan for them, in lines, the same on those ranks."""
        lines: dict[tuple[int, ...], list[str]] = {}
        for bucket in self.buckets:
            if bucket.line is not None:
                lines.setdefault(bucket.line, []).append(bucket.describe())
        return lines

    @cached_property
    def exchange_groups(self) -> Sequence[Group]:
        """The sets of ranks that exchange something of a bucket, each once."""
        layouts = [target.bucket.bucket.layout for target in self.targets]
        groups = [group for layout in layouts for group in (layout.group, *(outer.group for outer in layout.outer))]
        return list(dict.fromkeys(groups))

    def describe(self, num_ranks: int) -> list[str]:
        """The plan in lines that are the same on every one of the ranks that step together."""
        # Parameters come first: the first line that differs then says what a rank lacks, not what follows from it.
        return [
            *(_describe_member(member, num_ranks) for member in self.members),
            f"transport {stable_repr(self.choice.transport)}" if self.choice else "no transport",
            *(line for number, group in enumerate(self.groups) for line in _describe_options(number, group)),
            *(target.bucket.describe() for target in self.targets if target.bucket.line is None),
        ]

    def row_counts(self) -> list[int]:
        """Rows chosen, applied and left out as not finite, of all buckets. Waits for the device."""
        counters = [(bucket.chosen, bucket.applied, bucket.nonfinite) for bucket in self.buckets]
        return [sum(int(count.sum()) for count in counts) for counts in zip(*counters, strict=True)] or [0, 0, 0]

    def open(self) -> None:
        """Opens the transport. Collective over the ranks of the buckets."""
        if self.choice is None:
            return
        layouts = [bucket.bucket.layout for bucket in self.transported]
        outer = [axis.group for layout in layouts for axis in layout.outer]
        for group in dict.fromkeys([*(layout.group for layout in layouts), *outer]):
            _warm_up(group, self.transported[0].bucket.device)
        by_line = {line: [each.bucket for each in self.transported if each.line == line] for line in self.lines}
        self.session = open_session(self.choice.transport, {line: each for line, each in by_line.items() if each})
        for bucket, exchange in zip(self.transported, self.session.exchanges, strict=True):
            bucket.exchange = exchange


def make_plan(
    groups: Sequence[Mapping[str, Any]],
    names: Mapping[Tensor, str],
    rule: Rule,
    replicas: Group,
    transport: str | Transport | Choice,
) -> Plan:
    """The plan of an optimizer, its transport not open yet. No communication.

    Args:
        groups: parameter groups with all options.
        names: of the parameters, for messages.
        rule: of the optimizer.
        replicas: the ranks that hold equal copies of plain tensors.
        transport: a name or an instance, as the user gave it, or the choice that was made from it before.

    Raises:
        ValueError: a layout that is not supported, or that the transport does not serve.
        TransportError: the transport is not installed.
    """
    members = trainable_members(groups, names)
    matrices = [m for m in members if m.group["algorithm"] == "matrix" and 0 not in m.shape]
    parts, layouts, pieces = divided(matrices, replicas, groups)
    choice = choice_for(matrices, rule, transport, needed=bool(pieces))
    buckets, loads = make_buckets(parts, layouts, rule, choice)
    return Plan(members, buckets, elementwise_parts(members, groups), choice, loads, groups, pieces)


def choice_for(
    matrices: Sequence[Member], rule: Rule, transport: str | Transport | Choice, *, needed: bool
) -> Choice | None:
    """The transport of the matrices, or None where none is needed; one that was asked for is checked all the same."""
    if not needed and transport == "auto":
        return None
    scopes: set[Scope] = {"all"}
    if rule.chooses_rows:
        default: Scope | None = "global" if transport == "auto" else None
        scopes = {scope for m in matrices if (scope := m.group["scope"] or default) is not None}
    choice = choose_transport(transport, scopes, chooses_rows=rule.chooses_rows)
    return choice if needed else None


def elementwise_parts(members: Sequence[Member], groups: Sequence[Mapping[str, Any]]) -> list[list[Member]]:
    """Those of the members that are no matrices, by group."""
    parts = [
        [member for member in members if member.group is group] for group in groups if group["algorithm"] != "matrix"
    ]
    return [part for part in parts if part]


def divided(
    members: Sequence[Member], replicas: Group, groups: Sequence[Mapping[str, Any]]
) -> tuple[list[Part], list[Layout], frozenset[int]]:
    """The matrices of all members, where each lies, and the numbers of the members whose matrices are in pieces."""
    parts, layouts, pieces = [], [], []
    holders = {each: _num_holders(each, replicas) for group in groups for each in group["params"]}
    stepping = max([replicas.size, *holders.values()])
    for member in members:
        views, of_member = parameter_matrices(member.parameter, member.name, member.group, replicas)
        on_mesh = isinstance(member.parameter, DTensor) or replicas.size > 1
        if on_mesh and holders[member.parameter] < stepping:  # other ranks have their own matrix of this name
            views = replace(views, divided=True)
        parts += [Part(member, views, number) for number in range(len(of_member))]
        layouts += of_member
        pieces += [member.number] * views.in_pieces
    return parts, layouts, frozenset(pieces)


def _num_holders(parameter: Tensor, replicas: Group) -> int:
    """How many ranks hold parts or copies of the parameter."""
    return parameter.device_mesh.size() if isinstance(parameter, DTensor) else replicas.size


def _warm_up(group: Group, device: torch.device) -> None:
    """Connects all peers by one byte, before a real message depends on it."""
    message = torch.zeros(group.size, dtype=torch.uint8, device=device)
    ones = [1] * group.size
    group.named("the warm-up").all_to_all(torch.empty_like(message), message, ones, ones).wait()


def trainable_members(groups: Sequence[Mapping[str, Any]], names: Mapping[Tensor, str]) -> list[Member]:
    """The parameters that require gradients, with their groups."""
    trainable = [(parameter, group) for group in groups for parameter in group["params"] if parameter.requires_grad]
    return [Member(parameter, names[parameter], group, number) for number, (parameter, group) in enumerate(trainable)]


def _describe_options(number: int, group: Mapping[str, Any]) -> list[str]:
    names = (*OPTIONS, *(VIEW_KEYS if group["algorithm"] == "matrix" else ()))
    return [f"group {number} {name}={stable_repr(group[name])}" for name in names if name in group]


def _describe_member(member: Member, num_ranks: int) -> str:
    parameter = member.parameter
    where = ""
    if isinstance(parameter, DTensor):  # of a stack that is divided this is all that every rank can tell
        mesh = parameter.device_mesh
        ranks = f" with ranks {mesh.mesh.tolist()}" if mesh.size() == num_ranks else ""  # of a part others have others
        where = f" {tuple(parameter.placements)} on a mesh of {tuple(mesh.shape)}{ranks}"
    return f"{member.name}: {member.group['algorithm']} {tuple(member.shape)} {parameter.dtype}{where}"
