"""Faults that users of such optimizers have met: infinities and mixed precision, with every installed transport.

The number after `test_c` is that of the case in the project's list; `test_cases_steps.py` has more of them.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dion_core
from dion_core.testing.ranks import pool
from tests.training import (
    OPTIMIZERS,
    Cell,
    Problem,
    Snapshot,
    assembled,
    assert_equal_bits,
    build,
    compare_outcomes,
    placed,
    random_problem,
    run_cells,
    snapshot,
    train_cells,
    transports_and_scopes,
    whole_mesh,
)

FINITE = random_problem([(6, 8), (5, 8)], adamw=[(5, 3)], lion=[(4,)], num_steps=3, seed=44)


def spoiled(gradients: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """An infinity in a row of a matrix that rank 1 of 2 holds, and NaN in what is AdamW's and Lion's."""
    copies = {name: value.clone() for name, value in gradients.items() if value is not None}
    copies["matrix0"][4, 2] = math.inf
    copies["adamw0"][0, 1] = math.nan
    copies["lion0"][3] = -math.inf
    return copies


WITH_INF = Problem(FINITE.weights, [spoiled(FINITE.gradients[0]), *FINITE.gradients[1:]])
LATER = Problem(FINITE.weights, FINITE.gradients[1:])


def every_way(problem: Problem, steps: Sequence[int], **options: Any) -> list[Cell]:
    """Every optimizer with every transport and scope that serves it, row-sharded."""
    return [
        Cell(problem, name, "shard0", {**way, **options}, steps=steps)
        for name in OPTIMIZERS
        for way in transports_and_scopes(name)
    ]


def test_c28_a_row_is_left_out_with_every_transport() -> None:
    cells = every_way(WITH_INF, (1, 2))
    by_rank = pool(2).run(run_cells, cells)
    for results in compare_outcomes(cells, by_rank):
        assert all(value.isfinite().all() for each in results for value in each.values())
    for outcomes in zip(*by_rank, strict=True):
        assert sum(outcome.report["rows"]["nonfinite"] for outcome in outcomes) == 1
        assert all(outcome.report["steps"] == {"taken": 2, "skipped": 0} for outcome in outcomes)


def test_c28_a_step_is_skipped_with_every_transport() -> None:
    cells = every_way(WITH_INF, (1, 2, 3), nonfinite="skip")
    others = train_cells(every_way(LATER, (1, 2), nonfinite="skip"), 2)
    by_rank = pool(2).run(run_cells, cells)
    for cell, wanted, *outcomes in zip(cells, others, *by_rank, strict=True):
        first, *later = assembled(cell, outcomes)
        for key, value in first.items():
            name, kind = key.split(".")
            assert torch.equal(value, FINITE.weights[name] if kind == "weight" else torch.zeros_like(value)), key
        for actual, other in zip(later, wanted, strict=True):
            assert_equal_bits(actual, other, cell.options)
        assert [outcome.report["steps"] for outcome in outcomes] == [{"taken": 2, "skipped": 1}] * 2


def chosen_rows(rows: Sequence[float], scope: str, world_size: int) -> Iterator[int]:
    """A quarter of equal rows by their strength: of all, or of every rank's shard; ties to the lower row."""
    if scope == "all":
        return iter(range(len(rows)))
    shard = len(rows) if scope == "global" else math.ceil(len(rows) / world_size)
    count = math.ceil(shard / 4)
    starts = range(0, len(rows), shard)
    best = [sorted(range(start, min(start + shard, len(rows))), key=lambda row: -rows[row])[:count] for start in starts]
    return iter([row for of_shard in best for row in of_shard])


def test_c29_the_stored_momentum_with_every_transport() -> None:
    """Rows of ones in bf16 at rate 0: a row is its sum so far, rounded, and what was applied is decayed and rounded."""
    ones = torch.ones(10, 4, dtype=torch.bfloat16)
    start = random_problem([(10, 4)], seed=45).to(torch.bfloat16)
    problem = Problem(start.weights, [{"matrix0": ones}] * 4)
    cells = every_way(problem, (4,), lr=0.0)
    for world_size in (2, 3):
        for cell, (found,) in zip(cells, train_cells(cells, world_size), strict=True):
            rows = torch.zeros(10, dtype=torch.bfloat16)
            scope = cell.options.get("scope", "all")
            for _ in range(4):
                rows = (rows.float() + 1).bfloat16()
                for row in chosen_rows(rows.tolist(), scope, world_size):
                    rows[row] = (rows[row].float() * 0.95).bfloat16()
            momentum = found["matrix0.momentum"]
            assert momentum.dtype == torch.bfloat16
            assert torch.equal(momentum, rows[:, None].expand(10, 4)), (world_size, cell.optimizer, cell.options)
            assert torch.equal(found["matrix0.weight"], problem.weights["matrix0"])


