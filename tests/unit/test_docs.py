"""What the documents show runs, and every package keeps the house rules that documents and tools rely on."""

import re
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.documents import framework_ranks, run_program

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("packages/*/README.md")), *sorted(ROOT.glob("docs/*.md"))]
PACKAGES = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
FENCE = re.compile(r"^```python(?P<info>(?: [^\n]*)?)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced Python block; `first_line` is the line of its first statement in the document.

    Words after "python" say how it runs: "no-run", "needs=a,b" for packages without which it is skipped, "ranks=1,2"
    for the numbers of ranks on which it runs, as under torchrun. Such blocks run in processes of their own.
    """

    document: Path
    first_line: int
    words: tuple[str, ...]
    code: str

    @property
    def runs(self) -> bool:
        return "no-run" not in self.words

    def values(self, key: str) -> list[str]:
        """Of the word "key=a,b"."""
        return [value for word in self.words if word.startswith(f"{key}=") for value in word.split("=")[1].split(",")]

    @property
    def name(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.first_line}"

    def compiled(self):
        """The code object, with the document's file name and line numbers for tracebacks."""
        return compile("\n" * (self.first_line - 1) + self.code, str(self.document), "exec")


def blocks_of(document: Path) -> list[Block]:
    text = document.read_text(encoding="utf-8")
    return [
        Block(
            document,
            text.count("\n", 0, match.start("code")) + 1,
            tuple(match["info"].split()),
            match["code"],
        )
        for match in FENCE.finditer(text)
    ]


BLOCKS = [block for document in DOCUMENTS for block in blocks_of(document)]
RUNNABLE = [block for block in BLOCKS if block.runs]


def project(package: Path) -> dict:
    return tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_readme_has_a_block_that_runs():
    assert [block for block in RUNNABLE if block.document == ROOT / "README.md"]


@pytest.mark.parametrize("block", RUNNABLE, ids=lambda block: block.name)
def test_block_runs(block):
    for package in block.values("needs"):
        if not find_spec(package):
            pytest.skip(f"{package} is not installed")
    if not block.values("needs") and not block.values("ranks"):
        exec(block.compiled(), {"__name__": "__main__"})
    for ranks in block.values("ranks") or ["1"] * bool(block.values("needs")):
        framework_ranks(int(ranks)).run(run_program, block.code, str(block.document), block.first_line)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_block_is_valid_python(block):
    block.compiled()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_package_is_complete(package):
    module = package / "src" / package.name.replace("-", "_")
    assert project(package)["name"] == package.name
    for path in (module / "__init__.py", module / "py.typed", package / "README.md"):
        assert path.is_file(), path
    # A copy, since neither a link nor a path out of the package survives in a source distribution.
    assert (package / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_versions_are_in_lockstep():
    """One number: every package has it, and pins it where it depends on another one of ours."""
    projects = [project(package) for package in PACKAGES]
    assert len({one["version"] for one in projects}) == 1
    for one in projects:
        ours = [requirement for requirement in one["dependencies"] if requirement.startswith("dion-")]
        assert all(requirement.endswith(f"=={one['version']}") for requirement in ours)


def test_tools_check_every_package():
    """import-linter and mypy name packages one by one, so that a new one could be forgotten."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    modules = {package.name.replace("-", "_") for package in PACKAGES}
    assert modules == set(tool["importlinter"]["root_packages"])
    contracts = [one for one in tool["importlinter"]["contracts"] if one["type"] == "forbidden"]
    assert modules == {module for contract in contracts for module in contract["source_modules"]}
    assert {f"packages/{package.name}/src" for package in PACKAGES} <= set(tool["mypy"]["mypy_path"])
