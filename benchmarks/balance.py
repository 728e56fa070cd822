"""Bytes and work of the busiest rank, from shapes alone: owners balanced by cost against blocks of every shape.

    python -m benchmarks.balance [--write]

Prints the table of docs/ownership.md, and with --write puts it there. No matrix is allocated.
Legend: N matrices of a shape, W ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.pages import DOCS, publish
from dion_core.collectives import SoloGroup
from dion_core.inventories import INVENTORIES, Inventory
from dion_core.layout import Axis, split_layout
from dion_core.ownership import assign_owners, imbalance, newton_schulz_cost
from dion_core.planning import block_assignment_payload
from dion_core.rules import selector

FRACTION = 0.25
ELEMENT_BYTES = 2  # bf16
WORLD_SIZES = (8, 16, 32, 64, 128, 256)


def decoder(*, layers: int, width: int, key_value: int, feed_forward: int, experts: int = 1) -> Inventory:
    """The hidden matrices of a decoder with grouped keys and values and gated feed-forward parts, (out, in).

    A block has query and output, key and value, and for every expert gate and up, and down. The router of a mixture has
    as few rows as experts; it is no hidden matrix.
    """
    return {
        (width, width): 2 * layers,
        (key_value, width): 2 * layers,
        (feed_forward, width): 2 * layers * experts,
        (width, feed_forward): layers * experts,
    }


MODELS: dict[str, Inventory] = {
    "Llama-3 8B": decoder(layers=32, width=4096, key_value=1024, feed_forward=14336),
    "Llama-3 70B": decoder(layers=80, width=8192, key_value=1024, feed_forward=28672),
    "Mixtral 8x7B": decoder(layers=32, width=4096, key_value=1024, feed_forward=14336, experts=8),
    **INVENTORIES,
}


@dataclass(frozen=True)
class Balance:
    """What a step costs the ranks.

    Attributes:
        sent: bytes that every rank sends, both ways, to itself too.
        block_sent: bytes that each sends if every rank owns a block of each shape.
        work: the largest load of a rank over the perfect share, the total over the ranks.
        least_work: what no assignment of whole matrices can go below, over the perfect share.
        block_work: as `work`, for blocks.
    """

    sent: list[int]
    block_sent: int
    work: float
    least_work: float
    block_work: float


def balance(shapes: Inventory, world_size: int) -> Balance:
    """Bytes and work of `local` under both assignments, the rows of all matrices split over the ranks."""
    group = SoloGroup(0, world_size, tuple(range(world_size)))
    rule = selector("local", FRACTION, Axis.ROWS)
    layouts = {shape: split_layout(group, Axis.ROWS, shape) for shape in shapes}
    offered = {shape: [rule.offered(layouts[shape], rank, 0) for rank in range(world_size)] for shape in shapes}
    cost = {shape: newton_schulz_cost(sum(offered[shape]), shape[1]) for shape in shapes}
    matrices = [shape for shape, count in shapes.items() for _ in range(count)]
    costs = [cost[shape] for shape in matrices]
    owners, loads = assign_owners(costs, [group] * len(costs))
    back = [0] * world_size
    for (rows, columns), owner in zip(matrices, owners, strict=True):
        back[owner] += sum(offered[rows, columns]) * columns * ELEMENT_BYTES
    forward = [
        sum(count * offered[shape][rank] * shape[1] * ELEMENT_BYTES for shape, count in shapes.items())
        for rank in range(world_size)
    ]
    share = sum(costs) / world_size
    return Balance(
        sent=[there + here for there, here in zip(forward, back, strict=True)],
        block_sent=block_assignment_payload(
            shapes, world_size, "local", fraction=FRACTION, element_bytes=ELEMENT_BYTES
        ),
        work=imbalance(loads[group.ranks]),
        least_work=least_load(costs, world_size) / share,
        block_work=sum(math.ceil(count / world_size) * cost[shape] for shape, count in shapes.items()) / share,
    )


def least_load(costs: list[int], world_size: int) -> float:
    """A load that some rank has in every assignment of whole matrices.

    It is no less than the perfect share; and of the j W + 1 dearest matrices some rank owns j + 1 or more. Costs
    5, 5, 4, 1 over two ranks: the share is 7.5, of the first one a rank owns one, 5, of the first three some rank two,
    of 4 at least: 8.
    """
    dearest = sorted(costs, reverse=True)
    crowded = [(place // world_size + 1) * dearest[place] for place in range(0, len(dearest), world_size)]
    return max(sum(costs) / world_size, *crowded)


def row(name: str, world_size: int) -> str:
    """The line of the table for a model and a number of ranks."""
    found = balance(MODELS[name], world_size)
    mean = sum(found.sent) / world_size
    sent = " | ".join(f"{payload / 1e6:,.1f}" for payload in (mean, max(found.sent), found.block_sent))
    work = " | ".join(f"{part:.2f}" for part in (found.work, found.least_work, found.block_work))
    return f"| {name} | {world_size} | {sent} | {work} |"


def table() -> str:
    """Bytes in MB (1e6) and work over the perfect share, as a Markdown table."""
    lines = [
        f"`local`, bf16 on the wire, fraction {FRACTION}; MB (1e6 bytes) a rank sends in a step, both ways, and",
        "work of the busiest rank over the perfect share:",
        "",
        "| matrices of | W | MB, mean | MB, largest | MB, blocks | work | at least | work, blocks |",
        "|---|---|---|---|---|---|---|---|",
        *(row(name, world_size) for name in MODELS for world_size in WORLD_SIZES),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Prints what `publish` puts into the page if asked to."""
    publish(table(), DOCS / "ownership.md", "balance", description=__doc__)


if __name__ == "__main__":
    main()
