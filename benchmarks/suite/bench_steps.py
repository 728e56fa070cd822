"""How long a whole step takes, and the exchange in it: by transport, inventory and world size."""

from __future__ import annotations

from typing import Any

from benchmarks import exchanging, stepping, worlds
from benchmarks.stepping import LARGE, SMALL
from benchmarks.suite.bench_counts import WORLD_SIZES, cells
from benchmarks.suite.replaying import TRANSPORTS, _Timed
from benchmarks.worlds import Measured

HERE = (TRANSPORTS, tuple(SMALL), (2, 4), (0.25,))
ANYWHERE = (TRANSPORTS, (*SMALL, *LARGE), WORLD_SIZES, (0.25,))


class _WholeSteps(_Timed):
    """Steps with their arithmetic."""

    def time_step(self, *_: Any) -> None:
        self.replay()


class _ExchangesAlone(_Timed):
    """The same without the arithmetic."""

    def time_exchange(self, *_: Any) -> None:
        self.replay()


class Steps(_WholeSteps):
    """Ranks of gloo on this machine."""

    params = HERE

    def setup_cache(self) -> Measured:
        return worlds.in_pool(stepping.time_step, cells(self.params), "cpu")


class Sweep(_WholeSteps):
    """By number of ranks and fraction, for the pictures; more ranks than cores would time their waiting."""

    params = (TRANSPORTS, ("uneven",), (2, 4), (0.125, 0.25, 0.5))

    def setup_cache(self) -> Measured:
        return worlds.in_pool(stepping.time_step, cells(self.params), "cpu")


class Exchanges(_ExchangesAlone):
    """Ranks of gloo on this machine."""

    params = HERE

    def setup_cache(self) -> Measured:
        return worlds.in_pool(exchanging.time_exchange, cells(self.params), "cpu")


class OneGpu(_WholeSteps):
    """One rank of several on one GPU: compute and host time of a rank, without a wire."""

    params = (TRANSPORTS, LARGE, (4, 8), (0.25,))

    def setup_cache(self) -> Measured:
        return worlds.in_loopback(stepping.time_running, cells(self.params), "cuda")


class WorldSteps(_WholeSteps):
    """Ranks with a GPU each, of this machine or of several: see `benchmarks.worlds`."""

    params = ANYWHERE

    def setup_cache(self) -> Measured:
        return worlds.everywhere(stepping.time_step, cells(self.params))


class WorldExchanges(_ExchangesAlone):
    """Ranks with a GPU each, of this machine or of several: see `benchmarks.worlds`."""

    params = ANYWHERE

    def setup_cache(self) -> Measured:
        return worlds.everywhere(exchanging.time_exchange, cells(self.params))
