"""What the stages of a step read and write, bucket by bucket: tensors as operands, and the options as scalars.

On a GPU the addresses of all tensors and the values of all options lie in one device tensor, which the host
rewrites by one pinned copy a step. A captured step therefore follows new gradients and new learning rates.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dion_core.buckets import MatrixBucket, Member
from dion_core.matrices import DeviceNumbers, Matrices, alike, matrices
from dion_core.placements import local_part
from dion_core.state import WAITED

logger = logging.getLogger("dion_core")

_LOCAL = attrgetter("_local_tensor")
_STATES = {name: itemgetter(name) for name in ("momentum", "second_moment", WAITED)}

States = Mapping[Tensor, Mapping[str, Any]]
Gradients = Sequence[Tensor | None]

SCALARS = ("lr", "weight_decay", "momentum", "beta2")
"""Options that the stages read; where an optimizer has none of a name it is 0."""
ROLES = ("parameters", "momentum", "gradients", "second_moment", "waited")
"""The tensors of a bucket, by what they are for."""


@dataclass(frozen=True)
class Operands:
    """One bucket in one step.

    Attributes:
        parameters: N tensors (R, C), this rank's parts.
        momentum: N tensors (R, C).
        gradients: N tensors (R, C) or None.
        second_moment: N tensors (R, 1), or none at all.
        waited: N tensors (R, 1), or none at all.
        scalars: the options of `SCALARS`; on a GPU 0-dim float64 tensors.
    """

    parameters: Sequence[Tensor]
    momentum: Sequence[Tensor]
    gradients: Gradients
    second_moment: Sequence[Tensor]
    waited: Sequence[Tensor]
    scalars: Mapping[str, float | Tensor]

    def with_other(self, gradients: Gradients, scalars: Mapping[str, float | Tensor]) -> Operands:
        """The same with other gradients and scalars."""
        return Operands(self.parameters, self.momentum, gradients, self.second_moment, self.waited, scalars)

    @property
    def form(self) -> Hashable:
        """What a captured step cannot follow: the form of the tensors. Their addresses and the options it can."""
        tensors = [getattr(self, role) for role in ROLES]
        return tuple((t.shape, t.stride, t.dtype, t.aligned) for t in tensors if isinstance(t, Matrices))


class StepOperands:
    """The operands of all buckets of a plan."""

    def __init__(self, buckets: Sequence[MatrixBucket]) -> None:
        self._buckets = buckets
        numbers: dict[torch.device, list[int]] = {}
        for number, bucket in enumerate(buckets):
            if bucket.bucket.device.type == "cuda":
                numbers.setdefault(bucket.bucket.device, []).append(number)
        self._tables = [_DeviceTable([buckets[n] for n in of_device], of_device) for of_device in numbers.values()]
        self._sources: list[_Source] = []
        self._known: list[int] = []
        self._lasting = _Lasting([])
        self._last: list[Operands] = []
        """Of the last step, without gradients, whose memory is the user's to free."""

    def of_step(self, state: States, gradients: Sequence[Gradients]) -> list[Operands]:
        """The operands of the coming step, with their addresses and options on the device.

        Args:
            state: of the optimizer.
            gradients: of every bucket, its N gradients.
        """
        # A parameter's state may be replaced as a whole; the sources keep the old one, so that its id is no other's.
        entries = list(map(id, state.values()))
        if entries != self._known:
            self._sources = [_Source(bucket, state) for bucket in self._buckets]
            self._known, self._last, self._lasting = entries, [], _Lasting(self._sources)
        stayed = bool(self._tables) and self._lasting.stayed()
        self._last = self._last if stayed else []
        if self._last:
            news = zip(self._last, gradients, self._sources, strict=True)
            operands = [last.with_other(new, source.scalars) for last, new, source in news]
        else:
            operands = [source.of_step(each) for source, each in zip(self._sources, gradients, strict=True)]
        for table in self._tables:
            on_device = table.of_step([operands[number] for number in table.numbers])
            for number, each in zip(table.numbers, on_device, strict=True):
                operands[number] = each
        self._last = self._last or [each.with_other((), each.scalars) for each in operands]
        return operands


