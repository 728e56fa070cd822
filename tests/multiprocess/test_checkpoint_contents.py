"""What a checkpoint holds, from construction on, and what a load does to an optimizer that it does not fit."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import Shard
from torch.optim.lr_scheduler import StepLR

from dion_core import NorDion2, TransportError
from dion_core.testing.ranks import pool
from tests.checkpoint_cases import NAMES, SAVED_AT, WAYS, Place, Run, load, resume, save
from tests.training import Snapshot, assert_equal_bits, local, place, random_problem, whole_mesh

TWO = Place("shard0", 2)
SHARDED_WAYS = ("sharded", "flattened")


def plain(state: Any) -> Any:
    """Copies of all tensors on this rank."""
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, list):
        return [plain(each) for each in state]
    return local(state) if isinstance(state, Tensor) else copy.deepcopy(state)


def same(one: Any, other: Any) -> bool:
    """Whether two results of `plain` are equal to the bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) and one.dtype == other.dtype if isinstance(one, Tensor) else bool(one == other)


def look(way: str) -> list[set[str]]:
    """Looks at a fresh optimizer, after a backward pass without a step, and after a step; the keys seen each time."""
    run, other = Run(TWO, "NorDion2"), Run(TWO, "NorDion2")
    keys = []
    for moment in range(3):
        if moment:
            run.set_gradients(1)
            other.set_gradients(1)
        if moment == 2:
            run.optimizer.step()
            other.optimizer.step()
        gradients = {name: value.grad for name, value in run.model.named_parameters()}
        before, groups = plain(run.optimizer.state_dict()), copy.deepcopy(run.optimizer.param_groups[1]["lr"])
        seen = get_optimizer_state_dict(run.model, run.optimizer, options=WAYS[way])
        state = (
            seen
            if way == "flattened"
            else {f"state.{n}.{k}": v for n, s in seen["state"].items() for k, v in s.items()}
        )
        keys.append({key for key in state if key.startswith("state.")})
        assert same(plain(run.optimizer.state_dict()), before)
        assert run.optimizer.param_groups[1]["lr"] == groups
        assert all(value.grad is gradients[name] for name, value in run.model.named_parameters())
    run.train(2, 2)
    other.train(2, 2)
    assert_equal_bits(run.snapshot(), other.snapshot(), "after looking")
    return keys


@pytest.mark.parametrize("way", ["sharded", "flattened", "full"])
def test_looking_changes_nothing_and_sees_all_keys_from_construction_on(way: str) -> None:
    first, second = pool(2).run(look, way)
    assert first == second
    assert first[0] == first[1] == first[2]
    assert {f"state.{name}.momentum" for name in ("plain", "unused", "conv")} < first[0]
    assert not any("frozen" in key for key in first[0])


def save_meanwhile(directory: str) -> Snapshot:
    """Steps on while a checkpoint is written; the state when the save began."""
    run = Run(TWO, "NorDion2")
    run.train(1, SAVED_AT)
    at_save = run.snapshot()
    dcp.save({"model": run.model.state_dict()}, checkpoint_id=Path(directory, "model"))
    state = {"optimizer": get_optimizer_state_dict(run.model, run.optimizer)}
    writing = dcp.async_save(state, checkpoint_id=Path(directory, "optimizer"), process_group=dist.new_group())
    run.train(SAVED_AT + 1, SAVED_AT + 1)
    writing.result()
    return at_save


def test_steps_while_a_checkpoint_is_written_do_not_reach_it(tmp_path: Path) -> None:
    at_save, _ = pool(2).run(save_meanwhile, str(tmp_path))
    for ((at_load, _),) in pool(2).run(resume, TWO, "NorDion2", "sharded", [str(tmp_path)]):
        assert_equal_bits(at_load, at_save, "asynchronous")


def freeze_and_save(way: str, directory: str) -> dict[str, Tensor]:
    """A layer that was trained and frozen: its state."""
    run = Run(TWO, "NorDion2")
    run.train(1, SAVED_AT)
    run.model.get_parameter("heads").requires_grad_(False)
    run.optimizer.step()
    save(run.model, run.optimizer, way, directory)
    return {name: value for name, value in run.snapshot().items() if name.startswith("heads.")}


def load_and_freeze(way: str, directory: str) -> dict[str, Tensor]:
    run = Run(TWO, "NorDion2")
    load(run.model, run.optimizer, way, directory)
    run.model.get_parameter("heads").requires_grad_(False)
    run.optimizer.step()
    return {name: value for name, value in run.snapshot().items() if name.startswith("heads.")}


