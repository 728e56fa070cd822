"""Several nodes on one machine, really communicating: `python -m benchmarks.nodes`.

Network namespaces joined by links of a given speed are the nodes; on each run one or two ranks of gloo, which train
the demo's model with every installed transport. Measured are the time that a step of the optimizer waits for messages,
the whole step and the bytes, and compared with what `dion plan` says of such links. Needs root, Linux and iproute2;
nothing is sent outside the namespaces, and they are removed at the end, however it comes. With --write the results are
kept under benchmarks/results/, beside those of networks, rates and transports that were not measured again, and
docs/nodes.md is written anew, with its pictures; --kept makes tables and page of results kept before.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.deferral import WIDTH, show
from benchmarks.namespaces import Link, Network, NetworkError, leave_on_sigterm
from benchmarks.nodes_page import rate_name, tables, write_page
from benchmarks.nodes_plan import machine_of, plan, question
from benchmarks.nodes_pool import Nodes, NodesError
from benchmarks.nodes_rank import Training
from dion_core import available_transports

RESULTS = Path(__file__).parent / "results"
NETWORKS = ((2, 1), (2, 2), (4, 1), (4, 2))
RATES = (None, 1000.0, 300.0, 100.0, 50.0, 20.0)
"""Mbit/s of a link, each way; None does not limit it."""
SLOWER = 5.0
"""One more where more than four ranks share the cores, whose computing takes as long as messages at the others."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What is to be measured.

    Attributes:
        networks: nodes, and ranks on each.
        rates: Mbit/s, or None for links without a limit; empty takes `RATES`, and `SLOWER` for more than four ranks.
        transports: by name.
        training: of each; the transport is set.
        answer_seconds: within which each training must be done.
        minutes: after which no further training starts.
    """

    networks: Sequence[tuple[int, int]] = NETWORKS
    rates: Sequence[float | None] = ()
    transports: Sequence[str] = ()
    training: Training = field(default_factory=lambda: Training("full"))
    answer_seconds: float = 180.0
    minutes: float = 60.0

    def rates_of(self, world_size: int) -> Sequence[float | None]:
        """The rates at which a network of so many ranks is measured."""
        return self.rates or (*RATES, *([SLOWER] if world_size > 4 else []))


def measured(request: Request) -> Iterator[Row]:
    """A row of results for every network, rate and transport, as it comes.

    Raises:
        NetworkError: such networks cannot be made here.
        NodesError: a rank failed or took too long, or all together did. No process and no namespace is left.
    """
    deadline = time.monotonic() + 60 * request.minutes
    for num_nodes, ranks_per_node in request.networks:
        asked = question(num_nodes, ranks_per_node, request.training.fraction)
        with (
            Network(num_nodes) as network,
            Nodes(network, num_nodes, ranks_per_node, seconds=request.answer_seconds) as nodes,
        ):
            machine = machine_of(nodes.ask("profile")[0])
            for rate in request.rates_of(nodes.world_size):
                link = Link(rate and 1e6 * rate)
                network.shape(link)
                for transport in request.transports:
                    if time.monotonic() > deadline:
                        raise NodesError(f"not done within {request.minutes:g} minutes")
                    answers = nodes.ask({**asdict(request.training), "transport": transport})
                    yield {
                        "nodes": num_nodes,
                        "ranks_per_node": ranks_per_node,
                        "mbit": rate,
                        "transport": transport,
                        "measured": figures(answers, ranks_per_node),
                        "planned": asdict(plan(asked, machine, transport, link)),
                    }


def figures(answers: Sequence[Row], ranks_per_node: int) -> Row:
    """What the ranks saw, as a row's "measured": medians over the steps.

    "exchange" is the time waited, the mean of the ranks. "step" is the slowest rank's, "computing" what a rank does
    besides waiting, the mean. Bytes are those of the rank, and for "link" of the node, that sends most; "deferred" is a
    part of the chosen rows.
    """
    by_step = list(zip(*(answer["steps"] for answer in answers), strict=True))
    waited = [statistics.mean(rank["waited"] for rank in ranks) for ranks in by_step]
    computing = [statistics.mean(rank["seconds"] - rank["waited"] for rank in ranks) for ranks in by_step]
    most = {
        name: statistics.median(max(rank[name] for rank in ranks) for ranks in by_step)
        for name in ("seconds", "in_node", "between", "link")
    }
    chosen = sum(answer["rows"]["chosen"] for answer in answers)
    return {
        "exchange": statistics.median(waited),
        "step": most["seconds"],
        "computing": statistics.median(computing),
        "in_node": most["in_node"],
        "between": most["between"],
        "between_of_node": statistics.median(max(_by_node(ranks, ranks_per_node)) for ranks in by_step),
        "link": most["link"],
        "deferred": sum(answer["rows"]["deferred"] for answer in answers) / chosen,
    }


def _by_node(ranks: Sequence[Row], ranks_per_node: int) -> list[int]:
    """Bytes of rows that every node sends to others in a step."""
    sent = [rank["between"] for rank in ranks]
    return [sum(sent[first : first + ranks_per_node]) for first in range(0, len(sent), ranks_per_node)]


def machine_name() -> str:
    """The processor and how many cores there are."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")
    return f"{model}, {os.cpu_count()} cores"


