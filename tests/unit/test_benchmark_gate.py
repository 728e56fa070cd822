"""The gate on counts, and how what asv has kept is read and laid side by side, on figures made up here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import compare, page
from benchmarks.figures import ROOT, Figures, Name, described, figures_of
from benchmarks.gate import accepted_rises, describe, judge
from benchmarks.side_by_side import comparisons, formatted
from tests.benchmark_results import COMMIT, keep

BYTES = "bench_counts.Counts.track_bytes"
TIME = "bench_steps.Steps.time_step"


def count(value: float | None, transport: str = "capped", benchmark: str = BYTES) -> Figures:
    return {Name(benchmark, (transport, "tiny", "4")): value}


def test_a_rise_fails_and_is_named_with_both_figures() -> None:
    verdict = judge(count(1000) | count(7, "full"), count(1001) | count(7, "full"), {})
    assert not verdict.passes
    assert [str(change) for change in verdict.rises] == [f"{BYTES}(capped, tiny, 4): before 1,000, after 1,001"]
    assert verdict.same == 1
    assert f"{BYTES}(capped, tiny, 4): before 1,000, after 1,001" in describe(verdict)


def test_a_fall_passes_and_is_named() -> None:
    verdict = judge(count(1000), count(999), {})
    assert verdict.passes
    assert f"{BYTES}(capped, tiny, 4): before 1,000, after 999" in describe(verdict)


def test_a_new_count_passes_also_where_it_failed_before() -> None:
    verdict = judge(count(None, "full"), count(5) | count(6, "full"), {})
    assert verdict.passes
    assert {change.name.parameters[0] for change in verdict.new} == {"capped", "full"}


def test_a_count_that_vanished_passes_and_is_named() -> None:
    verdict = judge(count(5), {}, {})
    assert verdict.passes
    assert "vanished: 1" in describe(verdict)
    assert f"{BYTES}(capped, tiny, 4): before 5, after none" in describe(verdict)


def test_a_count_that_cannot_be_measured_any_more_fails() -> None:
    for before in (count(5), {}):
        verdict = judge(before, count(None), {})
        assert not verdict.passes
        assert "FAILED: 1" in describe(verdict)
    verdict = judge(count(None), count(None), {})
    assert verdict.passes
    assert "failed, as before: 1" in describe(verdict)


def test_times_and_memory_of_processes_are_no_gate() -> None:
    before = count(1.0, benchmark=TIME) | count(1.0, benchmark="bench_memory.Peak.peakmem_step")
    after = {name: 100.0 for name in before}
    verdict = judge(before, after, {})
    assert verdict.passes
    assert not verdict.same


def test_a_rise_is_accepted_by_a_pattern_and_a_reason() -> None:
    accepted = accepted_rises([f"{BYTES}(capped, *) because headers carry ages", "*", "* because "])
    assert accepted == {f"{BYTES}(capped, *)": "headers carry ages"}
    verdict = judge(count(1) | count(1, "full"), count(2) | count(2, "full"), accepted)
    assert [change.name.parameters[0] for change in verdict.rises] == ["full"]
    assert "headers carry ages" in describe(verdict)
    assert judge(count(1), count(2), accepted).passes


PARAMS = [["'capped'", "'full'"], ["2", "4"]]


def test_figures_are_read_as_asv_kept_them(tmp_path: Path) -> None:
    keep(tmp_path, {BYTES: [1, 2, float("nan"), None]}, PARAMS)
    assert figures_of(COMMIT, "here", "shared", tmp_path) == {
        Name(BYTES, ("capped", "2")): 1,
        Name(BYTES, ("capped", "4")): 2,
        Name(BYTES, ("full", "4")): None,
    }
    assert not figures_of(COMMIT, "here", "virtualenv", tmp_path)
    assert not figures_of(COMMIT[::-1], "here", "shared", tmp_path)


def test_transports_lie_side_by_side(tmp_path: Path) -> None:
    keep(tmp_path, {BYTES: [1, 2, float("nan"), None], TIME: [0.5, 0.25, 1, 2]}, PARAMS)
    found = list(comparisons(figures_of(COMMIT, "here", "", tmp_path), described(tmp_path)))
    assert [comparison.benchmark for comparison in found] == [BYTES, TIME]
    assert found[0].names == ("world_size",)
    assert found[0].rows == {("2",): {"capped": 1}, ("4",): {"capped": 2, "full": None}}
    assert formatted(None, "bytes") == "failed"
    assert formatted(0.25, "seconds") == "250.00 ms"


def test_the_page_draws_a_curve_for_each_transport(tmp_path: Path) -> None:
    keep(tmp_path, {BYTES: [10, 20, 30, 30]}, PARAMS)
    written = page.make(COMMIT, "a < b", tmp_path / "site", tmp_path).read_text(encoding="utf-8")
    assert "a &lt; b" in written
    (curves,) = [
        each
        for comparison in comparisons(figures_of(COMMIT, "here", "", tmp_path), described(tmp_path))
        for each in page.curves_of(comparison)
    ]
    assert curves.points == {"capped": [(2.0, 10), (4.0, 20)], "full": [(2.0, 30), (4.0, 30)]}
    for transport in curves.points:
        assert f'id="{curves.name}-{transport}"' in written
    with pytest.raises(SystemExit, match="no figures"):
        page.make(COMMIT[::-1], "other", tmp_path / "site", tmp_path)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty repository, which is taken for this one."""
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    return tmp_path


def commit(repository: Path, message: str, file: str) -> None:
    path = repository / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(message)
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["add", "--all"], [*who, "commit", "--quiet", "--message", message]):
        subprocess.run(["git", *words], cwd=repository, check=True)


def test_nothing_is_compared_without_a_parent_or_a_difference(repository: Path) -> None:
    commit(repository, "first", "README.md")
    assert compare.reason_to_skip("HEAD^", counts=True) == "HEAD^ is not in this clone"
    commit(repository, "second", "packages/dion-core/pyproject.toml")
    assert compare.reason_to_skip("HEAD^", counts=True) == "HEAD^ has no packages"
    commit(repository, "third", "README.md")
    assert "differs" in str(compare.reason_to_skip("HEAD^", counts=True))
    assert compare.reason_to_skip("HEAD^", counts=False) is None
    commit(repository, "fourth", "packages/dion-core/pyproject.toml")
    assert compare.reason_to_skip("HEAD^", counts=True) is None


def test_rises_are_accepted_by_lines_of_commit_messages(repository: Path) -> None:
    commit(repository, f"first\n\nAccepted-rise: {BYTES}(full, *) because of before", "a")
    commit(repository, "second\n\nAccepted-rise: *(local, *) because it is wanted\nAccepted-rise: *\n", "b")
    commit(repository, "third", "c")
    assert compare.accepted_between("HEAD~2", "HEAD") == {"*(local, *)": "it is wanted"}


def test_what_is_compared_is_what_the_suite_imports() -> None:
    code = "import sys; import benchmarks.suite.bench_counts, benchmarks.suite.bench_steps; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    modules = {name.split(".")[1] for name in loaded.split() if name.startswith("benchmarks.")}
    assert modules == {name.removesuffix(".py") for name in compare.SUITE}


def test_asv_keeps_nothing_outside_the_checkout() -> None:
    home = {**os.environ, "HOME": "/nonexistent"}
    code = "import benchmarks.shared_environment, asv.machine as m; print(m.MachineCollection.get_machine_file_path())"
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=home, check=True, capture_output=True, text=True)
    assert Path(told.stdout.strip()) == ROOT / ".asv" / "machines.json"
