"""The same step if every rank owned a block of the matrices of each shape, as public implementations assign them.

Bytes come from `planning.block_assignment_payload`, which reproduces the tables of the Dion2 review threads; times from
the same clock as ours. Legend: W ranks, N matrices of a shape.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Literal

from dion_core.planning import block_assignment_payload
from dion_core.prediction.comparison import Answer
from dion_core.prediction.machine import Machine
from dion_core.prediction.meshes import MeshShape
from dion_core.prediction.timing import BucketWork, newton_schulz_flops, predict
from dion_core.prediction.traffic import Question, Sent
from dion_core.selection import rows_to_select

Way = Literal["full", "local", "capped"]
WAYS: tuple[Way, ...] = ("full", "local", "capped")


def block_answers(question: Question, machine: Machine) -> list[Answer]:
    """The answers of `full`, `local` and `capped` with binomial budgets.

    Raises:
        ValueError: a parameter that is not one matrix, or a mesh that does more than split rows.
    """
    mesh = question.mesh
    if mesh.shard != mesh.world_size:
        raise ValueError("blocks are planned for rows split over all ranks alone")
    shapes = _shapes(question)
    fraction, width = float(question.options["fraction"]), _element_bytes(question)
    answers = []
    for way in WAYS:
        work = [_work(shape, count, way, mesh, fraction, width) for shape, count in shapes.items()]
        payload = block_assignment_payload(shapes, mesh.world_size, way, fraction=fraction, element_bytes=width)
        flops = sum(each.flops for each in work)
        needed = sum(count * newton_schulz_flops(rows_to_select(fraction, r), c) for (r, c), count in shapes.items())
        answers.append(
            Answer(
                transport=way,
                exact=way != "local",
                may_defer=way == "capped",
                sent=_spread(payload, mesh),
                mean_bytes=float(payload),
                start_bytes=payload,
                flops=flops,
                imbalance=flops * mesh.world_size / needed,
                times=predict(work, machine, elementwise_bytes=0.0, host_reads=0),
                work=work,
            )
        )
    return answers


def _shapes(question: Question) -> Mapping[tuple[int, int], int]:
    shapes: Counter[tuple[int, int]] = Counter()
    for group in question.groups:
        for name, parameter in group["params"] if group["algorithm"] == "matrix" else ():
            if parameter.ndim != 2 or group.get("num_heads") or group.get("split_sizes"):
                raise ValueError(f"{name} is not one matrix, and blocks are planned for such alone")
            shapes[parameter.shape[0], parameter.shape[1]] += 1
    return shapes


def _element_bytes(question: Question) -> int:
    _, parameter = question.groups[0]["params"][0]
    return int(parameter.element_size())


def _work(shape: tuple[int, int], count: int, way: Way, mesh: MeshShape, fraction: float, width: int) -> BucketWork:
    (rows, columns), world_size = shape, mesh.world_size
    payload = block_assignment_payload({shape: count}, world_size, way, fraction=fraction, element_bytes=width)
    chosen = rows_to_select(fraction, rows)
    held = math.ceil(rows / world_size)
    return BucketWork(
        forward=_spread(payload / 2, mesh),
        back=_spread(payload / 2, mesh),
        flops=math.ceil(count / world_size) * newton_schulz_flops(chosen, columns),
        shorter_side=min(chosen, columns),
        elements=count * held * columns,
        chosen=count * chosen / world_size * columns,
        parameter_bytes=width,
        momentum_bytes=width,
        wire_bytes=width,
    )


def _spread(payload: float, mesh: MeshShape) -> Sent:
    """As many bytes to every rank, itself included."""
    each, node = payload / mesh.world_size, mesh.gpus_per_node
    return Sent(round(each), round(each * (node - 1)), round(each * (mesh.world_size - node)))
