"""How much memory a whole process takes at its peak, torch included; it scatters, and is no gate."""

from __future__ import annotations

import torch

from benchmarks.stepping import SMALL, Cell, Running
from benchmarks.suite.replaying import TRANSPORTS
from dion_core.newton_schulz import NewtonSchulz
from dion_core.testing.loopback import loopback

STEPS = 4


class Peak:
    """Of a process that is one rank of four, whose messages stay with it."""

    params = (TRANSPORTS, tuple(SMALL))
    param_names = ("transport", "inventory")

    def peakmem_step(self, transport: str, inventory: str) -> None:
        cell = Cell(transport, inventory, 4, 0.25)
        with loopback(cell.world_size, "cpu") as (mesh, _):
            Running(cell, mesh).steps(STEPS)


def peakmem_newton_schulz() -> None:
    NewtonSchulz()(torch.randn(4, 256, 1024))
