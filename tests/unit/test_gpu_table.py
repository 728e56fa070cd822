"""The tables of times on GPUs: made of the files of results, and on the page as they are made."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.gpu_table import _results, newton_schulz_table, tables, wire_table
from benchmarks.pages import DOCS

PAGE = (DOCS / "performance.md").read_text()


@pytest.mark.parametrize(
    ("make", "files"), [(tables, "gpu_step-*"), (newton_schulz_table, "newton_schulz-*"), (wire_table, "wire-*")]
)
def test_the_page_shows_the_results_that_are_kept(make: Callable[..., str], files: str) -> None:
    results = _results(f"{files}.json")
    assert results
    assert make(results) in PAGE


def test_a_package_that_fails_has_a_row_that_names_the_error() -> None:
    row = {"case": "1b:2:full (public dion)", "fraction": 0.25, "captured": False, "wire_gb_per_s": None, "world": 2}
    failed = row | {"group": None, "failed": "InductorError: AssertionError: in the compiler"}
    result = {"machine": "GPU", "torch": "2", "date": "2026-11-30T", "ceilings": {"copy": 1e12, "product": 1e12}}
    lines = tables([result | {"rows": [failed]}]).splitlines()
    heading = next(line for line in lines if line.startswith("| inventory"))
    assert lines[-1] == "| 1b:2:full (public dion) | InductorError | | | | | |"
    assert lines[-1].count("|") == heading.count("|")
