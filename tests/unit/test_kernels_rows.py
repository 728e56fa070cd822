"""The row kernels against their definitions: in Triton's interpreter here, and by tests/gpu on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor

from dion_core import neurons as neuron_definitions
from dion_core import rows as definitions
from dion_core.kernels import neurons as neuron_kernels
from dion_core.kernels import rows as kernels
from dion_core.kernels import updating
from dion_core.matrices import stacked
from dion_core.rows import SKIPPED_SCORE, Rows, RowSelection
from tests.unit.test_rows import assert_same_bits, empty_rows, filled_rows, randn, selection_of

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these on the device"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, in the interpreter, where values overflow
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STRIDES = ["contiguous", "transposed", "strided"]
NUM_MATRICES, NUM_ROWS = 3, 6
WIDTHS = [5, 64, 2565]  # less than a vector, whole vectors, and more than a piece or block with a rest


def some_cases() -> list[tuple[torch.dtype, torch.dtype, str, int]]:
    """All pairs of dtypes with three of strides and widths in turn on a device; with one, which the interpreter bears.

    Each dtype meets all strides and all widths also there.
    """
    turns = 3 if torch.cuda.is_available() else 1
    return [
        (*pair, STRIDES[(number + number // 3 + turn) % 3], WIDTHS[(number + 2 * (number // 3) + turn) % 3])
        for number, pair in enumerate(product(DTYPES, DTYPES))
        for turn in range(turns)
    ]


cases = pytest.mark.parametrize(("dtype", "other", "strides", "columns"), some_cases(), ids=str)
EXACT_SUMS = {"rtol": 2e-6, "atol": 0.0}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The CPU, with an interpreter that rounds to bf16 as devices do: its own conversion cuts off."""
    monkeypatch.setattr("triton.runtime.interpreter._convert_float", converted)
    return torch.device("cpu")


def converted(values: np.ndarray, source: Any, target: Any, _: Any) -> np.ndarray:
    """The bits of fp32 values as bf16 (uint16), rounded to nearest even, or of bf16 (uint16) as fp32 (uint32)."""
    if target == tl.bfloat16:
        rounded = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
        return rounded.view(torch.uint16).numpy().reshape(values.shape)
    assert source == tl.bfloat16
    return values.astype(np.uint32) << 16


def on(device: torch.device, tensor: Tensor) -> Tensor:
    """A copy on the device with the same strides, in a copy of the whole storage."""
    flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).clone().to(device)
    return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def all_on(device: torch.device, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if tensor is None else on(device, tensor) for tensor in tensors]


def chosen_on(device: torch.device, selection: RowSelection) -> RowSelection:
    return replace(
        selection, **{name: getattr(selection, name).to(device) for name in ("index", "count", "count_by_rank")}
    )


def rows_on(device: torch.device, rows: Rows) -> Rows:
    return Rows(on(device, rows.values), on(device, rows.slot))


def batch(seed: int, dtype: torch.dtype, strides: str, columns: int, rows: int = NUM_ROWS) -> list[Tensor]:
    return [randn(seed + 10 * n, rows, columns, dtype=dtype, strides=strides) for n in range(NUM_MATRICES)]


def some_selection() -> RowSelection:
    """Of three matrices of six rows: two rows, all four offered, none."""
    return selection_of([[1, 4, 0, 2], [0, 2, 3, 5], [0, 1, 2, 3]], [2, 4, 0])


