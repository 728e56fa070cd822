"""A captured step: replay equals eager bit for bit, follows what changes, and refuses what it cannot do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from dion_core import Dion2, Muon, NorDion2, NorMuon
from dion_core.testing.loopback import loopback

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

SHAPES = [(96, 64), (96, 64), (64, 96), (64, 64), (17, 32)]
STEPS = 8


class Pair:
    """Two optimizers of equal parameters, one of which is captured."""

    def __init__(self, kind: type[Any], dtype: torch.dtype = torch.bfloat16) -> None:
        self.generator = torch.Generator("cuda").manual_seed(0)
        self.eager, self.captured = (
            [nn.Parameter(self.random(shape, dtype, seed)) for seed, shape in enumerate([*SHAPES, (64,), (7, 3)])]
            for _ in range(2)
        )
        self.optimizers = [kind(self.groups(each), lr=0.1) for each in (self.eager, self.captured)]
        self.optimizers[1].capture()

    @staticmethod
    def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda", dtype=dtype)

    @staticmethod
    def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [
            {"params": parameters[:-2]},
            {"params": parameters[-2:-1], "algorithm": "adamw", "lr": 0.1},
            {"params": parameters[-1:], "algorithm": "lion", "lr": 0.1},
        ]

    def step(self, seed: int) -> None:
        for parameters, optimizer in zip((self.eager, self.captured), self.optimizers, strict=True):
            for number, parameter in enumerate(parameters):  # in new storage in every step
                parameter.grad = self.random(tuple(parameter.shape), parameter.dtype, 100 * seed + number)
            optimizer.step()

    def assert_equal(self) -> None:
        for one, other in zip(self.eager, self.captured, strict=True):
            assert torch.equal(one, other)
            for state, same in zip(*(o.state[p].values() for o, p in self.sides(one, other)), strict=True):
                assert torch.equal(state, same)

    def sides(self, one: nn.Parameter, other: nn.Parameter) -> list[tuple[Any, nn.Parameter]]:
        return list(zip(self.optimizers, (one, other), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [Muon, NorMuon, Dion2, NorDion2])
def test_replay_equals_eager_and_follows_the_rates(kind: type[Any], dtype: torch.dtype) -> None:
    pair = Pair(kind, dtype)
    before = [each.detach().clone() for each in pair.captured]
    for number in range(STEPS):
        for optimizer in pair.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (1 + number)
            optimizer.param_groups[0]["weight_decay"] = 0.01 * number
            optimizer.param_groups[0]["momentum"] = 0.95 - 0.01 * number
        pair.step(number)
        pair.assert_equal()
    assert not any(torch.equal(one, each) for one, each in zip(before, pair.captured, strict=True))
    assert pair.optimizers[1]._runner._graph._graph is not None  # a graph was there
    rows = [optimizer.report()["rows"] for optimizer in pair.optimizers]
    assert rows[0] == rows[1]
    pair.optimizers[1].release()
    pair.step(STEPS)
    pair.assert_equal()


def test_a_changed_option_a_group_and_a_loaded_state_are_followed() -> None:
    pair = Pair(NorDion2)
    for number in range(3):
        pair.step(number)
    saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in pair.optimizers]
    for optimizer in pair.optimizers:
        optimizer.param_groups[1]["betas"] = (0.5, 0.5)
    for number in range(3, 6):
        pair.step(number)
        pair.assert_equal()
    for optimizer, state in zip(pair.optimizers, saved, strict=True):
        optimizer.load_state_dict(state)
    for number in range(6, 9):
        pair.step(number)
        pair.assert_equal()
    for parameters, optimizer in zip((pair.eager, pair.captured), pair.optimizers, strict=True):
        parameters.append(nn.Parameter(pair.random((32, 48), torch.bfloat16, 77)))
        optimizer.add_param_group({"params": [parameters[-1]]})
    for number in range(9, 12):
        pair.step(number)
        pair.assert_equal()


@pytest.mark.parametrize("transport", ["local", "full", "capped"])
def test_a_captured_step_of_one_rank_of_four(transport: str) -> None:
    with loopback(4, "cuda") as (mesh, _):
        sides = []
        for captured in (False, True):
            parameters = []
            for seed, (rows, columns) in enumerate([(64, 32)] * 5 + [(128, 32)] * 4):
                shard = Pair.random((rows // 4, columns), torch.bfloat16, seed)
                whole = DTensor.from_local(shard, mesh, [Shard(0)], run_check=False)
                parameters.append(nn.Parameter(whole))
            optimizer = NorDion2(parameters, lr=0.1, transport=transport)
            if captured:
                optimizer.capture()
            sides.append((parameters, optimizer))
        for number in range(14):
            for parameters, optimizer in sides:
                for seed, parameter in enumerate(parameters):
                    parameter.grad = torch.empty_like(parameter)
                    parameter.grad.to_local().copy_(
                        Pair.random(tuple(parameter.to_local().shape), torch.bfloat16, 100 * number + seed)
                    )
                optimizer.step()
            for one, other in zip(sides[0][0], sides[1][0], strict=True):
                assert torch.equal(one.to_local(), other.to_local())
        sides[1][1].release()


def test_what_cannot_be_captured_is_refused_by_name() -> None:
    on_cpu = NorDion2([("weight", nn.Parameter(torch.randn(8, 8)))])
    with pytest.raises(ValueError, match="weight is on cpu"):
        on_cpu.capture()
    matrix = nn.Parameter(torch.randn(8, 8, device="cuda"))
    with pytest.raises(ValueError, match='nonfinite="skip"'):
        NorDion2([matrix], nonfinite="skip").capture()
    optimizer = NorDion2([("here", matrix), ("absent", nn.Parameter(torch.randn(8, 8, device="cuda")))])
    optimizer.capture()
    matrix.grad = torch.ones_like(matrix)
    with pytest.raises(ValueError, match="none: absent"):
        optimizer.step()
    with loopback(2, "cuda") as (mesh, _):
        part = nn.Parameter(DTensor.from_local(torch.randn(4, 8, device="cuda"), mesh, [Shard(0)], run_check=False))
        with pytest.raises(ValueError, match=r"Varlen\(\) reads on the host"):
            NorDion2([part], transport="varlen").capture()
