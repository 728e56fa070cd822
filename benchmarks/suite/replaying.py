"""How benchmarks of asv take figures that were measured for all of their parameters at once.

Starting ranks takes seconds, so the ranks of a world are started once for all cells, in `setup_cache`, which asv calls
once a commit. A `track_` benchmark then picks its figure, and a `time_` benchmark replays the seconds of its cell on a
clock of its own, from which asv takes the time of a call. Names begin with an underscore so that asv finds no benchmark
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.stepping import TIMED, Figures, key
from benchmarks.worlds import Measured
from dion_core.registry import available_transports

TRANSPORTS = tuple(available_transports())
"""The parameter of every benchmark that sends: what is installed in the environment of the commit."""
SECONDS = 1200


class Clock:
    """A timer that shows what was measured, not what passes."""

    def __init__(self) -> None:
        self._now = 0.0

    def advance(self, seconds: float) -> None:
        """So much was measured."""
        self._now += seconds

    def __call__(self) -> float:
        return self._now


def figures_of(measured: Measured, parameters: Sequence[object]) -> Figures:
    """The figures of one cell.

    Raises:
        NotImplementedError: the cell cannot be measured here, which asv shows as skipped.
        RuntimeError: measuring it failed.
    """
    found = measured.get(key(*parameters))
    if found is None:
        raise NotImplementedError("cannot be measured here")
    if "error" in found:
        raise RuntimeError(found["error"])
    return found


class _Replayed:
    """Benchmarks whose figures `setup_cache` has measured; its result comes first in every call."""

    timeout = SECONDS
    param_names = ("transport", "inventory", "world_size", "fraction")
    figures: Figures

    def setup(self, measured: Measured, *parameters: Any) -> None:
        self.figures = figures_of(measured, parameters)


class _Timed(_Replayed):
    """Benchmarks that replay their seconds, each once."""

    number, repeat, rounds, warmup_time = 1, TIMED, 1, 0
    timer = Clock()
    _replayed = 0

    def replay(self) -> None:
        """The next of the seconds that were measured."""
        seconds = self.figures["seconds"]
        self.timer.advance(seconds[self._replayed % len(seconds)])
        self._replayed += 1


def unit(name: str) -> Any:
    """Says in what a `track_` benchmark counts."""

    def mark(function: Any) -> Any:
        function.unit = name
        return function

    return mark
