"""The exchange of a step alone: rows on their way to the owners and back, without the arithmetic on them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.stepping import SMALL, TIMED, WARM_UP, Cell, Figures, of_slowest, start_together, timed
from dion_core.collectives import Group
from dion_core.inventories import INVENTORIES, Inventory
from dion_core.layout import Axis, RowTables, split_layout
from dion_core.ownership import assign_owners, newton_schulz_cost
from dion_core.process_groups import group_of
from dion_core.registry import available_transports
from dion_core.rows import Rows, RowSelection
from dion_core.rules import selector
from dion_core.selection import Selector
from dion_core.steps import BUCKETS_IN_FLIGHT, Steps, interleave, run
from dion_core.transport import Bucket, Exchange


class Unchanged:
    """An orthogonalizer that does nothing, so that what is left is the exchange."""

    def __call__(self, matrices: Tensor) -> Tensor:
        return matrices

    def __repr__(self) -> str:
        return "Unchanged()"


def make_buckets(inventory: Inventory, rule: Selector, group: Group, device: torch.device) -> list[Bucket]:
    """One bucket a shape, rows split over the group, owners balanced by cost, as an optimizer makes them."""
    layouts = {shape: split_layout(group, Axis.ROWS, shape) for shape in inventory}
    costs = [
        newton_schulz_cost(rule.total(layouts[shape], 0), shape[1])
        for shape, count in inventory.items()
        for _ in range(count)
    ]
    owners = iter(assign_owners(costs, [group] * len(costs))[0])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    buckets = []
    for shape, count in inventory.items():
        layout = layouts[shape]
        most = max(rule.offered(layout, rank, 0) for rank in range(group.size))
        owned = tuple(next(owners) for _ in range(count))
        sizes = (most, rule.total(layout, 0), dtype, device)
        buckets.append(Bucket(layout.stack(count), owned, *sizes, name=f"{count} x {shape[0]}x{shape[1]}"))
    return buckets


def choose(bucket: Bucket, rule: Selector, seed: int) -> RowSelection:
    """A choice by random scores, which are alike on all ranks."""
    tables = RowTables(bucket.layout, bucket.device)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(bucket.num_matrices, bucket.shape[0], generator=generator).to(bucket.device)
    if not rule.needs_all_scores:
        scores = torch.cat([scores.flatten(), scores.new_zeros(1)])[tables.position]
    return rule.select(scores, tables, torch.ones(bucket.num_matrices, dtype=torch.bool, device=bucket.device))


def time_exchange(cell: Cell, device: str) -> Figures:
    """`seconds` of `TIMED` exchanges of all buckets, of the slowest rank each. Collective."""
    transport = available_transports()[cell.transport]()
    rule = selector(transport.default_scope, cell.fraction, Axis.ROWS)
    where = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    assert dist.group.WORLD is not None
    inventory = {**SMALL, **INVENTORIES}[cell.inventory]
    buckets = make_buckets(inventory, rule, group_of(dist.group.WORLD), where)
    session = transport.open(buckets)
    seconds = []
    for number in range(WARM_UP + TIMED):
        chosen = [choose(bucket, rule, number) for bucket in buckets]

        def exchange(chosen: list[RowSelection] = chosen) -> None:
            run(session.begin(chosen))
            moves = [_move(each, rows) for each, rows in zip(session.exchanges, chosen, strict=True)]
            interleave(moves, in_flight=BUCKETS_IN_FLIGHT)
            session.end()

        start_together(device)
        seconds.append(timed(exchange, device))
    return {"seconds": of_slowest(seconds[WARM_UP:], device)}


def _move(exchange: Exchange, chosen: RowSelection) -> Steps[Rows]:
    admitted = exchange.admit(chosen)
    rows = exchange.reserve(admitted)
    rows.values.zero_()
    return (yield from exchange.orthogonalize(rows, admitted, Unchanged()))
