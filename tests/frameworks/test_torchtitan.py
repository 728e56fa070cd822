"""The container, schedulers and checkpoint format of torchtitan hold our optimizers as a plain loop does."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from tests.documents import on_launched_ranks
from tests.small_model import make_batches, make_model, make_optimizer
from tests.training import ELEMENTWISE_LR

pytestmark = pytest.mark.skipif(not find_spec("torchtitan"), reason="torchtitan is not installed")

NUM_STEPS, SAVED_AT = 6, 3
SAMPLES = 4
DOCUMENT = Path(__file__).parents[2] / "docs" / "torchtitan.md"


def container_class() -> Any:
    """The one that the document shows."""
    [code] = re.findall(r"^(from dataclasses.*?)^ADAMW", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {"__name__": "document"}
    exec(code, names)
    return names["DionContainer"]


def build(model: nn.Module, name: str, vectors: str, transport: str) -> tuple[Any, Any]:
    """The container and its schedulers: matrices to an optimizer of that name, vectors to it too or to AdamW."""
    from torchtitan.components.optimizer import LRSchedulersContainer, ParamGroupConfig

    kind = container_class()
    ours = {"algorithm": "adamw", "lr": ELEMENTWISE_LR}
    theirs = {"lr": ELEMENTWISE_LR, "betas": (0.9, 0.95), "weight_decay": 0.01}
    config = kind.Config(
        implementation="for-loop",
        param_groups=[
            ParamGroupConfig(
                pattern=r"bias|^2\.", optimizer_name=vectors, optimizer_kwargs=theirs if vectors == "AdamW" else ours
            ),
            ParamGroupConfig(pattern=".*", optimizer_name=name, optimizer_kwargs={"lr": 0.02}),
        ],
        optimizer_factory_kwargs_by_name={name: {"transport": transport}},
    )
    optimizers = config.build(model_parts=[model])
    return optimizers, LRSchedulersContainer(optimizers, lambda step: 1 / (step + 1))


def make_sharded() -> nn.Module:
    model = make_model()
    if dist.get_world_size() > 1:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    return model


def whole(model: nn.Module) -> dict[str, Tensor]:
    values = model.state_dict().items()
    return {name: value.full_tensor() if isinstance(value, DTensor) else value.clone() for name, value in values}


def steps(model: nn.Module, optimizers: Any, schedulers: Any, numbers: range) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    batches = make_batches(SAMPLES, num_steps=NUM_STEPS)
    for number in numbers:
        x, y = (each[number].chunk(size)[rank] for each in batches)
        nn.functional.mse_loss(model(x), y).backward()
        optimizers.step()
        schedulers.step()
        optimizers.zero_grad()


def trained_and_resumed(name: str, vectors: str, transport: str, folder: str) -> tuple[float, bool, set[str]]:
    """The error against one process, whether a resumed run has the bits of the unbroken one, and keys of the state."""
    model = make_sharded()
    optimizers, schedulers = build(model, name, vectors, transport)
    steps(model, optimizers, schedulers, range(SAVED_AT))
    dcp.save({"model": model.state_dict(), "optimizer": optimizers, "lr": schedulers}, checkpoint_id=folder)
    keys = set(optimizers.state_dict())
    steps(model, optimizers, schedulers, range(SAVED_AT, NUM_STEPS))

    second = make_sharded()
    others = build(second, name, vectors, transport)
    weights = second.state_dict()
    dcp.load({"model": weights, "optimizer": others[0], "lr": others[1]}, checkpoint_id=folder)
    second.load_state_dict(weights)
    steps(second, *others, range(SAVED_AT, NUM_STEPS))
    same = all(torch.equal(value, whole(second)[key]) for key, value in whole(model).items())

    alone = make_model()
    plain = make_optimizer(alone, name)
    scheduler = LambdaLR(plain, lambda step: 1 / (step + 1))
    for x, y in zip(*make_batches(SAMPLES, num_steps=NUM_STEPS), strict=True):
        nn.functional.mse_loss(alone(x), y).backward()
        plain.step()
        scheduler.step()
        plain.zero_grad()
    error = max(float((whole(model)[key] - value).abs().max()) for key, value in alone.state_dict().items())
    return error, same, keys


@pytest.mark.parametrize(
    ("world_size", "name", "vectors", "transport"),
    [
        (1, "NorDion2", "NorDion2", "auto"),
        (1, "Muon", "AdamW", "auto"),
        (2, "NorDion2", "NorDion2", "full"),
        (2, "Dion2", "AdamW", "varlen"),
    ],
)
def test_equals_a_plain_loop_and_resumes(
    world_size: int, name: str, vectors: str, transport: str, tmp_path: Path
) -> None:
    args = (trained_and_resumed, name, vectors, transport, str(tmp_path))
    for error, same, keys in on_launched_ranks(world_size, *args):
        assert error < 1e-7
        assert same
        assert {"state.0.weight.momentum", "param_groups.0.weight.lr", "param_groups.0.bias.lr"} <= keys
