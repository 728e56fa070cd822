"""One optimizer step, measured on a rank: what it sends and counts, what memory it takes, how long it lasts.

The functions run on every rank of a process group at once, the same cells in the same order; what they return is alike
on every rank, and plain data. Everything that is counted is alike in every run of the same code on the same machine.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks.inventories import renew_gradients, sharded_parameters
from dion_core import NorDion2
from dion_core.collectives import Call, observe
from dion_core.inventories import INVENTORIES, Inventory

SMALL: dict[str, Inventory] = {
    "tiny": {(96, 48): 4, (48, 96): 2},
    "uneven": {(50, 32): 3, (131, 32): 5, (32, 131): 2},
}
"""Matrices for a CPU, of which those of "uneven" lie in shards of unlike sizes."""
LARGE = tuple(INVENTORIES)
"""The names of the inventories for GPUs."""

WARM_UP = 8  # capped sets budgets anew in the first steps
COUNTED = 6
PROFILED = 3
TIMED = 12
UNEVEN = 1.5
"""By how much the gradients of one rank, another one in every step, exceed those of the others."""

Figures = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """What is measured: a transport, the matrices, the number of ranks, and the fraction of the rows.

    Attributes:
        inventory: a name of `SMALL` or `INVENTORIES`.
    """

    transport: str
    inventory: str
    world_size: int
    fraction: float

    @property
    def key(self) -> str:
        """The cell as text, by which figures are kept."""
        return key(self.transport, self.inventory, self.world_size, self.fraction)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, from which `Cell(**data)` makes the cell again."""
        return asdict(self)


def key(*parameters: object) -> str:
    """The text by which the figures of a cell are kept: its parameters, in their order."""
    return " ".join(map(str, parameters))


class Running:
    """An optimizer of the cell on this rank, with parameters and gradients that are alike in every run."""

    def __init__(self, cell: Cell, mesh: DeviceMesh) -> None:
        gc.collect()  # what the last cell left, of which two may not fit on a GPU
        self.mesh = mesh
        self._count = 0
        torch.manual_seed(mesh.get_local_rank())
        dtype = torch.bfloat16 if mesh.device_type == "cuda" else torch.float32
        inventory = {**SMALL, **INVENTORIES}[cell.inventory]
        self._parameters = sharded_parameters(inventory, mesh, dtype)
        self.optimizer = NorDion2(self._parameters, lr=0.01, fraction=cell.fraction, transport=cell.transport)

    def renew(self) -> None:
        """Fresh gradients."""
        renew_gradients(self._parameters)
        if self._count % self.mesh.size() == self.mesh.get_local_rank():
            for parameter in self._parameters:
                assert isinstance(parameter.grad, DTensor)
                parameter.grad.to_local().mul_(UNEVEN)
        self._count += 1

    def step(self) -> None:
        self.optimizer.step()

    def steps(self, number: int) -> None:
        """So many steps, each with fresh gradients."""
        for _ in range(number):
            self.renew()
            self.step()


def count_traffic(cell: Cell, device: str) -> Figures:
    """What the ranks send to each other and defer: figures of the rank and the step that have most of it.

    `bytes` are those to other ranks, `host_reads` those that a step needs by its plan. `deferred` and `chosen` count
    rows of all ranks, in the `COUNTED` steps.
    """
    running = Running(cell, _mesh(cell, device))
    running.steps(WARM_UP)
    running.optimizer.report()  # which starts counting rows anew
    sent, collectives = [], []
    for _ in range(COUNTED):
        running.renew()
        with observe() as calls:
            running.step()
        sent.append(_sent_to_others(calls))
        collectives.append(len(calls))
    report = running.optimizer.report()
    most = _over_ranks([max(sent), max(collectives), report["host_reads_per_step"]], dist.ReduceOp.MAX, device)
    rows = _over_ranks([report["rows"]["deferred"], report["rows"]["chosen"]], dist.ReduceOp.SUM, device)
    return dict(zip(("bytes", "collectives", "host_reads", "deferred", "chosen"), most + rows, strict=True))


