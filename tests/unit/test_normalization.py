"""NorMuon's row factors against loops in float64, on one rank and on several that are simulated."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from dion_core.collectives import Handle, SoloGroup
from dion_core.layout import Axis, Layout, split_layout
from dion_core.normalization import NeuronNormalizer, NoNormalizer
from dion_core.rows import Rows, RowSelection
from dion_core.steps import Steps
from dion_core.transport import Bucket
from tests.unit.test_layout import CPU, chunk_holders, fake_group, layout_of, rows_of

BETA2 = 0.9
COLUMNS = 7


@dataclass(frozen=True)
class MailGroup(SoloGroup):
    """One of several ranks whose all-gathers exchange tensors through a list, one collective at a time."""

    mail: dict[int, Tensor] = field(default_factory=dict, compare=False)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Handle:
        self.mail[self.rank] = tensor.clone()
        return _Delivery(self.mail, outputs)


@dataclass
class _Delivery:
    mail: dict[int, Tensor]
    outputs: Sequence[Tensor]

    def wait(self) -> None:
        for rank, output in enumerate(self.outputs):
            output.copy_(self.mail[rank])


def run_together(ranks: Sequence[Steps[Tensor]]) -> list[Tensor]:
    """Every rank's result; each launches its collective before any waits for it."""
    for each in ranks:
        next(each)
    results = []
    for each in ranks:
        with pytest.raises(StopIteration) as stop:
            next(each)
        results.append(stop.value.value)
    return results


def result_of(steps: Steps[Tensor]) -> Tensor:
    with pytest.raises(StopIteration) as stop:
        next(steps)
    result: Tensor = stop.value.value
    return result


def bucket_of(layout: Layout, most: int, total: int, dtype: torch.dtype = torch.float64) -> Bucket:
    return Bucket(layout, (0,) * layout.num_matrices, most, total, dtype, CPU, "bucket")


def expected(
    update: Tensor, chosen: Sequence[int], second_moment: Tensor, beta2: float = BETA2
) -> tuple[dict[int, float], Tensor]:
    """By chosen row its factor, and the second moment (R,) after, in float64; `update` is (R, C)."""
    after, factors = second_moment.double().clone(), {}
    for row in chosen:
        mean = sum(float(value) ** 2 for value in update[row]) / update.shape[1]
        after[row] = beta2 * float(after[row]) + (1 - beta2) * mean
        factors[row] = 1 / (math.sqrt(after[row]) + 1e-8)
    before = math.sqrt(sum(float(value) ** 2 for row in chosen for value in update[row]))
    scaled = math.sqrt(sum((factors[row] * float(value)) ** 2 for row in chosen for value in update[row]))
    ratio = before / scaled if scaled > 0 else 1.0
    return {row: factor * ratio for row, factor in factors.items()}, after


def whole_case(
    updates: Tensor,
    chosen: Sequence[Sequence[int]],
    *,
    dtype: torch.dtype = torch.float64,
    num_slots: int | None = None,
) -> tuple[Rows, RowSelection, Bucket]:
    """Matrices that lie whole on one rank; slots past the count hold NaN, and lie in another order."""
    num_matrices, rows, columns = updates.shape
    most = max(map(len, chosen)) if num_slots is None else num_slots
    entries = [[*chosen_, *(row for row in range(rows) if row not in chosen_)][:most] for chosen_ in chosen]
    index = torch.tensor(entries, dtype=torch.int64).view(num_matrices, most)
    count = torch.tensor([len(chosen_) for chosen_ in chosen])
    slot = torch.arange(num_matrices * most).flip(0).view(num_matrices, most)
    values = torch.full((num_matrices * most, columns), torch.nan, dtype=dtype)
    for matrix, chosen_ in enumerate(chosen):
        for place, row in enumerate(chosen_):
            values[slot[matrix, place]] = updates[matrix, row].to(dtype)
    layout = split_layout(fake_group(0, 1), Axis.WHOLE, (rows, columns)).stack(num_matrices)
    return Rows(values, slot), RowSelection.unranked(index, count, count[None]), bucket_of(layout, most, most, dtype)


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def column(state: Tensor) -> Tensor:
    """(R, 1) fp32, in memory of its own."""
    return state.float().clone()[:, None]


