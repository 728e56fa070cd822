"""Tells stories by the package: on the ranks of each phase, and in one process that is never interrupted."""

import io
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

import dion_core
from dion_core import LayerWise
from dion_core.testing.ranks import RankError, pool
from tests import checkpoint_cases
from tests.stories import Phase, Story, held_by_rank, missing_ranks, problem_of, set_rates
from tests.story_places import joined, mesh_of, placed
from tests.training import ELEMENTWISE_LR, WITH_ROOM, Snapshot, assert_equal_bits, local

Parameters = dict[str, nn.Parameter]
Parts = dict[str, Tensor]


def live(story: Story) -> list[Snapshot]:
    """Whole weights and state after every phase."""
    snapshots: list[Snapshot] = []
    saved: Snapshot | None = None
    with tempfile.TemporaryDirectory(prefix="story-") as folder:
        for phase, each in enumerate(story.phases):
            by_rank = run_phase(each.world_size, story, phase, saved, folder)
            snapshots.append(assembled(story, phase, [parts for parts, _ in by_rank]))
            saved = dict(snapshots[-1])
            for _, whole in by_rank:
                state = {name: value for name, value in whole.items() if not name.endswith(".waited")}
                wanted = {name: value for name, value in saved.items() if not name.endswith(".weight")}
                if state:
                    assert_equal_bits(state, wanted, f"full_state_dict() of phase {phase}")
                    saved |= state
    return snapshots


def run_phase(world_size: int, *args: Any) -> list[tuple[Parts, Parts]]:
    """What `live_phase` returns by rank. After a failure they end: torch keeps their meshes in its caches."""
    ranks = pool(world_size)
    try:
        return ranks.run(live_phase, *args)
    except RankError:
        ranks.close()
        raise


def live_phase(story: Story, phase: int, saved: Snapshot | None, folder: str) -> tuple[Parts, Parts]:
    """This rank's part of weights and state at the end of a phase, and the whole state where the next one takes it."""
    each, rank = story.phases[phase], dist.get_rank()
    mesh = mesh_of(each.sizes, each.ranks)
    by_checkpoint = each.way in checkpoint_cases.WAYS
    given = problem_of(story).weights
    if saved is not None and not by_checkpoint:
        given = {name: saved[f"{name}.weight"] for name in story.shapes}
    optimizer, parameters = build(story, phase, given, mesh)
    if saved is not None and by_checkpoint:
        checkpoint_cases.load(module_of(parameters), optimizer, each.way, str(Path(folder, str(phase))))
    elif saved is not None:
        load(each, optimizer, parameters, saved)
    for place, number in enumerate(story.numbers(phase)):
        set_rates(story, number, optimizer)
        for name, parameter in parameters.items():
            absent = rank in missing_ranks(story, number, name, phase)
            gradient = problem_of(story).gradients[number][name]
            parameter.grad = None if absent or gradient is None else placed(gradient, story.spot(phase, name), mesh)
        optimizer.step()
        if place in each.reloads:
            optimizer, parameters = reloaded(story, phase, optimizer, parameters)
    following = story.phases[phase + 1].way if phase + 1 < len(story.phases) else None
    if following in checkpoint_cases.WAYS:
        checkpoint_cases.save(module_of(parameters), optimizer, following, str(Path(folder, str(phase + 1))))
    return parts(optimizer, parameters), whole_state(optimizer, parameters) if following == "full_state_dict" else {}


def build(
    story: Story, phase: int, weights: Mapping[str, Tensor], mesh: DeviceMesh
) -> tuple[torch.optim.Optimizer, Parameters]:
    """The optimizer of a phase on this rank, and its parameters by name."""
    parameters = {}
    for name, weight in weights.items():
        matrix = story.matrix(name)
        turned = matrix is not None and matrix.turned
        parameters[name] = nn.Parameter(placed(weight, story.spot(phase, name), mesh, turned=turned))
    return optimizer_of(story, phase, parameters), parameters


def optimizer_of(story: Story, phase: int, parameters: Parameters) -> torch.optim.Optimizer:
    """The optimizer for parameters that lie as the phase says; neighbours with equal keys share a group."""
    each, groups = story.phases[phase], list[dict[str, Any]]()
    for name, parameter in parameters.items():
        matrix, algorithm = story.matrix(name), name.rstrip("0123456789")
        keys = {"lr": ELEMENTWISE_LR} if matrix is None else matrix.keys
        keys = {"algorithm": algorithm, **keys}
        if not groups or {key: value for key, value in groups[-1].items() if key != "params"} != keys:
            groups.append({"params": [], **keys})
        groups[-1]["params"].append((name, parameter))
    options = {**dict(story.options), "transport": WITH_ROOM.get(each.transport, each.transport)}
    if each.state is not None:
        options["state"] = LayerWise(bucket_elements=each.state) if isinstance(each.state, int) else each.state
    group = dist.group.WORLD if ("ddp",) in each.spots else None
    optimizer: torch.optim.Optimizer = getattr(dion_core, story.optimizer)(groups, group=group, **options)
    return optimizer