def assert_same(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert one is not None
        assert other is not None
        assert_same_bits(one.cpu(), other)


def with_faults(gradients: list[Tensor | None]) -> list[Tensor | None]:
    """Of six rows some that are not finite, and one that only becomes so in a half-precision sum."""
    first, second, last = gradients
    assert first is not None
    assert last is not None
    first[2, 3], first[5, 0], last[0, -1] = torch.nan, torch.inf, -torch.inf
    last[3, 1] = torch.finfo(last.dtype).max
    return [first, second, last]


@cases
@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
def test_accumulate(
    device: torch.device, dtype: torch.dtype, other: torch.dtype, strides: str, columns: int, maximize: bool
) -> None:
    momentum, gradients = batch(1, dtype, strides, columns), with_faults([*batch(2, other, "contiguous", columns)])
    gradients[1] = None
    for proceed in (True, False):
        here, added = stacked(all_on(device, momentum)), stacked(all_on(device, gradients))
        left_out, expected_left_out = torch.arange(3, device=device), torch.arange(3)
        scores = kernels.accumulate_(
            here, added, left_out, maximize=maximize, proceed=torch.tensor(proceed, device=device)
        )
        expected = [on(torch.device("cpu"), each) for each in momentum]
        wanted = definitions.accumulate_(
            expected, gradients, expected_left_out, maximize=maximize, proceed=torch.tensor(proceed)
        )
        assert_same(here, expected)
        assert torch.equal(left_out.cpu(), expected_left_out)
        assert left_out[2] > 2
        assert (scores.cpu() == SKIPPED_SCORE).tolist() == (wanted == SKIPPED_SCORE).tolist()
        torch.testing.assert_close(scores.cpu(), wanted, **EXACT_SUMS)


@pytest.mark.parametrize("strides", STRIDES)
def test_accumulate_with_strided_gradients(device: torch.device, strides: str) -> None:
    momentum = batch(1, torch.bfloat16, "contiguous", 72)
    gradients = with_faults([*batch(2, torch.bfloat16, strides, 72)])
    here, added = stacked(all_on(device, momentum)), stacked(all_on(device, gradients))
    left_out = torch.zeros(3, dtype=torch.int64, device=device)
    kernels.accumulate_(here, added, left_out, maximize=False, proceed=torch.tensor(True, device=device))
    definitions.accumulate_(
        momentum, gradients, torch.zeros(3, dtype=torch.int64), maximize=False, proceed=torch.tensor(True)
    )
    assert_same(here, momentum)


def test_accumulate_of_rows_too_long_for_registers(device: torch.device) -> None:
    columns = kernels.LONGEST + 8
    momentum = batch(1, torch.bfloat16, "contiguous", columns)
    gradients = with_faults([*batch(2, torch.bfloat16, "contiguous", columns)])
    here, added = stacked(all_on(device, momentum)), stacked(all_on(device, gradients))
    left_out, expected = torch.zeros(2, 3, dtype=torch.int64, device=device).unbind()
    scores = kernels.accumulate_(here, added, left_out, maximize=False, proceed=torch.tensor(True, device=device))
    expected = expected.cpu()
    wanted = definitions.accumulate_(momentum, gradients, expected, maximize=False, proceed=torch.tensor(True))
    assert_same(here, momentum)
    assert torch.equal(left_out.cpu(), expected)
    torch.testing.assert_close(scores.cpu(), wanted, **EXACT_SUMS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1037, 1296])
def test_scores_depend_on_the_row_alone(device: torch.device, dtype: torch.dtype, columns: int) -> None:
    """Not on strides, alignment, the other rows, nor on how many there are."""
    whole = randn(1, 12, columns, dtype=dtype)
    proceed, left_out = torch.tensor(True, device=device), torch.zeros(1, dtype=torch.int64, device=device)

    def scores(shard: Tensor) -> Tensor:
        momentum, nothing = stacked([on(device, shard)]), stacked([None], like=shard.to(device))
        return kernels.accumulate_(momentum, nothing, left_out, maximize=False, proceed=proceed)[0]

    expected = scores(whole)
    shifted = torch.empty(whole.numel() + 1, dtype=dtype)[1:].view_as(whole).copy_(whole)
    for start, rows in [(0, 1), (3, 2), (7, 5), (0, 12)]:
        views = [randn(1, 12, columns, dtype=dtype, strides=strides) for strides in STRIDES]
        for view in (*views, shifted):
            assert_same_bits(scores(view[start : start + rows]), expected[start : start + rows])


