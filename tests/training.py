"""Trains small optimizers on every rank from given global gradients, and as the one-process reference.

A `Problem` is what to train: whole weights and whole gradients. A `Cell` is how: the optimizer, its options
and where the parameters lie. `run_cells` is called on every rank and returns that rank's own parts, so that
`assembled` can put whole tensors together without any code of the package, and compare what replicas hold.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import dion_core
from dion_comm_capped import Capped
from dion_core import DeclaredShard, available_transports
from dion_core.collectives import Call, observe
from dion_core.testing.ranks import pool
from dion_core.transport import Transport
from tests.declared_cases import DECLARED, declared_part, shard_of
from tests.reference import Options, ReferenceElementwise, ReferenceMatrix, chunk_shards

LAYOUTS = ("shard0", "shard1", "replicate", "ddp", "plain")
"""Row- and column-sharded, replicated DTensors; plain tensors replicated over `group`, or each rank's own.

Others are "hsdp", row-sharded over the second dimension of a (2, W / 2) mesh, replicated over the first; `DECLARED`.
"""
EXACT_LAYOUTS = ("shard0", "replicate", "ddp")
MATRIX_FAMILY = ("Muon", "NorMuon")
OPTIMIZERS = (*MATRIX_FAMILY, "Dion2", "NorDion2")
ELEMENTWISE_LR = 0.003

Snapshot = dict[str, Tensor]
"""Weights and state by "matrix0.weight", "matrix0.momentum", "adamw0.exp_avg", ..."""


@dataclass(frozen=True, eq=False)
class Problem:
    """Whole weights by name ("matrix0", "adamw0", "lion0", ...) and, for every step, whole gradients by name.

    A name that a step does not hold, or holds as None, has no gradient in it.
    """

    weights: Mapping[str, Tensor]
    gradients: Sequence[Mapping[str, Tensor | None]]

    def to(self, dtype: torch.dtype) -> "Problem":
        """The same values in another dtype."""
        return Problem(
            {name: weight.to(dtype) for name, weight in self.weights.items()},
            [
                {name: None if value is None else value.to(dtype) for name, value in step.items()}
                for step in self.gradients
            ],
        )


def random_problem(
    matrices: Sequence[tuple[int, ...]],
    *,
    adamw: Sequence[tuple[int, ...]] = (),
    lion: Sequence[tuple[int, ...]] = (),
    num_steps: int = 5,
    seed: int = 0,
) -> Problem:
    """Normally distributed weights and gradients in float64, the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    kinds = {"matrix": matrices, "adamw": adamw, "lion": lion}
    shapes = {f"{kind}{i}": shape for kind, of_kind in kinds.items() for i, shape in enumerate(of_kind)}

    def draw() -> dict[str, Tensor]:
        return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}

    return Problem(draw(), [draw() for _ in range(num_steps)])


@dataclass(frozen=True, eq=False)
class Cell:
    """One optimizer to train.

    Attributes:
        layout: of all parameters, or of each by name.
        absent: (rank, step, name) of gradients that the problem has and that rank does not.
        steps: after which steps (1 is the first) weights and state are recorded; trains to the last.
        group_name: the name of the dimension of the mesh given as `group`; None gives the default group to "ddp".
    """

    problem: Problem
    optimizer: str
    layout: str | Mapping[str, str]
    options: Mapping[str, Any] = field(default_factory=dict)
    absent: Sequence[tuple[int, int, str]] = ()
    steps: Sequence[int] = (1, 2, 5)
    group_name: str | None = None

    def layout_of(self, name: str) -> str:
        """The layout of one parameter."""
        return self.layout if isinstance(self.layout, str) else self.layout[name]


class Outcome(NamedTuple):
    """What a rank holds after the recorded steps, the collectives that it issued in all steps, and its report."""

    snapshots: list[Snapshot]
    calls: list[Call]
    report: dict[str, Any]


def whole_mesh() -> DeviceMesh:
    """A one-dimensional mesh of all ranks, on GPUs where they communicate by NCCL."""
    device_type = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("ranks",))


def place(value: Tensor, placement: Placement, mesh: DeviceMesh) -> DTensor:
    """This rank's part of a whole tensor that every rank has. No communication."""
    return distribute_tensor(value.clone().to(mesh.device_type), mesh, [placement], src_data_rank=None)


