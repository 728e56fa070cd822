"""Every optimizer over every transport and layout equals the float64 reference; real FSDP2 and DDP models too."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from dion_core.testing.ranks import pool
from tests.small_model import make_batches, make_model, make_optimizer, train_model
from tests.training import (
    LAYOUTS,
    MATRIX_FAMILY,
    OPTIMIZERS,
    Cell,
    Problem,
    Snapshot,
    compare_with_reference,
    expected,
    random_problem,
    train_cells,
    transports_and_scopes,
)

# Together: wide, tall, square-ish; several of one shape; fewer rows than ranks; shards of uneven length.
WIDE = random_problem([(17, 32), (6, 8), (3, 8), (6, 8), (6, 8)], adamw=[(7,), (5, 3)], seed=1)
SMALL = random_problem([(5, 8), (1, 8), (32, 9), (5, 8)], lion=[(6,), (2, 3, 4)], seed=2)
WIDE_FP32, SMALL_FP32 = WIDE.to(torch.float32), SMALL.to(torch.float32)

MUON_OPTIONS: tuple[tuple[Problem, dict[str, Any]], ...] = (
    (WIDE, {}),
    (SMALL, {"nesterov": True, "scale": "rms_norm", "weight_decay": 0.1}),
    (WIDE, {"cautious_weight_decay": True, "scale": None, "weight_decay": 0.5, "momentum": 0.8}),
    (SMALL, {"nesterov": True, "cautious_weight_decay": True, "maximize": True}),
)
DION_OPTIONS: tuple[tuple[Problem, dict[str, Any]], ...] = (
    (WIDE, {"fraction": 0.25}),
    (SMALL, {"fraction": 0.35, "scale": "rms_norm", "momentum": 0.8}),
    (WIDE, {"fraction": 1.0, "scale": None, "maximize": True}),
    (SMALL, {"fraction": 1, "weight_decay": 0.5}),
    (WIDE, {"fraction": 1e-6, "weight_decay": 0.0}),
    (SMALL, {"fraction": 0.25, "maximize": True}),
)

# Relative to the largest entry of a tensor.
#
# Five steps round a tensor in float32 at most twice each, by 2^-24. Newton-Schulz raises small singular values
# (and their errors) up to a few hundred times, which the second moment shows undamped by the learning rate.
FP32 = {"other": 10 * 2**-24, "weight": 1e-6, "second_moment": 1e-4}
# The reference rounds to the wire dtype too, but a value close to the middle of two bf16 numbers may fall on
# the other side, and is then off by 2^-8: of an entry below 1.2, times lr and scale (0.04), over weights up to 2.
BF16_WIRE = {"other": 10 * 2**-24, "weight": 1e-4, "second_moment": 5e-3}


Way = dict[str, Any]
Choices = Sequence[tuple[Problem, dict[str, Any]]]


def choices(optimizer: str, number: int, way: Way) -> Choices:
    """The options of one transport and scope; each of the Dion2 family takes every second one of them."""
    if optimizer in MATRIX_FAMILY:
        return MUON_OPTIONS[:: 1 if optimizer == "Muon" else 2]
    if way["scope"] == "all":  # the fraction does not matter
        return DION_OPTIONS[optimizer == "NorDion2" :][:1]
    return DION_OPTIONS[(number + (optimizer == "NorDion2")) % 2 :: 2]


def shared_out(ways: Sequence[tuple[Way, Choices]]) -> Iterator[tuple[Way, Choices]]:
    """Every transport and scope, and with every scope all its options, each with one of the transports."""
    for scope in dict.fromkeys(way.get("scope") for way, _ in ways):
        of_scope = [(way, chosen) for way, chosen in ways if way.get("scope") == scope]
        options: list[tuple[Problem, dict[str, Any]]] = []
        for _, chosen in of_scope:
            options += [each for each in chosen if each not in options]
        for number in range(max(len(of_scope), len(options))):
            yield of_scope[number % len(of_scope)][0], [options[number % len(options)]]


def cells_of(optimizer: str, layout: str) -> Iterator[Cell]:
    """Every transport and scope with every option. Where nothing is split no transport has rows to move: there one
    transport is enough for each option."""
    ways = [(way, choices(optimizer, number, way)) for number, way in enumerate(transports_and_scopes(optimizer))]
    for way, chosen in ways if layout in ("shard0", "shard1") else shared_out(ways):
        for problem, options in chosen:
            yield Cell(problem, optimizer, layout, {**way, **options})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equals_the_reference_in_float64(world_size: int, layout: str) -> None:
    cells = [cell for optimizer in OPTIMIZERS for cell in cells_of(optimizer, layout)]
    compare_with_reference(cells, world_size)


def low_precision_cells(layout: str, wire_dtype: torch.dtype | None) -> list[Cell]:
    """Every optimizer, transport and scope once, with float32 parameters."""
    cells = []
    for optimizer in OPTIMIZERS:
        for number, way in enumerate(transports_and_scopes(optimizer)):
            problem = (WIDE_FP32, SMALL_FP32)[number % 2]
            cells.append(Cell(problem, optimizer, layout, {**way, "wire_dtype": wire_dtype}))
    return cells


@pytest.mark.parametrize("layout", ["shard0", "shard1", "ddp"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_equals_the_reference_in_float32(world_size: int, layout: str) -> None:
    compare_with_reference(low_precision_cells(layout, None), world_size, FP32)


def mean_error(actual: Snapshot, wanted: Snapshot) -> float:
    """Of the entries of the matrices' weights."""
    names = [name for name in wanted if name.startswith("matrix") and name.endswith("weight")]
    return sum(float((actual[name] - wanted[name]).abs().mean()) for name in names)


