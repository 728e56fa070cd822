"""How many rows each pair of ranks may send in a step: from a formula, or learned from the steps before.

A budget is a number of rows for each bucket and pair (source, owner). All ranks know all counts, so each computes
the same budgets at the same step without a message.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dion_core.packing import binomial_capacity
from dion_core.transport import Bucket

Counts = tuple[int, ...]
"""Rows by pair, for all buckets: bucket after bucket, source after source, and each rank that owns a matrix."""

LOOKS_BACK = (4, 8)
"""Observed steps whose mean tells what a pair will need: few where needs drift, many where they scatter."""
AHEAD = 12
"""Steps from the last one known to the one that a budget is tried on: what it waits for counts, and half its life."""
WINDOW = 28
"""Observed steps that a learned budget looks back on: `AHEAD`, and those that it is tried on."""
SHARE = 0.0004
"""Of the rows needed that budgets may have refused when tried on the steps seen."""
NARROWEST, WIDEST = 1.85, 3.0
"""The range in which the margin is learned, in standard deviations; its middle until there are steps to learn from."""
JUMP = 0.005
"""Budgets are set at once when they would have refused more than this part of a step's rows."""
SCATTER = 0.25
"""And more than this times the root of a step's rows, so that few rows that scatter are no jump."""
SHORTEST, LONGER = 4, 6
"""Budgets are set anew after 4 steps, or a 6th of the steps since the last jump or the start if that is more."""
UNSETTLED = 20
"""Observed steps after a jump in which no pair is given less than its fair share and the widest margin: for as long
as momentum that decays by 0.95 takes to turn."""
PATIENCE = 8
"""Steps that tell nothing before one is believed: a rank may truly hold all the winners."""


def fixed_budgets(bucket: Bucket, capacity: float | None) -> list[list[int]]:
    """budgets[source][d] = ceil(c * n), n the rows that rank `working[d]` expects if winners scatter at random.

    Args:
        bucket: its owners and rows.
        capacity: c; None takes `binomial_capacity`.
    """
    world_size = bucket.layout.group.size
    budgets = []
    for owner in bucket.working:
        expected = len(bucket.owned(owner)) * bucket.total_rows / world_size
        factor = binomial_capacity(expected, world_size) if capacity is None else capacity
        budgets.append(math.ceil(factor * expected - 1e-9))
    return [budgets] * world_size


