"""What `dion plan` plans is what an optimizer reports that is really built on so many ranks.

A layout is one line of `LAYOUTS`: the mesh to plan for, by W. The real parameters are put on a mesh of the same axes by
torch's own `distribute_tensor`, or left plain for DDP.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

import dion_core
from dion_comm_capped import Capped
from dion_comm_nccl import LocalTopRows
from dion_core import available_transports
from dion_core.prediction.machine import H200, Machine
from dion_core.prediction.measuring import Ranks, Sizes, measure
from dion_core.prediction.meshes import MeshShape
from dion_core.prediction.traffic import Question, plans
from dion_core.testing.ranks import pool
from dion_core.transport import Transport

pytestmark = pytest.mark.usefixtures("fresh_ranks")

WORLD_SIZES = (1, 2, 3, 4)
Axes = tuple[int, int, int]  # replicate, shard, tensor

LAYOUTS: Mapping[str, Callable[[int], Axes]] = {
    "rows": lambda size: (1, size, 1),
    "rows and columns": lambda size: (1, 1, size),
    "replicated": lambda size: (size, 1, 1),
    "hsdp": lambda size: (2, size // 2, 1),
}
INSTANCES: Mapping[str, Transport] = {
    "capped, binomial": Capped(capacity="binomial", always_pack=True),
    "local, slack 2": LocalTopRows(slack=2.0),
}
TRANSPORTS: Mapping[str, str | Transport] = {**{name: name for name in available_transports()}, **INSTANCES}

GROUPS: Sequence[tuple[Sequence[tuple[int, ...]], Mapping[str, Any]]] = (
    ([(17, 12)] * 2 + [(9, 8)] * 5 + [(6, 40)] * 3 + [(2, 5)], {}),
    ([(24, 6)], {"num_heads": 4}),
    ([(20, 6)], {"split_sizes": (8, 8, 4)}),
    ([(12, 3, 2, 2)], {"flatten": True}),
    ([(6, 8, 4)], {"flatten": False}),
    ([(7,), (5, 3)], {"algorithm": "adamw", "lr": 1e-3}),
)
"""Shapes of parameters and the options of their groups: what an optimizer can have as matrices, and what it cannot."""


class Cell(NamedTuple):
    """An optimizer on a mesh of so many ranks."""

    optimizer: str
    transport: str
    axes: Axes


def named_groups(place: Callable[[Tensor], Tensor], device: str) -> list[dict[str, Any]]:
    return [
        {
            "params": [
                (f"group {number} {place_in_group}", nn.Parameter(place(torch.zeros(shape, device=device))))
                for place_in_group, shape in enumerate(shapes)
            ],
            **options,
        }
        for number, (shapes, options) in enumerate(GROUPS)
    ]


def placements(tensor: Tensor, axes: Axes) -> list[Placement]:
    """Of the axes that are longer than 1: shard takes rows, tensor the longer side, of a convolution outputs."""
    last: Placement = Replicate()
    if tensor.ndim == 4:
        last = Shard(0)
    elif tensor.ndim >= 2:
        last = Shard(tensor.ndim - 2 if tensor.shape[-2] >= tensor.shape[-1] else tensor.ndim - 1)
    return [each for each, size in zip((Replicate(), Shard(0), last), axes, strict=True) if size > 1]


def reports(cells: Sequence[Cell]) -> list[dict[str, Any] | None]:
    """The report of every optimizer, on the ranks that take part; run on each rank of a pool."""
    meshes: dict[Axes, DeviceMesh] = {}
    for axes in dict.fromkeys(cell.axes for cell in cells):
        size = axes[0] * axes[1] * axes[2]
        meshes[axes] = DeviceMesh("cpu", torch.arange(size).view([each for each in axes if each > 1] or [1]))
    found: list[dict[str, Any] | None] = []
    for cell in cells:
        mesh = meshes[cell.axes]
        if mesh.get_coordinate() is None:
            found.append(None)
            continue
        split = cell.axes[1] * cell.axes[2] > 1

        def place(tensor: Tensor, mesh: DeviceMesh = mesh, axes: Axes = cell.axes, split: bool = split) -> Tensor:
            return distribute_tensor(tensor, mesh, placements(tensor, axes), src_data_rank=None) if split else tensor

        options = {"group": mesh.get_group()} if cell.axes[0] > 1 and not split else {}
        kind = getattr(dion_core, cell.optimizer)
        optimizer = kind(named_groups(place, "cpu"), transport=TRANSPORTS[cell.transport], **options)
        found.append(optimizer.report())
    dist.barrier()
    return found


def cells() -> list[Cell]:
    """Every transport at every layout and number of ranks; Muon, which takes all rows, on three."""
    found = [Cell("Muon", transport, (1, 3, 1)) for transport in ("full", "varlen", "uniform")]
    for of_size in LAYOUTS.values():
        for size in WORLD_SIZES:
            axes = of_size(size)
            if axes[0] * axes[1] * axes[2] == size:
                needed = axes[1] * axes[2] > 1  # elsewhere nothing lies in pieces, whatever the transport
                found += [Cell("NorDion2", transport, axes) for transport in (TRANSPORTS if needed else ("full",))]
    return list(dict.fromkeys(found))


def without_state(report: Mapping[str, Any]) -> dict[str, Any]:
    """A report without the state, which a plan does not make."""
    return {name: value for name, value in report.items() if name != "state"}


def test_plans_are_the_reports_of_optimizers() -> None:
    every = cells()
    by_rank = pool(max(WORLD_SIZES)).run(reports, every, timeout=100)
    sent = set()
    for number, cell in enumerate(every):
        size = cell.axes[0] * cell.axes[1] * cell.axes[2]
        question = Question(
            named_groups(lambda tensor: tensor, "meta"),
            MeshShape(1, size, *cell.axes),
            cell.optimizer.lower(),
        )
        planned = plans(question, TRANSPORTS[cell.transport])
        assert [each.rank for each in planned] == list(range(size))
        for each in planned:
            real = by_rank[each.rank][number]
            assert real is not None
            assert without_state(each.at_start) == without_state(real), cell
            assert each.sent.total == each.typical["bytes_per_step"], cell
            sent.add(real["bytes_per_step"])
    # Not vacuous: figures differ between transports, layouts and numbers of ranks.
    assert len(sent) > 40


@pytest.mark.parametrize("axes", [(1, 2, 2), (2, 1, 2), (2, 2, 2)], ids=str)
def test_bytes_over_several_axes_are_those_of_the_report(axes: Axes) -> None:
    size = axes[0] * axes[1] * axes[2]
    question = Question(named_groups(lambda tensor: tensor, "meta"), MeshShape(2, size // 2, *axes))
    for each in plans(question, "varlen"):
        assert each.sent.total == each.typical["bytes_per_step"] > 0
        assert each.sent.between > 0


@pytest.mark.parametrize("transport", ["full", "local"])
def test_every_step_is_typical_where_sizes_are_fixed(transport: str) -> None:
    question = Question(named_groups(lambda tensor: tensor, "meta"), MeshShape(1, 3, shard=3))
    for each in plans(question, transport):
        assert each.typical == each.at_start


def measured() -> Machine:
    """The profile that every rank of a pool measures, all on one node."""
    ranks = Ranks(torch.device("cpu"), in_node=dist.group.WORLD)
    return measure(ranks, Sizes(link_bytes=[4096, 65536], sides=[16], copy_bytes=2**16, batch=1), lambda text: None)


def test_bench_measures_the_links_between_ranks() -> None:
    """All ranks know the slowest one's figures; what is not there is assumed and said so."""
    first, *others = pool(max(WORLD_SIZES)).run(measured)
    assert [size for size, _ in first.in_node] == [4096, 65536]
    assert all(rate > 0 for _, rate in (*first.in_node, *first.newton_schulz))
    assert first.latency > 0
    assert first.between == H200.between
    assert "links between nodes assumed" in first.name
    assert all(other == first for other in others)
