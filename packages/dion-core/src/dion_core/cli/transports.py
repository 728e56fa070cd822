"""`dion transports`: what is installed, and what each serves; and groups of ranks beside torch.distributed."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any

import torch
import typer

from dion_core.cli.output import fail, print_json, print_line, print_table
from dion_core.collectives import SoloGroup
from dion_core.groups import ENTRY_POINT_GROUP as GROUPS
from dion_core.layout import Axis, split_layout
from dion_core.registry import ENTRY_POINT_GROUP, available_transports
from dion_core.transport import Bucket, Transport, TransportError


def transports(as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False) -> None:
    """List the installed transports: scopes, layouts, host reads, whether rows may be deferred, version; and groups."""
    try:
        rows = described()
    except TransportError as error:
        fail(str(error))
    if as_json:
        print_json({"transports": rows, "groups": installed_groups()})
    elif not rows:
        fail("no transport is installed: pip install dion-comm-capped dion-comm-varlen dion-comm-nccl")
    else:
        columns = ("name", "scopes (default first)", "layouts", "host reads a step", "may defer", "package", "version")
        cells = [
            (
                row["name"],
                ", ".join(row["scopes"]),
                ", ".join(row["layouts"]),
                str(row["host_reads_per_step"]),
                "yes" if row["may_defer"] else "no",
                row["package"],
                row["version"],
            )
            for row in rows
        ]
        print_table("", columns, cells)
        if groups := installed_groups():
            print_line()
            table = [(each["name"], each["package"], each["version"]) for each in groups]
            print_line("groups of ranks beside torch.distributed:")
            print_table("", ("name", "package", "version"), table)
    if not rows:
        raise typer.Exit(1)


def installed_groups() -> list[dict[str, str]]:
    """Every installed group of ranks, by name. None is loaded: that starts MPI."""
    found = sorted(entry_points(group=GROUPS), key=lambda entry: entry.name)
    return [{"name": entry.name, **dict(zip(("package", "version"), _source(entry), strict=True))} for entry in found]


def _source(entry: EntryPoint) -> tuple[str, str]:
    return (entry.dist.name, entry.dist.version) if entry.dist is not None else ("unknown", "unknown")


def described() -> list[dict[str, Any]]:
    """Every installed transport, by name.

    Raises:
        TransportError: one cannot be loaded.
    """
    packages = {entry.name: _source(entry) for entry in entry_points(group=ENTRY_POINT_GROUP)}
    rows = []
    for name, kind in available_transports().items():
        package, version = packages[name]
        others = sorted(kind.scopes - {kind.default_scope})
        rows.append(
            {
                "name": name,
                "scopes": [kind.default_scope, *others],
                "layouts": sorted(str(axis) for axis in kind.axes),
                "host_reads_per_step": host_reads(kind()),
                "may_defer": kind.may_defer,
                "package": package,
                "version": version,
            }
        )
    return rows


def host_reads(transport: Transport) -> int:
    """How often a step with row-split matrices waits for the device, as the opened transport says it."""
    layout = split_layout(SoloGroup(0, 2, (0, 1)), Axis.ROWS, (4, 2))
    bucket = Bucket(
        layout=layout,
        owners=(0,),
        max_rows=1,
        total_rows=1,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        name="a small bucket",
    )
    return transport.open([bucket]).host_reads
