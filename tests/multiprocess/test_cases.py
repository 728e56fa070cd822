"""Faults that users of such optimizers have met: how parameters lie, and who has gradients.

The number after `test_c` is that of the case in the project's list; `test_cases_steps.py` has the other ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import dion_core
from dion_core import Dion2, NorDion2
from dion_core.collectives import observe
from dion_core.testing.ranks import pool
from tests.training import (
    OPTIMIZERS,
    Cell,
    Outcome,
    Problem,
    applied_rows,
    assembled,
    assert_close,
    assert_equal_bits,
    compare_outcomes,
    compare_with_reference,
    expected,
    local,
    place,
    random_problem,
    run_cell,
    run_cells,
    train_cells,
    transports_and_scopes,
    whole_mesh,
)


def exact_transports() -> list[str]:
    return [way["transport"] for way in transports_and_scopes("Dion2") if way["scope"] == "global"]


def assert_same_collectives(outcomes: Sequence[Outcome]) -> None:
    """Every rank issued the same collectives in the same order; the bytes may differ."""
    names = [[(call.name, call.size) for call in outcome.calls] for outcome in outcomes]
    assert names[0]
    assert all(of_rank == names[0] for of_rank in names)


@pytest.mark.parametrize(
    ("world_size", "shapes"), [(4, [(3, 8), (3, 8)]), (2, [(1, 8), (1, 8)]), (4, [(5, 8), (1, 8), (3, 8)])]
)
def test_c01_fewer_rows_than_ranks(world_size: int, shapes: list[tuple[int, int]]) -> None:
    problem = random_problem(shapes, seed=10)
    cells = [Cell(problem, name, "shard0", way) for name in OPTIMIZERS for way in transports_and_scopes(name)]
    by_rank = pool(world_size).run(run_cells, cells)
    for outcomes in zip(*by_rank, strict=True):
        assert_same_collectives(outcomes)
        last = outcomes[-1].snapshots[-1]
        assert last["matrix1.weight"].shape == last["matrix1.momentum"].shape == (0, 8)
        assert last.get("matrix1.second_moment", torch.empty(0, 1)).shape == (0, 1)
    compare_outcomes(cells, by_rank)


def test_c02_empty_ranks_choose_nothing_and_join() -> None:
    problem = random_problem([(3, 8)], seed=11)
    cells = [
        Cell(problem, name, "shard0", {"fraction": 0.25, **way}, steps=(1, 5))
        for name in ("Dion2", "NorDion2")
        for way in transports_and_scopes(name)
        if way["scope"] != "all"
    ]
    by_rank = pool(4).run(run_cells, cells)
    for cell, *outcomes in zip(cells, *by_rank, strict=True):
        assert_same_collectives(outcomes)
        assert [outcome.snapshots[0]["matrix0.weight"].shape[0] for outcome in outcomes] == [1, 1, 1, 0]
        # A quarter of one row, rounded up, of each shard that has one; a quarter of three rows, rounded up.
        rows = applied_rows(cell, assembled(cell, outcomes)[0])["matrix0"]
        assert len(rows) == (3 if cell.options["scope"] == "local" else 1)
        chosen = [outcome.report["rows"]["chosen"] for outcome in outcomes]
        assert (sum(chosen), chosen[3]) == (5 * len(rows), 0)
    compare_outcomes(cells, by_rank)


class Recorder:
    """An orthogonalizer that returns what it is given and keeps the shapes."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, matrices: Tensor) -> Tensor:
        self.shapes.append(tuple(matrices.shape))
        return matrices.clone()


def all_to_alls(transport: str) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """The bytes sent to each rank in every all-to-all of one step, and the shapes orthogonalized."""
    recorder = Recorder()
    weight = nn.Parameter(place(torch.zeros(32, 8), Shard(0), whole_mesh()))
    weight.grad = place(torch.arange(256.0).view(32, 8), Shard(0), whole_mesh())
    optimizer = Dion2([weight], fraction=0.25, transport=transport, orthogonalizer=recorder)
    with observe() as calls:
        optimizer.step()
    return [call.sent for call in calls if call.name == "all_to_all"], recorder.shapes


