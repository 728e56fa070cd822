"""Budgets from the formula, and learned ones: they hold what was seen, follow a jump, and shrink back."""

import json
import math
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from dion_comm_capped.budgets import LearnedBudgets, fixed_budgets
from dion_comm_capped.capped import DELAY, Capped, CappedSession, PooledExchange
from dion_core.rows import RowSelection
from dion_core.steps import run
from tests.unit.test_layout import chunk_holders
from tests.unit.test_packing import bucket_for

Counts = Sequence[int]


def observe(learned: LearnedBudgets, counts: Counts) -> bool:
    return learned.observe(torch.tensor(counts))


def learn(expected: Counts, needs: Callable[[int], Counts], num_steps: int) -> tuple[LearnedBudgets, np.ndarray]:
    """Budgets after steps whose counts arrive as late as in the transport, and (steps, pairs) budgets of each step."""
    learned = LearnedBudgets(torch.tensor(expected))
    pending: deque[Counts] = deque()
    budgets = []
    for step in range(num_steps):
        if step == 0:
            observe(learned, needs(0))
        else:
            pending.append(needs(step))
            if len(pending) > DELAY:
                observe(learned, pending.popleft())
        budgets.append(learned.budgets)
    return learned, np.array(budgets)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("owners", [[0], [0, 1, 1], [3, 2, 1, 0, 3]], ids=str)
@pytest.mark.parametrize("capacity", [None, 1.0, 1.1, 3.0])
def test_fixed_budgets_are_those_of_the_formula(size: int, owners: list[int], capacity: float | None) -> None:
    owners = [owner % size for owner in owners]
    most = 7
    bucket = bucket_for(chunk_holders(len(owners), 24, size), size, owners, most)
    budgets = fixed_budgets(bucket, capacity)
    assert len(budgets) == size
    for source in range(size):
        for owner in range(size):
            rows = owners.count(owner) * most / size
            if capacity is None:
                expected = math.ceil(rows + 2 * math.sqrt((1 - 1 / size) * rows) - 1e-9)  # c * n, multiplied out
            else:
                expected = math.ceil(capacity * rows - 1e-9)
            assert budgets[source][owner] == expected


def test_the_first_step_is_held_and_pairs_without_rows_get_more_than_their_share() -> None:
    learned = LearnedBudgets(torch.full((4,), 64))
    assert learned.budgets == ()
    assert not learned.started
    assert observe(learned, [256, 0, 30, 70])
    assert learned.started
    assert all(budget > need for budget, need in zip(learned.budgets, [256, 0, 30, 70], strict=True))
    assert learned.budgets[1] > 1.5 * 64
    assert learned.budgets[2] < 64  # known to be cold


def test_constant_needs_leave_budgets_alone() -> None:
    needs = [256, 64, 16, 4, 0]
    learned = LearnedBudgets(torch.tensor(needs))
    changed = [observe(learned, needs) for _ in range(600)]
    assert sum(changed) <= 10
    assert not any(changed[300:])
    for need, budget in zip(needs, learned.budgets, strict=True):
        assert need <= budget <= need + 0.5 * math.sqrt(max(need, 1))


def test_a_step_without_winners_tells_nothing() -> None:
    learned, other = (LearnedBudgets(torch.full((2,), 50)) for _ in range(2))
    for counts in ([60, 40], [55, 45], [52, 48]):
        observe(learned, counts)
        observe(other, counts)
        assert not observe(other, [0, 0])
    assert learned.state_dict() == other.state_dict()


