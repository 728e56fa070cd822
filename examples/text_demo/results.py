"""The numbers of the runs, as plain data, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from text_demo.settings import Run


@dataclass(frozen=True)
class Progress:
    """Where a run stands; sent by rank 0 after every step."""

    run: Run
    step: int
    loss: float  # nats a byte, of the batch


@dataclass(frozen=True)
class RunResult:
    """One finished run. Losses are in nats a byte."""

    run: Run
    training_loss: tuple[float, ...]  # of every step's batch, before the step
    validation_loss: tuple[tuple[int, float], ...]  # (steps done, loss on the whole validation text)
    bytes_per_step: float  # the optimizer sends, mean over ranks; the gradients' own traffic not counted
    rows_applied: float  # a step, all ranks together
    rows_deferred: float
    step_ms: float  # median, whole step
    optimizer_ms: float  # median, of it in `optimizer.step()`

    @property
    def final_loss(self) -> float:
        """The validation loss after the last step."""
        return self.validation_loss[-1][1]

    @property
    def bits_per_byte(self) -> float:
        """The same in bits, as compression is measured."""
        return self.final_loss / math.log(2)

    def distance(self, other: RunResult) -> float:
        """The largest difference between two runs' losses at the same step."""
        pairs = [*zip(self.training_loss, other.training_loss, strict=True)]
        pairs += [
            (mine[1], theirs[1]) for mine, theirs in zip(self.validation_loss, other.validation_loss, strict=True)
        ]
        return max(abs(mine - theirs) for mine, theirs in pairs)


COLUMNS = (
    "run",
    "loss\n(nats)",
    "bits per\nbyte",
    "bytes sent\na step",
    "rows\napplied",
    "rows\ndeferred",
    "step\n(ms)",
    "optim.\n(ms)",
)


def table_rows(results: Sequence[RunResult]) -> list[tuple[str, ...]]:
    """One row of text a run, for `COLUMNS`; "-" where AdamW has no such number."""
    rows = []
    for result in results:
        moved = [f"{number:,.0f}" for number in (result.bytes_per_step, result.rows_applied)]
        moved.append(f"{result.rows_deferred:,.1f}")
        rows.append(
            (
                result.run.name,
                f"{result.final_loss:.4f}",
                f"{result.bits_per_byte:.3f}",
                *(moved if result.run.transport else ["-"] * len(moved)),
                f"{result.step_ms:.0f}",
                f"{result.optimizer_ms:.0f}",
            )
        )
    return rows


def conclusions(results: Sequence[RunResult], unigram_entropy: float) -> list[str]:
    """What the table shows, in sentences; also where it does not show what it should."""
    return [_exactness(results), _learning(results, unigram_entropy)]


def _exactness(results: Sequence[RunResult]) -> str:
    exact = [result for result in results if result.run.exact and result.rows_deferred == 0]
    deferring = [result.run.name for result in results if result.run.exact and result.rows_deferred > 0]
    left_out = f" ({', '.join(deferring)} deferred rows and is left out)" if deferring else ""
    names = ", ".join(result.run.name for result in exact)
    if len(exact) < 2:
        return f"Exact transports: {names or 'none'}, so there are no two curves to compare{left_out}."
    largest = max(one.distance(other) for one, other in combinations(exact, 2))
    verdict = "coincide" if largest < 1e-3 else "DO NOT coincide"
    return f"Exact transports' curves {verdict} ({names}): largest difference {largest:.3g} nats{left_out}."


def _learning(results: Sequence[RunResult], unigram_entropy: float) -> str:
    above = [result for result in results if not result.bits_per_byte < unigram_entropy]  # also catches NaN
    if not above:
        highest = max(results, key=lambda result: result.bits_per_byte)
        return (
            f"Every run fell below the unigram entropy of {unigram_entropy:.3f} bits per byte;"
            f" the highest is {highest.run.name} with {highest.bits_per_byte:.3f}."
        )
    shown = ", ".join(f"{result.run.name} {result.bits_per_byte:.3f}" for result in above)
    return f"NOT below the text's unigram entropy of {unigram_entropy:.3f} bits per byte: {shown}."
