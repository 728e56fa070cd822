"""How a step changes with the number of ranks and with the fraction of rows.

Two classes of work: what touches only chosen rows (Newton-Schulz, exchange, taking, normalizing, adding) goes with
fraction / W, what touches every row (momentum, scores, choice, decay) with 1 / W alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from dion_core.prediction.comparison import Answer, Comparison, answer, compare
from dion_core.prediction.machine import Machine
from dion_core.prediction.meshes import MeshShape
from dion_core.prediction.timing import accumulate_bytes, take_bytes, update_bytes
from dion_core.prediction.traffic import Question
from dion_core.transport import Transport

LARGEST_WORLD = 4096
NODE = 8
"""GPUs of a node where there is but one, with as many or fewer."""

AMDAHL_ROWS = ("newton_schulz", "chosen_rows", "all_rows", "exchange", "bytes_sent", "bytes_to_a_peer")
"""Seconds of three classes and of the exchange as if alone; bytes of a step, and of those to one peer."""


@dataclass(frozen=True)
class Amdahl:
    """The classes of work at two numbers of ranks and two fractions.

    Attributes:
        values: by (W, fraction), each class of `AMDAHL_ROWS`.
        by_world: at the fraction asked for, the value at 2 W over that at W.
        by_fraction: at W, the value at the doubled fraction over that at the one asked for.
    """

    values: Mapping[tuple[int, float], Mapping[str, float]]
    by_world: Mapping[str, float]
    by_fraction: Mapping[str, float]


def amdahl(question: Question, machine: Machine, transport: str | Transport) -> Amdahl:
    """The classes of work of the question's mesh and fraction, and at twice of either.

    Raises:
        ValueError: the transport does not serve it, or twice the fraction is above 1.
    """
    fraction, world_size = float(question.options["fraction"]), question.mesh.world_size
    if 2 * fraction > 1:
        raise ValueError(f"fraction={fraction}: the table needs twice of it, at most 1")
    values = {}
    for mesh in (question.mesh, grown(question.mesh, 2 * world_size)):
        for each in (fraction, 2 * fraction):
            asked = replace(question, mesh=mesh, options={**question.options, "fraction": each})
            found = answer(asked, machine, str(transport), transport)
            if found.refused:
                raise ValueError(found.refused)
            values[mesh.world_size, each] = _classes(found, machine, mesh.world_size)
    base, wider, denser = (
        values[key] for key in ((world_size, fraction), (2 * world_size, fraction), (world_size, 2 * fraction))
    )
    return Amdahl(values, _ratios(base, wider), _ratios(base, denser))


def _classes(found: Answer, machine: Machine, world_size: int) -> dict[str, float]:
    assert found.times is not None
    decay, add = (sum(part) for part in zip(*map(update_bytes, found.work), strict=True))
    chosen = sum(take_bytes(each) + each.chosen * each.wire_bytes for each in found.work) + add
    every = sum(map(accumulate_bytes, found.work)) + decay
    return {
        "newton_schulz": found.times.stages["newton_schulz"],
        "chosen_rows": chosen / machine.copy,
        "all_rows": every / machine.copy,
        "exchange": found.times.stages["exchange"],
        "bytes_sent": found.mean_bytes or float(found.sent.total),
        "bytes_to_a_peer": (found.mean_bytes or float(found.sent.total)) / world_size,
    }


def _ratios(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: after[name] / before[name] if before[name] else 1.0 for name in AMDAHL_ROWS}


def grown(mesh: MeshShape, world_size: int) -> MeshShape:
    """The mesh on so many ranks, replicate or shard as much longer: of nodes that are full, or of one."""
    node = mesh.gpus_per_node if mesh.nodes > 1 else max(NODE, mesh.gpus_per_node)
    gpus = node if world_size % node == 0 else world_size
    rest = {"replicate": mesh.replicate, "shard": mesh.shard, "tensor": mesh.tensor}
    longest = "replicate" if mesh.replicate > mesh.shard else "shard"
    others = mesh.world_size // rest[longest]
    if world_size % others:
        raise ValueError(f"{world_size} ranks cannot be divided among {others} of the other axes of the mesh")
    rest[longest] = world_size // others
    return MeshShape(world_size // gpus, gpus, **rest)


def sweep(
    question: Question,
    machine: Machine,
    *,
    largest: int = LARGEST_WORLD,
    transports: Mapping[str, str | Transport] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[tuple[int, Comparison]]:
    """The comparison at every number of ranks: from those of the other axes, or 2, doubled up to `largest`.

    Args:
        question: at one number of ranks.
        machine: as in `compare`.
        largest: the last number of ranks.
        transports: as in `compare`.
        progress: told what is planned next.
    """
    mesh = question.mesh
    smallest = mesh.world_size // max(mesh.replicate, mesh.shard)
    worlds, world_size = [], max(2, smallest)
    while world_size <= largest:
        worlds.append(world_size)
        world_size *= 2
    results = []
    for each in worlds:
        asked = replace(question, mesh=grown(mesh, each))
        compared = compare(asked, machine, transports=transports, progress=partial(_tell, progress, each))
        results.append((each, compared))
    return results


def _tell(progress: Callable[[str], None], world_size: int, transport: str) -> None:
    progress(f"{world_size:,} ranks, {transport}")
