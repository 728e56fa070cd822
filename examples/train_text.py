"""Trains a small GPT on real text with NorDion2 under FSDP2, once per installed transport, and with AdamW.

    python examples/train_text.py [--text FILE] [--steps 100] [--world-size 4] [--transports full,local] ...

This file is the part that a training program of one's own would hold: build the model, shard it, sort its
parameters into groups, make the optimizer, loop, evaluate. The rest (text, processes, display, report) is in
text_demo/. All runs start from the same weights and see the same batches, so that their curves compare.
"""

from __future__ import annotations

import signal
import sys
import time
from contextlib import closing
from functools import partial

import torch
from rich.console import Console
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from dion_core import NorDion2
from text_demo.clock import Clock
from text_demo.display import Display, print_table
from text_demo.model import ByteGPT, split_parameters
from text_demo.pool import RankFailedError, run_ranks
from text_demo.rank import Rank
from text_demo.report import table_caption, write_report
from text_demo.results import Progress, RunResult, conclusions, table_rows
from text_demo.settings import Run, Settings, parse_settings
from text_demo.text import Corpus, unigram_entropy

OTHERS_LR = 0.01  # of AdamW's groups: a step of every element, not to be compared with that of a matrix
ADAMW_LR = 0.003  # of the yardstick, which does worse with 0.0015 and with 0.006


def build_model(rank: Rank, settings: Settings) -> ByteGPT:
    """The model with its rows split over all ranks, the same weights for every run."""
    torch.manual_seed(settings.seed)
    model = ByteGPT(settings.shape).to(rank.device)
    # A large model is sharded block by block first, `for block in model.blocks: fully_shard(block)`. This one
    # fits into one gather, and on a CPU five small ones take longer than the computation.
    fully_shard(model, mesh=rank.mesh)
    return model


def build_optimizer(model: ByteGPT, run: Run, settings: Settings) -> Optimizer:
    """NorDion2 on the hidden matrices and AdamW on the rest in one object; or the yardstick: AdamW on all.

    After `fully_shard`: the optimizer learns from the parameters, now DTensors, how their rows are split.
    """
    if run.transport is None:
        return torch.optim.AdamW(model.parameters(), lr=ADAMW_LR, betas=(0.9, 0.95), weight_decay=0.01)
    split = split_parameters(model)
    return NorDion2(
        [
            {"params": split.matrices, "algorithm": "matrix", "lr": settings.lr, "weight_decay": 0.01},
            {"params": split.others, "algorithm": "adamw", "lr": OTHERS_LR, "weight_decay": 0.0},
        ],
        fraction=settings.fraction,
        transport=run.transport,
    )


def lr_factor(step: int, *, num_steps: int) -> float:
    """A trapezoid: up over the first twentieth, level, and down to zero over the second half."""
    warmup = max(1, num_steps // 20)
    return min(1.0, (step + 1) / warmup, (num_steps - step) / (num_steps / 2))


@torch.no_grad()
def evaluate(model: nn.Module, corpus: Corpus, rank: Rank, settings: Settings) -> float:
    """Nats a byte over the whole validation text."""
    total = torch.zeros((), device=rank.device)
    for inputs, targets in corpus.validation_batches(
        settings.evaluation_batch_size, rank=rank.rank, world_size=rank.world_size
    ):
        logits = model(inputs.to(rank.device))
        total += cross_entropy(logits.flatten(0, 1), targets.to(rank.device).flatten(), reduction="sum")
    return rank.sum(total) / corpus.num_validation_targets


def train(rank: Rank, run: Run, corpus: Corpus, settings: Settings) -> RunResult:
    """One run from the common start to the end."""
    model = build_model(rank, settings)
    optimizer = build_optimizer(model, run, settings)
    scheduler = LambdaLR(optimizer, partial(lr_factor, num_steps=settings.steps))
    batches = corpus.training_batches(
        settings.batch_size, rank=rank.rank, world_size=rank.world_size, seed=settings.seed
    )
    step_clock, optimizer_clock = Clock(rank.device), Clock(rank.device)
    training_loss: list[float] = []
    validation_loss: list[tuple[int, float]] = []

    for step, (inputs, targets) in zip(range(1, settings.steps + 1), batches, strict=False):
        with step_clock.measure():
            logits = model(inputs.to(rank.device))
            loss = cross_entropy(logits.flatten(0, 1), targets.to(rank.device).flatten())
            loss.backward()
            with optimizer_clock.measure():
                optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        training_loss.append(rank.mean(loss))
        if settings.evaluates_after(step):
            validation_loss.append((step, evaluate(model, corpus, rank, settings)))
        rank.tell(Progress(run, step, training_loss[-1]))

    # What the optimizer planned and did is known to each rank for itself, without communication.
    report = optimizer.report() if isinstance(optimizer, NorDion2) else None
    rows = report["rows"] if report else {"applied": 0, "deferred": 0}
    return RunResult(
        run=run,
        training_loss=tuple(training_loss),
        validation_loss=tuple(validation_loss),
        bytes_per_step=rank.mean(report["bytes_per_step"] if report else 0),
        rows_applied=rank.sum(rows["applied"]) / settings.steps,
        rows_deferred=rank.sum(rows["deferred"]) / settings.steps,
        step_ms=step_clock.median_ms,
        optimizer_ms=optimizer_clock.median_ms,
    )


def train_all(rank: Rank, settings: Settings) -> None:
    """What every rank does: one run after another in the same processes."""
    corpus = settings.corpus()
    for run in settings.runs():
        rank.tell(train(rank, run, corpus, settings))


def main() -> int:
    """Starts the ranks, shows what they tell, and writes the report; returns the exit code."""
    settings = parse_settings()
    console = Console()
    entropy = unigram_entropy(settings.corpus().validation)
    results: list[RunResult] = []
    start = time.monotonic()
    try:
        with (
            Display(console, len(settings.runs()), settings.steps) as display,
            closing(run_ranks(train_all, settings.world_size, settings)) as messages,
        ):
            for message in messages:
                if isinstance(message, Progress):
                    display.show(message)
                elif isinstance(message, RunResult):
                    results.append(message)
                    display.finish(message)
    except KeyboardInterrupt:
        console.print("interrupted: all ranks are ended")
        return 128 + signal.SIGINT
    except RankFailedError as error:
        print(error, file=sys.stderr)
        return 1
    print_table(console, table_rows(results), table_caption(settings, entropy))
    for sentence in conclusions(results, entropy):
        console.print(sentence, highlight=False, soft_wrap=True)
    page = write_report(settings, results, entropy)
    console.print(f"Took {time.monotonic() - start:.0f} s. Report: {page}", highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
