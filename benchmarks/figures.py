"""Reads what asv has kept of a commit on this machine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from asv.results import Results, iter_results_paths

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / ".asv" / "results"


@dataclass(frozen=True)
class Name:
    """Which figure: of a benchmark, for one combination of its parameters."""

    benchmark: str
    parameters: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.benchmark}({', '.join(self.parameters)})"

    @property
    def kind(self) -> str:
        """Its kind, as the name of the benchmark says: "track", "time", or "peakmem"."""
        return self.benchmark.rsplit(".", 1)[-1].split("_", 1)[0]


Figures = dict[Name, float | None]
"""By name the value; None where the benchmark failed. What was skipped is missing."""

Known = dict[str, dict[str, Any]]
"""By benchmark what asv knows of it."""


def figures_of(commit: str, machine: str, environment: str, results: Path = RESULTS) -> Figures:
    """The figures of a commit, in the order of asv's files; empty if there are none.

    Args:
        commit: its whole hash.
        machine: the name of a machine that asv knows.
        environment: how the name of asv's environment starts.
        results: asv's folder of results.
    """
    figures: Figures = {}
    for folder, file, _ in iter_results_paths(str(results / machine)):
        kept = Results.load(str(Path(folder) / file), machine_name=machine)
        if kept.commit_hash == commit and kept.env_name.startswith(environment):
            figures |= dict(values_of(kept))
    return figures


def values_of(kept: Results) -> Iterator[tuple[Name, float | None]]:
    """What was measured, of one file of asv."""
    for benchmark in sorted(kept.get_all_result_keys()):
        parameters = kept.get_result_params(benchmark)
        names = [tuple(value.strip("'") for value in values) for values in product(*parameters)]
        for name, value in zip(names, kept.get_result_value(benchmark, parameters), strict=True):
            if value is None or not math.isnan(value):
                yield Name(benchmark, name), value


def described(results: Path = RESULTS) -> Known:
    """By benchmark what asv knows of it: `param_names` and `unit` among others. It is that of the last run."""
    known = json.loads((results / "benchmarks.json").read_text(encoding="utf-8"))
    return {name: each for name, each in known.items() if isinstance(each, dict)}