def test_c03_local_rows_alone_are_sent() -> None:
    two_rows, shard = 2 * 8 * 4, 8 * 8 * 4
    for transport, forward in (("local", two_rows), ("full", shard)):
        for rank, (sent, shapes) in enumerate(pool(4).run(all_to_alls, transport)):
            back = (forward,) * 4 if rank == 0 else (0,) * 4  # rank 0 owns the only matrix
            assert sent == [(forward, 0, 0, 0), back]
            assert [shape for shape in shapes if 0 not in shape] == ([(1, 8, 8)] if rank == 0 else [])


@pytest.mark.parametrize("transport", exact_transports())
def test_c04_rows_of_the_true_height_at_every_world_size(transport: str) -> None:
    problem = random_problem([(17, 32)], seed=12).to(torch.float32)
    options = {"fraction": 0.35, "transport": transport, "scope": "global"}
    cells = [Cell(problem, name, "shard0", options) for name in ("Dion2", "NorDion2")]
    alone = train_cells(cells, 1)
    for cell, snapshots in zip(cells, alone, strict=True):
        assert len(applied_rows(cell, snapshots[0])["matrix0"]) == 6
    for world_size in (2, 4):
        for cell, actual, wanted in zip(cells, train_cells(cells, world_size), alone, strict=True):
            assert applied_rows(cell, actual[0]) == applied_rows(cell, wanted[0])
            for one, other in zip(actual, wanted, strict=True):
                assert_equal_bits(one, other, f"{cell.optimizer} on {world_size} ranks")


def test_c05_six_rows_on_four_ranks() -> None:
    problem = random_problem([(6, 8)], seed=13)
    cells = [Cell(problem, name, "shard0", way) for name in OPTIMIZERS for way in transports_and_scopes(name)]
    compare_with_reference(cells, 4)


def check_state_tensors(rows: int, columns: int) -> None:
    mesh = whole_mesh()
    for placement in (Shard(0), Shard(1)):
        weight = nn.Parameter(place(torch.randn(rows, columns), placement, mesh))
        (state,) = NorDion2([weight]).state_dict()["state"].values()
        momentum, second_moment = state["momentum"], state["second_moment"]
        for tensor, shape in ((momentum, (rows, columns)), (second_moment, (rows, 1))):
            assert isinstance(tensor, DTensor)
            assert (tensor.shape, tensor.stride(), tensor.device_mesh) == (shape, (shape[1], 1), mesh)
        assert momentum.placements == (placement,)
        assert momentum.to_local().shape == weight.to_local().shape
        assert second_moment.placements == ((Replicate(),) if placement.dim == 1 else (placement,))
        assert second_moment.to_local().shape == (weight.to_local().shape[0], 1)
        assert second_moment.dtype == torch.float32


@pytest.mark.parametrize("world_size", [2, 4])
def test_c06_state_has_the_true_global_shape(world_size: int) -> None:
    for shape in ((3, 1), (1, 8)):
        pool(world_size).run(check_state_tensors, *shape)


PRESENCE = random_problem([(6, 8), (3, 8)], adamw=[(5, 3), (4,)], lion=[(6,)], seed=14)
ALL = tuple(PRESENCE.weights)
ABSENT = {
    "everything on rank 1 in step 2": [(1, 2, name) for name in ALL],
    "A on rank 1 and B on rank 0": [
        *((1, step, name) for step in range(1, 6) for name in ("matrix0", "adamw0")),
        *((0, step, name) for step in range(1, 6) for name in ("matrix1", "adamw1", "lion0")),
    ],
    "a part on all ranks in step 2": [(rank, 2, name) for rank in (0, 1) for name in ("matrix0", "adamw0", "lion0")],
    "everything on all ranks in step 1": [(rank, 1, name) for rank in (0, 1) for name in ALL],
}


def without(problem: Problem, absent: list[tuple[int, int, str]], world_size: int) -> Problem:
    """The problem with rows of zeros where a rank has no gradient, and None where no rank has one."""

    def seen(step: int, name: str, gradient: Tensor) -> Tensor | None:
        ranks = {rank for rank, at, missing in absent if (at, missing) == (step, name)}
        if len(ranks) == world_size:
            return None
        parts = list(gradient.clone().chunk(world_size))
        return torch.cat([part.zero_() if rank in ranks else part for rank, part in enumerate(parts)])

    steps = [
        {name: seen(number, name, value) for name, value in gradients.items() if value is not None}
        for number, gradients in enumerate(problem.gradients, start=1)
    ]
    return Problem(problem.weights, steps)


