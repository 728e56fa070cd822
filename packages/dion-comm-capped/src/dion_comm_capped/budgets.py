"""How many rows each pair of ranks may send in a step: from a formula, or learned from the steps before.

A budget is a number of rows for each bucket and pair (source, owner). All ranks know all counts, so each computes
the same budgets at the same step without a message.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dion_core.packing import binomial_capacity
from dion_core.transport import Bucket

Counts = tuple[int, ...]
"""Rows by pair, for all buckets: bucket after bucket, source after source, owner after owner."""

WINDOW = 16
"""Observed steps that a learned budget looks back on."""
UNSEEN = 1.5
"""Times its fair share that a pair of which nothing is known yet is taken to need."""
MARGIN = 2.5
"""Standard deviations of a Poisson count that budgets leave above the most needed, in the beginning."""
NARROWEST, WIDEST = 0.5, 3.0
"""The range in which the margin adapts."""
WIDER, NARROWER = 1.5, 0.98
"""Factors of the margin when budgets were too low, and in every step: they balance at a change in 20 steps."""
MISSING = 0.01
"""Budgets rise once they would have refused this part of one step's rows since they were set."""
IN_VAIN = 1.5
"""They fall once they have provided for this many steps' rows in vain, compared with what would be set now."""


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


class LearnedBudgets:
    """Budgets that follow what the pairs needed.

    A budget is the most that its pair needed in the last `WINDOW` steps seen, and a margin. All budgets are set
    together, and stand until what they cost has added up: rows refused, or rows sent in vain. The margin learns
    too. It widens when rows were refused and narrows a little with every step, so that budgets change rarely
    where needs fluctuate, and are close where they do not.

    Attributes:
        expected: (pairs,) int64, the rows that each pair needs if winners scatter at random: its fair share.
    """

    def __init__(self, expected: Tensor) -> None:
        self.expected = expected
        self._budgets = torch.empty(0, dtype=torch.int64)
        self._window = torch.empty(0, len(expected), dtype=torch.int64)
        self._margin, self._missing, self._in_vain = MARGIN, 0.0, 0.0

    @property
    def budgets(self) -> Counts:
        """For each pair the rows provided; empty before the first step."""
        return tuple(self._budgets.tolist())

    @property
    def started(self) -> bool:
        """Whether a step was observed, so that there are budgets."""
        return len(self._budgets) > 0

    def observe(self, needed: Tensor) -> bool:
        """Takes in the (pairs,) int64 rows, on the CPU, that one more step needed; true if budgets have changed."""
        total = int(needed.sum())
        if not total:  # a step that was skipped tells nothing
            return False
        if not self.started:
            # Not kept: where weights start at zero, so do gradients, and ties go to the lowest rows, all on rank 0.
            self._budgets = self._wanted(needed[None])
            return True
        self._window = torch.cat([self._window[-(WINDOW - 1) :], needed[None]])
        self._margin = max(self._margin * NARROWER, NARROWEST)
        self._missing += int((needed - self._budgets).clamp(min=0).sum()) / total
        self._in_vain += int(self._budgets.sum()) / int(self._wanted(self._window).sum()) - 1
        too_low = self._missing > MISSING
        if not too_low and self._in_vain <= IN_VAIN:
            return False
        if too_low:
            self._margin = min(self._margin * WIDER, WIDEST)
        before, self._budgets = self._budgets, self._wanted(self._window)
        self._missing, self._in_vain = 0.0, 0.0
        return not torch.equal(before, self._budgets)

    def _wanted(self, seen: Tensor) -> Tensor:
        """(pairs,) int64: the budgets that suit the (steps, pairs) counts seen."""
        most, mean = seen.amax(dim=0).double(), seen.sum(dim=0).double() / len(seen)
        if len(self._window) < WINDOW:
            unknown = most == 0
            most, mean = (torch.where(unknown, UNSEEN * self.expected, known) for known in (most, mean))
        wanted = (most + self._margin * mean.clamp(min=1).sqrt()).floor().long()
        # One row at least: what a pair suddenly needs would else wait for as long as the counts take to arrive.
        return wanted.maximum(self.expected.clamp(max=1))

    def state_dict(self) -> dict[str, Any]:
        """Plain data from which a resumed run goes on alike."""
        return {
            "budgets": self._budgets.tolist(),
            "window": self._window.tolist(),
            "margin": self._margin,
            "missing": self._missing,
            "in_vain": self._in_vain,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        self._budgets = torch.tensor(state["budgets"], dtype=torch.int64)
        self._window = torch.tensor(state["window"], dtype=torch.int64).view(-1, len(self.expected))
        self._margin, self._missing = state["margin"], state["missing"]
        self._in_vain = state["in_vain"]
