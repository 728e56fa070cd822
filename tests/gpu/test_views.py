"""On a GPU, heads, blocks, flattened convolutions and stacks are updated as separate matrices are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from dion_core import Dion2, Muon, NorDion2, NorMuon
from tests.unit.test_views import VIEWS, Divide

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


@pytest.mark.parametrize("kind", [Muon, NorMuon, Dion2, NorDion2])
@pytest.mark.parametrize(("shape", "keys", "divide"), VIEWS, ids=[f"{shape} {keys}" for shape, keys, _ in VIEWS])
def test_every_matrix_is_updated_as_if_alone(
    kind: Any, shape: tuple[int, ...], keys: Mapping[str, Any], divide: Divide
) -> None:
    """To the rounding of products in half precision, whose order may depend on how many matrices there are."""
    torch.manual_seed(1)
    start = torch.randn(shape, device="cuda")
    weight = nn.Parameter(start.clone())
    alone = [nn.Parameter(part.clone()) for part in divide(start)]
    optimizer, other = kind([{"params": [weight], **keys}]), kind(alone)
    for _ in range(3):
        weight.grad = torch.randn(shape, device="cuda")
        for parameter, part in zip(alone, divide(weight.grad), strict=True):
            parameter.grad = part.clone()
        optimizer.step()
        other.step()
    for part, parameter, before in zip(divide(weight.detach()), alone, divide(start), strict=True):
        moved = (parameter - before).norm()
        assert moved > 0
        assert (part - parameter).norm() <= 1e-2 * moved
