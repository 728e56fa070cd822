"""The time of one optimizer step on a GPU, as one rank of W with loopback collectives, or on W GPUs.

    python -m benchmarks.gpu_step [--case 5120x8:4:local ...] [--fraction 0.25] [--peer] [--captured]
                                  [--wire 25] [--kernels] [--trace FOLDER]
    torchrun --nproc-per-node 2 -m benchmarks.gpu_step --world 2 [...]
    mpirun -n 2 python -m benchmarks.gpu_step --world 2 --group nccl [...]

A case is INVENTORY:W:TRANSPORT. bf16 parameters, gradients and state, FSDP2 row shards, NorDion2, gradients renewed
before every step. With --peer the public `dion` package runs in the same process on the same inventory, if it can be
imported. --wire models a wire of so many GB/s; --trace writes a step of every case in the Chrome format. With --world
the collectives are NCCL's, and every figure is that of the slowest rank; --group takes them from a group of
dion-comm-mpi instead. Results are kept as JSON under
benchmarks/results/ with the machine named. All cases are timed before any is profiled, since a profiler that has once
run slows every later launch of its process.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.inventories import renew_gradients, sharded_parameters
from benchmarks.step_timing import ceilings, profiled, stages_of, time_steps
from dion_core import NorDion2
from dion_core.inventories import INVENTORIES
from dion_core.prediction.timing import newton_schulz_flops as flops_of_matrix
from dion_core.testing.loopback import Wire, loopback

CASES = (
    *(f"5120x8:4:{transport}" for transport in ("local", "capped", "full", "varlen")),
    "14b:8:local",
    "14b:8:capped",
    "1b:8:local",
    "1b:8:capped",
)
WORLD_CASES = ("5120x8:local", "5120x8:capped", "5120x8:varlen", "5120x8:full", "1b:local", "1b:capped", "14b:capped")
RESULTS = Path(__file__).parent / "results"
COLUMNS = ("isolated", "hidden", "host", "peak_mib", "seconds_to_third_step", "host_reads")


@dataclass(frozen=True)
class Case:
    """What is measured: one rank of `world_size`, the matrices of an inventory, one transport."""

    inventory: str
    world_size: int
    transport: str

    @classmethod
    def parse(cls, text: str) -> Case:
        inventory, world_size, transport = text.split(":")
        if inventory not in INVENTORIES:
            raise SystemExit(f"inventory {inventory!r} is not known: {', '.join(INVENTORIES)}")
        return cls(inventory, int(world_size), transport)

    def __str__(self) -> str:
        return f"{self.inventory}:{self.world_size}:{self.transport}"


@dataclass(frozen=True)
class Settings:
    """How the cases are run; see the module."""

    fraction: float
    captured: bool
    wire: float | None
    kernels: bool
    trace: Path | None
    world: int | None
    group: str | None


@dataclass(frozen=True)
class Running:
    """An optimizer that is built by `build`, which returns its step, and what renews its gradients."""

    build: Callable[[], Callable[[], Any]]
    renew: Callable[[], None]
    made: list[Any]


@contextmanager
def running(case: Case, settings: Settings, *, peer: bool) -> Iterator[Running]:
    """The case with its parameters, of this project or of the public package."""
    gc.collect()
    torch.cuda.empty_cache()
    with _mesh(case, settings) as mesh:
        parameters = sharded_parameters(INVENTORIES[case.inventory], mesh, torch.bfloat16)
        made: list[Any] = []

        def build() -> Callable[[], Any]:
            if peer:
                from benchmarks.peer import build_peer

                scope, loopback = _peer_scope(case.transport), settings.world is None
                made.append(build_peer(parameters, mesh, settings.fraction, scope=scope, loopback=loopback))
            else:
                options = {"fraction": settings.fraction, "transport": case.transport, "group": settings.group}
                made.append(NorDion2(parameters, lr=0.01, **options))
                if settings.captured:
                    made[0].capture()
            step: Callable[[], Any] = made[0].step
            return step

        yield Running(build, lambda: renew_gradients(parameters), made)
        if settings.captured and not peer:
            made[0].release()


@contextmanager
def _mesh(case: Case, settings: Settings) -> Iterator[DeviceMesh]:
    if settings.world is not None:
        yield init_device_mesh("cuda", (settings.world,))
        return
    wire = None if settings.wire is None else Wire(settings.wire * 1e9)
    with loopback(case.world_size, "cuda", wire=wire) as (mesh, _):
        yield mesh


def measure(case: Case, settings: Settings, *, peer: bool) -> dict[str, Any]:
    """One row of the table, without what a profiler says; of the public package, if it fails, the error."""
    row = {
        "case": str(case) + " (public dion)" * peer,
        "fraction": settings.fraction,
        "captured": settings.captured and not peer,
        "wire_gb_per_s": settings.wire,
        "world": settings.world,
        "group": settings.group,
    }
    failed = ""
    try:
        with running(case, settings, peer=peer) as run:
            timing = time_steps(run.build, run.renew, together=settings.world is not None)
            report = {} if peer else run.made[0].report()
    except Exception as error:
        if not peer:
            raise
        failed = f"{type(error).__name__}: {error}"[:500]
    if peer and (failed := _first_of_ranks(failed, settings)):
        return row | {"failed": failed}
    reads, rows = report.get("host_reads_per_step"), report.get("rows")
    return row | timing.as_dict() | {"host_reads": reads, "rows": rows}


def profile(case: Case, settings: Settings, *, peer: bool) -> dict[str, Any]:
    """What a profiler says of the case: launches and stages; prints and writes what the settings ask for."""
    with running(case, settings, peer=peer) as run:
        step = run.build()
        for _ in range(5):
            run.renew()
            step()
        # No kernel of a meeting must be among those of the step; profilers start at different times.
        found = profiled(step, run.renew, lambda: _first_of_ranks("", settings))
        launches, stages, exposed = stages_of(found)
    if settings.kernels and _is_first():
        print(found.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=60))
    if settings.trace is not None:
        settings.trace.mkdir(parents=True, exist_ok=True)
        rank = f"-rank{dist.get_rank()}" if settings.world is not None else ""
        name = str(case).replace(":", "-") + "-peer" * peer + "-captured" * settings.captured + rank
        found.export_chrome_trace(str(settings.trace / f"{name}.json.gz"))
    return {"launches": launches, "stages": stages, "exposed_wire": exposed}


def _first_of_ranks(text: str, settings: Settings) -> str:
    """The first of all ranks' texts that is not empty, which tells all whether one has failed. Collective."""
    texts = [text]
    if settings.world is not None:
        texts *= settings.world
        dist.all_gather_object(texts, text, group=_hosts())
    return next(filter(None, texts), "")


