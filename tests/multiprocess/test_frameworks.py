"""Sharded models trained as torch's tools train them equal one process with the whole batch."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import dion_core
from dion_core.process_groups import TorchGroup, stand_in
from dion_core.testing.ranks import pool
from tests.small_model import make_batches, make_model, make_optimizer
from tests.training import OPTIMIZERS

Batch = tuple[Tensor, Tensor]


class Way(NamedTuple):
    """How a model is trained.

    Attributes:
        wrap: makes the trained module of the model.
        parts: pieces that a rank's batch is accumulated from.
        synchronizes: whether gradients are reduced after each piece.
        options: of `fully_shard`; None leaves the model whole, for DDP.
        clip: the largest norm of all gradients together.
        forward: calls the model.
    """

    wrap: Callable[[nn.Module], nn.Module] = lambda model: model
    parts: int = 1
    synchronizes: bool = True
    options: dict[str, Any] | None = {}  # noqa: RUF012
    clip: float | None = None
    forward: Callable[[nn.Module, Tensor], Tensor] = lambda model, batch: model(batch)


def recomputed(model: nn.Module, batch: Tensor) -> Tensor:
    return checkpoint(model, batch.requires_grad_(), use_reentrant=False)


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager")


WAYS = {
    "clipped": Way(clip=0.1),
    "accumulated": Way(parts=2),
    "accumulated without reduction": Way(parts=2, synchronizes=False),
    "accumulated and clipped": Way(parts=4, synchronizes=False, clip=0.1),
    "checkpointed": Way(forward=recomputed),
    "compiled": Way(wrap=compiled),
    "offloaded": Way(options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "DDP, accumulated": Way(wrap=DistributedDataParallel, options=None, parts=2, synchronizes=False, clip=0.1),
    "DDP, compiled": Way(wrap=lambda model: compiled(DistributedDataParallel(model)), options=None),
}


def pieces(way: Way, trained: nn.Module, batch: Batch) -> Iterator[tuple[Batch, Any]]:
    """The parts of a rank's batch, each with what keeps gradients from being reduced before the last one."""
    inputs, targets = (each.chunk(way.parts) for each in batch)
    for number, part in enumerate(zip(inputs, targets, strict=True)):
        last = number == way.parts - 1
        if way.options is not None:
            trained.set_requires_gradient_sync(last or way.synchronizes)
        yield part, nullcontext() if last or way.synchronizes or way.options is not None else trained.no_sync()


def train(way: Way, name: str) -> list[Tensor]:
    """Whole weights after three steps."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    model = make_model()
    if way.options is not None:
        for layer in (model[0], model[3]):
            fully_shard(layer, **way.options)
        fully_shard(model, **way.options)
    trained = way.wrap(model)
    optimizer = make_optimizer(model, name, group=dist.group.WORLD if way.options is None else None)
    inputs, targets = (each.chunk(world_size, 1)[rank] for each in make_batches(8 * world_size))
    for batch in zip(inputs, targets, strict=True):
        for (part, wanted), context in pieces(way, trained, batch):
            with context:
                (nn.functional.mse_loss(way.forward(trained, part), wanted) / way.parts).backward()
        if way.clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), way.clip)
            assert (norm.full_tensor() if isinstance(norm, DTensor) else norm) > way.clip
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return [(each.full_tensor() if isinstance(each, DTensor) else each).detach() for each in model.parameters()]


def train_alone(name: str, world_size: int, clip: float | None) -> list[Tensor]:
    model = make_model()
    optimizer = make_optimizer(model, name)
    for inputs, targets in zip(*make_batches(8 * world_size), strict=True):
        nn.functional.mse_loss(model(inputs), targets).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach() for each in model.parameters()]


def train_all(way: str) -> dict[str, list[Tensor]]:
    return {name: train(WAYS[way], name) for name in OPTIMIZERS}


@pytest.mark.parametrize("way", WAYS)
def test_trained_as_torch_does(way: str) -> None:
    for found in pool(2).run(train_all, way):
        for name, weights in found.items():
            wanted = train_alone(name, 2, WAYS[way].clip)
            # Sums in another order; clipping adds a root; the NorMuon family rounds its second moment to float32.
            tolerance = 5e-8 if "Nor" in name else 1e-9
            for one, other, start in zip(weights, wanted, make_model().parameters(), strict=True):
                assert float((one - other).abs().max()) < tolerance, (way, name)
                assert float((other - start).detach().abs().max()) > 1e-3


def train_half(name: str) -> dict[str, torch.dtype]:
    """bf16 compute, fp32 weights and reduction: dtypes of the state; weights are finite and have moved."""
    model = make_model().float()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mp_policy=policy)
    optimizer = make_optimizer(model, name)
    start = [each.detach().clone() for each in model.parameters()]
    for inputs, targets in zip(*make_batches(8), strict=True):
        nn.functional.mse_loss(model(inputs.bfloat16()).float(), targets.float()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for one, before in zip(model.parameters(), start, strict=True):
        moved = one.full_tensor() - before.full_tensor()
        assert moved.isfinite().all()
        assert moved.any()
    return {key: value.dtype for each in model.parameters() for key, value in optimizer.state[each].items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_half_precision_of_fsdp_leaves_the_state_in_float32(name: str) -> None:
    for dtypes in pool(2).run(train_half, name):
        assert {key: dtype for key, dtype in dtypes.items() if key != "waited"} == {
            key: torch.float32 for key in dtypes if key != "waited"
        }
        assert "momentum" in dtypes


class NoBackend:
    """A process group whose backend takes no tensors of any device, as NCCL takes none on the CPU."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def _get_backend(self, device: torch.device) -> Any:
        raise RuntimeError(f"No backend type associated with device type {device.type}")


def build_without_backend() -> None:
    assert dist.group.WORLD is not None
    group = TorchGroup(NoBackend(dist.group.WORLD))
    with stand_in(dist.group.WORLD, group):
        weight = nn.Parameter(torch.ones(4, 4))
        with pytest.raises(ValueError, match=r'lie on cpu.*"cpu:gloo,cuda:nccl".*CPUOffloadPolicy'):
            dion_core.Muon([weight], group=dist.group.WORLD)


def test_a_group_that_cannot_communicate_where_the_parameters_lie_is_refused() -> None:
    pool(2).run(build_without_backend)