def placed(value: Tensor, layout: str, mesh: DeviceMesh) -> Tensor:
    """A copy of the value as it lies on this rank; vectors have no second dimension to split."""
    if layout in DECLARED:
        return declared_part(value, layout, mesh)
    if layout in ("ddp", "plain"):
        return value.clone().to(mesh.device_type)
    if layout == "hsdp":
        both = halves(dist.group.WORLD)
        return distribute_tensor(value.clone(), both, [Replicate(), Shard(0)], src_data_rank=None)
    placements = {"shard0": Shard(0), "shard1": Shard(min(1, value.ndim - 1)), "replicate": Replicate()}
    return place(value, placements[layout], mesh)


@cache
def halves(world: dist.ProcessGroup) -> DeviceMesh:
    """One mesh for all tensors: each makes process groups of its own."""
    return init_device_mesh("cpu", (2, world.size() // 2))


def build(cell: Cell, mesh: DeviceMesh, group: Any = None) -> tuple[torch.optim.Optimizer, dict[str, nn.Parameter]]:
    """The optimizer of a cell on this rank, and its parameters by name. `group` comes before that of the cell."""
    parameters = {
        name: nn.Parameter(placed(weight, cell.layout_of(name), mesh)) for name, weight in cell.problem.weights.items()
    }
    return optimizer_of(cell, parameters, mesh, group), parameters


def _own_group(cell: Cell, parameters: Mapping[str, nn.Parameter]) -> Any:
    """What the cell gives as `group`: a mesh by its name, all ranks to plain tensors, or nothing."""
    if cell.group_name is not None:
        return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=(cell.group_name,))
    return dist.group.WORLD if {"ddp", *DECLARED} & set(map(cell.layout_of, parameters)) else None


def optimizer_of(
    cell: Cell, parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh | None = None, group: Any = None
) -> torch.optim.Optimizer:
    """The optimizer of a cell for parameters that lie as it says: groups of matrices, AdamW and Lion, in this order."""
    group = _own_group(cell, parameters) if group is None else group
    groups: list[dict[str, Any]] = []
    for algorithm in ("matrix", "adamw", "lion"):
        options: dict[str, Any] = {} if algorithm == "matrix" else {"lr": ELEMENTWISE_LR}
        by_shard: dict[DeclaredShard | None, list[tuple[str, nn.Parameter]]] = {}
        for name in (each for each in parameters if each.startswith(algorithm)):
            shard = shard_of(cell.problem.weights[name].shape, cell.layout_of(name), mesh)
            by_shard.setdefault(shard, []).append((name, parameters[name]))
        for shard, of_shard in by_shard.items():
            known = options if shard is None else {**options, "shard": shard}
            groups.append({"params": of_shard, "algorithm": algorithm, **known})
    optimizer: torch.optim.Optimizer = getattr(dion_core, cell.optimizer)(groups, group=group, **cell.options)
    return optimizer


def set_gradients(
    parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor | None], cell: Cell, mesh: DeviceMesh
) -> None:
    """Gives every parameter this rank's part of its whole gradient, or None."""
    for name, parameter in parameters.items():
        gradient = gradients.get(name)
        parameter.grad = None if gradient is None else placed(gradient, cell.layout_of(name), mesh)


def local(tensor: Tensor) -> Tensor:
    """A copy of this rank's part, on the CPU."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone().cpu()


def snapshot(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> Snapshot:
    """This rank's parts of all weights and state."""
    taken = {}
    for name, parameter in parameters.items():
        taken[f"{name}.weight"] = local(parameter)
        for key, value in optimizer.state[parameter].items():
            taken[f"{name}.{key}"] = local(value)
    return taken


def run_cell(cell: Cell, mesh: DeviceMesh, group: Any = None) -> Outcome:
    """Trains one cell on this rank. `group` comes before that of the cell."""
    optimizer, parameters = build(cell, mesh, group)
    snapshots = []
    absent = {(step, name) for rank, step, name in cell.absent if rank == mesh.get_rank()}
    with observe() as calls:
        for step in range(1, max(cell.steps) + 1):
            gradients = cell.problem.gradients[step - 1]
            present = {name: value for name, value in gradients.items() if (step, name) not in absent}
            set_gradients(parameters, present, cell, mesh)
            optimizer.step()
            if step in cell.steps:
                snapshots.append(snapshot(optimizer, parameters))
    return Outcome(snapshots, calls, optimizer.report())


def run_cells(cells: Sequence[Cell]) -> list[Outcome]:
    """Trains the cells on this rank, one after the other."""
    mesh = whole_mesh()
    return [run_cell(cell, mesh) for cell in cells]


