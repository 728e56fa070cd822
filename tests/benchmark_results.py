"""Figures of made-up benchmarks, kept as asv keeps them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from asv.results import Results

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAMES = ["transport", "world_size"]


def keep(
    results: Path,
    values: Mapping[str, Sequence[float | None]],
    params: Sequence[Sequence[str]],
    *,
    commit: str = COMMIT,
    time: int = 1_700_000_000,
) -> None:
    """Writes the figures of a commit on the machine "here", and what asv knows of the benchmarks.

    Args:
        values: by benchmark the figures of all combinations of the parameters.
        params: by parameter of `NAMES` its values as Python writes them.
        time: of the commit, in seconds.
    """
    about_machine = {"machine": "here", "os": "", "arch": "", "cpu": "", "num_cpu": "2", "ram": ""}
    made = Results({**about_machine, "python": "3.11"}, {}, commit, 1000 * time, "3.11", "shared-py3.11", {})
    known: dict[str, Any] = {"version": 2}
    for name, of_name in values.items():
        kind = "time" if ".time_" in name else "track"
        unit = "seconds" if kind == "time" else "bytes"
        about = {"name": name, "params": params, "param_names": NAMES, "version": "1", "unit": unit, "type": kind}
        known[name] = {**about, "code": "", "timeout": 60.0}
        nothing = [None] * len(of_name)
        result = SimpleNamespace(
            result=list(of_name), samples=nothing, number=nothing, stderr="", errcode=0, profile=None
        )
        made.add_result(about, result, started_at=datetime.now(UTC))
    made.save(str(results))
    (results / "here").mkdir(exist_ok=True)
    (results / "here" / "machine.json").write_text(json.dumps({**about_machine, "version": 1}))
    (results / "benchmarks.json").write_text(json.dumps(known))
