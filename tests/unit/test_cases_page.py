"""The page of cases has each case once, and names tests that exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| C(?P<number>\d+) \| (?P<what>[^|]+) \| (?P<tests>[^|]+) \|$", re.MULTILINE)
NAMED = re.compile(r"`([^`:]+)::([^`]+)`")
NOT_HELD = "not held yet"
LAST = 47
ROWS = list(ROW.finditer(PAGE))


def functions(path: str) -> set[str]:
    """The names of the functions of a test module."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_case_is_there_once() -> None:
    assert [int(row["number"]) for row in ROWS] == list(range(1, LAST + 1))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"C{row['number']}")
def test_the_tests_of_a_case_exist(row: re.Match[str]) -> None:
    named = NAMED.findall(row["tests"])
    assert "<br>".join(f"`{path}::{name}`" for path, name in named) == row["tests"] or row["tests"] == NOT_HELD
    for path, name in named:
        assert name in functions(path), f"{path} has no {name}"


def test_every_test_that_names_a_case_is_on_the_page() -> None:
    for path in sorted(ROOT.glob("tests/*/test_*.py")):
        where = str(path.relative_to(ROOT))
        for name in functions(where):
            for number in re.findall(r"_c(\d\d)(?=_)", name) if name.startswith("test_c") else ():
                (row,) = (row for row in ROWS if int(row["number"]) == int(number))
                assert (where, name) in NAMED.findall(row["tests"]), f"{where}::{name} is not in the line of C{number}"