@cases
@pytest.mark.parametrize(("nesterov", "maximize"), [(False, False), (True, False), (True, True)])
def test_take_and_decay(
    device: torch.device, dtype: torch.dtype, other: torch.dtype, strides: str, columns: int, nesterov: bool,
    maximize: bool,
) -> None:  # fmt: skip
    momentum, selection = batch(1, dtype, strides, columns), some_selection()
    gradients: list[Tensor | None] = [None, *batch(2, other, strides, columns)[1:]]
    assert gradients[1] is not None
    gradients[1][2, 2], gradients[1][3, -1], gradients[1][4, 0] = torch.inf, torch.nan, torch.nan
    rows = empty_rows(selection, columns, other)
    here, ahead = stacked(all_on(device, momentum)), stacked(all_on(device, gradients))
    taken = rows_on(device, rows)
    decay = torch.tensor(0.95, dtype=torch.float64)
    kernels.take_and_decay_(
        here, ahead, chosen_on(device, selection), taken, decay=decay.to(device), nesterov=nesterov, maximize=maximize
    )
    definitions.take_and_decay_(momentum, gradients, selection, rows, decay=decay, nesterov=nesterov, maximize=maximize)
    assert_same(here, momentum)
    valid = selection.valid()
    assert_same_bits(taken.values.cpu()[rows.slot[valid]], rows.values[rows.slot[valid]])
    assert taken.values.cpu()[rows.slot[~valid]].isnan().all()  # past the count nothing is written
    assert taken.values[-1].isnan().all()


@cases
@pytest.mark.parametrize("cautious", [False, True], ids=["plain", "cautious"])
def test_update(
    device: torch.device, dtype: torch.dtype, other: torch.dtype, strides: str, columns: int, cautious: bool
) -> None:
    parameters, selection = batch(1, dtype, strides, columns), some_selection()
    rows = filled_rows(selection, columns, other)
    row_scale = torch.where(selection.valid(), randn(9, *selection.index.shape), torch.nan)
    received = rows_on(device, rows)
    for decay, active in product((0.5, 0.0), ([True, True, True], [False, True, False])):
        here, expected = stacked(all_on(device, parameters)), [on(torch.device("cpu"), each) for each in parameters]
        rates = {"learning_rate": 0.1, "weight_decay": torch.tensor(decay, dtype=torch.float64)}
        flags = torch.tensor(active)
        definitions.update_(expected, rows, selection, row_scale, active=flags, cautious=cautious, **rates)
        rates["weight_decay"] = rates["weight_decay"].to(device)
        updating.update_(
            here, received, chosen_on(device, selection), row_scale.to(device),
            active=flags.to(device), cautious=cautious, **rates,
        )  # fmt: skip
        assert_same(here, expected)
        assert torch.equal(here[0].cpu(), parameters[0]) is not active[0]


def test_an_inactive_matrix_keeps_its_bits(device: torch.device) -> None:
    parameters = batch(1, torch.bfloat16, "contiguous", 8)
    parameters[2][0, :4] = torch.tensor([torch.inf, torch.nan, -0.0, torch.finfo(torch.bfloat16).tiny])
    here, selection = stacked(all_on(device, parameters)), some_selection()
    rows = filled_rows(selection, 8, torch.bfloat16)
    updating.update_(
        here, rows_on(device, rows), chosen_on(device, selection),
        torch.ones(3, 4, device=device), learning_rate=0.1, weight_decay=0.1,
        active=torch.tensor(False, device=device).expand(3), cautious=False,
    )  # fmt: skip
    assert_same(here, parameters)


