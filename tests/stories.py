"""Stories: optimizers that live through steps, saves and loads at changing numbers of ranks.

A `Story` says everything by numbers, so that it prints as what reproduces it. It is told three ways: by the package on
the ranks of each phase, by the float64 reference, and by the package in one process that is never interrupted.
"""

import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from dion_core.testing.ranks import pool
from tests.reference import Options, ReferenceElementwise, ReferenceMatrix, chunk_shards
from tests.training import (
    ELEMENTWISE_LR,
    EXACT_LAYOUTS,
    WITH_ROOM,
    Cell,
    Outcome,
    Problem,
    Snapshot,
    _reference_state,
    assembled,
    assert_close,
    assert_equal_bits,
    build,
    optimizer_of,
    random_problem,
    set_gradients,
    snapshot,
    whole_mesh,
)

SPLIT_LAYOUTS = ("shard0", "shard1")
"""Here a gradient may be missing on some ranks; elsewhere ranks hold copies, which have equal gradients."""
EXACT = (*EXACT_LAYOUTS, "hsdp", "plain")
MATRIX_LR = 0.02


@dataclass(frozen=True)
class Phase:
    """Steps in one set of processes; a phase after the first begins with a load of what the one before left.

    Attributes:
        reloads: after which of its steps (0 is the first) the optimizer is saved and loaded into a new one.
    """

    world_size: int
    num_steps: int
    transport: str
    reloads: tuple[int, ...] = ()


@dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        rate: factor of all learning rates; given as a tensor where `as_tensor` says so.
        size: factor of all gradients.
        absent: by name the ranks without a gradient.
        poisoned: by name the element that is infinite or NaN, counted on around the tensor.
    """

    rate: float = 1.0
    as_tensor: bool = False
    size: float = 1.0
    absent: tuple[tuple[str, tuple[int, ...]], ...] = ()
    poisoned: tuple[tuple[str, int, float], ...] = ()


@dataclass(frozen=True)
class Story:
    """An optimizer's life; `layouts` is one for all parameters, or one for each in the order of their names."""

    matrices: tuple[tuple[int, int], ...]
    adamw: tuple[tuple[int, ...], ...]
    lion: tuple[tuple[int, ...], ...]
    seed: int
    dtype: torch.dtype
    optimizer: str
    options: tuple[tuple[str, Any], ...]
    layouts: tuple[str, ...]
    phases: tuple[Phase, ...]
    steps: tuple[Step, ...]

    @property
    def layout(self) -> str | Mapping[str, str]:
        if len(self.layouts) == 1:
            return self.layouts[0]
        return dict(zip(problem_of(self).weights, self.layouts, strict=True))

    @property
    def exact(self) -> bool:
        """Whether the bits are promised to be those of one process."""
        return dict(self.options).get("scope") != "local" and all(layout in EXACT for layout in self.layouts)

    @property
    def compared(self) -> bool:
        """Whether the reference computes in the same precision."""
        return self.dtype == torch.float64 and dict(self.options).get("wire_dtype") is None

    def numbers(self, phase: int) -> range:
        """Of the steps of that phase."""
        first = sum(each.num_steps for each in self.phases[:phase])
        return range(first, first + self.phases[phase].num_steps)


@cache
def problem_of(story: Story) -> Problem:
    """Weights and gradients before anything is left out, in the story's dtype."""
    problem = random_problem(
        story.matrices, adamw=story.adamw, lion=story.lion, num_steps=len(story.steps), seed=story.seed
    )
    for step, gradients in zip(story.steps, problem.gradients, strict=True):
        for gradient in gradients.values():
            assert gradient is not None
            gradient *= step.size
        for name, place, value in step.poisoned:
            flat = gradients[name].view(-1)  # type: ignore[union-attr]
            flat[place % len(flat)] = value
    return problem.to(story.dtype)


def cell_of(story: Story, phase: int, weights: Mapping[str, Tensor] | None = None) -> Cell:
    """How a phase trains, from the weights given or from the first ones."""
    transport = story.phases[phase].transport
    options = {**dict(story.options), "transport": WITH_ROOM.get(transport, transport)}
    problem = problem_of(story)
    if weights is not None:
        problem = replace(problem, weights=weights)
    return Cell(problem, story.optimizer, story.layout, options)


