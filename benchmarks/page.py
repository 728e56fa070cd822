"""The page that lays the transports of one commit side by side, made of what asv has kept of it.

For every machine with figures of the commit: pictures of what is sent, how long a step takes and how much is deferred,
by world size and by fraction, and a table of each benchmark. The page loads nothing from elsewhere.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from asv.machine import iter_machine_files
from matplotlib.figure import Figure

from benchmarks.figures import RESULTS, ROOT, Figures, Known, described, figures_of
from benchmarks.side_by_side import Comparison, comparisons, formatted

OUTPUT = ROOT / "build" / "site"
PICTURES = {"track_bytes": "bytes to other ranks", "time_step": "step, ms", "track_share_deferred": "deferred, %"}
"""By the end of a benchmark's name what a picture of it shows."""
AXES = {"world_size": "ranks", "fraction": "fraction"}
"""By parameter the title of the axis that it is drawn along."""
FACTORS = {"time_step": 1e3, "track_share_deferred": 100.0}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: .5rem 0 1.5rem } caption { text-align: left; font-weight: 600 }
td, th { padding: .15rem .7rem; border-bottom: 1px solid #ddd; text-align: right }
figure { display: inline-block; margin: 0 1rem 1rem 0; max-width: 29rem; vertical-align: top }
figcaption { font-size: .8rem; font-weight: 600 }
"""


@dataclass(frozen=True)
class Curves:
    """A picture: a curve for each transport.

    Attributes:
        name: of the picture, in the page.
        title: what else is fixed.
        along: a parameter of `AXES`.
        of: what is drawn.
        points: by transport (x, y), ascending.
    """

    name: str
    title: str
    along: str
    of: str
    points: dict[str, list[tuple[float, float]]]


def curves_of(comparison: Comparison) -> Iterator[Curves]:
    """The pictures of a benchmark: along each parameter of `AXES` that has several values, one for all others."""
    short = comparison.benchmark.rsplit(".", 1)[-1]
    if short not in PICTURES:
        return
    for along in AXES:
        if along not in comparison.names:
            continue
        place = comparison.names.index(along)
        for others in dict.fromkeys((*values[:place], *values[place + 1 :]) for values in comparison.rows):
            points = _points(comparison, place, others, FACTORS.get(short, 1.0))
            if max(map(len, points.values()), default=0) > 1:
                names = (*comparison.names[:place], *comparison.names[place + 1 :])
                title = ", ".join(f"{name} {value}" for name, value in zip(names, others, strict=True))
                name = re.sub(r"\W+", "-", f"{comparison.benchmark}-{along}-{'-'.join(others)}")
                yield Curves(name, f"{comparison.benchmark}: {title}", along, PICTURES[short], points)


def _points(
    comparison: Comparison, place: int, others: Sequence[str], factor: float
) -> dict[str, list[tuple[float, float]]]:
    points: dict[str, list[tuple[float, float]]] = {}
    for values, by_transport in comparison.rows.items():
        if (*values[:place], *values[place + 1 :]) == tuple(others):
            for transport, value in by_transport.items():
                if value is not None:
                    points.setdefault(transport, []).append((float(values[place]), factor * value))
    return {transport: sorted(of_transport) for transport, of_transport in points.items()}


def draw(curves: Curves) -> str:
    """The picture as an SVG element, in which the curve of a transport has the id `NAME-TRANSPORT`."""
    figure = Figure(figsize=(4.6, 3.2), layout="constrained")
    axes = figure.subplots()
    for transport, points in curves.points.items():
        (line,) = axes.plot(*zip(*points, strict=True), marker="o", markersize=3.5, label=transport)
        line.set_gid(f"{curves.name}-{transport}")
    axes.set_xscale("log", base=2)
    ticks = sorted({x for points in curves.points.values() for x, _ in points})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xlim(ticks[0] / 1.2, ticks[-1] * 1.2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(AXES[curves.along])
    axes.set_ylabel(curves.of)
    axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize="x-small")
    text = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": curves.name}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def section(machine: str, figures: Figures, known: Known) -> str:
    """The part of the page for one machine."""
    parts = [f"<h2>{html.escape(machine)}</h2>"]
    found = list(comparisons(figures, known))
    for picture in (each for comparison in found for each in curves_of(comparison)):
        caption = html.escape(picture.title)
        parts.append(f'<figure id="{picture.name}"><figcaption>{caption}</figcaption>{draw(picture)}</figure>')
    parts += [_table(comparison) for comparison in found]
    return "\n".join(parts)


def _table(comparison: Comparison) -> str:
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in (*comparison.names, *comparison.transports))
    rows = []
    for parameters, values in comparison.rows.items():
        cells = (formatted(values.get(each, "skipped"), comparison.unit) for each in comparison.transports)
        rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in (*parameters, *cells)) + "</tr>")
    caption = html.escape(f"{comparison.benchmark} ({comparison.unit})")
    return f"<table><caption>{caption}</caption><tr>{heads}</tr>{''.join(rows)}</table>"


def page(commit: str, subject: str, sections: Sequence[str]) -> str:
    """The whole page."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Transports side by side</title><style>{STYLE}</style>
<link rel="icon" href="data:,"></head><body><h1>Transports side by side</h1>
<p>Commit <code>{commit[:10]}</code>, {html.escape(subject)}. <a href="asv/index.html">All commits</a>.</p>
{"".join(sections)}</body></html>
"""


def make(commit: str, subject: str, output: Path, results: Path = RESULTS) -> Path:
    """Writes the page of a commit, and returns its path.

    Args:
        commit: its whole hash.
        subject: the first line of its message.
        output: the folder of the page.
        results: asv's folder of results.

    Raises:
        SystemExit: asv has kept nothing of it.
    """
    machines = [Path(file).parent.name for file in iter_machine_files(str(results))]
    by_machine = {machine: figures_of(commit, machine, "", results) for machine in sorted(machines)}
    known = described(results)
    sections = [section(machine, figures, known) for machine, figures in by_machine.items() if figures]
    if not sections:
        raise SystemExit(f"asv has kept no figures of {commit}: run asv first")
    output.mkdir(parents=True, exist_ok=True)
    path = output / "index.html"
    path.write_text(page(commit, subject, sections), encoding="utf-8")
    return path
