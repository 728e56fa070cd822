"""How long a step takes on a GPU, where the time goes, and what the machine could do at best."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

WARM_UP, REPEATS = 3, 12

STAGES = {
    "accumulate": ("_accumulate",),
    "take": ("_take_and_decay",),
    "select": ("_choose", "sort", "radix", "indexselect", "_admit", "_with_age", "_wait_kernel"),
    "wire": ("multi_tensor_apply", "memcpy dtod", "copy_kernel", "nccl", "spin_kernel"),
    "Newton-Schulz": ("gemm", "nvjet", "products_kernel", "_normalize_kernel", "_row_norms", "_move_kernel", "_places"),
    "normalize": ("_factors", "_scale_kernel", "_sums"),
    "update": ("_update", "_place_kernel"),
}
"""Kernels of the stages, by parts of their names in lower case; whatever matches none is `other`."""


@dataclass
class Timing:
    """One row of the table; times in ms unless said otherwise.

    Attributes:
        isolated: events around one step after a synchronization: host time counts.
        hidden: the same with the device kept busy before: device time alone.
        host: of the call of `step`.
        peak_mib: most memory allocated during a step, above what stays allocated, in MiB.
        seconds_to_third_step: from construction to the end of the third step, in s.
    """

    isolated: float
    hidden: float
    host: float
    peak_mib: float
    seconds_to_third_step: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def ceilings() -> dict[str, float]:
    """What this device does at best: `copy` in bytes/s (read and written), `product` in FLOP/s (bf16, 8192^3)."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = median_ms(lambda: left @ right)
    source = torch.randn(2**29, device="cuda", dtype=torch.float32)
    target = torch.empty_like(source)
    copy = median_ms(lambda: target.copy_(source))
    return {"copy": 2 * source.numel() * 4 / copy * 1e3, "product": 2 * 8192**3 / product * 1e3}


def median_ms(work: Callable[[], Any], repeats: int = 10) -> float:
    """Device time of one call in ms, median after warm-up."""
    for _ in range(WARM_UP):
        work()
    times = []
    for _ in range(repeats):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        work()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after))
    return statistics.median(times)


def time_steps(build: Callable[[], Callable[[], Any]], renew: Callable[[], None], *, together: bool) -> Timing:
    """Times of a step.

    Args:
        build: makes the optimizer and returns its step.
        renew: gives the parameters fresh gradients, before each step and outside what is timed.
        together: whether the ranks of the process group start each step together; times are the slowest rank's.
    """
    _wait(together)
    started = time.perf_counter()
    step = build()
    for _ in range(WARM_UP):
        renew()
        step()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    steady = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    isolated, host = _timed(step, renew, busy_ms=0.0, together=together)
    peak = torch.cuda.max_memory_allocated() - steady
    hidden, _ = _timed(step, renew, busy_ms=max(20.0, 1.5 * host), together=together)
    values = torch.tensor([isolated, hidden, host, peak / 2**20, seconds], device="cuda", dtype=torch.float64)
    if together:
        dist.all_reduce(values, dist.ReduceOp.MAX)
    return Timing(*values.tolist())


def _wait(together: bool) -> None:
    torch.cuda.synchronize()
    if together:
        dist.barrier()
        torch.cuda.synchronize()


def _timed(
    step: Callable[[], Any], renew: Callable[[], None], *, busy_ms: float, together: bool
) -> tuple[float, float]:
    device, host = [], []
    for _ in range(REPEATS):
        renew()
        _wait(together)
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if busy_ms:
            torch.cuda._sleep(int(busy_ms * 1.9e6))  # cycles at no more than 1.98 GHz
        before.record()
        started = time.perf_counter()
        step()
        host.append((time.perf_counter() - started) * 1e3)
        after.record()
        torch.cuda.synchronize()
        device.append(before.elapsed_time(after))
    return statistics.median(device), statistics.median(host)


def profiled(step: Callable[[], Any], renew: Callable[[], None], meet: Callable[[], Any]) -> Any:
    """The profile (torch.profiler) of one step, of host and device.

    Args:
        step: what is profiled.
        renew: gives fresh gradients before it.
        meet: returns on all ranks at once, without the device: what one waits for another is no time of a wire.
    """
    renew()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        meet()
        step()
        torch.cuda.synchronize()
    return profile


def stages_of(profile: Any) -> tuple[int, dict[str, float], float]:
    """What the device did in one profiled step.

    Returns:
        Launches (kernels, copies and fills); the device time of the kernels by stage in ms; and of that of the wire the
        part in ms during which nothing else ran.
    """
    stages = Counter[str]()
    wire, work = list[Interval](), list[Interval]()
    for event in profile.events():
        annotation = event.is_user_annotation or event.name.startswith("Optimizer.")
        if event.device_type == torch.autograd.DeviceType.CUDA and not annotation:
            stage = _stage(event.name)
            stages[stage] += event.device_time / 1e3
            (wire if stage == "wire" else work).append((event.time_range.start, event.time_range.end))
    exposed = (covered([*wire, *work]) - covered(work)) / 1e3
    return len(wire) + len(work), {name: stages[name] for name in (*STAGES, "other")}, exposed


Interval = tuple[float, float]
"""Beginning and end."""


def covered(intervals: Sequence[Interval]) -> float:
    """How long at least one of them lasts: 3 for (0, 2), (1, 2) and (4, 5)."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _stage(kernel: str) -> str:
    name = kernel.lower()
    return next((stage for stage, parts in STAGES.items() if any(part in name for part in parts)), "other")