def assembled(cell: Cell, by_rank: Sequence[Outcome]) -> list[Snapshot]:
    """Whole tensors of every recorded step, from the parts of all ranks; copies are checked to be bit-equal.

    Waiting times are left out, after a check that no row waits: the reference knows no deferral.
    """
    steps = []
    for parts in zip(*(outcome.snapshots for outcome in by_rank), strict=True):
        whole = {
            name: _whole(name, [part[name] for part in parts], cell.layout_of(name.split(".")[0])) for name in parts[0]
        }
        waited = [whole.pop(name) for name in list(whole) if name.endswith(".waited")]
        assert not any(bool(steps_waited.any()) for steps_waited in waited), "rows were deferred"
        steps.append(whole)
    return steps


def _whole(name: str, parts: Sequence[Tensor], layout: str) -> Tensor:
    if layout == "hsdp" and parts[0].ndim:
        half = len(parts) // 2
        one, other = (_whole(name, part, "shard0") for part in (parts[:half], parts[half:]))
        return _whole(name, [one, other], "replicate")
    copies = layout not in ("shard0", "shard1", *DECLARED) or parts[0].ndim == 0
    if copies or (layout[-1] == "1" and parts[0].ndim > 1 and name.endswith(("second_moment", "waited"))):
        assert all(torch.equal(part, parts[0]) for part in parts), f"{name} differs between ranks"
        return parts[0]
    in_order = list(reversed(parts)) if layout in DECLARED else list(parts)
    return torch.cat(in_order, dim=min(int(layout[-1]), parts[0].ndim - 1))


def expected(cell: Cell, world_size: int) -> list[Snapshot]:
    """Weights and state by the reference, in float64, after the recorded steps."""
    wire = cell.options.get("wire_dtype")
    shards = world_size if cell.layout == "shard0" and cell.options.get("scope") == "local" else 1
    ours = ("transport", "wire_dtype", "momentum_dtype")
    known = {name: value for name, value in cell.options.items() if name not in ours}
    if known.get("scope") == "all":
        known |= {"fraction": 1.0}
    if known.get("scope") != "local":
        known.pop("scope", None)
    key = tuple(sorted(known.items()))
    rounded = wire if wire in (torch.bfloat16, torch.float16) else None
    by_step = _expected(cell.problem, cell.optimizer, key, rounded, shards)
    return [by_step[step - 1] for step in cell.steps]


@cache
def _expected(
    problem: Problem, optimizer: str, options: tuple[tuple[str, Any], ...], wire: torch.dtype | None, shards: int
) -> list[Snapshot]:
    def rounded(values: np.ndarray) -> np.ndarray:
        return torch.from_numpy(values).to(wire).double().numpy()

    common = dict(options)
    matrix = Options(optimizer.lower(), wire=rounded if wire is not None else None, **common)
    shared = {name: common[name] for name in ("weight_decay", "maximize", "nonfinite") if name in common}
    members: dict[str, ReferenceMatrix | ReferenceElementwise] = {}
    for name, weight in problem.weights.items():
        if name.startswith("matrix"):
            members[name] = ReferenceMatrix(weight.double().numpy(), matrix, chunk_shards(weight.shape[0], shards))
        else:
            algorithm = name.rstrip("0123456789")
            members[name] = ReferenceElementwise(
                weight.double().numpy(), Options(algorithm, lr=ELEMENTWISE_LR, **shared)
            )
    snapshots = []
    for gradients in problem.gradients:
        for name, member in members.items():
            gradient = gradients.get(name)
            member.step(None if gradient is None else gradient.double().numpy())
        snapshots.append({key: value for name, each in members.items() for key, value in _reference_state(name, each)})
    return snapshots


def _reference_state(name: str, member: ReferenceMatrix | ReferenceElementwise) -> Iterator[tuple[str, Tensor]]:
    yield f"{name}.weight", torch.tensor(member.weight)
    if isinstance(member, ReferenceMatrix):
        yield f"{name}.momentum", torch.tensor(member.momentum)
        if member.second_moment is not None:
            yield f"{name}.second_moment", torch.tensor(member.second_moment)
        return
    yield f"{name}.exp_avg", torch.tensor(member.first_moment)
    if member.second_moment is not None:
        yield f"{name}.exp_avg_sq", torch.tensor(member.second_moment)
        yield f"{name}.step", torch.tensor(float(member.num_steps))


