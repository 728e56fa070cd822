"""The tables of docs/performance.md from the results that `python -m benchmarks.gpu_step` keeps.

    python -m benchmarks.gpu_table [--write]

Prints the tables, and with --write puts them into the page.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "performance.md"
BEGIN, END = "<!-- gpu_step: begin -->\n", "<!-- gpu_step: end -->"
STAGES = ("accumulate", "select", "take", "wire", "Newton-Schulz", "normalize", "update", "other")


def tables(results: list[dict[str, Any]]) -> str:
    """Two Markdown tables for every file of results: the steps, and the stages of each."""
    lines = []
    for result in results:
        best = result["ceilings"]
        lines += [
            f"{result['machine']}, torch {result['torch']}, {result['date'][:10]}; measured in the same run: device "
            f"copy {best['copy'] / 1e12:.2f} TB/s, bf16 product {best['product'] / 1e12:.0f} TFLOP/s.",
            "",
            "| inventory:W:transport | isolated ms | hidden ms | host ms | peak MiB | first 3 steps s | launches |",
            "|---|---|---|---|---|---|---|",
            *(_step(row) for row in result["rows"]),
            "",
            "Device time by stage in ms, and what part of the ceiling it is:",
            "",
            "| inventory:W:transport | " + " | ".join(STAGES) + " |",
            "|---" * (len(STAGES) + 1) + "|",
            *(_stages(row) for row in result["rows"] if not row["captured"]),
            "",
        ]
    return "\n".join(lines).rstrip("\n") + "\n"


def _name(row: dict[str, Any]) -> str:
    wire = f", wire {row['wire_gb_per_s']:g} GB/s" if row["wire_gb_per_s"] else ""
    return row["case"] + ", captured" * row["captured"] + wire


def _step(row: dict[str, Any]) -> str:
    times = " | ".join(f"{row[name]:.1f}" for name in ("isolated", "hidden", "host"))
    peak = "in the graph" if row["captured"] else f"{row['peak_mib']:.0f}"
    return f"| {_name(row)} | {times} | {peak} | {row['seconds_to_third_step']:.1f} | {row['launches']} |"


def _stages(row: dict[str, Any]) -> str:
    cells = []
    for stage in STAGES:
        part = row["of_ceiling"].get(stage)
        cells.append(f"{row['stages'][stage]:.2f}" + (f" ({part:.0%})" if part else ""))
    return f"| {_name(row)} | " + " | ".join(cells) + " |"


def main() -> None:
    """Prints the tables, and writes them into the page if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"put the tables into {PAGE.name}")
    text = tables([json.loads(path.read_text()) for path in sorted(RESULTS.glob("gpu_step-*.json"))])
    print(text)
    if parser.parse_args().write:
        page = PAGE.read_text(encoding="utf-8")
        before, rest = page.split(BEGIN)
        PAGE.write_text(before + BEGIN + text + END + rest.split(END, 1)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
