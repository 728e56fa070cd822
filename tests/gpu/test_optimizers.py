"""Every optimizer on one GPU, against the float64 reference, and under FSDP2 on NCCL."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dion_core import Dion2, Muon, NorDion2, NorMuon
from dion_core.collectives import SoloGroup
from dion_core.process_groups import TorchGroup
from tests.reference import Options, ReferenceMatrix

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

OPTIMIZERS = {"muon": Muon, "normuon": NorMuon, "dion2": Dion2, "nordion2": NorDion2}
SHAPES = [(96, 64), (64, 96), (64, 64), (17, 32), (1, 8)]


@pytest.fixture(scope="module")
def nccl() -> Iterator[TorchGroup]:
    """A world of one rank on NCCL."""
    store = dist.HashStore()
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    assert dist.group.WORLD is not None
    yield TorchGroup(dist.group.WORLD)
    dist.destroy_process_group()


@pytest.mark.parametrize("algorithm", OPTIMIZERS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    # The second moment of NorMuon is float32 in any case (2**-24 a step), hence not 1e-9. float32 rows are
    # orthogonalized in float16, whose rounding (2**-11 a product) five steps accumulate.
    [(torch.float64, 1e-6), (torch.float32, 2e-2)],
)
def test_equals_the_reference_after_five_steps(algorithm: str, dtype: torch.dtype, tolerance: float) -> None:
    generator = np.random.default_rng(0)
    weights = [generator.standard_normal(shape) for shape in SHAPES]
    parameters = [nn.Parameter(torch.tensor(weight, dtype=dtype, device="cuda")) for weight in weights]
    optimizer = OPTIMIZERS[algorithm](parameters, lr=0.1)
    references = [ReferenceMatrix(weight, Options(algorithm, lr=0.1)) for weight in weights]
    for _ in range(5):
        for parameter, reference in zip(parameters, references, strict=True):
            gradient = generator.standard_normal(parameter.shape)
            parameter.grad = torch.tensor(gradient, dtype=dtype, device="cuda")
            reference.step(gradient)
        optimizer.step()
    for weight, parameter, reference in zip(weights, parameters, references, strict=True):
        moved = np.linalg.norm(reference.weight - weight)
        error = np.linalg.norm(parameter.detach().double().cpu().numpy() - reference.weight)
        assert error <= tolerance * moved, (algorithm, parameter.shape, error / moved)


@pytest.mark.parametrize("algorithm", OPTIMIZERS)
def test_bf16_model_trains_under_fsdp2_on_nccl(algorithm: str, nccl: TorchGroup) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).cuda().bfloat16()
    fully_shard(model, mesh=init_device_mesh("cuda", (nccl.size,)))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = OPTIMIZERS[algorithm](
        [{"params": matrices}, {"params": others, "algorithm": "adamw", "lr": 1e-2}], lr=0.05, weight_decay=0.0
    )
    inputs = torch.randn(64, 32, device="cuda", dtype=torch.bfloat16)
    losses = []
    for _ in range(30):
        loss = (model(inputs) - inputs.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0], losses
    json.dumps(optimizer.report())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_collectives_of_one_nccl_rank_equal_those_of_no_group(dtype: torch.dtype, nccl: TorchGroup) -> None:
    tensor = torch.arange(12, device="cuda").to(dtype)
    results = []
    for group in (nccl, SoloGroup()):
        gathered, exchanged, scattered = (torch.zeros_like(tensor) for _ in range(3))
        reduced, sent = tensor.clone(), tensor.clone()
        handles = [
            group.all_gather([gathered], tensor),
            group.all_to_all(exchanged, tensor, [12], [12]),
            group.reduce_scatter(scattered, tensor, "sum"),
            group.all_reduce(reduced, "max"),
            group.broadcast(sent, 0),
        ]
        for handle in handles:
            handle.wait()
        results.append(torch.cat([gathered, exchanged, scattered, reduced, sent]))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], tensor.repeat(5))
