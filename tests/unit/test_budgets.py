"""Budgets from the formula, and learned ones: they hold what was seen, follow a jump, and shrink back."""

import json
import math
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from dion_comm_capped.budgets import LearnedBudgets, _forecasts, fixed_budgets
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
    learned = LearnedBudgets([torch.tensor(expected)])
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
        assert len(budgets[source]) == len(set(owners))
        for place, owner in enumerate(sorted(set(owners))):
            rows = owners.count(owner) * most / size
            if capacity is None:
                expected = math.ceil(rows + 2 * math.sqrt((1 - 1 / size) * rows) - 1e-9)  # c * n, multiplied out
            else:
                expected = math.ceil(capacity * rows - 1e-9)
            assert budgets[source][place] == expected


def test_the_first_step_is_held() -> None:
    needs = [256, 0, 30, 70]
    learned = LearnedBudgets([torch.full((4,), 64)])
    assert learned.budgets == ()
    assert not learned.started
    assert observe(learned, needs)
    assert learned.started
    assert all(budget > need for budget, need in zip(learned.budgets, needs, strict=True))
    assert learned.budgets[1] < learned.budgets[2] < 64, "known to be cold"


def test_what_differs_by_scatter_alone_is_not_trusted() -> None:
    """Equal hidden needs get equal budgets, different ones their own; buckets are judged each by itself."""
    generator = np.random.default_rng(0)
    means = np.array([100.0] * 16 + [20, 180] * 8)
    learned = LearnedBudgets([torch.full((16,), 100), torch.full((16,), 100)])
    seen = generator.poisson(means, size=(40, 32))
    for counts in seen:
        observe(learned, counts.tolist())
    equal, skewed = np.split(np.array(learned.budgets), 2)
    spread = seen[-4:, :16].mean(axis=0).std()
    assert equal.std() < 0.6 * spread
    assert (skewed[::2] < 20 + 4 * math.sqrt(20)).all()
    assert (skewed[1::2] > 180).all()


@pytest.mark.parametrize(
    ("swing", "expected"),
    [(0, 79), (10, 79), (18, 82), (23, 87), (25, 88)],  # 79 and 88 are 64 + 1.85 and 64 + 3 times the root of 65
)
def test_the_margin_is_what_the_steps_seen_needed(swing: int, expected: int) -> None:
    """Needs go up and down by some rows around 64 in every step: the margin just holds them, between its limits."""
    learned = LearnedBudgets([torch.full((8,), 64)])
    for step in range(60):
        observe(learned, [64 + (-1) ** step * swing] * 8)
    assert learned.budgets == (expected,) * 8


def test_few_counts_get_more_room() -> None:
    """Until there are steps to learn from: a count of 24 where 16 are fair is trusted to 3/4, four to 15/16."""
    learned = LearnedBudgets([torch.full((4,), 16)])
    margin = 2.425
    for steps, trust, num_observed in ((1, 3 / 4, 1), (4, 15 / 16, 5)):
        for _ in range(num_observed):
            observe(learned, [24, 8, 24, 8])
        hot, cold = 16 + 8 * trust, 16 - 8 * trust
        expected = [need + margin * math.sqrt((need + 1) * (1 + trust / steps)) for need in (hot, cold)]
        assert learned.budgets == tuple(map(round, expected)) * 2
    assert [round(budget) for budget in expected] == [37, 17]


@pytest.mark.parametrize("looks_back", [1, 4, 8])
@pytest.mark.parametrize("num_steps", [1, 4, 12])
def test_what_pairs_will_need_after_each_step(looks_back: int, num_steps: int) -> None:
    """By sums of the latest counts, step by step, with Python's numbers."""
    generator = np.random.default_rng(num_steps)
    fair = [0, 7, 16, 100]
    seen = generator.poisson([3, 20, 16, 90], size=(num_steps, 4))
    seen[0] = fair  # nothing is off: trusted not at all
    need, deviation = _forecasts(torch.tensor(seen), torch.tensor(fair), looks_back)
    for step in range(num_steps):
        latest = seen[max(0, step + 1 - looks_back) : step + 1].tolist()
        off = [sum(counts) - len(latest) * each for counts, each in zip(zip(*latest, strict=True), fair, strict=True)]
        squares = sum(each * each for each in off)
        trust = max(1 - len(latest) * sum(fair) / squares, 0) if squares else 0
        for pair, (each, by) in enumerate(zip(fair, off, strict=True)):
            expected = each + trust * by / len(latest)
            assert need[step, pair].item() == pytest.approx(expected, rel=1e-14)
            spread = math.sqrt((expected + 1) * (1 + trust / len(latest)))
            assert deviation[step, pair].item() == pytest.approx(spread, rel=1e-14)