class Rates:
    """The learning rates of elementwise groups, on a GPU as tensors there, so that a captured step follows them."""

    def __init__(self, parts: Sequence[Sequence[Member]]) -> None:
        self._groups = [part[0].group for part in parts]
        devices = [local_part(part[0].parameter).device for part in parts]
        self._on_device = [DeviceNumbers(0, 1, device) if device.type == "cuda" else None for device in devices]

    def of_step(self) -> list[float | Tensor]:
        """The rate of every group."""
        rates: list[float | Tensor] = []
        for group, numbers in zip(self._groups, self._on_device, strict=True):
            rate = group["lr"]
            if numbers is not None:
                numbers.write(array("q"), [_host_value(rate)])
                if isinstance(rate, Tensor) and rate.is_cuda:
                    numbers.floats.copy_(rate)
                rate = numbers.floats[0]
            rates.append(rate)
        return rates


class _DeviceTable:
    """The addresses and options of the buckets on one GPU.

    Attributes:
        numbers: which buckets of the plan they are.
    """

    def __init__(self, buckets: Sequence[MatrixBucket], numbers: Sequence[int]) -> None:
        self.numbers = numbers
        counts = [bucket.bucket.num_matrices for bucket in buckets for _ in ROLES]
        # Tables start at multiples of 16 bytes, whatever their lengths: kernels are compiled for that.
        sizes = [count + count % 2 for count in counts]
        self._plain = [bucket.ragged or not bucket.addressable for bucket in buckets]
        for bucket in buckets:
            if bucket.ragged:
                logger.info("%s: ranks hold different numbers of rows; plain torch, not kernels", bucket.bucket.name)
            elif not bucket.addressable:
                logger.info("%s: tensors that wrap others; plain torch, not kernels", bucket.bucket.name)
        self._values = DeviceNumbers(sum(sizes), len(SCALARS) * len(buckets), buckets[0].bucket.device)
        starts = iter(accumulate(sizes, initial=0))
        self._addresses = array("q", [0] * sum(sizes))
        self._starts = [{role: next(starts) for role in ROLES} for _ in buckets]
        self._places = [
            {
                role: self._values.integers[start : start + bucket.bucket.num_matrices]
                for role, start in of_bucket.items()
            }
            for bucket, of_bucket in zip(buckets, self._starts, strict=True)
        ]
        scalars = iter(self._values.floats.unbind())
        self._scalars = [{name: next(scalars) for name in SCALARS} for _ in buckets]
        self._known: list[dict[str, Matrices]] = [{} for _ in buckets]

    def of_step(self, given: Sequence[Operands]) -> list[Operands]:
        """The operands by address; where they are so already, from an earlier step, only gradients are looked at."""
        made: list[Operands] = []
        for number, operands in enumerate(given):
            if isinstance(operands.parameters, Matrices):
                made.append(operands.with_other(self._found(number, "gradients", operands), self._scalars[number]))
            elif self._plain[number]:  # of different shapes or without addresses: no kernel can go through them
                made.append(operands.with_other(operands.gradients, self._scalars[number]))
            else:
                by_address = {role: self._found(number, role, operands) for role in ROLES}
                made.append(Operands(**by_address, scalars=self._scalars[number]))
        values = [_host_value(value) for operands in given for value in operands.scalars.values()]
        self._values.write(self._addresses, values)
        for operands, scalars in zip(given, self._scalars, strict=True):
            for name, value in operands.scalars.items():
                if isinstance(value, Tensor) and value.is_cuda:
                    scalars[name].copy_(value)
        return made

    def _found(self, number: int, role: str, operands: Operands) -> Sequence[Any]:
        """The tensors of one role by address, or as they are where no kernel can go through and none may copy them."""
        tensors: Sequence[Any] = getattr(operands, role)
        place, start = self._places[number][role], self._starts[number][role]
        before = self._known[number].get(role)
        if role != "gradients" and before is not None and before.holds(tensors):
            return before.of(tensors)
        if role != "gradients" and not alike(tensors):
            logger.info("%s of one bucket differ in strides and are handled one by one", role)
            return tensors
        found = matrices(tensors, place, operands.parameters[0], before)
        if before is None or found.starts is not before.starts:
            self._addresses[start : start + len(place)] = array("q", found.starts or [0] * len(place))
            self._known[number][role] = found.of(())  # the memory of gradients is the user's to free
        return found