MIXES = {
    "fp32 gradients of bf16 weights": (torch.bfloat16, torch.float32, None),
    "bf16 gradients of fp32 weights": (torch.float32, torch.bfloat16, None),
    "fp32 momentum of bf16 weights": (torch.bfloat16, torch.bfloat16, torch.float32),
    "bf16 momentum of fp32 weights": (torch.float32, torch.float32, torch.bfloat16),
    "fp16 gradients and fp32 momentum of bf16 weights": (torch.bfloat16, torch.float16, torch.float32),
}


def train_mixed(cells: Sequence[Cell], gradient_dtype: torch.dtype) -> list[list[Snapshot]]:
    """Trains with gradients of a dtype of their own; a saved and loaded optimizer takes the last step."""
    mesh, results = whole_mesh(), []
    for cell in cells:
        optimizer, parameters = build(cell, mesh)
        snapshots = []
        for number in range(3):
            if number == 2:
                saved = optimizer.state_dict()
                optimizer, fresh = build(cell, mesh)
                with torch.no_grad():
                    for name, parameter in fresh.items():
                        parameter.copy_(parameters[name])
                parameters = fresh
                optimizer.load_state_dict(saved)
            for name, parameter in parameters.items():
                gradient = cell.problem.gradients[number][name]
                parameter.grad_dtype = None
                parameter.grad = placed(gradient.to(gradient_dtype), cell.layout_of(name), mesh)
            optimizer.step()
            snapshots.append(snapshot(optimizer, parameters))
        results.append(snapshots)
    return results


@pytest.mark.skipif(
    not hasattr(torch.ones(1), "grad_dtype"), reason="this torch has gradients of the weight's dtype only"
)
@pytest.mark.parametrize("mix", MIXES)
def test_c30_mixed_dtypes_with_every_transport(mix: str) -> None:
    """The same bits as on one rank, also after a load; there the momentum follows its rule in fp32, rounded once."""
    weight_dtype, gradient_dtype, momentum_dtype = MIXES[mix]
    problem = random_problem([(6, 8), (5, 8)], adamw=[(5, 3)], lion=[(4,)], num_steps=3, seed=46).to(weight_dtype)
    cells = every_way(problem, (), momentum_dtype=momentum_dtype)
    alone = [replace(cell, layout="plain", options={**cell.options, "transport": "auto"}) for cell in cells]
    by_rank = pool(2).run(train_mixed, cells, gradient_dtype)
    (wanted,) = pool(1).run(train_mixed, alone, gradient_dtype)
    for number, cell in enumerate(cells):
        of_ranks = [of_rank[number] for of_rank in by_rank]
        if cell.options.get("scope") != "local":
            for step, (found, reference) in enumerate(zip(whole(cell, of_ranks), wanted[number], strict=True)):
                reference.pop("matrix0.waited", None)
                reference.pop("matrix1.waited", None)
                assert_equal_bits(found, reference, f"{mix}: {cell.optimizer} {cell.options} step {step}")
        dtypes = {key: value.dtype for key, value in of_ranks[0][-1].items()}
        assert dtypes["matrix0.weight"] == weight_dtype
        assert dtypes["matrix0.momentum"] == (momentum_dtype or weight_dtype)
        assert dtypes.get("matrix0.second_moment", torch.float32) == torch.float32
        assert dtypes["adamw0.exp_avg"] == weight_dtype
        if cell.optimizer in ("Muon", "NorMuon"):
            check_momentum(problem, wanted[number], gradient_dtype, momentum_dtype or weight_dtype)


def whole(cell: Cell, of_ranks: Sequence[Sequence[Snapshot]]) -> list[Snapshot]:
    """Whole tensors of every step."""
    joined = []
    for parts in zip(*of_ranks, strict=True):
        names = [name for name in parts[0] if not name.endswith("waited")]
        joined.append({n: torch.cat([p[n] for p in parts]) if parts[0][n].ndim else parts[0][n] for n in names})
    return joined


def check_momentum(problem: Problem, found: Sequence[Snapshot], gradient: torch.dtype, momentum: torch.dtype) -> None:
    for name in ("matrix0", "matrix1"):
        rows = torch.zeros(problem.weights[name].shape, dtype=momentum)
        for step, taken in zip(problem.gradients, found, strict=True):
            rows = (rows.float() + step[name].to(gradient).float()).to(momentum)
            rows = (rows.float() * 0.95).to(momentum)
            assert torch.equal(taken[f"{name}.momentum"], rows)


def test_c30_an_optimizer_loads_what_another_dtype_saved_into_its_own() -> None:
    """The dtype of the state is that of the options, whatever the checkpoint has."""
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    for name in OPTIMIZERS:
        wide = getattr(dion_core, name)([weight], momentum_dtype=torch.float32)
        wide.state[weight]["momentum"].fill_(1.001)
        saved = wide.state_dict()
        saved["param_groups"][0]["momentum_dtype"] = None
        narrow = getattr(dion_core, name)([weight])
        narrow.load_state_dict(saved)
        momentum = narrow.state[weight]["momentum"]
        assert momentum.dtype == torch.bfloat16
        assert torch.equal(momentum, torch.full((4, 4), 1.001).bfloat16())
        weight.grad = torch.ones_like(weight)
        narrow.step()
