"""Measures a machine profile: links over torch.distributed, Newton-Schulz by shape, and copies in memory.

Every figure is the slowest rank's, all starting together. Legend: W ranks.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dion_core.newton_schulz import NewtonSchulz
from dion_core.prediction.machine import H200, Machine, Point
from dion_core.prediction.timing import newton_schulz_flops

WARM_UP, REPEATS = 2, 5
ASPECT = 4
"""Columns by rows of the matrices measured: what a quarter of the rows of a square matrix has."""
SMALL_MESSAGE = 1024
"""Bytes a rank whose time is taken for the latency."""


@dataclass(frozen=True)
class Sizes:
    """What to measure.

    Attributes:
        link_bytes: that a rank sends to others in one all-to-all.
        sides: rows of the matrices of Newton-Schulz.
        copy_bytes: of a copy.
        batch: matrices at a time.
    """

    link_bytes: Sequence[int]
    sides: Sequence[int]
    copy_bytes: int
    batch: int

    @classmethod
    def for_device(cls, device: torch.device) -> Sizes:
        """Sizes that take seconds there."""
        if device.type == "cuda":
            return cls([2**20 * 4**step for step in range(6)], [128, 384, 1280, 2560, 5120], 2**31, 4)
        return cls([2**16 * 8**step for step in range(4)], [64, 128, 256], 2**27, 1)


@dataclass(frozen=True)
class Ranks:
    """Where this process is.

    Attributes:
        device: that it measures.
        in_node: the group of the ranks of its node; None where it is alone.
        between: the group of the ranks with its place on the other nodes; None where there is one node.
    """

    device: torch.device
    in_node: dist.ProcessGroup | None = None
    between: dist.ProcessGroup | None = None


@contextmanager
def joined() -> Iterator[Ranks]:
    """The ranks that torchrun has started, joined over NCCL or gloo; without it this process alone."""
    cuda = torch.cuda.is_available()
    if "RANK" not in os.environ:
        yield Ranks(torch.device("cuda" if cuda else "cpu"))
        return
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        size = dist.get_world_size()
        nodes = [list(range(first, min(first + local_size, size))) for first in range(0, size, local_size)]
        rows, _ = dist.new_subgroups_by_enumeration(nodes)
        columns, _ = dist.new_subgroups_by_enumeration([list(column) for column in zip(*nodes, strict=True)])
        yield Ranks(device, rows if local_size > 1 else None, columns if len(nodes) > 1 else None)
    finally:
        dist.destroy_process_group()


def is_first() -> bool:
    """Whether this process is the one that reports."""
    return not dist.is_initialized() or dist.get_rank() == 0


def measure(ranks: Ranks, sizes: Sizes, progress: Callable[[str], None]) -> Machine:
    """The profile of this machine. Collective where there are several ranks.

    A link that is not there is taken from `H200`, and the name says so.
    """
    device = ranks.device
    progress("copy")
    copy = _copy(device, sizes.copy_bytes)
    products = []
    for side in sorted(sizes.sides):
        progress(f"Newton-Schulz of {side} x {ASPECT * side}")
        products.append((float(side), _newton_schulz(device, side, sizes.batch)))
    links: dict[str, tuple[Point, ...]] = {}
    latency, assumed = H200.latency, []
    for name, group in (("between", ranks.between), ("in_node", ranks.in_node)):
        if group is None:
            links[name] = getattr(H200, name)
            assumed.append("in node" if name == "in_node" else "between nodes")
            continue
        latency = _all_to_all(device, SMALL_MESSAGE, group)
        points = []
        for num_bytes in sorted(sizes.link_bytes):
            progress(f"{name} {num_bytes:,} bytes")
            points.append((float(num_bytes), num_bytes / _all_to_all(device, num_bytes, group)))
        links[name] = tuple(points)
    name = _describe(device) + (f"; links {' and '.join(assumed)} assumed as of an H200" if assumed else "")
    return Machine(name, copy, tuple(products), links["in_node"], links["between"], latency=latency)


def _describe(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"CPU with {torch.get_num_threads()} threads, torch {torch.__version__}"


def _copy(device: torch.device, num_bytes: int) -> float:
    """Bytes/s read and written."""
    source = torch.zeros(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _seconds(lambda: target.copy_(source), device)


def _newton_schulz(device: torch.device, side: int, batch: int) -> float:
    """FLOP/s of whole iterations, in the dtypes of a training step."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    matrices = torch.randn(batch, side, ASPECT * side, device=device, dtype=dtype)
    orthogonalize = NewtonSchulz()
    return batch * newton_schulz_flops(side, ASPECT * side) / _seconds(lambda: orthogonalize(matrices), device)


def _all_to_all(device: torch.device, num_bytes: int, group: dist.ProcessGroup) -> float:
    """Seconds of one all-to-all in which a rank sends so many bytes to others."""
    size = dist.get_world_size(group)
    each = max(1, num_bytes // (size - 1))
    sent, received = (torch.zeros(size * each, dtype=torch.uint8, device=device) for _ in range(2))
    return _seconds(lambda: dist.all_to_all_single(received, sent, group=group), device)


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Of one call: the median of the slowest rank."""
    times = []
    for number in range(WARM_UP + REPEATS):
        if dist.is_initialized():
            dist.barrier()
        _synchronize(device)
        started = time.perf_counter()
        work()
        _synchronize(device)
        if number >= WARM_UP:
            times.append(time.perf_counter() - started)
    slowest = torch.tensor(statistics.median(times), dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
