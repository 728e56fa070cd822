"""What the four optimizers differ in: which rows they choose, and how they scale what comes back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from dion_core.layout import Axis
from dion_core.normalization import Normalizer
from dion_core.selection import AllRows, GlobalRows, LocalRows, Selector, SlackRows
from dion_core.transport import Scope

Scale = Literal["spectral_norm", "rms_norm"] | None
SCALES: tuple[Scale, ...] = ("spectral_norm", "rms_norm", None)
SCOPES: tuple[Scope, ...] = ("all", "local", "global")


@dataclass(frozen=True)
class Rule:
    """One momentum rule: accumulate, take, decay what was taken.

    Attributes:
        normalizer: what scales the rows that come back.
        chooses_rows: whether a fraction of the rows is applied (Dion2 family) or all of them (Muon family).
    """

    normalizer: Normalizer
    chooses_rows: bool


def selector(
    scope: Scope, fraction: float, axis: Axis, slack: float | None = None, *, shards: int | None = None
) -> Selector:
    """The selector of a scope. Where rows are not split, the local choice is the global one."""
    if scope == "all":
        return AllRows()
    if scope == "local" and axis is Axis.ROWS:
        return LocalRows(fraction, shards) if slack is None else SlackRows(fraction, slack, shards)
    return GlobalRows(fraction)


def update_scale(scale: Scale, rows: int, columns: int) -> float:
    """The factor of the learning rate for a matrix of this global shape (fan_out = rows, fan_in = columns).

    `spectral_norm`: sqrt(fan_out / fan_in) (Bernstein 2025). `rms_norm`: 0.2 * sqrt(max(fan_out, fan_in)),
    which gives updates the RMS that AdamW's have (Liu et al. 2025). None: 1.
    """
    if scale is None:
        return 1.0
    if scale == "spectral_norm":
        return math.sqrt(rows / columns)
    return 0.2 * math.sqrt(max(rows, columns))
