"""The lowest bytes that budgets could have had: `python -m benchmarks.deferral_bound [--skew]`.

In the demo's training, or with --skew in the simulated trainings with lasting skew at fraction 1/16.

Budgets of one form are tried with hindsight: a pair's mean need over the last n counts, which arrive 8 steps late,
and z times its root. n is the best for the run, and z the best for each shape, or for each shape and phase of the
run, such that 0.1 % of the winners are deferred in all. Budgets are set at fixed times. Before the first late count
arrives the mean is the fair share in the demo, whose first step has no gradient and tells nothing, and the count of
the first step with --skew. Budgets of
another form, or set at other times, are not bounded by this: what the learned ones did in the same trainings, without
hindsight, is printed beside it.

Legend: T steps, P pairs of ranks (of all buckets), G groups that share a z, Z values of z.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks import deferral_skew
from benchmarks.deferral_demo import train
from benchmarks.deferral_pools import make_buckets
from benchmarks.deferral_tables import deferred_share, sent_ratio
from dion_comm_capped import Capped
from dion_comm_capped.budgets import fixed_budgets
from dion_comm_capped.capped import DELAY, CappedSession, PooledExchange
from dion_comm_capped.ops import rows_by_pair
from dion_comm_capped.pool import PoolPlan
from dion_core.rows import RowSelection
from dion_core.steps import Steps
from dion_core.transport import Bucket, Session
from text_demo.pool import run_ranks
from text_demo.rank import Rank
from text_demo.settings import Settings

Array = npt.NDArray[np.float64]

SHARE = 0.001
"""Of the winners that may be deferred."""
LOOKS_BACK = (1, 2, 4, 8, 16, 32)
MARGINS = np.arange(0, 8, 0.1)
PRICES = np.geomspace(0.5, 3000, 400)
"""Of a refused row in rows sent: each gives the cheapest margins for some share deferred."""
PHASES = (1, DELAY + 1, 20, 50)
"""The steps at which the phases after the first begin."""
EVERY = (1, 4, 8, 16, 24)
SKEW_STEPS = 240


class RecordingSession(CappedSession):
    """Notes what every pair needs, step by step."""

    def begin(self, selections: Sequence[RowSelection]) -> Steps[None]:
        counts = [selection.count_by_rank for selection in selections]
        places, num_owners = [], []
        for exchange in self.exchanges:
            assert isinstance(exchange, PooledExchange)
            places.append(exchange.tables.place)
            num_owners.append(len(exchange.bucket.working))
        Recording.needed.append(rows_by_pair(counts, places, num_owners).cpu())
        return super().begin(selections)


@dataclass(frozen=True)
class Recording(Capped):
    """`capped`, learned, with a record of what the pairs needed."""

    needed: ClassVar[list[Tensor]] = []

    def open(self, buckets: Sequence[Bucket]) -> Session:
        return RecordingSession(buckets, self)


def record(rank: Rank, seeds: Sequence[int], num_steps: int) -> None:
    """Tells, for every seed, (T, P) counts, (P,) shape number, fair share, offered and header rows, and the outcome.

    The outcome are the share of winners that learned budgets deferred, and their rows sent over winners.
    """
    for seed in seeds:
        settings = Settings(steps=num_steps, world_size=rank.world_size, seed=seed)
        Recording.needed.clear()
        result = train(rank, Recording(), settings.corpus(), settings)
        buckets = make_buckets(result.shapes, rank.world_size, settings.fraction)
        outcome = deferred_share(result.tallies), sent_ratio(result.tallies)
        rank.tell((torch.stack(Recording.needed).double().numpy(), _pairs(buckets), outcome))


def _pairs(buckets: Sequence[Bucket]) -> Array:
    ranks = range(buckets[0].layout.group.size)
    return np.array(
        [
            [number, fixed_budgets(bucket, 1.0)[source][place], bucket.offered_by_pair[source][place], header(owner)]
            for number, bucket in enumerate(buckets)
            for header in [PoolPlan(bucket, [], always_pack=False).header_rows]
            for source in ranks
            for place, owner in enumerate(bucket.working)
        ],
        dtype=np.float64,
    ).T


def forecast(needed: Array, first: Array, *, looks_back: int, every: int) -> Array:
    """(T, P): the mean of the last counts that were there when budgets were last set, every few steps."""
    rows = [needed[0], *[first] * DELAY]
    for step in range(DELAY + 1, len(needed)):
        if (step - DELAY - 1) % every:
            rows.append(rows[-1])
            continue
        last = step - DELAY
        rows.append(needed[max(last - looks_back + 1, 1) : last + 1].mean(axis=0))
    return np.array(rows)


def lowest(needed: Array, pairs: Array, *, by_phase: bool, every: int, first: Array | None = None) -> float:
    """Rows sent over winners, headers counted, at the best n and the best z of every group."""
    number, fair, offered, header = pairs
    first = fair if first is None else first
    phase = np.searchsorted(PHASES, np.arange(len(needed)), side="right") * by_phase
    group = (phase[:, None] * len(fair) + number).astype(int).ravel()
    best = np.inf
    for looks_back in LOOKS_BACK:
        mean = forecast(needed, first, looks_back=looks_back, every=every)
        sent, refused = [], []
        for margin in MARGINS:
            budget = np.floor(mean + margin * np.sqrt(np.maximum(mean, 1)))
            packed = budget + header < offered
            capacity = np.where(packed, budget, offered)
            sent.append(np.bincount(group, (capacity + packed * header / 2).ravel()))
            refused.append(np.bincount(group, np.maximum(needed - capacity, 0).ravel()))
        best = min(best, *_totals(np.array(sent), np.array(refused), SHARE * needed.sum()))
    return best / float(needed.sum())


def _totals(sent: Array, refused: Array, allowed: float) -> Iterator[float]:
    """Rows sent, of (Z, G), at the cheapest margins for each price at which no more rows than allowed are refused."""
    groups = np.arange(sent.shape[1])
    for price in PRICES:
        chosen = (sent + price * refused).argmin(axis=0)
        if refused[chosen, groups].sum() <= allowed:
            yield float(sent[chosen, groups].sum())


def skewed(world_size: int, fraction: float, seed: int) -> tuple[Array, Array]:
    """(T, P) counts of one simulated training with lasting skew, and what `record` tells of the pairs."""
    steps: list[list[Tensor]] = []

    def step(*arguments: Any) -> list[Tensor]:
        steps.append(take_step(*arguments))
        return steps[-1]

    take_step = deferral_skew._step
    with patch.object(deferral_skew, "_step", step):
        deferral_skew.simulate(world_size, fraction, "learned", deferral_skew.Course(SKEW_STEPS), seed)
    buckets = make_buckets([skew.shape for skew in deferral_skew.MODEL], world_size, fraction)
    places = [torch.tensor([bucket.place_of_owner[owner] for owner in bucket.owners]) for bucket in buckets]
    num_owners = [len(bucket.working) for bucket in buckets]
    needed = torch.stack([rows_by_pair(counts, places, num_owners) for counts in steps])
    return needed.double().numpy(), _pairs(buckets)


def print_skew() -> None:
    """The bounds at fraction 1/16, where pairs have few rows: of all shapes, and of each as if it were alone."""
    for world_size in (8, 32):
        needed, pairs = skewed(world_size, 1 / 16, seed=0)
        everything = np.ones(len(pairs[0]), dtype=bool)
        alone = {str(skew.shape): pairs[0] == number for number, skew in enumerate(deferral_skew.MODEL)}
        for name, inside in {"all": everything, **alone}.items():
            counts, of_shapes = needed[:, inside], pairs[:, inside]
            of_shapes[0] -= of_shapes[0, 0]  # they are numbered from 0 on
            ratios = [lowest(counts, of_shapes, by_phase=False, every=every, first=counts[0]) for every in EVERY]
            cells = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"W {world_size}, {name}: budgets set every {EVERY} steps send {cells} times the winners", flush=True)


def main() -> None:
    """Trains once a seed and prints the bounds as a table."""
    parser = argparse.ArgumentParser(description="The lowest bytes that budgets could have had.")
    parser.add_argument("--seeds", type=int, default=8, help="trainings (%(default)s), 20 s each")
    parser.add_argument("--skew", action="store_true", help="of the simulated trainings at fraction 1/16")
    given = parser.parse_args()
    if given.skew:
        print_skew()
        return
    runs, outcomes = [], []
    for message in run_ranks(record, 4, range(1, given.seeds + 1), 100):
        assert isinstance(message, tuple)
        runs.append(message[:2])
        outcomes.append(message[2])
    deferred, sent = zip(*outcomes, strict=True)
    cells = ", ".join(f"{100 * share:.3f}" for share in (np.mean(deferred), min(deferred), max(deferred)))
    print(f"learned budgets deferred {cells} %, sent {np.mean(sent):.3f}, {min(sent):.2f}, {max(sent):.2f}", flush=True)
    print("budgets set every | one margin a shape: mean, lowest, highest | one a shape and phase")
    for every in EVERY:
        cells = []
        for by_phase in (False, True):
            ratios = [lowest(*run, by_phase=by_phase, every=every) for run in runs]
            cells.append(f"{np.mean(ratios):.2f}, {min(ratios):.2f}, {max(ratios):.2f}")
        print(f"{every} steps | {cells[0]} | {cells[1]}", flush=True)


if __name__ == "__main__":
    main()
