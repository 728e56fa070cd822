"""Winners deferred in a real training: the demo's model and text on four ranks, once for every capacity."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from benchmarks.deferral_pools import CAPACITIES, Capacity, Shape, Tally, empty_tally, make_buckets
from dion_comm_capped import Capped
from dion_core import NorDion2
from dion_core.report import Report
from text_demo.pool import run_ranks
from text_demo.rank import Rank
from text_demo.settings import Run, Settings
from text_demo.text import Corpus
from train_text import build_model, build_optimizer, lr_factor

WIRE_BYTES = 4
"""Of an element: the demo trains in fp32."""


@dataclass(frozen=True)
class DemoResult:
    """One training; a tally for each bucket."""

    capacity: Capacity
    shapes: list[Shape]
    tallies: list[Tally]
    changes: list[int]
    loss: float


def train_demo(*, num_steps: int, world_size: int) -> Iterator[DemoResult]:
    """The trainings, one after the other, each from the same start on the same batches."""
    settings = Settings(steps=num_steps, world_size=world_size)
    for message in run_ranks(_train_all, world_size, settings):
        assert isinstance(message, DemoResult)
        yield message


def _train_all(rank: Rank, settings: Settings) -> None:
    corpus = settings.corpus()
    for capacity in CAPACITIES:
        rank.tell(train(rank, Capped(capacity=capacity), corpus, settings))


def train(rank: Rank, transport: Capped, corpus: Corpus, settings: Settings) -> DemoResult:
    """One run of the demo's program, with the optimizer's report read after every step."""
    model = build_model(rank, settings)
    run = Run(str(transport.capacity), transport, exact=False)
    optimizer = build_optimizer(model, run, settings)
    assert isinstance(optimizer, NorDion2)
    scheduler = LambdaLR(optimizer, partial(lr_factor, num_steps=settings.steps))
    batches = corpus.training_batches(
        settings.batch_size, rank=rank.rank, world_size=rank.world_size, seed=settings.seed
    )
    steps, forward = [], []
    loss = torch.zeros(())
    for _, (inputs, targets) in zip(range(settings.steps), batches, strict=False):
        loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        buckets = optimizer.report()["buckets"]
        forward.append([bucket["traffic"]["forward"] for bucket in buckets])
        steps.append([[*_rows(bucket), forward[-1] != forward[max(len(forward) - 2, 0)]] for bucket in buckets])
    of_all_ranks = torch.tensor(steps, dtype=torch.float64)  # (steps, buckets, 4)
    torch.distributed.all_reduce(of_all_ranks)
    changes = of_all_ranks[:, :, 3].any(dim=1).nonzero().flatten().tolist()
    tallies = [_tally(bucket, of_all_ranks[:, number], settings) for number, bucket in enumerate(buckets)]
    shapes = [_shape(bucket) for bucket in buckets]
    return DemoResult(transport.capacity, shapes, tallies, changes, rank.mean(loss))


def _shape(bucket: Report) -> Shape:
    return Shape(len(bucket["parameters"]), *bucket["shape"])


def _rows(bucket: Report) -> tuple[int, int, float]:
    """Winners, refused rows and slots (mean of both ways) of this rank in the last step."""
    chosen, applied = bucket["rows"]["chosen"], bucket["rows"]["applied"]
    return chosen, chosen - applied, bucket["traffic"]["bytes"] / 2 / (bucket["shape"][1] * WIRE_BYTES)


def _tally(bucket: Report, steps: Tensor, settings: Settings) -> Tally:
    [planned] = make_buckets([_shape(bucket)], settings.world_size, settings.fraction)
    winners, refused, slots, _ = steps.unbind(dim=1)
    return replace(
        empty_tally(planned),
        winners=winners.int().tolist(),
        refused=refused.int().tolist(),
        slots=slots.tolist(),
    )