@pytest.mark.parametrize("num_slots", [1, 2, 7, 64, 300])
def test_every_chosen_row_is_found(device: torch.device, num_slots: int) -> None:
    """All counts from none to all slots, one a matrix, over rows chosen at random."""
    rows_here, counts = 2 * num_slots + 1, sorted({0, 1, num_slots // 2, num_slots - 1, num_slots})
    generator = torch.Generator().manual_seed(num_slots)
    index = []
    for count in counts:
        order = torch.randperm(rows_here, generator=generator)[:num_slots].tolist()
        index.append([*sorted(order[:count]), *order[count:]])
    selection = selection_of(index, counts)
    rows = filled_rows(selection, 3, torch.float32)
    weights = [torch.zeros(rows_here, 3) for _ in counts]
    here = stacked(all_on(device, weights))
    options = {"learning_rate": 1.0, "weight_decay": 0.0, "cautious": False}
    scale = torch.ones(len(counts), num_slots)
    flags = torch.ones(len(counts), dtype=torch.bool)
    updating.update_(
        here, rows_on(device, rows), chosen_on(device, selection), scale.to(device),
        active=flags.to(device), **options,
    )  # fmt: skip
    definitions.update_(weights, rows, selection, scale, active=flags, **options)
    for weight, wanted, count in zip(here, weights, counts, strict=True):
        assert weight is not None
        assert torch.equal(weight.cpu(), wanted)
        assert (wanted.any(dim=1)).sum() == count


@pytest.mark.parametrize(("dtype", "columns"), list(product(DTYPES, [1, 64, 2565])), ids=str)
def test_sums_of_squares(device: torch.device, dtype: torch.dtype, columns: int) -> None:
    selection = some_selection()
    rows = filled_rows(selection, columns, dtype)
    received = rows_on(device, rows)
    sums = neuron_kernels.sums_of_squares(received, chosen_on(device, selection)).cpu()
    exact = rows.values.double().square().sum(dim=1)[rows.slot]
    torch.testing.assert_close(sums.double(), torch.where(selection.valid(), exact, 0), rtol=1e-7, atol=0)


@pytest.mark.parametrize("beta2", [0.9, 0.0, torch.tensor(0.95)], ids=["float", "zero", "tensor"])
@pytest.mark.parametrize(("dtype", "columns"), list(product(DTYPES, [7, 2568])), ids=str)
@pytest.mark.parametrize("whole", [True, False], ids=["from rows", "from sums"])
def test_neuron_factors(
    device: torch.device, dtype: torch.dtype, columns: int, beta2: float | Tensor, whole: bool
) -> None:
    selection = some_selection()
    rows = filled_rows(selection, columns, dtype)
    moment = [randn(20 + n, NUM_ROWS, 1).square() for n in range(NUM_MATRICES)]
    here, chosen = stacked(all_on(device, moment)), chosen_on(device, selection)
    rate = beta2.to(device) if isinstance(beta2, Tensor) else beta2
    if whole:
        received = rows_on(device, rows)
        result = neuron_kernels.neuron_factors_of_rows_(here, chosen, received, columns=columns, beta2=rate)
        wanted = neuron_definitions.neuron_factors_of_rows_(moment, selection, rows, columns=columns, beta2=beta2)
    else:
        sums = definitions.sums_of_squares(rows, selection)
        result = neuron_kernels.neuron_factors_(here, chosen, sums.to(device), columns=2 * columns, beta2=rate)
        wanted = neuron_definitions.neuron_factors_(moment, selection, sums, columns=2 * columns, beta2=beta2)
    valid = selection.valid()
    torch.testing.assert_close(result[0].cpu()[valid], wanted[0][valid], **EXACT_SUMS)
    assert result[0].isfinite().all()
    torch.testing.assert_close(result[1].cpu(), wanted[1], **EXACT_SUMS)
    for state, expected in zip(here, moment, strict=True):
        assert state is not None
        torch.testing.assert_close(state.cpu(), expected, **EXACT_SUMS)


@pytest.mark.parametrize("slots", [[4], [2, 2], [3, 0, 5], [1, 4, 2, 2, 1, 6]], ids=str)
@pytest.mark.parametrize("total", [6, 700])
def test_neuron_scale(device: torch.device, slots: list[int], total: int) -> None:
    """Messages of several ranks with counts from none to all slots, one matrix without any row."""
    num_matrices = 4
    generator = torch.Generator().manual_seed(total)
    pieces = []
    for of_rank in slots:
        count = torch.randint(0, of_rank + 1, (num_matrices,), generator=generator)
        count[1] = 0
        values = torch.rand(2, num_matrices, of_rank, generator=generator)
        values = values.masked_fill_(torch.arange(of_rank) >= count[:, None], 0)
        pieces.append(torch.cat([count.float(), values.flatten()]))
    gathered, factor = torch.cat(pieces), torch.rand(num_matrices, slots[0], generator=generator)
    first = torch.tensor([sum(slots[:rank]) for rank in range(len(slots))])[:, None].expand(-1, num_matrices)
    total = max(total, sum(slots))
    wanted = neuron_definitions.neuron_scale(factor, gathered, slots=slots, first_slot=first, total=total)
    scale = neuron_kernels.neuron_scale(
        factor.to(device), gathered.to(device), slots=slots, first_slot=first.to(device), total=total
    )
    torch.testing.assert_close(scale.cpu(), wanted, **EXACT_SUMS)
    assert torch.equal(scale[1].cpu(), factor[1])


@pytest.mark.parametrize(("num_rows", "num_slots"), [(0, 0), (6, 0), (0, 2)], ids=["no rows", "no slots", "spare"])
def test_nothing_here(device: torch.device, num_rows: int, num_slots: int) -> None:
    weights = [torch.ones(num_rows, 5), torch.ones(num_rows, 5)]
    momentum, nothing = stacked(all_on(device, weights)), stacked(all_on(device, [weights[0], None]))
    left_out = torch.zeros(2, dtype=torch.int64, device=device)
    scores = kernels.accumulate_(momentum, nothing, left_out, maximize=False, proceed=torch.tensor(True, device=device))
    assert scores.shape == (2, num_rows)
    selection = chosen_on(device, selection_of([list(range(num_slots))] * 2, [0, 0]))
    rows = Rows(torch.full((3, 5), torch.nan, device=device), selection.index.clone())
    kernels.take_and_decay_(momentum, nothing, selection, rows, decay=0.5, nesterov=True, maximize=False)
    assert rows.values.isnan().all()
    assert neuron_kernels.sums_of_squares(rows, selection).tolist() == [[0.0] * num_slots] * 2
    moment = stacked([torch.ones(num_rows, 1, device=device)] * 2)
    factor, message = neuron_kernels.neuron_factors_of_rows_(moment, selection, rows, columns=5, beta2=0.5)
    assert message.tolist() == [0.0] * (2 + 4 * num_slots)
    first = torch.zeros(1, 2, dtype=torch.int64, device=device)
    scale = neuron_kernels.neuron_scale(factor, message, slots=[num_slots], first_slot=first, total=num_slots)
    assert scale.shape == (2, num_slots)
    active = torch.tensor([True, False], device=device)
    here = stacked(all_on(device, weights))
    updating.update_(here, rows, selection, scale, learning_rate=0.1, weight_decay=0.5, active=active, cautious=False)
    assert_same(here, [weights[0] * (1 - 0.1 * 0.5), weights[1]])


def test_one_matrix_whose_choice_is_an_expanded_view(device: torch.device) -> None:
    """As when all rows are chosen: one row of numbers stands for all matrices."""
    weights, counts = [randn(1, 4, 8), randn(2, 4, 8)], torch.tensor(4).expand(2)
    selection = RowSelection.unranked(torch.arange(4).expand(2, 4), counts, counts[None])
    chosen = RowSelection.unranked(
        torch.arange(4, device=device).expand(2, 4), torch.tensor(4, device=device).expand(2), counts[None].to(device)
    )
    rows, here = filled_rows(selection, 8, torch.float32), stacked(all_on(device, weights))
    taken = Rows(torch.zeros_like(rows.values, device=device), rows.slot.to(device))
    kernels.take_and_decay_(here, here, chosen, taken, decay=1.0, nesterov=False, maximize=False)
    assert_same_bits(taken.values.cpu()[rows.slot], torch.stack(weights))
    received = Rows(rows.values.to(device), taken.slot)
    options = {"learning_rate": 0.1, "weight_decay": 0.1, "cautious": False}
    flags, scale = torch.tensor(True), torch.ones(2, 4)
    updating.update_(here, received, chosen, scale.to(device), active=flags.to(device).expand(2), **options)
    definitions.update_(weights, rows, selection, scale, active=flags.expand(2), **options)
    assert_same(here, weights)
