"""What the command of the nodes computes, and that it says why it cannot run; the page is what it would write."""

import json
import os
from pathlib import Path

import pytest

from benchmarks import namespaces, nodes
from benchmarks.namespaces import Link, Network, NetworkError, reason_against
from benchmarks.nodes import RESULTS, figures, main, merged
from benchmarks.nodes_page import page
from benchmarks.nodes_plan import plan, question, shaped
from benchmarks.pages import DOCS
from dion_core.prediction.machine import Machine

MACHINE = Machine("", 1e10, ((64, 1e10),), ((1, 1e9),), ((1e4, 1e6), (1e6, 1e9)), latency=1e-4, host_read=0.0)
NODES_OF_ONE = 1514 / 1448
"""Bytes on the link a byte of a message."""


def step(waited: float, *, seconds: float = 1.0, between: int = 0, link: int = 0) -> dict[str, float]:
    return {
        "seconds": seconds, "waited": waited, "in_node": 0, "between": between, "link": link,
    }  # fmt: skip


def answered(*steps: dict[str, float], deferred: int = 0) -> dict[str, object]:
    return {"steps": steps, "rows": {"chosen": 50, "deferred": deferred}}


def test_the_page_is_that_of_the_results_kept() -> None:
    [kept] = RESULTS.glob("nodes-*.json")
    assert (DOCS / "nodes.md").read_text(encoding="utf-8") == page(json.loads(kept.read_text(encoding="utf-8")))


def test_a_link_is_shared_by_the_ranks_of_a_node() -> None:
    assert Link(8e6).payload(1) == pytest.approx(1e6 / NODES_OF_ONE)
    assert Link(8e6).payload(2) == pytest.approx(0.5e6 / NODES_OF_ONE)
    assert Link().payload(2) == float("inf")


def test_a_shaped_machine_is_limited_where_messages_were_faster() -> None:
    slow = shaped(MACHINE, Link(80e6), 1, slower=2)
    assert slow.between == ((1e4, 1e6), (1e6, pytest.approx(5e6 / NODES_OF_ONE)))
    assert slow.latency == MACHINE.latency
    assert slow.in_node == MACHINE.in_node


def test_plans_of_a_slow_link_are_bytes_over_its_rate() -> None:
    """full at W 2: 1,310,720 bytes of rows, 16,384 of scores and 8,192 of sums a rank, at 0.1 Mbit/s."""
    planned = plan(question(2, 1, 0.25), MACHINE, "full", Link(1e5))
    assert planned.between == 1_310_720
    assert planned.exchange == pytest.approx((1_310_720 + 16_384 + 8_192) / (1e5 / 8) * NODES_OF_ONE, rel=0.01)
    assert planned.one_way == pytest.approx(2 * planned.exchange, rel=0.02)
    inside = plan(question(2, 2, 0.25), MACHINE, "full", Link(1e5))
    assert inside.between == 2 * inside.in_node


def test_figures_are_medians_of_steps_over_ranks() -> None:
    """Two nodes of two ranks, three steps; waits 1, 2, 3 of the first rank and 0 of three others."""
    first = answered(*(step(waited, between=10, link=99) for waited in (1.0, 2.0, 3.0)), deferred=10)
    other = answered(*(step(0.0, seconds=2.0, between=20) for _ in range(3)))
    found = figures([first, other, other, answered(*(step(0.0, between=25) for _ in range(3)))], 2)
    assert found["exchange"] == 0.5
    assert (found["step"], found["computing"]) == (2.0, 1.0)
    assert (found["between"], found["between_of_node"], found["link"]) == (25, 45, 99)
    assert found["deferred"] == 10 / 200


def result(rows: list[dict[str, object]], *, torch: str = "2") -> dict[str, object]:
    return {"machine": "m", "torch": torch, "training": {}, "rows": rows, "date": torch}


def row(mbit: float | None, transport: str, exchange: float) -> dict[str, object]:
    return {"nodes": 2, "ranks_per_node": 1, "mbit": mbit, "transport": transport, "measured": exchange}


def test_results_are_added_to_those_kept_by_what_they_are_of() -> None:
    kept = result([row(None, "full", 1.0), row(20.0, "full", 2.0), row(20.0, "local", 3.0)])
    anew = result([row(20.0, "full", 4.0), row(100.0, "full", 5.0)])
    both = merged(anew, kept)["rows"]
    assert [(each["mbit"], each["measured"]) for each in both] == [(None, 1.0), (100.0, 5.0), (20.0, 4.0), (20.0, 3.0)]
    assert merged(result([], torch="3"), kept)["rows"] == []


def test_without_root_the_reason_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[str] = []
    monkeypatch.setattr(nodes, "leave_on_sigterm", lambda: calls.append("leaves"))
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert reason_against() == "network namespaces need root"
    assert main(["--networks", "2x1", "--rates", "20"]) == 1
    assert calls == ["leaves"]
    assert "need root" in capsys.readouterr().err


def test_without_iproute2_the_reason_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces.shutil, "which", lambda program: None)
    assert reason_against() == "the program ip is missing (package iproute2)"


def test_a_kernel_that_refuses_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Programs that note what they are asked, of which ip cannot make a bridge."""
    notes = tmp_path / "notes"
    for name in ("ip", "tc"):
        program = tmp_path / name
        program.write_text(
            f'#!/bin/sh\nprintf "%s\\n" "$*" >> {notes}\n'
            'case "$*" in *"type bridge"*) echo no bridges >&2; exit 2;; esac\n'
        )
        program.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    network = Network(2)
    with pytest.raises(NetworkError, match="link add bridge type bridge: no bridges"), network:
        pytest.fail("nothing was made")
    done = notes.read_text().splitlines()
    for name in (network.switch, *network.nodes):
        assert f"netns add {name}" in done
        assert f"netns delete {name}" in done


def test_namespaces_of_dead_processes_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    removed = []
    names = [f"dion-nodes-{os.getpid()}-0-1", "dion-nodes-4194305-0-switch"]  # no process has a number above 2^22
    monkeypatch.setattr(namespaces, "existing", lambda: names)
    monkeypatch.setattr(namespaces, "_call", lambda *command, check: removed.append(command[-1]))
    namespaces.remove_leftovers()
    assert removed == ["dion-nodes-4194305-0-switch"]


@pytest.mark.parametrize(
    "arguments", [["--networks", "1x1"], ["--networks", "two"], ["--rates", "0"], ["--transports", "pigeon"]]
)
def test_wrong_usage_ends_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        nodes.main(arguments)
    assert ended.value.code == 2
