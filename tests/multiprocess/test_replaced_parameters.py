"""Parameters that took the place of others before the first step: frameworks shard a model behind the optimizer."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dion_core import NorDion2
from dion_core.testing.ranks import pool
from tests.small_model import make_batches, make_model, make_optimizer, train_model


def put_in_place(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    """Puts the parameters, in order, in place of those of the groups."""
    rest = iter(parameters)
    for group in optimizer.param_groups:
        group["params"][:] = [next(rest) for _ in group["params"]]


def in_order_of_groups(model: nn.Module) -> list[nn.Parameter]:
    """As `make_optimizer` sorts them."""
    return sorted(model.parameters(), key=lambda parameter: parameter.ndim != 2)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    train_model(model, optimizer, make_batches(4))
    return model.state_dict()


def test_an_optimizer_goes_over_to_a_copy_of_its_model() -> None:
    first, second, alone = make_model(), make_model(), make_model()
    optimizer = make_optimizer(first, "NorDion2")
    names = [group["param_names"] for group in optimizer.param_groups]
    put_in_place(optimizer, in_order_of_groups(second))
    assert len(optimizer.state_dict()["state"]) == 6
    assert optimizer.state.keys() == set(second.parameters())
    actual, wanted = trained(second, optimizer), trained(alone, make_optimizer(alone, "NorDion2"))
    assert all(torch.equal(actual[name], value) for name, value in wanted.items())
    assert not torch.equal(first.state_dict()["0.weight"], actual["0.weight"])
    assert [group["param_names"] for group in optimizer.param_groups] == names


def loaded(optimizer: NorDion2, weight: nn.Parameter) -> None:
    weight.grad = torch.ones_like(weight)
    other = NorDion2([weight])
    other.step()
    optimizer.load_state_dict(other.state_dict())


def stepped(optimizer: NorDion2, weight: nn.Parameter) -> None:
    optimizer.step()


def reshaped(optimizer: NorDion2, weight: nn.Parameter) -> None:
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.zeros(2, 2)))


@pytest.mark.parametrize("change", [loaded, stepped, reshaped])
def test_later_or_with_other_shapes_it_does_not(change: Any) -> None:
    weight = nn.Parameter(torch.ones(4, 3))
    optimizer = NorDion2([weight])
    change(optimizer, weight)
    before = optimizer.state
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(4, 3))
    for act in (optimizer.step, optimizer.state_dict, lambda: optimizer.load_state_dict({})):
        with pytest.raises(ValueError, match="was replaced"):
            act()
    assert optimizer.state is before


def test_a_loaded_state_stays_where_only_a_group_was_replaced() -> None:
    weight = nn.Parameter(torch.ones(4, 3))
    optimizer = NorDion2([weight])
    loaded(optimizer, weight)
    momentum = optimizer.state[weight]["momentum"].clone()
    optimizer.param_groups[0] = dict(optimizer.param_groups[0])
    optimizer.state_dict()
    assert momentum.any()
    assert torch.equal(optimizer.state[weight]["momentum"], momentum)


def sharded_behind_the_optimizer(ask_first: bool) -> tuple[float, list[int]]:
    """The largest difference from one process, and the rows of every momentum here."""
    model = make_model()
    optimizer = make_optimizer(model, "NorDion2")
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    put_in_place(optimizer, in_order_of_groups(model))
    if ask_first:
        optimizer.load_state_dict(optimizer.state_dict())
    inputs, targets = make_batches(2 * dist.get_world_size())
    rank = dist.get_rank()
    parts = inputs.chunk(dist.get_world_size(), 1)[rank], targets.chunk(dist.get_world_size(), 1)[rank]
    train_model(model, optimizer, parts)
    alone = make_model()
    train_model(alone, make_optimizer(alone, "NorDion2"), (inputs, targets))
    whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
    error = max(float((whole[name] - value).abs().max()) for name, value in alone.state_dict().items())
    momenta = [state["momentum"] for state in optimizer.state.values() if "momentum" in state]
    assert all(isinstance(momentum, DTensor) for momentum in momenta)
    return error, [momentum.to_local().shape[0] for momentum in momenta]


@pytest.mark.parametrize("ask_first", [False, True])
def test_a_model_sharded_behind_the_optimizer_trains_like_one_process(ask_first: bool) -> None:
    rows = []
    for error, here in pool(2).run(sharded_behind_the_optimizer, ask_first):
        assert error < 1e-8
        rows.append(here)
    assert rows == [[9, 3], [8, 3]]
