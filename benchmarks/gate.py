"""The gate: no count of a commit may be above that of the commit it is compared with.

Counts are figures of `track_` benchmarks, which are alike in every run; times and memory of processes scatter, and are
reported elsewhere. A rise that is wanted is accepted by a line at the end of a commit's message::

    Accepted-rise: bench_counts.Counts.track_bytes(capped, *) because budgets are wider after a change

Its pattern, in which `*` stands for anything, must match the whole name of the figure. Without a reason it counts for
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from benchmarks.figures import Figures, Name

TRAILER = "Accepted-rise"
BECAUSE = " because "


@dataclass(frozen=True)
class Change:
    """A count before and after; None where it is missing or failed."""

    name: Name
    before: float | None
    after: float | None
    reason: str = ""

    def __str__(self) -> str:
        because = f" ({self.reason})" if self.reason else ""
        return f"{self.name}: before {shown(self.before)}, after {shown(self.after)}{because}"


@dataclass(frozen=True)
class Verdict:
    """What became of the counts.

    Attributes:
        rises: those that are higher, and not accepted.
        failures: those that cannot be measured any more, or are new and cannot be measured.
        accepted: those that are higher, and the reasons.
        falls: those that are lower.
        new: those that were not there before.
        vanished: those that are not there any more: a transport or a benchmark was removed.
        failing: those that could not be measured before either.
        same: how many did not change.
    """

    rises: tuple[Change, ...]
    failures: tuple[Change, ...]
    accepted: tuple[Change, ...]
    falls: tuple[Change, ...]
    new: tuple[Change, ...]
    vanished: tuple[Change, ...]
    failing: tuple[Change, ...]
    same: int

    @property
    def passes(self) -> bool:
        return not self.rises and not self.failures


def accepted_rises(trailers: Iterable[str]) -> dict[str, str]:
    """By pattern the reason, of the values of trailers; those without a reason are left out."""
    pairs = (trailer.partition(BECAUSE) for trailer in trailers)
    return {pattern.strip(): reason.strip() for pattern, _, reason in pairs if pattern.strip() and reason.strip()}


def judge(before: Figures, after: Figures, accepted: dict[str, str]) -> Verdict:
    """Compares all counts.

    Args:
        before: the figures of the older commit.
        after: those of the newer one, on the same machine and measured by the same benchmarks.
        accepted: by pattern the reason for which rises of the counts that it matches are accepted.
    """
    found: dict[str, list[Change]] = {field: [] for field in Verdict.__dataclass_fields__ if field != "same"}
    same = 0
    for name in dict.fromkeys([*before, *after]):
        if name.kind != "track":
            continue
        old, new = before.get(name), after.get(name)
        reason = next((why for pattern, why in accepted.items() if fnmatchcase(str(name), pattern)), "")
        change = Change(name, old, new, reason)
        if name not in after:
            found["vanished"].append(change)
        elif new is None:
            found["failing" if name in before and old is None else "failures"].append(change)
        elif old is None:  # also where it failed before
            found["new"].append(change)
        elif new > old:
            found["accepted" if reason else "rises"].append(change)
        elif new < old:
            found["falls"].append(change)
        else:
            same += 1
    return Verdict(**{field: tuple(changes) for field, changes in found.items()}, same=same)


def shown(value: float | None) -> str:
    """A count as text."""
    return "none" if value is None else f"{value:,.10g}"


def describe(verdict: Verdict) -> str:
    """The verdict as lines of text, what fails last."""
    lines = [f"counts: {verdict.same} as before"]
    titles = {
        "new": "new",
        "vanished": "vanished",
        "failing": "failed, as before",
        "falls": "lower",
        "accepted": "higher, and accepted",
        "failures": "FAILED",
        "rises": "HIGHER",
    }
    for field, title in titles.items():
        changes: tuple[Change, ...] = getattr(verdict, field)
        if changes:
            lines.append(f"{title}: {len(changes)}")
            lines += _listed(changes, everything=field in ("rises", "failures", "accepted", "vanished"))
    if verdict.rises:
        lines.append(
            f"a rise that is wanted is accepted by a line of the commit's message: {TRAILER}: PATTERN because WHY"
        )
    return "\n".join(lines)


def _listed(changes: tuple[Change, ...], *, everything: bool) -> list[str]:
    most = len(changes) if everything else 10
    more = [f"  and {len(changes) - most} more"] if len(changes) > most else []
    return [f"  {change}" for change in changes[:most]] + more
