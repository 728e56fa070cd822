"""Winners that scatter at random over the ranks: 150 settings of shape, number of ranks and fraction."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from benchmarks.deferral_pools import CAPACITIES, Capacity, Pools, Shape, Tally, make_buckets
from dion_core.layout import shard_segments
from dion_core.selection import rows_to_select

SHAPES = (
    Shape(32, 512, 512),
    Shape(8, 2048, 512),
    Shape(8, 512, 2048),
    Shape(96, 1536, 1536),
    Shape(33, 5120, 5120),
    Shape(16, 20480, 5120),
)
WORLD_SIZES = (2, 4, 8, 16, 32)
FRACTIONS = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2)


@dataclass(frozen=True)
class ScatterResult:
    """One setting: a tally for each capacity, and in which steps learned budgets changed."""

    shape: Shape
    world_size: int
    fraction: float
    tallies: dict[Capacity, Tally]
    changes: list[int]


def measure_scatter(*, num_steps: int, every: int) -> list[ScatterResult]:
    """The settings, or every n-th of them, for as many steps."""
    settings = list(product(SHAPES, WORLD_SIZES, FRACTIONS))[::every]
    return [_measure(*setting, num_steps=num_steps, seed=seed) for seed, setting in enumerate(settings)]


def _measure(shape: Shape, world_size: int, fraction: float, *, num_steps: int, seed: int) -> ScatterResult:
    shards = [rows for _, rows in shard_segments(shape.rows, world_size)]
    # The k best of R independent scores: without replacement, so counts are hypergeometric.
    generator = np.random.default_rng(seed)
    drawn = generator.multivariate_hypergeometric(
        shards, rows_to_select(fraction, shape.rows), size=(num_steps, shape.matrices), method="marginals"
    )
    counts = torch.from_numpy(drawn).transpose(1, 2).contiguous()
    tallies: dict[Capacity, Tally] = {}
    changes = []
    for capacity in CAPACITIES:
        pools = Pools(make_buckets([shape], world_size, fraction), capacity)
        for of_step in counts:
            pools.begin([of_step])
            pools.count(0, of_step, pools.excess(0, of_step))
        tallies[capacity] = pools.tallies[0]
        if capacity == "learned":
            changes = pools.changes
    return ScatterResult(shape, world_size, fraction, tallies, changes)
