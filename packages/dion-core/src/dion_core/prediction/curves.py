"""The curves of a sweep as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dion_core.prediction.comparison import Answer, Comparison


def draw(points: Sequence[tuple[int, Comparison]], path: Path) -> None:
    """Writes a picture with the predicted step and the bytes of the busiest rank over the number of ranks.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("drawing needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    for name in dict.fromkeys(each.transport for _, comparison in points for each in comparison.answers):
        served = [(world_size, found) for world_size, c in points if (found := _served(c, name)) is not None]
        worlds = [world_size for world_size, _ in served]
        left.plot(worlds, [1e3 * found.times.step for _, found in served if found.times], marker=".", label=name)
        right.plot(worlds, [found.sent.total / 1e6 for _, found in served], marker=".", label=name)
    for axes, what in ((left, "predicted ms a step"), (right, "MB sent by the busiest rank")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("ranks")
        axes.set_ylabel(what)
        axes.grid(visible=True, which="both", alpha=0.3)
    left.legend()
    figure.savefig(path, dpi=120, format="png")


def _served(comparison: Comparison, name: str) -> Answer | None:
    return next((each for each in comparison.answers if each.transport == name and not each.refused), None)
