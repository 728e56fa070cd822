"""How fast a machine's processors, memory and links are, measured (`dion bench`) or assumed, kept as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

FORMAT = 1
"""The version of the file, which `load` demands."""

Point = tuple[float, float]
"""(size, rate): what is reached at a size."""


@dataclass(frozen=True)
class Machine:
    """Rates of one rank.

    Attributes:
        name: what it is, and where the figures come from.
        copy: bytes/s of a large copy in the device's memory, read and written bytes counted.
        newton_schulz: FLOP/s of a whole iteration by the shorter side of the matrix, half-cost products counted once.
        in_node: bytes/s that a rank sends to others of its node, by the bytes that it sends there in one all-to-all.
        between: the same for other nodes.
        itself: bytes/s of what a rank sends to itself; None takes half of `copy`, which counts a byte twice.
        latency: seconds a collective takes besides.
        host_read: seconds a step loses where the host waits for the device.
    """

    name: str
    copy: float
    newton_schulz: tuple[Point, ...]
    in_node: tuple[Point, ...]
    between: tuple[Point, ...]
    itself: float | None = None
    latency: float = 20e-6
    host_read: float = 1e-3

    def with_links(self, *, in_node: float | None, between: float | None, every: float | None) -> Machine:
        """The machine with links of these bytes/s at every size; None leaves one as it is.

        Args:
            in_node: of the links inside a node.
            between: of those between nodes.
            every: one rate for all that a rank sends, to itself too.
        """
        changed = self
        if every is not None:
            flat = ((1.0, every),)
            changed = replace(changed, in_node=flat, between=flat, itself=every)
        if in_node is not None:
            changed = replace(changed, in_node=((1.0, in_node),))
        if between is not None:
            changed = replace(changed, between=((1.0, between),))
        return changed

    def describe(self) -> str:
        """The name and the best rates of the links."""
        in_node, between = (max(rate for _, rate in points) / 1e9 for points in (self.in_node, self.between))
        return f"{self.name}; links up to {in_node:g} GB/s a rank in a node, {between:g} between nodes"


def rate_at(points: Sequence[Point], size: float) -> float:
    """The rate at a size: on straight lines between the points on logarithmic axes, the outermost rates beyond them.

    Of 10 GB/s at 1 MB and 40 GB/s at 16 MB, 4 MB get 20 GB/s.
    """
    if size <= points[0][0]:
        return points[0][1]
    for (low, before), (high, after) in pairwise(points):
        if size <= high:
            part = math.log(size / low) / math.log(high / low)
            rate: float = before * (after / before) ** part
            return rate
    return points[-1][1]


def save(machine: Machine, path: Path) -> None:
    """Writes the profile."""
    path.write_text(json.dumps({"format": FORMAT, **asdict(machine)}, indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> Machine:
    """The machine of a file that `save` wrote.

    Raises:
        ValueError: it is no profile, or one of another format; the message says which entry is wrong.
    """
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: no machine profile can be read: {error}") from error
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise ValueError(f"{path} is not a machine profile of format {FORMAT}: write one with dion bench")
    try:
        content.update({name: _points(name, content[name]) for name in ("newton_schulz", "in_node", "between")})
        if not min(content["copy"], content.get("itself") or 1) > 0:
            raise TypeError("copy and itself must be above 0")
        return Machine(**content)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a machine profile: {error}") from error


def _points(name: str, given: Any) -> tuple[Point, ...]:
    points = tuple((float(size), float(rate)) for size, rate in given)
    if not points or list(points) != sorted(points) or min(map(min, points)) <= 0:
        raise TypeError(f"{name} must be pairs of size and rate above 0, by size")
    return points


_MIB = float(2**20)

H200 = Machine(
    name="H200 (docs/performance.md)",
    copy=4.15e12,
    # From whole steps: 384 and 1536 those of 1b, 1280 and 5120 of 5120x8, 4480 of 14b.
    newton_schulz=(
        (128, 40e12),
        (384, 160e12),
        (1280, 490e12),
        (1536, 400e12),
        (4480, 640e12),
        (5120, 675e12),
    ),
    in_node=(
        (1 * _MIB, 10e9),
        (4 * _MIB, 46e9),
        (16 * _MIB, 134e9),
        (64 * _MIB, 213e9),
        (256 * _MIB, 272e9),
        (1024 * _MIB, 324e9),
    ),
    between=((1 * _MIB, 10e9), (16 * _MIB, 25e9)),
)
"""What is assumed where no profile is given; that nodes are linked by 25 GB/s a rank was not measured."""