class LearnedBudgets:
    """Budgets that follow what the pairs needed.

    A budget is what its pair will need by the latest counts, and a margin: the narrowest that would have been wide
    enough on the steps seen, for all pairs of a bucket together. So is how many counts are the latest: 4 or 8,
    whichever would have needed the lower budgets. All budgets are set together, ever more rarely, and at once where
    they would have refused many rows: a jump. Momentum turns over many steps, so which pairs will be hot is not known
    soon after a jump: those that fall first may rise next. For 20 steps none is given less than a fair share would
    need. Say it is 64, and a pair falls from 40 to 15 and then rises to 79: it keeps a budget of
    64 + 3 * sqrt(65) = 88, where the counts of its fall alone would tell 15 + 3 * sqrt(16 * (1 + 1 / 4)) = 28.

    Sums are of integers, so that all ranks find the same budgets whatever processors and threads they have.
    """

    def __init__(self, fair: Sequence[Tensor]) -> None:
        """Starts without budgets.

        Args:
            fair: for each bucket the (pairs,) int64 rows that its pairs need if winners scatter at random.
        """
        self._fair = list(fair)
        self._budgets = torch.empty(0, dtype=torch.int64)
        self._window: deque[Tensor] = deque(maxlen=WINDOW)
        self._age, self._due, self._unclear, self._unsettled = 0, 0, 0, 0

    @property
    def budgets(self) -> Counts:
        """For each pair the rows provided; empty before the first step that tells something."""
        return tuple(self._budgets.tolist())

    @property
    def started(self) -> bool:
        """Whether a step told something, so that there are budgets."""
        return len(self._budgets) > 0

    def observe(self, needed: Tensor, *, clear: bool = True) -> bool:
        """Takes in the rows that one more step needed; true if budgets have changed.

        Args:
            needed: (pairs,) int64 on the CPU, bucket after bucket.
            clear: false if they are those of a step without gradient, and budgets had better not start by them.
        """
        total = int(needed.sum())
        if not total:  # a step that was skipped tells nothing
            return False
        if not self.started and not clear and self._unclear < PATIENCE:
            self._unclear += 1
            return False
        self._window.append(needed)
        if not self.started:
            self._budgets = self._suitable().maximum(needed)
            return True
        self._age += 1
        self._unsettled = max(self._unsettled - 1, 0)
        refused = _refused(needed, self._budgets)
        jump = refused > JUMP * total + SCATTER * math.sqrt(total)
        if not jump and self._age < self._due:
            return False
        before, self._budgets = self._budgets, self._suitable()
        if jump:
            self._budgets = self._budgets.maximum(needed)
            self._age, self._unsettled = 0, UNSETTLED
        if self._unsettled:
            self._budgets = self._budgets.maximum(_certain(torch.cat(self._fair)).with_margin(WIDEST))
        self._due = self._age + max(SHORTEST, self._age // LONGER)
        return not torch.equal(before, self._budgets)

    def _suitable(self) -> Tensor:
        """(pairs,) int64: the budgets that suit the counts seen."""
        seen = torch.stack(list(self._window)).split([len(fair) for fair in self._fair], dim=1)
        return torch.cat([_suitable(of_bucket, fair) for of_bucket, fair in zip(seen, self._fair, strict=True)])

    def state_dict(self) -> dict[str, Any]:
        """Plain data from which a resumed run goes on alike."""
        return {
            "budgets": self._budgets.tolist(),
            "window": [needed.tolist() for needed in self._window],
            "age": self._age,
            "due": self._due,
            "unclear": self._unclear,
            "unsettled": self._unsettled,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        self._budgets = torch.tensor(state["budgets"], dtype=torch.int64)
        self._window = deque((torch.tensor(needed) for needed in state["window"]), maxlen=WINDOW)
        self._age, self._due = state["age"], state["due"]
        self._unclear, self._unsettled = state["unclear"], state["unsettled"]


class _Forecast(NamedTuple):
    """What pairs will need: (pairs,) or (steps, pairs) float64, and its standard deviation, as large."""

    need: Tensor
    deviation: Tensor

    def with_margin(self, margin: float) -> Tensor:
        """int64: budgets, so many standard deviations above the need."""
        return (self.need + margin * self.deviation).round().long()


def _certain(need: Tensor) -> _Forecast:
    """The forecast if the mean need is known, and each count scatters around it like a Poisson count."""
    need = need.double()
    return _Forecast(need, (need + 1).sqrt())


def _suitable(seen: Tensor, fair: Tensor) -> Tensor:
    """(pairs,) int64: the budgets that suit the (steps, pairs) counts of one bucket."""
    looks_back, margin = _best(seen, fair)
    # One row at least: what a pair suddenly needs would else wait for as long as the counts take to arrive.
    return _forecasts(seen[-looks_back:], fair, looks_back).with_margin(margin)[-1].maximum(fair.clamp(max=1))


def _best(seen: Tensor, fair: Tensor) -> tuple[int, float]:
    """The number of counts and the margin whose budgets would have been the lowest that refuse only `SHARE`."""
    later = seen[AHEAD + 1 :]
    if not len(later):
        return LOOKS_BACK[0], (NARROWEST + WIDEST) / 2
    allowed = SHARE * int(later.sum())
    tried = []
    for looks_back in LOOKS_BACK:
        need, deviation = _forecasts(seen[:-AHEAD], fair, looks_back)
        forecasts = _Forecast(need[1:], deviation[1:])
        margin = _margin(later, forecasts, allowed)
        budgets = forecasts.with_margin(margin)
        tried.append((max(_refused(later, budgets), allowed), int(budgets.sum()), looks_back, margin))
    return min(tried)[2:]


def _forecasts(seen: Tensor, fair: Tensor, looks_back: int) -> _Forecast:
    """What the pairs will need as it looks after each of the (steps, pairs) counts, of which the latest few are used.

    It lies between their fair share and the mean of the latest counts.
    The mean is trusted as far as the pairs differ by more than scatter: if all pairs have the same hidden need, the
    high ones will fall and the low ones rise. What is trusted of the mean of n counts brings in 1/n of their variance.
    After a single count of 16, trusted to 3/4 where 8 are fair, the need is 14, and deviates by
    sqrt(15 * (1 + 3 / 4)) = 5.1; after 8 such counts, trusted alike, by sqrt(15 * (1 + 3 / 32)) = 4.1.
    """
    steps = torch.arange(1, len(seen) + 1).clamp(max=looks_back)[:, None]
    sums = seen.cumsum(dim=0)
    sums[looks_back:] -= sums[:-looks_back].clone()
    off = sums - fair * steps
    squares = off.square().sum(dim=1, keepdim=True)
    trust = torch.where(squares > 0, (1 - (fair.sum() * steps).double() / squares).clamp(min=0), 0)
    need, deviation = _certain(fair.double() + trust * (off.double() / steps))
    return _Forecast(need, deviation * (1 + trust / steps).sqrt())


def _margin(seen: Tensor, forecasts: _Forecast, allowed: float) -> float:
    """The narrowest margin with which budgets by the (steps, pairs) forecasts would have refused only what is allowed.

    The widest there is where none is wide enough.
    """
    low, high = NARROWEST, WIDEST
    for _ in range(6):
        middle = (low + high) / 2
        if _refused(seen, forecasts.with_margin(middle)) > allowed:
            low = middle
        else:
            high = middle
    return high


def _refused(needed: Tensor, budgets: Tensor) -> int:
    """The rows needed beyond the budgets."""
    return int((needed - budgets).clamp(min=0).sum())
