"""Layer-wise state on a GPU: the steps of the ordinary mode, a rank that has nothing of some shapes, and capture."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dion_core import Dion2, LayerWise, Muon, NorDion2, NorMuon
from dion_core.testing.loopback import loopback

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

OPTIMIZERS = (Muon, NorMuon, Dion2, NorDion2)
SHAPES = [(96, 64), (96, 64), (64, 96), (64, 64), (17, 32), (64,), (7, 3)]


class Training:
    """An optimizer of matrices, an AdamW and a Lion parameter, and equal gradients in every run."""

    def __init__(self, kind: type[Any], group: Any, state: Any) -> None:
        self.parameters = [nn.Parameter(self.random(number)) for number in range(len(SHAPES))]
        groups = [
            {"params": self.parameters[:-2]},
            {"params": self.parameters[-2:-1], "algorithm": "adamw", "lr": 0.1},
            {"params": self.parameters[-1:], "algorithm": "lion", "lr": 0.1},
        ]
        self.optimizer = kind(groups, lr=0.1, group=group, state=state)

    def random(self, number: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(100 * seed + number)
        return torch.randn(SHAPES[number], generator=generator, device="cuda", dtype=torch.bfloat16)

    def run(self, num_steps: int = 4) -> list[torch.Tensor]:
        for step in range(1, num_steps + 1):
            for number, parameter in enumerate(self.parameters):
                parameter.grad = self.random(number, step)
            self.optimizer.step()
        return [parameter.detach() for parameter in self.parameters]


@pytest.fixture
def world() -> Iterator[Any]:
    """A world of one rank on NCCL."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_one_rank_takes_the_steps_of_the_ordinary_mode(kind: type[Any], world: Any) -> None:
    """To the rounding of bf16 weights: a bucket of one matrix may use another kernel than one of two."""
    wanted = Training(kind, world, "like_parameters").run()
    for state in ("layerwise", LayerWise(bucket_elements=5000)):
        for one, other in zip(Training(kind, world, state).run(), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_captured_step_is_the_eager_one(kind: type[Any]) -> None:
    """As rank 0 of four, which owns no matrix of some shapes."""
    with loopback(4, "cuda") as (mesh, _):
        results = []
        for captures in (False, True):
            training = Training(kind, mesh, "layerwise")
            if captures:
                training.optimizer.capture()
            results.append(training.run())
            training.optimizer.release()
        report = training.optimizer.report()
        assert any(0 not in bucket["owners"] for bucket in report["buckets"])
        assert all(map(torch.equal, *results))
