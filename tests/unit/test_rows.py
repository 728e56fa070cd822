"""Row operations against loops over rows: dtypes, strides, masks, and one rounding, bit for bit."""

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from torch import Tensor

from dion_core.rows import (
    SKIPPED_SCORE,
    Rows,
    RowSelection,
    accumulate_,
    accumulation_dtype,
    sums_of_squares,
    take_and_decay_,
    update_,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
STRIDES = ["contiguous", "transposed", "strided"]
TRUE = torch.tensor(True)
SHAPE = (6, 5)
NUM_MATRICES = 3
RATES = {"learning_rate": 0.1, "weight_decay": 0.5}

# All pairs of dtypes, each with one kind of strides in turn; 3 and 4 have no common factor.
CASES = [(*pair, STRIDES[number % 3]) for number, pair in enumerate(product(DTYPES, DTYPES))]
dtypes_and_strides = pytest.mark.parametrize(("dtype", "other", "strides"), CASES, ids=str)


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float32, strides: str = "contiguous") -> Tensor:
    """(R, C) normal values in a memory layout of choice."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)
    if strides == "transposed":
        return values.t().contiguous().t()
    if strides == "strided":
        spread = torch.full((2 * shape[0], 3 * shape[1]), torch.nan, dtype=dtype)
        spread[::2, ::3] = values
        return spread[::2, ::3]
    return values


def batch(seed: int, dtype: torch.dtype = torch.float32, strides: str = "contiguous") -> list[Tensor]:
    return [randn(seed + 10 * n, *SHAPE, dtype=dtype, strides=strides) for n in range(NUM_MATRICES)]


def selection_of(index: Sequence[Sequence[int]], count: Sequence[int]) -> RowSelection:
    counts = torch.tensor(count)
    return RowSelection.unranked(torch.tensor(index, dtype=torch.int64).view(len(count), -1), counts, counts[None])


def accumulate(
    momentum: Sequence[Tensor], gradients: Sequence[Tensor | None], *, maximize: bool, proceed: Tensor
) -> tuple[Tensor, Tensor]:
    """Scores, and how many rows of each gradient were left out, counted from a start above 0."""
    left_out = torch.arange(len(momentum)) + 3
    scores = accumulate_(momentum, gradients, left_out, maximize=maximize, proceed=proceed)
    return scores, left_out - torch.arange(len(momentum)) - 3


def some_selection() -> RowSelection:
    """Of three matrices of six rows: two rows, all four offered, none."""
    return selection_of([[1, 4, 0, 2], [0, 2, 3, 5], [0, 1, 2, 3]], [2, 4, 0])


def empty_rows(selection: RowSelection, columns: int, dtype: torch.dtype) -> Rows:
    """A buffer of NaN with a slot for every entry, in an order of its own, and a row that nobody uses."""
    entries = selection.index.numel()
    slot = torch.randperm(entries, generator=torch.Generator().manual_seed(5)).view(selection.index.shape)
    return Rows(torch.full((entries + 1, columns), torch.nan, dtype=dtype), slot)


def filled_rows(selection: RowSelection, columns: int, dtype: torch.dtype, seed: int = 3) -> Rows:
    """Rows as they come back: values in the used slots, NaN in all others."""
    rows = empty_rows(selection, columns, dtype)
    for matrix, count in enumerate(selection.count.tolist()):
        for entry in range(count):
            rows.values[rows.slot[matrix, entry]] = randn(seed + 7 * matrix + entry, columns, dtype=dtype)
    return rows


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    left, right = (each.detach().clone().contiguous().view(torch.uint8) for each in (actual, expected))
    assert torch.equal(left, right)


@dtypes_and_strides
@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
def test_accumulate_equals_a_loop(dtype: torch.dtype, other: torch.dtype, strides: str, maximize: bool) -> None:
    momentum, gradients = batch(1, dtype, strides), batch(2, other, strides)
    gradients[1] = gradients[1][:, :1].expand(SHAPE)
    gradients[0][2, 3], gradients[2][5, 0], gradients[2][0, 1] = torch.nan, torch.inf, -torch.inf
    expected, sums = [], torch.empty(NUM_MATRICES, SHAPE[0], dtype=torch.float64)
    wide = accumulation_dtype(dtype, other)
    for n, (state, gradient) in enumerate(zip(momentum, gradients, strict=True)):
        rows = []
        for r in range(SHAPE[0]):
            row, addend = state[r].to(wide), gradient[r].to(wide)
            if all(torch.isfinite(addend)):
                row = row - addend if maximize else row + addend
                sums[n, r] = sum(abs(value) for value in row.to(dtype).double())
            else:
                sums[n, r] = SKIPPED_SCORE
            rows.append(row.to(dtype))
        expected.append(torch.stack(rows))
    kept = [gradient.clone() for gradient in gradients]
    scores, left_out = accumulate(momentum, gradients, maximize=maximize, proceed=TRUE)
    for state, want, gradient, before in zip(momentum, expected, gradients, kept, strict=True):
        assert_same_bits(state, want)
        assert_same_bits(gradient, before)
    assert left_out.tolist() == [1, 0, 2]
    assert (left_out.dtype, scores.dtype) == (torch.int64, accumulation_dtype(dtype))
    tolerance = 1e-14 if dtype is torch.float64 else 1e-6
    torch.testing.assert_close(scores.double(), sums, rtol=tolerance, atol=0)


def test_accumulate_without_gradients() -> None:
    momentum, before, gradients = batch(1), batch(1), [None, randn(2, *SHAPE), None]
    scores, left_out = accumulate(momentum, gradients, maximize=False, proceed=TRUE)
    assert [torch.equal(*pair) for pair in zip(momentum, before, strict=True)] == [True, False, True]
    torch.testing.assert_close(scores, torch.stack([state.abs().sum(1) for state in momentum]))
    assert left_out.tolist() == [0, 0, 0]


def test_accumulate_that_may_not_proceed_moves_nothing() -> None:
    momentum, gradients = batch(1), batch(2)
    gradients[0][1, 1] = torch.nan
    before = [state.clone() for state in momentum]
    _, left_out = accumulate(momentum, gradients, maximize=False, proceed=torch.tensor(False))
    assert all(torch.equal(*pair) for pair in zip(momentum, before, strict=True))
    assert left_out.tolist() == [1, 0, 0]


def test_the_score_is_that_of_the_rounded_momentum() -> None:
    momentum = torch.ones(1, 4, dtype=torch.bfloat16)
    scores, _ = accumulate([momentum], [torch.full((1, 4), 2.0**-9)], maximize=False, proceed=TRUE)
    assert scores.tolist() == [[4.0]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_depend_on_the_row_alone(dtype: torch.dtype) -> None:
    """Not on strides, on the other rows, nor on how many there are: what makes choices independent of W."""
    columns = 1037
    whole = randn(1, 40, columns, dtype=dtype)
    expected, _ = accumulate([whole], [None], maximize=False, proceed=TRUE)
    for start, rows in [(0, 1), (3, 2), (7, 5), (0, 40)]:
        for strides in STRIDES:
            shard = randn(1, 40, columns, dtype=dtype, strides=strides)[start : start + rows]
            scores, _ = accumulate([shard], [None], maximize=False, proceed=TRUE)
            assert_same_bits(scores[0], expected[0, start : start + rows])


def expected_take(
    state: Tensor, gradient: Tensor | None, chosen: Sequence[int], nesterov: bool, maximize: bool
) -> tuple[dict[int, Tensor], Tensor]:
    """By chosen row what is written (before the wire's rounding), and the momentum that stays."""
    wide = accumulation_dtype(state.dtype)
    written, stays = {}, state.clone()
    for row in chosen:
        decayed = state[row].to(wide) * 0.95
        written[row] = state[row].clone().to(wide)
        if nesterov:
            ahead = torch.zeros(state.shape[1], dtype=wide) if gradient is None else gradient[row].to(wide)
            ahead = ahead if all(torch.isfinite(ahead)) else torch.zeros_like(ahead)
            written[row] = (-ahead if maximize else ahead) + decayed
        stays[row] = decayed.to(state.dtype)
    return written, stays


@dtypes_and_strides
@pytest.mark.parametrize(("nesterov", "maximize"), [(False, False), (True, False), (True, True)])
def test_take_and_decay_equals_a_loop(
    dtype: torch.dtype, other: torch.dtype, strides: str, nesterov: bool, maximize: bool
) -> None:
    momentum, selection = batch(1, dtype, strides), some_selection()
    gradients: list[Tensor | None] = [None, *batch(2, other, strides)[1:]]
    assert gradients[1] is not None
    gradients[1][2, 2], gradients[1][4, 0] = torch.inf, torch.nan  # one of a chosen row, one of another
    expected = [
        expected_take(momentum[n], gradients[n], selection.index[n, :count].tolist(), nesterov, maximize)
        for n, count in enumerate(selection.count.tolist())
    ]
    rows = empty_rows(selection, SHAPE[1], other)
    take_and_decay_(momentum, gradients, selection, rows, decay=0.95, nesterov=nesterov, maximize=maximize)
    for matrix, (written, stays) in enumerate(expected):
        assert_same_bits(momentum[matrix], stays)
        for entry, row in enumerate(written):
            assert_same_bits(rows.values[rows.slot[matrix, entry]], written[row].to(other))
    assert rows.values[-1].isnan().all()  # no slot: left alone


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_of_squares_equal_a_loop(dtype: torch.dtype) -> None:
    selection = some_selection()
    rows = filled_rows(selection, SHAPE[1], dtype)
    before = rows.values.clone()
    sums = sums_of_squares(rows, selection)
    assert_same_bits(rows.values, before)
    assert sums.dtype is accumulation_dtype(dtype)
    expected = torch.zeros(sums.shape, dtype=torch.float64)
    for matrix, count in enumerate(selection.count.tolist()):
        for entry in range(count):
            values = rows.values[rows.slot[matrix, entry]].double()
            expected[matrix, entry] = sum(value * value for value in values)
    torch.testing.assert_close(sums.double(), expected, rtol=1e-6, atol=0)
    assert (sums[~selection.valid()] == 0).all()


def expected_update(
    weight: Tensor, updates: dict[int, tuple[Tensor, Tensor]], wide: torch.dtype, cautious: bool
) -> Tensor:
    """A weight after lr 0.1 and weight decay 0.5, from (row as received, row scale) by row."""
    result = weight.clone()
    for row in range(weight.shape[0]):
        before = weight[row].to(wide)
        update = torch.zeros_like(before)
        if row in updates:
            received, factor = updates[row]
            update = received.to(wide) * (factor.to(wide) * 0.1)
        decayed = before * (1 - 0.1 * 0.5)
        if cautious:
            decayed = torch.where(update * before > 0, decayed, before)
        result[row] = (decayed - update).to(weight.dtype)
    return result


@dtypes_and_strides
@pytest.mark.parametrize("cautious", [False, True], ids=["plain", "cautious"])
def test_update_equals_a_loop(dtype: torch.dtype, other: torch.dtype, strides: str, cautious: bool) -> None:
    parameters, selection = batch(1, dtype, strides), some_selection()
    rows = filled_rows(selection, SHAPE[1], other)
    row_scale = torch.where(selection.valid(), randn(9, *selection.index.shape), torch.nan)
    wide = accumulation_dtype(dtype, other)
    expected = []
    for matrix, (weight, count) in enumerate(zip(parameters, selection.count.tolist(), strict=True)):
        slots = rows.slot[matrix]
        updates = {
            int(selection.index[matrix, entry]): (rows.values[slots[entry]], row_scale[matrix, entry])
            for entry in range(count)
        }
        expected.append(expected_update(weight, updates, wide, cautious))
    update_(parameters, rows, selection, row_scale, active=TRUE.expand(NUM_MATRICES), cautious=cautious, **RATES)
    for weight, want in zip(parameters, expected, strict=True):
        assert_same_bits(weight, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_inactive_matrix_keeps_its_bits(dtype: torch.dtype) -> None:
    parameters = batch(1, dtype)
    parameters[2][0, :4] = torch.tensor([torch.inf, torch.nan, -0.0, torch.finfo(dtype).tiny], dtype=dtype)
    before = [weight.clone() for weight in parameters]
    selection = selection_of([[0, 1], [0, 1], [0, 1]], [2, 2, 0])
    rows = filled_rows(selection, SHAPE[1], dtype)
    active = torch.tensor([True, False, False])
    update_(parameters, rows, selection, torch.ones(3, 2), active=active, cautious=False, **RATES)
    assert not torch.equal(parameters[0], before[0])
    assert_same_bits(parameters[1], before[1])
    assert_same_bits(parameters[2], before[2])


def test_decay_and_update_are_rounded_once() -> None:
    """Below 1 the numbers of bf16 are 2^-8 apart: 0.0015 twice moves a weight if it is rounded once."""
    weight = torch.ones(1, 1, dtype=torch.bfloat16)
    rows = Rows(torch.tensor([[0.0015]]), torch.zeros(1, 1, dtype=torch.int64))
    options = {"learning_rate": 1.0, "weight_decay": 0.0015, "active": TRUE[None], "cautious": False}
    update_([weight], rows, selection_of([[0]], [1]), torch.ones(1, 1), **options)
    assert weight.item() == 1 - 2**-8


@pytest.mark.parametrize("shape", [(0, 5), (6, 5)], ids=["no rows", "no slots"])
def test_nothing_here(shape: tuple[int, int]) -> None:
    momentum, gradients = [randn(1, *shape)] * 2, [randn(2, *shape)] * 2
    scores, left_out = accumulate(momentum, gradients, maximize=False, proceed=TRUE)
    assert scores.shape == (2, shape[0])
    assert left_out.tolist() == [0, 0]
    selection = selection_of([[], []], [0, 0])
    rows = Rows(torch.full((1, 5), torch.nan), selection.index.clone())
    before = momentum[0].clone()
    take_and_decay_(momentum, gradients, selection, rows, decay=0.95, nesterov=True, maximize=False)
    assert torch.equal(momentum[0], before)
    assert sums_of_squares(rows, selection).shape == (2, 0)
    weights = [momentum[0].clone(), momentum[0].clone()]
    active = torch.tensor([True, False])
    update_(weights, rows, selection, torch.empty(2, 0), active=active, cautious=False, **RATES)
    assert torch.equal(weights[0], before * (1 - 0.1 * 0.5))
    assert torch.equal(weights[1], before)


def test_fewer_rows_than_slots() -> None:
    """A shard of two rows in a bucket of four slots: the entries past its rows are not looked at."""
    momentum, before = [randn(1, 2, 3)], randn(1, 2, 3)
    selection = selection_of([[0, 1, 7, 9]], [2])
    rows = Rows(torch.full((5, 3), torch.nan), torch.tensor([[0, 1, 4, 4]]))
    take_and_decay_(momentum, [None], selection, rows, decay=0.5, nesterov=False, maximize=False)
    assert torch.equal(rows.values[:2], before)
    assert torch.equal(momentum[0], before * 0.5)
    weight = torch.zeros(2, 3)
    options = {"learning_rate": 1.0, "weight_decay": 0.0, "active": TRUE[None], "cautious": False}
    update_([weight], rows, selection, torch.ones(1, 4), **options)
    assert torch.equal(weight, -before)


def test_sums_are_wide_where_they_must_be() -> None:
    assert {accumulation_dtype(*pair) for pair in product(DTYPES[1:], DTYPES[1:])} == {torch.float32}
    assert {accumulation_dtype(torch.float64, other) for other in DTYPES} == {torch.float64}
