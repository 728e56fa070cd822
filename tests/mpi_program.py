"""What the ranks of an MPI job do in tests: `python -m tests.mpi_program WHAT FOLDER`, started by `mpirun`.

Results are left in FOLDER, a file a rank.
"""

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dion_comm_mpi import MpiGroup, mpi_group
from dion_core import DeclaredShard, NorDion2, available_transports
from dion_core.testing.conformance import check_all
from tests.multiprocess import test_collectives as collectives
from tests.multiprocess.test_world_size import FP32, exact_cells
from tests.training import Cell, Outcome, run_cell

LAYOUTS = {
    1: ("declared0", "shard0"),
    2: ("ddp", "declared1", "shard0", "shard1"),
    3: ("declared0", "replicate"),
    4: ("declared0", "hsdp"),
}
"""By number of ranks what is trained: each layout with two or three of them, so that all together take seconds."""


class Seat(NamedTuple):
    """A rank in place of a mesh, where there is no torch.distributed."""

    rank: int
    world_size: int
    device_type: str = "cpu"

    def get_rank(self) -> int:
        return self.rank

    def size(self) -> int:
        return self.world_size


def cells(layout: str) -> list[Cell]:
    """What is trained in a layout: every optimizer with every transport in fp32, and one in half precision."""
    return [cell for cell in exact_cells(layout) if cell.problem is FP32 or cell.optimizer == "NorDion2"]


def suite() -> dict[str, Any]:
    """All that has to hold on any number of ranks, first without torch.distributed, then with it."""
    group, world_size = mpi_group(), MPI.COMM_WORLD.Get_size()
    found: dict[str, Any] = {"collectives": by_collective(group), "parts": by_part(group)}
    found["conformance"] = {name: check_all(name, group=group) for name in available_transports()}
    seat = Seat(group.rank, world_size)
    found["cells"] = {}
    plain = [layout for layout in LAYOUTS[world_size] if layout in ("ddp", "declared0", "declared1")]
    for layout, given in zip(plain, (MPI.COMM_WORLD, "mpi", group), strict=False):
        found["cells"][layout] = [run_cell(cell, seat, given) for cell in cells(layout)]
    with torch_distributed() as mesh:
        for layout in LAYOUTS[world_size]:
            if layout not in plain:
                found["cells"][layout] = [through_mpi(cell, mesh) for cell in cells(layout)]
    return found


@contextmanager
def torch_distributed() -> Iterator[DeviceMesh]:
    """A default process group of the ranks of the job, in the other order, as a mesh."""
    size = MPI.COMM_WORLD.Get_size()
    file = MPI.COMM_WORLD.bcast(str(Path(sys.argv[2]) / "store") if MPI.COMM_WORLD.Get_rank() == 0 else None)
    rank = size - 1 - MPI.COMM_WORLD.Get_rank()
    dist.init_process_group("gloo", store=dist.FileStore(file, size), rank=rank, world_size=size)
    yield dist.init_device_mesh("cpu", (size,))
    dist.destroy_process_group()


def through_mpi(cell: Cell, mesh: DeviceMesh) -> Outcome:
    """Trains DTensors, of which nothing goes through torch.distributed once they are made."""
    names = ("all_to_all_single", "all_gather", "all_reduce", "reduce_scatter", "broadcast", "new_group")
    known = {name: getattr(dist, name) for name in names}
    outcome = None
    try:
        for name in names:
            setattr(dist, name, refuse)
        outcome = run_cell(cell, mesh, "mpi")
    finally:
        for name, function in known.items():
            setattr(dist, name, function)
    return outcome


def refuse(*arguments: object, **options: object) -> None:
    raise AssertionError("a collective of torch.distributed")


def by_collective(group: MpiGroup) -> list[Any]:
    """Every collective in every dtype with equal, uneven and empty messages."""
    return [function(group, *case) for function, case in collective_cases(group.size)]


def collective_cases(world_size: int) -> list[tuple[Callable[..., Any], Sequence[Any]]]:
    """The functions and arguments of `by_collective`."""
    lengths = [each[:world_size] for each in collectives.LENGTHS.values()]
    splits = [collectives.splits_of(world_size, rule) for rule in collectives.SPLITS.values()]
    small, dtypes = (1, 5), collectives.DTYPES
    return [
        *((collectives.gather, case) for case in product(lengths, dtypes)),
        *((collectives.reduce, case) for case in product(small, dtypes, collectives.REDUCTIONS)),
        *((collectives.scatter, case) for case in product(small, dtypes, collectives.REDUCTIONS)),
        *((collectives.spread, case) for case in product(small, dtypes, range(world_size))),
        *((collectives.exchange, case) for case in product(splits, dtypes)),
    ]


def by_part(group: MpiGroup) -> list[list[float]]:
    """What the ranks of a part of the group, and all in another order, gather: their numbers."""
    found = []
    for ranks in (tuple(reversed(group.ranks)), tuple(range(group.rank % 2, group.size, 2))):
        part = group.subgroup(ranks)
        assert part == group.subgroup(list(ranks)) == part.named("a part")
        assert hash(part) == hash(group.subgroup(ranks))
        outputs = [torch.empty(1) for _ in ranks]
        part.all_gather(outputs, torch.tensor([float(group.rank)])).wait()
        found.append([float(output) for output in outputs])
    return found


def half_sums() -> float:
    """A sum in bf16 that is exact only if it is made in fp32: 256 + 1 + ... + 1 on so many ranks."""
    group = mpi_group()
    tensor = torch.tensor([256.0 if group.rank == 0 else 1.0], dtype=torch.bfloat16)
    group.all_reduce(tensor, "sum").wait()
    return float(tensor)


def trained() -> NorDion2:
    """A small optimizer."""
    parameter = nn.Parameter(torch.ones(4, 4))
    parameter.grad = torch.ones(4, 4)
    return NorDion2([parameter], group=mpi_group(timeout=2.0))


def one_raises() -> None:
    """A rank meets an error that the others cannot know of, and these wait for it."""
    optimizer = trained()
    if MPI.COMM_WORLD.Get_rank() == 1:
        raise RuntimeError("the data of rank 1 are broken")
    optimizer.param_groups[0]["params"][0].grad = torch.ones(4, 4)
    group = mpi_group(timeout=600.0)
    group.all_reduce(torch.ones(1), "sum").wait()
    optimizer.step()


def one_is_late() -> None:
    """A rank does not come to the step."""
    optimizer = trained()
    if MPI.COMM_WORLD.Get_rank() == 1:
        time.sleep(600)
    optimizer.step()


def one_fails_to_build() -> str:
    """A rank cannot build the optimizer; all raise."""
    rank = MPI.COMM_WORLD.Get_rank()
    shard = DeclaredShard(0, 8, 4 * rank)
    rows = 4 if rank == 0 else 5
    return message(lambda: NorDion2([{"params": [nn.Parameter(torch.ones(rows, 4))], "shard": shard}], group="mpi"))


def message(make: Callable[[], object]) -> str:
    """What the call raises."""
    try:
        make()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main() -> None:
    """Runs what the command line says, and leaves its results."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    result = globals()[sys.argv[1]]()
    torch.save(result, Path(sys.argv[2]) / f"{MPI.COMM_WORLD.Get_rank()}.pt")


if __name__ == "__main__":
    main()
