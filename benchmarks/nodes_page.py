"""Tables, pictures and the page docs/nodes.md of what `benchmarks.nodes` measured.

A row is one transport on one network at one rate: "measured" as `benchmarks.nodes.figures` makes it, "planned" as
`benchmarks.nodes_plan.Planned`. Rows follow each other by network, within it by rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from statistics import median
from textwrap import fill
from typing import Any

from benchmarks.deferral import markdown
from benchmarks.deferral_tables import Table
from benchmarks.nodes_text import PAGE
from benchmarks.pages import DOCS

Row = dict[str, Any]
ALIKE = 1.1
"""Steps that take at most so many times the fastest count as fast."""
LEAST, MOST = 0.8, 1.2
"""A wait counts as planned from so many times the first planned figure to so many times the second."""
FAST_MBIT = 10_000.0
"""Where links without a limit are drawn."""
ORDER = ("full", "capped", "uniform", "varlen", "local")


def rate_name(mbit: float | None) -> str:
    """A link's rate as text."""
    return "no limit" if mbit is None else f"{mbit:g} Mbit/s"


def network_name(row: Row) -> str:
    """Such as "W 4: 2 nodes x 2"."""
    return f"W {row['nodes'] * row['ranks_per_node']}: {row['nodes']} nodes x {row['ranks_per_node']}"


def tables(found: Row) -> list[Table]:
    """What the results say."""
    rows = found["rows"]
    by_network = [exchange_table(name, list(group)) for name, group in groupby(rows, network_name)]
    return [summary_table(rows), ratio_table(rows), *by_network, crossover_table(rows), bytes_table(rows)]


def _names(rows: Sequence[Row]) -> list[str]:
    """The transports, those of `ORDER` first."""
    names = list(dict.fromkeys(row["transport"] for row in rows))
    return sorted(names, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))


def planned_step(row: Row, rows: Sequence[Row]) -> float:
    """The planned wait, and what the ranks compute: as measured where links have no limit, since plans leave it out."""
    same = ("nodes", "ranks_per_node", "transport")
    free = [each for each in rows if each["mbit"] is None and all(each[key] == row[key] for key in same)]
    computing: float = (free or [row])[0]["measured"]["computing"]
    return computing + float(row["planned"]["exchange"])


def exchange_table(name: str, rows: Sequence[Row]) -> Table:
    """Of one network: by rate and transport, the wait measured and planned."""
    names = _names(rows)
    lines = []
    for mbit, group in groupby(rows, lambda row: row["mbit"]):
        of = {row["transport"]: row for row in group}
        lines.append([rate_name(mbit), *(_wait(of[each]) for each in names)])
    text = (
        "Milliseconds that a step of the optimizer waits for messages: measured, and in brackets planned, from both "
        "ways of a link used at once to one after the other."
    )
    return Table(name, text, ["link", *names], lines)


def _wait(row: Row) -> str:
    planned = [f"{1e3 * row['planned'][key]:.0f}" for key in ("exchange", "one_way")]
    return f"{1e3 * row['measured']['exchange']:.0f} ({' - '.join(dict.fromkeys(planned))})"


def ratio_table(rows: Sequence[Row]) -> Table:
    """By network and rate, measured over planned: the least, the median and the most of the transports."""
    rates = sorted({row["mbit"] for row in rows}, key=lambda mbit: -(mbit or float("inf")))
    lines = []
    for name, group in groupby(rows, network_name):
        ratios: dict[float | None, list[float]] = {}
        for row in group:
            ratios.setdefault(row["mbit"], []).append(row["measured"]["exchange"] / row["planned"]["exchange"])
        lines.append([name, *(_spread(ratios.get(mbit, [])) for mbit in rates)])
    text = (
        "The wait measured over the wait planned with both ways of a link used at once: the median of the transports, "
        "and in brackets the least and the most. From 1 to 2 is what gloo's order of the two ways explains."
    )
    return Table("Measured over planned", text, ["network", *map(rate_name, rates)], lines)


def _spread(ratios: Sequence[float]) -> str:
    return f"{median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})" if ratios else ""


def crossover_table(rows: Sequence[Row]) -> Table:
    """By network and rate, the step of full against the fastest, and which transports are as fast; planned too."""
    lines = []
    for name, of_network in groupby(rows, network_name):
        for mbit, group in groupby(of_network, lambda row: row["mbit"]):
            of = list(group)
            seen = {row["transport"]: float(row["measured"]["step"]) for row in of}
            planned = {row["transport"]: planned_step(row, rows) for row in of}
            steps = " / ".join(f"{1e3 * seen[each]:.0f}" for each in _names(of))
            ratios = [f"{steps_of['full'] / min(steps_of.values()):.2f}" for steps_of in (seen, planned)]
            lines.append([name, rate_name(mbit), steps, *ratios, _fast(seen), _fast(planned)])
    text = (
        f"The optimizer's step in ms, that of full over the fastest, and the transports that take at most {ALIKE:g} "
        "times the fastest. Planned is the planned wait and the computation as measured without a limit."
    )
    head = f"step ms ({' / '.join(_names(rows))})"
    columns = ["network", "link", head, "full / fastest", "planned", "fast", "planned"]
    return Table("Crossover: the whole step", text, columns, lines)