CHOSEN = [[0, 3, 4, 5], [2, 6], [1]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_factors_and_second_moment_equal_a_loop(dtype: torch.dtype) -> None:
    updates = (randn(1, 3, 8, COLUMNS) * torch.logspace(-2, 2, 8, dtype=torch.float64)[:, None]).to(dtype).double()
    start = randn(2, 3, 8).square()
    state = [column(each) for each in start]
    for _ in range(3):  # the second moment goes on from step to step
        rows, selection, bucket = whole_case(updates, CHOSEN, dtype=dtype)
        want = [expected(*each) for each in zip(updates, CHOSEN, [each[:, 0] for each in state], strict=True)]
        before = rows.values.clone()
        factor = result_of(NeuronNormalizer().row_scale(rows, selection, state, bucket, beta2=BETA2))
        assert torch.equal(rows.values.nan_to_num(), before.nan_to_num())
        for matrix, (factors, after) in enumerate(want):
            chosen = CHOSEN[matrix]
            wanted = torch.tensor([factors[row] for row in chosen], dtype=torch.float64)
            torch.testing.assert_close(factor[matrix, : len(chosen)].double(), wanted, rtol=2e-6, atol=0)
            torch.testing.assert_close(state[matrix][:, 0].double(), after, rtol=1e-6, atol=0)
            still = [row for row in range(8) if row not in chosen]
            assert torch.equal(state[matrix][still, 0].double(), after[still])
            taken = updates[matrix, chosen]
            kept = (taken * factor[matrix, : len(chosen), None].double()).norm()
            torch.testing.assert_close(kept, taken.norm(), rtol=1e-6, atol=0)
        assert not factor.isnan().any()


def test_the_second_moment_of_untouched_rows_keeps_its_bits() -> None:
    state = [column(torch.arange(8) / 3) for _ in range(3)]
    before = [each.clone() for each in state]
    rows, selection, bucket = whole_case(randn(1, 3, 8, COLUMNS), CHOSEN)
    result_of(NeuronNormalizer().row_scale(rows, selection, state, bucket, beta2=BETA2))
    for matrix, chosen in enumerate(CHOSEN):
        moved = (state[matrix] != before[matrix]).flatten().nonzero().flatten().tolist()
        assert moved == chosen


@pytest.mark.parametrize("start", [0.0, 1.0])
def test_a_zero_update_stays_zero(start: float) -> None:
    updates, state = torch.zeros(3, 8, COLUMNS, dtype=torch.float64), [column(torch.full((8,), start))] * 3
    updates[2, 1] = 1.0
    rows, selection, bucket = whole_case(updates, CHOSEN)
    factor = result_of(NeuronNormalizer().row_scale(rows, selection, state, bucket, beta2=BETA2))
    assert factor.isfinite().all()
    scaled = rows.values.index_select(0, rows.slot[:2].flatten()).nan_to_num() * factor[:2].reshape(-1, 1)
    assert (scaled == 0).all()


def test_one_zero_row_among_others() -> None:
    updates, state = randn(1, 1, 4, COLUMNS), [column(torch.zeros(4))]
    updates[0, 2] = 0
    rows, selection, bucket = whole_case(updates, [[0, 1, 2, 3]])
    want, after = expected(updates[0], [0, 1, 2, 3], torch.zeros(4))
    factor = result_of(NeuronNormalizer().row_scale(rows, selection, state, bucket, beta2=BETA2))[0]
    torch.testing.assert_close(factor.double(), torch.tensor([want[row] for row in range(4)], dtype=torch.float64))
    torch.testing.assert_close(state[0][:, 0].double(), after)
    assert state[0][2, 0] == 0


def test_a_matrix_without_chosen_rows_keeps_its_state() -> None:
    state = [column(torch.ones(8)) for _ in range(2)]
    rows, selection, bucket = whole_case(randn(1, 2, 8, COLUMNS), [[1, 2], []])
    factor = result_of(NeuronNormalizer().row_scale(rows, selection, state, bucket, beta2=BETA2))
    assert torch.equal(state[1], torch.ones(8, 1))
    assert factor.isfinite().all()


def test_no_normalizer_scales_by_one() -> None:
    rows, selection, bucket = whole_case(randn(1, 3, 8, COLUMNS), CHOSEN)
    factor = result_of(NoNormalizer().row_scale(rows, selection, [], bucket, beta2=BETA2))
    assert factor.tolist() == [[1.0] * 4] * 3
    assert (NoNormalizer.has_second_moment, NeuronNormalizer.has_second_moment) == (False, True)


def by_rank(
    updates: Tensor, chosen: Sequence[Sequence[int]], start: Tensor, size: int, dtype: torch.dtype
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Factors and second moments of every rank, where rows are split as torch.chunk splits them."""
    num_matrices, rows, columns = updates.shape
    holders = chunk_holders(num_matrices, rows, size)
    held = [rows_of(holders, rank, 0) for rank in range(size)]
    local = [[[each.index(row) for row in chosen_ if row in each] for chosen_ in chosen] for each in held]
    counts = torch.tensor([[len(chosen_) for chosen_ in of_rank] for of_rank in local])
    total = max(map(len, chosen))
    mail: dict[int, Tensor] = {}
    states = [[column(start[n, each]) for n in range(num_matrices)] for each in held]
    ranks = []
    for rank, each in enumerate(held):
        group = MailGroup(rank, size, tuple(range(size)), mail)
        layout = replace(layout_of(holders, rank, size, columns), group=group)
        slots = min(total, len(each))
        rows_here, selection, _ = whole_case(updates[:, each], local[rank], dtype=dtype, num_slots=slots)
        selection = replace(selection, count_by_rank=counts)
        bucket = bucket_of(layout, min(total, max(map(len, held))), total, dtype)
        ranks.append(NeuronNormalizer().row_scale(rows_here, selection, states[rank], bucket, beta2=BETA2))
    return run_together(ranks), states


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [10, 3])
def test_split_rows_give_the_bits_of_one_rank(rows: int, dtype: torch.dtype) -> None:
    updates = randn(3, 3, rows, COLUMNS).to(dtype).double()
    start = randn(4, 3, rows).square()
    chosen = [sorted({0, 2, rows - 1}), list(range(min(rows, 8))), []]
    whole, selection, bucket = whole_case(updates, chosen, dtype=dtype)
    one = [column(each) for each in start]
    factor = result_of(NeuronNormalizer().row_scale(whole, selection, one, bucket, beta2=BETA2))
    for size in (1, 2, 3, 4):
        factors, states = by_rank(updates, chosen, start, size, dtype)
        holders = chunk_holders(3, rows, size)
        for n, chosen_ in enumerate(chosen):
            together = [
                value
                for rank in range(size)
                for value in factors[rank][n, : len([row for row in rows_of(holders, rank, 0) if row in chosen_])]
            ]
            assert torch.equal(torch.tensor(together), factor[n, : len(chosen_)])
            assert torch.equal(torch.cat([states[rank][n] for rank in range(size)]), one[n])


@pytest.mark.parametrize("widths", [[4, 4, 1], [3, 0, 5]], ids=str)
def test_split_columns_equal_a_loop(widths: list[int]) -> None:
    size, chosen = len(widths), [[0, 2, 3], [1]]
    updates, start = randn(5, 2, 4, sum(widths)), randn(6, 2, 4).square()
    parts = torch.split(updates, widths, dim=2)
    mail: dict[int, Tensor] = {}
    states = [[column(each) for each in start] for _ in range(size)]
    ranks = []
    holders = [[rank for rank, width in enumerate(widths) for _ in range(width)]] * 2
    for rank in range(size):
        rows, selection, _ = whole_case(parts[rank], chosen)
        selection = replace(selection, count_by_rank=selection.count.expand(size, -1))
        layout = layout_of(holders, rank, size, 4, Axis.COLUMNS)
        layout = replace(layout, group=MailGroup(rank, size, tuple(range(size)), mail))
        bucket = bucket_of(layout, 3, 3)
        ranks.append(NeuronNormalizer().row_scale(rows, selection, states[rank], bucket, beta2=BETA2))
    for factor, state in zip(run_together(ranks), states, strict=True):
        for n, chosen_ in enumerate(chosen):
            want, after = expected(updates[n], chosen_, start[n].float())
            wanted = torch.tensor([want[row] for row in chosen_], dtype=torch.float64)
            torch.testing.assert_close(factor[n, : len(chosen_)], wanted, rtol=1e-6, atol=0)
            torch.testing.assert_close(state[n][:, 0].double(), after, rtol=1e-6, atol=0)


@pytest.mark.parametrize("beta2", [0.0, torch.tensor(0.5)], ids=["zero", "tensor"])
def test_other_values_of_beta2(beta2: float | Tensor) -> None:
    updates, state = randn(1, 1, 3, COLUMNS), [column(torch.ones(3))]
    rows, selection, bucket = whole_case(updates, [[0, 1, 2]])
    _, after = expected(updates[0], [0, 1, 2], torch.ones(3), float(beta2))
    result_of(NeuronNormalizer().row_scale(rows, selection, state, bucket, beta2=beta2))
    torch.testing.assert_close(state[0][:, 0].double(), after)