class _Source:
    """Where the operands of one bucket come from in every step.

    Attributes:
        parameters: of its members.
        sharded: whether they are DTensors, which all are or none.
        states: of its members; none where the bucket has no state.
        roles: what picks each of the state's tensors.
        state_sharded: whether these are DTensors.
    """

    def __init__(self, bucket: MatrixBucket, state: States) -> None:
        self._bucket = bucket
        self.parameters: list[Any] = [member.parameter for member in bucket.members]
        self.sharded = isinstance(self.parameters[0], DTensor)
        self.states = [state[parameter] for parameter in self.parameters] if bucket.has_state else []
        first = self.states[0] if self.states else {}
        self.roles = [role for name, role in _STATES.items() if name in first and (name != WAITED or bucket.may_defer)]
        self.state_sharded = isinstance(first.get("momentum"), DTensor)

    def of_step(self, gradients: Gradients) -> Operands:
        """The operands as they are now: a parameter or its state may have been given another tensor."""
        matrices = self._bucket.matrices
        states = {role: matrices(_locals(list(map(role, self.states)), self.state_sharded)) for role in self.roles}
        return Operands(
            parameters=matrices(_locals(self.parameters, self.sharded)),
            momentum=states.get(_STATES["momentum"], []),
            gradients=gradients,
            second_moment=states.get(_STATES["second_moment"], []),
            waited=states.get(_STATES[WAITED], []),
            scalars=self.scalars,
        )

    @property
    def scalars(self) -> dict[str, float | Tensor]:
        """The options as they are now."""
        options = self._bucket.options
        return {name: options.get(name, 0.0) for name in SCALARS}


class _Lasting:
    """Tells whether parameters and state lie where they did, which is faster for all at once than one by one."""

    def __init__(self, sources: Sequence[_Source]) -> None:
        self._parameters: dict[bool, list[Any]] = {}
        self._states: dict[tuple[Callable[[Any], Any], bool], list[Any]] = {}
        for source in sources:
            self._parameters.setdefault(source.sharded, []).extend(source.parameters)
            for role in source.roles:
                self._states.setdefault((role, source.state_sharded), []).extend(source.states)
        self._starts: list[int] = []

    def stayed(self) -> bool:
        """Whether all lie where they did when this was asked last, row after row without gaps."""
        matrices: list[Tensor] = []
        columns: list[Tensor] = []  # (R, 1): at the same address they cannot lie otherwise
        for sharded, parameters in self._parameters.items():
            matrices += map(_LOCAL, parameters) if sharded else parameters
        for (role, sharded), states in self._states.items():
            kind = matrices if role is _STATES["momentum"] else columns
            kind += map(_LOCAL, map(role, states)) if sharded else map(role, states)
        contiguous, before = all(map(Tensor.is_contiguous, matrices)), self._starts
        self._starts = list(map(Tensor.data_ptr, matrices + columns)) if contiguous else []
        return contiguous and before == self._starts


def storages(operands: Sequence[Operands], gradients: Sequence[Tensor | None]) -> set[int]:
    """The addresses of all storages that may be others in a step which is alike but for that."""
    tensors = [tensor for each in operands for role in ROLES for tensor in getattr(each, role)]
    found = {tensor.untyped_storage().data_ptr() for tensor in (*tensors, *gradients) if tensor is not None}
    return found - {0}  # that of tensors without elements


def _locals(tensors: Sequence[Any], sharded: bool) -> Sequence[Any]:
    """This rank's parts; all of a bucket are DTensors, or none is."""
    return list(map(_LOCAL, tensors)) if sharded else tensors


def _host_value(value: float | Tensor) -> float:
    """The value of an option where the host knows it; that of a tensor on the GPU is copied on the device."""
    return 0.0 if isinstance(value, Tensor) and value.is_cuda else float(value)
