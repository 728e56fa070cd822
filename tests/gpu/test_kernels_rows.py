"""The row kernels on the device: the tests of the interpreter, which kernel runs when, and more than 2^31 elements."""

from __future__ import annotations

import pytest
import torch

from dion_core import ops
from dion_core import rows as definitions
from dion_core.kernels import neurons, rows, updating
from dion_core.matrices import stacked
from dion_core.rows import Rows
from tests.unit.test_kernels_rows import *  # noqa: F403
from tests.unit.test_rows import selection_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
CUDA = torch.device("cuda", 0)


@pytest.fixture
def device() -> torch.device:
    return CUDA


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("addressed", [True, False], ids=["matrices", "list"])
def test_which_operations_run_in_kernels(dtype: torch.dtype, addressed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    for module, names in {
        rows: ("accumulate_", "take_and_decay_"),
        updating: ("update_",),
        neurons: ("neuron_factors_of_rows_", "neuron_scale", "sums_of_squares"),
    }.items():
        for name in names:
            original = getattr(module, name)
            monkeypatch.setattr(module, name, lambda *a, f=original, n=name, **k: called.append(n) or f(*a, **k))
    tensors = [torch.randn(4, 8, device=CUDA, dtype=dtype) for _ in range(2)]
    matrices = stacked(tensors) if addressed else tensors
    moment = [torch.ones(4, 1, device=CUDA) for _ in range(2)]
    index = torch.tensor([[1, 2], [0, 3]], device=CUDA)
    count = torch.tensor([2, 1], device=CUDA)
    selection = definitions.RowSelection.unranked(index, count, count[None])
    buffer = Rows(torch.zeros(4, 8, device=CUDA, dtype=dtype), torch.arange(4, device=CUDA).view(2, 2))
    proceed = torch.tensor(True, device=CUDA)
    ops.accumulate_(matrices, matrices, torch.zeros(2, dtype=torch.int64, device=CUDA), maximize=False, proceed=proceed)
    ops.take_and_decay_(matrices, matrices, selection, buffer, decay=0.5, nesterov=False, maximize=False)
    factor, message = ops.neuron_factors_of_rows_(
        stacked(moment) if addressed else moment, selection, buffer, columns=8, beta2=0.5
    )
    first = torch.zeros(1, 2, dtype=torch.int64, device=CUDA)
    scale = ops.neuron_scale(factor, message, slots=[2], first_slot=first, total=2)
    active = torch.ones(2, dtype=torch.bool, device=CUDA)
    options = {"learning_rate": 0.1, "weight_decay": 0.1, "active": active, "cautious": False}
    ops.update_(matrices, buffer, selection, scale, **options)
    by_address = ["accumulate_", "take_and_decay_", "neuron_factors_of_rows_"]
    if dtype is torch.float64:
        assert called == []
    elif addressed:
        assert called == [*by_address, "neuron_scale", "update_"]
    else:
        assert called == ["neuron_scale"]


def test_a_tensor_of_more_than_two_to_the_31_elements() -> None:
    """Rows on both sides of element 2^31 of a momentum, its gradient, a buffer and a parameter."""
    columns = 32768
    num_rows = 2**31 // columns + 3
    generator = torch.Generator(CUDA).manual_seed(1)
    momentum, gradient = (
        torch.randn(num_rows, columns, device=CUDA, dtype=torch.bfloat16, generator=generator) for _ in range(2)
    )
    watched = [0, 1, 2**31 // columns - 1, 2**31 // columns, num_rows - 1]
    before, added = momentum[watched].clone(), gradient[watched].clone()
    here, left_out = stacked([momentum]), torch.zeros(1, dtype=torch.int64, device=CUDA)
    proceed = torch.tensor(True, device=CUDA)
    scores = rows.accumulate_(here, stacked([gradient]), left_out, maximize=False, proceed=proceed)
    wanted = definitions.accumulate_([before], [added], left_out, maximize=False, proceed=proceed)
    assert torch.equal(momentum[watched], before)
    torch.testing.assert_close(scores[:, watched], wanted)
    assert left_out.item() == 0
    chosen = selection_of([watched], [len(watched)])
    count = chosen.count.to(CUDA)
    selection = definitions.RowSelection.unranked(chosen.index.to(CUDA), count, count[None])
    buffer = Rows(gradient, selection.index)
    rows.take_and_decay_(here, here, selection, buffer, decay=0.5, nesterov=False, maximize=False)
    assert torch.equal(gradient[watched], before)
    assert torch.equal(momentum[watched], before * 0.5)
    sums = neurons.sums_of_squares(buffer, selection)
    torch.testing.assert_close(sums[0], before.double().square().sum(dim=1).float())
    updating.update_(
        here, buffer, selection, torch.ones(1, len(watched), device=CUDA), learning_rate=1.0, weight_decay=0.0,
        active=proceed[None], cautious=False,
    )  # fmt: skip
    assert torch.equal(momentum[watched], -before * 0.5)
