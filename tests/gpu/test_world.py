"""Several GPUs over NCCL: what is moved, what is learned, what is captured, and what is raised."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import dion_core
from dion_comm_capped import Capped
from dion_core import NorDion2, available_transports
from dion_core.testing.cells import cases
from dion_core.testing.conformance import Outcome, check_all
from dion_core.testing.ranks import RankError, RankPool, pool
from dion_core.transport import TransportError
from tests.training import (
    Cell,
    assembled,
    largest_errors,
    place,
    random_problem,
    run_cells,
    transports_and_scopes,
    whole_mesh,
)

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS < 2, reason="needs two GPUs")]
WORLD_SIZES = [size for size in (2, 4, 8) if size <= NUM_GPUS] or [2]

PROBLEM = random_problem(
    [(64, 48), (17, 32), (64, 48), (40, 304), (3, 8)], adamw=[(7,), (5, 3)], lion=[(9, 3)], num_steps=5, seed=5
).to(torch.float32)
LAYOUTS = ("shard0", "shard1", "replicate", "ddp")
# Newton-Schulz runs in fp16 on whole matrices; batches of other sizes may take other kernels (docs/performance.md).
BOUND = 5e-3


def conformance(name: str) -> list[Outcome]:
    return check_all(name, f"cuda:{dist.get_rank()}")


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", available_transports())
def test_conformance(name: str, world_size: int) -> None:
    by_rank = pool(world_size, "cuda").run(conformance, name, timeout=170.0)
    wanted = list(cases(available_transports()[name], world_size))
    for rank, outcomes in enumerate(by_rank):
        assert [outcome.case for outcome in outcomes] == wanted
        found = [f"rank {rank}: {o.case}: {failure}" for o in outcomes for failure in o.failures]
        assert not found, "\n".join(found[:20])
    moved = sum(outcome.bytes_to_others for outcomes in by_rank for outcome in outcomes)
    assert moved > 0


def cells() -> list[Cell]:
    """Every optimizer with every transport and scope that does not depend on W, on every layout."""
    return [
        Cell(PROBLEM, optimizer, layout, {**options, **way}, steps=(1, 5))
        for layout in LAYOUTS
        for optimizer, options in (("Muon", {}), ("NorMuon", {}), ("Dion2", {}), ("NorDion2", {"fraction": 0.35}))
        for way in transports_and_scopes(optimizer)
        if way.get("scope") != "local"
    ]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_weights_are_those_of_one_gpu(world_size: int) -> None:
    """Replicas are bit-equal (`assembled` compares them); weights agree with one GPU's to fp16 rounding."""
    made = cells()
    alone = pool(1, "cuda").run(run_cells, made, timeout=170.0)
    together = pool(world_size, "cuda").run(run_cells, made, timeout=170.0)
    for number, cell in enumerate(made):
        one, many = (assembled(cell, [of_rank[number] for of_rank in by_rank]) for by_rank in (alone, together))
        for step, wanted, actual in zip(cell.steps, one, many, strict=True):
            errors = largest_errors(actual, {name: value.double() for name, value in wanted.items()})
            assert errors["weight"] < BOUND, f"{cell.optimizer} {cell.layout} {cell.options} step {step}: {errors}"


def three_ways(transport: Any, steps: int) -> tuple[float, bool]:
    """How much the weights moved, and whether steps as they are, replayed and captured ones end with the same bits."""
    mesh, generator = whole_mesh(), torch.Generator().manual_seed(0)
    shapes = [(96, 64)] * 3 + [(64, 96)] * 2 + [(64, 64)]
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    ways = [[nn.Parameter(place(value, Shard(0), mesh)) for value in start] for _ in range(3)]
    optimizers = [NorDion2(parameters, lr=0.1, transport=transport) for parameters in ways]
    optimizers[0]._runner._replay = None
    optimizers[2].capture()
    replayed = 0
    for _ in range(steps):
        for number, shape in enumerate(shapes):
            value = torch.randn(shape, generator=generator)
            for parameters in ways:
                parameters[number].grad = place(value, Shard(0), mesh)
        replay = optimizers[1]._runner._replay
        assert replay is not None
        replayed += replay._tape is not None
        for optimizer in optimizers:
            optimizer.step()
    assert replayed > steps // 2, replay._reason
    graph = optimizers[2]._runner._graph
    assert graph is not None
    assert graph._graph is not None, "nothing was captured"
    optimizers[2].release()
    ends = [[parameter.to_local().detach() for parameter in parameters] for parameters in ways]
    before = [place(value, Shard(0), mesh).to_local() for value in start]
    moved = max(float((end - one).abs().max()) for end, one in zip(ends[0], before, strict=True))
    return moved, all(all(map(torch.equal, ends[0], each)) for each in ends[1:])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("transport", ["full", "local", "capped", Capped(capacity=2.0)])
def test_captured_and_replayed_steps_over_nccl_equal_those_as_they_are(transport: Any, world_size: int) -> None:
    for moved, equal in pool(world_size, "cuda").run(three_ways, transport, 24, timeout=110.0):
        assert moved > 0.1
        assert equal


