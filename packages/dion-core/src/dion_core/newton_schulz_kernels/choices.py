"""How the kernels are set up for a shape: measured by `python -m benchmarks.newton_schulz --write`.

A choice depends on the device's name and the shape alone, so that ranks with equal devices get equal bits. A shape
that was not measured takes the choice of the nearest one that was, by the sum of the distances of the logarithms of
order, length and batch size. A device that was not measured takes `DEFAULT`, or `SMALL` for few blocks. Of a batch that
is worked on in parts the first one counts.

Legend: m the shorter side of a matrix, n the longer one, B matrices.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dion_core.newton_schulz_kernels import listing

MEASURED = Path(__file__).with_name("choices.json")


@dataclass(frozen=True)
class Choice:
    """Settings of the kernel of products.

    Attributes:
        wide: blocks of 128 columns in a tile, 1 or 2.
        depth: of a slice, 32 or 64.
        stages: slices in flight.
        band: rows of tiles (of 128 * wide) that are gone through together.
    """

    wide: int = 2
    depth: int = 64
    stages: int = 3
    band: int = 4


DEFAULT = Choice()
SMALL = Choice(wide=1, stages=5, band=8)
"""For few blocks, of which tiles of two would leave many multiprocessors without work."""


@lru_cache(maxsize=1024)
def choose(device_name: str, batch: int, m: int, n: int) -> Choice:
    """Returns the choice for (B, m, n) on a device of that name."""
    measured = _measured().get(device_name)
    if not measured:
        # In tiles of two blocks these would be little more than run at the same time.
        few = batch * listing.triangle(m) < 3 * listing.BLOCKS_AT_ONCE
        return SMALL if few or m <= listing.SMALL_ORDER else DEFAULT
    here = (batch, m, n)
    nearest = min(
        measured, key=lambda shape: (sum(abs(math.log(x / y)) for x, y in zip(shape, here, strict=True)), shape)
    )
    return measured[nearest]


@lru_cache(maxsize=1)
def _measured() -> dict[str, dict[tuple[int, int, int], Choice]]:
    """The choices by device name and shape (B, m, n)."""
    if not MEASURED.exists():
        return {}
    content = json.loads(MEASURED.read_text(encoding="utf-8"))
    return {
        device: {(row["batch"], row["m"], row["n"]): Choice(**row["choice"]) for row in rows}
        for device, rows in content.items()
    }
