"""The tables of docs/performance.md from what benchmarks.gpu_step, .newton_schulz, .wire and asv keep.

    python -m benchmarks.gpu_table [--write]

Prints the tables, and with --write puts them into the page.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from asv.results import Results

from benchmarks.figures import Name, values_of
from benchmarks.pages import DOCS, publish

RESULTS = Path(__file__).parent / "results"
STAGES = ("accumulate", "select", "take", "wire", "Newton-Schulz", "normalize", "update", "other")


def tables(results: list[dict[str, Any]]) -> str:
    """Two Markdown tables for every file of results: the steps, and the stages of each."""
    lines = []
    for result in results:
        best = result["ceilings"]
        world = result["rows"][0].get("world")
        lines += [
            f"{f'{world} x ' if world else ''}{result['machine']}, torch {result['torch']}, {result['date'][:10]}, "
            f"{'over NCCL' if world else 'one rank with loopback collectives'}; measured in the same run: device "
            f"copy {best['copy'] / 1e12:.2f} TB/s, bf16 product {best['product'] / 1e12:.0f} TFLOP/s.",
            *([result["note"]] if "note" in result else []),
            "",
            "| inventory:W:transport | isolated ms | hidden ms | host ms | peak MiB | first 3 steps s | launches |",
            "|---|---|---|---|---|---|---|",
            *(_step(row) for row in result["rows"]),
            "",
        ]
        staged = [row for row in result["rows"] if "stages" in row and not row["captured"]]
        if not staged:
            continue
        lines += [
            "Device time by stage in ms, and what part of the ceiling it is; last, how much of the wire's runs beside "
            "nothing else:",
            "",
            "| inventory:W:transport | " + " | ".join(STAGES) + " | wire exposed |",
            "|---" * (len(STAGES) + 2) + "|",
            *map(_stages, staged),
            "",
        ]
    return "\n".join(lines).rstrip("\n") + "\n"


def _name(row: dict[str, Any]) -> str:
    wire = f", wire {row['wire_gb_per_s']:g} GB/s" if row["wire_gb_per_s"] else ""
    group = f", {row['group']} of dion-comm-mpi" if row.get("group") else ""
    fraction = f", fraction {row['fraction']:g}" if row["fraction"] != 0.25 else ""
    return row["case"] + fraction + ", captured" * row["captured"] + wire + group


def _step(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"| {_name(row)} | {row['failed'].partition(':')[0]} " + "| " * 5 + "|"
    times = " | ".join(f"{row[name]:.1f}" for name in ("isolated", "hidden", "host"))
    peak = "in the graph" if row["captured"] else f"{row['peak_mib']:.0f}"
    return f"| {_name(row)} | {times} | {peak} | {row['seconds_to_third_step']:.1f} | {row.get('launches', '')} |"


def _stages(row: dict[str, Any]) -> str:
    cells = []
    for stage in STAGES:
        part = row["of_ceiling"].get(stage)
        cells.append(f"{row['stages'][stage]:.2f}" + (f" ({part:.0%})" if part else ""))
    exposed = f"{row['exposed_wire']:.2f}" if "exposed_wire" in row else ""
    return f"| {_name(row)} | " + " | ".join(cells) + f" | {exposed} |"


def _table(
    results: list[dict[str, Any]],
    said: Callable[[dict[str, Any]], str],
    columns: Sequence[str],
    cells: Callable[[dict[str, Any]], Sequence[str]],
) -> str:
    """A Markdown table for every file of results, below what is said of it."""
    lines = []
    for result in results:
        lines += [said(result), "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        lines += [f"| {' | '.join(cells(row))} |" for row in result["rows"]] + [""]
    return "\n".join(lines).rstrip("\n") + "\n"


def wire_table(results: list[dict[str, Any]]) -> str:
    """A Markdown table for every file of results of the wire."""
    return _table(
        results,
        lambda result: f"{result['world']} x {result['machine']}, torch {result['torch']}, {result['date'][:10]}:",
        ("MiB a peer", "all_to_all_single GB/s", "list GB/s", "registered GB/s", "exposed beside products"),
        lambda row: (
            f"{row['MiB']}",
            *(f"{row[name]:.0f}" for name in ("single", "list", "registered")),
            f"{row['exposed']:.0%}",
        ),
    )


def newton_schulz_table(results: list[dict[str, Any]]) -> str:
    """A Markdown table for every file of results of Newton-Schulz."""
    return _table(
        results,
        lambda result: (
            f"{result['machine']}, torch {result['torch']}, {result['date'][:10]}; fp16 product of cuBLAS in the same "
            f"run: {result['product']:.0f} TFLOP/s."
        ),
        ("batch x m x n", "captured ms", "eager ms", "TFLOP/s", "captured with torch's products, ms"),
        lambda row: (
            " x ".join(map(str, row["shape"])),
            f"{row['captured_ms']:.3f}",
            f"{row['eager_ms']:.3f}",
            f"{row['flops'] / 1e12:.0f}",
            f"{row['torch_ms']:.3f}",
        ),
    )


ASV_COLUMNS = (
    {
        "step ms": ("bench_steps.OneGpu.time_step", 1e3),
        "launches": ("bench_counts.OneGpu.track_launches", 1),
        "host reads": ("bench_counts.OneGpu.track_host_reads", 1),
        "workspace MB": ("bench_counts.OneGpu.track_workspace", 1e-6),
    },
    {
        "step ms": ("bench_steps.WorldSteps.time_step", 1e3),
        "exchange ms": ("bench_steps.WorldExchanges.time_exchange", 1e3),
        "MB to others": ("bench_counts.Worlds.track_bytes", 1e-6),
        "collectives": ("bench_counts.Worlds.track_collectives", 1),
        "host reads": ("bench_counts.Worlds.track_host_reads", 1),
    },
)
"""By heading the benchmark and a factor: of one rank on one GPU, and of ranks with a GPU each."""


def asv_table(results: list[Results]) -> str:
    """Markdown tables of what asv has kept of steps on GPUs: of one rank, and of several."""
    lines = []
    for result in results:
        found = dict(values_of(result))
        measured = {name.benchmark for name in found}
        columns = next(each for each in ASV_COLUMNS if each["step ms"][0] in measured)
        lines += [
            f"asv's machine {result.params['machine']}, commit {result.commit_hash[:8]}:",
            "",
            f"| inventory:W:transport | {' | '.join(columns)} |",
            "|---" * (len(columns) + 1) + "|",
        ]
        for parameters in [name.parameters for name in found if name.benchmark == columns["step ms"][0]]:
            transport, inventory, world, _ = parameters
            values = [(found[Name(name, parameters)], factor) for name, factor in columns.values()]
            cells = [f"{value * factor:.4g}" if value is not None else "failed" for value, factor in values]
            lines.append(f"| {inventory}:{world}:{transport} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n"


def _results(pattern: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob(pattern))]


def main() -> None:
    """Prints what `publish` puts into the page if asked to."""
    page = DOCS / "performance.md"
    publish(tables(_results("gpu_step-*.json")), page, "gpu_step", description=__doc__)
    publish(newton_schulz_table(_results("newton_schulz-*.json")), page, "newton_schulz", description=__doc__)
    publish(wire_table(_results("wire-*.json")), page, "wire", description=__doc__)
    kept = [Results.load(str(path)) for path in sorted(RESULTS.glob("asv-*.json"))]
    publish(asv_table(kept), page, "asv", description=__doc__)


if __name__ == "__main__":
    main()