@pytest.mark.parametrize("way", ["sharded", "flattened", "full"])
def test_a_layer_frozen_later_keeps_its_state(way: str, tmp_path: Path) -> None:
    saved, _ = pool(2).run(freeze_and_save, way, str(tmp_path))
    assert saved["heads.momentum"].any()
    for loaded in pool(2).run(load_and_freeze, way, str(tmp_path)):
        assert_equal_bits(loaded, saved, "frozen later")


def save_scheduled(way: str, directory: str) -> list[list[float]]:
    """Learning rates of the steps that an unbroken run takes after a save."""
    run = Run(TWO, "NorDion2")
    run.optimizer.param_groups[0]["note"] = "mine"
    scheduler = StepLR(run.optimizer, step_size=2, gamma=0.5)
    for number in range(1, 4):
        run.train(number, number)
        scheduler.step()
    save(run.model, run.optimizer, way, directory)
    return rates(run, scheduler)


def rates(run: Run, scheduler: StepLR) -> list[list[float]]:
    seen = []
    for number in range(4, 8):
        seen.append([group["lr"] for group in run.optimizer.param_groups])
        run.train(number, number)
        scheduler.step()
    return seen


def load_scheduled(way: str, directory: str) -> list[list[float]]:
    """A fresh optimizer that has no scheduler before the load, so that its groups have no `initial_lr`.

    But for whole state dicts, since torch's loader raises KeyError for group keys that are not there.
    """
    run = Run(TWO, "NorDion2")
    if way == "full":
        run.optimizer.param_groups[0]["note"] = ""
        for group in run.optimizer.param_groups:
            group["initial_lr"] = 0.0
    load(run.model, run.optimizer, way, directory)
    assert run.optimizer.param_groups[0]["note"] == "mine"
    assert "note" not in run.optimizer.param_groups[1]
    assert [group["initial_lr"] for group in run.optimizer.param_groups][-1] == 0.003
    assert all(group["carried"] == "" for group in run.optimizer.param_groups)
    current = [group["lr"] for group in run.optimizer.param_groups]
    scheduler = StepLR(run.optimizer, step_size=2, gamma=0.5, last_epoch=2)
    assert [group["lr"] for group in run.optimizer.param_groups] == current
    return rates(run, scheduler)


@pytest.mark.parametrize("way", ["sharded", "flattened", "full"])
def test_c38_a_scheduler_goes_on_from_initial_lr(way: str, tmp_path: Path) -> None:
    unbroken, _ = pool(2).run(save_scheduled, way, str(tmp_path))
    assert len({row[0] for row in unbroken}) > 1
    for resumed in pool(2).run(load_scheduled, way, str(tmp_path)):
        assert resumed == unbroken


def small(way: str, directory: str) -> None:
    """One row over four ranks, a tensor without elements, and a group without parameters."""
    mesh, problem = whole_mesh(), random_problem([(1, 8), (6, 8)], num_steps=4, seed=40)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.ParameterDict({name: place(value, Shard(0), mesh) for name, value in problem.weights.items()})
        model["nothing"] = place(torch.zeros(0, 8, dtype=torch.float64), Shard(0), mesh)
        groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
        if way != "flattened":  # which knows groups by their parameters
            groups.append({"params": [], "algorithm": "adamw", "lr": 0.1})
        return model, NorDion2(groups)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, absent: str = "") -> None:
        for name, gradient in problem.gradients[number].items():
            model[name].grad = None if name == absent else place(gradient, Shard(0), mesh)
        optimizer.step()

    model, optimizer = build()
    for number in range(2):
        step(model, optimizer, number)
    save(model, optimizer, way, directory)
    other_model, other = build()
    load(other_model, other, way, directory)
    for run in ((model, optimizer), (other_model, other)):
        step(*run, 2, absent="matrix0")
        step(*run, 3)
    assert same(plain(other_model.state_dict()), plain(model.state_dict()))
    assert same(plain(other.state_dict()), plain(optimizer.state_dict()))
    assert other.state[other_model["nothing"]]["momentum"].shape == (0, 8)


@pytest.mark.parametrize("way", ["sharded", "flattened", "full"])
def test_c08_c37_one_row_over_four_ranks_and_nothing_at_all(way: str, tmp_path: Path) -> None:
    pool(4).run(small, way, str(tmp_path))


