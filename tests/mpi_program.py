"""What the ranks of an MPI job do in tests: `python -m tests.mpi_program WHAT FOLDER`, started by `mpirun`.

Results are left in FOLDER, a file a rank.
"""

import copy
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import dion_comm_mpi.nccl
from dion_comm_mpi import MpiGroup, NcclGroup, mpi_group, nccl_group
from dion_core import DeclaredShard, NorDion2, available_transports
from dion_core.collectives import Done
from dion_core.testing.conformance import check_all
from tests import fake_nccl
from tests.mesh_cases import compare_here, train
from tests.mpi_cases import LAYOUTS, MESHES, WITHOUT_TORCH, cells, collective_cases, on_mesh
from tests.mpi_ranks import leave_out_dynamo
from tests.multiprocess.test_collectives import world
from tests.multiprocess.test_world_size import exact_cells
from tests.training import build, run_cell, set_gradients, snapshot

T = TypeVar("T")

GIVEN = (MPI.COMM_WORLD, "mpi", MPI.COMM_WORLD)
"""What `group` is, by turns."""


class Seat(NamedTuple):
    """A rank in place of a mesh, where there is no torch.distributed."""

    rank: int
    world_size: int
    device_type: str = "cpu"

    def get_rank(self) -> int:
        return self.rank

    def size(self) -> int:
        return self.world_size


def suite() -> dict[str, Any]:
    """What came out on this number of ranks, first without torch.distributed, then with it."""
    group = mpi_group()
    layouts = LAYOUTS[group.size]
    found: dict[str, Any] = {"collectives": by_collective(group), "parts": by_part(group), "sum": half_sum(group)}
    found["conformance"] = {name: check_all(name, group=group) for name in available_transports()}
    found["refused"] = refused(group)
    found["resumed"] = resumed(group)
    found["layerwise"] = layerwise(group)
    found["refused"].append(message(NorDion2([nn.Parameter(torch.ones(4, 4))], group=group).capture))
    found["halves"] = halves()
    found["null"] = message(lambda: mpi_group(MPI.COMM_NULL))  # type: ignore[arg-type]
    found["counts"] = long_counts() if group.size == 1 else []
    seat = Seat(group.rank, group.size)
    found["cells"] = {}
    for layout, given in zip([each for each in layouts if each in WITHOUT_TORCH], GIVEN, strict=False):
        found["cells"][layout] = [run_cell(cell, seat, given) for cell in cells(layout)]
    assert not dist.is_initialized()
    with torch_distributed() as mesh:
        found["gloo"] = by_collective(world())
        for layout in [each for each in layouts if each not in WITHOUT_TORCH]:
            found["cells"][layout] = [without_torch(run_cell, cell, mesh, "mpi") for cell in cells(layout)]
        found["meshes"] = on_meshes() if group.size == 4 else {}
    if group.size == 2:
        found["nccl"] = nccl()
    return found


