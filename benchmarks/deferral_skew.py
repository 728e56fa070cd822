"""Winners under lasting skew: shards of different strength and the dynamics of momentum with error feedback.

Only the norms of the momentum rows are simulated, which is all that the choice looks at. The gradient of a row has
a norm of its own that varies a little by step, and its direction is almost independent of the momentum's. Chosen
rows that are applied decay by 0.95. Strengths differ by head (64 rows), by 16 rows, by row, and by heads of equal
number in all matrices, so that the hottest shards are about as hot as they were found in training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.deferral_pools import Capacity, Pools, Shape, Tally, make_buckets, whole_selection
from dion_core.collectives import SoloGroup
from dion_core.deferral import wait_, with_age
from dion_core.layout import Axis, RowTables, split_layout
from dion_core.rows import RowSelection
from dion_core.selection import GlobalRows

DECAY = 0.95
"""Error feedback."""
NOISE = 0.2
"""Standard deviation, over steps, of the logarithm of a row's gradient norm."""
ALIGNMENT = 0.05
"""Mean cosine of a row's gradient and momentum; its standard deviation is that of random directions."""


@dataclass(frozen=True)
class Skew:
    """Matrices, and the standard deviations of the logarithm of their rows' strength.

    Attributes:
        shape: of the matrices.
        shared: of heads, the same in all matrices.
        head: of heads, in each matrix for itself.
        block: of 16 rows.
        row: of single rows.
    """

    shape: Shape
    shared: float
    head: float
    block: float
    row: float

    def strengths(self, generator: torch.Generator) -> Tensor:
        """(N, R) strengths, drawn anew."""
        matrices, rows = self.shape.matrices, self.shape.rows

        def spread(deviation: float, num_matrices: int, length: int) -> Tensor:
            drawn = torch.randn(num_matrices, rows // length, generator=generator, dtype=torch.float64)
            return (deviation * drawn).repeat_interleave(length, dim=1)

        logarithm = spread(self.shared, 1, 64) + spread(self.head, matrices, 64)
        return (logarithm + spread(self.block, matrices, 16) + spread(self.row, matrices, 1)).exp()


# The matrices of the model in which the skew was measured; q, k, v, o vary most.
MODEL = (
    Skew(Shape(32, 512, 512), shared=0.2, head=0.4, block=0.1, row=0.2),
    Skew(Shape(8, 2048, 512), shared=0.05, head=0.12, block=0.05, row=0.2),
    Skew(Shape(8, 512, 2048), shared=0.08, head=0.2, block=0.08, row=0.2),
)


class Momentum:
    """The row norms of one bucket's momentum, by one generator for all capacities alike."""

    def __init__(self, skew: Skew, fraction: float, seed: int) -> None:
        self.skew = skew
        self._generator = torch.Generator().manual_seed(seed)
        self._selector = GlobalRows(fraction)
        matrices, rows, columns = skew.shape.matrices, skew.shape.rows, skew.shape.columns
        layout = split_layout(SoloGroup(), Axis.ROWS, (rows, columns)).stack(matrices)
        self._tables = RowTables(layout, torch.device("cpu"))
        self._active = torch.ones(matrices, dtype=torch.bool)
        self.norm = torch.zeros(matrices, rows, dtype=torch.float64)
        self.waited = torch.zeros(matrices, rows, 1, dtype=torch.int32)
        self.shift()

    def shift(self) -> None:
        """Other shards become hot."""
        self._strength = self.skew.strengths(self._generator)

    def accumulate(self, *, zero: bool) -> RowSelection:
        """Adds a gradient (zero: of zeros, as behind weights that start at zero) and chooses from whole matrices."""
        noise, cosine = (torch.randn(self.norm.shape, generator=self._generator, dtype=torch.float64) for _ in "12")
        gradient = self._strength * (NOISE * noise).exp() * (not zero)
        cosine = ALIGNMENT + cosine / math.sqrt(self.skew.shape.columns)
        square = self.norm.square() + gradient.square() + 2 * cosine * self.norm * gradient
        self.norm = square.clamp(min=0).sqrt()
        return self._selector.select(self.norm, self._tables, self._active)

    def apply(self, chosen: RowSelection, admitted: RowSelection) -> None:
        """Decays the admitted rows, and counts for how long the others wait."""
        if chosen is not admitted or self.waited.any():
            wait_(list(self.waited), chosen, admitted)
        decay = torch.where(admitted.valid(), DECAY, 1.0).double()
        self.norm.scatter_(1, admitted.index, self.norm.gather(1, admitted.index) * decay)


@dataclass(frozen=True)
class Course:
    """How a simulated training goes.

    Attributes:
        num_steps: its length.
        zero_steps: first steps in which no gradient arrives.
        shift_at: the step at which other shards become hot; none if it is never reached.
    """

    num_steps: int
    zero_steps: int = 0
    shift_at: int = -1


@dataclass(frozen=True)
class SkewResult:
    """One simulated training.

    Attributes:
        tallies: for each bucket of the model.
        changes: the steps in which budgets changed.
        hottest: for each bucket the most winners of a matrix on one rank over the fair share, in the last step.
        longest_wait: steps that a refused row waited at most.
        still_waiting: rows that wait at the end.
    """

    world_size: int
    fraction: float
    capacity: Capacity
    course: Course
    seed: int
    tallies: list[Tally]
    changes: list[int]
    hottest: list[float]
    longest_wait: int
    still_waiting: int

    @property
    def deferred_by_step(self) -> list[float]:
        """The share of all buckets' winners that was deferred."""
        steps = zip(*(zip(tally.refused, tally.winners, strict=True) for tally in self.tallies), strict=True)
        return [sum(refused for refused, _ in step) / sum(winners for _, winners in step) for step in steps]


def simulate(world_size: int, fraction: float, capacity: Capacity, course: Course, seed: int) -> SkewResult:
    """One training of the model's matrices; the same gradients for every capacity and number of ranks."""
    buckets = make_buckets([skew.shape for skew in MODEL], world_size, fraction)
    pools = Pools(buckets, capacity)
    momenta = [Momentum(skew, fraction, 100 * seed + number) for number, skew in enumerate(MODEL)]
    longest_wait = 0
    counts: list[Tensor] = []
    for step in range(course.num_steps):
        if step == course.shift_at:
            for momentum in momenta:
                momentum.shift()
        chosen = [momentum.accumulate(zero=step < course.zero_steps) for momentum in momenta]
        counts = _step(pools, momenta, [whole_selection(*pair) for pair in zip(buckets, chosen, strict=True)])
        longest_wait = max(longest_wait, *(int(momentum.waited.max()) for momentum in momenta))
    hottest = [
        float(of_bucket.max() * world_size / bucket.total_rows)
        for of_bucket, bucket in zip(counts, buckets, strict=True)
    ]
    waiting = sum(int((momentum.waited > 0).sum()) for momentum in momenta)
    return SkewResult(
        world_size, fraction, capacity, course, seed, pools.tallies, pools.changes, hottest, longest_wait, waiting
    )


def _step(pools: Pools, momenta: Sequence[Momentum], chosen: Sequence[RowSelection]) -> list[Tensor]:
    counts = [selection.count_by_rank for selection in chosen]
    pools.begin(counts)
    for number, (momentum, selection) in enumerate(zip(momenta, chosen, strict=True)):
        admitted = selection
        if pools.excess(number, counts[number]):
            aged = with_age(selection, list(momentum.waited))
            admitted = pools.admit(number, aged)
        momentum.apply(selection, admitted)
        pools.count(number, counts[number], int((selection.count - admitted.count).sum()))
    return counts
