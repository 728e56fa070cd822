"""`dion bench`: measures links, Newton-Schulz and copies here, and keeps them as a machine profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from dion_core.cli.options import command
from dion_core.cli.output import fail, print_json, print_line, print_table, progress
from dion_core.prediction.machine import Machine, Point, save
from dion_core.prediction.measuring import Sizes, is_first, joined, measure

MIB = 2**20


@dataclass(frozen=True)
class BenchOptions:
    """Options of `dion bench`."""

    out: Annotated[Path, typer.Option(help="where the profile is written")] = Path("machine.json")
    link_mib: Annotated[
        list[float] | None, typer.Option(min=0, help="MiB that a rank sends to others; may be repeated")
    ] = None
    side: Annotated[list[int] | None, typer.Option(min=1, help="rows of the matrices; may be repeated")] = None
    copy_mib: Annotated[int | None, typer.Option(min=1, help="MiB of the copy")] = None
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False


@command(BenchOptions)
def bench(options: BenchOptions) -> None:
    """Measure this machine and keep a profile for dion plan --machine.

    Started by torchrun, links are measured too: torchrun --nproc-per-node 8 -m dion_core.cli bench.
    """
    if not options.out.parent.is_dir():
        fail(f"{options.out.parent} is no folder", code=2)
    with joined() as ranks, progress() as show:
        machine = measure(ranks, _sizes(options, Sizes.for_device(ranks.device)), show)
        first = is_first()
    if not first:
        return
    save(machine, options.out)
    if options.as_json:
        print_json({"file": str(options.out), "machine": asdict(machine)})
    else:
        _show(machine)
        print_line(f"written to {options.out}")


def _sizes(options: BenchOptions, usual: Sizes) -> Sizes:
    changes: dict[str, object] = {}
    if options.link_mib:
        changes["link_bytes"] = [max(1, round(size * MIB)) for size in options.link_mib]
    if options.side:
        changes["sides"] = options.side
    if options.copy_mib:
        changes["copy_bytes"] = options.copy_mib * MIB
    return replace(usual, **changes)  # type: ignore[arg-type]


def _show(machine: Machine) -> None:
    print_line(machine.name)
    print_line(f"copy {machine.copy / 1e9:,.1f} GB/s, latency of a collective {1e6 * machine.latency:,.0f} us")
    _curve("Newton-Schulz", "rows", "GFLOP/s", machine.newton_schulz)
    _curve("in node", "bytes", "GB/s", machine.in_node)
    _curve("between nodes", "bytes", "GB/s", machine.between)


def _curve(title: str, size: str, rate: str, points: Sequence[Point]) -> None:
    print_table(title, (size, rate), [(f"{at:,.0f}", f"{value / 1e9:,.2f}") for at, value in points])
