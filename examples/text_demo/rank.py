"""One rank: its place among the others, its device, and its word to the parent."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

COLLECTIVE_TIMEOUT = timedelta(minutes=2)  # a rank that waits longer for the others fails


@dataclass(frozen=True)
class Rank:
    """What a rank's work gets to know of its place, and the way to tell the parent something."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh
    sender: Connection

    def tell(self, message: object) -> None:
        """Hands a picklable object to the parent, where `run_ranks` yields it; only rank 0 is listened to."""
        if self.rank == 0:
            self.sender.send(message)

    def sum(self, value: torch.Tensor | float) -> float:
        """The sum of a number over all ranks, the same on each; a collective."""
        total = torch.as_tensor(value, dtype=torch.float64, device=self.device).detach().clone()
        distributed.all_reduce(total)
        return float(total)

    def mean(self, value: torch.Tensor | float) -> float:
        """The mean of a number over all ranks, the same on each; a collective."""
        return self.sum(value) / self.world_size


def default_world_size() -> int:
    """As many ranks as there are GPUs, or four that share the CPU."""
    return torch.cuda.device_count() or 4


def join_group(rank: int, world_size: int, rendezvous: str) -> torch.device:
    """Makes this process one of `world_size` that talk by NCCL, one a GPU, or by gloo; returns its device."""
    torch.set_num_threads(1)  # the ranks share the cores; more threads would only wait for each other
    if torch.cuda.is_available():
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        backend, device_id = "nccl", device
    else:
        device = torch.device("cpu")
        backend, device_id = "gloo", None
        if sys.platform == "linux":  # all ranks are on this machine: do not depend on how its name resolves
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        backend,
        init_method=rendezvous,
        rank=rank,
        world_size=world_size,
        device_id=device_id,
        timeout=COLLECTIVE_TIMEOUT,
    )
    return device
