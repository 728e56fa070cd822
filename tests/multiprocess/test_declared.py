"""Declared shards over torch.distributed: the same bits as whole tensors, whatever the parts and whoever holds them."""

import pytest

from tests.multiprocess.test_world_size import COLUMNS, FP32, exact_cells
from tests.training import assert_close, assert_equal_bits, train_cells


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_rows_give_the_bits_of_whole_tensors(world_size: int) -> None:
    cells = exact_cells("declared0")
    wanted = train_cells(exact_cells("plain"), 1)
    for cell, actual, other in zip(cells, train_cells(cells, world_size), wanted, strict=True):
        for step, one, two in zip(cell.steps, actual, other, strict=True):
            assert_equal_bits(one, two, f"{cell.optimizer} {cell.options} after {step} steps")


def test_columns_agree_to_rounding() -> None:
    cells = [cell for cell in exact_cells("declared1") if cell.problem is FP32]
    wanted = [
        each
        for cell, each in zip(exact_cells("plain"), train_cells(exact_cells("plain"), 1), strict=True)
        if cell.problem is FP32
    ]
    for cell, actual, other in zip(cells, train_cells(cells, 3), wanted, strict=True):
        if cell.options.get("wire_dtype") is None:
            doubled = {name: value.double() for name, value in other[-1].items()}
            assert_close(actual[-1], doubled, COLUMNS, f"{cell.optimizer} {cell.options}")
