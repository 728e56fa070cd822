"""Tensors as operands hold the values that they were given, and the state of a step is the one that a parameter has."""

import pytest
import torch
from torch import Tensor, nn

from dion_core import NorDion2
from dion_core.matrices import stacked

SHAPE = (4, 8)


def like(tensor: Tensor, others: list[Tensor]) -> list[Tensor]:
    """Matrices of one form and the same values, in the dtype that holds all of them."""
    made = stacked([tensor, None, *others])
    first, missing, *rest = made
    assert missing is None
    assert made.starts == [first.data_ptr(), 0, *(each.data_ptr() for each in rest)]
    assert {(each.dtype, each.stride()) for each in (first, *rest)} == {(made.dtype, made.stride)}
    for given, each in zip((tensor, *others), (first, *rest), strict=True):
        assert torch.equal(each.double(), given.double())
    return [first, *rest]


@pytest.mark.parametrize("strides", [(0, 0), (0, 1), (1, 1)])
def test_a_first_one_whose_elements_share_memory(strides: tuple[int, int]) -> None:
    shared = torch.arange(11.0).as_strided(SHAPE, strides)
    like(shared, [torch.randn(SHAPE), torch.randn(SHAPE[::-1]).t()])
    assert like(shared, [shared])[0] is shared


def test_a_first_one_of_a_narrower_dtype() -> None:
    """fp16 has not the range of the others, and bf16 not its digits."""
    half, large = torch.full(SHAPE, 1.0 + 2**-10, dtype=torch.float16), torch.full(SHAPE, 1e6)
    like(half, [large])
    like(half, [torch.full(SHAPE, 1e6, dtype=torch.bfloat16)])
    like(large, [torch.full(SHAPE, 1 / 3, dtype=torch.float64)])


def test_a_state_that_was_replaced_as_a_whole() -> None:
    parameter = nn.Parameter(torch.ones(SHAPE))
    optimizer = NorDion2([parameter], fraction=1.0)
    parameter.grad = torch.randn(SHAPE)
    optimizer.step()
    for value in (2.0, 3.0):
        optimizer.state[parameter] = {
            "momentum": torch.full(SHAPE, value),
            "second_moment": torch.zeros(SHAPE[0], 1),
        }
        parameter.grad = torch.ones(SHAPE)
        optimizer.step()
        assert torch.equal(optimizer.state[parameter]["momentum"], torch.full(SHAPE, value + 1) * 0.95)
        assert optimizer.state[parameter]["second_moment"].all()


def test_a_tensor_that_lies_elsewhere_or_otherwise_is_noticed() -> None:
    square, other = torch.randn(4, 4), torch.randn(4, 4)
    operand = stacked([square, other])
    assert operand.holds([square, other])
    assert not operand.holds([other, square])
    assert not operand.holds([square, other.t()])  # at the same address
