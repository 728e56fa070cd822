"""Ranks in network namespaces over shaped links: the same steps, waits as planned, and nothing left behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks.namespaces import Link, Network, existing, reason_against
from benchmarks.nodes import figures
from benchmarks.nodes_plan import machine_of, plan, question
from benchmarks.nodes_pool import Nodes, NodesError
from benchmarks.nodes_rank import Training

pytestmark = pytest.mark.slow

SECONDS = 40.0
MBIT = 50.0
TRAININGS = {name: Training(name, num_steps=3, warm_up=1, weights=True) for name in ("full", "varlen")}
LEAST, MOST = 0.9, 2.3
"""The wait of full over the plan's. A wait for 1.3 MB at 50 Mbit/s is 0.22 s, beside which computing does not
count; gloo uses both ways of a link at once or one after the other, which is a factor of up to 2; the rest is its
handshakes."""


@pytest.fixture(scope="module", autouse=True)
def allowed() -> None:
    if reason := reason_against():
        pytest.skip(f"no network of namespaces can be made here: {reason}")


def mine() -> list[str]:
    """Namespaces that this process made."""
    return [name for name in existing() if f"-{os.getpid()}-" in name]


def trained(nodes: Nodes) -> dict[str, Sequence[dict[str, Any]]]:
    return {name: nodes.ask(asdict(training)) for name, training in TRAININGS.items()}


@pytest.fixture(scope="module")
def over_links(allowed: None) -> dict[str, Any]:
    """By transport what the ranks of two nodes answered, and the machine's profile; the links are slow."""
    with Network(2) as network, Nodes(network, 2, 1, seconds=SECONDS) as nodes:
        assert len(mine()) == 3
        profile = nodes.ask("profile")[0]
        network.shape(Link(1e6 * MBIT))
        answers = trained(nodes)
    assert mine() == []
    return {"profile": profile, **answers}


def test_weights_are_those_of_a_run_without_namespaces(over_links: dict[str, Any]) -> None:
    with Nodes(None, 2, 1, seconds=SECONDS) as nodes:
        without = trained(nodes)
    for name in TRAININGS:
        for rank in range(2):
            ours, theirs = over_links[name][rank], without[name][rank]
            assert len(ours["weights"]) > 20
            assert ours["weights"] == theirs["weights"]
            assert ours["loss"] == theirs["loss"]


def test_waits_are_those_planned_for_the_link(over_links: dict[str, Any]) -> None:
    machine, asked = machine_of(over_links["profile"]), question(2, 1, TRAININGS["full"].fraction)
    seen = {name: figures(over_links[name], 1) for name in TRAININGS}
    planned = {name: plan(asked, machine, name, Link(1e6 * MBIT)) for name in TRAININGS}
    assert [seen[name]["in_node"] for name in TRAININGS] == [0, 0]
    assert LEAST <= seen["full"]["exchange"] / planned["full"].exchange <= MOST
    # 655,360 elements of 4 bytes; each of two ranks holds half, and sends half of that to the other, and back.
    assert seen["full"]["between"] == planned["full"].between == 1_310_720
    assert seen["varlen"]["between"] == pytest.approx(planned["varlen"].between, rel=0.1)
    assert seen["full"]["exchange"] > 1.5 * seen["varlen"]["exchange"]  # of a quarter of the bytes


def test_what_is_sent_crosses_the_link(over_links: dict[str, Any]) -> None:
    """The interface counts the rows, and headers, scores and acknowledgements besides; no message takes another way."""
    for answers in (over_links[name] for name in TRAININGS):
        for answer in answers:
            assert all(1.03 < step["link"] / step["between"] < 1.25 for step in answer["steps"])


def ask_dying(seconds: float, *, kill: bool) -> list[subprocess.Popen[bytes]]:
    """The processes of two nodes that were asked for a profile and could not give one."""
    with Network(2) as network, Nodes(network, 2, 1, seconds=seconds) as nodes:
        processes = list(nodes._processes)
        if kill:
            processes[1].kill()
        with pytest.raises(NodesError, match="rank 1: ended" if kill else f"no answer within {seconds:g} s"):
            nodes.ask("profile")
    return processes


@pytest.mark.parametrize(("seconds", "kill"), [(SECONDS, True), (0.5, False)])
def test_ranks_that_die_or_are_late_end_all_and_leave_nothing(seconds: float, *, kill: bool) -> None:
    """In half a second torch is not imported."""
    assert all(process.returncode is not None for process in ask_dying(seconds, kill=kill))
    assert mine() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_process_that_is_ended_leaves_nothing(number: signal.Signals) -> None:
    """As the command does it, without torch. After SIGKILL the next network that is made removes what was left."""
    program = (
        "from benchmarks.namespaces import *\nimport time\nleave_on_sigterm()\n"
        "with Network(2):\n    print(flush=True)\n    time.sleep(60)"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        of_process = f"-{process.pid}-"
        assert sum(of_process in name for name in existing()) == 3
        process.send_signal(number)
        code = process.wait(SECONDS)
    if number == signal.SIGTERM:
        assert code == 128 + number
    if number == signal.SIGKILL:
        with Network(2):
            pass
    assert not [name for name in existing() if of_process in name]


def test_links_are_as_fast_as_set() -> None:
    """A plain connection over the link, without torch: 250 kB at 50 Mbit/s."""
    server = (
        "import socket,sys,time;s=socket.create_server(('',5000));print(flush=True);c,_=s.accept();c.recv(1);"
        "t=time.perf_counter();n=0\nwhile d:=c.recv(65536):n+=len(d)\nprint(n/(time.perf_counter()-t))"
    )
    client = "import socket,sys;s=socket.create_connection((sys.argv[1],5000));s.sendall(bytes(250001))"
    rates = []
    with Network(2) as network:
        network.shape(link := Link(1e6 * MBIT))
        for _ in range(3):
            with subprocess.Popen(
                [*network.enter(0), sys.executable, "-c", server], stdout=subprocess.PIPE, text=True
            ) as there:
                assert there.stdout is not None
                there.stdout.readline()
                arguments = [*network.enter(1), sys.executable, "-c", client, network.addresses[0]]
                subprocess.run(arguments, check=True, timeout=SECONDS)
                rates.append(float(there.stdout.read()))
    assert median(rates) == pytest.approx(link.payload(1), rel=0.15)