@pytest.mark.parametrize("rows", [16, 64, 256])
def test_a_jump_is_followed_within_twenty_steps_and_forgotten_later(rows: int) -> None:
    jump, back = 100, 200
    generator = np.random.default_rng(rows)

    def needs(step: int) -> Counts:
        hot = jump <= step < back
        means = rows * np.array([0.4, 2.0, 0.8, 0.8] if hot else [2.0, 0.4, 0.8, 0.8])
        return [int(count) for count in means + generator.normal(size=4) * 0.5 * np.sqrt(means)]

    counts = {step: needs(step) for step in range(400)}
    _, budgets = learn([rows] * 4, counts.__getitem__, 400)
    needed = np.array(list(counts.values()))
    refused = np.maximum(needed - budgets, 0).sum(axis=1) / needed.sum(axis=1)
    for change in (jump, back):
        assert refused[change : change + DELAY].mean() > 0.1
        assert refused[change + DELAY + 1 : change + 20].mean() < 0.01
        assert refused[change + 20 : change + 100].mean() < 0.001
    assert budgets[399, 1] < 1.1 * budgets[99, 1] < budgets[199, 1] / 2


@pytest.mark.parametrize("rows", [1000, 256, 64, 16])
def test_bytes_and_refusals_under_random_scatter(rows: int) -> None:
    size, num_steps = 4, 600
    generator = np.random.default_rng(rows)
    drawn = generator.multinomial(size * rows, [1 / size] * size, size=(num_steps, size)).reshape(num_steps, -1)
    _, budgets = learn([rows] * size * size, lambda step: drawn[step].tolist(), num_steps)
    sent = budgets[100:].sum() / drawn[100:].sum()
    assert sent <= (1.15 if rows >= 200 else 1 + 2.5 / math.sqrt(rows))
    assert np.maximum(drawn - budgets, 0).sum() / drawn.sum() < 0.001
    changes = (budgets[1:] != budgets[:-1]).any(axis=1)
    assert changes[100:].sum() <= 500 / 15


def test_a_resumed_run_goes_on_alike() -> None:
    generator = np.random.default_rng(0)
    drawn = generator.poisson([3, 30, 300, 0.2], size=(300, 4)).tolist()
    unbroken = LearnedBudgets(torch.tensor([3, 30, 300, 1]))
    resumed = unbroken
    for step, counts in enumerate(drawn):
        if step in (0, 1, 40, 170):
            saved = json.loads(json.dumps(resumed.state_dict()))
            resumed = LearnedBudgets(torch.tensor([3, 30, 300, 1]))
            resumed.load_state_dict(saved)
        if resumed is not unbroken:
            observe(resumed, counts)
        observe(unbroken, counts)
        assert resumed.state_dict() == unbroken.state_dict()
        assert resumed.budgets == unbroken.budgets


@pytest.mark.parametrize("saved_after", [0, 1, 5, 30])
def test_a_resumed_session_has_the_pools_of_the_unbroken_one(saved_after: int) -> None:
    """Counts that were still under way are kept as well."""
    bucket = bucket_for(chunk_holders(4, 1024, 2), 2, [0, 1, 1, 0], 256)
    generator = np.random.default_rng(saved_after)

    def begin(session: CappedSession, counts: torch.Tensor) -> list[list[int]]:
        run(session.begin([RowSelection.unranked(torch.empty(0, 0), counts[0], counts)]))
        [exchange] = session.exchanges
        assert isinstance(exchange, PooledExchange)
        capacity = [[exchange.plan.capacity(source, owner) for owner in range(2)] for source in range(2)]
        session.end()
        return capacity

    unbroken, resumed = CappedSession([bucket], Capped()), CappedSession([bucket], Capped())
    seen = set()
    for step in range(60):
        hot = generator.binomial(256, 0.2 if step % 25 < 12 else 0.7, size=4)
        counts = torch.from_numpy(np.stack([hot, 256 - hot]))
        if step == saved_after:
            resumed.load_state_dict(json.loads(json.dumps(unbroken.state_dict())))
        capacity = begin(unbroken, counts)
        if step >= saved_after:
            assert begin(resumed, counts) == capacity
        seen.add(str(capacity))
    assert len(seen) > 1


def test_a_pair_that_needs_nothing_keeps_a_row() -> None:
    """Else what it suddenly needs would wait until the counts have arrived, whatever `max_wait` says."""
    learned = LearnedBudgets(torch.tensor([8, 8, 0]))
    for _ in range(200):
        learned.observe(torch.tensor([16, 0, 0]))
    assert learned.budgets[1] >= 1
    assert learned.budgets[0] >= 16
