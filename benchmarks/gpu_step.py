"""The time of one optimizer step on a GPU, as one rank of W, with loopback collectives.

    python -m benchmarks.gpu_step [--case 5120x8:4:local ...] [--fraction 0.25] [--peer] [--captured]
                                  [--wire 25] [--kernels] [--trace FOLDER]

A case is INVENTORY:W:TRANSPORT. bf16 parameters, gradients and state, FSDP2 row shards, NorDion2, gradients renewed
before every step. With --peer the public `dion` package runs in the same process on the same inventory, if it can be
imported. --wire models a wire of so many GB/s; --trace writes a step of every case in the Chrome format. Results are
kept as JSON under benchmarks/results/ with the machine named.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.inventories import INVENTORIES, renew_gradients, sharded_parameters
from benchmarks.step_timing import ceilings, profiled, time_steps
from dion_core import NorDion2
from dion_core.ownership import newton_schulz_cost
from dion_core.testing.loopback import Wire, loopback

CASES = (
    *(f"5120x8:4:{transport}" for transport in ("local", "capped", "full", "varlen")),
    "14b:8:local",
    "14b:8:capped",
    "1b:8:local",
    "1b:8:capped",
)
RESULTS = Path(__file__).parent / "results"
COLUMNS = ("isolated", "hidden", "host", "peak_mib", "seconds_to_third_step", "launches", "host_reads")


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


def measure(case: Case, settings: Settings, *, peer: bool) -> dict[str, Any]:
    """One row of the table, of this project or of the public package."""
    gc.collect()
    torch.cuda.empty_cache()
    fraction = settings.fraction
    wire = None if settings.wire is None else Wire(settings.wire * 1e9)
    with loopback(case.world_size, "cuda", wire=wire) as (mesh, _):
        parameters = sharded_parameters(INVENTORIES[case.inventory], mesh, torch.bfloat16)
        made: list[Any] = []

        def build() -> Callable[[], Any]:
            if peer:
                from benchmarks.peer import build_peer

                made.append(build_peer(parameters, mesh, fraction, scope=_peer_scope(case.transport)))
            else:
                made.append(NorDion2(parameters, lr=0.01, fraction=fraction, transport=case.transport))
                if settings.captured:
                    made[0].capture()
            step: Callable[[], Any] = made[0].step
            return step

        def renew() -> None:
            renew_gradients(parameters)

        timing = time_steps(build, renew)
        _profile(made[0].step, renew, settings, str(case).replace(":", "-") + "-peer" * peer)
        report = {} if peer else made[0].report()
        if settings.captured and not peer:
            made[0].release()
    return {
        "case": str(case) + " (public dion)" * peer,
        "fraction": fraction,
        "captured": settings.captured and not peer,
        "wire_gb_per_s": settings.wire,
        **timing.as_dict(),
        "host_reads": report.get("host_reads_per_step"),
        "rows": report.get("rows"),
    }


def _profile(step: Callable[[], Any], renew: Callable[[], None], settings: Settings, name: str) -> None:
    """Prints the slowest kernels and writes a trace of that name, as the settings ask for."""
    if not settings.kernels and settings.trace is None:
        return
    profile = profiled(step, renew)
    if settings.kernels:
        print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=60))
    if settings.trace is not None:
        settings.trace.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(settings.trace / f"{name}.json.gz"))


def _peer_scope(transport: str) -> str:
    return "local" if transport == "local" else "global"


def elementwise_bytes(case: Case, fraction: float) -> dict[str, float]:
    """Bytes that the elementwise stages need to move on one rank, bf16 state: see `rows`."""
    elements = sum(rows * columns * count for (rows, columns), count in INVENTORIES[case.inventory].items())
    elements /= case.world_size
    return {"accumulate": 6 * elements, "take": 6 * fraction * elements, "update": (4 + 2 * fraction) * elements}


def newton_schulz_flops(case: Case, fraction: float) -> float:
    """FLOPs of a rank's share, symmetric products at half cost.

    With m <= n: a step on a square matrix is 4 m^3; on another the Gram matrices of two segments cost m^2 n each, the
    five steps 12 m^3 / 2 or so in all, and the two products with X 2 m^2 n each.
    """
    total = 0.0
    for (rows, columns), count in INVENTORIES[case.inventory].items():
        chosen = int(rows * fraction)
        small, large = min(chosen, columns), max(chosen, columns)
        assert newton_schulz_cost(chosen, columns) == large * small**2
        if small == large:
            total += count * 5 * 4 * small**3
        else:
            total += count * (2 * small**2 * large + 2 * 2 * small**2 * large + 12 * small**3)
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


def show(row: dict[str, Any], case: Case, best: dict[str, float]) -> None:
    """Prints a row and its stages."""
    values = " ".join(f"{name} {row[name]:.2f}" for name in COLUMNS if isinstance(row[name], int | float))
    parts = fractions_of_ceiling(row, case, best)
    stages = ", ".join(
        f"{name} {ms:.2f}" + (f" ({parts[name]:.0%})" if name in parts else "") for name, ms in row["stages"].items()
    )
    print(f"{row['case']}  {values}\n    {stages}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", default=CASES, metavar="INVENTORY:W:TRANSPORT")
    parser.add_argument("--fraction", type=float, default=0.25)
    parser.add_argument("--peer", action="store_true", help="the public dion package too")
    parser.add_argument("--captured", action="store_true", help="the step as a CUDA graph")
    parser.add_argument("--wire", type=float, help="bandwidth of a modelled wire in GB/s")
    parser.add_argument("--trace", type=Path, help="folder for Chrome traces")
    parser.add_argument("--kernels", action="store_true", help="print the slowest kernels of each case")
    parser.add_argument("--output", type=Path, default=None, help="default: benchmarks/results/gpu_step-MACHINE.json")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("a GPU is needed: torch.cuda.is_available() is False")
    settings = Settings(arguments.fraction, arguments.captured, arguments.wire, arguments.kernels, arguments.trace)
    best = ceilings()
    print(f"copy {best['copy'] / 1e12:.2f} TB/s, bf16 product {best['product'] / 1e12:.0f} TFLOP/s", flush=True)
    machine = torch.cuda.get_device_name()
    output = (
        arguments.output or RESULTS / f"gpu_step-{machine.replace(' ', '-')}{'-captured' * arguments.captured}.json"
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {
        "machine": machine,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "ceilings": best,
        "rows": [],
    }
    for text in arguments.case:
        case = Case.parse(text)
        for peer in (False, True) if arguments.peer else (False,):
            row = measure(case, settings, peer=peer)
            show(row, case, best)
            content["rows"].append({**row, "of_ceiling": fractions_of_ceiling(row, case, best)})
            output.write_text(json.dumps(content, indent=1) + "\n")  # after every case: a long run may be cut short
    print(f"written to {output}")


if __name__ == "__main__":
    main()
