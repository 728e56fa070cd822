"""State that a rank of a replicated group keeps, from shapes alone: a copy of all of it against layer-wise state.

    python -m benchmarks.layerwise [--write]

Prints the table of docs/ownership.md, and with --write puts it there. No matrix is allocated.
Legend: W ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.balance import ELEMENT_BYTES, FRACTION, MODELS
from benchmarks.pages import DOCS, publish
from dion_core.inventories import Inventory
from dion_core.ownership import imbalance, newton_schulz_cost
from dion_core.selection import rows_to_select
from dion_core.shard_layout import Entry, even_buckets, plan_shards

ROW_BYTES = 8  # second moment, fp32, and waiting time, int32
WORLD_SIZES = (8, 16, 32, 64)


@dataclass(frozen=True)
class Share:
    """What the ranks keep.

    Attributes:
        state: bytes of momentum, second moment and waiting times, by rank.
        work: the largest load of a rank over the mean.
    """

    state: list[int]
    work: float


def share(shapes: Inventory, world_size: int) -> Share:
    """The state of NorDion2 by rank, as an optimizer of these matrices plans it."""
    matrices = [shape for shape, count in shapes.items() for _ in range(count)][::-1]
    costs = [newton_schulz_cost(rows_to_select(FRACTION, rows), columns) for rows, columns in matrices]
    entries = [Entry(rows * columns, cost) for (rows, columns), cost in zip(matrices, costs, strict=True)]
    size = even_buckets(entries, world_size)
    buckets, loads = plan_shards(entries, bucket_elements=size, loads=[0] * world_size, homes={})
    state = [0] * world_size
    for bucket in buckets:
        for number, rank in zip(bucket.numbers, bucket.ranks, strict=True):
            rows, columns = matrices[number]
            state[rank] += rows * columns * ELEMENT_BYTES + rows * ROW_BYTES
    return Share(state, imbalance(loads))


def row(name: str, world_size: int) -> str:
    """The line of the table for a model and a number of ranks."""
    found = share(MODELS[name], world_size)
    whole = sum(found.state)
    mib = " | ".join(f"{amount / 2**20:,.0f}" for amount in (whole, whole / world_size, max(found.state)))
    return f"| {name} | {world_size} | {mib} | {found.work:.2f} |"


def table() -> str:
    """State in MiB and work over the mean, as a Markdown table."""
    lines = [
        f"Momentum in bf16 and second moment in fp32 of NorDion2, MiB a rank; fraction {FRACTION}:",
        "",
        "| matrices of | W | a copy of all | layer-wise, mean | largest | work |",
        "|---|---|---|---|---|---|",
        *(row(name, world_size) for name in MODELS for world_size in WORLD_SIZES),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Prints what `publish` puts into the page if asked to."""
    publish(table(), DOCS / "ownership.md", "layerwise", description=__doc__)


if __name__ == "__main__":
    main()
