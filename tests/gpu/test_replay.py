"""Replayed steps: equal to steps that run as they are, bit for bit, whatever changes, and wherever their memory is."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from dion_core import Dion2, Muon, NorDion2, NorMuon
from dion_core.testing.loopback import Wire, loopback

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

SHAPES = [(96, 64), (96, 64), (64, 96), (64, 64), (17, 32)]
ALIKE = 2
"""Steps until the next is replayed."""


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda", dtype=dtype)


def is_replayed(optimizer: Any) -> bool:
    return optimizer._runner._replay._tape is not None


class Pair:
    """Two optimizers of equal parameters, of which one never replays."""

    def __init__(self, kind: type[Any], dtype: torch.dtype = torch.bfloat16) -> None:
        self.sides = []
        for plain in (True, False):
            parameters = [nn.Parameter(random(shape, dtype, seed)) for seed, shape in enumerate([*SHAPES, (64,), (7,)])]
            groups = [
                {"params": parameters[:-2]},
                {"params": parameters[-2:-1], "algorithm": "adamw", "lr": 0.1},
                {"params": parameters[-1:], "algorithm": "lion", "lr": 0.1},
            ]
            self.sides.append((parameters, kind(groups, lr=0.1)))
            if plain:
                self.run_as_they_are()
        self.replayed = self.sides[1][1]

    def run_as_they_are(self) -> None:
        self.sides[0][1]._runner._replay = None

    def step(self, seed: int, missing: tuple[int, ...] = ()) -> None:
        for parameters, optimizer in self.sides:
            for number, parameter in enumerate(parameters):  # in new storage in every step
                gradient = random(tuple(parameter.shape), parameter.dtype, 100 * seed + number)
                parameter.grad = None if number in missing else gradient
            optimizer.step()
        self.assert_equal()

    def assert_equal(self) -> None:
        (one, of_one), (other, of_other) = self.sides
        for parameter, same in zip(one, other, strict=True):
            assert torch.equal(parameter, same)
            for state, other_state in zip(of_one.state[parameter].values(), of_other.state[same].values(), strict=True):
                assert torch.equal(state, other_state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("kind", [Muon, NorMuon, Dion2, NorDion2])
def test_replay_follows_the_rates(kind: type[Any], dtype: torch.dtype) -> None:
    pair = Pair(kind, dtype)
    before = [each.detach().clone() for each in pair.sides[1][0]]
    for number in range(8):
        for _, optimizer in pair.sides:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (1 + number)
                group["weight_decay"] = 0.01 * number
            optimizer.param_groups[0]["momentum"] = 0.95 - 0.01 * number
        assert is_replayed(pair.replayed) == (number >= ALIKE)
        pair.step(number)
    assert not any(torch.equal(one, each) for one, each in zip(before, pair.sides[1][0], strict=True))
    rows = [optimizer.report()["rows"] for _, optimizer in pair.sides]
    assert rows[0] == rows[1]


def test_a_graph_that_someone_else_captures_is_not_disturbed() -> None:
    pair, garbage = Pair(NorDion2), [Pair(Dion2)]
    for number in range(ALIKE + 2):
        pair.step(number)
        garbage[0].step(number)
    assert is_replayed(pair.replayed)
    assert is_replayed(garbage[0].replayed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pair.replayed.step()
        garbage.clear()
        gc.collect()  # frees the graphs of the other optimizer's launches
    graph.replay()
    pair.sides[0][1].step()
    pair.assert_equal()
    for number in range(10, 15):
        pair.step(number)
    assert is_replayed(pair.replayed)


def test_missing_gradients_options_groups_and_loaded_state_are_followed() -> None:
    pair = Pair(NorDion2)
    for number in range(5):
        pair.step(number)
    for number in range(5, 10):
        pair.step(number, missing=(1, 5))
    assert is_replayed(pair.replayed)
    for number in (10, 11, 12):  # recorded at once after replays, and not where two patterns take turns
        pair.step(number, missing=(1, 3, 6))
        assert is_replayed(pair.replayed) == (number == 10)
        pair.step(number, missing=(2,))
        assert not is_replayed(pair.replayed)
    saved = [copy.deepcopy(optimizer.state_dict()) for _, optimizer in pair.sides]
    for _, optimizer in pair.sides:
        optimizer.param_groups[0]["cautious_weight_decay"] = True
        optimizer.param_groups[1]["betas"] = (0.5, 0.5)
    for number in range(11, 16):
        pair.step(number)
    for (_, optimizer), state in zip(pair.sides, saved, strict=True):
        optimizer.load_state_dict(state)
    pair.run_as_they_are()
    for number in range(16, 21):
        pair.step(number)
    for parameters, optimizer in pair.sides:
        parameters.append(nn.Parameter(random((32, 48), torch.bfloat16, 77)))
        optimizer.add_param_group({"params": [parameters[-1]]})
    pair.run_as_they_are()
    for number in range(21, 26):
        pair.step(number)
    assert is_replayed(pair.replayed)


def test_parameters_state_and_gradients_may_move_between_replays() -> None:
    pair = Pair(NorDion2)
    for number in range(8):
        pair.step(number)
        kept = [torch.empty(64, device="cuda") for _ in range(number)]
        for parameters, optimizer in pair.sides:
            for parameter in parameters:
                parameter.data = parameter.data.clone()
                state = optimizer.state[parameter]
                state.update({name: value.clone() for name, value in state.items() if isinstance(value, torch.Tensor)})
        del kept
    assert is_replayed(pair.replayed)


@contextmanager
def world(transport: str, wire: Wire | None = None, **options: Any) -> Iterator[Pair]:
    """One rank of four, with replay and without."""
    with loopback(4, "cuda", wire=wire) as (mesh, _):
        pair = Pair.__new__(Pair)
        pair.sides = []
        for _ in range(2):
            parameters = []
            for seed, (rows, columns) in enumerate([(512, 256)] * 5 + [(256, 512)] * 4 + [(1024, 256)] * 3):
                shard = random((rows // 4, columns), torch.bfloat16, seed)
                parameters.append(nn.Parameter(DTensor.from_local(shard, mesh, [Shard(0)], run_check=False)))
            pair.sides.append((parameters, NorDion2(parameters, lr=0.1, transport=transport, **options)))
        pair.replayed = pair.sides[1][1]
        pair.run_as_they_are()
        yield pair


def step(pair: Pair, number: int, between: int = 0) -> None:
    for parameters, optimizer in pair.sides:
        for seed, parameter in enumerate(parameters):
            parameter.grad = torch.empty_like(parameter)
            shape = tuple(parameter.to_local().shape)
            parameter.grad.to_local().copy_(random(shape, torch.bfloat16, 100 * number + seed))
        kept = torch.empty(between, dtype=torch.uint8, device="cuda")
        optimizer.step()
        del kept
    for one, other in zip(pair.sides[0][0], pair.sides[1][0], strict=True):
        assert torch.equal(one.to_local(), other.to_local())


@pytest.mark.parametrize("transport", ["local", "full", "capped"])
def test_one_rank_of_four_wherever_the_memory_lies(transport: str) -> None:
    with world(transport) as pair:
        replayed, starts = 0, set()
        for number in range(30):
            replayed += is_replayed(pair.replayed)
            step(pair, number, between=(number % 5) * 2**21)
            if is_replayed(pair.replayed):
                starts.add(pair.replayed._runner._replay._tape._start)
        assert replayed > 10
        assert len(starts) > 1  # else nothing has moved
        assert pair.sides[0][1].report()["rows"] == pair.sides[1][1].report()["rows"]


def test_messages_are_sent_anew_on_a_wire() -> None:
    with world("capped", Wire(25e9)) as pair:
        for number in range(24):
            step(pair, number)
        assert is_replayed(pair.replayed)


def test_what_reads_on_the_host_or_does_not_say_that_it_can_is_never_replayed() -> None:
    class Own:
        """An orthogonalizer of somebody else."""

        def __call__(self, matrices: torch.Tensor) -> torch.Tensor:
            return matrices / matrices.norm()

    with world("varlen") as pair:
        assert pair.replayed._runner._replay is None
    with world("local", orthogonalizer=Own()) as pair:
        assert pair.replayed._runner._replay is None
        for number in range(5):
            step(pair, number)
    matrix = nn.Parameter(torch.randn(8, 8, device="cuda"))
    assert NorDion2([matrix], nonfinite="skip")._runner._replay is None


def test_fp64_steps_run_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    """Plain torch reads gradients where they are, which is elsewhere in the next step."""
    pair = Pair(NorDion2, torch.float64)
    with caplog.at_level("INFO", logger="dion_core"):
        for number in range(6):
            pair.step(number)
    assert not is_replayed(pair.replayed)
    assert "steps are not replayed" in caplog.text


@pytest.mark.parametrize("transport", ["local", "full", "capped"])
def test_no_memory_is_held_between_replays(transport: str) -> None:
    with world(transport) as pair:
        for number in range(24):
            step(pair, number)
        assert is_replayed(pair.replayed)
        gc.collect()
        held = torch.cuda.memory_allocated()
        pair.replayed._runner._replay._tape = None
        gc.collect()
        assert held - torch.cuda.memory_allocated() < 64 * 2**10


def test_scaled_and_captured_steps_in_between() -> None:
    """What `capped` keeps from step to step is then that of the steps that were run otherwise."""
    with world("capped") as pair:
        optimizers = [optimizer for _, optimizer in pair.sides]
        for number in range(48):
            if number == 24:
                pair.replayed.capture()
            elif number == 29:
                pair.replayed.release()
            for optimizer in optimizers:
                scaled = number in (34, 35)
                optimizer.grad_scale = torch.ones((), device="cuda") if scaled else None
                optimizer.found_inf = torch.zeros((), device="cuda") if scaled else None
            step(pair, number)
            assert optimizers[0]._plan.session.state_dict() == optimizers[1]._plan.session.state_dict()
        assert is_replayed(pair.replayed)


def test_a_parameter_without_rows_here_does_not_keep_steps_from_being_replayed() -> None:
    parameters = [nn.Parameter(random((64, 32), torch.bfloat16, 0)), nn.Parameter(torch.empty(0, device="cuda"))]
    optimizer = NorDion2([{"params": parameters[:1]}, {"params": parameters[1:], "algorithm": "adamw", "lr": 0.1}])
    for _ in range(4):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert is_replayed(optimizer)
