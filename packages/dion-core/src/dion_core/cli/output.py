"""Tables for people and JSON for programs, on stdout; progress and errors on stderr."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

WIDTH = 160
"""Of tables that go to a file or a pipe, where no terminal says how wide it is."""


def print_json(content: Any) -> None:
    """One JSON document."""
    typer.echo(json.dumps(content, indent=1))


def print_line(text: str = "") -> None:
    """A line as it is."""
    typer.echo(text)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table whose first column is to the left and the others to the right."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=WIDTH)
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A function that shows what is being done, where stderr is a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status("starting") as status:
        yield lambda text: status.update(text)


def fail(message: str, *, code: int = 1) -> NoReturn:
    """Ends the command with a message on stderr."""
    typer.echo(f"dion: {message}", err=True)
    raise typer.Exit(code)


def milliseconds(seconds: float) -> str:
    """Such as "16.3"."""
    return f"{1e3 * seconds:,.2f}" if seconds < 0.01 else f"{1e3 * seconds:,.1f}"


def megabytes(num_bytes: float) -> str:
    """In MB of 1e6 bytes."""
    return f"{num_bytes / 1e6:,.0f}" if num_bytes >= 10e6 or not num_bytes else f"{num_bytes / 1e6:,.2f}"
