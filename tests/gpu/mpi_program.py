"""What the ranks of an MPI job do on GPUs: `python -m tests.gpu.mpi_program FOLDER [WHAT]`, started by `mpirun`."""

import os
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dion_comm_mpi.buffers
import dion_comm_mpi.mpi
from dion_comm_mpi import MpiGroup, local_device, mpi_group, nccl_group
from dion_comm_mpi.buffers import Staged, knows_gpus
from dion_core import DeclaredShard, NorDion2, available_transports
from dion_core.layout import shard_segments
from dion_core.testing.conformance import check_all
from tests.gpu.device_mpi import DeviceCommunicator, Handed
from tests.multiprocess.test_collectives import DTYPES

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


def aware(device: torch.device) -> None:
    """What `MpiGroup` does where the library knows GPUs, here a made-up one; raises where it is not so."""
    dion_comm_mpi.buffers.knows_gpus = lambda: True
    communicator = DeviceCommunicator()
    check_collectives_of_one(MpiGroup(communicator, (0,)), device, communicator.handed)  # type: ignore[arg-type]


def by_library(device: torch.device) -> None:
    """The same with the library itself, which knows GPUs."""
    assert knows_gpus()
    check_collectives_of_one(mpi_group(), device, None)


class NotStaged(Staged):
    """Refuses to stand in pinned memory for a tensor."""

    def __init__(self, tensor: Tensor, *, filled: bool) -> None:
        super().__init__(tensor, filled=filled)
        assert self.buffer.device == tensor.device
        assert self.buffer.data_ptr() == tensor.data_ptr()


def check_collectives_of_one(group: MpiGroup, device: torch.device, handed: list[Handed] | None) -> None:
    """Every collective and the conformance suite at one rank: the values, where they lie, and no pinned memory."""
    dion_comm_mpi.mpi.Staged = NotStaged  # type: ignore[misc]
    for dtype, length in product(DTYPES, (0, 1, 5)):
        check_one(group, torch.arange(length, device=device).to(dtype), handed)
    for transport in available_transports():
        assert not [each for each in check_all(transport, str(device), group=group) if each.failures], transport
    assert handed is None or {each.device for each in handed} == {str(device)}


def check_one(group: MpiGroup, sent: Tensor, handed: list[Handed] | None) -> None:
    """Every collective with this message."""
    half = sent.dtype in (torch.bfloat16, torch.float16)
    for name in ("all_gather", "all_to_all", "reduce_scatter", "all_reduce", "broadcast"):
        if handed is not None:
            handed.clear()
        output = sent.clone() if name in ("all_reduce", "broadcast") else torch.full_like(sent, 3)
        handles = {
            "all_gather": lambda output: group.all_gather([output], sent),
            "all_to_all": lambda output: group.all_to_all(output, sent, [len(sent)], [len(sent)]),
            "reduce_scatter": lambda output: group.reduce_scatter(output, sent, "sum"),
            "all_reduce": lambda output: group.all_reduce(output, "sum"),
            "broadcast": lambda output: group.broadcast(output, 0),
        }
        handles[name](output).wait()
        assert torch.equal(output, sent), (name, sent.dtype)
        if (
            handed is not None and len(sent) and not (half and "reduce" in name)
        ):  # halves are added up elsewhere, as float32
            first = output if name in ("all_reduce", "broadcast") else sent
            assert [each.address for each in handed] == [first.data_ptr(), output.data_ptr()], (name, sent.dtype)
            assert {each.num_bytes for each in handed} == {sent.nbytes}


def main() -> None:
    """Runs what the command line names beside the folder, else compares."""
    device = local_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ways = {"aware": aware, "by_library": by_library, "knows_gpus": lambda device: print("knows", knows_gpus())}
    ways.get(sys.argv[2] if len(sys.argv) > 2 else "", compare)(device)


def compare(device: torch.device) -> None:
    """Leaves what was found in the folder, a file a rank."""
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
