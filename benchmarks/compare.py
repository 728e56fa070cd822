"""Compares this commit with another one by asv, and ends with 1 if any count rose.

    python -m benchmarks.compare BASE [--bench REGEX] [--machine NAME] [--counts]

Both commits are built, installed and measured one after the other with the benchmarks of this tree, in an environment
that shares torch with the running one. Printed are asv's comparison of times, the transports of this commit side by
side, and the counts that changed (see `benchmarks.gate`). --counts measures what continuous integration does: counts
alone, on a CPU, and nothing where no package and no benchmark differs. With HEAD as BASE this commit is measured
alone. What is not committed is not measured.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

from asv.machine import Machine, MachineCollection
from asv.util import UserError
from rich.console import Console

from benchmarks import gate, shared_environment, side_by_side
from benchmarks.figures import ROOT, Figures, figures_of

ENVIRONMENT = shared_environment.SharedEnvironment.tool_name
COUNTS = r"^bench_counts\.Counts\."
SUITE = ("suite", "exchanging.py", "inventories.py", "stepping.py", "worlds.py")
COMPARED = ("packages", "constraints.txt", *(f"benchmarks/{name}" for name in SUITE))
"""What counts depend on: the packages, and the benchmarks with the modules that they import."""
ASV_FAILED = 2
"""asv's exit code where single benchmarks failed."""


def git(*words: str) -> str:
    """What a command of git prints; raises CalledProcessError where it fails."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def commit_of(name: str) -> str | None:
    """The hash of a commit, or None where it is not here, as in a clone of the last commit alone."""
    try:
        return git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    except subprocess.CalledProcessError:
        return None


def asv(*words: str, allowed: tuple[int, ...] = (0,)) -> None:
    """Runs asv at the root; ends the program where it fails."""
    ended = subprocess.run([sys.executable, "-m", "asv", *words], cwd=ROOT, check=False)
    if ended.returncode not in allowed:
        sys.exit(f"asv {' '.join(words)} ended with {ended.returncode}")


def known_machine(name: str | None) -> str:
    """The name by which asv knows a machine, this one if there is none; asv is told of it if it does not know."""
    wanted = name or Machine.get_unique_machine_name()
    try:
        known: str = MachineCollection.load(wanted)["machine"]
    except UserError:
        MachineCollection.save(wanted, {**Machine.get_defaults(), "machine": wanted})
        return wanted
    return known


def measure(commit: str, bench: str, machine: str, *, errors: bool) -> None:
    """Builds and measures a commit. That single benchmarks fail is left to the gate.

    Args:
        errors: let asv print why benchmarks fail, and why they are skipped.
    """
    settings = ("-E", ENVIRONMENT, "--machine", machine, "--bench", bench)
    asv("run", *settings, *(["--show-stderr"] if errors else []), f"{commit}^!", allowed=(0, ASV_FAILED))


def compare(base: str, head: str, bench: str, machine: str, *, times: bool) -> bool:
    """Measures both commits and prints how they differ; returns whether the gate is passed."""
    if base != head:
        measure(base, bench, machine, errors=not times)
    measure(head, bench, machine, errors=not times)
    if times and base != head:
        asv("compare", "--machine", machine, "--split", "--only-changed", base, head)
    before, after = (selected(figures_of(commit, machine, ENVIRONMENT), bench) for commit in (base, head))
    side_by_side.show(after, Console())
    verdict = gate.judge(before, after, accepted_between(base, head))
    print(gate.describe(verdict))
    if not after:
        print(f"nothing was measured of {head}")
    return bool(after) and verdict.passes


def selected(figures: Figures, bench: str) -> Figures:
    """Those that asv has measured just now: others were perhaps measured by other benchmarks of the same name."""
    return {name: value for name, value in figures.items() if re.search(bench, str(name))}


def accepted_between(base: str, head: str) -> dict[str, str]:
    """By pattern the reason of every rise that the messages of the commits after BASE accept."""
    values = git("log", f"{base}..{head}", f"--format=%(trailers:key={gate.TRAILER},valueonly,unfold)")
    return gate.accepted_rises(values.splitlines())


def reason_to_skip(name: str, *, counts: bool) -> str | None:
    """Why there is nothing to compare with that commit, or None."""
    base = commit_of(name)
    if base is None:
        return f"{name} is not in this clone"
    if not git("ls-tree", base, "packages/dion-core/pyproject.toml"):
        return f"{name} has no packages"
    if counts and not git("diff", "--name-only", base, "HEAD", "--", *COMPARED):
        return f"nothing in {', '.join(COMPARED)} differs from {name}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("--bench", default=".", help="which benchmarks, as a regular expression")
    parser.add_argument("--machine", help="the name under which asv keeps the figures; else that of this machine")
    parser.add_argument("--counts", action="store_true", help="what continuous integration compares")
    arguments = parser.parse_args()
    if reason := reason_to_skip(arguments.base, counts=arguments.counts):
        print(f"no comparison: {reason}")
        return
    machine, bench = known_machine(arguments.machine), COUNTS if arguments.counts else arguments.bench
    base, head = git("rev-parse", f"{arguments.base}^{{commit}}"), git("rev-parse", "HEAD")
    if git("status", "--porcelain", "--", "packages"):
        print("note: packages/ holds changes that are not committed, and not measured")
    if not compare(base, head, bench, machine, times=not arguments.counts):
        sys.exit(1)


if __name__ == "__main__":
    main()