def missing_ranks(story: Story, number: int, name: str, world_size: int) -> list[int]:
    """The ranks without a gradient of that parameter in that step."""
    ranks = set(dict(story.steps[number].absent).get(name, ()))
    layout = cell_of(story, 0).layout_of(name)
    if layout in SPLIT_LAYOUTS:
        return [rank for rank in range(world_size) if rank in ranks]
    return list(range(world_size)) if 0 in ranks else []


def whole_gradients(story: Story, number: int, world_size: int) -> dict[str, Tensor | None]:
    """What the step amounts to: zero where ranks miss a part, None where all do or where the step is skipped."""
    cell, gradients = cell_of(story, 0), {}
    for name, gradient in problem_of(story).gradients[number].items():
        assert gradient is not None
        missing, layout, value = missing_ranks(story, number, name, world_size), cell.layout_of(name), gradient.clone()
        if missing and layout in SPLIT_LAYOUTS:
            dim = min(SPLIT_LAYOUTS.index(layout), value.ndim - 1)
            for rank in missing:
                value.narrow(dim, *chunk_shards(value.shape[dim], world_size)[rank]).zero_()
        gradients[name] = None if len(missing) == world_size else value
    finite = all(bool(value.isfinite().all()) for value in gradients.values() if value is not None)
    if dict(story.options).get("nonfinite") == "skip" and not finite:
        return dict.fromkeys(gradients)
    return gradients


def set_rates(story: Story, number: int, optimizer: torch.optim.Optimizer) -> None:
    """Gives every group its learning rate of the step."""
    step = story.steps[number]
    for group in optimizer.param_groups:
        rate = (MATRIX_LR if group["algorithm"] == "matrix" else ELEMENTWISE_LR) * step.rate
        group["lr"] = torch.tensor(rate, dtype=torch.float64) if step.as_tensor else rate


# --- by the package


def live_phase(story: Story, phase: int, saved: Snapshot | None) -> Snapshot:
    """This rank's part of weights and state at the end of a phase."""
    mesh, size, rank = whole_mesh(), dist.get_world_size(), dist.get_rank()
    weights = None if saved is None else {name: saved[f"{name}.weight"] for name in problem_of(story).weights}
    cell = cell_of(story, phase, weights)
    optimizer, parameters = build(cell, mesh)
    if saved is not None:
        load(optimizer, parameters, saved)
    for place, number in enumerate(story.numbers(phase)):
        set_rates(story, number, optimizer)
        gradients = {
            name: value
            for name, value in problem_of(story).gradients[number].items()
            if rank not in missing_ranks(story, number, name, size)
        }
        set_gradients(parameters, gradients, cell, mesh)
        optimizer.step()
        if place in story.phases[phase].reloads:
            optimizer, parameters = reloaded(cell, optimizer, parameters)
    return snapshot(optimizer, parameters)


def load(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], saved: Snapshot) -> None:
    """Loads whole tensors, each placed as the live one is."""
    state_dict = optimizer.state_dict()
    for number, name in enumerate(parameters):
        state = state_dict["state"][number]
        for key in [key for key in state if key != "waited"]:
            state[key] = placed_like(saved[f"{name}.{key}"], state[key])
    optimizer.load_state_dict(state_dict)


def placed_like(whole: Tensor, live: Tensor) -> Tensor:
    if not isinstance(live, DTensor):
        return whole.clone()
    return distribute_tensor(whole.clone(), live.device_mesh, live.placements, src_data_rank=None)


def reloaded(
    cell: Cell, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> tuple[torch.optim.Optimizer, dict[str, nn.Parameter]]:
    """New objects with the same values, the state having gone through bytes."""
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    copies = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in parameters.items()}
    other = optimizer_of(cell, copies)
    other.load_state_dict(torch.load(buffer, weights_only=False))
    return other, copies