def time_step(cell: Cell, device: str) -> Figures:
    """`time_running` of the cell, of the slowest rank. Collective."""
    return time_running(Running(cell, _mesh(cell, device)))


def time_running(running: Running) -> Figures:
    """`seconds` of `TIMED` single steps, of the slowest rank each: by events on a GPU, by the clock on a CPU.

    All ranks start a step together, with the device idle, so host time that device work would hide counts.
    """
    device = running.mesh.device_type
    running.steps(WARM_UP)
    seconds = []
    for _ in range(TIMED):
        running.renew()
        start_together(device)
        seconds.append(timed(running.step, device))
    return {"seconds": of_slowest(seconds, device)}


def of_slowest(seconds: Sequence[float], device: str) -> list[float]:
    """The times of the slowest rank each. Collective."""
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [float(value) for value in slowest]


def timed(work: Callable[[], object], device: str) -> float:
    """Seconds of one call: device and host time on a GPU, by events."""
    if device == "cpu":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    work()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3


def count_memory(running: Running) -> Figures:
    """On a CPU: `allocations` of one step, and the `workspace` in bytes that it needs at most beside what stays.

    Medians of a few steps: now and then a thread of gloo lets go of a message before the next allocation, not after it.
    """
    running.steps(WARM_UP)
    counts = [_memory_of_step(running) for _ in range(PROFILED)]
    return {name: median(count[name] for count in counts) for name in counts[0]}


def _memory_of_step(running: Running) -> dict[str, int]:
    running.renew()
    with without_collector(), quiet_profile(torch.profiler.ProfilerActivity.CPU, memory=True) as profile:
        running.step()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held, most, allocations = 0, 0, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
        allocations += event.nbytes() > 0
    return {"allocations": allocations, "workspace": most}


def count_device(running: Running) -> Figures:
    """On a GPU: what `count_memory` counts, and of one step the `launches` and the `waits` of the host."""
    running.steps(WARM_UP)
    running.renew()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    torch.cuda.reset_peak_memory_stats()
    waits = _count_waits(running.step)
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    running.renew()
    torch.cuda.synchronize()
    with quiet_profile(torch.profiler.ProfilerActivity.CUDA) as profile:
        running.step()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    launched = [event for event in profile.events() if event.device_type == cuda and not event.is_user_annotation]
    return {
        "allocations": after["allocation.all.allocated"] - before["allocation.all.allocated"],
        "workspace": after["allocated_bytes.all.peak"] - before["allocated_bytes.all.current"],
        "launches": sum(not event.name.startswith("Optimizer.") for event in launched),
        "waits": waits,
    }


@contextmanager
def without_collector() -> Iterator[None]:
    """In here memory is freed when its last name goes, and not at whatever moment Python looks for cycles."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def quiet_profile(*activities: torch.profiler.ProfilerActivity, memory: bool = False) -> Iterator[Any]:
    """A profile of the block, without the profiler's remarks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile(activities=activities, profile_memory=memory) as profile:
            yield profile


def _count_waits(work: Callable[[], object]) -> int:
    """How often the host waits for the device inside of operators."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    return sum("synchroniz" in str(each.message) and "prototype" not in str(each.message) for each in caught)


def _sent_to_others(calls: Sequence[Call]) -> int:
    """Bytes of the calls, without those that this rank sends to itself."""
    rank = dist.get_rank()  # of the only group that the cells use
    return sum(sum(call.sent) - call.sent[rank] for call in calls)


def _mesh(cell: Cell, device: str) -> DeviceMesh:
    if dist.get_world_size() != cell.world_size:
        raise ValueError(f"{cell} needs {cell.world_size} ranks, and there are {dist.get_world_size()}")
    return init_device_mesh(device, (cell.world_size,))


def _over_ranks(values: Sequence[int], operation: dist.ReduceOp.RedOpType, device: str) -> list[int]:
    tensor = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(tensor, operation)
    return [int(value) for value in tensor]


def start_together(device: str) -> None:
    """All ranks are here, and the device is idle."""
    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    if device == "cuda":
        torch.cuda.synchronize()
