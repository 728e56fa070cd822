"""What NCCL's wire carries on these GPUs: one all-to-all against a list of messages, by size, alone and beside work.

    torchrun --nproc-per-node 2 -m benchmarks.wire [--output FILE]

"single" and "list" are what one rank sends to others in GB/s (1e9 bytes), by `all_to_all_single` and by `all_to_all`.
"registered" is the single exchange between buffers that were registered with NCCL before.
"exposed" is what part of the single exchange's time is left when it runs on NCCL's own stream beside products of about
the same length. Every figure is the slowest rank's.
Results are kept as JSON under benchmarks/results/ with the machine named.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.step_timing import median_ms

SIZES = (1, 4, 16, 64, 256, 1024)
"""MiB a peer."""
RESULTS = Path(__file__).parent / "results"


def slowest_ms(work: Callable[[], Any]) -> float:
    """Device time of one call in ms, of the slowest rank, all starting together."""
    dist.barrier()
    torch.cuda.synchronize()
    time = torch.tensor(median_ms(work), device="cuda", dtype=torch.float64)
    dist.all_reduce(time, dist.ReduceOp.MAX)
    return float(time)


def registered(shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Two buffers of bytes in memory that NCCL allocated and knows."""
    pool = torch.cuda.MemPool(_backend().mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        both = tuple(torch.empty(shape, dtype=torch.uint8, device="cuda") for _ in range(2))
    _backend().register_mem_pool(pool)
    _POOLS.append(pool)
    return both[0], both[1]


_POOLS: list[Any] = []
"""They are kept until the process ends."""


def _backend() -> Any:
    assert dist.group.WORLD is not None
    return dist.group.WORLD._get_backend(torch.device("cuda"))


def measure(mib: int) -> dict[str, float]:
    """The figures for messages of that size."""
    size = dist.get_world_size()
    sent, received = (torch.empty(size, mib * 2**20, dtype=torch.uint8, device="cuda") for _ in range(2))
    num_bytes = (size - 1) * mib * 2**20
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    products = max(1, num_bytes // (256 * 2**20))

    def single() -> None:
        dist.all_to_all_single(received, sent)

    def listed() -> None:
        dist.all_to_all(list(received.unbind()), list(sent.unbind()))

    def multiply() -> Tensor:
        return [left @ right for _ in range(products)][-1]

    def beside() -> None:
        handle = dist.all_to_all_single(received, sent, async_op=True)
        multiply()
        handle.wait()

    between = registered(sent.shape)

    def from_registered() -> None:
        dist.all_to_all_single(*between)

    alone, work, both = slowest_ms(single), slowest_ms(multiply), slowest_ms(beside)
    return {
        "MiB": mib,
        "single": num_bytes / alone / 1e6,
        "list": num_bytes / slowest_ms(listed) / 1e6,
        "registered": num_bytes / slowest_ms(from_registered) / 1e6,
        "exposed": max(0.0, both - work) / alone,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    rows = [measure(mib) for mib in SIZES]
    if dist.get_rank() == 0:
        for row in rows:
            print("  ".join(f"{name} {value:.4g}" for name, value in row.items()))
        machine, world = torch.cuda.get_device_name(), dist.get_world_size()
        output = arguments.output or RESULTS / f"wire-{machine.replace(' ', '-')}-world{world}.json"
        date = datetime.now(UTC).isoformat(timespec="seconds")
        content = {"machine": machine, "torch": torch.__version__, "world": world, "date": date, "rows": rows}
        output.write_text(json.dumps(content, indent=1) + "\n")
        print(f"written to {output}")
    for pool in _POOLS:
        _backend().deregister_mem_pool(pool)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
