"""What is counted and is alike in every run: asv shows it, and the gate lets none of it rise unnoticed."""

from __future__ import annotations

from itertools import product
from typing import Any

from benchmarks import stepping, worlds
from benchmarks.stepping import LARGE, SMALL, Cell
from benchmarks.suite.replaying import TRANSPORTS, _Replayed, unit
from benchmarks.worlds import Measured

SWEPT = (("uneven",), (2, 4, 8), (0.125, 0.25, 0.5))
WORLD_SIZES = (2, 4, 8, 16, 32, 64, 128, 256)


def cells(parameters: tuple[tuple[Any, ...], ...]) -> list[Cell]:
    """A cell for each combination of the parameters."""
    return [Cell(*values) for values in product(*parameters)]


class _Traffic(_Replayed):
    """What ranks that really communicate send."""

    @unit("bytes")
    def track_bytes(self, *_: Any) -> int:
        return self.figures["bytes"]

    @unit("collectives")
    def track_collectives(self, *_: Any) -> int:
        return self.figures["collectives"]

    @unit("reads")
    def track_host_reads(self, *_: Any) -> int:
        return self.figures["host_reads"]

    @unit("rows")
    def track_rows_deferred(self, *_: Any) -> int:
        return self.figures["deferred"]


class _Memory(_Replayed):
    """What a rank allocates."""

    @unit("allocations")
    def track_allocations(self, *_: Any) -> int:
        return self.figures["allocations"]

    @unit("bytes")
    def track_workspace(self, *_: Any) -> int:
        return self.figures["workspace"]


class Counts(_Traffic, _Memory):
    """Ranks of gloo on this machine, and the memory of one rank whose messages stay with it."""

    params = (TRANSPORTS, tuple(SMALL), (2, 4), (0.25,))

    def setup_cache(self) -> Measured:
        of_memory = worlds.in_loopback(stepping.count_memory, cells(self.params), "cpu")
        return worlds.merged(worlds.in_pool(stepping.count_traffic, cells(self.params), "cpu"), of_memory)


class Sweep(_Traffic):
    """By number of ranks and fraction, for the pictures."""

    params = (TRANSPORTS, *SWEPT)

    def setup_cache(self) -> Measured:
        return worlds.in_pool(stepping.count_traffic, cells(self.params), "cpu")

    @unit("of the chosen rows")
    def track_share_deferred(self, *_: Any) -> float:
        return self.figures["deferred"] / self.figures["chosen"]


class OneGpu(_Memory):
    """One rank of several on one GPU, whose messages do not leave it."""

    params = (TRANSPORTS, LARGE, (4, 8), (0.25,))

    def setup_cache(self) -> Measured:
        return worlds.in_loopback(stepping.count_device, cells(self.params), "cuda")

    @unit("launches")
    def track_launches(self, *_: Any) -> int:
        return self.figures["launches"]

    @unit("reads")
    def track_host_reads(self, *_: Any) -> int:
        return self.figures["waits"]


class Worlds(_Traffic):
    """Ranks with a GPU each, of this machine or of several: see `benchmarks.worlds`."""

    params = (TRANSPORTS, (*SMALL, *LARGE), WORLD_SIZES, (0.25,))

    def setup_cache(self) -> Measured:
        return worlds.everywhere(stepping.count_traffic, cells(self.params))
