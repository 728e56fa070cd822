"""A run that goes on from a checkpoint of the capped transport is the unbroken run, bit for bit."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from dion_comm_capped import Capped
from dion_core.testing.ranks import pool
from dion_core.transport import Transport
from tests.checkpoint_cases import load, save
from tests.training import (
    Cell,
    Problem,
    assert_equal_bits,
    build,
    local,
    place,
    random_problem,
    set_gradients,
    snapshot,
    whole_mesh,
)

NUM_STEPS, SAVED_AT = 12, 5


def moving_heat() -> Problem:
    """From the second step on the last third of the rows wins: more than what the first step provided for."""
    problem = random_problem([(96, 6)] * 4 + [(30, 5)] * 2, adamw=[(7,)], num_steps=NUM_STEPS, seed=33)
    for gradients in problem.gradients[1:]:
        for name, gradient in gradients.items():
            if name.startswith("matrix"):
                gradient[-(len(gradient) // 3) :] *= 4
    return problem


PROBLEM = moving_heat()
TRANSPORTS = {
    "learned": Capped(always_pack=True),
    "1.0": Capped(capacity=1.0, always_pack=True),
    "1.0, short waits": Capped(capacity=1.0, max_wait=2, always_pack=True),
    "binomial": Capped(capacity="binomial", always_pack=True),
    "learned, varlen": Capped(on_overflow="varlen", always_pack=True),
    "learned, where it pays": Capped(),
}


class Run:
    """An optimizer in training."""

    def __init__(self, transport: Transport | str, weights: dict[str, Tensor] | None = None) -> None:
        self.mesh = whole_mesh()
        self.cell = Cell(PROBLEM, "NorDion2", "shard0", {"transport": transport, "fraction": 0.25})
        self.optimizer, self.parameters = build(self.cell, self.mesh)
        self.model = nn.ParameterDict(self.parameters)
        with torch.no_grad():
            for name, weight in (weights or {}).items():
                self.parameters[name].copy_(weight)

    def step(self, number: int) -> dict[str, Any]:
        """Takes that step; the report, which is of this step alone."""
        set_gradients(self.parameters, PROBLEM.gradients[number - 1], self.cell, self.mesh)
        self.optimizer.step()
        return self.optimizer.report()

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    def saved(self) -> dict[str, Any]:
        """The state after a way through bytes."""
        buffer = io.BytesIO()
        torch.save(self.optimizer.state_dict(), buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)

    def waiting(self) -> int:
        return sum(int((local(state["waited"]) > 0).sum()) for state in self.states())

    def states(self) -> list[dict[str, Tensor]]:
        return [self.optimizer.state[each] for name, each in self.parameters.items() if name.startswith("matrix")]

    def budgets(self) -> list[list[int]]:
        """By bucket the bytes to every owner, which the budgets alone decide."""
        return [bucket["traffic"]["forward"] for bucket in self.optimizer.report()["buckets"]]


def carried(run: Run) -> list[str]:
    """What the transport has learned, as text."""
    return [group["carried"] for group in run.optimizer.state_dict()["param_groups"]]


def move(before: Run, after: Run, way: str, directory: str) -> None:
    """Gives one run's state to another one, by its state dict or through a checkpoint."""
    if way == "state dict":
        after.optimizer.load_state_dict(before.saved())
    else:
        save(before.model, before.optimizer, way, directory)
        load(after.model, after.optimizer, way, directory)


def break_and_resume(transport: Transport, way: str, directory: str) -> tuple[list[list[list[int]]], int]:
    """The resumed run equals the unbroken one in every step. Its budgets by step, and the rows waiting at the break."""
    unbroken = Run(transport)
    budgets = []
    for number in range(1, SAVED_AT + 1):
        unbroken.step(number)
        budgets.append(unbroken.budgets())
    resumed = Run(transport, unbroken.weights())
    move(unbroken, resumed, way, directory)
    waiting = unbroken.waiting()
    resumed.optimizer.report()
    for number in range(SAVED_AT + 1, NUM_STEPS + 1):
        one, other = unbroken.step(number), resumed.step(number)
        assert one == other, f"step {number}: {one} is not {other}"
        here, there = (snapshot(run.optimizer, run.parameters) for run in (unbroken, resumed))
        assert_equal_bits(here, there, f"step {number}")
        assert carried(unbroken) == carried(resumed)
        budgets.append(unbroken.budgets())
    return budgets, waiting