def two_hundred_steps(optimizer_name: str) -> tuple[list[Tensor], list[Tensor]]:
    """A small model trained by data-parallel replicas: this rank's weights at the end, and the losses."""
    on_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", dist.get_rank()) if on_gpu else torch.device("cpu")
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64, bias=False), nn.Tanh(), nn.Linear(64, 16, bias=False)).to(device)
    teacher = torch.randn(32, 16, generator=generator) / 8
    optimizer = getattr(dion_core, optimizer_name)(model.parameters(), lr=0.02, group=dist.group.WORLD)
    losses = []
    for _ in range(200):
        batch = torch.randn(64, 32, generator=generator)
        mine = batch.chunk(dist.get_world_size())[dist.get_rank()].to(device)
        loss = (model(mine) - mine @ teacher.to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        losses.append(loss.detach().cpu())
    return [parameter.detach().cpu() for parameter in model.parameters()], losses


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("optimizer", ["NorMuon", "NorDion2"])
def test_replicas_stay_bit_equal_over_200_steps(optimizer: str, world_size: int) -> None:
    by_rank = pool(world_size, "cuda").run(two_hundred_steps, optimizer, timeout=110.0)
    [(alone, losses)] = pool(1, "cuda").run(two_hundred_steps, optimizer, timeout=110.0)
    for weights, _ in by_rank[1:]:
        assert all(map(torch.equal, weights, by_rank[0][0]))
    together = torch.stack([torch.stack(of_rank) for _, of_rank in by_rank]).mean(dim=0)
    assert torch.stack(losses)[-1] < 0.5 * torch.stack(losses)[0]
    # The mean gradient of W parts is summed in another order, and 200 steps amplify that.
    assert torch.allclose(together[-20:].mean(), torch.stack(losses)[-20:].mean(), rtol=0.05)
    assert all(one.shape == other.shape for one, other in zip(alone, by_rank[0][0], strict=True))


def sharded(transport: str, orders: int = 0) -> NorDion2:
    """An optimizer of four row-sharded matrices with gradients; the odd rank may give them in another order."""
    mesh, shapes = whole_mesh(), [(64, 32)] * 2 + [(32, 48)] * 2
    parameters = [(f"w{n}", nn.Parameter(place(torch.ones(shape), Shard(0), mesh))) for n, shape in enumerate(shapes)]
    for _, parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
        assert isinstance(parameter.grad, DTensor)
    if orders and dist.get_rank() == 1:
        parameters.reverse()
    return NorDion2(parameters, transport=transport)


def test_plans_that_differ_are_refused_by_all() -> None:
    errors = pool(2, "cuda").run_expecting_error(sharded, "full", 1)
    for error in errors:
        assert isinstance(error, TransportError)
        assert "ranks disagree about the optimizer's plan" in str(error)


def late(seconds: float) -> str:
    """Rank 1 does not come to the second step for a while; what a rank raised, and after how long."""
    optimizer = sharded("full")
    optimizer.step()
    torch.cuda.synchronize()
    if dist.get_rank() == 1:
        time.sleep(seconds)
        return "late"
    start = time.monotonic()
    try:
        for _ in range(1000):  # a collective that was aborted ends without an error of its own; the next one raises
            optimizer.step()
            torch.cuda.synchronize()
            time.sleep(0.05)
    except TransportError as error:
        return f"{time.monotonic() - start:.0f} s: {error}"
    return "nothing was raised"


def test_a_rank_that_does_not_come_meets_the_time_out() -> None:
    own = RankPool(2, timeout=10.0, device_type="cuda")  # collectives give up after 8 s
    try:
        first, _ = own.run(late, 25.0, timeout=60.0)
    finally:
        own._kill()
    assert re.match(r"\d+ s: ", first), first
    assert int(first.split()[0]) < 16
    assert "presence flags on rank 0 among ranks (0, 1)" in first


def die() -> None:
    optimizer = sharded("capped")
    optimizer.step()
    torch.cuda.synchronize()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    late(0.0)


def test_a_rank_that_is_killed_does_not_hang_the_call() -> None:
    own = RankPool(2, timeout=10.0, device_type="cuda")
    with pytest.raises(RankError) as caught:
        own.run(die, timeout=60.0)
    assert "died with exit code -9" in str(caught.value.lost[1])


def test_trained_outcomes_hold_collectives_of_every_rank() -> None:
    """The comparison above is not vacuous: ranks communicated, and weights moved."""
    cell = Cell(PROBLEM, "NorDion2", "shard0", {"transport": "varlen"}, steps=(1,))
    by_rank = pool(2, "cuda").run(run_cells, [cell])
    [moved] = assembled(cell, [each[0] for each in by_rank])
    assert all(each[0].calls for each in by_rank)
    for name, weight in cell.problem.weights.items():
        assert not torch.equal(moved[f"{name}.weight"], weight)
