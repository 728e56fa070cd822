"""What the stages of a step read and write, bucket by bucket: tensors as operands, and the options as scalars.

On a GPU the addresses of all tensors and the values of all options lie in one device tensor, which the host
rewrites by one pinned copy a step. A captured step therefore follows new gradients and new learning rates.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
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

_LOCAL, _MOMENTUM, _SECOND_MOMENT = attrgetter("_local_tensor"), itemgetter("momentum"), itemgetter("second_moment")

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
        self._sources: list[_Source | _ParameterSource] = []
        self._known: list[int] = []

    def of_step(self, state: States, gradients: Sequence[Gradients]) -> list[Operands]:
        """The operands of the coming step, with their addresses and options on the device.

        Args:
            state: of the optimizer.
            gradients: of every bucket, its N gradients.
        """
        # A parameter's state may be replaced as a whole; the sources keep the old one, so that its id is no other's.
        entries = list(map(id, state.values()))
        if entries != self._known:
            self._sources = [
                _Source(bucket, state) if bucket.has_state else _ParameterSource(bucket) for bucket in self._buckets
            ]
            self._known = entries
        operands = [source.of_step(each) for source, each in zip(self._sources, gradients, strict=True)]
        for table in self._tables:
            on_device = table.of_step([operands[number] for number in table.numbers])
            for number, each in zip(table.numbers, on_device, strict=True):
                operands[number] = each
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
                numbers.write([], [_host_value(rate)])
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
        tables = torch.split_with_sizes(self._values.integers, sizes)
        places = [table[:count] for table, count in zip(tables, counts, strict=True)]
        self._places = [places[start : start + len(ROLES)] for start in range(0, len(places), len(ROLES))]
        scalars = self._values.floats.unbind()
        self._scalars = [scalars[start : start + len(SCALARS)] for start in range(0, len(scalars), len(SCALARS))]
        self._known: list[dict[str, Matrices]] = [{} for _ in buckets]

    def of_step(self, given: Sequence[Operands]) -> list[Operands]:
        made: list[Operands] = []
        addresses: list[int] = []
        values: list[float] = []
        tables = zip(given, self._places, self._scalars, self._known, self._plain, strict=True)
        for operands, places, scalars, known, plain in tables:
            found: dict[str, Sequence[Any]] = {}
            for role, place in zip(ROLES, places, strict=True):
                if plain:  # of different shapes or without addresses: no kernel can go through them
                    found[role] = getattr(operands, role)
                else:
                    found[role] = _found(role, operands, place, known)
                each = found[role]
                addresses += (isinstance(each, Matrices) and each.starts) or [0] * len(place)
                addresses += [0] * (len(place) % 2)
            values += [_host_value(value) for value in operands.scalars.values()]
            made.append(Operands(**found, scalars=dict(zip(SCALARS, scalars, strict=True))))
        self._values.write(addresses, values)
        for operands, scalars in zip(given, self._scalars, strict=True):
            for value, scalar in zip(operands.scalars.values(), scalars, strict=True):
                if isinstance(value, Tensor) and value.is_cuda:
                    scalar.copy_(value)
        return made


class _Source:
    """Where the operands of one bucket come from in every step."""

    def __init__(self, bucket: MatrixBucket, state: States) -> None:
        self._bucket = bucket
        self._parameters: list[Any] = [member.parameter for member in bucket.members]
        self._states = [state[parameter] for parameter in self._parameters]
        self._sharded = isinstance(self._parameters[0], DTensor)
        self._state_sharded = isinstance(self._states[0]["momentum"], DTensor)
        self._has_second_moment = "second_moment" in self._states[0]

    def of_step(self, gradients: Gradients) -> Operands:
        """The operands as they are now: a parameter or its state may have been given another tensor."""
        states, options = self._states, self._bucket.options
        return Operands(
            parameters=self._bucket.matrices(_locals(self._parameters, self._sharded)),
            momentum=self._parts(list(map(_MOMENTUM, states))),
            gradients=gradients,
            second_moment=self._parts(list(map(_SECOND_MOMENT, states))) if self._has_second_moment else [],
            waited=self._parts([state[WAITED] for state in states]) if self._bucket.may_defer else [],
            scalars={name: options.get(name, 0.0) for name in SCALARS},
        )

    def _parts(self, tensors: Sequence[Any]) -> Sequence[Tensor]:
        """The matrices in this rank's parts of the state."""
        return self._bucket.matrices(_locals(tensors, self._state_sharded))


class _ParameterSource:
    """As `_Source`, of a bucket without state."""

    def __init__(self, bucket: MatrixBucket) -> None:
        self._bucket = bucket
        self._parameters: list[Any] = [member.parameter for member in bucket.members]
        self._sharded = isinstance(self._parameters[0], DTensor)

    def of_step(self, gradients: Gradients) -> Operands:
        options = self._bucket.options
        parameters = self._bucket.matrices(_locals(self._parameters, self._sharded))
        return Operands(parameters, [], gradients, [], [], {name: options.get(name, 0.0) for name in SCALARS})


def _locals(tensors: Sequence[Any], sharded: bool) -> Sequence[Any]:
    """This rank's parts; all of a bucket are DTensors, or none is."""
    return list(map(_LOCAL, tensors)) if sharded else tensors


def _found(role: str, operands: Operands, place: Tensor, known: dict[str, Matrices]) -> Sequence[Any]:
    """The tensors of one role by address; what lies where it did is not looked at again, but for gradients."""
    tensors, before = getattr(operands, role), known.get(role)
    if before is not None and before.holds(tensors):
        return before
    found = _on_device(role, tensors, place, operands.parameters[0])
    if role != "gradients" and isinstance(found, Matrices):  # the memory of gradients is the user's to free
        known[role] = found
    return found


def _on_device(role: str, tensors: Sequence[Any], place: Tensor, like: Tensor) -> Sequence[Any]:
    """The tensors by address, or as they are where no kernel can go through them and they must not be copied."""
    if role != "gradients" and not alike(tensors):
        logger.info("%s of one bucket differ in strides and are handled one by one", role)
        return tensors
    return matrices(tensors, place, like)


def _host_value(value: float | Tensor) -> float:
    """The value of an option where the host knows it; that of a tensor on the GPU is copied on the device."""
    return 0.0 if isinstance(value, Tensor) and value.is_cuda else float(value)
