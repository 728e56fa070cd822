"""One model on every mesh that so many ranks can form: placements by name, and training on them.

`Mesh` is a way to lay a model out. `train_here` is called on every rank and gives back whole tensors, put together
by DTensor, which shares no code with the package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import dion_core
from dion_core.collectives import Call, observe
from dion_core.newton_schulz import NewtonSchulz

STEPS = 3


@dataclass(frozen=True)
class Weight:
    """A weight and its group keys; `rows` are those of each of its matrices where it is divided by rows."""

    shape: tuple[int, ...]
    keys: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[int, ...] = ()

    def matrices(self, value: Tensor) -> list[Tensor]:
        """The matrices in the weight, or in a tensor that lies like it; written without the code under test."""
        if self.rows:
            return list(value.split(self.rows))
        if self.keys.get("flatten"):
            return [value.flatten(1)]
        return list(value.flatten(0, -3).unbind()) if value.ndim > 2 else [value]


@dataclass(frozen=True)
class Mesh:
    """A mesh and how weights lie on it.

    Attributes:
        shape: of the mesh.
        places: of a plain weight, one letter an axis: "r"eplicated, or a dimension, or "s<dim>/<split factor>".
        ranks: of the mesh, flat; None: ascending.
        flat: the mesh is flattened to one axis first.
    """

    shape: tuple[int, ...]
    places: tuple[str, ...]
    ranks: tuple[int, ...] | None = None
    flat: bool = False

    def make(self) -> DeviceMesh:
        """The mesh. Collective."""
        names = ("a", "b", "c")[: len(self.shape)]
        if self.ranks is not None:
            return DeviceMesh("cpu", torch.tensor(self.ranks).view(self.shape), mesh_dim_names=names)
        mesh = init_device_mesh("cpu", self.shape, mesh_dim_names=names)
        return mesh._flatten("all") if self.flat else mesh

    def placements(self) -> list[Placement]:
        """Of a weight."""
        return [_placement(place) for place in self.places]


def _placement(place: str) -> Placement:
    if place == "r":
        return Replicate()
    if "/" in place:
        dim, factor = place[1:].split("/")
        made: Placement = _StridedShard(int(dim), split_factor=int(factor))
        return made
    return Shard(int(place))


@dataclass(frozen=True)
class Case:
    """One optimizer to train on a mesh.

    Attributes:
        mesh: where the weights lie; None: plain tensors on one process.
    """

    mesh: Mesh | None
    weights: tuple[Weight, ...]
    optimizer: str
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    adamw: bool = False


@dataclass
class Outcome:
    """What one rank saw: whole tensors by weight, calls of the last step, matrices orthogonalized in it, a report."""

    tensors: list[dict[str, Tensor]]
    calls: list[Call]
    orthogonalized: int
    report: dict[str, Any]
    differing: list[str]


class Counting:
    """Newton-Schulz that counts matrices of which some element is not zero."""

    def __init__(self) -> None:
        self.number = 0
        self._inner = NewtonSchulz()

    def __repr__(self) -> str:
        return "Counting()"

    def __call__(self, matrices: Tensor) -> Tensor:
        self.number += len(matrices)
        return self._inner(matrices)


def values(case: Case) -> list[list[Tensor]]:
    """Of the weights, then of the gradients of every step, one tensor a weight; experts differ in scale."""
    generator = torch.Generator().manual_seed(4)
    drawn = [
        [torch.randn(weight.shape, generator=generator, dtype=torch.float64) for weight in case.weights]
        for _ in range(1 + STEPS)
    ]
    for of_step in drawn[1:]:
        for gradient in of_step:
            if gradient.ndim > 2:
                gradient *= 10.0 ** torch.arange(len(gradient)).view(-1, *[1] * (gradient.ndim - 1))
    return [[value.to(case.dtype) for value in of_step] for of_step in drawn]


def train(case: Case) -> Outcome:
    """Trains on this rank."""
    mesh = case.mesh.make() if case.mesh else None

    def placed(value: Tensor) -> Tensor:
        if mesh is None or case.mesh is None:
            return value.clone()
        return distribute_tensor(value.clone(), mesh, case.mesh.placements(), src_data_rank=None)

    weights, *gradients = values(case)
    parameters = [nn.Parameter(placed(value)) for value in weights]
    groups: list[dict[str, Any]] = [
        {"params": [(f"weight{number}", parameter)], **weight.keys}
        for number, (parameter, weight) in enumerate(zip(parameters, case.weights, strict=True))
    ]
    vector = nn.Parameter(torch.ones(3) if mesh is None else distribute_tensor(torch.ones(3), mesh, src_data_rank=None))
    if case.adamw:
        groups.append({"params": [("vector", vector)], "algorithm": "adamw"})
    counting = Counting()
    optimizer = getattr(dion_core, case.optimizer)(groups, orthogonalizer=counting, **case.options)
    calls: list[Call] = []
    for of_step in gradients:
        for parameter, gradient in zip(parameters, of_step, strict=True):
            parameter.grad = placed(gradient)
        vector.grad = torch.ones_like(vector)
        counting.number = 0
        with observe() as calls:
            optimizer.step()
    report = optimizer.report()
    tensors = [whole({"weight": each, **optimizer.state[each]}) for each in parameters]
    return Outcome(tensors, calls, counting.number, report, [])


def train_here(cases: Sequence[Case]) -> list[Outcome]:
    """On every rank."""
    return [train(case) for case in cases]


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors in one piece. Collective."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in tensors.items()
    }


def rank() -> int:
    """This process's number."""
    return dist.get_rank()
