"""Every optimizer takes the groups of real model classes, and so do other optimizers."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dion_core import Muon, NorMuon, param_groups_for
from tests.param_models import MODELS, ConvNet, llama
from tests.unit.test_param_groups import OPTIMIZERS, algorithms, options_of


def step_with_random_gradients(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """By how much one step changed each parameter."""
    torch.manual_seed(0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_takes_a_step(optimizer: Any, make: Callable[[], nn.Module]) -> None:
    model = make()
    groups = param_groups_for(model, lr=0.02, elementwise={"lr": 1e-3, "weight_decay": 0.0})
    kept = [dict(group) for group in groups]
    changes = step_with_random_gradients(optimizer(groups, weight_decay=0.0, scale=None), model)
    assert groups == kept
    for name, algorithm in algorithms(groups).items():
        change = changes[name]
        if algorithm == "adamw":  # whose first step is the rate, whatever the gradient's size
            torch.testing.assert_close(change.abs().median(), torch.tensor(1e-3), rtol=1e-2, atol=0)
            continue
        flatten = options_of(groups, name).get("flatten")
        for matrix in [change.flatten(1)] if flatten else change.view(-1, *change.shape[-2:]):
            rows = int((matrix != 0).any(dim=1).sum())
            assert rows == (matrix.shape[0] if optimizer in (Muon, NorMuon) else -(-matrix.shape[0] // 4))
            # An orthonormal update has as many singular values of 1 as rows or columns; normalization keeps the norm.
            size = 0.02 * min(rows, matrix.shape[1]) ** 0.5
            assert float(matrix.norm()) == pytest.approx(size, rel=0.2), name


def test_errors_of_the_optimizer_name_the_parameter() -> None:
    groups = param_groups_for(ConvNet(), overrides={"fc.bias": "matrix"})
    with pytest.raises(ValueError, match=r"fc\.bias: shape \(40,\) is not a matrix"):
        Muon(groups)


def test_groups_are_plain_data_for_other_optimizers() -> None:
    model = llama()
    groups = param_groups_for(model, lr=0.02)
    assert copy.copy(list(groups)) == groups
    other = torch.optim.AdamW(groups, lr=1e-3)
    assert sum(len(group["params"]) for group in other.param_groups) == len(list(model.parameters()))
