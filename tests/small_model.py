"""A model that is trained by its own backward pass, for comparing wrapped models with plain ones."""

from typing import Any

import torch
from torch import Tensor, nn

import dion_core
from tests.training import ELEMENTWISE_LR


def make_model() -> nn.Module:
    """Two matrices, one of which no number of ranks divides, and vectors; the same in every process."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 17), nn.GELU(), nn.LayerNorm(17), nn.Linear(17, 6)).double()


def make_optimizer(model: nn.Module, name: str, **options: Any) -> torch.optim.Optimizer:
    """Matrices to the matrix algorithm, vectors to AdamW, all named."""
    named = list(model.named_parameters())
    matrices = [(key, value) for key, value in named if value.ndim == 2]
    vectors = [(key, value) for key, value in named if value.ndim != 2]
    groups = [{"params": matrices}, {"params": vectors, "algorithm": "adamw", "lr": ELEMENTWISE_LR}]
    return getattr(dion_core, name)(groups, **options)


def make_batches(samples: int, *, num_steps: int = 3) -> tuple[Tensor, Tensor]:
    """Inputs and targets of every step."""
    torch.manual_seed(4)
    return torch.randn(num_steps, samples, 8).double(), torch.randn(num_steps, samples, 6).double()


def train_model(model: nn.Module, optimizer: torch.optim.Optimizer, batches: tuple[Tensor, Tensor]) -> None:
    """One step for every batch."""
    for inputs, targets in zip(*batches, strict=True):
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
