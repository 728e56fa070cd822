"""A model that moves to a GPU after its optimizer was built, as frameworks move it, trains as one that was there."""

import pytest
import torch
from torch import nn

from dion_core import NorDion2, param_groups_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    torch.manual_seed(1)
    for inputs in torch.randn(num_steps, 8, 32).cuda():
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("load", [False, True])
def test_a_model_that_moves_before_the_first_step(load: bool) -> None:
    first = make_model().cuda()
    there = NorDion2(param_groups_for(first, lr=0.02))
    train(first, there, 3)
    model = make_model()
    optimizer = NorDion2(param_groups_for(model, lr=0.02))
    if load:  # on the CPU: what was loaded moves along
        model.load_state_dict(first.state_dict())
        optimizer.load_state_dict(there.state_dict())
    model.cuda()
    assert all(value.is_cuda for state in optimizer.state_dict()["state"].values() for value in state.values())
    train(model, optimizer, 3)
    if load:
        train(first, there, 3)
    for one, other in zip(model.parameters(), first.parameters(), strict=True):
        assert torch.equal(one, other)


def test_after_a_step_it_is_refused() -> None:
    model = nn.Linear(8, 8)
    optimizer = NorDion2([model.weight])
    optimizer.step()
    model.cuda()
    with pytest.raises(ValueError, match="moved to another device"):
        optimizer.step()
