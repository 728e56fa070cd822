"""One model on every mesh that so many ranks can form: placements by name, training, and comparison with one process.

`Mesh` is a way to lay a model out. `train` gives what one process makes of a case; `compare_here` is called on every
rank with that, and says where this rank's parts differ from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
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
ROUNDINGS = 3e-6
"""Of weights and state of order one after three steps, where columns are split: sums are in another order."""

Whole = list[dict[str, Tensor]]
"""By weight, the weight and its state by name."""


@dataclass(frozen=True)
class Weight:
    """A weight and its group keys.

    Attributes:
        rows: those of each of its matrices, where it is divided by rows.
        places: where it lies, if elsewhere than its mesh says.
        axes: of the mesh, those that it lies on, by name; empty: all. What lies beside them has a weight of its own.
    """

    shape: tuple[int, ...]
    keys: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[int, ...] = ()
    places: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()

    def mesh_of(self, mesh: DeviceMesh) -> DeviceMesh:
        """The part of the mesh that it lies on."""
        return mesh[self.axes] if self.axes else mesh

    def matrices(self, value: Tensor) -> list[Tensor]:
        """The matrices in the weight, or in a tensor that lies like it; written without the code under test."""
        if self.rows:
            return list(value.split(self.rows))
        if self.keys.get("flatten"):
            return [value.flatten(1)]
        return list(value.flatten(0, -3).unbind()) if value.ndim > 2 else [value]

    def joined(self, matrices: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """The reverse of `matrices`, for a tensor of this shape."""
        return (torch.cat(list(matrices)) if self.rows else torch.stack(list(matrices))).reshape(tuple(shape))


@dataclass(frozen=True)
class Mesh:
    """A mesh and how weights lie on it.

    Attributes:
        shape: of the mesh.
        places: what each axis does, "r" for copies, a dimension to split, or "s<dimension>/<split factor>".
        ranks: of the mesh, flat; empty: ascending.
        flat: the mesh is flattened to one axis first.
    """

    shape: tuple[int, ...]
    places: tuple[str, ...]
    ranks: tuple[int, ...] = ()
    flat: bool = False

    @property
    def world_size(self) -> int:
        """Ranks of the mesh."""
        return torch.Size(self.shape).numel()

    def make(self) -> DeviceMesh:
        """The mesh. Collective."""
        return made_once(self.shape, self.ranks, self.flat, dist.group.WORLD)

    def placements(self, weight: Weight) -> list[Placement]:
        """Of a weight."""
        return [placement(place) for place in weight.places or self.places]


@cache
def made_once(shape: tuple[int, ...], ranks: tuple[int, ...], flat: bool, world: dist.ProcessGroup) -> DeviceMesh:
    """The mesh of that shape over these ranks, or all in order: one for all tests, since its groups have threads."""
    names = ("a", "b", "c")[: len(shape)]
    if ranks:
        return DeviceMesh("cpu", torch.tensor(ranks).view(shape), mesh_dim_names=names)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return mesh._flatten("all") if flat else mesh


def placement(place: str) -> Placement:
    """What one axis does, by its name in `Mesh.places`."""
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

    @property
    def alone(self) -> Case:
        """The same on one process, each matrix by itself."""
        options = {name: value for name, value in self.options.items() if name not in ("transport", "scope")}
        return replace(self, mesh=None, options=options)


class Counting:
    """Newton-Schulz that counts the matrices that it is given."""

    def __init__(self) -> None:
        self.number = 0
        self._inner = NewtonSchulz()

    def __repr__(self) -> str:
        return "Counting()"

    def __call__(self, matrices: Tensor) -> Tensor:
        self.number += len(matrices)
        return self._inner(matrices)


@dataclass
class Outcome:
    """What one rank saw.

    Attributes:
        errors: by weight and name the largest difference from the reference; -1 where all bits are equal.
        calls: of the last step.
        orthogonalized: matrices, in the last step.
        differing: what `check_replicas` says at the end.
        keys: of the state of each weight.
    """

    errors: list[dict[str, float]]
    calls: list[Call]
    orthogonalized: int
    report: dict[str, Any]
    differing: list[str]
    keys: list[list[str]]


def values(case: Case) -> list[list[Tensor]]:
    """Of the weights, then of the gradients of every step, one tensor a weight; experts differ in scale.

    In the second step the last row of the first weight has an infinite element, which one rank alone may see.
    """
    generator = torch.Generator().manual_seed(4)
    drawn = [
        [torch.randn(weight.shape, generator=generator, dtype=torch.float64) for weight in case.weights]
        for _ in range(1 + STEPS)
    ]
    for of_step in drawn[1:]:
        for gradient in of_step:
            if gradient.ndim > 2:
                gradient *= 10.0 ** torch.arange(len(gradient)).view(-1, *[1] * (gradient.ndim - 1))
    drawn[2][0].view(-1)[-1] = torch.inf
    return [[value.to(case.dtype) for value in of_step] for of_step in drawn]


def train(case: Case) -> Whole:
    """Weights and state after training on one process."""
    weights, *gradients = values(case)
    parameters = [
        [nn.Parameter(matrix.clone()) for matrix in weight.matrices(value)]
        for value, weight in zip(weights, case.weights, strict=True)
    ]
    optimizer = getattr(dion_core, case.optimizer)(
        [each for of_weight in parameters for each in of_weight], **case.options
    )
    for of_step in gradients:
        for of_weight, gradient, weight in zip(parameters, of_step, case.weights, strict=True):
            for parameter, part in zip(of_weight, weight.matrices(gradient), strict=True):
                parameter.grad = part.clone()
        optimizer.step()
    results = []
    for of_weight, weight in zip(parameters, case.weights, strict=True):
        tensors = [{"weight": each.detach(), **optimizer.state[each]} for each in of_weight]
        kept = 1 if weight.keys.get("flatten") else len(weight.shape) - 1
        joined = {}
        for name in tensors[0]:
            shape = weight.shape if name in ("weight", "momentum") else (*weight.shape[:kept], 1)
            joined[name] = weight.joined([each[name] for each in tensors], shape)
        results.append(joined)
    return results


def compare_here(cases: Sequence[Case], references: Sequence[Whole], group: Any = None) -> list[Outcome]:
    """On every rank, trains the cases and compares this rank's parts with those of the references."""
    return [_compare(case, reference, group) for case, reference in zip(cases, references, strict=True)]


