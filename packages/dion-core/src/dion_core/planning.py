"""Payloads computed from shapes alone, to compare ways of assigning and sending without running them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

from dion_core.packing import binomial_capacity
from dion_core.selection import rows_to_select

HEADER_ROWS = 1
"""Rows of the counts in front of a pool (one is enough for the matrices of any model so far)."""


def block_assignment_payload(
    shapes: Mapping[tuple[int, int], int],
    world_size: int,
    way: Literal["full", "local", "capped"],
    *,
    fraction: float,
    element_bytes: int,
) -> int:
    """Bytes that a rank sends in a step, to itself too, if every rank owns a block of ceil(N / W) matrices a shape.

    Missing matrices are padded with zeros, which travel like the others. This is how public implementations assign
    (Dion2 review threads); ours balances by cost and pads nothing, and its payload is `Exchange.traffic`.

    Args:
        shapes: how many matrices there are of each (rows, columns).
        world_size: ranks, each with ceil(rows / world_size) rows of every matrix.
        way: whole shards, a fixed number of rows a shard, or pools with a binomial budget and a header row forward.
        fraction: of the rows, not used by "full".
        element_bytes: of an element on the wire.
    """
    total = 0
    for (rows, columns), num_matrices in shapes.items():
        owned = math.ceil(num_matrices / world_size)
        shard = math.ceil(rows / world_size)
        header = 0
        if way == "full":
            sent = owned * shard
        elif way == "local":
            sent = owned * rows_to_select(fraction, shard)
        else:
            expected = owned * rows_to_select(fraction, rows) / world_size
            sent, header = math.ceil(binomial_capacity(expected, world_size) * expected), HEADER_ROWS
        total += world_size * (2 * sent + header) * columns * element_bytes
    return total