def live(story: Story) -> list[Snapshot]:
    """Whole weights and state after every phase."""
    snapshots: list[Snapshot] = []
    for phase, each in enumerate(story.phases):
        saved = snapshots[-1] if snapshots else None
        parts = pool(each.world_size).run(live_phase, story, phase, saved)
        outcomes = [Outcome([part], [], {}) for part in parts]
        snapshots += assembled(cell_of(story, phase), outcomes)
    return snapshots


def live_alone(story: Story) -> list[Snapshot]:
    """Weights and state after every phase, in one process with whole plain tensors that goes through all steps."""
    mesh = whole_mesh()
    cell = replace(cell_of(story, 0), layout="plain")
    optimizer, parameters = build(cell, mesh)
    snapshots = []
    for phase, each in enumerate(story.phases):
        for number in story.numbers(phase):
            set_rates(story, number, optimizer)
            set_gradients(parameters, whole_gradients(story, number, each.world_size), cell, mesh)
            optimizer.step()
        snapshots.append(snapshot(optimizer, parameters))
    return snapshots


# --- by the reference


def referred(story: Story) -> list[Snapshot]:
    """Weights and state after every phase, in float64 loops."""
    cell, members = cell_of(story, 0), reference_members(story)
    snapshots = []
    for phase, each in enumerate(story.phases):
        for name, member in members.items():
            if isinstance(member, ReferenceMatrix):
                split = {"shard0": each.world_size, "hsdp": each.world_size // 2}.get(cell.layout_of(name), 1)
                member.shards = chunk_shards(member.rows, split)
        for number in story.numbers(phase):
            for name, gradient in whole_gradients(story, number, each.world_size).items():
                base = MATRIX_LR if name.startswith("matrix") else ELEMENTWISE_LR
                members[name].options.lr = base * story.steps[number].rate
                members[name].step(None if gradient is None else gradient.numpy())
        snapshots.append({key: value for name, one in members.items() for key, value in _reference_state(name, one)})
    return snapshots


def reference_members(story: Story) -> dict[str, ReferenceMatrix | ReferenceElementwise]:
    """The parameters as the reference holds them."""
    known = {key: value for key, value in story.options if key not in ("scope", "wire_dtype", "momentum_dtype")}
    scope = dict(story.options).get("scope")
    if scope == "all":
        known["fraction"] = 1.0
    if scope == "local":
        known["scope"] = scope
    shared = {key: known[key] for key in ("weight_decay", "maximize", "nonfinite") if key in known}
    members: dict[str, ReferenceMatrix | ReferenceElementwise] = {}
    for name, weight in problem_of(story).weights.items():
        algorithm = name.rstrip("0123456789")
        if algorithm == "matrix":
            members[name] = ReferenceMatrix(weight.numpy(), Options(story.optimizer.lower(), **known))
        else:
            members[name] = ReferenceElementwise(weight.numpy(), Options(algorithm, **shared))
    return members


def tolerance(story: Story) -> dict[str, float]:
    """Relative to the largest entry of a tensor.

    Float64 rounds by 1e-16, which Newton-Schulz raises up to some hundred times and every step anew. The second moment
    is kept in float32 by definition: a step rounds what is added three times, by 2^-24 at most, and the sum once. Half
    of that is the error of an update of less than 0.1, on weights that may be small.
    """
    if "Nor" not in story.optimizer:
        return {"other": 1e-11}
    return {"second_moment": (len(story.steps) + 3) * 2**-24, "weight": 1e-6, "other": 1e-11}


def check(story: Story) -> None:
    """The package does what the reference does, and where it is promised what one process does, bit for bit."""
    told = live(story)
    if story.compared:
        for phase, (actual, wanted) in enumerate(zip(told, referred(story), strict=True)):
            assert_close(actual, wanted, tolerance(story), f"phase {phase}")
    if story.exact:
        [alone] = pool(1).run(live_alone, story)
        for phase, (actual, wanted) in enumerate(zip(told, alone, strict=True)):
            wanted = {name: value for name, value in wanted.items() if not name.endswith(".waited")}
            assert_equal_bits(actual, wanted, f"phase {phase}")