def _compare(case: Case, reference: Whole, group: Any) -> Outcome:
    assert case.mesh is not None
    mesh, counting = case.mesh.make(), Counting()
    optimizer, parameters = build(case, mesh, orthogonalizer=counting, group=group)
    for of_step in values(case)[1:]:
        set_gradients(case, mesh, parameters, of_step)
        counting.number = 0
        with observe() as calls:
            optimizer.step()
    report, differing = optimizer.report(), optimizer.check_replicas()
    errors = [
        {name: _error({"weight": each, **optimizer.state[each]}[name], value) for name, value in whole.items()}
        for each, whole in zip(parameters, reference, strict=True)
    ]
    for number, state in optimizer.full_state_dict()["state"].items():
        whole = {name: value for name, value in reference[number].items() if name != "weight"}
        errors[number] |= {f"whole {name}": _difference(state[name], value) for name, value in whole.items()}
    waiting = [optimizer.state[each]["waited"] for each in parameters if "waited" in optimizer.state[each]]
    assert not any(bool(each.to_local().any()) for each in waiting), "rows were deferred"
    keys = [sorted(optimizer.state[each]) for each in parameters]
    return Outcome(errors, calls, counting.number, report, differing, keys)


def build(case: Case, mesh: DeviceMesh, **options: Any) -> tuple[Any, list[nn.Parameter]]:
    """The optimizer of a case on this rank, and the parameters of its weights."""
    assert case.mesh is not None
    both = list(zip(values(case)[0], case.weights, strict=True))
    parameters = [
        nn.Parameter(placed(value, weight.mesh_of(mesh), case.mesh.placements(weight))) for value, weight in both
    ]
    groups: list[dict[str, Any]] = [
        {"params": [(f"weight{number}", parameter)], **weight.keys}
        for number, (parameter, weight) in enumerate(zip(parameters, case.weights, strict=True))
    ]
    return getattr(dion_core, case.optimizer)(groups, **case.options, **options), parameters


def set_gradients(
    case: Case, mesh: DeviceMesh, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]
) -> None:
    """Gives every parameter this rank's part of its gradient."""
    assert case.mesh is not None
    for parameter, gradient, weight in zip(parameters, gradients, case.weights, strict=True):
        parameter.grad = placed(gradient, weight.mesh_of(mesh), case.mesh.placements(weight))


def placed(value: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """This rank's part of a whole tensor that every rank has. No communication."""
    return distribute_tensor(value.clone(), mesh, list(placements), src_data_rank=None)


def _error(tensor: DTensor, whole: Tensor) -> float:
    """The largest difference of this rank's part; -1 where all bits are equal, NaN counts as infinite."""
    assert tensor.shape == whole.shape
    assert tensor.dtype == whole.dtype
    wanted = placed(whole, tensor.device_mesh, tensor.placements).to_local()
    return _difference(tensor.detach().to_local(), wanted)


def _difference(actual: Tensor, wanted: Tensor) -> float:
    assert actual.shape == wanted.shape
    if torch.equal(actual, wanted):
        return -1.0
    error = float((actual.double() - wanted.double()).abs().max())
    return error if error == error else float("inf")
