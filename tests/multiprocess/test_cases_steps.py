"""Faults that users of such optimizers have met: what a step does to numbers, checkpoints, and torch's interface.

The number after `test_c` is that of the case in the project's list; `test_cases.py` has the other ones.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import dion_core
from dion_core.newton_schulz import NewtonSchulz
from dion_core.testing.ranks import pool
from tests.reference import polar_express
from tests.small_model import make_batches, make_model, make_optimizer, train_model
from tests.training import (
    ELEMENTWISE_LR,
    LAYOUTS,
    OPTIMIZERS,
    Cell,
    Problem,
    applied_rows,
    assembled,
    assert_equal_bits,
    compare_outcomes,
    compare_with_reference,
    local,
    random_problem,
    run_cells,
    train_cells,
)


class AllOnes:
    """An orthogonalizer whose every result is 1, which shows the factors that are applied to it."""

    def __call__(self, matrices: Tensor) -> Tensor:
        return torch.ones_like(matrices)


def test_c19_scale_from_the_true_rows() -> None:
    weight = torch.zeros(33, 32, dtype=torch.float64)
    problem = Problem({"matrix0": weight}, [{"matrix0": torch.ones_like(weight)}])
    factors = {"spectral_norm": 1.0155, "rms_norm": 0.2 * math.sqrt(33), None: 1.0}
    assert round(math.sqrt(33 / 32), 4) == factors["spectral_norm"]
    cells = [
        Cell(problem, name, "shard0", {"scale": scale, "orthogonalizer": AllOnes(), **rows, "lr": 1.0}, steps=(1,))
        for name in OPTIMIZERS
        for scale in factors
        for rows in [{"fraction": 1.0} if "Dion" in name else {}]
    ]
    for cell, (snapshot,) in zip(cells, train_cells(cells, 4), strict=True):
        wanted = factors[cell.options["scale"]]
        assert torch.allclose(snapshot["matrix0.weight"], torch.full_like(weight, -wanted), rtol=1e-4), cell.optimizer


def test_c22_decay_without_an_update() -> None:
    """Zero gradient: weights x (1 - lr * decay) at the base rate; no gradient: unchanged. Scales 2 and 1/2."""
    start = random_problem([(32, 8), (8, 32)], adamw=[(5, 3)], lion=[(7,)], seed=20)
    zeros = {name: torch.zeros_like(weight) for name, weight in start.weights.items()}
    problem = Problem(start.weights, [zeros, {}])
    options = {"lr": 0.1, "weight_decay": 0.5}
    cells = [Cell(problem, name, layout, options, steps=(1, 2)) for name in OPTIMIZERS for layout in ("shard0", "ddp")]
    for cell, (first, second) in zip(cells, train_cells(cells, 2), strict=True):
        for name, weight in start.weights.items():
            factor = 0.95 if name.startswith("matrix") else 1 - ELEMENTWISE_LR * 0.5
            assert torch.allclose(first[f"{name}.weight"], weight * factor, rtol=1e-15, atol=0), name
        assert_equal_bits(second, first, cell.optimizer)


def test_c23_groups_and_zero_grad_cover_all_parameters() -> None:
    for name in OPTIMIZERS:
        model = make_model()
        optimizer = make_optimizer(model, name)
        given = {id(parameter) for parameter in model.parameters()}
        assert [len(group["params"]) for group in optimizer.param_groups] == [2, 4]
        assert {id(each) for group in optimizer.param_groups for each in group["params"]} == given
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.zero_grad(set_to_none=False)
        assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_c24_accumulated_gradients(name: str) -> None:
    whole, accumulated = make_model(), make_model()
    inputs, targets = make_batches(8)
    train_model(whole, make_optimizer(whole, name), (inputs, targets))
    optimizer = make_optimizer(accumulated, name)
    for batch, wanted in zip(inputs, targets, strict=True):
        for part, wanted_part in zip(batch.split(2), wanted.split(2), strict=True):
            (nn.functional.mse_loss(accumulated(part), wanted_part) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    # Sums in another order; the NorMuon family rounds its second moment to float32 in between.
    tolerance = 5e-9 if "Nor" in name else 1e-12
    for one, other in zip(whole.parameters(), accumulated.parameters(), strict=True):
        assert float((one - other).detach().abs().max()) < tolerance


def test_c25_zero_gradients() -> None:
    drawn = random_problem([(4, 8)] * 3, seed=21)
    zero = torch.zeros(4, 8, dtype=torch.float64)
    first_step = Problem(drawn.weights, [dict.fromkeys(drawn.weights, zero), *drawn.gradients[1:]])
    one_of_three = Problem(drawn.weights, [{**step, "matrix1": zero} for step in drawn.gradients])
    cells = [
        Cell(problem, name, layout, steps=(1, 2, 5))
        for problem in (first_step, one_of_three)
        for name in OPTIMIZERS
        for layout in ("shard0", "ddp", "plain")
    ]
    two = ("matrix0", "matrix2")
    weights, *gradients = ({name: values[name] for name in two} for values in (drawn.weights, *drawn.gradients))
    neighbours = Problem(weights, gradients)
    for world_size in (1, 2):
        results = compare_with_reference(cells, world_size)
        assert all(value.isfinite().all() for steps in results for each in steps for value in each.values())
        alone = [replace(cell, problem=neighbours) for cell in cells if cell.problem is one_of_three]
        for steps, others in zip(results[len(alone) :], train_cells(alone, world_size), strict=True):
            for actual, wanted in zip(steps, others, strict=True):
                state = [actual["matrix1.momentum"], actual.get("matrix1.second_moment", torch.zeros(1))]
                assert not any(value.any() for value in state)
                assert_equal_bits({key: actual[key] for key in wanted}, wanted, "neighbours of a zero matrix")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_c26_the_scale_of_a_gradient_does_not_matter(name: str) -> None:
    generator = torch.Generator().manual_seed(22)
    gradient = torch.randn(256, 256, generator=generator)
    gradient /= gradient.norm()
    updates = {}
    for scale in (1.0, 1e-6, 1e-8, 1e-10, 1e20, 0.0, 2.0**-33, 2.0**66):
        weight = nn.Parameter(torch.zeros(256, 256))
        weight.grad = gradient * scale
        getattr(dion_core, name)([weight], lr=1.0).step()
        updates[scale] = weight.detach()
    assert not updates[0.0].any()
    assert float(updates[1.0].abs().max()) > 0.1
    for scale in (2.0**-33, 2.0**66):
        assert torch.equal(updates[scale], updates[1.0])  # powers of two round nothing
    for scale in (1e-6, 1e-8, 1e-10, 1e20):
        # The scaled gradient is rounded anew, by 2^-24 of each entry, in float32 products; entries are about 1/16.
        assert float((updates[scale] - updates[1.0]).abs().max()) < 5e-6


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_c27_large_gradients_with_fp16_compute(name: str) -> None:
    generator = torch.Generator().manual_seed(23)
    weight = nn.Parameter(torch.zeros(32, 32))
    weight.grad = torch.randn(32, 32, generator=generator) * 1e6
    rows = {"fraction": 1.0} if "Dion" in name else {}
    options = {"lr": 1.0, "orthogonalizer": NewtonSchulz(compute_dtype=torch.float16), **rows}
    getattr(dion_core, name)([weight], **options).step()
    wanted = torch.from_numpy(polar_express(weight.grad.double().numpy()))
    if "Nor" in name:
        norm = wanted.norm()
        wanted /= wanted.norm(dim=1, keepdim=True)
        wanted *= norm / wanted.norm()
    # Five steps of products of values rounded to 2^-11.
    assert float((weight.detach() + wanted).norm() / wanted.norm()) < 0.01


INF = random_problem([(6, 8), (3, 8)], adamw=[(5, 3)], lion=[(4,)], seed=24)


def spoiled(gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """The gradients with an infinity in a row of a matrix and a NaN in an AdamW parameter."""
    copies = {name: value.clone() for name, value in gradients.items() if value is not None}
    copies["matrix0"][4, 2] = math.inf
    copies["adamw0"][0, 1] = math.nan
    return copies


WITH_INF = Problem(INF.weights, [spoiled(INF.gradients[0]), *INF.gradients[1:]])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_c28_a_row_with_an_infinite_gradient_is_left_out(world_size: int, layout: str) -> None:
    options = [{}] * 2 + [{"fraction": 1.0}, {"fraction": 0.9}, {"fraction": 0.25}]
    names = [*OPTIMIZERS, "NorDion2"]
    cells = [Cell(WITH_INF, name, layout, each) for name, each in zip(names, options, strict=True)]
    by_rank = pool(world_size).run(run_cells, cells)
    for results in compare_outcomes(cells, by_rank):
        assert all(value.isfinite().all() for each in results for value in each.values())
    for outcomes in zip(*by_rank, strict=True):
        counted = [outcome.report["rows"]["nonfinite"] for outcome in outcomes]
        # Every rank that holds the row, or a part of it, has left it out.
        assert sum(counted) == (1 if layout == "shard0" else world_size)


def test_c28_a_whole_step_is_skipped() -> None:
    """Only rank 1 sees the infinite value: row 4 of 6."""
    without = Problem(INF.weights, INF.gradients[1:])
    cells = [Cell(WITH_INF, name, "shard0", {"nonfinite": "skip"}, steps=(1, 2, 5)) for name in OPTIMIZERS]
    others = [Cell(without, name, "shard0", {"nonfinite": "skip"}, steps=(1, 4)) for name in OPTIMIZERS]
    by_rank = pool(2).run(run_cells, cells)
    for cell, wanted, *outcomes in zip(cells, train_cells(others, 2), *by_rank, strict=True):
        first, *later = assembled(cell, outcomes)
        for key, value in first.items():
            name, kind = key.split(".")
            assert torch.equal(value, INF.weights[name] if kind == "weight" else torch.zeros_like(value)), key
        for actual, other in zip(later, wanted, strict=True):
            assert_equal_bits(actual, other, cell.optimizer)
        assert [outcome.report["steps"] for outcome in outcomes] == [{"taken": 4, "skipped": 1}] * 2


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_c28_a_gradient_scaler_skips_the_step(name: str) -> None:
    def train(scaled: bool) -> list[Tensor]:
        model = make_model().float()
        optimizer = make_optimizer(model, name)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)  # a power of two rounds nothing
        for number, (inputs, targets) in enumerate(zip(*(each.float() for each in make_batches(8)), strict=True)):
            if number == 0 and not scaled:
                continue
            scaler.scale(nn.functional.mse_loss(model(inputs), targets)).backward()
            if number == 0:
                next(model.parameters()).grad[0, 0] = math.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        states = [value for parameter in model.parameters() for value in optimizer.state[parameter].values()]
        return [*(parameter.detach() for parameter in model.parameters()), *states]

    assert all(torch.equal(one, other) for one, other in zip(train(True), train(False), strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_c29_the_stored_momentum_is_what_the_rule_says(name: str) -> None:
    weight = nn.Parameter(torch.randn(8, 4).bfloat16())
    before = weight.detach().clone()
    optimizer = getattr(dion_core, name)([weight], lr=0.0)
    rows = [torch.zeros((), dtype=torch.bfloat16)] * 8
    for _ in range(5):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        rows = [(row.float() + 1).bfloat16() for row in rows]
        best = sorted(range(8), key=lambda row: -float(rows[row]))  # stable: ties to the lower row
        for row in best[: 2 if "Dion" in name else 8]:
            rows[row] = (rows[row].float() * 0.95).bfloat16()
        momentum = optimizer.state[weight]["momentum"]
        assert momentum.dtype == torch.bfloat16
        assert torch.equal(momentum, torch.stack(rows)[:, None].expand(8, 4))
    assert torch.equal(weight, before)


def test_c31_learning_rate_zero_in_the_first_step() -> None:
    problem = random_problem([(6, 8), (3, 8)], adamw=[(5, 3)], lion=[(4,)], seed=25)
    cells = [Cell(problem, name, layout, {"lr": 0.0}, steps=(1,)) for name in OPTIMIZERS for layout in LAYOUTS]
    for (snapshot,) in train_cells(cells, 2):
        assert all(value.isfinite().all() for value in snapshot.values())
        for name in ("matrix0", "matrix1"):
            assert torch.equal(snapshot[f"{name}.weight"], problem.weights[name])
            assert snapshot[f"{name}.momentum"].any()


@pytest.mark.parametrize("name", ["Dion2", "NorDion2"])
def test_c32_whole_and_tiny_fractions(name: str) -> None:
    problem = random_problem([(6, 8), (5, 8)], seed=26)
    fractions = (1, 1.0, 1e-12, 0.2)
    cells = [Cell(problem, name, "shard0", {"fraction": fraction}) for fraction in fractions]
    for world_size in (1, 2):
        integer, real, tiny, fifth = compare_with_reference(cells, world_size)
        assert all(map(torch.equal, integer[-1].values(), real[-1].values()))
        for cell, results, counts in zip(cells[1:], (real, tiny, fifth), ((6, 5), (1, 1), (2, 1)), strict=True):
            assert tuple(map(len, applied_rows(cell, results[0]).values())) == counts


def check_checkpoint(name: str, directory: str, full: bool) -> None:
    options = StateDictOptions(full_state_dict=full)
    inputs, targets = make_batches(4, num_steps=3)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = make_model()
        model[2].bias.requires_grad_(False)
        fully_shard(model)
        return model, make_optimizer(model, name)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        nn.functional.mse_loss(model(inputs[number]), targets[number]).backward()
        if dist.get_rank() == 1:  # only rank 0 ever has gradients of the last layer
            model[3].weight.grad = model[3].bias.grad = None
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = build()
    at_first = get_optimizer_state_dict(model, optimizer, options=options)["state"]
    assert set(at_first) == {key for key, value in model.named_parameters() if value.requires_grad}
    for number in (0, 1):
        step(model, optimizer, number)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    assert {key: set(value) for key, value in saved["state"].items()} == {
        key: set(value) for key, value in at_first.items()
    }
    dcp.save({"optimizer": saved}, checkpoint_id=directory)

    other_model, other = build()
    other_model.load_state_dict(model.state_dict())
    target = {"optimizer": get_optimizer_state_dict(other_model, other, options=options)}
    dcp.load(target, checkpoint_id=directory)
    set_optimizer_state_dict(other_model, other, target["optimizer"], options=options)
    step(model, optimizer, 2)
    step(other_model, other, 2)
    for one, two in zip(model.parameters(), other_model.parameters(), strict=True):
        assert torch.equal(local(one), local(two))
        assert optimizer.state[one].keys() == other.state[two].keys()
        for key, value in optimizer.state[one].items():
            assert torch.equal(local(value), local(other.state[two][key]))


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_c33_checkpoint_where_one_rank_alone_had_gradients(name: str, full: bool, tmp_path: Path) -> None:
    pool(2).run(check_checkpoint, name, str(tmp_path), full)


def kinds(function: Callable[..., Any]) -> list[tuple[str, Any, bool]]:
    """Name and kind of every argument, and whether it can be left out."""
    given = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default is not each.empty) for each in given]


def test_c34_methods_have_the_signatures_of_torch() -> None:
    base = torch.optim.Optimizer
    for name in OPTIMIZERS:
        kind = getattr(dion_core, name)
        methods = [key for key, value in vars(base).items() if inspect.isfunction(value) and not key.startswith("_")]
        assert {"step", "zero_grad", "state_dict", "load_state_dict", "add_param_group"} <= set(methods)
        for method in methods:
            assert kinds(getattr(kind, method)) == kinds(getattr(base, method)), method
        first, second, *_ = inspect.signature(kind).parameters.values()
        assert [each.name for each in (first, second)] == ["params", "lr"]  # as all optimizers of torch


def test_c34_load_state_dict_by_keyword_and_position() -> None:
    for name in OPTIMIZERS:
        model = make_model()
        optimizer = make_optimizer(model, name)
        train_model(model, optimizer, make_batches(4))
        saved = optimizer.state_dict()
        for position, keyword in (((saved,), {}), ((), {"state_dict": saved})):
            fresh = make_optimizer(model, name)
            fresh.load_state_dict(*position, **keyword)
            for parameter in model.parameters():
                for key, value in optimizer.state[parameter].items():
                    assert torch.equal(fresh.state[parameter][key], value)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("keyword", [False, True])
def test_c40_closure(name: str, keyword: bool) -> None:
    model, other = make_model(), make_model()
    optimizer = make_optimizer(model, name)
    inputs, targets = make_batches(8, num_steps=1)
    calls = []

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs[0]), targets[0])
        loss.backward()
        calls.append(loss)
        return loss

    with torch.no_grad():
        returned = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
    assert len(calls) == 1
    assert returned is calls[0]
    train_model(other, make_optimizer(other, name), (inputs, targets))
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))
