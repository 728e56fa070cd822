"""Tensors as operands hold the values that they were given, and the state of a step is the one that a parameter has."""

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map

from dion_core import NorDion2
from dion_core.buckets import MemberGradients
from dion_core.matrices import Matrices, stacked
from dion_core.operands import StepOperands, _DeviceTable
from dion_core.testing.loopback import loopback

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


def move(tensor: Tensor) -> Tensor:
    tensor.data = tensor.data.clone()
    return tensor


def transpose(tensor: Tensor) -> Tensor:
    tensor.data = tensor.data.t()
    return tensor


@pytest.mark.parametrize("role", ["parameters", "momentum", "gradients", "second_moment"])
@pytest.mark.parametrize("change", [move, transpose, torch.clone], ids=["moved", "transposed", "replaced"])
def test_addresses_follow_tensors_that_change(role: str, change: Callable[[Tensor], Tensor]) -> None:
    """Of square matrices, so that a transposed one has the same shape, at the same address."""
    parameters = [nn.Parameter(torch.randn(4, 4)) for _ in range(3)]
    optimizer = NorDion2(parameters)
    for parameter in parameters:
        parameter.grad = torch.randn(4, 4)
    operands = StepOperands(optimizer._plan.buckets)
    operands._tables = [_DeviceTable(optimizer._plan.buckets, [0])]  # as on a GPU

    def check() -> None:
        gradients = [parameter.grad for parameter in parameters]
        (found,) = operands.of_step(optimizer.state, [gradients])
        states = [optimizer.state[parameter] for parameter in parameters]
        of_states = {name: [state[name] for state in states] for name in ("momentum", "second_moment")}
        wanted = {"parameters": parameters, "gradients": gradients, **of_states}
        for name, tensors in wanted.items():
            by_address = getattr(found, name)
            if isinstance(by_address, Matrices):
                assert by_address.addresses.tolist() == [each.data_ptr() for each in by_address]
                assert all(each.stride() == by_address.stride for each in by_address)
            assert all(map(torch.equal, by_address, tensors))
            if name != "gradients":
                assert [each.data_ptr() for each in by_address] == [each.data_ptr() for each in tensors]

    for _ in range(3):
        check()
    if role == "parameters":
        if change is torch.clone:
            return  # a parameter is never replaced by another one
        change(parameters[1])
    elif role == "gradients":
        gradient = parameters[1].grad
        assert gradient is not None
        parameters[1].grad = change(gradient)
    else:
        if role == "second_moment" and change is transpose:
            return  # a column
        optimizer.state[parameters[1]][role] = change(optimizer.state[parameters[1]][role])
    for _ in range(3):
        check()
    optimizer.param_groups[0]["lr"] = 0.125
    (found,) = operands.of_step(optimizer.state, [[parameter.grad for parameter in parameters]])
    assert float(found.scalars["lr"]) == 0.125


def test_gradients_of_sharded_parameters_are_checked_where_they_differ() -> None:
    with loopback(2, "cpu") as (mesh, _):
        shards = [torch.randn(4, 6) for _ in range(3)]
        parameters = [nn.Parameter(DTensor.from_local(shard, mesh, [Shard(0)], run_check=False)) for shard in shards]
        members = NorDion2(parameters)._plan.members
        gradients = MemberGradients(members)
        for _ in range(3):
            given = [torch.randn(4, 6) for _ in parameters]
            for parameter, gradient in zip(parameters, given, strict=True):
                parameter.grad = DTensor(gradient, parameter._spec, requires_grad=False)
            assert all(map(torch.equal, gradients.of_step(), given))
        parameters[1].grad = None
        assert [gradient is None for gradient in gradients.of_step()] == [False, True, False]
        parameters[1].grad = DTensor.from_local(torch.randn(8, 3), mesh, [Shard(1)], run_check=False)
        with pytest.raises(ValueError, match="placements"):
            gradients.of_step()
        late = DTensor(AsyncCollectiveTensor(given[1]), parameters[1]._spec, requires_grad=False)
        parameters[1].grad = late
        assert [type(gradient) for gradient in gradients.of_step()] == [Tensor] * 3


