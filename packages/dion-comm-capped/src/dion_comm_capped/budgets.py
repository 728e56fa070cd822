"""How many rows each pair of ranks may send in a step: from a formula, or learned from the steps before.

A budget is a number of rows for each bucket and pair (source, owner). All ranks know all counts, so each computes
the same budgets at the same step without a message.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dion_core.transport import Bucket

Counts = tuple[int, ...]
"""Rows by pair, for all buckets: bucket after bucket, source after source, owner after owner."""

WINDOW = 16
"""Observed steps that a learned budget looks back on."""
RECENT = 2
"""The newest of them, which alone decide when a shard has suddenly become hot."""
LONG_PAIR = 200
"""From this many rows on, a learned budget is at most `LONG_MARGIN` above the mean."""
LONG_MARGIN = 0.15
DEVIATIONS = 2.5
"""Standard deviations of a Poisson count that a learned budget leaves above the mean."""
TIGHT = 0.6
"""Budgets are raised once less than this part of a pair's margin is left."""
PATIENCE = 32
"""Steps before budgets shrink: changing them costs new buffers (and a new capture)."""


def binomial_capacity(expected_rows: float, world_size: int) -> float:
    """The budget over the expected rows for random scatter: 1 + 2 * sqrt((1 - 1 / W) / n).

    Two standard deviations of a binomial count (Dion2 review, pooled capped transport).
    """
    return 1 + 2 * math.sqrt((1 - 1 / world_size) / expected_rows)


def fixed_budgets(bucket: Bucket, capacity: float | None) -> list[list[int]]:
    """budgets[source][owner] = ceil(c * n), n the rows expected if winners scatter at random over the ranks.

    Args:
        bucket: its owners and rows.
        capacity: c; None takes `binomial_capacity`.
    """
    world_size = bucket.layout.group.size
    budgets = []
    for owner in range(world_size):
        expected = len(bucket.owned(owner)) * bucket.total_rows / world_size
        if expected:
            factor = binomial_capacity(expected, world_size) if capacity is None else capacity
            expected = math.ceil(factor * expected - 1e-9)
        budgets.append(int(expected))
    return [budgets] * world_size


def learned_budget(mean: float) -> int:
    """The rows to provide for a pair that needs `mean` rows on average."""
    margin = DEVIATIONS * math.sqrt(max(mean, 1.0))
    if mean >= LONG_PAIR:
        margin = min(margin, LONG_MARGIN * mean)
    return math.ceil(mean + margin)


@dataclass
class LearnedBudgets:
    """Budgets that follow what the pairs needed."""

    window: deque[Counts] = field(default_factory=lambda: deque(maxlen=WINDOW))
    budgets: Counts = ()
    unchanged: int = 0

    def observe(self, counts: Sequence[int]) -> bool:
        """Takes in what the pairs needed in one more step; true if the budgets have changed.

        All change together: as soon as one has used up most of its margin, and after `PATIENCE` steps if they
        could be a tenth lower in all. A step in which nothing was chosen (a loss scaler skipped it, say) tells nothing.
        """
        if not any(counts):
            return False
        self.window.append(tuple(counts))
        self.unchanged += 1
        needs = self._needs()
        wanted = tuple(map(learned_budget, needs))
        tight = any(
            budget - need < TIGHT * (target - need)
            for need, target, budget in zip(needs, wanted, self.budgets, strict=False)
        )
        loose = sum(self.budgets) > 1.1 * sum(wanted) and self.unchanged >= PATIENCE
        if self.budgets and not tight and not loose:
            return False
        self.budgets, self.unchanged = wanted, 0
        return True

    def state_dict(self) -> dict[str, Any]:
        """Plain data from which a resumed run goes on alike."""
        return {
            "window": [list(counts) for counts in self.window],
            "budgets": list(self.budgets),
            "unchanged": self.unchanged,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        self.window = deque((tuple(counts) for counts in state["window"]), maxlen=WINDOW)
        self.budgets = tuple(state["budgets"])
        self.unchanged = state["unchanged"]

    def _needs(self) -> list[float]:
        """The rows that each pair needs on average: over the window, or now, where that has suddenly grown."""
        needs = []
        for pair in zip(*self.window, strict=True):
            mean, now = sum(pair) / len(pair), sum(pair[-RECENT:]) / len(pair[-RECENT:])
            needs.append(now if now > learned_budget(mean) else mean)
        return needs