@pytest.mark.parametrize("drift", [False, True])
def test_needs_that_scatter_are_averaged_longer_than_needs_that_drift(
    drift: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever number of counts gives the lower budgets is found, and it is not the same one."""
    pairs, num_steps = 256, 60
    generator = np.random.default_rng(0)
    mean = np.linspace(2, 30, pairs)
    if drift:  # each pair's need goes up and down by half, with little scatter
        phase = generator.uniform(0, 2 * math.pi, pairs)
        counts = np.round(16 * mean * (1 + np.sin(np.arange(num_steps)[:, None] / 8 + phase) / 2)).astype(int)
    else:
        counts = generator.poisson(mean, size=(num_steps, pairs))
    fair = torch.full((pairs,), round(float(counts.mean())))
    budgets = {}
    for looks_back in ((4, 8), (4,), (8,)):
        monkeypatch.setattr("dion_comm_capped.budgets.LOOKS_BACK", looks_back)
        learned = LearnedBudgets([fair])
        for of_step in counts.tolist():
            observe(learned, of_step)
        budgets[looks_back] = learned.budgets
    better, worse = ((4,), (8,)) if drift else ((8,), (4,))
    assert budgets[4, 8] == budgets[better] != budgets[worse]


def test_constant_needs_leave_budgets_alone() -> None:
    needs = [256, 64, 16, 4, 0]
    learned = LearnedBudgets([torch.tensor(needs)])
    changed = [observe(learned, needs) for _ in range(600)]
    assert sum(changed) <= 10
    assert not any(changed[300:])
    for need, budget in zip(needs, learned.budgets, strict=True):
        assert need <= budget <= need + 2 * math.sqrt(need + 1)


def test_budgets_are_set_ever_more_rarely() -> None:
    generator = np.random.default_rng(0)
    learned = LearnedBudgets([torch.full((64,), 400)])
    counts = generator.poisson(np.linspace(200, 600, 64), size=(1000, 64)).tolist()
    changed = np.array([observe(learned, of_step) for of_step in counts])
    assert changed[:25].sum() == 2 + 5, "in the first two steps and every fourth"
    assert changed[100:200].sum() <= 5
    assert changed[500:].sum() <= 5


def test_after_a_late_jump_budgets_are_set_often_again() -> None:
    """Also what is not needed any more is given up soon, though budgets had settled long before."""
    before, after = [512, 100, 200, 200], [100, 512, 200, 200]
    _, budgets = learn([256] * 4, lambda step: before if step < 1000 else after, 1030)
    assert budgets[999, 0] >= 512
    assert budgets[1029, 1] >= 512
    assert budgets[1029, 0] < 200


def test_steps_that_tell_nothing_do_not_start_the_budgets() -> None:
    """But the ninth is believed: one rank may truly hold all the winners."""
    tied = torch.tensor([128, 128, 0, 0])
    learned = LearnedBudgets([torch.full((4,), 64)])
    for _ in range(8):
        assert not learned.observe(tied, clear=False)
        assert not learned.started
    patient = LearnedBudgets([torch.full((4,), 64)])
    patient.load_state_dict(json.loads(json.dumps(learned.state_dict())))
    for each in (learned, patient):
        assert each.observe(tied, clear=False)
        assert each.budgets[:2] >= (128, 128)


def test_a_step_without_winners_tells_nothing() -> None:
    learned, other = (LearnedBudgets([torch.full((2,), 50)]) for _ in range(2))
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
    assert max(budgets[99, 1], budgets[399, 1]) < budgets[199, 1] / 2


@pytest.mark.parametrize("rows", [64, 256])
@pytest.mark.parametrize("seed", range(3))
def test_pairs_that_fall_before_they_rise_are_followed_within_twenty_steps(rows: int, seed: int) -> None:
    """As momentum turns: a third of the pairs becomes hot at once; another falls for 9 steps and then rises for 10."""
    jump = 100
    generator = np.random.default_rng(seed)
    steps = np.arange(200)
    turning = np.interp(steps, [jump, jump + 9, jump + 19], [0.6, 0.25, 1.0])
    means = rows * np.stack([np.where(steps < jump, 0.8, 1.6)] * 5 + [turning] * 5 + [np.ones(200)] * 6, axis=1)
    counts = np.round(means + generator.normal(size=means.shape) * 0.5 * np.sqrt(means)).astype(int)
    _, budgets = learn([rows] * 16, lambda step: counts[step].tolist(), len(steps))
    refused = np.maximum(counts - budgets, 0).sum(axis=1) / counts.sum(axis=1)
    assert refused[jump : jump + DELAY].mean() > 0.05
    assert (refused[jump + 12 :] < 0.01).all()
    assert budgets[jump + 60 :].sum() < 1.5 * counts[jump + 60 :].sum()


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
    unbroken = LearnedBudgets([torch.tensor([3, 30]), torch.tensor([300, 1])])
    resumed = unbroken
    for step, counts in enumerate(drawn):
        if step in (0, 1, 40, 170):
            saved = json.loads(json.dumps(resumed.state_dict()))
            resumed = LearnedBudgets([torch.tensor([3, 30]), torch.tensor([300, 1])])
            resumed.load_state_dict(saved)
        if resumed is not unbroken:
            observe(resumed, counts)
        observe(unbroken, counts)
        assert resumed.state_dict() == unbroken.state_dict()
        assert resumed.budgets == unbroken.budgets


def capacities(session: CappedSession, counts: torch.Tensor) -> list[list[int]]:
    """What the one bucket's pools of two ranks hold in a step with these counts of both ranks' rows."""
    run(session.begin([RowSelection.unranked(torch.empty(0, 0), counts[0], counts)]))
    [exchange] = session.exchanges
    assert isinstance(exchange, PooledExchange)
    capacity = [[exchange.plan.capacity(source, owner) for owner in range(2)] for source in range(2)]
    session.end()
    return capacity


ALL_ON_RANK_0 = torch.tensor([[256] * 4, [0] * 4])


@pytest.mark.parametrize("steps", [0, 1, 3, 8])
def test_every_slot_is_sent_until_a_step_tells_something(steps: int) -> None:
    """Nothing is deferred meanwhile; each such step is run as it is, since the next one reads on the host again."""
    session = CappedSession([bucket_for(chunk_holders(4, 1024, 2), 2, [0, 1, 1, 0], 256)], Capped())
    for _ in range(steps):
        before = session.sizes
        assert capacities(session, ALL_ON_RANK_0) == [[512, 512]] * 2
        assert session.sizes > before
    known = capacities(session, torch.tensor([[100, 156, 120, 140], [156, 100, 136, 116]]))
    assert [[240 <= size < 400 for size in of_rank] for of_rank in known] == [[True, True], [True, True]]
    before = session.sizes
    assert capacities(session, ALL_ON_RANK_0) == known
    assert session.sizes == before


def test_a_rank_that_holds_all_winners_is_believed_in_the_end() -> None:
    session = CappedSession([bucket_for(chunk_holders(4, 1024, 2), 2, [0, 1, 1, 0], 256)], Capped())
    for _ in range(8):
        assert capacities(session, ALL_ON_RANK_0) == [[512, 512]] * 2
    of_rank_0, of_rank_1 = capacities(session, ALL_ON_RANK_0)
    assert of_rank_0 == [512, 512]
    assert max(of_rank_1) < 10


def test_where_winners_have_no_choice_the_first_step_counts() -> None:
    """All rows of rank 0's whole matrices win: these counts are those of ties, and those of any step."""
    holders = [[0] * 64 for _ in range(4)]
    session = CappedSession([bucket_for(holders, 2, [0, 1, 1, 0], 64)], Capped())
    capacities(session, torch.tensor([[64] * 4, [0] * 4]))
    before = session.sizes
    capacities(session, torch.tensor([[64] * 4, [0] * 4]))
    assert session.sizes == before


@pytest.mark.parametrize("ties", [0, 3])
@pytest.mark.parametrize("saved_after", [0, 1, 5, 24, 30])
def test_a_resumed_session_has_the_pools_of_the_unbroken_one(saved_after: int, ties: int) -> None:
    """Counts that were still under way are kept as well, and how many steps told nothing."""
    bucket = bucket_for(chunk_holders(4, 1024, 2), 2, [0, 1, 1, 0], 256)
    generator = np.random.default_rng(saved_after)
    unbroken, resumed = CappedSession([bucket], Capped()), CappedSession([bucket], Capped())
    seen = set()
    for step in range(60):
        hot = generator.binomial(256, 0.2 if step % 25 < 12 else 0.7, size=4)
        counts = ALL_ON_RANK_0 if step < ties else torch.from_numpy(np.stack([hot, 256 - hot]))
        if step == saved_after:
            resumed.load_state_dict(json.loads(json.dumps(unbroken.state_dict())))
        capacity = capacities(unbroken, counts)
        if step >= saved_after:
            assert capacities(resumed, counts) == capacity
        seen.add(str(capacity))
    assert len(seen) > 1


def test_a_pair_that_needs_nothing_keeps_a_row() -> None:
    """Else what it suddenly needs would wait until the counts have arrived, whatever `max_wait` says."""
    learned = LearnedBudgets([torch.tensor([8, 8, 0])])
    for _ in range(200):
        learned.observe(torch.tensor([16, 0, 0]))
    assert learned.budgets[1] >= 1
    assert learned.budgets[0] >= 16


def test_counts_on_their_way_are_not_overwritten_by_later_ones() -> None:
    """Room for counts is used again; what budgets look back on is what each step needed."""
    session = CappedSession([bucket_for(chunk_holders(4, 1024, 2), 2, [0, 1, 1, 0], 256)], Capped())
    capacities(session, torch.tensor([[100, 156, 120, 140], [156, 100, 136, 116]]))
    given = [*session.state_dict()["pending"], *([250 + step, 262, 256, 256 - step] for step in range(4 * DELAY))]
    first = session.state_dict()["learned"]["window"]
    for counts in given:
        session._needed = torch.tensor(counts)
        session.end()
    state = session.state_dict()
    assert state["pending"] == given[1 - DELAY :]
    seen = state["learned"]["window"]
    assert len(seen) > 2 * DELAY
    assert seen == [*first, *given[: 1 - DELAY]][-len(seen) :]
