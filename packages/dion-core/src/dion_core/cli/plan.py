"""`dion plan`: what a step would send, hold and take with every installed transport, without machine or model."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from dion_core.cli.options import command
from dion_core.cli.output import fail, print_json, progress
from dion_core.cli.planned import (
    amdahl_json,
    comparison_json,
    print_amdahl,
    print_comparison,
    print_sweep,
    sweep_json,
)
from dion_core.options import check_options
from dion_core.prediction.blocks import block_answers
from dion_core.prediction.comparison import Comparison, compare
from dion_core.prediction.curves import draw
from dion_core.prediction.machine import H200, Machine, load
from dion_core.prediction.meshes import MeshShape
from dion_core.prediction.models import ModelError, groups_of
from dion_core.prediction.scaling import LARGEST_WORLD, amdahl, sweep
from dion_core.prediction.traffic import Question
from dion_core.registry import available_transports
from dion_core.transport import TransportError


class OptimizerName(StrEnum):
    """The optimizers by lower-case name."""

    MUON = "muon"
    NORMUON = "normuon"
    DION2 = "dion2"
    NORDION2 = "nordion2"


class ScopeName(StrEnum):
    """Among which rows the strongest are sought."""

    ALL = "all"
    LOCAL = "local"
    GLOBAL = "global"


class DtypeName(StrEnum):
    """Of parameters, gradients and state."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class Axis(StrEnum):
    """What a sweep goes over."""

    WORLD = "world"


GIGA = 1e9


@dataclass(frozen=True)
class PlanOptions:
    """Options of `dion plan`."""

    model: Annotated[
        str, typer.Argument(help="an inventory (5120x8, 1b, 14b), a Hugging Face config.json, or module:function")
    ]
    nodes: Annotated[int, typer.Option(min=1, help="nodes")] = 1
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs, hence ranks, of each node")] = 8
    shard: Annotated[int | None, typer.Option(min=1, help="ranks that split the rows (FSDP2); default: all")] = None
    replicate: Annotated[int | None, typer.Option(min=1, help="ranks with equal copies (DDP, HSDP)")] = None
    tensor: Annotated[int | None, typer.Option(min=1, help="ranks of tensor parallelism")] = None
    optimizer: Annotated[OptimizerName, typer.Option(help="which one")] = OptimizerName.NORDION2
    fraction: Annotated[float, typer.Option(help="of the rows, for dion2 and nordion2")] = 0.25
    scope: Annotated[ScopeName | None, typer.Option(help="default: that of each transport")] = None
    dtype: Annotated[DtypeName, typer.Option(help="of parameters, gradients and state")] = DtypeName.BFLOAT16
    transport: Annotated[list[str] | None, typer.Option(help="only this one; may be repeated")] = None
    machine: Annotated[Path | None, typer.Option(help="profile written by dion bench; default: an H200")] = None
    in_node: Annotated[float | None, typer.Option(help="GB/s that a rank sends inside its node")] = None
    between: Annotated[float | None, typer.Option(help="GB/s that a rank sends to other nodes")] = None
    link: Annotated[float | None, typer.Option(help="GB/s of all that a rank sends, to itself too")] = None
    blocks: Annotated[bool, typer.Option("--blocks", help="owners by blocks of each shape, as others assign")] = False
    show_amdahl: Annotated[bool, typer.Option("--amdahl", help="work by what it scales with")] = False
    over: Annotated[Axis | None, typer.Option("--sweep", help="curves over the number of ranks")] = None
    largest: Annotated[int, typer.Option(min=2, help="the sweep's last number of ranks")] = LARGEST_WORLD
    png: Annotated[Path | None, typer.Option(help="draw the sweep there (needs matplotlib)")] = None
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False


@command(PlanOptions)
def plan(options: PlanOptions) -> None:
    """Plan a step: bytes by link, workspace, Newton-Schulz and predicted time of every installed transport.

    The plan is made by the code that the optimizers run, of shapes alone. Times are predicted from a machine profile.
    """
    try:
        question, machine = _question(options), _machine(options)
    except (ModelError, ValueError) as error:
        fail(str(error), code=2)
    try:
        with progress() as show:
            if options.over is not None:
                given = _transports(options)
                points = sweep(question, machine, largest=options.largest, transports=given, progress=show)
                if options.png is not None:
                    draw(points, options.png)
                content: Any = sweep_json(points) if options.as_json else None
            elif options.show_amdahl:
                table = amdahl(question, machine, _one(options))
                content = amdahl_json(table) if options.as_json else None
            else:
                comparison = _compared(question, machine, options, show)
                content = comparison_json(comparison) if options.as_json else None
    except (ValueError, TransportError) as error:
        fail(str(error))
    if content is not None:
        print_json({**_asked(question, machine, options), **content})
    elif options.over is not None:
        print_sweep(points)
    elif options.show_amdahl:
        print_amdahl(table, _one(options), question, machine)
    else:
        print_comparison(comparison, question, machine)
    if not options.show_amdahl and options.over is None and all(each.refused for each in comparison.answers):
        raise typer.Exit(1)


def _question(options: PlanOptions) -> Question:
    mesh = MeshShape.of(
        options.nodes,
        options.gpus_per_node,
        replicate=options.replicate,
        shard=options.shard,
        tensor=options.tensor,
    )
    chosen: dict[str, Any] = {}
    if options.optimizer in (OptimizerName.DION2, OptimizerName.NORDION2):
        chosen = {"fraction": options.fraction, "scope": options.scope and options.scope.value}
    check_options(chosen)
    if options.png is not None and options.over is None:
        raise ValueError("--png draws a sweep: add --sweep world")
    if options.blocks and not chosen:
        raise ValueError("--blocks is for dion2 and nordion2")
    if options.show_amdahl and not chosen:
        raise ValueError("--amdahl varies the fraction: it is for dion2 and nordion2")
    groups = groups_of(options.model, getattr(torch, options.dtype.value))
    return Question(groups, mesh, options.optimizer.value, chosen)


def _machine(options: PlanOptions) -> Machine:
    machine = H200 if options.machine is None else load(options.machine)
    rates = {"in_node": options.in_node, "between": options.between, "every": options.link}
    for name, rate in rates.items():
        if rate is not None and not rate > 0:
            raise ValueError(f"{name}={rate} GB/s is not allowed: more than 0")
    return machine.with_links(**{name: None if rate is None else rate * GIGA for name, rate in rates.items()})


def _compared(question: Question, machine: Machine, options: PlanOptions, show: Any) -> Comparison:
    if options.blocks:
        return Comparison(block_answers(question, machine), None, "blocks are planned to compare with, not to run")
    return compare(question, machine, transports=_transports(options), progress=show)


def _transports(options: PlanOptions) -> dict[str, str]:
    """Those that were asked for, or all that are installed."""
    return {name: name for name in options.transport or available_transports()}


def _one(options: PlanOptions) -> str:
    """The transport of the Amdahl table: `local` as in the review, unless another is asked for."""
    return options.transport[0] if options.transport else "local"


def _asked(question: Question, machine: Machine, options: PlanOptions) -> dict[str, Any]:
    return {
        "model": options.model,
        "optimizer": question.optimizer,
        "options": dict(question.options),
        "mesh": question.mesh.describe(),
        "world_size": question.mesh.world_size,
        "machine": machine.describe(),
    }