def _fast(steps: dict[str, float]) -> str:
    least = min(steps.values())
    names = [each for each in ORDER if steps.get(each, float("inf")) <= ALIKE * least]
    return "all" if len(names) == len(steps) else ", ".join(names)


def bytes_table(rows: Sequence[Row]) -> Table:
    """By network and transport, bytes of a step sent and planned, and what crossed the link."""
    slowest = min(row["mbit"] or float("inf") for row in rows if network_name(row) == network_name(rows[0]))
    lines = []
    for row in rows:
        if (row["mbit"] or float("inf")) != slowest:
            continue
        seen, planned = row["measured"], row["planned"]
        lines.append(
            [
                network_name(row),
                row["transport"],
                *(_kilobytes(each[key]) for key in ("in_node", "between") for each in (seen, planned)),
                _kilobytes(seen["link"]),
                f"{seen['link'] / seen['between_of_node'] - 1:.1%}",
                f"{seen['deferred']:.2%}",
            ]
        )
    text = (
        f"kB (1000 bytes) of a step at {rate_name(slowest)}: of the rank that sends most to others of its node and to "
        "other nodes, and of the node over its link, as its interface counts them: with scores, sums of rows, headers "
        "and acknowledgements, which are the overhead over the rows. Planned is a step whose rows lie evenly."
    )
    columns = ["network", "transport", "in node", "planned", "between", "planned", "over the link", "over rows"]
    return Table("Bytes", text, [*columns, "deferred"], lines)


def _kilobytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e3:.0f}"


def summary_table(rows: Sequence[Row]) -> Table:
    """By network, from which link on steps are shorter than those of full, and on which links waits are as planned."""
    names = [name for name in _names(rows) if name != "full"]
    lines = []
    for name, group in groupby(rows, network_name):
        of = list(group)
        cells = []
        for other in names:
            seen = _crossing(of, other, lambda row: float(row["measured"]["step"]))
            planned = _crossing(of, other, lambda row: planned_step(row, rows))
            cells.append(f"{seen} ({planned})")
        lines.append([name, *cells, _as_planned(of)])
    text = (
        "The fastest link from which on, down to the slowest, steps are shorter than those of full, and in brackets "
        f"the same of planned steps. Then by link how many waits are as planned: from {LEAST:g} times the planned "
        f"figure to {MOST:g} times the one planned for one way after the other."
    )
    return Table("Where full falls behind", text, ["network", *names, "waits as planned"], lines)


def _crossing(rows: Sequence[Row], other: str, step: Callable[[Row], float]) -> str:
    """The fastest link from which on, on slower ones too, the other transport's steps are shorter than full's."""
    found = "never"
    for mbit, group in reversed([(mbit, list(of)) for mbit, of in groupby(rows, lambda row: row["mbit"])]):
        steps = {row["transport"]: step(row) for row in group}
        if not {"full", other} <= set(steps) or steps["full"] <= steps[other]:
            break
        found = rate_name(mbit)
    return found


def _as_planned(rows: Sequence[Row]) -> str:
    """How many waits lie where the plan has them, by link."""
    found = []
    for mbit, group in groupby(rows, lambda row: row["mbit"]):
        of = list(group)
        hits = sum(
            LEAST * row["planned"]["exchange"] <= row["measured"]["exchange"] <= MOST * row["planned"]["one_way"]
            for row in of
        )
        found.append(f"{rate_name(mbit).removesuffix(' Mbit/s')}: {hits} of {len(of)}")
    return ", ".join(found)


def write_page(found: Row) -> None:
    """Writes docs/nodes.md and its pictures."""
    from benchmarks.nodes_pictures import draw

    draw(found["rows"], DOCS / "images")
    (DOCS / "nodes.md").write_text(page(found), encoding="utf-8")


def page(found: Row) -> str:
    """The page's text."""
    training = found["training"]
    how = (
        f"Measured on {found['machine']} shared by all ranks, torch {found['torch']}, {found['date'][:10]}; medians of "
        f"{training['num_steps']} steps after {training['warm_up']}, fraction {training['fraction']:g}. "
        + found.get("note", "")
    )
    return PAGE.replace("MEASURED", fill(how, 120)) + "\n".join(map(markdown, tables(found)))
