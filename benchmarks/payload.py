"""Bytes that a rank sends in a step, from shapes alone: by transport, world size, and way of assigning owners.

    python -m benchmarks.payload [--write]

Prints the table of docs/transports.md, and with --write puts it there. No matrix is allocated.
"""

from __future__ import annotations

from statistics import mean

import torch

from benchmarks.pages import DOCS, publish
from dion_comm_nccl import FullShard, LocalTopRows
from dion_core.collectives import SoloGroup
from dion_core.inventories import INVENTORIES
from dion_core.layout import Axis, split_layout
from dion_core.ownership import assign_owners, newton_schulz_cost
from dion_core.planning import block_assignment_payload
from dion_core.rules import selector
from dion_core.transport import Bucket, Scope, Transport

FRACTION = 0.25


def payloads(shapes: dict[tuple[int, int], int], world_size: int, transport: Transport, scope: Scope) -> list[int]:
    """Bytes that every rank sends in a step, both ways, to itself too, from the real plan."""
    rule = selector(scope, FRACTION, Axis.ROWS)
    sent = []
    for rank in range(world_size):
        group = SoloGroup(rank, world_size, tuple(range(world_size)))
        matrices = [split_layout(group, Axis.ROWS, shape) for shape, count in shapes.items() for _ in range(count)]
        costs = [newton_schulz_cost(rule.total(layout, 0), layout.shape[1]) for layout in matrices]
        owners, _ = assign_owners(costs, [group] * len(costs))
        buckets, first = [], 0
        for shape, count in shapes.items():
            layout = split_layout(group, Axis.ROWS, shape)
            most = max(rule.offered(layout, other, 0) for other in range(world_size))
            owned = tuple(owners[first : first + count])
            sizes = (most, rule.total(layout, 0), torch.bfloat16, torch.device("cpu"))
            buckets.append(Bucket(layout.stack(count), owned, *sizes, name=f"{count} x {shape}"))
            first += count
        sent.append(sum(exchange.traffic().num_bytes for exchange in transport.open(buckets).exchanges))
    return sent


def table() -> str:
    """The payloads in MB (1e6 bytes), as a Markdown table."""
    lines = [
        f"MB a rank sends in a step, both ways, bf16, fraction {FRACTION}:",
        "",
        "| inventory | W | `full` | `local` | block assignment: full | local | capped, binomial |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, shapes in INVENTORIES.items():
        for world_size in (4, 8, 16):
            ours = [
                mean(payloads(shapes, world_size, FullShard(), "global")),
                mean(payloads(shapes, world_size, LocalTopRows(), "local")),
            ]
            blocks = [
                block_assignment_payload(shapes, world_size, way, fraction=FRACTION, element_bytes=2)
                for way in ("full", "local", "capped")
            ]
            cells = " | ".join(f"{payload / 1e6:,.0f}" for payload in (*ours, *blocks))
            lines.append(f"| {name} | {world_size} | {cells} |")
    lines += [
        "",
        "`full` and `local` are the real plan, owners balanced by cost, on average over the ranks. Block assignment is",
        "how public implementations assign owners: ceil(N / W) matrices a rank and shape, padded with zero matrices.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Prints what `publish` puts into the page if asked to."""
    publish(table(), DOCS / "transports.md", "payload", description=__doc__)


if __name__ == "__main__":
    main()