def module_of(parameters: Parameters) -> nn.Module:
    """A model that has them, for torch's checkpoints."""
    module = nn.Module()
    for name, parameter in parameters.items():
        module.register_parameter(name, parameter)
    return module


def load(phase: Phase, optimizer: torch.optim.Optimizer, parameters: Parameters, saved: Snapshot) -> None:
    """Loads whole tensors: each placed as the live one is, or as they are where ranks take their own part."""
    state_dict, states = optimizer.state_dict(), dict[int, Parts]()
    for number, name in enumerate(parameters):
        whole = {key.split(".")[1]: value for key, value in saved.items() if key.startswith(f"{name}.")}
        del whole["weight"]
        if phase.state is not None:
            states[number] = {key: value.clone() for key, value in whole.items()}
        else:
            like = state_dict["state"][number]
            assert like.keys() - {"waited"} == whole.keys()
            states[number] = {key: placed_like(value, like[key]) for key, value in whole.items()}
    optimizer.load_state_dict({"state": states, "param_groups": state_dict["param_groups"]})


def placed_like(whole: Tensor, live_tensor: Tensor) -> Tensor:
    if not isinstance(live_tensor, DTensor):
        return whole.clone()
    return distribute_tensor(whole.clone(), live_tensor.device_mesh, live_tensor.placements, src_data_rank=None)


def reloaded(
    story: Story, phase: int, optimizer: torch.optim.Optimizer, parameters: Parameters
) -> tuple[torch.optim.Optimizer, Parameters]:
    """New objects with the same values, the state having gone through bytes."""
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    copies = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in parameters.items()}
    other = optimizer_of(story, phase, copies)
    other.load_state_dict(torch.load(buffer, weights_only=False))
    return other, copies


def parts(optimizer: torch.optim.Optimizer, parameters: Parameters) -> Parts:
    """This rank's parts of all weights, and of the state that it has."""
    taken = {}
    for name, parameter in parameters.items():
        taken[f"{name}.weight"] = local(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            taken[f"{name}.{key}"] = local(value)
    return taken


def whole_state(optimizer: Any, parameters: Parameters) -> Parts:
    """What `full_state_dict` gives. Collective."""
    state = optimizer.full_state_dict()["state"]
    return {f"{name}.{key}": value for number, name in enumerate(parameters) for key, value in state[number].items()}


def assembled(story: Story, phase: int, by_rank: Sequence[Parts]) -> Snapshot:
    """Whole tensors from the parts of all ranks; copies are checked to be bit-equal, and that state is kept once.

    Waiting times are left out, after a check that no row waits: the reference knows no deferral.
    """
    names = list(dict.fromkeys(name for of_rank in by_rank for name in of_rank))
    held = held_by_rank(story, phase, dict.fromkeys(names))
    whole = {}
    for name in names:
        present = [of_rank.get(name) for of_rank in by_rank]
        kept = sum(part is not None for part in present)
        everywhere = story.phases[phase].state is None or name.endswith(".weight")
        assert kept == (len(by_rank) if everywhere else 1), f"{name} is on {kept} ranks"
        whole[name] = joined(present, held[name], story.shape_of(name), name)
    waited = [whole.pop(name) for name in names if name.endswith(".waited")]
    assert not any(bool(steps.any()) for steps in waited), "rows were deferred"
    return whole


def live_alone(story: Story, gradients: Sequence[Mapping[str, Tensor | None]]) -> list[Snapshot]:
    """Weights and state after every phase, in one process with whole plain tensors that goes through all steps."""
    alone = Phase((1,), len(story.steps), story.phases[0].transport, (("plain",),))
    optimizer, parameters = build(replace(story, phases=(alone,)), 0, problem_of(story).weights, mesh_of((1,), ()))
    snapshots = []
    for phase in range(len(story.phases)):
        for number in story.numbers(phase):
            set_rates(story, number, optimizer)
            for name, parameter in parameters.items():
                parameter.grad = gradients[number][name]
            optimizer.step()
        taken = parts(optimizer, parameters)
        snapshots.append({name: value for name, value in taken.items() if not name.endswith(".waited")})
    return snapshots