@pytest.mark.parametrize(
    ("name", "world_size", "way"),
    [
        *((name, world_size, "state dict") for name in TRANSPORTS for world_size in (2, 3)),
        *((name, 2, way) for name in ("learned", "1.0, short waits") for way in ("sharded", "flattened", "full")),
    ],
)
def test_a_resumed_run_is_the_unbroken_one(name: str, world_size: int, way: str, tmp_path: Path) -> None:
    by_rank = pool(world_size).run(break_and_resume, TRANSPORTS[name], way, str(tmp_path))
    at_break = sum(waiting for _, waiting in by_rank)
    if name == "learned, varlen":
        assert at_break == 0
    elif name != "learned, where it pays":
        assert at_break > 0, "no row waited at the break"
    if name == "learned":
        # The counts of the second step, taken before the break, change the budgets eight steps after it.
        before, after = ([budgets[number] for budgets, _ in by_rank] for number in (SAVED_AT, NUM_STEPS - 1))
        assert before != after, "the budgets did not change after the break"
    if name == "1.0":
        assert all(budgets[0] == budgets[-1] for budgets, _ in by_rank)


def to_full_and_back(transport: Transport) -> int:
    """The momentum moves along, the waiting times stay behind, and budgets are learned anew."""
    before = Run(transport)
    for number in range(1, SAVED_AT + 1):
        before.step(number)
    full = Run("full", before.weights())
    full.optimizer.load_state_dict(before.saved())
    for one, other in zip(before.states(), full.states(), strict=True):
        assert set(one) == set(other)
        assert not other["waited"].any()
        assert all(torch.equal(local(one[key]), local(value)) for key, value in other.items() if key != "waited")
    full.step(SAVED_AT + 1)
    state, weights = full.saved(), full.weights()
    back, fresh = Run(transport, weights), Run(transport, weights)
    back.step(1)
    back.step(2)
    waiting = back.waiting()  # of its own, which must not outlive the load
    with torch.no_grad():
        for name, weight in weights.items():
            back.parameters[name].copy_(weight)
    reports = []
    for run in (back, fresh):
        run.optimizer.load_state_dict(state)
        assert run.waiting() == 0
        run.optimizer.report()
        reports.append([run.step(number) for number in (SAVED_AT + 2, SAVED_AT + 3)])
    assert reports[0] == reports[1]
    assert_equal_bits(*(snapshot(run.optimizer, run.parameters) for run in (back, fresh)), "after the way back")
    return waiting


@pytest.mark.parametrize("name", ["learned", "1.0"])
def test_another_transport_loads_the_state_and_gives_it_back(name: str) -> None:
    assert sum(pool(2).run(to_full_and_back, TRANSPORTS[name])) > 0


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def save_whole(transport: Transport) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """State and weights, every tensor in one piece."""
    run = Run(transport)
    for number in range(1, SAVED_AT + 1):
        run.step(number)
    state = run.saved()
    state["state"] = {
        number: {key: whole(value) for key, value in of_parameter.items()}
        for number, of_parameter in state["state"].items()
    }
    return state, {name: whole(weight) for name, weight in run.weights().items()}


def load_whole(transport: Transport, state: dict[str, Any], weights: dict[str, Tensor]) -> list[Tensor]:
    """Goes on at another number of ranks: whole waiting times, as they were loaded."""
    mesh = whole_mesh()

    def placed(value: Tensor) -> Tensor:
        return place(value, Shard(0), mesh) if value.ndim else value

    tensors = {number: {k: placed(v) for k, v in of_one.items()} for number, of_one in state["state"].items()}
    parts = {name: placed(weight) for name, weight in weights.items()}
    loaded, fresh = Run(transport, parts), Run(transport, parts)
    loaded.optimizer.load_state_dict({**state, "state": tensors})
    groups = [{**group, "carried": ""} for group in state["param_groups"]]
    fresh.optimizer.load_state_dict({"state": tensors, "param_groups": groups})
    waited = [whole(of_one["waited"]) for of_one in loaded.states()]
    loaded.optimizer.report()
    fresh.optimizer.report()
    for number in range(SAVED_AT + 1, NUM_STEPS + 1):  # as if there had been no budgets
        assert loaded.step(number) == fresh.step(number)
    assert_equal_bits(*(snapshot(run.optimizer, run.parameters) for run in (loaded, fresh)), "at another size")
    return waited


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
@pytest.mark.parametrize("name", ["learned", "1.0"])
def test_at_another_number_of_ranks_rows_go_on_waiting_and_budgets_start_afresh(
    name: str, before: int, after: int
) -> None:
    state, weights = pool(before).run(save_whole, TRANSPORTS[name])[0]
    waited = [of_one["waited"] for of_one in state["state"].values() if "waited" in of_one]
    assert any(steps.any() for steps in waited)
    for of_rank in pool(after).run(load_whole, TRANSPORTS[name], state, weights):
        assert all(map(torch.equal, of_rank, waited))
