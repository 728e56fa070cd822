"""What a step costs by count on one rank of W: launches, host reads, allocations, and memory against the plan."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from dion_core import NorDion2
from dion_core.testing.loopback import loopback
from tests.no_sync import no_sync

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

WARM_UP = 12  # capped sets budgets again in the first steps
INVENTORY = {(512, 512): 12, (2048, 512): 8, (512, 2048): 8}
MOST_LAUNCHES = 25
"""Of a bucket, Newton-Schulz and collectives included."""
ONCE_A_STEP = 25


class World:
    """The parameters of one rank and their optimizer."""

    def __init__(
        self, transport: str, world_size: int, mesh: torch.distributed.device_mesh.DeviceMesh, steps: int = WARM_UP
    ) -> None:
        self.parameters = []
        for (rows, columns), count in INVENTORY.items():
            for _ in range(count):
                shard = torch.randn(rows // world_size, columns, device="cuda", dtype=torch.bfloat16)
                self.parameters.append(nn.Parameter(DTensor.from_local(shard, mesh, [Shard(0)], run_check=False)))
        self.optimizer = NorDion2(self.parameters, lr=0.01, transport=transport)
        for _ in range(steps):
            self.give_gradients()
            self.optimizer.step()

    def give_gradients(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.to_local().normal_()


@pytest.mark.parametrize("transport", ["local", "full", "capped"])
def test_a_step_never_waits_for_the_device(transport: str) -> None:
    with loopback(4, "cuda") as (mesh, _):
        world = World(transport, 4, mesh)
        for _ in range(10):
            world.give_gradients()
            with no_sync():
                world.optimizer.step()
        assert world.optimizer.report()["host_waits"] == 0


@pytest.mark.parametrize("transport", ["local", "full", "capped", "varlen"])
def test_launches_of_a_step(transport: str) -> None:
    with loopback(4, "cuda") as (mesh, _):
        world = World(transport, 4, mesh)
        world.give_gradients()
        torch.cuda.synchronize()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the profiler, about cycles that it does not record
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                world.optimizer.step()
                torch.cuda.synchronize()
        names = [
            event.name
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("Optimizer.")
        ]
        num_buckets = len(world.optimizer.report()["buckets"])
        assert num_buckets == len(INVENTORY)
        assert len(names) <= MOST_LAUNCHES * num_buckets + ONCE_A_STEP, names


@pytest.mark.parametrize("transport", ["local", "full", "capped"])
def test_a_step_takes_no_memory_from_the_device(transport: str) -> None:
    """In steady state all of it comes out of what torch's allocator holds already, and goes back."""
    with loopback(4, "cuda") as (mesh, _):
        world = World(transport, 4, mesh)
        gc.collect()  # what earlier tests have left must not be freed in between
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()
        for _ in range(5):
            world.give_gradients()
            world.optimizer.step()
        after = torch.cuda.memory_stats()
        for name in ("segment.all.allocated", "segment.all.freed", "allocated_bytes.all.current", "num_alloc_retries"):
            assert after[name] == before[name], name


@pytest.mark.parametrize("transport", ["local", "full", "capped"])
def test_what_the_first_step_launches_is_compiled_before(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the optimizer is built, but for what `capped` launches where its session begins."""
    launching = pytest.importorskip("dion_core.launching")
    compiled: list[str] = []
    compile_kernel = launching._compile

    def compile_and_tell(kernel: Any, *arguments: Any) -> Any:
        compiled.append(kernel.fn.__name__)
        return compile_kernel(kernel, *arguments)

    monkeypatch.setattr(launching, "_compiled", {})
    monkeypatch.setattr(launching, "_compile", compile_and_tell)
    with loopback(4, "cuda") as (mesh, _):
        world = World(transport, 4, mesh, steps=0)
        assert {"products_kernel", "_accumulate_kernel", "_update_kernel"} < set(compiled)
        compiled.clear()
        world.give_gradients()
        world.optimizer.step()
    assert set(compiled) == ({"_rows_by_pair_kernel"} if transport == "capped" else set())


@pytest.mark.parametrize("captured", [False, True])
def test_gradients_are_not_kept(captured: bool) -> None:
    """Who sets them to None after the step has their memory for the next forward and backward."""
    with loopback(4, "cuda") as (mesh, _):
        world = World("local", 4, mesh)
        if captured:
            world.optimizer.capture()
        for _ in range(3):
            world.give_gradients()
            world.optimizer.step()
        before = torch.cuda.memory_allocated()
        gradients = 0
        for parameter in world.parameters:
            assert isinstance(parameter.grad, DTensor)
            gradients += parameter.grad.to_local().nbytes
            parameter.grad = None
        assert before - torch.cuda.memory_allocated() == gradients
        world.optimizer.release()


@pytest.mark.parametrize("transport", ["local", "full", "capped"])
def test_a_step_needs_no_more_memory_than_planned(transport: str) -> None:
    with loopback(4, "cuda") as (mesh, _):
        world = World(transport, 4, mesh)
        world.give_gradients()
        torch.cuda.synchronize()
        steady = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        world.optimizer.step()
        torch.cuda.synchronize()
        used = torch.cuda.max_memory_allocated() - steady
        planned = world.optimizer.report()["workspace_bytes"]
        assert used <= planned
        assert planned < 3 * used  # a bound that says something
