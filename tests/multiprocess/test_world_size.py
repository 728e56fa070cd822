"""The same gradients give the same bits at every number of ranks: exact scopes, on a CPU, one thread a process."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.training import (
    EXACT_LAYOUTS,
    Cell,
    Snapshot,
    applied_rows,
    assert_close,
    assert_equal_bits,
    random_problem,
    train_cells,
    transports_and_scopes,
)

# No number of ranks from 2 to 4 divides 17; (3, 8) and (1, 8) leave ranks without rows; the rows of
# (40, 300) are longer than one vector register, several times over, with a remainder.
SHAPES = [(17, 32), (6, 8), (3, 8), (6, 8), (1, 8), (40, 300)]
FP32 = random_problem(SHAPES, adamw=[(7,), (5, 3)], lion=[(9, 3)], seed=5).to(torch.float32)
BF16, FP16 = FP32.to(torch.bfloat16), FP32.to(torch.float16)

EXACT = (
    (FP32, "Muon", {}),
    (BF16, "Muon", {"nesterov": True, "cautious_weight_decay": True}),
    (BF16, "NorMuon", {"scale": "rms_norm"}),
    (FP16, "NorMuon", {"momentum_dtype": torch.float32}),
    (FP32, "Dion2", {"fraction": 0.35}),
    (BF16, "Dion2", {"fraction": 0.35}),
    (FP16, "Dion2", {"fraction": 0.25}),
    (FP32, "NorDion2", {"fraction": 0.35}),
    (FP32, "NorDion2", {"fraction": 0.25, "wire_dtype": torch.bfloat16}),
    (BF16, "NorDion2", {"fraction": 0.35}),
    (FP16, "NorDion2", {"fraction": 0.35}),
)


def exact_cells(layout: str) -> list[Cell]:
    """Every entry of EXACT with every installed transport and scope that promises not to depend on W."""
    return [
        Cell(problem, optimizer, layout, {**options, **way}, steps=(1, 3))
        for problem, optimizer, options in EXACT
        for way in transports_and_scopes(optimizer)
        if way.get("scope") == "global" or ("scope" not in way) or (problem is FP32 and way["scope"] == "all")
    ]


Pair = tuple[Cell, list[Snapshot]]


def shared_out(pairs: Sequence[Pair]) -> list[Pair]:
    """Every entry of EXACT with each of its scopes once, with the transports by turns.

    Enough where nothing is split: no transport has rows to move there.
    """
    alike: dict[tuple[int, str, tuple[tuple[str, Any], ...]], list[Pair]] = {}
    for cell, wanted in pairs:
        options = {name: value for name, value in cell.options.items() if name != "transport"}
        key = (id(cell.problem), cell.optimizer, tuple(sorted(options.items())))
        alike.setdefault(key, []).append((cell, wanted))
    return [of_key[number % len(of_key)] for number, of_key in enumerate(alike.values())]


@pytest.fixture(scope="module")
def one_process() -> list[list[Snapshot]]:
    """One process with whole plain tensors."""
    return train_cells(exact_cells("plain"), 1)


@pytest.mark.parametrize("layout", EXACT_LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_exact_scopes_give_the_same_bits(world_size: int, layout: str, one_process: list[list[Snapshot]]) -> None:
    pairs = list(zip(exact_cells(layout), one_process, strict=True))
    pairs = pairs if layout == "shard0" else shared_out(pairs)
    trained = train_cells([cell for cell, _ in pairs], world_size)
    for (cell, wanted), actual in zip(pairs, trained, strict=True):
        for step, one, other in zip(cell.steps, actual, wanted, strict=True):
            assert_equal_bits(one, other, f"{cell.optimizer} {cell.options} after {step} steps")


def test_the_comparison_is_not_vacuous(one_process: list[list[Snapshot]]) -> None:
    """Weights moved in every step, in their own dtype, and half precision rounded."""
    for cell, (first, last) in zip(exact_cells("plain"), one_process, strict=True):
        for name, weight in cell.problem.weights.items():
            assert first[f"{name}.weight"].dtype == weight.dtype
            assert not torch.equal(first[f"{name}.weight"], weight)
            assert not torch.equal(first[f"{name}.weight"], last[f"{name}.weight"])


# Columns on several ranks: a row's score is a sum of partial sums in float32, so that the last bits depend on W.
# They reach nothing but the choice of rows (no two scores are that close here) and, for the NorMuon family, the
# mean square of a row: one rounding of the second moment and of the row's factor each step, 3 * 2^-24.
COLUMNS = {"weight": 2e-7, "momentum": 0.0, "second_moment": 3 * 2**-24, "other": 0.0}


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_columns_on_several_ranks_agree_to_rounding(world_size: int, one_process: list[list[Snapshot]]) -> None:
    cells = [cell for cell in exact_cells("shard1") if cell.problem is FP32]
    wanted = [each for cell, each in zip(exact_cells("plain"), one_process, strict=True) if cell.problem is FP32]
    for cell, actual, other in zip(cells, train_cells(cells, world_size), wanted, strict=True):
        if cell.options.get("wire_dtype") is None:
            doubled = {name: value.double() for name, value in other[-1].items()}
            assert_close(actual[-1], doubled, COLUMNS, f"{cell.optimizer} {cell.options}")


def local_cells(layout: str, **options: object) -> list[Cell]:
    return [
        Cell(FP32, optimizer, layout, {"transport": "local", "scope": "local", **options}, steps=(1,))
        for optimizer in ("Dion2", "NorDion2")
    ]


def test_local_scope_depends_on_the_number_of_ranks() -> None:
    """The negative control: were all comparisons blind, this one would fail."""
    chosen = []
    for world_size in (1, 2, 3, 4):
        cells = local_cells("shard0", fraction=0.25)
        dion2, nordion2 = (
            applied_rows(cell, each[0])["matrix0"]
            for cell, each in zip(cells, train_cells(cells, world_size), strict=True)
        )
        assert dion2 == nordion2
        chosen.append(dion2)
    # 17 rows: a quarter of ceil(17 / W), rounded up, of each of W shards (the last of three has 5, of four 2).
    assert [len(rows) for rows in chosen] == [5, 2 * 3, 3 * 2, 4 * 2]
    assert all(rows != chosen[0] for rows in chosen[1:])


@pytest.mark.parametrize(("layout", "options"), [("shard0", {"fraction": 1.0}), ("ddp", {"fraction": 0.25})])
def test_local_scope_of_all_rows_or_of_whole_matrices_does_not(layout: str, options: dict[str, Any]) -> None:
    wanted = train_cells(local_cells("plain", **options), 1)
    for actual, other in zip(train_cells(local_cells(layout, **options), 3), wanted, strict=True):
        assert_equal_bits(actual[0], other[0], layout)
