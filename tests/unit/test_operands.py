"""Tensors as operands hold the values that they were given, and the state of a step is the one that a parameter has."""

import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._pytree import tree_map

from dion_core import NorDion2
from dion_core.matrices import Matrices, stacked
from dion_core.operands import _DeviceTable

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


class Wrapper(Tensor):
    """A tensor that holds its values in another one, and so has no address, as quantized tensors have none."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapper":
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def unwrapped(value):
            return value.inner if isinstance(value, Wrapper) else value

        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        return func(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs or {}))


def test_c45_a_tensor_without_an_address_gets_no_kernel() -> None:
    start, gradient = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(8))
    wrapped, plain = nn.Parameter(Wrapper(start.clone())), nn.Parameter(start.clone())
    assert wrapped.data_ptr() == 0
    optimizer, other = NorDion2([wrapped]), NorDion2([plain])
    for _ in range(2):
        wrapped.grad, plain.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        other.step()
    assert torch.equal(wrapped.inner, plain)
    assert not torch.equal(plain, start)
    for one, by_address in ((optimizer, False), (other, True)):
        buckets = one._plan.buckets
        table = _DeviceTable(buckets, [0])
        (operands,) = table.of_step(one._operands.of_step(one.state, [[gradient]]))
        for role in ("parameters", "momentum", "gradients"):
            assert isinstance(getattr(operands, role), Matrices) == by_address


def test_gradients_are_not_kept() -> None:
    """Who sets them to None frees their memory, also where they were looked up by address."""
    parameter = nn.Parameter(torch.randn(SHAPE))
    optimizer = NorDion2([parameter])
    table = _DeviceTable(optimizer._plan.buckets, [0])
    for _ in range(2):
        parameter.grad = torch.randn(SHAPE)
        gone = weakref.ref(parameter.grad)
        optimizer.step()
        (operands,) = table.of_step(optimizer._operands.of_step(optimizer.state, [[parameter.grad]]))
        assert isinstance(operands.gradients, Matrices)
        assert operands.gradients[0] is gone()
        del operands
        parameter.grad = None
        assert gone() is None


def test_a_gradient_that_is_still_on_its_way_is_waited_for() -> None:
    plain, late = (nn.Parameter(torch.ones(SHAPE)) for _ in range(2))
    gradient = torch.randn(SHAPE, generator=torch.Generator().manual_seed(9))
    plain.grad, late.grad = gradient, AsyncCollectiveTensor(gradient)
    optimizer = NorDion2([plain, late])
    assert type(optimizer._plan.members[1].gradient()) is Tensor
    optimizer.step()
    assert torch.equal(plain, late)
