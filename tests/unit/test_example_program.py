"""The example is short, and the slow tests run it: it trains, reports, and leaves no process behind."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))  # as Python does for a program that lies there

from text_demo.settings import Settings  # noqa: E402
from text_demo.text import load_text, unigram_entropy  # noqa: E402

PROGRAM = EXAMPLES / "train_text.py"
TIME_LIMIT = 110  # seconds for a slow test's program, below pytest's own limit


def test_example_is_short_enough_to_read() -> None:
    assert len(PROGRAM.read_text().splitlines()) < 200
    for path in (EXAMPLES / "text_demo").glob("*.py"):
        assert len(path.read_text().splitlines()) < 200, path.name


@contextmanager
def running(out: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The program in a session, and so a process group, of its own; ended with all its processes at the end."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    process = subprocess.Popen(
        [sys.executable, str(PROGRAM), "--world-size", "2", "--out", str(out), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if living(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def living(group: int) -> list[int]:
    """The ids of the processes of a group that still run; one that only waits to be collected does not."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, _, process_group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:  # ended meanwhile
            continue
        if int(process_group) == group and state not in "ZX":
            found.append(int(entry.name))
    return found


def ranks_of(group: int) -> list[int]:
    """The ids of a running program's ranks."""
    return [pid for pid in living(group) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def wait_for_step(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if " step " in line:
            return
    pytest.fail(f"the program ended before its first step: {process.communicate()[1]}")


def wait_until_gone(group: int) -> None:
    deadline = time.monotonic() + 10
    while living(group):
        assert time.monotonic() < deadline, f"still running: {living(group)}"
        time.sleep(0.05)


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


@pytest.mark.slow
@needs_proc
def test_program_trains_and_reports(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_bytes(load_text()[:60_000])
    with running(tmp_path, "--steps", "4", "--transports", "full,local", "--text", str(text)) as process:
        output, errors = process.communicate(timeout=TIME_LIMIT)
        assert process.returncode == 0, errors
        assert errors == ""
        wait_until_gone(process.pid)
    numbers = json.loads((tmp_path / "report.json").read_text())
    runs = {run["name"]: run for run in numbers["runs"]}
    assert list(runs) == ["full", "local", "AdamW"]
    corpus = Settings(text=text).corpus()
    assert numbers["unigram_bits_per_byte"] == unigram_entropy(corpus.validation)
    for run in runs.values():
        assert len(run["training_curve"]) == 4
        assert run["training_curve"][0] == pytest.approx(math.log(256), abs=1e-4)  # of the common start
        assert run["training_curve"][3] < run["training_curve"][0]
        assert run["validation_bits_per_byte"] == pytest.approx(run["validation_nats"] / math.log(2))
        assert f"{run['validation_nats']:.4f}" in output
        assert 0 < run["optimizer_ms"] < run["step_ms"]
    # Four layers, each of four 128 x 128, one 384 x 128 and one 128 x 384 matrix; a quarter of the rows.
    for name in ("full", "local"):
        assert runs[name]["rows_applied_per_step"] == 4 * (4 * 32 + 96 + 32)
        assert runs[name]["rows_deferred_per_step"] == 0
    assert runs["full"]["bytes_per_step"] == 4 * runs["local"]["bytes_per_step"]
    assert runs["AdamW"]["bytes_per_step"] == runs["AdamW"]["rows_applied_per_step"] == 0
    assert (tmp_path / "report.html").exists()


@pytest.mark.slow
@needs_proc
def test_interrupt_ends_all_ranks(tmp_path: Path) -> None:
    with running(tmp_path, "--steps", "1000", "--transports", "full") as process:
        wait_for_step(process)
        assert len(ranks_of(process.pid)) == 2
        os.killpg(process.pid, signal.SIGINT)  # to parent and ranks at once, as a terminal does
        output, errors = process.communicate(timeout=20)
        assert process.returncode == 130
        assert "interrupted" in output
        assert errors == ""
        wait_until_gone(process.pid)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@needs_proc
def test_program_that_is_killed_takes_its_ranks_with_it(tmp_path: Path) -> None:
    with running(tmp_path, "--steps", "1000", "--transports", "full") as process:
        wait_for_step(process)
        process.kill()
        wait_until_gone(process.pid)


@pytest.mark.slow
@needs_proc
def test_a_rank_that_dies_ends_the_program(tmp_path: Path) -> None:
    with running(tmp_path, "--steps", "1000", "--transports", "full") as process:
        wait_for_step(process)
        victim = ranks_of(process.pid)[0]
        os.kill(victim, signal.SIGKILL)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 1
        assert "died with exit code -9" in errors
        wait_until_gone(process.pid)


@pytest.mark.slow
@needs_proc
def test_a_rank_that_raises_ends_the_program(tmp_path: Path) -> None:
    with running(tmp_path, "--steps", "4", "--fraction", "2") as process:
        _, errors = process.communicate(timeout=TIME_LIMIT)
        assert process.returncode == 1
        assert "fraction=2.0" in errors
        assert errors.count("Traceback") == 1
        wait_until_gone(process.pid)
