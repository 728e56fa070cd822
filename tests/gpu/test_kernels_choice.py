"""The kernels that choose rows and build matrices, at the sizes of real models; small ones run in tests/unit."""

from __future__ import annotations

import pytest
import torch

from dion_core.layout import Axis, split_layout
from tests.kernel_cases import check_choose, check_choose_local, check_collect_and_spread, mixed_scores
from tests.unit.test_layout import chunk_holders, fake_group, layout_of, random_holders

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1536, 5120, 17920, 32768, 40001, 200_000])
def test_the_choice_of_many_rows(rows: int, dtype: torch.dtype) -> None:
    scores = mixed_scores(rows, 4, rows, dtype)
    check_choose(scores, layout_of(chunk_holders(4, rows, 4), 3, 4, 1), [True] * 4, rows // 4, rows // 4)
    check_choose_local(scores, split_layout(fake_group(1, 2), Axis.ROWS, (2 * rows, 1)).stack(4), [True] * 4, rows // 3)


def test_scattered_rows_of_many_ranks() -> None:
    holders = random_holders(0, 4, 5000, 64)
    for rank in (0, 40):
        check_choose(mixed_scores(rank, 4, 5000, torch.float32), layout_of(holders, rank, 64, 1), [True] * 4, 700, 700)


@pytest.mark.parametrize("columns", [1536, 5120, 6656, 17920, 1001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_collect_and_spread(columns: int, dtype: torch.dtype) -> None:
    check_collect_and_spread(columns, dtype, size=4, total=1280)
