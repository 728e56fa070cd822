"""Sharded and replicated models are sorted like plain ones, and their groups take a step."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dion_core import NorDion2, param_groups_for
from dion_core.testing.ranks import pool

ROWS, COLUMNS = 24, 48


class Conv1D(nn.Module):
    """A linear layer that stores its weight as (in, out), under the name that Hugging Face gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROWS, COLUMNS) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class RMSNorm(nn.RMSNorm):
    pass


class Model(nn.Module):
    """Two layers between an embedding and the head that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, ROWS)
        self.layers = nn.ModuleList(
            nn.Sequential(RMSNorm(ROWS), Conv1D(), nn.Linear(COLUMNS, ROWS, bias=False)) for _ in range(2)
        )
        self.guess = nn.Linear(ROWS, 40, bias=False)
        self.guess.weight = self.words.weight

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text)
        for layer in self.layers:
            x = x + layer(x)
        return self.guess(x)


def sorted_and_stepped(way: str) -> tuple[str, dict[str, Tensor]]:
    """The table of the groups, and the parameters after one step, whole."""
    torch.manual_seed(0)
    model: nn.Module = Model()
    model.layers[1][2].requires_grad_(False)
    if way == "sharded":
        for layer in model.layers:
            for part in layer:
                fully_shard(part)
        fully_shard(model)
    elif way == "replicated":
        model = DistributedDataParallel(model)
    # Only sorted, not run, as a compiled model.
    given = torch.compile(model, backend="eager") if way == "replicated" else model
    groups = param_groups_for(given, lr=0.02, elementwise={"lr": 1e-2})
    group = dist.group.WORLD if way == "replicated" else None
    optimizer = NorDion2(groups, fraction=0.5, group=group, transport="auto")
    text = torch.arange(40).view(4, 10)
    nn.functional.cross_entropy(model(text).flatten(0, 1), text.flatten()).backward()
    optimizer.step()
    pairs = [pair for entry in groups for pair in entry["params"]]
    whole = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in pairs}
    return str(groups), {name: one.detach() for name, one in whole.items()}


@pytest.mark.parametrize("way", ["sharded", "replicated"])
def test_models_on_several_ranks_are_sorted_like_plain_ones(way: str) -> None:
    table, wanted = sorted_and_stepped("plain")
    assert "words.weight = guess.weight" in table
    assert "3 tensors, 3,456 parameters" in table
    assert "Conv1D, rows are inputs" in table
    for found_table, found in pool(2).run(sorted_and_stepped, way):
        assert found_table == table
        assert found.keys() == wanted.keys()
        for name in wanted:
            torch.testing.assert_close(found[name], wanted[name], rtol=1e-4, atol=1e-5)
