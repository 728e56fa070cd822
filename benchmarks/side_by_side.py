"""Lays the transports of one commit side by side, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.figures import Figures, Known, described

TRANSPORT = "transport"


@dataclass(frozen=True)
class Comparison:
    """The figures of one benchmark by transport.

    Attributes:
        benchmark: its name.
        unit: in what it counts.
        names: of the parameters besides the transport.
        transports: in the order of the columns.
        rows: by values of the other parameters, the figures by transport; None where one failed.
    """

    benchmark: str
    unit: str
    names: tuple[str, ...]
    transports: tuple[str, ...]
    rows: dict[tuple[str, ...], dict[str, float | None]]


def comparisons(figures: Figures, known: Known) -> Iterator[Comparison]:
    """Of every benchmark that has the transport among its parameters and was measured."""
    for benchmark in dict.fromkeys(name.benchmark for name in figures):
        about = known.get(benchmark, {})
        names: Sequence[str] = about.get("param_names", ())
        if TRANSPORT not in names:
            continue
        place = names.index(TRANSPORT)
        rows: dict[tuple[str, ...], dict[str, float | None]] = {}
        for name, value in figures.items():
            if name.benchmark == benchmark:
                others = (*name.parameters[:place], *name.parameters[place + 1 :])
                rows.setdefault(others, {})[name.parameters[place]] = value
        transports = dict.fromkeys(transport for by_transport in rows.values() for transport in by_transport)
        others = tuple(each for each in names if each != TRANSPORT)
        yield Comparison(benchmark, about.get("unit", ""), others, tuple(transports), rows)


def show(figures: Figures, console: Console) -> None:
    """Prints a table a benchmark."""
    for comparison in comparisons(figures, described()):
        table = Table(title=f"{comparison.benchmark} ({comparison.unit})", title_justify="left")
        for name in comparison.names:
            table.add_column(name)
        for transport in comparison.transports:
            table.add_column(transport, justify="right")
        for parameters, values in comparison.rows.items():
            cells = (formatted(values.get(each, "skipped"), comparison.unit) for each in comparison.transports)
            table.add_row(*parameters, *cells)
        console.print(table)


def formatted(value: float | str | None, unit: str) -> str:
    """A figure for a table: times in ms, counts with thousands separated."""
    if value is None:
        return "failed"
    if isinstance(value, str):
        return value
    return f"{value * 1e3:,.2f} ms" if unit == "seconds" else f"{value:,.0f}"