@pytest.mark.parametrize("variant", ABSENT)
def test_c07_gradients_missing_on_some_ranks(variant: str) -> None:
    absent = ABSENT[variant]
    cells = [
        Cell(PRESENCE, name, "shard0", {**way, "weight_decay": 0.5}, absent, steps=(1, 2, 3, 5))
        for name in OPTIMIZERS
        for way in transports_and_scopes(name)
    ]
    complete = [replace(cell, absent=()) for cell in cells]
    by_rank = pool(2).run(run_cells, cells)
    for number, (cell, other) in enumerate(zip(cells, pool(2).run(run_cells, complete)[0], strict=True)):
        outcomes = [of_rank[number] for of_rank in by_rank]
        assert_same_collectives([*outcomes, other])  # the plan is fixed by the parameter list
        calls = outcomes[0].calls
        flags = [place for place, call in enumerate(calls) if call.name == "all_reduce"]
        assert flags == list(range(0, len(calls), len(calls) // 5))  # first in each step, and the only one
        assert all(calls[place].sent == (len(ALL) + 1,) * 2 for place in flags)
        seen = replace(cell, problem=without(PRESENCE, absent, 2))
        for actual, wanted in zip(assembled(cell, outcomes), expected(seen, 2), strict=True):
            # As in every float64 comparison, but for the second moment of NorMuon, which is float32.
            tolerance = {"other": 1e-12, "second_moment": 3e-7, "weight": 5e-9 if "Nor" in cell.optimizer else 1e-12}
            assert_close(actual, wanted, tolerance, f"{variant}: {cell.optimizer} {cell.options}")


def test_c07_without_any_gradient_nothing_moves() -> None:
    absent = ABSENT["everything on all ranks in step 1"]
    cells = [Cell(PRESENCE, name, "shard0", {"weight_decay": 0.5}, absent, steps=(1,)) for name in OPTIMIZERS]
    for cell, (snapshot,) in zip(cells, train_cells(cells, 2), strict=True):
        for name, value in snapshot.items():
            parameter, kind = name.split(".")
            wanted = cell.problem.weights[parameter] if kind == "weight" else torch.zeros_like(value)
            assert torch.equal(value, wanted), name


@pytest.mark.parametrize("layouts", [("shard0", "shard0"), ("shard0", "ddp"), ("ddp", "shard0")])
def test_c10_another_mesh_over_the_same_ranks(layouts: tuple[str, str]) -> None:
    problem = random_problem([(5, 8), (5, 8)], seed=15)
    by_name = {"matrix0": layouts[0], "matrix1": layouts[1]}
    cells = [Cell(problem, name, by_name, group_name="another") for name in OPTIMIZERS]
    compare_with_reference(cells, 2)


def check_strides(name: str) -> None:
    """Trains strided and contiguous copies of the same values; the results have the same bits."""
    mesh, rank = whole_mesh(), dist.get_rank()
    value = torch.arange(32.0).view(4, 8).sin()
    results = []
    for strided in (False, True):
        stored = value.t().contiguous().t() if strided else value.clone()  # strides (1, 4), else (8, 1)
        gradient = torch.ones(1).expand(4, 8) if strided else torch.ones(4, 8)
        columns = value.clone()[:, 4 * rank : 4 * rank + 4]
        columns = columns if strided else columns.contiguous()  # strides (8, 1), else (4, 1)
        plain, vector = nn.Parameter(stored), nn.Parameter(stored.clone())
        split = nn.Parameter(DTensor.from_local(columns, mesh, [Shard(1)]))
        strides = [tensor.stride() for tensor in (plain, split.to_local(), vector)]
        assert strides == ([(1, 4), (8, 1), (1, 4)] if strided else [(8, 1), (4, 1), (8, 1)])
        groups = [{"params": [plain, split]}, {"params": [vector], "algorithm": "adamw"}]
        optimizer = getattr(dion_core, name)(groups)
        for _ in range(2):
            plain.grad = vector.grad = gradient
            split.grad = DTensor.from_local(gradient[:, :4], mesh, [Shard(1)])
            optimizer.step()
        assert [tensor.stride() for tensor in (plain, split.to_local(), vector)] == strides
        assert optimizer.state[plain]["momentum"].stride() == plain.stride()
        assert torch.equal(gradient, torch.ones(4, 8))
        states = [value for tensor in (plain, split, vector) for value in optimizer.state[tensor].values()]
        results.append([local(tensor) for tensor in (plain, split, vector, *states)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_c11_strides_do_not_matter_and_are_kept() -> None:
    for name in OPTIMIZERS:
        pool(2).run(check_strides, name)


def train_half_sharded(name: str) -> float:
    """One Linear under `fully_shard` and a plain one in one group, against plain ones: the largest difference."""
    weights = []
    for sharded in (False, True):
        torch.manual_seed(16)
        first, second = nn.Linear(8, 5, bias=False).double(), nn.Linear(5, 5, bias=False).double()
        if sharded:
            fully_shard(first)
        optimizer = getattr(dion_core, name)([first.weight, second.weight])
        for _ in range(3):  # the same batch on every rank, so that the mean of the gradients is each of them
            second(first(torch.eye(8).double()).tanh()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        whole = first.weight.full_tensor() if isinstance(first.weight, DTensor) else first.weight
        weights.append(torch.cat([whole.detach(), second.weight.detach()], dim=1))
    return float((weights[0] - weights[1]).abs().max())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_c12_a_sharded_and_a_plain_layer_in_one_group(name: str) -> None:
    # 1e-12: sums in another order; the NorMuon family rounds its second moment to float32 in between.
    assert max(pool(2).run(train_half_sharded, name)) < (5e-9 if "Nor" in name else 1e-12)


def test_c12_mixed_meshes_and_dtypes_equal_a_loop() -> None:
    exact = random_problem([(6, 8)] * 6, seed=17)
    dtypes = [torch.float32, torch.bfloat16, torch.float32, torch.bfloat16, torch.float16, torch.float32]
    layouts = ["shard0", "shard0", "hsdp", "hsdp", "plain", "replicate"]
    by_name = {f"matrix{i}": layout for i, layout in enumerate(layouts)}
    casts = {f"matrix{i}": dtype for i, dtype in enumerate(dtypes)}

    def cast(values: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        return {name: value.to(casts[name]) for name, value in values.items() if value is not None}

    problem = Problem(cast(exact.weights), [cast(step) for step in exact.gradients])
    for optimizer in OPTIMIZERS:
        ((*_, together),) = train_cells([Cell(problem, optimizer, by_name)], 4)
        loop = [
            Cell(Problem({name: weight}, [{name: step[name]} for step in problem.gradients]), optimizer, "plain")
            for name, weight in problem.weights.items()
        ]
        wanted = {key: value for (*_, last) in train_cells(loop, 1) for key, value in last.items()}
        assert_equal_bits(together, wanted, optimizer)


def run_stages(stages: list[Cell]) -> Outcome:
    """Each row of a 2 x 2 mesh trains a cell of its own; the optimizer is told of no mesh."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    return run_cell(stages[mesh.get_local_rank("stage")], mesh["shard"])


def test_c13_the_mesh_is_that_of_the_parameter() -> None:
    stages = [
        Cell(random_problem([(5, 8)], adamw=[(3,)], seed=18), "NorDion2", "shard0"),
        Cell(random_problem([(1, 8), (6, 4)], seed=19), "Muon", "shard0"),
    ]
    by_rank = pool(4).run(run_stages, stages)
    for number, cell in enumerate(stages):
        pair = by_rank[2 * number : 2 * number + 2]
        assert {call.size for outcome in pair for call in outcome.calls} == {2}
        compare_outcomes([cell], [[outcome] for outcome in pair])


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_c16_a_square_matrix_split_either_way(world_size: int) -> None:
    """Orthogonalized as a whole, not shard by shard."""
    problem = random_problem([(16, 16)], num_steps=2, seed=16)
    cells = [
        Cell(problem, name, layout, steps=(1, 2)) for name in OPTIMIZERS for layout in ("shard0", "shard1", "replicate")
    ]
    compare_with_reference(cells, world_size)