@cache
def _hosts() -> dist.ProcessGroup:
    """The ranks by gloo, which leaves their devices alone."""
    return dist.new_group(backend="gloo")


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _peer_scope(transport: str) -> str:
    return "local" if transport == "local" else "global"


def elementwise_bytes(case: Case, fraction: float) -> dict[str, float]:
    """Bytes that the elementwise stages need to move on one rank, bf16 state: see `rows`."""
    elements = sum(rows * columns * count for (rows, columns), count in INVENTORIES[case.inventory].items())
    elements /= case.world_size
    return {"accumulate": 6 * elements, "take": 6 * fraction * elements, "update": (4 + 2 * fraction) * elements}


def newton_schulz_flops(case: Case, fraction: float) -> float:
    """FLOPs of a rank's share, symmetric products at half cost."""
    matrices = INVENTORIES[case.inventory].items()
    total = sum(count * flops_of_matrix(int(rows * fraction), columns) for (rows, columns), count in matrices)
    return total / case.world_size


def fractions_of_ceiling(row: dict[str, Any], case: Case, best: dict[str, float]) -> dict[str, float]:
    """For the stages whose work is known, what part of the machine's best rate they reach."""
    stages, fraction = row["stages"], row["fraction"]
    parts = {
        stage: moved / best["copy"] * 1e3 / stages[stage]
        for stage, moved in elementwise_bytes(case, fraction).items()
        if stages.get(stage)
    }
    if stages.get("Newton-Schulz"):
        flops = newton_schulz_flops(case, fraction)
        parts["Newton-Schulz"] = flops / best["product"] * 1e3 / stages["Newton-Schulz"]
    return parts


