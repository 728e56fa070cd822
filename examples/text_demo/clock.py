"""Times parts of a step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Collects how long a part of a step takes, the device's work included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: list[float] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Adds the time from here to the end of the block."""
        start = self._now()
        yield
        self._seconds.append(self._now() - start)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # else only the launches are timed
        return time.perf_counter()

    @property
    def median_ms(self) -> float:
        """The median in milliseconds: first steps, which warm up, do not count."""
        return 1e3 * statistics.median(self._seconds)
