"""Trains the demo's GPT on its text with NorDion2 under MPI, without torch.distributed.

    mpirun -n 4 python examples/train_mpi.py [--steps 100] [--group mpi|nccl] [--text FILE]

Every rank holds the whole model and sees a part of each batch. Gradients are averaged over the ranks by hand, as DDP
would do; the optimizer divides the work of Newton-Schulz among them. With GPUs each rank takes one of its machine.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from mpi4py import MPI
from torch import nn
from torch.nn.functional import cross_entropy

from dion_comm_mpi import abort_together, local_device, mpi_group, nccl_group
from dion_core import NorDion2
from dion_core.collectives import Group
from text_demo.model import ByteGPT, ModelShape, split_parameters
from text_demo.text import Corpus, load_text

BATCH_SIZE = 16
OTHERS_LR = 0.01
SEED = 1


def average_gradients(parameters: Iterable[nn.Parameter], group: Group) -> None:
    """Replaces every gradient by its mean over the ranks, all in one message."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    message = torch.cat([gradient.flatten() for gradient in gradients])
    group.named("the gradients").all_reduce(message, "sum").wait()
    means = (message / group.size).split([gradient.numel() for gradient in gradients])
    for gradient, mean in zip(gradients, means, strict=True):
        gradient.copy_(mean.view_as(gradient))


def summed(value: torch.Tensor, group: Group) -> float:
    """The sum of a number over the ranks."""
    total = value.detach().to(torch.float64).reshape(1)
    group.named("a mean").all_reduce(total, "sum").wait()
    return float(total)


@torch.no_grad()
def evaluate(model: nn.Module, corpus: Corpus, group: Group, device: torch.device) -> float:
    """Bits a byte over the whole validation text."""
    total = torch.zeros((), device=device)
    batches = corpus.validation_batches(4 * BATCH_SIZE * group.size, rank=group.rank, world_size=group.size)
    for inputs, targets in batches:
        logits = model(inputs.to(device))
        total += cross_entropy(logits.flatten(0, 1), targets.to(device).flatten(), reduction="sum")
    return summed(total, group) / corpus.num_validation_targets / math.log(2)


def train(group: Group, device: torch.device, corpus: Corpus, num_steps: int) -> None:
    """Trains from the same start on every rank; rank 0 tells how it goes."""
    torch.manual_seed(SEED)
    model = ByteGPT(ModelShape()).to(device)
    split = split_parameters(model)
    optimizer = NorDion2(
        [
            {"params": split.matrices, "lr": 0.05},
            {"params": split.others, "algorithm": "adamw", "lr": OTHERS_LR, "weight_decay": 0.0},
        ],
        group=group,
    )
    size = math.ceil(BATCH_SIZE / group.size) * group.size
    batches = corpus.training_batches(size, rank=group.rank, world_size=group.size, seed=SEED)
    start = time.monotonic()
    for step, (inputs, targets) in zip(range(1, num_steps + 1), batches, strict=False):
        loss = cross_entropy(model(inputs.to(device)).flatten(0, 1), targets.to(device).flatten())
        loss.backward()
        average_gradients(model.parameters(), group)
        optimizer.step()
        optimizer.zero_grad()
        if step % max(1, num_steps // 10) == 0:
            bits = summed(loss, group) / group.size / math.log(2)
            if group.rank == 0:
                print(f"step {step}: {bits:.3f} bits a byte, {time.monotonic() - start:.1f} s", flush=True)
    bits, differing = evaluate(model, corpus, group, device), optimizer.check_replicas()
    if group.rank == 0:
        print(f"validation on {group.size} ranks: {bits:.4f} bits a byte; copies that differ: {differing or 'none'}")


def main() -> None:
    """What every rank does."""
    abort_together()  # an error on one rank ends all
    parser = argparse.ArgumentParser(description="Trains a small GPT on bytes of text under mpirun.")
    parser.add_argument("--steps", type=int, default=100, help="(%(default)s)")
    parser.add_argument("--group", choices=("mpi", "nccl"), default="mpi", help="what ranks communicate by")
    parser.add_argument("--text", type=Path, help="a file to learn from (default: Python's documentation)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    device = local_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = (nccl_group if given.group == "nccl" else mpi_group)(MPI.COMM_WORLD, timeout=120.0)
    train(group, device, Corpus.from_bytes(load_text(given.text), ModelShape().context), given.steps)


if __name__ == "__main__":
    main()
