"""The commands of `dion`. Exit codes: 0 done, 1 something is missing or cannot be planned, 2 wrong usage."""

from __future__ import annotations

import typer

from dion_core.cli.bench import bench
from dion_core.cli.doctor import doctor
from dion_core.cli.plan import plan
from dion_core.cli.transports import transports

app = typer.Typer(
    name="dion",
    help="Plan, check and measure the Dion2, NorDion2, Muon and NorMuon optimizers of dion-core.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (transports, doctor, plan, bench):
    app.command()(command)