def show(row: dict[str, Any]) -> None:
    """Prints a row, or its stages once they are known."""
    if "failed" in row:
        print(f"{row['case']} failed: {row['failed']}", flush=True)
        return
    if "stages" not in row:
        print(row["case"], *(f"{name} {row[name]:.2f}" for name in COLUMNS if row[name] is not None), flush=True)
        return
    parts = row["of_ceiling"]
    stages = (
        f"{name} {ms:.2f}" + (f" ({parts[name]:.0%})" if name in parts else "") for name, ms in row["stages"].items()
    )
    wire = f"wire {row['exposed_wire']:.2f} ms exposed"
    print(f"{row['case']}: {row['launches']} launches; {', '.join(stages)}; {wire}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", metavar="INVENTORY:W:TRANSPORT")
    parser.add_argument("--fraction", type=float, default=0.25)
    parser.add_argument("--peer", action="store_true", help="the public dion package too")
    parser.add_argument("--captured", action="store_true", help="the step as a CUDA graph")
    parser.add_argument("--wire", type=float, help="bandwidth of a modelled wire in GB/s")
    parser.add_argument("--trace", type=Path, help="folder for Chrome traces")
    parser.add_argument("--kernels", action="store_true", help="print the slowest kernels of each case")
    parser.add_argument("--world", type=int, help="number of GPUs, under torchrun")
    parser.add_argument("--group", help="that of dion-comm-mpi which communicates, under mpirun")
    parser.add_argument("--output", type=Path, default=None, help="default: benchmarks/results/gpu_step-MACHINE.json")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("a GPU is needed: torch.cuda.is_available() is False")
    names = ("fraction", "captured", "wire", "kernels", "trace", "world", "group")
    settings = Settings(*(getattr(arguments, name) for name in names))
    default = CASES
    if settings.world is not None:
        _start(settings.group)
        if dist.get_world_size() != settings.world:
            sys.exit(f"--world is {settings.world}, torchrun started {dist.get_world_size()} processes")
        default = tuple(text.replace(":", f":{settings.world}:") for text in WORLD_CASES)
    cases = [Case.parse(text) for text in arguments.case or default]
    run_all(cases, settings, peer=arguments.peer, output=arguments.output)
    if settings.world is not None:
        dist.destroy_process_group()


def _start(group: str | None) -> None:
    """Initializes torch.distributed; under mpirun, where a group is named, by the ranks of MPI on this one machine."""
    if group is not None:
        from mpi4py import MPI

        rank, size = str(MPI.COMM_WORLD.Get_rank()), str(MPI.COMM_WORLD.Get_size())
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))


def run_all(cases: Sequence[Case], settings: Settings, *, peer: bool, output: Path | None) -> None:
    """Measures, then profiles all cases; prints the table and keeps it after every case, as a long run may be cut."""
    best = ceilings()
    machine = torch.cuda.get_device_name()
    kind = "-captured" * settings.captured + (f"-world{settings.world}" if settings.world else "")
    kind += f"-{settings.group}" if settings.group else ""
    output = output or RESULTS / f"gpu_step-{machine.replace(' ', '-')}{kind}.json"
    content: dict[str, Any] = {
        "machine": machine,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "ceilings": best,
        "rows": [],
    }
    if _is_first():
        output.parent.mkdir(parents=True, exist_ok=True)
        print(f"copy {best['copy'] / 1e12:.2f} TB/s, bf16 product {best['product'] / 1e12:.0f} TFLOP/s", flush=True)
    each = [(case, of_peer) for case in cases for of_peer in ((False, True) if peer else (False,))]
    for case, of_peer in each:
        row = measure(case, settings, peer=of_peer)
        content["rows"].append(row)
        _keep(content, output, row, case)
    for row, (case, of_peer) in zip(content["rows"], each, strict=True):
        if "failed" in row:
            continue
        row.update(profile(case, settings, peer=of_peer))
        row["of_ceiling"] = fractions_of_ceiling(row, case, best)
        _keep(content, output, row, case)
    if _is_first():
        print(f"written to {output}")


def _keep(content: dict[str, Any], output: Path, row: dict[str, Any], case: Case) -> None:
    if _is_first():
        output.write_text(json.dumps(content, indent=1) + "\n")
        show(row)


if __name__ == "__main__":
    main()
