"""What benchmarks of steps measure, in a pool and through a launcher, against the plan of a step and what it sends."""

import os
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from benchmarks import launched, stepping, worlds
from benchmarks.exchanging import time_exchange
from benchmarks.stepping import COUNTED, TIMED, Cell, Running, count_memory, count_traffic, time_step
from dion_core.collectives import observe
from dion_core.registry import available_transports
from dion_core.testing.ranks import pool

FIGURES = {"bytes", "collectives", "host_reads", "deferred", "chosen"}


def one_step(cell: Cell) -> tuple[int, int, int, int, float]:
    """Of this rank: bytes to others as planned, by all-to-all, and by all collectives; collectives; rows chosen."""
    running = Running(cell, stepping._mesh(cell, "cpu"))
    running.steps(2)
    running.optimizer.report()
    running.renew()
    with observe() as calls:
        running.step()
    report, rank = running.optimizer.report(), dist.get_rank()
    ways = [each["traffic"][way] for each in report["buckets"] for way in ("forward", "back")]
    planned = sum(sum(way) - way[rank] for way in ways)
    sent = [(call.name, sum(call.sent) - call.sent[rank]) for call in calls]
    moved = sum(num_bytes for name, num_bytes in sent if name == "all_to_all")
    return planned, moved, sum(num_bytes for _, num_bytes in sent), len(calls), report["rows"]["chosen"]


@pytest.mark.parametrize("transport", ["full", "local"])
def test_figures_are_what_a_step_of_static_sizes_sends(transport: str) -> None:
    cell = Cell(transport, "uneven", 2, 0.25)
    counted = pool(2).run(count_traffic, cell, "cpu")
    assert counted[0] == counted[1]
    assert counted[0].keys() == FIGURES
    planned, moved, sent, calls, chosen = zip(*pool(2).run(one_step, cell), strict=True)
    assert moved == planned
    assert counted[0]["bytes"] == max(sent) > max(planned) > 0.9 * max(sent)  # scores and sums are little
    assert counted[0]["collectives"] == calls[0]
    assert counted[0]["chosen"] == COUNTED * sum(chosen)
    assert counted[0]["deferred"] == counted[0]["host_reads"] == 0


@pytest.mark.slow
def test_counts_are_alike_in_every_run() -> None:
    cell = Cell("capped", "tiny", 4, 0.25)
    first, again = (pool(4).run(count_traffic, cell, "cpu")[0] for _ in range(2))
    assert first == again
    assert first["deferred"] > 0  # or the benchmark says nothing about deferral
    cells = [Cell(name, "tiny", 4, 0.25) for name in ("capped", "uniform")]
    measured, again = (worlds.in_loopback(count_memory, cells, "cpu") for _ in range(2))
    assert measured == again
    assert all(figures["allocations"] > 0 and figures["workspace"] > 0 for figures in measured.values())


@pytest.mark.parametrize("transport", list(available_transports()))
def test_steps_and_exchanges_are_timed(transport: str) -> None:
    cell = Cell(transport, "uneven", 2, 0.25)
    for measurement in (time_step, time_exchange):
        of_one, of_other = pool(2).run(measurement, cell, "cpu")
        assert of_one == of_other  # of the slowest rank
        assert len(of_one["seconds"]) == TIMED
        assert min(of_one["seconds"]) > 0


@pytest.mark.slow
def test_a_cell_that_fails_leaves_the_others() -> None:
    good, bad = Cell("full", "tiny", 2, 0.25), Cell("no such transport", "tiny", 2, 0.25)
    measured = worlds.in_pool(count_traffic, [bad, good], "cpu")
    assert measured[good.key].keys() == FIGURES
    assert "no such transport" in measured[bad.key]["error"]
    assert "no such transport" in worlds.in_loopback(count_memory, [bad], "cpu")[bad.key]["error"]


@pytest.mark.slow
def test_a_launcher_measures_what_the_pool_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert worlds.launchers() == []
    monkeypatch.setenv(worlds.LAUNCHER, "torchrun --standalone --nproc-per-node 2;\n")
    cells = [Cell("capped", "tiny", world_size, 0.25) for world_size in (2, 4)]
    measured = worlds.everywhere(count_traffic, [*cells, Cell("capped", "1b", 2, 0.25)])
    assert measured == {cells[0].key: pool(2).run(count_traffic, cells[0], "cpu")[0]}
    monkeypatch.setenv(worlds.LAUNCHER, "false")
    with pytest.raises(RuntimeError, match="no report"):
        worlds.everywhere(count_traffic, cells)


FAULTY = """
from dataclasses import dataclass
from dion_comm_varlen import Varlen

@dataclass(frozen=True)
class Faulty(Varlen):
    def open(self, buckets):
        if buckets[0].group.rank == 1:
            raise RuntimeError("rank 1 has no such thing")
        return super().open(buckets)
"""


@pytest.mark.slow
def test_a_launcher_goes_on_after_a_cell_that_fails_on_one_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The rank that fails leaves the other one waiting, which must not take as long as a collective may."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    metadata = tmp_path / "faulty-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[dion.transports]\nfaulty = faulty:Faulty\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(worlds.LAUNCHER, "torchrun --standalone --nproc-per-node 2")
    first, bad, last = (Cell(name, "tiny", 2, 0.25) for name in ("full", "faulty", "local"))
    started = time.monotonic()
    measured = worlds.everywhere(count_traffic, [first, bad, last])
    assert list(measured) == [first.key, bad.key, last.key]
    assert measured[first.key].keys() == measured[last.key].keys() == FIGURES
    assert "rank 1 has no such thing" in measured[bad.key]["error"]
    assert time.monotonic() - started < launched.COLLECTIVE_SECONDS
