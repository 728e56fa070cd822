"""The pictures of docs/nodes.md: waits by rate, whole steps by rate, and both by the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.nodes_page import FAST_MBIT, ORDER, Row, network_name, planned_step, rate_name

SHOWN = ("full", "capped", "varlen", "local")


def draw(rows: Sequence[Row], folder: Path) -> None:
    """Writes nodes-exchange.png, nodes-step.png and nodes-world.png."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = [row for row in rows if row["transport"] in SHOWN]
    _by_rate(shown, "wait for messages, ms", _waits).savefig(folder / "nodes-exchange.png", dpi=80)
    _by_rate(shown, "step of the optimizer, ms", _steps(rows)).savefig(folder / "nodes-step.png", dpi=80)
    _by_world(shown).savefig(folder / "nodes-world.png", dpi=80)


Panel = Callable[[Axes, str, Sequence[float], Sequence[Row]], None]
"""Draws one transport of one network: name, places on the axis of rates, rows by rate."""


def _by_rate(rows: Sequence[Row], what: str, panel: Panel) -> Figure:
    networks = [(name, list(group)) for name, group in groupby(rows, network_name)]
    figure = Figure(figsize=(10, 3.6 * ((len(networks) + 1) // 2)), layout="constrained")
    axes = figure.subplots((len(networks) + 1) // 2, 2, sharex=True, squeeze=False).flatten()
    for place, (name, of_network) in zip(axes, networks, strict=False):
        for transport in SHOWN:
            of = [row for row in of_network if row["transport"] == transport]
            panel(place, transport, [row["mbit"] or FAST_MBIT for row in of], of)
        ticks = sorted({row["mbit"] or FAST_MBIT for row in of_network})
        place.set(title=name, xscale="log", yscale="log", ylabel=what, xlabel="link, Mbit/s each way")
        place.set_xticks(ticks, ["no limit" if each == FAST_MBIT else f"{each:g}" for each in ticks], minor=False)
        place.minorticks_off()
        place.grid(visible=True, alpha=0.3)
    for unused in axes[len(networks) :]:
        unused.set_visible(False)
    axes[0].legend(fontsize="small")
    return figure


def _waits(place: Axes, transport: str, rates: Sequence[float], rows: Sequence[Row]) -> None:
    color = f"C{ORDER.index(transport)}"
    low, high = ([1e3 * row["planned"][key] for row in rows] for key in ("exchange", "one_way"))
    seen = [1e3 * row["measured"]["exchange"] for row in rows]
    place.plot(rates, low, "-", color=color, linewidth=1)
    place.fill_between(rates, low, high, color=color, alpha=0.12, linewidth=0)
    place.plot(rates, seen, "o", color=color, markersize=5, label=transport)


def _steps(rows: Sequence[Row]) -> Panel:
    def panel(place: Axes, transport: str, rates: Sequence[float], of: Sequence[Row]) -> None:
        color = f"C{ORDER.index(transport)}"
        place.plot(rates, [1e3 * planned_step(row, rows) for row in of], "-", color=color, linewidth=1)
        seen = [1e3 * row["measured"]["step"] for row in of]
        place.plot(rates, seen, "o", color=color, markersize=5, label=transport)

    return panel


def _by_world(rows: Sequence[Row]) -> Figure:
    """At the slowest rate and at one in the middle: waits by network, planned as lines."""
    of_networks = [{row["mbit"] for row in group if row["mbit"]} for _, group in groupby(rows, network_name)]
    rates = sorted(set.intersection(*of_networks))
    chosen = list(dict.fromkeys([rates[0], rates[len(rates) // 2]]))
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    places: Any = figure.subplots(1, len(chosen), squeeze=False).flatten()
    for place, mbit in zip(places, chosen, strict=True):
        for transport in SHOWN:
            of = [row for row in rows if row["mbit"] == mbit and row["transport"] == transport]
            names = [network_name(row).replace(": ", "\n") for row in of]
            _waits(place, transport, range(len(names)), of)
            place.set_xticks(range(len(names)), names, fontsize="small")
        place.set(title=f"links of {rate_name(mbit)}", ylabel="wait for messages, ms")
        place.set_ylim(bottom=0)
        place.grid(visible=True, alpha=0.3)
    places[0].legend(fontsize="small")
    return figure
