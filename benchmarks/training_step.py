"""The optimizer inside a real training step on one GPU: a GPT of about 1 B parameters, forward and backward running.

    python -m benchmarks.training_step [--captured] [--steps 20] [--tokens 4096]

Events are recorded without a synchronization, so that the host runs ahead as it does in training. Printed are the
medians of the time between two steps, with and without the optimizer, and of the optimizer's own part on the device.
The difference of the first two is what the optimizer costs; host time that device work hides does not count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from dion_core import NorDion2

LAYERS, WIDTH, HIDDEN, HEADS, VOCABULARY, CONTEXT = 24, 1536, 6656, 12, 32768, 1024


class Block(nn.Module):
    """Attention and a gated MLP: the matrices of inventory "1b"."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        y = self.norms[0](x)
        heads = [part(y).view(batch, length, HEADS, -1).transpose(1, 2) for part in (self.query, self.key, self.value)]
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        y = self.norms[1](x)
        mixed: Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return mixed


class Model(nn.Module):
    """A decoder with tied embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.embedding.weight)


def make_optimizer(model: Model) -> NorDion2:
    """NorDion2 for the matrices of the blocks, AdamW for the rest."""
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    groups = [{"params": matrices}, {"params": rest, "algorithm": "adamw", "lr": 3e-4}]
    return NorDion2(groups, lr=0.01)


def train(model: Model, optimizer: NorDion2 | None, steps: int, tokens: int) -> tuple[float, float]:
    """Median ms between two steps, and median ms of the optimizer's part on the device."""
    between, inside = [], []
    for _ in range(steps + 1):
        batch = torch.randint(VOCABULARY, (max(1, tokens // CONTEXT), CONTEXT + 1), device="cuda")
        logits = model(batch[:, :-1])
        functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten()).backward()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        if optimizer is not None:
            optimizer.step()
        events[1].record()
        model.zero_grad()
        between.append(events[1])
        inside.append(events)
    torch.cuda.synchronize()
    durations = [before.elapsed_time(after) for before, after in pairwise(between[3:])]
    return statistics.median(durations), statistics.median(a.elapsed_time(b) for a, b in inside[3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captured", action="store_true", help="the step as a CUDA graph")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=4096)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("a GPU is needed: torch.cuda.is_available() is False")
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Model().bfloat16()
    print(f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f} B parameters, {arguments.tokens} tokens a step")
    alone, _ = train(model, None, arguments.steps, arguments.tokens)
    optimizer = make_optimizer(model)
    if arguments.captured:
        optimizer.capture()
    whole, own = train(model, optimizer, arguments.steps, arguments.tokens)
    print(
        f"forward and backward {alone:.2f} ms, with the optimizer {whole:.2f} ms: it costs {whole - alone:.2f} ms; "
        f"between the events around it {own:.2f} ms"
    )


if __name__ == "__main__":
    main()
