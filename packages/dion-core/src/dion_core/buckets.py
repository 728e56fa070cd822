"""Matrix parameters grouped into buckets: those of one shape, layout, dtypes and options are updated together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from dion_core.builtin import LocalExchange, ReplicatedExchange
from dion_core.declared import SHARD, whole_shape
from dion_core.layout import Axis, Layout, RowTables, in_pieces, joined
from dion_core.newton_schulz import NewtonSchulz, Orthogonalizer, kernel_workspace, orthogonalizer
from dion_core.ownership import Loads, assign_owners, cut, in_order, newton_schulz_cost
from dion_core.placements import has_address, local_tensor
from dion_core.registry import Choice, check_axes
from dion_core.rules import Rule, selector, update_scale
from dion_core.selection import Selector
from dion_core.transport import Bucket, Exchange
from dion_core.views import Views

_GRADIENT, _SPEC, _LOCAL, _LAYOUT = map(attrgetter, ("grad", "_spec", "_local_tensor", "layout"))


def stable_repr(value: object) -> str:
    """The repr of a value without what differs between processes: addresses, and the device of a tensor."""
    if isinstance(value, Tensor):
        return repr(value.tolist())
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


@dataclass(frozen=True)
class Member:
    """One parameter of the optimizer: its name, its group, and its number among all, by which ranks agree."""

    parameter: Tensor
    name: str
    group: Mapping[str, Any]
    number: int
    _checked: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter."""
        return whole_shape(self.parameter, self.group)

    def gradient(self) -> Tensor | None:
        """This rank's part of the gradient, or None.

        Raises:
            ValueError: the gradient is sparse, or lies elsewhere than the parameter.
        """
        gradient = self.parameter.grad
        # Gradients share one spec from step to step, and one that is still on its way is of another type.
        if type(gradient) is DTensor and gradient._spec is self._checked.get("spec"):
            local = gradient._local_tensor
            if type(local) is Tensor and local.layout is torch.strided:
                return local
        return None if gradient is None else self._checked_gradient(gradient)

    def _checked_gradient(self, gradient: Tensor) -> Tensor:
        parameter, local = self.parameter, gradient
        alike = isinstance(gradient, DTensor) == isinstance(parameter, DTensor)
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            alike = gradient._spec is parameter._spec or gradient.placements == parameter.placements
            local = gradient._local_tensor
        if isinstance(local, AsyncCollectiveTensor):  # still on its way: it wraps the tensor that will hold it
            local = local.wait()
        if not alike:
            given, wanted = (getattr(tensor, "placements", "of a plain tensor") for tensor in (gradient, parameter))
            raise ValueError(
                f"{self.name}: the gradient has placements {given}, the parameter {wanted}: redistribute it first"
            )
        if local.layout is not torch.strided:
            raise ValueError(f"{self.name}: a gradient of layout {local.layout} is not supported, only strided ones")
        if isinstance(gradient, DTensor):
            self._checked["spec"] = gradient._spec
        return local


class MemberGradients:
    """The gradients of all members, which are looked at one by one only where they are not of the kinds they were."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members, self._parameters = members, [member.parameter for member in members]
        self._specs: list[Any] = []

    def of_step(self) -> list[Tensor | None]:
        """This rank's part of each, or None; raises as `Member.gradient`."""
        with torch._C.DisableTorchFunctionSubclass():  # to look for one takes as long as to read
            given = list(map(_GRADIENT, self._parameters))
        if set(map(type, given)) != {DTensor}:
            return [member.gradient() for member in self._members]
        specs, parts = list(map(_SPEC, given)), list(map(_LOCAL, given))
        if specs == self._specs and set(map(type, parts)) == {Tensor} and set(map(_LAYOUT, parts)) == {torch.strided}:
            return parts
        parts = [member.gradient() for member in self._members]
        self._specs = specs
        return parts


@dataclass(frozen=True)
class Part:
    """One matrix of a parameter: the one of this number among its views."""

    member: Member
    views: Views
    number: int = 0

    @property
    def name(self) -> str:
        """The parameter's, with what the matrix is called in it."""
        return self.views.full_names[self.number]


