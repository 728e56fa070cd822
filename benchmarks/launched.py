"""What a launcher starts on every rank: measures the cells of a job and reports through the store that gave it.

    torchrun --nproc-per-node 2 -m benchmarks.launched HOST:PORT

It is not started by hand; `benchmarks.worlds` does. Ranks, and their numbers on each machine, are those that torchrun,
srun, Open MPI, or an MPI with Hydra tell their processes. Rank 0 reports each cell as soon as it is measured. What
raises on one rank leaves the others out of step: the rank says so and ends, its launcher ends the others, and what is
left is measured in a new start.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from benchmarks.exchanging import time_exchange
from benchmarks.stepping import LARGE, Cell, Figures, count_traffic, time_step
from benchmarks.worlds import Measurement

_NAMES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
"""(rank, world size) in the environment; mpirun inside of Slurm comes before Slurm."""
_LOCAL_NAMES = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
"""The rank on this machine. srun says it by its own variable, also where it serves an MPI by PMI."""
MEASUREMENTS: dict[str, Measurement] = {each.__name__: each for each in (count_traffic, time_step, time_exchange)}
COLLECTIVE_SECONDS = 300


def place() -> tuple[int, int, int]:
    """(rank, world size, rank on this machine), as the launcher says.

    Raises:
        RuntimeError: no launcher that is known started this process.
    """
    local_rank = next((os.environ[name] for name in _LOCAL_NAMES if name in os.environ), None)
    for rank, world_size in _NAMES:
        if local_rank is not None and rank in os.environ and world_size in os.environ:
            return int(os.environ[rank]), int(os.environ[world_size]), int(local_rank)
    raise RuntimeError("started by none of torchrun, mpirun and srun: the environment names no rank")


def _measured(measure: Measurement, cell: Cell, device: str, store: dist.Store) -> Figures:
    """The figures; what is raised is told first, by the rank that it came from, and not by those that then miss it."""
    try:
        return measure(cell, device)
    except Exception as error:
        store.compare_set("error", "", json.dumps([cell.key, f"{type(error).__name__}: {error}"]))
        raise


def main() -> None:
    host, port = sys.argv[1].rsplit(":", 1)
    rank, world_size, local_rank = place()
    timeout = timedelta(seconds=COLLECTIVE_SECONDS)
    store = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
    device, backend = "cpu", "gloo"
    if torch.cuda.is_available():
        device, backend = "cuda", "nccl"
        # srun may show each process one GPU alone
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    torch.set_num_threads(1)
    group = dist.PrefixStore("group", store)
    dist.init_process_group(backend, store=group, rank=rank, world_size=world_size, timeout=timeout)
    job = json.loads(store.get("job"))
    measure = MEASUREMENTS[job["measurement"]]
    report: dict[str, Figures] = {}
    for cell in (Cell(**each) for each in job["cells"]):
        large = cell.inventory in LARGE
        if cell.world_size == world_size and large == (device == "cuda"):
            if rank == 0:
                store.set("measuring", cell.key)
            report[cell.key] = _measured(measure, cell, device, store)
            dist.barrier()  # no rank is in the next cell, whose error would be told, before this one is done everywhere
        if rank == 0:
            store.set("report", json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