@pytest.mark.parametrize("layout", ["shard0", "shard1", "ddp"])
@pytest.mark.parametrize("world_size", [1, 4])
def test_equals_the_reference_with_bf16_on_the_wire(world_size: int, layout: str) -> None:
    cells = low_precision_cells(layout, torch.bfloat16)
    results = compare_with_reference(cells, world_size, BF16_WIRE)
    for cell, snapshots in zip(cells, results, strict=True):
        # Not vacuous: a wire that does not round is much further away.
        unrounded = replace(cell, options={**cell.options, "wire_dtype": None})
        rounded_error = mean_error(snapshots[-1], expected(cell, world_size)[-1])
        assert rounded_error < 0.1 * mean_error(snapshots[-1], expected(unrounded, world_size)[-1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_rounded_once(dtype: torch.dtype) -> None:
    """One step is that of the float64 reference, rounded: float32 in between is too fine to show."""
    problems = (WIDE.to(dtype), SMALL.to(dtype))
    cells = [
        Cell(problem, name, layout, {"momentum_dtype": torch.float32}, steps=(1,))
        for problem in problems
        for name in OPTIMIZERS
        for layout in ("shard0", "shard1", "ddp")
    ]
    for cell, (actual,) in zip(cells, train_cells(cells, 2), strict=True):
        wanted = expected(cell, 2)[0]
        names = [name for name in wanted if name.endswith("weight")]
        assert all(actual[name].dtype == dtype for name in names)
        equal = torch.cat([(actual[name] == wanted[name].to(dtype)).flatten() for name in names])
        # Entries that lie within a float32 error, 1e-6, of the middle of two neighbours: two of some 700 at most, in
        # float16. Rounding twice changes tens.
        assert int((~equal).sum()) <= 3, f"{cell.optimizer} {cell.layout}: {int((~equal).sum())} of {len(equal)}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_momentum_of_all_rows_follows_its_rule_bit_for_bit(dtype: torch.dtype) -> None:
    """M = round(M + G), then M = round(0.95 * M), each computed in float32, in loops over the steps."""
    problem = WIDE.to(dtype)
    cells = [Cell(problem, name, "shard0", steps=(1, 2, 3, 4, 5)) for name in MATRIX_FAMILY]
    for snapshots in train_cells(cells, 2):
        for name, weight in problem.weights.items():
            momentum = torch.zeros_like(weight)
            for snapshot, gradients in zip(snapshots, problem.gradients, strict=True):
                if name.startswith("matrix"):
                    momentum = (momentum.float() + gradients[name].float()).to(dtype)
                    momentum = (momentum.float() * 0.95).to(dtype)
                    assert torch.equal(snapshot[f"{name}.momentum"], momentum)


def columns_of_the_first(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.shape == (17, 8) else None


def train_parallel(kind: str, name: str) -> float:
    """The largest difference of this rank's weights from those of one process with the whole batch."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    model = make_model()
    trained: nn.Module = model
    if kind == "ddp":
        trained = DistributedDataParallel(model)
    else:
        placement = columns_of_the_first if kind == "fsdp2-columns" else None
        for layer in model:
            fully_shard(layer, shard_placement_fn=placement)
        fully_shard(model)
    optimizer = make_optimizer(model, name, group=dist.group.WORLD if kind == "ddp" else None)
    inputs, targets = make_batches(2 * world_size)
    train_model(trained, optimizer, (inputs.chunk(world_size, 1)[rank], targets.chunk(world_size, 1)[rank]))
    alone = make_model()
    train_model(alone, make_optimizer(alone, name), (inputs, targets))
    wanted, initial = alone.state_dict(), make_model().state_dict()
    assert all(float((wanted[key] - initial[key]).abs().max()) > 1e-3 for key in wanted)
    whole = {
        key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in model.state_dict().items()
    }
    return max(float((whole[key] - value).abs().max()) for key, value in wanted.items())


def train_parallel_all(kind: str) -> dict[str, float]:
    return {name: train_parallel(kind, name) for name in OPTIMIZERS}


@pytest.mark.parametrize(
    ("kind", "world_size"), [("fsdp2", 2), ("fsdp2", 4), ("fsdp2-columns", 4), ("ddp", 2), ("ddp", 3)]
)
def test_real_models_equal_one_process_with_the_whole_batch(kind: str, world_size: int) -> None:
    for errors in pool(world_size).run(train_parallel_all, kind):
        # The gradient's sums run in another order, 1e-16; NorMuon's second moment is float32 (see FLOAT64_NORMALIZED).
        for name, error in errors.items():
            assert error < (1e-8 if name.startswith("Nor") else 1e-12), name
