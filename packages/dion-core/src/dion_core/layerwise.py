"""Layer-wise state: every matrix is kept, and its update computed, by one of the ranks that hold equal copies of it.

For replicated training (DDP), where state that lies as its parameters do is there W times. Here a rank keeps momentum
and second moment of the parameters that it owns, in flat buffers (`shard_layout`), chooses, orthogonalizes and
normalizes their rows, and sends the result to all (`delivery`). The arithmetic is that of the other mode, bit for bit.

Owners are assigned once. Parameters that come later (another group, or ones that begin to require gradients) go into
buckets of their own, so that no state ever moves. Legend: W ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from dion_core.buckets import Draft, MatrixBucket, Member, make_bucket, make_drafts, momentum_dtype
from dion_core.collectives import Group, SoloGroup
from dion_core.declared import SHARD
from dion_core.delivery import FromOwners, SharedValues, Target
from dion_core.keeping import PART, Keeping, LikeParameters
from dion_core.layout import Axis, split_layout
from dion_core.owned_state import OwnedBucket, Ownership, gather_state, place_flat, template
from dion_core.placements import local_tensor
from dion_core.plan import Plan, choice_for, divided, elementwise_parts, trainable_members
from dion_core.registry import Choice
from dion_core.rules import Rule
from dion_core.shard_layout import Entry, even_buckets, plan_shards
from dion_core.state import State
from dion_core.transport import Transport


@dataclass(frozen=True)
class LayerWise:
    """Each rank of `group` keeps the state of the parameters that it owns: `state=LayerWise(...)`, or "layerwise".

    Attributes:
        bucket_elements: updates are sent bucket by bucket, each of at least so many elements of parameters; None cuts
            them into a few, of which one is sent while another is computed.

    Raises:
        ValueError: `bucket_elements` is not a whole number >= 1.
    """

    bucket_elements: int | None = None

    def __post_init__(self) -> None:
        """Refuses sizes that cannot be."""
        size = self.bucket_elements
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ValueError(f"bucket_elements={size!r} is not allowed: None or a whole number >= 1")


StateOption = Literal["like_parameters", "layerwise"] | LayerWise


def keeping_for(option: StateOption, group: Group, *, replicated: bool) -> Keeping:
    """What an optimizer does about its state.

    Args:
        option: as the user gave it.
        group: the ranks that step together.
        replicated: whether they were said to hold equal copies of plain tensors.

    Raises:
        ValueError: there is no such option.
    """
    if option == "like_parameters":
        return LikeParameters()
    if option == "layerwise":
        option = LayerWise()
    if not isinstance(option, LayerWise):
        raise ValueError(f'state={option!r} is not allowed: "like_parameters", "layerwise" or LayerWise(...)')
    return ByOwners(option, group, replicated=replicated)


@dataclass(kw_only=True)
class LayerWisePlan(Plan):
    """A plan whose buckets are those of the matrices owned here.

    Attributes:
        received: matrices of all owners, and the number of the bucket that has those of this rank, if there are any.
        values: elementwise parameters of all owners.
        ownership: who keeps what.
    """

    received: Sequence[tuple[MatrixBucket, tuple[int, ...]]]
    values: Sequence[SharedValues]
    ownership: Ownership
    state_mode = "layerwise"

    @cached_property
    def targets(self) -> Sequence[Target]:
        first = len(self.buckets)
        return [
            Target(bucket, first + number, sources, FromOwners(bucket.bucket))
            for number, (bucket, sources) in enumerate(self.received)
        ]

    @cached_property
    def stepped(self) -> Sequence[MatrixBucket]:
        return [*self.buckets, *(bucket for bucket, _ in self.received)]

    @property
    def shared(self) -> Sequence[SharedValues]:
        return self.values

    def describe(self, num_ranks: int) -> list[str]:
        kept = [f"state of {', '.join(bucket.names)} on ranks {bucket.flat.ranks}" for bucket in self.ownership.buckets]
        return [*super().describe(num_ranks), *kept]


class ByOwners:
    """The state of one optimizer, kept layer by layer by the ranks of a group."""

    def __init__(self, option: LayerWise, group: Group, *, replicated: bool) -> None:
        self._option, self._group, self._replicated = option, group, replicated
        self._ownership = Ownership((), (0,) * group.size)
        self._names: Mapping[Tensor, str] = {}

    def __repr__(self) -> str:
        return repr(self._option)

    def first_state(self, parameter: Tensor, group: Mapping[str, Any], rule: Rule) -> State:
        return {}  # who keeps it is known when all parameters are

    def make_plan(
        self,
        groups: Sequence[Mapping[str, Any]],
        names: Mapping[Tensor, str],
        rule: Rule,
        replicas: Group,
        transport: str | Transport | Choice,
    ) -> Plan:
        self._names = names
        members = trainable_members(groups, names)
        for member in members:
            self._check(member, replicas)
        matrices = [m for m in members if m.group["algorithm"] == "matrix" and m.parameter.numel()]
        choice_for(matrices, rule, transport, needed=False)
        parts, layouts, _ = divided(matrices, replicas, groups)
        everywhere = [split_layout(self._group, Axis.REPLICATED, layout.shape) for layout in layouts]
        drafts = make_drafts(parts, everywhere, rule, None)
        ownership = self._extended(members, drafts, rule)
        buckets, received = self._buckets(drafts, ownership, rule)
        mine = [member for member in members if ownership.owners[member.parameter] == self._group.rank]
        return LayerWisePlan(
            members=members,
            buckets=buckets,
            elementwise=elementwise_parts(mine, groups),
            choice=None,
            loads={self._group.ranks: list(ownership.loads)},
            groups=groups,
            received=received,
            values=self._values(members, ownership),
            ownership=ownership,
        )

    def adopt(self, plan: Plan, states: dict[Tensor, State]) -> None:
        assert isinstance(plan, LayerWisePlan)
        self._ownership = plan.ownership
        for bucket in plan.ownership.buckets:
            place_flat(bucket, self._group.rank, states)
        for parameter, owner in plan.ownership.owners.items():
            if owner != self._group.rank:
                states[parameter] = {}

    def marked(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        if self._group.size == 1:
            return state_dict
        return {**state_dict, PART: {"rank": self._group.rank, "world_size": self._group.size}}

    def own_part(self, state_dict: dict[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        own = {}
        for number, parameter in zip(numbers, parameters, strict=False):
            owner = self._ownership.owners.get(parameter)  # none while it is frozen
            saved = state_dict["state"].get(number)
            if owner == self._group.rank and not saved and PART in state_dict:
                part = state_dict[PART]
                raise ValueError(
                    f"{self._names[parameter]}: its state belongs on rank {owner} of {self._group.size}, and what rank "
                    f"{part['rank']} of {part['world_size']} kept has none of it: save full_state_dict() there"
                )
            if saved and owner in (None, self._group.rank):
                own[number] = {key: _plain(value) for key, value in saved.items()}
        return {**state_dict, "state": own}

    def whole(self, state_dict: dict[str, Any], parameters: Sequence[Tensor], to: int | None) -> dict[str, Any]:
        numbers = {parameter: number for number, parameter in enumerate(parameters)}
        saved = state_dict["state"]
        states = {parameter: saved[number] for parameter, number in numbers.items() if number in saved}
        unowned = states.keys() - self._ownership.owners.keys()  # loaded for parameters that are frozen
        whole = {numbers[parameter]: states[parameter] for parameter in unowned}
        for bucket in self._ownership.buckets:
            rank = None if to is None else self._group.ranks.index(to)
            for parameter, state in gather_state(bucket, self._group, states, rank):
                whole[numbers[parameter]] = state
        rest = {key: value for key, value in state_dict.items() if key != PART}
        return {**rest, "state": dict(sorted(whole.items()))}

    def _check(self, member: Member, replicas: Group) -> None:
        """Raises ValueError for a parameter of which the ranks do not hold equal copies."""
        parameter, size = member.parameter, self._group.size
        if member.group.get(SHARD) is not None:
            raise ValueError(
                f'{member.name}: {member.group[SHARD]!r} is not supported with state="layerwise", which is for whole '
                "copies on all ranks; of declared shards every rank keeps the state of its own without it"
            )
        if self._replicated and not isinstance(parameter, DTensor) and replicas.size != size:
            raise ValueError(
                f"{member.name} is a plain tensor with copies on ranks {list(replicas.ranks)}, and others lie on "
                f'{list(self._group.ranks)}: state="layerwise" needs the same ranks for all parameters'
            )
        if not isinstance(parameter, DTensor):
            if not self._replicated:
                raise ValueError(
                    f'{member.name} is a plain tensor, and state="layerwise" needs the ranks that hold equal copies of '
                    "it: give group=, as for DDP"
                )
        elif parameter.device_mesh.size() != size or not _replicated(parameter):
            raise ValueError(
                f"{member.name}: placements {tuple(parameter.placements)} on {parameter.device_mesh} are not supported "
                f'with state="layerwise", which is for whole copies on all {size} ranks (DDP, Replicate()). Of sharded '
                "parameters every rank keeps the state of its own shard without it: leave state= out"
            )

    def _extended(self, members: Sequence[Member], drafts: Sequence[Draft], rule: Rule) -> Ownership:
        """Who keeps what, with the parameters that nobody keeps yet in new buckets."""
        before = self._ownership
        new = [member for member in members if member.parameter not in before.owners]
        costs: Counter[int] = Counter()
        for draft in drafts:
            costs[draft.part.member.number] += draft.cost
        shared = Counter(_address(parameter) for parameter in [*before.owners, *(m.parameter for m in new)])
        homes: dict[Hashable, int] = {_address(parameter): owner for parameter, owner in before.owners.items()}
        kinds: dict[Hashable, list[Member]] = {}
        for member in reversed(new):  # as their gradients become ready
            kinds.setdefault(_kind(member), []).append(member)
        buckets, loads = list(before.buckets), list(before.loads)
        for kind in sorted(kinds.values(), key=lambda of_kind: of_kind[0].group["algorithm"] != "matrix"):
            entries = [_entry(member, costs, shared) for member in kind]
            size = self._option.bucket_elements or even_buckets(entries, self._group.size)
            planned, loads = plan_shards(entries, bucket_elements=size, loads=loads, homes=homes)
            for flat in planned:
                inside = [kind[number] for number in flat.numbers]
                homes |= {_address(each.parameter): rank for each, rank in zip(inside, flat.ranks, strict=True)}
                templates = tuple(template(each.parameter, each.group, rule) for each in inside)
                parameters = tuple(each.parameter for each in inside)
                buckets.append(OwnedBucket(parameters, tuple(each.name for each in inside), templates, flat))
        return Ownership(tuple(buckets), tuple(loads))

    def _buckets(
        self, drafts: Sequence[Draft], ownership: Ownership, rule: Rule
    ) -> tuple[list[MatrixBucket], list[tuple[MatrixBucket, tuple[int, ...]]]]:
        """The matrices owned here, and those of all owners, each bucket of one shape and out of one flat bucket."""
        flat = {parameter: number for number, each in enumerate(ownership.buckets) for parameter in each.parameters}
        by_key: dict[tuple[int, Hashable], list[tuple[Draft, int]]] = {}
        for draft in drafts:
            parameter = draft.part.member.parameter
            by_key.setdefault((flat[parameter], draft.key), []).append((draft, ownership.owners[parameter]))
        buckets: list[MatrixBucket] = []
        received: list[tuple[MatrixBucket, tuple[int, ...]]] = []
        for _, entries in sorted(by_key.items(), key=lambda item: item[0][0]):
            entries.sort(key=lambda entry: entry[1])  # messages of all owners then stand in the order of the matrices
            own = [(_whole(draft), 0) for draft, owner in entries if owner == self._group.rank]
            sources = (len(buckets),) if own else ()
            if own:
                buckets.append(make_bucket(own, rule, None))
            received.append((replace(make_bucket(entries, rule, None), has_state=False), sources))
        return buckets, received

    def _values(self, members: Sequence[Member], ownership: Ownership) -> list[SharedValues]:
        by_parameter = {m.parameter: m for m in members if m.group["algorithm"] != "matrix" and m.parameter.numel()}
        values = []
        for bucket in ownership.buckets:
            by_owner = [
                [by_parameter[parameter] for parameter, _ in bucket.kept_by(rank) if parameter in by_parameter]
                for rank in range(self._group.size)
            ]
            if any(by_owner):
                first = next(member for of_owner in by_owner for member in of_owner)
                name = f"values of {first.name} and {sum(map(len, by_owner)) - 1} more"
                values.append(SharedValues(by_owner, self._group, name))
        return values


def _whole(draft: Draft) -> Draft:
    """The matrix as its owner sees it, who works alone."""
    return replace(draft, layout=split_layout(SoloGroup(), Axis.WHOLE, draft.layout.shape))


def _kind(member: Member) -> Hashable:
    """What parameters of one bucket have in common, so that their state has the same keys and dtypes."""
    parameter, group = member.parameter, member.group
    return group["algorithm"], parameter.device, parameter.dtype, momentum_dtype(parameter, group)


def _entry(member: Member, costs: Mapping[int, int], shared: Mapping[int, int]) -> Entry:
    numel, address = local_tensor(member.parameter).numel(), _address(member.parameter)
    tied = address if address and shared[address] > 1 else None
    return Entry(numel, costs.get(member.number, numel), pair=tied)


def _address(parameter: Tensor) -> int:
    """Where it lies; parameters that lie at one place are tied, and change together."""
    return local_tensor(parameter).data_ptr()


def _replicated(tensor: DTensor) -> bool:
    return all(place == Replicate() for place in tensor.placements)


def _plain(value: Any) -> Any:
    """A tensor that every rank holds whole as this rank's copy."""
    return local_tensor(value) if isinstance(value, DTensor) and _replicated(value) else value