def refuse(change: str) -> None:
    """A whole state dict of another layout is refused through torch's loader too, and nothing moves."""
    run, untouched = Run(TWO, "NorDion2"), Run(TWO, "NorDion2")
    run.train(1, 1)
    untouched.train(1, 1)
    saved = get_optimizer_state_dict(run.model, run.optimizer, options=WAYS["full"])
    saved = copy.deepcopy(saved)
    if change == "version" or (change == "version of one rank" and dist.get_rank()):
        for group in saved["param_groups"]:
            group["layout_version"] = torch.tensor(2)
    elif change == "shape":
        state = saved["state"]["plain"]
        state["second_moment"] = state["second_moment"].expand(-1, 6).contiguous()
    for tensors in saved["state"].values():
        for value in tensors.values():
            value.add_(1)
    groups = list(map(id, run.optimizer.param_groups))
    saved["param_groups"][0]["lr"] = 7.0
    message = "plain.*'second_moment'" if change == "shape" else "layout_version=2.*load the weights alone"
    with pytest.raises((ValueError, TransportError), match=message):
        set_optimizer_state_dict(run.model, run.optimizer, saved, options=WAYS["full"])
    assert list(map(id, run.optimizer.param_groups)) == groups
    assert run.optimizer.param_groups[0]["lr"] == 0.02
    assert_equal_bits(run.snapshot(), untouched.snapshot(), "refused")
    run.train(2, 2)
    untouched.train(2, 2)
    assert_equal_bits(run.snapshot(), untouched.snapshot(), "after what was refused")


@pytest.mark.parametrize("change", ["version", "version of one rank", "shape"])
def test_c43_another_layout_is_refused_before_anything_is_touched(change: str) -> None:
    pool(2).run(refuse, change)


def save_and_drop(directory: str) -> Snapshot:
    """A checkpoint as one that knew neither versions, carried text nor waiting times."""
    run = Run(TWO, "NorDion2")
    run.train(1, SAVED_AT)
    state = get_optimizer_state_dict(run.model, run.optimizer, options=WAYS["flattened"])
    ended = (".layout_version", ".carried", ".waited", ".nonfinite", ".epsilon")
    dcp.save({"optimizer": {k: v for k, v in state.items() if not k.endswith(ended)}}, checkpoint_id=directory)
    return run.snapshot()


def load_what_there_is(directory: str) -> Snapshot:
    run = Run(TWO, "NorDion2")
    target = {"optimizer": get_optimizer_state_dict(run.model, run.optimizer, options=WAYS["flattened"])}
    dcp.load(target, checkpoint_id=directory, planner=DefaultLoadPlanner(allow_partial_load=True))
    state = {key: value for key, value in target["optimizer"].items() if not key.endswith(".waited")}
    set_optimizer_state_dict(run.model, run.optimizer, state, options=WAYS["flattened"])
    return run.snapshot()


def test_a_checkpoint_that_lacks_group_keys_and_waiting_times(tmp_path: Path) -> None:
    saved, _ = pool(2).run(save_and_drop, str(tmp_path))
    for loaded in pool(2).run(load_what_there_is, str(tmp_path)):
        kept = {name: value for name, value in saved.items() if not name.endswith(".weight")}
        assert_equal_bits({name: loaded[name] for name in kept}, kept, "what there was")
        assert set(NAMES) <= {name.split(".")[0] for name in kept}


def move_rates(way: str, directory: str) -> None:
    """A tensor is saved and a number loaded, and the other way round."""
    given = (torch.tensor(0.5), 0.25)
    for number, (saved_rate, live_rate) in enumerate((given, given[::-1])):
        where = f"{directory}/{number}"
        run, other = Run(TWO, "Muon", lr=saved_rate), Run(TWO, "Muon", lr=live_rate)
        run.train(1, 1)
        save(run.model, run.optimizer, way, where)
        load(other.model, other.optimizer, way, where)
        rate = other.optimizer.param_groups[0]["lr"]
        assert type(rate) is type(live_rate)
        assert float(rate) == float(saved_rate)
        for each in (run, other):
            each.train(2, 2)
        assert_equal_bits(other.snapshot(), run.snapshot(), way)


@pytest.mark.parametrize("way", ["sharded", "flattened", "full"])
def test_rates_that_are_numbers_and_tensors_go_on_from_each_other(way: str, tmp_path: Path) -> None:
    pool(2).run(move_rates, way, str(tmp_path))
