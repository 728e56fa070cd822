"""How long the arithmetic of a step takes by itself, on one device: Newton-Schulz, and what is done to rows."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.stepping import timed
from benchmarks.suite.replaying import Clock
from benchmarks.worlds import num_gpus
from dion_core import ops
from dion_core.collectives import SoloGroup
from dion_core.layout import Axis, RowTables, split_layout
from dion_core.matrices import stacked
from dion_core.newton_schulz import NewtonSchulz
from dion_core.rows import Rows

SHAPES = {
    "cpu 4x64x256": ("cpu", 4, 64, 256),
    "cpu 4x128x128": ("cpu", 4, 128, 128),
    "cuda 8x1280x5120": ("cuda", 8, 1280, 5120),
    "cuda 4x5120x5120": ("cuda", 4, 5120, 5120),
    "cuda 24x384x1536": ("cuda", 24, 384, 1536),
}
"""By name the device, the number of matrices, their rows and their columns."""
FRACTION = 0.25


class _OnDevice:
    """Benchmarks of one call, by events on a GPU and by the clock on a CPU."""

    params = (tuple(SHAPES),)
    param_names = ("shape",)
    rounds = 1
    timer = Clock()
    device: str

    def start(self, shape: str) -> tuple[torch.Tensor, torch.device]:
        """(N, R, C) random matrices; raises NotImplementedError where there is no such device."""
        self.device, *sizes = SHAPES[shape]
        if self.device == "cuda" and not num_gpus():
            raise NotImplementedError("needs a GPU")
        torch.manual_seed(0)
        torch.set_num_threads(1)
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        return torch.randn(*sizes, device=self.device, dtype=dtype), torch.device(self.device)

    def time(self, work: Any) -> None:
        self.timer.advance(timed(work, self.device))


class NewtonSchulzTime(_OnDevice):
    """Five steps of the polynomial, on a batch."""

    def setup(self, shape: str) -> None:
        self.matrices, _ = self.start(shape)
        self.orthogonalize = NewtonSchulz()

    def time_newton_schulz(self, _: str) -> None:
        self.time(lambda: self.orthogonalize(self.matrices))


class RowsTime(_OnDevice):
    """What a rank does to the rows of a bucket: adds gradients, chooses, takes, and updates."""

    def setup(self, shape: str) -> None:
        matrices, where = self.start(shape)
        count, rows, columns = matrices.shape
        self.momentum, self.gradients = (stacked(list(torch.randn_like(matrices))) for _ in range(2))
        self.parameters = stacked(list(matrices))
        self.total = int(rows * FRACTION)
        layout = split_layout(SoloGroup(0, 1, (0,)), Axis.ROWS, (rows, columns)).stack(count)
        self.tables = RowTables(layout, where)
        self.active = torch.ones(count, dtype=torch.bool, device=where)
        self.left_out = torch.zeros(count, dtype=torch.int64, device=where)
        self.proceed = torch.ones((), dtype=torch.bool, device=where)
        self.scores = self.accumulate()
        self.chosen = self.choose()
        slots = torch.arange(count * self.total, device=where).view(count, self.total)
        self.rows = Rows(matrices.new_zeros(count * self.total, columns), slots)
        self.scale = torch.ones(count, self.total, device=where)

    def accumulate(self) -> torch.Tensor:
        return ops.accumulate_(self.momentum, self.gradients, self.left_out, maximize=False, proceed=self.proceed)

    def choose(self) -> Any:
        return ops.choose(self.scores, self.tables, self.active, total=self.total, offer=self.total)

    def take(self) -> None:
        flags = {"decay": 0.95, "nesterov": False, "maximize": False}
        ops.take_and_decay_(self.momentum, self.gradients, self.chosen, self.rows, **flags)

    def update(self) -> None:
        options = {"learning_rate": 1e-3, "weight_decay": 0.01, "active": self.active, "cautious": False}
        ops.update_(self.parameters, self.rows, self.chosen, self.scale, **options)

    def time_accumulate(self, _: str) -> None:
        self.time(self.accumulate)

    def time_choose(self, _: str) -> None:
        self.time(self.choose)

    def time_take_and_decay(self, _: str) -> None:
        self.time(self.take)

    def time_update(self, _: str) -> None:
        self.time(self.update)