def test_gradients_of_an_equal_spec_are_known_and_of_another_are_not() -> None:
    with loopback(2, "cpu") as (mesh, _):
        shards = [torch.randn(4, 6) for _ in range(2)]
        parameters = [nn.Parameter(DTensor.from_local(shard, mesh, [Shard(0)], run_check=False)) for shard in shards]
        gradients = MemberGradients(NorDion2(parameters)._plan.members)
        for placement in (Shard(0), Shard(0), Shard(1)):
            given = [torch.randn(4, 6) for _ in parameters]
            for parameter, gradient in zip(parameters, given, strict=True):
                parameter.grad = DTensor.from_local(gradient, mesh, [Shard(0)], run_check=False)
            if placement != Shard(0):
                parameters[1].grad = DTensor.from_local(torch.randn(8, 3), mesh, [placement], run_check=False)
                with pytest.raises(ValueError, match="placements"):
                    gradients.of_step()
            else:
                assert all(map(torch.equal, gradients.of_step(), given))


def test_a_sparse_gradient_of_an_equal_spec_is_refused() -> None:
    with loopback(2, "cpu") as (mesh, _):
        parameter = nn.Parameter(DTensor.from_local(torch.randn(4, 6), mesh, [Shard(0)], run_check=False))
        gradients = MemberGradients(NorDion2([parameter])._plan.members)
        parameter.grad = DTensor.from_local(torch.randn(4, 6), mesh, [Shard(0)], run_check=False)
        gradients.of_step()
        parameter.grad._local_tensor = torch.eye(4, 6).to_sparse()
        with pytest.raises(ValueError, match="sparse"):
            gradients.of_step()


def test_sharded_parameters_that_cease_to_require_gradients_are_noticed() -> None:
    with loopback(2, "cpu") as (mesh, _):
        shards = [torch.randn(4, 6) for _ in range(2)]
        parameters = [nn.Parameter(DTensor.from_local(shard, mesh, [Shard(0)], run_check=False)) for shard in shards]
        optimizer = NorDion2(parameters, transport="local")
        for parameter in parameters:
            parameter.grad = DTensor.from_local(torch.randn(4, 6), mesh, [Shard(0)], run_check=False)
        for frozen in (False, True, False):
            parameters[1].requires_grad_(not frozen)
            before = parameters[1].to_local().clone()
            optimizer.step()
            assert [member.number for member in optimizer._plan.members] == [0, 1][: 2 - frozen]
            assert torch.equal(before, parameters[1].to_local()) == frozen


def test_gradients_at_the_same_addresses_that_are_others() -> None:
    """Another dtype, other strides, another shape and a missing one are seen; addresses follow."""
    parameters = [nn.Parameter(torch.randn(4, 4, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = NorDion2(parameters)
    operands = StepOperands(optimizer._plan.buckets)
    operands._tables = [_DeviceTable(optimizer._plan.buckets, [0])]  # as on a GPU
    first, second = (torch.ones(4, 4, dtype=torch.bfloat16) for _ in range(2))
    plain = [first, second]
    halves = [each.view(torch.float16) for each in plain]
    turned, short = [each.t() for each in plain], [each[:2] for each in plain]
    for given in (plain, halves, plain, turned, plain, short, [first, halves[1]], [None, second], plain, [None, None]):
        for _ in range(2):
            (found,) = operands.of_step(optimizer.state, [given])
            made = found.gradients
            assert isinstance(made, Matrices)
            assert made.addresses.tolist() == [0 if each is None else each.data_ptr() for each in made]
            for each, old in zip(made, given, strict=True):
                assert (each is None) == (old is None)
                if old is not None:
                    assert torch.equal(each.double(), old.double())
                    assert (each.shape, each.stride(), each.dtype) == (made.shape, made.stride, made.dtype)


def test_addresses_of_a_state_whose_strides_differ_for_some_steps() -> None:
    parameters = [nn.Parameter(torch.randn(4, 4)) for _ in range(2)]
    optimizer = NorDion2(parameters)
    operands = StepOperands(optimizer._plan.buckets)
    operands._tables = [_DeviceTable(optimizer._plan.buckets, [0])]
    state, gradients = optimizer.state[parameters[1]], [torch.randn(4, 4) for _ in parameters]
    for change in (move, transpose, transpose, move, transpose, move, transpose):
        state["momentum"] = change(state["momentum"])
        for _ in range(2):
            (found,) = operands.of_step(optimizer.state, [gradients])
            wanted = [optimizer.state[parameter]["momentum"].data_ptr() for parameter in parameters]
            assert [each.data_ptr() for each in found.momentum] == wanted
            assert isinstance(found.momentum, Matrices) == state["momentum"].is_contiguous()
            if isinstance(found.momentum, Matrices):
                assert found.momentum.addresses.tolist() == wanted
