"""The kernels of the capped transport at the sizes of real models; small ones run in tests/unit."""

from __future__ import annotations

import pytest
import torch

from tests.capped_cases import (
    capped_bucket,
    check_admit,
    check_by_pair,
    check_read_headers,
    check_sending,
    check_waiting,
    plan_of,
    random_selection,
    refuse_some,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

SIZES = [(33, 5120, 4), (160, 5120, 8), (16, 20480, 4), (300, 300, 64), (5, 40000, 1), (1, 64, 2)]


@pytest.mark.parametrize(("matrices", "rows", "size"), SIZES)
def test_all_at_the_sizes_of_models(matrices: int, rows: int, size: int) -> None:
    owners = [(7 * matrix) % size for matrix in range(matrices)]
    bucket = capped_bucket(owners, rows, rank=size // 2, size=size, columns=17, dtype=torch.bfloat16)
    plan = plan_of(bucket, rows, always_pack=False)
    for seed, (few_ratios, late) in enumerate([(False, 0.0), (True, 0.0), (False, 0.2)]):
        selection = random_selection(bucket, seed, few_ratios=few_ratios, late=late)
        rows_of_pools = [int(selection.count[torch.tensor(owners) == owner].sum()) for owner in range(size)]
        for part in (0.5, 0.99, 1.0):
            admitted = check_admit(bucket, selection, [int(part * of_pool) for of_pool in rows_of_pools], 8)
        check_sending(bucket, admitted, plan)
        arrived = torch.randint(0, 3, (sum(plan.forward_rows[1]) * 17 + 4,)).to(torch.int16).view(torch.bfloat16)
        check_read_headers(bucket, selection, plan, arrived)
        check_by_pair([(bucket, selection)])
        check_waiting(bucket, selection, refuse_some(selection, seed), step=1)
