"""What the measurements of deferral say, as tables of text for the terminal and for the documentation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import mean

from benchmarks.deferral_demo import DemoResult
from benchmarks.deferral_pools import CAPACITIES, Capacity, Tally
from benchmarks.deferral_scatter import ScatterResult
from benchmarks.deferral_skew import MODEL, SkewResult

PAIR_SIZES = (0, 10, 50, 200, 1000)
DEFERRED, BYTES = "deferred % (learned / binomial / 1.0)", "bytes (learned / binomial / 1.0)"
FOLLOWED = 20
"""Within this many steps learned budgets have to follow other hot shards."""


@dataclass(frozen=True)
class Table:
    """A title, an explanation, column names, and rows of cells."""

    title: str
    text: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def percent(share: float) -> str:
    """A share in percent, to a thousandth where it is small."""
    return f"{100 * share:.3f}" if share < 0.002 else f"{100 * share:.2f}" if share < 0.02 else f"{100 * share:.1f}"


def times(ratio: float) -> str:
    """A ratio to two places."""
    return f"{ratio:.2f}"


def scatter_table(results: Sequence[ScatterResult]) -> Table:
    """(a), by the winners of an average pair."""
    rows = []
    for low, high in zip(PAIR_SIZES, (*PAIR_SIZES[1:], math.inf), strict=True):
        inside = [result for result in results if low <= result.tallies["learned"].pair_rows < high]
        if not inside:
            continue
        by_capacity = {capacity: [result.tallies[capacity] for result in inside] for capacity in CAPACITIES}
        changes = sum(len(result.changes) for result in inside)
        rows.append(
            [
                f"{low} to {high}" if high < math.inf else f"from {low}",
                str(len(inside)),
                _of_capacities(by_capacity, lambda tallies: percent(mean(tally.deferred for tally in tallies))),
                percent(max(tally.deferred for tally in by_capacity["learned"])),
                _of_capacities(by_capacity, lambda tallies: times(mean(tally.sent for tally in tallies))),
                times(mean(tally.allowed for tally in by_capacity["learned"])),
                _per_change(sum(len(tally.winners) for tally in by_capacity["learned"]), changes),
            ]
        )
    num_steps = len(results[0].tallies["learned"].winners)
    return Table(
        "Random scatter",
        f"{len(results)} settings of shape, ranks and fraction, {num_steps} steps each; means over the settings.",
        ["rows a pair", "settings", DEFERRED, "worst learned", BYTES, "aim", "steps a change"],
        rows,
    )


def skew_table(results: Sequence[SkewResult]) -> Table:
    """(b), by fraction, number of ranks and shape, and all shapes together; means over seeds."""

    def key(result: SkewResult) -> tuple[float, int]:
        return -result.fraction, result.world_size

    rows = []
    for (fraction, world_size), group in groupby(sorted(results, key=key), key=key):
        inside = list(group)
        by_capacity = {capacity: [r for r in inside if r.capacity == capacity] for capacity in CAPACITIES}
        learned = by_capacity["learned"]
        head = [f"{-fraction:g}", str(world_size)]
        for number, skew in enumerate(MODEL):
            tallies = {of: [result.tallies[number] for result in runs] for of, runs in by_capacity.items()}
            pair_rows = f"{tallies['learned'][0].pair_rows:.0f}"
            hottest = f"{mean(result.hottest[number] for result in learned):.1f}"
            rows.append([*head, str(skew.shape), pair_rows, hottest, *_skew_cells(tallies), ""])
        together = {of: [tally for result in runs for tally in result.tallies] for of, runs in by_capacity.items()}
        steps = sum(len(result.tallies[0].winners) for result in learned)
        changes = sum(len(result.changes) for result in learned)
        rows.append([*head, "together", "", "", *_skew_cells(together), _per_change(steps, changes)])
    seeds = len({result.seed for result in results})
    return Table(
        "Lasting skew",
        f"The model of the skew study, simulated for {len(results[0].tallies[0].winners)} steps, all of which count;"
        f" learned at fraction 0.25: seeds together, {seeds} of them. Hottest: the most winners of a matrix on one rank"
        " over the fair share, in the last step.",
        ["fraction", "W", "matrices", "rows a pair", "hottest", DEFERRED, BYTES, "aim", "steps a change"],
        rows,
    )


def _skew_cells(by_capacity: dict[Capacity, list[Tally]]) -> list[str]:
    return [
        _of_capacities(by_capacity, lambda tallies: percent(deferred_share(tallies))),
        _of_capacities(by_capacity, lambda tallies: times(sent_ratio(tallies))),
        times(allowed_ratio(by_capacity["learned"])),
    ]


def _of_capacities(by_capacity: dict[Capacity, list[Tally]], cell: Callable[[list[Tally]], str]) -> str:
    return " / ".join(cell(by_capacity[capacity]) for capacity in CAPACITIES)


def course_table(results: Sequence[SkewResult]) -> Table:
    """(b), learned, where the start tells nothing and where other shards become hot."""
    rows = []
    for result in results:
        course, by_step = result.course, result.deferred_by_step
        shifted = course.shift_at >= 0
        after = by_step[course.shift_at :] if shifted else []
        rows.append(
            [
                f"others hot from step {course.shift_at}" if shifted else f"{course.zero_steps} steps without gradient",
                str(result.world_size),
                percent(deferred_share(result.tallies)),
                str(_settled(after)) if shifted else "",
                percent(mean(after[:FOLLOWED])) if shifted else "",
                percent(mean(after[FOLLOWED:])) if shifted else "",
                times(sent_ratio(result.tallies)),
                str(result.longest_wait),
                str(result.still_waiting),
            ]
        )
    return Table(
        "Lasting skew with a bad start or a sudden change",
        "All matrices at fraction 0.25, learned. Longest wait: steps from a row's first refusal until it was applied,"
        " those in which it was no winner included.",
        [
            "course",
            "W",
            "deferred %",
            "steps until below 1 %",
            f"in {FOLLOWED} steps after",
            "later",
            "bytes",
            "longest wait",
            "waiting at the end",
        ],
        rows,
    )


def _settled(shares: Sequence[float]) -> int:
    """After how many steps less than 1 % was deferred for good."""
    return max((step + 1 for step, share in enumerate(shares) if share >= 0.01), default=0)


def demo_table(results: Sequence[DemoResult], world_size: int) -> Table:
    """(c), by capacity."""
    rows = []
    for result in results:
        num_steps = len(result.tallies[0].winners)
        second_half = [tally.after(num_steps // 2) for tally in result.tallies]
        rows.append(
            [
                str(result.capacity),
                percent(deferred_share(result.tallies)),
                percent(deferred_share(second_half)),
                times(sent_ratio(result.tallies)),
                times(sent_ratio(second_half)),
                times(allowed_ratio(result.tallies)) if result.capacity == "learned" else "",
                str(len(result.changes)),
                f"{result.loss:.3f}",
            ]
        )
    num_steps = len(results[0].tallies[0].winners)
    pairs = ", ".join(f"{tally.pair_rows:.0f}" for tally in results[0].tallies)
    shapes = ", ".join(map(str, results[0].shapes))
    return Table(
        "The demo's training",
        f"{num_steps} steps on {world_size} ranks from the first one on; {shapes}, with {pairs} rows a pair.",
        [
            "capacity",
            "deferred %",
            "second half",
            "bytes",
            "second half",
            "aim",
            "changes",
            "last training loss",
        ],
        rows,
    )


def deferred_share(tallies: Sequence[Tally]) -> float:
    """The share of all winners that was deferred."""
    return sum(sum(tally.refused) for tally in tallies) / sum(sum(tally.winners) for tally in tallies)


def sent_ratio(tallies: Sequence[Tally]) -> float:
    """Rows sent over all winners."""
    return sum(sum(tally.slots) for tally in tallies) / sum(sum(tally.winners) for tally in tallies)


def allowed_ratio(tallies: Sequence[Tally]) -> float:
    """What learned budgets may send at most, over all winners."""
    winners = [sum(tally.winners) for tally in tallies]
    return sum(tally.allowed * rows for tally, rows in zip(tallies, winners, strict=True)) / sum(winners)


def _per_change(num_steps: int, changes: int) -> str:
    return f"{num_steps / changes:.0f}" if changes else f"over {num_steps}"
