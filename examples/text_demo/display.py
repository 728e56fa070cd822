"""What is seen on the terminal: a live progress bar, or plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from text_demo import results

LINES_A_RUN = 5


class Display:
    """Shows how far the runs are; a context manager, because a live display must give the terminal back."""

    def __init__(self, console: Console, num_runs: int, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps
        self._total = num_runs * num_steps
        self._done = 0
        self._start: float | None = None
        self._live = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[detail]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._all = self._live.add_task("all runs", total=self._total, detail="starting the ranks")
        self._current = self._live.add_task("", total=num_steps, detail="", visible=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, progress: results.Progress) -> None:
        """After a step."""
        self._start = self._start or time.monotonic()
        self._done += 1
        if self._console.is_terminal:
            self._live.update(self._all, completed=self._done, detail="")
            if progress.step == 1:  # the pace of the run before tells nothing about this one's
                self._live.reset(self._current, description=progress.run.name, visible=True)
            self._live.update(self._current, completed=progress.step, detail=f"loss {progress.loss:.3f}")
        elif progress.step == 1 or progress.step % max(1, self._num_steps // LINES_A_RUN) == 0:
            self._console.print(
                f"{progress.run.name:>8}  step {progress.step:4d}/{self._num_steps}  loss {progress.loss:.3f}"
                f"  ETA {self._remaining()}",
                highlight=False,
            )

    def _remaining(self) -> str:
        """From the pace since the first step, before which the ranks were starting."""
        if self._start is None or self._done < 2:
            return "?"
        seconds = (time.monotonic() - self._start) / (self._done - 1) * (self._total - self._done)
        return f"{seconds:.0f} s"

    def finish(self, result: results.RunResult) -> None:
        """After a run."""
        self._console.print(
            f"{result.run.name:>8}  done: validation {result.final_loss:.4f} nats ="
            f" {result.bits_per_byte:.3f} bits per byte",
            highlight=False,
        )


def print_table(console: Console, rows: Sequence[Sequence[str]], caption: str) -> None:
    """The runs side by side."""
    table = Table(box=box.SIMPLE_HEAVY, caption=caption, caption_justify="left")
    for index, column in enumerate(results.COLUMNS):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