@dataclass
class MatrixBucket:
    """A bucket with the matrices in it, how they are updated, and what happened to them so far.

    `chosen`, `applied` and `nonfinite` count rows by matrix, (N,) int64 on the device. Without `has_state` only the
    parameters are here, and their updates come from other ranks.
    """

    bucket: Bucket
    parts: Sequence[Part]
    rule: Rule
    selector: Selector
    orthogonalizer: Orthogonalizer
    scale: float
    may_defer: bool
    exchange: Exchange
    has_state: bool = True
    chosen: Tensor = field(init=False)
    applied: Tensor = field(init=False)
    nonfinite: Tensor = field(init=False)

    def __post_init__(self) -> None:
        count = self.bucket.num_matrices
        # Each starts at a multiple of 16 bytes, for which kernels are compiled.
        zeros = torch.zeros(3, count + count % 2, dtype=torch.int64, device=self.bucket.device)
        self.chosen, self.applied, self.nonfinite = zeros[:, :count].unbind()

    @cached_property
    def tables(self) -> RowTables:
        """Where the rows of the matrices lie."""
        return RowTables(self.bucket.layout, self.bucket.device)

    @cached_property
    def members(self) -> Sequence[Member]:
        """The parameters that the matrices are parts of, each once."""
        return list({part.member.number: part.member for part in self.parts}.values())

    def matrices(self, tensors: Sequence[Any], *, writable: bool = True) -> Sequence[Any]:
        """The N matrices of this rank in local tensors of the members.

        Args:
            tensors: one of every member, or None where it is missing (`Any`: a gradient may be, a parameter not).
            writable: False allows copies (see `Views.of`).
        """
        if self._plain:
            return tensors
        divided = [
            None if tensor is None else views.of(tensor, writable=writable)
            for views, tensor in zip(self._views, tensors, strict=True)
        ]
        return [None if (of_member := divided[place]) is None else of_member[number] for place, number in self._places]

    def gradients(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Those of the N matrices, from the gradients of all parameters by number; none where there is no state."""
        if not self.has_state:
            return []
        return self.matrices(self._of_members(gradients), writable=False)

    @cached_property
    def _of_members(self) -> Callable[[Sequence[Any]], Sequence[Any]]:
        """What picks that of the members out of a sequence of all."""
        numbers = [member.number for member in self.members]
        return itemgetter(*numbers) if len(numbers) > 1 else lambda of_all: [of_all[numbers[0]]]

    @cached_property
    def _plain(self) -> bool:
        return all(part.views.plain for part in self.parts)

    @cached_property
    def _views(self) -> Sequence[Views]:
        """Of every member."""
        return list({part.member.number: part.views for part in self.parts}.values())

    @cached_property
    def _places(self) -> Sequence[tuple[int, int]]:
        """For each matrix the place of its member, and its number there."""
        place = {member.number: place for place, member in enumerate(self.members)}
        return [(place[part.member.number], part.number) for part in self.parts]

    @property
    def line(self) -> tuple[int, ...] | None:
        """The ranks that have this bucket, where others have other matrices of the same stack; None: all have it."""
        return self.bucket.layout.ranks if self.parts[0].views.divided else None

    @cached_property
    def ragged(self) -> bool:
        """Whether some rank holds more rows of one matrix than of another."""
        layout = self.bucket.layout
        matrices = range(layout.num_matrices)
        return any(len({layout.rows(rank, each) for each in matrices}) > 1 for rank in range(layout.group.size))

    @cached_property
    def addressable(self) -> bool:
        """Whether all tensors have memory of their own, which a tensor that wraps others has not."""
        return all(has_address(member.parameter) for member in self.members)

    @property
    def options(self) -> Mapping[str, Any]:
        """The live options of the parameter group that the bucket comes from."""
        return self.members[0].group

    def describe(self) -> str:
        """One line, the same on every rank."""
        names = ", ".join(part.views.describe(part.number) for part in self.parts)
        tensor, where = self.members[0].parameter, "plain"
        if isinstance(tensor, DTensor):  # a part of a mesh has other ranks on other ranks, but the same axis
            where = f"{tensor.placements} on a mesh of {tuple(tensor.device_mesh.shape)}"
        elif (shard := self.options.get(SHARD)) is not None:
            where = f"declared shards {shard.ranges} of axis {shard.axis % tensor.ndim}"
        how = f"{where}, {self.selector!r}, {stable_repr(self.orthogonalizer)}"
        return f"{self.bucket.describe()}, {how}: {names}"


@dataclass(frozen=True)
class Draft:
    """A matrix with all that decides its bucket."""

    part: Part
    layout: Layout
    selector: Selector
    wire_dtype: torch.dtype

    @property
    def key(self) -> Hashable:
        """What matrices of one bucket have in common."""
        tensor, group, layout = self.part.member.parameter, self.part.member.group, self.layout
        dtypes = (tensor.dtype, momentum_dtype(tensor, group), self.wire_dtype)
        columns = layout.segments if layout.axis is Axis.COLUMNS else None
        lies = (layout.group, layout.axis, layout.shape, columns, layout.outer, self.part.views.divided)
        chosen = (self.selector, self.selector.total(layout, 0))
        return (id(group), lies, chosen, type(tensor), tensor.device, dtypes)

    @property
    def shape(self) -> tuple[int, int]:
        """Of what is orthogonalized."""
        return self.selector.total(self.layout, 0), self.layout.shape[1]

    @property
    def cost(self) -> int:
        return newton_schulz_cost(*self.shape)


def momentum_dtype(parameter: Tensor, options: Mapping[str, Any]) -> torch.dtype:
    """The dtype of a parameter's momentum: as asked for, else the parameter's."""
    wanted: torch.dtype | None = options["momentum_dtype"]
    return parameter.dtype if wanted is None else wanted


def wire_dtype(momentum: torch.dtype, options: Mapping[str, Any]) -> torch.dtype:
    """The dtype of rows on the wire: as asked for, else bf16 for half precision, fp32 for fp32, fp64 for fp64."""
    wanted: torch.dtype | None = options["wire_dtype"]
    if wanted is not None:
        return wanted
    return torch.bfloat16 if momentum.itemsize == 2 else momentum


def make_drafts(parts: Sequence[Part], layouts: Sequence[Layout], rule: Rule, choice: Choice | None) -> list[Draft]:
    """The matrices with what decides their buckets, as in `make_buckets`."""
    drafts = []
    for part, layout in zip(parts, layouts, strict=True):
        options = part.member.group
        chosen = _selector(options, layout, rule, choice)
        dtype = wire_dtype(momentum_dtype(part.member.parameter, options), options)
        drafts.append(Draft(part, layout, chosen, dtype))
    return drafts


def make_buckets(
    parts: Sequence[Part], layouts: Sequence[Layout], rule: Rule, choice: Choice | None
) -> tuple[list[MatrixBucket], dict[tuple[int, ...], list[int]]]:
    """Buckets with owners, those that need the transport first and not open yet; and the load by group and rank.

    Args:
        parts: the matrices.
        layouts: where each lies.
        rule: of the optimizer.
        choice: the transport, or None where no matrix needs one.

    Raises:
        ValueError: the transport does not serve a layout.
    """
    drafts = make_drafts(parts, layouts, rule, choice)
    common, loads = _owned([draft for draft in drafts if not draft.part.views.divided])
    # What other ranks do not have comes after what all have, whose owners must not depend on it.
    own, own_loads = _owned([draft for draft in drafts if draft.part.views.divided], loads)
    buckets = [
        make_bucket(piece, rule, choice)
        for owned, load in ((common, loads), (own, own_loads))
        for entries in owned
        for piece in _pieces(entries, load[entries[0][0].layout.ranks])
    ]
    lines = list(dict.fromkeys([None, *(bucket.line for bucket in buckets)]))
    sent = [bucket for bucket in buckets if in_pieces(bucket.bucket.layout)]
    here = [bucket for bucket in buckets if not in_pieces(bucket.bucket.layout)]
    buckets = [each for line in lines for each in _in_order([bucket for bucket in sent if bucket.line == line])]
    buckets += sorted(here, key=lambda bucket: lines.index(bucket.line))
    loads |= own_loads
    if choice is not None:
        check_axes(choice, [b.bucket for b in buckets if in_pieces(b.bucket.layout)])
    return buckets, loads


def _in_order(buckets: Sequence[MatrixBucket]) -> list[MatrixBucket]:
    """Those of one line whose rows are sent, in the order in which they are stepped."""
    held, work = [], []
    for bucket in (each.bucket for each in buckets):
        rows, columns = bucket.total_rows, bucket.shape[1]
        most = max(Counter(bucket.owners).values())
        held.append(2 * most * rows * columns * bucket.dtype.itemsize)  # rows sent and received
        segments = NewtonSchulz().kernel_segments(rows, columns)
        work.append(kernel_workspace(most, rows, columns, segments, copies=0))
    return [buckets[number] for number in in_order(held, work)]


def _owned(drafts: Sequence[Draft], before: Loads | None = None) -> tuple[list[list[tuple[Draft, int]]], Loads]:
    """The matrices of every bucket with their owners, and the load by set of ranks."""
    owners, loads = assign_owners([draft.cost for draft in drafts], [draft.layout for draft in drafts], before)
    by_key: dict[Hashable, list[tuple[Draft, int]]] = {}
    for draft, owner in zip(drafts, owners, strict=True):
        by_key.setdefault(draft.key, []).append((draft, owner))
    return list(by_key.values()), loads


def _selector(options: Mapping[str, Any], layout: Layout, rule: Rule, choice: Choice | None) -> Selector:
    if not rule.chooses_rows:
        return selector("all", 1.0, layout.axis)
    scope = options["scope"]
    if choice is not None and in_pieces(layout):
        scope = scope or choice.transport.default_scope
    slack = choice.transport.local_slack() if choice is not None else None
    return selector(scope or "global", float(options["fraction"]), layout.axis, slack, shards=layout.num_holders)


def _pieces(entries: Sequence[tuple[Draft, int]], load: Sequence[int]) -> list[list[tuple[Draft, int]]]:
    """The matrices that are updated together, in pieces of which none takes too much of a rank's time."""
    pieces: dict[int, list[tuple[Draft, int]]] = {}
    places = cut([owner for _, owner in entries], entries[0][0].shape, load)
    for entry, place in zip(entries, places, strict=True):
        pieces.setdefault(place, []).append(entry)
    return [pieces[place] for place in sorted(pieces)]


def _name(entries: Sequence[tuple[Draft, int]]) -> str:
    first, others = entries[0][0], len(entries) - 1
    rows, columns = first.layout.shape
    return f"bucket {first.part.name}" + (f" and {others} more" if others else "") + f" ({rows}x{columns})"


def make_bucket(entries: Sequence[tuple[Draft, int]], rule: Rule, choice: Choice | None) -> MatrixBucket:
    """The bucket of matrices that have their key in common, each with its owner."""
    if entries[0][0].layout.outer:  # line after line, so that what one line works on is a slice of the bucket
        entries = sorted(entries, key=lambda entry: entry[1] // entry[0].layout.group.size)
    first, _ = entries[0]
    layout, options = joined([draft.layout for draft, _ in entries]), first.part.member.group
    ranks = range(layout.group.size)
    bucket = Bucket(
        layout=layout,
        owners=tuple(owner for _, owner in entries),
        max_rows=max(first.selector.offered(draft.layout, rank, 0) for draft, _ in entries for rank in ranks),
        total_rows=first.selector.total(layout, 0),
        dtype=first.wire_dtype,
        device=local_tensor(first.part.member.parameter).device,
        name=_name(entries),
    )
    builtin = ReplicatedExchange if layout.axis is Axis.REPLICATED else LocalExchange
    return MatrixBucket(
        bucket=bucket,
        parts=[draft.part for draft, _ in entries],
        rule=rule,
        selector=first.selector,
        orthogonalizer=orthogonalizer(options["orthogonalizer"]),
        scale=update_scale(options["scale"], *layout.shape),
        may_defer=choice is not None and choice.transport.may_defer and in_pieces(layout),
        exchange=builtin(bucket),
    )
