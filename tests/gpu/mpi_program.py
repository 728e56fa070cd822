"""What the ranks of an MPI job do on GPUs: `python -m tests.gpu.mpi_program FOLDER`, started by `mpirun`."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dion_comm_mpi import local_device, mpi_group, nccl_group
from dion_core import DeclaredShard, NorDion2, available_transports
from dion_core.layout import shard_segments
from dion_core.testing.conformance import check_all

SHAPES = ((64, 48), (17, 32), (40, 304))
STEPS = 4


def whole(seed: int, shape: tuple[int, int]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def trained(transport: str, group: Any, device: torch.device, way: str) -> list[Tensor]:
    """Weights after some steps: this rank's parts, on the CPU, of DTensors or of declared shards."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cuda", (size,))
    parts = [shard_segments(shape[0], size)[rank] for shape in SHAPES]

    def part(seed: int, number: int) -> Tensor:
        offset, length = parts[number]
        local = whole(seed, SHAPES[number])[offset : offset + length].to(device)
        shape = SHAPES[number]
        if way == "declared":
            return local
        return DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size(shape), stride=(shape[1], 1))

    weights = [nn.Parameter(part(number, number)) for number in range(len(SHAPES))]
    groups: list[dict[str, Any]] = [{"params": [(f"w{n}", weight)]} for n, weight in enumerate(weights)]
    if way == "declared":
        for entry, shape, (offset, _) in zip(groups, SHAPES, parts, strict=True):
            entry["shard"] = DeclaredShard(0, shape[0], offset)
    optimizer = NorDion2(groups, fraction=0.5, transport=transport, group=group)
    for step in range(STEPS):
        for number, weight in enumerate(weights):
            weight.grad = part(100 * step + 10 + number, number)
        optimizer.step()
    return [(weight.to_local() if isinstance(weight, DTensor) else weight).detach().cpu() for weight in weights]


def main() -> None:
    """Leaves what was found in the folder, a file a rank."""
    device = local_device()
    torch.cuda.set_device(device)
    folder, communicator = Path(sys.argv[1]), MPI.COMM_WORLD
    rank, size = communicator.Get_rank(), communicator.Get_size()
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    found: dict[str, Any] = {}
    for name, group in (("nccl", nccl_group()), ("mpi", mpi_group())):
        failures = [
            f"{transport}: {outcome.case}: {failure}"
            for transport in available_transports()
            for outcome in check_all(transport, str(device), group=group)
            for failure in outcome.failures
        ]
        cells = {
            f"{transport}, {way}": trained(transport, group, device, way)
            for transport in available_transports()
            for way in ("mesh", "declared")
        }
        found[name] = {"failures": failures, "weights": cells}
    found["torch"] = {transport: trained(transport, None, device, "mesh") for transport in available_transports()}
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    main()
