"""The capped transport by an example that can be followed by hand, and where a training starts without gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dion_comm_capped import Capped
from dion_core.testing.ranks import pool
from tests.training import Cell, Problem, Snapshot, build, set_gradients, snapshot, whole_mesh

ROWS, COLUMNS = 16, 8
NORMS = (1.03, 1.02, 1.01, 1.00)  # of rows 0 to 3, which lie on rank 0 of two; a quarter of 16 rows wins


def gradient() -> Tensor:
    """Four rows of those norms, each with an entry of its own, and weaker ones on both ranks."""
    rows = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    rows[range(4), range(4)] = torch.tensor(NORMS, dtype=torch.float64)
    rows[range(4, ROWS), [4 + row % 4 for row in range(4, ROWS)]] = 0.1
    return rows


PROBLEM = Problem(
    {"matrix0": torch.full((ROWS, COLUMNS), 2.0, dtype=torch.float64)},
    [{"matrix0": gradient()}, {"matrix0": torch.zeros(ROWS, COLUMNS, dtype=torch.float64)}],
)
# Four winners on two ranks are two a pair on average, hence two slots. No decay: what is not applied does not move.
TWO_SLOTS = Cell(
    PROBLEM,
    "Dion2",
    "shard0",
    {"fraction": 0.25, "weight_decay": 0.0, "transport": Capped(capacity=1.0, always_pack=True)},
)


def train(cell: Cell) -> list[tuple[Snapshot, dict[str, Any]]]:
    """After each step this rank's weights and state, and its report."""
    mesh, after = whole_mesh(), []
    optimizer, parameters = build(cell, mesh)
    for gradients in cell.problem.gradients:
        set_gradients(parameters, gradients, cell, mesh)
        optimizer.step()
        after.append((snapshot(optimizer, parameters), optimizer.report()))
    return after


def changed(before: Tensor, after: Tensor) -> list[int]:
    return (before != after).any(dim=1).nonzero().flatten().tolist()


def test_four_winners_on_one_rank_and_two_slots() -> None:
    """The first step applies the two strongest, the second, without a gradient, the two that waited."""
    by_rank = pool(2).run(train, TWO_SLOTS)
    weights = [PROBLEM.weights["matrix0"]]
    momenta = [gradient()]
    for (one, _), (other, _) in zip(*by_rank, strict=True):
        weights.append(torch.cat([one["matrix0.weight"], other["matrix0.weight"]]))
        momenta.append(torch.cat([one["matrix0.momentum"], other["matrix0.momentum"]]))
    assert changed(weights[0], weights[1]) == changed(momenta[0], momenta[1]) == [0, 1]
    assert changed(weights[1], weights[2]) == changed(momenta[1], momenta[2]) == [2, 3]
    assert torch.equal(momenta[2][:4], gradient()[:4] * 0.95)
    assert torch.equal(momenta[2][4:], gradient()[4:])

    waited = [snapshot["matrix0.waited"].flatten().tolist() for snapshot, _ in by_rank[0]]
    # Rows 0 and 1 win again in the second step, since nothing else is stronger, and find no room.
    assert waited == [[0, 0, 1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0]]
    assert not any(snapshot["matrix0.waited"].any() for snapshot, _ in by_rank[1])
    counted = {"chosen": 4, "applied": 2, "deferred": 2, "waiting": 2, "oldest_waiting": 1, "nonfinite": 0}
    assert [report["rows"] for _, report in by_rank[0]] == [counted] * 2
    assert [report["rows"] for _, report in by_rank[1]] == [dict.fromkeys(counted, 0)] * 2
    [bucket] = by_rank[0][0][1]["buckets"]
    row_bytes = COLUMNS * 8
    [owner] = bucket["owners"]
    assert bucket["traffic"]["forward"][owner] == (1 + 2) * row_bytes, "a header and two slots"
    assert sum(bucket["traffic"]["forward"]) == bucket["traffic"]["forward"][owner]


def test_nothing_is_deferred_where_the_first_steps_have_no_gradient() -> None:
    """Ties win on rank 0 alone; every slot is sent until winners lie elsewhere, and then what is needed."""
    generator = torch.Generator().manual_seed(0)
    shape, steps = (256, 8), 5
    random = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(1 + steps)]
    gradients = [torch.zeros(shape, dtype=torch.float64)] * 2 + random[1:]
    problem = Problem({"matrix0": random[0]}, [{"matrix0": gradient} for gradient in gradients])
    options = {"fraction": 0.25, "weight_decay": 0.0}
    learned, full = (
        pool(2).run(train, Cell(problem, "Dion2", "shard0", {**options, "transport": transport}))
        for transport in (Capped(), "full")
    )
    for rank, (mine, exact) in enumerate(zip(learned, full, strict=True)):
        sent = []
        for (state, report), (expected, _) in zip(mine, exact, strict=True):
            [bucket] = report["buckets"]
            sent.append(sum(bucket["traffic"]["forward"]))
            assert report["rows"]["deferred"] == 0
            assert torch.equal(state["matrix0.weight"], expected["matrix0.weight"])
        row_bytes = shape[1] * 8
        assert sent[:2] == [64 * row_bytes] * 2, rank
        assert max(sent[2:]) < 56 * row_bytes, rank


@pytest.mark.parametrize("always_pack", [False, True])
@pytest.mark.parametrize("rows", [1, 8])
def test_rows_shorter_than_a_count(rows: int, always_pack: bool) -> None:
    """One column of bf16 has two bytes, a count four: those without a header must not reach the rows that are sent."""
    names, generator = [f"matrix{number}" for number in range(4)], torch.Generator().manual_seed(0)
    values = [{name: torch.randn(rows, 1, generator=generator) for name in names} for _ in range(3)]
    problem = Problem(values[0], values[1:]).to(torch.bfloat16)
    packed, full = (
        pool(2).run(train, Cell(problem, "NorDion2", "shard0", {"fraction": 0.25, "transport": transport}))
        for transport in (Capped(always_pack=always_pack), "full")
    )
    for mine, exact in zip(packed, full, strict=True):
        for (state, _), (expected, _) in zip(mine, exact, strict=True):
            assert all(torch.equal(state[name], value) for name, value in expected.items())