def applied_rows(cell: Cell, after_one_step: Snapshot) -> dict[str, list[int]]:
    """By matrix the rows that the first step applied: their momentum is not the gradient any more."""
    gradients = {name: value for name, value in cell.problem.gradients[0].items() if name.startswith("matrix")}
    changed = {
        name: (after_one_step[f"{name}.momentum"] != value).any(dim=1)
        for name, value in gradients.items()
        if value is not None
    }
    return {name: rows.nonzero().flatten().tolist() for name, rows in changed.items()}


def largest_errors(actual: Snapshot, reference: Snapshot) -> dict[str, float]:
    """By kind of tensor ("weight", "momentum", ...) the largest error, relative to the tensor's largest entry."""
    assert actual.keys() == reference.keys()
    errors: dict[str, float] = {}
    for name, value in actual.items():
        wanted = reference[name]
        assert value.shape == wanted.shape, name
        if value.numel() == 0:
            continue
        error = float((value.double() - wanted).abs().max()) / (float(wanted.abs().max()) or 1.0)
        kind = name.split(".")[1]
        errors[kind] = max(errors.get(kind, 0.0), error if error == error else float("inf"))
    return errors


def assert_close(actual: Snapshot, reference: Snapshot, tolerance: Mapping[str, float], where: object) -> None:
    """Every tensor agrees with the reference to the tolerance of its kind, or to that of "other"."""
    for kind, error in largest_errors(actual, reference).items():
        allowed = tolerance.get(kind, tolerance["other"])
        assert error <= allowed, f"{where}: {kind} is off by {error:.2e}, allowed {allowed:.2e}"


def assert_equal_bits(actual: Snapshot, wanted: Snapshot, where: object) -> None:
    """Every tensor has the bits that are wanted."""
    assert actual.keys() == wanted.keys()
    for name, value in actual.items():
        assert value.dtype == wanted[name].dtype, f"{where}: {name} is {value.dtype}"
        assert torch.equal(value, wanted[name]), f"{where}: {name} differs"


def transports_and_scopes(optimizer: str) -> Iterator[dict[str, Any]]:
    """The options of every installed transport and scope that serves the optimizer, with room where it may defer."""
    for name, kind in available_transports().items():
        transport = WITH_ROOM.get(name, name)
        if optimizer in MATRIX_FAMILY:
            if "all" in kind.scopes:
                yield {"transport": transport}
        else:
            for scope in sorted(kind.scopes):
                yield {"transport": transport, "scope": scope}


# Four times the expected rows hold every winner of up to four ranks; packed even where that does not pay.
WITH_ROOM: dict[str, Transport] = {"capped": Capped(capacity=4.0, always_pack=True)}


# Relative to the largest entry of a tensor, where both sides compute in float64. The second moment is kept in
# float32 by definition: five steps round it five times by at most 2^-24, and rows are divided by its root. An update
# is then off by half of 5 * 2^-24, and five of them are less than 0.04 of the largest weight.
FLOAT64 = {"other": 1e-12}
FLOAT64_NORMALIZED = {"second_moment": 5 * 2**-24, "weight": 5e-9, "other": 1e-12}


def compare_with_reference(
    cells: Sequence[Cell], world_size: int, tolerance: Mapping[str, float] | None = None
) -> list[list[Snapshot]]:
    """Trains the cells on every rank and compares every recorded step; returns whole tensors, by cell and step."""
    return compare_outcomes(cells, pool(world_size).run(run_cells, cells), tolerance)


def compare_outcomes(
    cells: Sequence[Cell], by_rank: Sequence[Sequence[Outcome]], tolerance: Mapping[str, float] | None = None
) -> list[list[Snapshot]]:
    """Compares every recorded step of what `run_cells` returned by rank; returns whole tensors, by cell and step."""
    results = []
    for number, cell in enumerate(cells):
        allowed = tolerance or (FLOAT64_NORMALIZED if "Nor" in cell.optimizer else FLOAT64)
        snapshots = assembled(cell, [outcomes[number] for outcomes in by_rank])
        for step, actual, wanted in zip(cell.steps, snapshots, expected(cell, len(by_rank)), strict=True):
            assert_close(actual, wanted, allowed, f"{cell.optimizer} {cell.options} after {step} steps")
        results.append(snapshots)
    return results


def train_cells(cells: Sequence[Cell], world_size: int) -> list[list[Snapshot]]:
    """Trains the cells on every rank; returns whole tensors, by cell and recorded step."""
    by_rank = pool(world_size).run(run_cells, cells)
    return [assembled(cell, [outcomes[number] for outcomes in by_rank]) for number, cell in enumerate(cells)]