def on_meshes() -> dict[str, list[Any]]:
    """By mesh what the optimizers on it did, compared with one process; each reference is made by one rank."""
    rank, size = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
    made = [(name, case) for name in MESHES for case in on_mesh(name)]
    parts = MPI.COMM_WORLD.allgather([train(case.alone) for _, case in made[rank::size]])
    found: dict[str, list[Any]] = {name: [] for name in MESHES}
    for number, (name, case) in enumerate(made):
        assert case.mesh is not None
        case.mesh.make()
        found[name] += without_torch(compare_here, [case], [parts[number % size][number // size]], "mpi")
    return found


def halves() -> list[bool]:
    """Whether optimizers on every second rank, numbered backwards, and on all do what each does alone, by turns."""
    whole = MPI.COMM_WORLD
    half = whole.Split(whole.Get_rank() % 2, -whole.Get_rank())
    seeds = [whole.Get_rank() % 2, 2]  # each half has matrices of its own

    def drawn(step: int, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(10 * step + seed)
        return [torch.randn(shape, generator=generator) for shape in ((9, 6), (5, 8), (12, 6))]

    def trained(groups: Sequence[Any]) -> list[Tensor]:
        both = [[nn.Parameter(each) for each in drawn(0, seed)] for seed in seeds]
        made = [NorDion2(of_one, group=group, fraction=0.5) for of_one, group in zip(both, groups, strict=True)]
        for step in (1, 2):
            for seed, of_one, optimizer in zip(seeds, both, made, strict=True):
                for parameter, gradient in zip(of_one, drawn(step, seed), strict=True):
                    parameter.grad = gradient
                optimizer.step()
        return [parameter.detach() for of_one in both for parameter in of_one]

    again = mpi_group(half)
    ranks = tuple(reversed(again.ranks))
    kept = (
        again == mpi_group(half) and again.subgroup(ranks).communicator is mpi_group(half).subgroup(ranks).communicator
    )
    return [kept, *map(torch.equal, trained([half, whole]), trained([None, None]))]


class LongMessages:
    """In place of a communicator: remembers what it is given, and does nothing."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        def start(*arguments: Any, **options: Any) -> MPI.Request:
            self.given.append((name, arguments))
            return MPI.REQUEST_NULL

        return start


def long_counts() -> list[Any]:
    """What MPI is told of messages that are longer than 2^31 bytes, which no memory is used for."""
    length, recorder = 2**31 + 5, LongMessages()
    long, short = torch.empty(length, dtype=torch.uint8), torch.empty(3, dtype=torch.uint8)
    group = MpiGroup(SimpleNamespace(of=lambda ranks, timeout: recorder, number=0), (0, 1))  # type: ignore[arg-type]
    group.all_to_all(short, long, [3, 0], [2, length - 2]).wait()
    group.all_gather([long[: length - 3], short], short)  # not waited for, which would copy what never came
    (_, (sent, received)), (_, (_, gathered)) = recorder.given
    return [sent[1:3], received[1:3], sent[0].data_ptr() == long.data_ptr(), len(sent[0]), gathered[1:3]]


@contextmanager
def torch_distributed() -> Iterator[DeviceMesh]:
    """A default process group of the ranks of the job, in the other order, as a mesh."""
    size = MPI.COMM_WORLD.Get_size()
    file = MPI.COMM_WORLD.bcast(str(Path(sys.argv[2]) / "store") if MPI.COMM_WORLD.Get_rank() == 0 else None)
    rank = size - 1 - MPI.COMM_WORLD.Get_rank()
    dist.init_process_group("gloo", store=dist.FileStore(file, size), rank=rank, world_size=size)
    yield dist.init_device_mesh("cpu", (size,))
    MPI.COMM_WORLD.Barrier()  # gloo of one rank may still need that of another
    dist.destroy_process_group()


def without_torch(function: Callable[..., T], *arguments: Any) -> T:
    """What the function gives, while nothing goes through torch.distributed."""
    names = ("all_to_all_single", "all_gather", "all_reduce", "reduce_scatter", "broadcast", "new_group")
    known = {name: getattr(dist, name) for name in names}
    try:
        for name in names:
            setattr(dist, name, refuse)
        return function(*arguments)
    finally:
        for name, other in known.items():
            setattr(dist, name, other)


def refuse(*arguments: object, **options: object) -> None:
    raise AssertionError("a collective of torch.distributed")


def by_collective(group: MpiGroup | NcclGroup) -> list[Any]:
    """Every collective in every dtype with equal, uneven and empty messages."""
    return [function(group, *case) for function, case in collective_cases(group.size)]


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


def half_sum(group: MpiGroup | NcclGroup) -> float:
    """256 + 1 + ... + 1 in bf16, which is 256 if every sum is rounded."""
    tensor = torch.tensor([256.0 if group.rank == 0 else 1.0], dtype=torch.bfloat16)
    group.all_reduce(tensor, "sum").wait()
    return float(tensor)


def refused(group: MpiGroup) -> list[str]:
    """What optimizers of declared shards raise that do not fit: a hole, an overlap, other tensors, a failing rank."""
    rank, last = group.rank, group.size - 1

    def made(rows: int, offset: int, size: int, columns: int = 4, name: str = "weight") -> NorDion2:
        shard = DeclaredShard(0, size, offset)
        return NorDion2([{"params": [(name, nn.Parameter(torch.ones(rows, columns)))], "shard": shard}], group="mpi")

    rows = 4 * group.size
    return [
        message(lambda: made(4 - (rank == last), 4 * rank, rows)),
        message(lambda: made(4, 4 * rank - (rank == last), rows)),
        message(lambda: made(4, 4 * rank, rows, columns=4 + (rank == last))),
        message(lambda: made(4, 4 * rank, rows - (rank == last))),
        message(lambda: made(4 + (rank == last), 4 * rank, rows)),
        message(lambda: made(4, 4 * rank, rows) if rank != last else NorDion2([torch.ones(2, 2)], group="mpi")),
    ]


def layerwise(group: MpiGroup) -> list[dict[str, Tensor]]:
    """The weights after steps with state as the parameters lie, and layer by layer."""
    seat, weights = Seat(group.rank, group.size), []
    for options in ({}, {"state": "layerwise"}):
        cell = next(cell for cell in exact_cells("ddp") if cell.optimizer == "NorDion2")
        taken = run_cell(replace(cell, options={**cell.options, **options}), seat, group).snapshots[-1]
        weights.append({name: value for name, value in taken.items() if name.endswith("weight")})
    return weights


def resumed(group: MpiGroup) -> dict[str, Any]:
    """Two steps, once unbroken and once with a load between, from the own state and from the whole one."""
    cell = next(
        cell for cell in cells("declared0") if cell.optimizer == "NorDion2" and cell.options["transport"] == "full"
    )
    cell = replace(cell, steps=(1, 2))
    seat = Seat(group.rank, group.size)
    unbroken = run_cell(cell, seat, group).snapshots[-1]
    found: dict[str, Any] = {"unbroken": unbroken}
    for way in ("own", "whole"):
        optimizer, parameters = build(replace(cell, steps=(1,)), seat, group)
        set_gradients(parameters, cell.problem.gradients[0], cell, seat)
        optimizer.step()
        saved = optimizer.state_dict() if way == "own" else optimizer.full_state_dict()
        again, others = build(cell, seat, group)
        for name, parameter in others.items():
            parameter.data.copy_(parameters[name])
        again.load_state_dict(copy.deepcopy(saved))
        set_gradients(others, cell.problem.gradients[1], cell, seat)
        again.step()
        found[way] = snapshot(again, others)
        found["shapes"] = [tuple(saved["state"][0]["momentum"].shape), saved["param_groups"][0].get("shard")]
    return found


def nccl() -> dict[str, Any]:
    """The collectives of the group of NCCL, whose library is made up, and steps over it."""
    size = MPI.COMM_WORLD.Get_size()
    library = SimpleNamespace(nccl=fake_nccl.module(size))
    sys.modules |= {"cupy": SimpleNamespace(cuda=library), "cupy.cuda": library}
    refused = message(lambda: nccl_group().all_reduce(torch.ones(1), "sum"))
    dion_comm_mpi.nccl._current_stream = lambda tensor: nullcontext(0)
    dion_comm_mpi.nccl.watch_work = lambda what, seconds, abort: Done()
    group = nccl_group(MPI.COMM_WORLD)
    found: dict[str, Any] = {"refused": refused, "collectives": by_collective(group), "sum": half_sum(group)}
    seat = Seat(group.rank, size)
    found["cells"] = {"declared0": [run_cell(cell, seat, group) for cell in cells("declared0")[:3]]}
    return found


def large() -> list[int]:
    """What arrives of a message longer than 2^31 bytes: its length, and ones among zeros at its ends."""
    group, length = mpi_group(), 2**31 + 5
    splits = [[1, length], [1, 1]]
    sent = torch.zeros(sum(splits[group.rank]), dtype=torch.uint8)
    sent[1] = sent[-1] = 1
    received = [of_sender[group.rank] for of_sender in splits]
    output = torch.full((sum(received),), 7, dtype=torch.uint8)
    group.all_to_all(output, sent, received, splits[group.rank]).wait()
    arrived = output[: received[0]]
    return [len(arrived), int(arrived[0]), int(arrived[-1]), int(arrived.count_nonzero())]


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
    leave_out_dynamo()
    result = globals()[sys.argv[1]]()
    torch.save(result, Path(sys.argv[2]) / f"{MPI.COMM_WORLD.Get_rank()}.pt")


if __name__ == "__main__":
    main()
