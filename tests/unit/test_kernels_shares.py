"""Rows of matrices that another rank sends: the kernel against its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dion_core import rows as definitions
from dion_core.kernels import rows as kernels
from dion_core.matrices import stacked
from dion_core.rows import Rows
from tests.unit.test_kernels_rows import all_on, assert_same, batch, chosen_on, some_selection
from tests.unit.test_rows import assert_same_bits

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")


@pytest.mark.parametrize("num_values", [0, 8])
def test_a_matrix_that_another_rank_sends_is_decayed_and_not_written(num_values: int) -> None:
    """With slots of -1 the buffer stays as it is; it may have no row at all, or those of another matrix."""
    momentum, given = batch(1, torch.float32, "contiguous", 24), some_selection()
    slot = torch.full_like(given.index, -1)
    if num_values:
        slot[1] = torch.arange(given.index.shape[1])
    values = torch.full((num_values, 24), torch.nan)
    expected, here = [each.clone() for each in momentum], stacked(all_on(CPU, momentum))
    taken, wanted = Rows(values.clone(), slot), Rows(values.clone(), slot)
    how: dict[str, Any] = {"decay": torch.tensor(0.5, dtype=torch.float64), "nesterov": False, "maximize": False}
    kernels.take_and_decay_(here, here, chosen_on(CPU, given), taken, **how)
    definitions.take_and_decay_(expected, expected, given, wanted, **how)
    assert_same(here, expected)
    count = int(given.count[1]) if num_values else 0
    first = momentum[1].index_select(0, given.index[1, :count])
    for rows in (taken.values, wanted.values):
        assert_same_bits(rows[:count], first)
    assert taken.values[count:].isnan().all()  # past the count the kernel writes nothing, the definition may
    for matrix, before in enumerate(momentum):
        index = given.index[matrix, : int(given.count[matrix])]
        assert_same_bits(expected[matrix][index], before[index] * 0.5)
