"""What `dion plan` says of the demo's model on nodes whose links are shaped, to compare with what is measured."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from benchmarks.namespaces import Link
from dion_core.prediction.comparison import Answer, answer
from dion_core.prediction.machine import Machine
from dion_core.prediction.meshes import MeshShape
from dion_core.prediction.models import Groups
from dion_core.prediction.traffic import Question
from text_demo.model import ByteGPT, ModelShape, split_parameters

WAYS = 2
"""Of an exchange between two nodes: gloo runs them side by side or one after the other, as it happens."""


@dataclass(frozen=True)
class Planned:
    """What the model of `dion plan` says of a step.

    Attributes:
        in_node: bytes that the rank which sends most sends to others of its node.
        between: the same to other nodes.
        exchange: seconds in which nothing is computed, both ways of a link being used at once.
        one_way: the same where they are used one after the other.
        device: seconds of the step's stages without messages; the host's own time is not among them.
    """

    in_node: int
    between: int
    exchange: float
    one_way: float
    device: float


def demo_groups() -> Groups:
    """The parameter groups of the demo's model, on the meta device."""
    with torch.device("meta"):
        model = ByteGPT(ModelShape())
    names = {parameter: name for name, parameter in model.named_parameters()}
    split = split_parameters(model)
    kinds = {"matrix": split.matrices, "adamw": split.others}
    return [{"params": [(names[each], each) for each in kind], "algorithm": name} for name, kind in kinds.items()]


def shaped(machine: Machine, link: Link, ranks_per_node: int, *, slower: int = 1) -> Machine:
    """The machine with its nodes joined by links of that speed, which the ranks of a node share.

    Where messages reach less without a limit, they do so within it too.

    Args:
        machine: measured without a limit.
        link: between the nodes.
        ranks_per_node: that share it.
        slower: 2 where only half of the link is used.
    """
    limit = link.payload(ranks_per_node) / slower
    between = tuple((size, min(rate, limit)) for size, rate in machine.between)
    return replace(machine, between=between)


def plan(question: Question, machine: Machine, transport: str, link: Link) -> Planned:
    """The plan's figures for a step of one transport."""
    ranks_per_node = question.mesh.gpus_per_node
    both, one = (
        _answered(question, shaped(machine, link, ranks_per_node, slower=slower), transport) for slower in (1, WAYS)
    )
    assert both.times is not None
    assert one.times is not None
    return Planned(
        in_node=both.sent.in_node,
        between=both.sent.between,
        exchange=both.times.exposed,
        one_way=one.times.exposed if link.bits_per_second else both.times.exposed,
        device=both.times.step - both.times.exposed,
    )


def _answered(question: Question, machine: Machine, transport: str) -> Answer:
    found = answer(question, machine, transport, transport)
    if found.refused:
        raise ValueError(found.refused)
    return found


def question(nodes: int, ranks_per_node: int, fraction: float) -> Question:
    """The demo's training on such nodes."""
    return Question(demo_groups(), MeshShape.of(nodes, ranks_per_node), options={"fraction": fraction})


def machine_of(profile: Mapping[str, Any]) -> Machine:
    """The machine of a measured profile. On a CPU no step loses time where a value is read."""
    points = {name: tuple(map(tuple, profile[name])) for name in ("newton_schulz", "in_node", "between")}
    return Machine(**{**profile, **points, "host_read": 0.0})