def results(request: Request, console: Console) -> Row:
    """All rows, with what they were measured on and how; every row is told when it is there."""
    rows = []
    for row in measured(request):
        rows.append(row)
        console.print(
            f"{row['nodes']} x {row['ranks_per_node']}, {rate_name(row['mbit'])}, {row['transport']}: "
            f"{1e3 * row['measured']['exchange']:.0f} ms, planned {1e3 * row['planned']['exchange']:.0f} to "
            f"{1e3 * row['planned']['one_way']:.0f}",
            highlight=False,
        )
    training = {key: value for key, value in asdict(request.training).items() if key not in ("transport", "weights")}
    return {
        "machine": machine_name(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "training": training,
        "rows": rows,
    }


def kept_file() -> Path:
    """Where the results of this machine are kept."""
    name = "".join(letter if letter.isalnum() else "-" for letter in machine_name()).replace("--", "-")
    return RESULTS / f"nodes-{name}.json"


def merged(found: Row, before: Row) -> Row:
    """The rows of both, of those that are in both the ones found now; `found` alone where it was measured otherwise."""
    if any(found[key] != before[key] for key in ("machine", "torch", "training")):
        return found
    rows = {_case(row): row for row in (*before["rows"], *found["rows"])}
    return {**found, "rows": [rows[case] for case in sorted(rows)]}


def _case(row: Row) -> tuple[int, int, float, str]:
    """Networks by their ranks, rates from the fastest."""
    return row["nodes"], row["ranks_per_node"], -(row["mbit"] or float("inf")), row["transport"]


def _networks(text: str) -> list[tuple[int, int]]:
    pairs = [each.split("x") for each in text.split(",")]
    networks = [(int(nodes), int(ranks)) for nodes, ranks in pairs]
    if any(not 2 <= nodes <= 16 or not 1 <= ranks <= 8 for nodes, ranks in networks):
        raise ValueError("2 to 16 nodes with 1 to 8 ranks each")
    return networks


def _rates(text: str) -> list[float | None]:
    rates = [None if each == "none" else float(each) for each in text.split(",")]
    if any(rate is not None and not 1 <= rate <= 100_000 for rate in rates):
        raise ValueError("1 to 100000 Mbit/s, or none")
    return rates


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    installed = ",".join(available_transports())
    parser.add_argument("--networks", type=_networks, default=NETWORKS, help="nodes x ranks on each (2x1,2x2,4x1,4x2)")
    parser.add_argument(
        "--rates",
        type=_rates,
        default=(),
        help='Mbit/s of a link, "none" for no limit (none,1000,300,100,50,20; 5 for W 8)',
    )
    parser.add_argument("--transports", default=installed, help="names with commas between (%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="that are measured, after two more (%(default)s)")
    parser.add_argument("--answer-seconds", type=float, default=180.0, help="a training may take (%(default)s)")
    parser.add_argument("--minutes", type=float, default=60.0, help="all may take (%(default)s)")
    parser.add_argument("--note", default="", help="kept with the results and shown with them")
    parser.add_argument("--kept", type=Path, help="results to show in place of measuring")
    parser.add_argument("--write", action="store_true", help="keep the results, and write docs/nodes.md")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, shows, and writes what was asked for; returns the exit code."""
    parser = _parser()
    given = parser.parse_args(arguments)
    request = Request(
        networks=given.networks,
        rates=given.rates,
        transports=tuple(given.transports.split(",")),
        training=Training("full", num_steps=given.steps),
        answer_seconds=given.answer_seconds,
        minutes=given.minutes,
    )
    if unknown := sorted(set(request.transports) - set(available_transports())):
        parser.error(f"--transports: not installed: {', '.join(unknown)}")
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    leave_on_sigterm()
    try:
        found = json.loads(given.kept.read_text(encoding="utf-8")) if given.kept else results(request, console)
    except (NetworkError, NodesError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: all ranks are ended and all namespaces removed", file=sys.stderr)
        return 128 + signal.SIGINT
    if given.note:
        found["note"] = given.note
    if given.write and not given.kept and kept_file().exists():
        found = merged(found, json.loads(kept_file().read_text(encoding="utf-8")))
    for table in tables(found):
        show(console, table)
    if given.write:
        (given.kept or kept_file()).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        write_page(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
