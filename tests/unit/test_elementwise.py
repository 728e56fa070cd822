"""AdamW and Lion against torch.optim and a numpy loop; masks, missing and non-finite gradients."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

from dion_core.elementwise import adamw_, adamw_state, lion_, lion_state

Rule = Callable[..., None]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
OPTIONS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1, "maximize": False}
RULES = [
    pytest.param(lambda *lists, **options: adamw_(*lists, epsilon=1e-8, **options), adamw_state, id="adamw"),
    pytest.param(lion_, lion_state, id="lion"),
]
both_rules = pytest.mark.parametrize(("rule", "state_of"), RULES)
on_devices = pytest.mark.parametrize("device", DEVICES)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def flag(value: float, device: str = "cpu") -> Tensor:
    return torch.tensor(value, device=device)


def snapshot(param: Tensor, state: dict[str, Tensor]) -> list[Tensor]:
    return [param.clone(), *(value.clone() for value in state.values())]


def assert_same_bits(actual: list[Tensor], expected: list[Tensor]) -> None:
    for left, right in zip(actual, expected, strict=True):
        assert left.dtype == right.dtype
        left_bytes, right_bytes = (each.reshape(-1).view(torch.uint8) for each in (left, right))
        assert torch.equal(left_bytes, right_bytes)


def warmed_up(
    rule: Rule, state_of: Callable[[Tensor], dict[str, Tensor]], *shape: int, device: str = "cpu"
) -> tuple[Tensor, dict[str, Tensor]]:
    """A parameter after two ordinary steps, so that no state is zero."""
    param = randn(*shape, device=device)
    state = state_of(param)
    for step in range(2):
        rule([param], [randn(*shape, seed=step + 1, device=device)], [state], [flag(1.0, device)], **OPTIONS)
    return param, state


@on_devices
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
def test_adamw_equals_torch_step_by_step(dtype: torch.dtype, tolerance: float, maximize: bool, device: str) -> None:
    shapes = [(7, 5), (64,), (), (3, 2, 4)]
    params = [randn(*shape, dtype=dtype, device=device) for shape in shapes]
    theirs = [torch.nn.Parameter(param.clone()) for param in params]
    options = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1, "maximize": maximize}
    reference = torch.optim.AdamW(theirs, eps=1e-8, foreach=False, **options)
    states = [adamw_state(param) for param in params]
    for step in range(6):
        grads = [randn(*shape, seed=step + 1, dtype=dtype, device=device) for shape in shapes]
        for parameter, grad in zip(theirs, grads, strict=True):
            parameter.grad = grad.clone()
        reference.step()
        adamw_(params, grads, states, [flag(1.0, device)] * len(shapes), epsilon=1e-8, **options)
        for param, state, parameter in zip(params, states, theirs, strict=True):
            torch.testing.assert_close(param, parameter.detach(), rtol=tolerance, atol=tolerance)
            for key in ("exp_avg", "exp_avg_sq", "step"):
                expected = reference.state[parameter][key].to(device)
                torch.testing.assert_close(state[key], expected, rtol=tolerance, atol=tolerance)


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_adamw_equals_torch_fused_bit_for_bit(dtype: torch.dtype, device: str) -> None:
    # Half precision against the fused kernel: torch's other implementations round every intermediate result.
    # 320 elements: with a remainder, torch's fp32 kernel itself rounds the last elements in another way.
    param = randn(5, 64, dtype=dtype, device=device)
    parameter = torch.nn.Parameter(param.clone())
    reference = torch.optim.AdamW([parameter], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    state = adamw_state(param)
    for step in range(5):
        grad = randn(5, 64, seed=step + 1, dtype=dtype, device=device)
        parameter.grad = grad.clone()
        reference.step()
        adamw_([param], [grad], [state], [flag(1.0, device)], epsilon=1e-8, **OPTIONS)
        assert torch.equal(param, parameter)
        assert torch.equal(state["exp_avg"], reference.state[parameter]["exp_avg"])
        assert torch.equal(state["exp_avg_sq"], reference.state[parameter]["exp_avg_sq"])


@on_devices
@pytest.mark.parametrize("maximize", [False, True])
def test_lion_equals_a_numpy_loop(maximize: bool, device: str) -> None:
    param = randn(4, 3, dtype=torch.float64, device=device)
    state = lion_state(param)
    weight, momentum = param.cpu().numpy().copy(), np.zeros((4, 3))
    for step in range(6):
        grad = randn(4, 3, seed=step + 1, dtype=torch.float64, device=device)
        options = OPTIONS | {"maximize": maximize}
        lion_([param], [grad], [state], [flag(1.0, device)], **options)
        array = grad.cpu().numpy() * (-1 if maximize else 1)
        for row, column in np.ndindex(4, 3):
            mixed = 0.9 * momentum[row, column] + 0.1 * array[row, column]
            weight[row, column] = weight[row, column] * (1 - 0.01 * 0.1) - 0.01 * np.sign(mixed)
            momentum[row, column] = 0.95 * momentum[row, column] + 0.05 * array[row, column]
        np.testing.assert_allclose(param.cpu().numpy(), weight, rtol=1e-13, atol=1e-14)
        np.testing.assert_allclose(state["exp_avg"].cpu().numpy(), momentum, rtol=1e-13, atol=1e-14)


def test_lion_rounds_once() -> None:
    param = randn(33, dtype=torch.bfloat16)
    grad = randn(33, seed=1, dtype=torch.bfloat16)
    expected = (param.float() * (1 - 0.01 * 0.1) - 0.01 * grad.float().sign()).bfloat16()
    lion_([param], [grad], [lion_state(param)], [flag(1.0)], **OPTIONS)
    assert torch.equal(param, expected)


@on_devices
@both_rules
@pytest.mark.parametrize("shape", [(5,), (64,), (8, 9)])
def test_inactive_parameters_keep_their_bits(rule: Rule, state_of: Any, shape: tuple[int, ...], device: str) -> None:
    param, state = warmed_up(rule, state_of, *shape, device=device)
    before = snapshot(param, state)
    poisoned = [torch.full(shape, float(value), device=device) for value in ("nan", "inf")]
    for grad in (*poisoned, randn(*shape, device=device), None):
        rule([param], [grad], [state], [flag(0.0, device)], **OPTIONS)
        assert_same_bits(snapshot(param, state), before)


@both_rules
def test_an_inactive_parameter_keeps_even_a_nan_weight(rule: Rule, state_of: Any) -> None:
    param = torch.tensor([float("nan"), -0.0, float("inf")])
    state = state_of(param)
    before = snapshot(param, state)
    rule([param], [torch.ones(3)], [state], [flag(0.0)], **OPTIONS)
    assert_same_bits(snapshot(param, state), before)


@both_rules
def test_flags_mask_their_own_parameter_only(rule: Rule, state_of: Any) -> None:
    flags = torch.tensor([1.0, 0.0, 1.0])
    params = [randn(6, seed=seed) for seed in range(3)]
    states = [state_of(param) for param in params]
    before = snapshot(params[1], states[1])
    alone = params[2].clone()
    alone_state = state_of(alone)
    grads: list[Tensor | None] = [randn(6, seed=9), randn(6, seed=8), randn(6, seed=7)]
    rule(params, grads, states, list(flags.unbind()), **OPTIONS)
    rule([alone], grads[2:], [alone_state], [flag(1.0)], **OPTIONS)
    assert_same_bits(snapshot(params[1], states[1]), before)
    assert_same_bits(snapshot(params[2], states[2]), snapshot(alone, alone_state))
    assert not torch.equal(params[0], randn(6, seed=0))


@both_rules
def test_a_shared_flag_equals_one_flag_each(rule: Rule, state_of: Any) -> None:
    shared, own = ([randn(70, seed=0), randn(3, 3, seed=1).half()] for _ in range(2))
    shared_states, own_states = ([state_of(param) for param in params] for params in (shared, own))
    grads = [randn(70, seed=2), None]
    rule(shared, grads, shared_states, [flag(1.0)] * 2, **OPTIONS)
    rule(own, grads, own_states, [flag(1.0), flag(1.0)], **OPTIONS)
    for left, left_state, right, right_state in zip(shared, shared_states, own, own_states, strict=True):
        assert_same_bits(snapshot(left, left_state), snapshot(right, right_state))


@both_rules
def test_a_missing_gradient_of_an_active_parameter_is_zero(rule: Rule, state_of: Any) -> None:
    results = []
    for grad in (None, torch.zeros(4, 5)):
        param, state = warmed_up(rule, state_of, 4, 5)
        rule([param], [grad], [state], [flag(1.0)], **OPTIONS)
        results.append(snapshot(param, state))
    assert_same_bits(*results)


@both_rules
def test_a_zero_gradient_on_a_fresh_state_only_decays(rule: Rule, state_of: Any) -> None:
    param = torch.full((2, 3), 2.0)
    options = OPTIONS | {"lr": 0.1, "weight_decay": 0.5}
    rule([param], [None], [state_of(param)], [flag(1.0)], **options)
    torch.testing.assert_close(param, torch.full((2, 3), 2.0 * 0.95))


@on_devices
@both_rules
def test_non_finite_elements_count_as_zero(rule: Rule, state_of: Any, device: str) -> None:
    bad = randn(4, 5, seed=5, device=device)
    bad[0, 1], bad[2, 2], bad[3, 4] = float("nan"), float("inf"), float("-inf")
    original = bad.clone()
    results = []
    for grad in (bad, torch.where(torch.isfinite(bad), bad, 0.0)):
        param, state = warmed_up(rule, state_of, 4, 5, device=device)
        rule([param], [grad], [state], [flag(1.0, device)], **OPTIONS)
        results.append(snapshot(param, state))
    assert_same_bits(*results)
    assert all(torch.isfinite(value).all() for value in results[0])
    assert_same_bits([bad], [original])


@both_rules
def test_a_gradient_that_overflows_in_the_cast_counts_as_zero(rule: Rule, state_of: Any) -> None:
    param = torch.ones(3, dtype=torch.float16)
    state = state_of(param)
    rule([param], [torch.tensor([1e6, 0.5, -1e9])], [state], [flag(1.0)], **OPTIONS)
    assert torch.isfinite(param).all()
    assert state["exp_avg"].tolist()[0] == 0
    assert state["exp_avg"].tolist()[2] == 0


@on_devices
@both_rules
@pytest.mark.parametrize(
    ("param_dtype", "grad_dtype"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float64, torch.float16)],
)
def test_mixed_dtypes(
    rule: Rule, state_of: Any, param_dtype: torch.dtype, grad_dtype: torch.dtype, device: str
) -> None:
    param = randn(6, 3, dtype=param_dtype, device=device)
    same = param.clone()
    state, same_state = state_of(param), state_of(same)
    grad = randn(6, 3, seed=1, dtype=grad_dtype, device=device)
    neighbour = randn(4, device=device)
    states = [state, state_of(neighbour)]
    rule([param, neighbour], [grad, None], states, [flag(1.0, device)] * 2, **OPTIONS)
    rule([same], [grad.to(param_dtype)], [same_state], [flag(1.0, device)], **OPTIONS)
    assert_same_bits(snapshot(param, state), snapshot(same, same_state))
    assert state["exp_avg"].dtype == param_dtype


@on_devices
@both_rules
@pytest.mark.parametrize("lr_device", DEVICES)
@pytest.mark.parametrize("lr_dtype", [torch.float32, torch.float64])
def test_tensor_lr(rule: Rule, state_of: Any, lr_dtype: torch.dtype, lr_device: str, device: str) -> None:
    if lr_device == "cuda" and device == "cpu":
        pytest.skip("a rate on the GPU for parameters on the CPU would wait for the GPU")
    results = []
    for lr in (0.01, torch.tensor(0.01, dtype=lr_dtype, device=lr_device)):
        param, state = warmed_up(rule, state_of, 8, 8, device=device)
        grad = randn(8, 8, seed=4, device=device)
        rule([param], [grad], [state], [flag(1.0, device)], **OPTIONS | {"lr": lr})
        results.append(param)
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


@both_rules
@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)])
def test_lr_zero_leaves_weights_and_moves_state(rule: Rule, state_of: Any, lr: float | Tensor) -> None:
    param = randn(3, 5)
    state = state_of(param)
    rule([param], [randn(3, 5, seed=1)], [state], [flag(1.0)], **OPTIONS | {"lr": lr})
    assert torch.equal(param, randn(3, 5))
    assert state["exp_avg"].abs().sum() > 0


@on_devices
@both_rules
def test_empty_tensors_and_lists(rule: Rule, state_of: Any, device: str) -> None:
    rule([], [], [], [], **OPTIONS)
    empty, other = torch.empty(0, 4, device=device), randn(3, device=device)
    states = [state_of(empty), state_of(other)]
    rule([empty, other], [torch.empty(0, 4, device=device), None], states, [flag(1.0, device)] * 2, **OPTIONS)
    assert empty.shape == (0, 4)
    assert torch.isfinite(other).all()
    assert all(value.device == empty.device for state in states for value in state.values())


@both_rules
def test_lists_of_different_lengths_are_refused(rule: Rule, state_of: Any) -> None:
    param = randn(3)
    with pytest.raises(ValueError, match="zip"):
        rule([param], [None], [state_of(param)], [], **OPTIONS)


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t()


def _every_second_column(tensor: Tensor) -> Tensor:
    wide = torch.full((tensor.shape[0], 2 * tensor.shape[1]), 7.0, device=tensor.device)
    wide[:, ::2] = tensor
    return wide[:, ::2]


@on_devices
@both_rules
@pytest.mark.parametrize("layout", [_transposed, _every_second_column])
@pytest.mark.parametrize("shape", [(8, 16), (5, 3)])
def test_strides_do_not_matter(
    rule: Rule, state_of: Any, layout: Callable[[Tensor], Tensor], shape: tuple[int, int], device: str
) -> None:
    expected, expected_state = warmed_up(rule, state_of, *shape, device=device)
    param, state = warmed_up(rule, state_of, *shape, device=device)
    param = layout(param)  # the state stays contiguous, as after a load
    strides = param.stride()
    grad = torch.ones(1, device=device).expand(shape)
    rule([param], [grad], [state], [flag(1.0, device)], **OPTIONS)
    rule([expected], [grad], [expected_state], [flag(1.0, device)], **OPTIONS)
    assert param.stride() == strides
    assert_same_bits(snapshot(param, state), snapshot(expected, expected_state))
    if param._base is not None and param._base.shape[1] == 2 * shape[1]:
        assert (param._base[:, 1::2] == 7.0).all()


@both_rules
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bits_do_not_depend_on_where_a_shard_ends(rule: Rule, state_of: Any, dtype: torch.dtype) -> None:
    # World-size invariance of sharded parameters: the same elements get the same bits whole and cut in two.
    grads = [randn(61, seed=step + 1, dtype=dtype) for step in range(3)]
    for cut in range(0, 62, 3):
        results = []
        for bounds in ([(0, 61)], [(0, cut), (cut, 61)]):
            params = [randn(61, dtype=dtype)[start:stop].clone() for start, stop in bounds]
            states = [state_of(param) for param in params]
            for grad in grads:
                pieces = [grad[start:stop] for start, stop in bounds]
                rule(params, pieces, states, [flag(1.0)] * len(bounds), **OPTIONS)
            moments = [key for key in states[0] if key != "step"]
            whole = [torch.cat([state[key] for state in states]) for key in moments]
            results.append([torch.cat(params), *whole])
        assert_same_bits(*results)


def test_state_of_a_parameter() -> None:
    param = torch.nn.Parameter(_transposed(randn(4, 6)).bfloat16())
    state = adamw_state(param)
    assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
    assert set(lion_state(param)) == {"exp_avg"}
    assert (state["step"].shape, state["step"].dtype) == ((), torch.float32)
    assert not any(value.requires_grad for value in state.values())
    for value in (state["exp_avg"], state["exp_avg_sq"], lion_state(param)["exp_avg"]):
        assert (value.dtype, value.shape, value.stride()) == (param.dtype, param.shape, param.stride())
        assert not value.any()


def test_state_of_a_dtensor_is_a_dtensor() -> None:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = DeviceMesh("cpu", [0, 1])
        param = DTensor.from_local(randn(4, 6), mesh, [Replicate()], run_check=False)
        state = adamw_state(param)
        for value in (state["exp_avg"], state["exp_avg_sq"], lion_state(param)["exp_avg"]):
            assert isinstance(value, DTensor)
            assert value.placements == param.placements
        assert type(state["step"]) is Tensor
    finally:
        torch.distributed.destroy_process_group()


def test_parameters_that_require_gradients_are_stepped_in_place() -> None:
    parameter = torch.nn.Parameter(randn(3, 3))
    adamw_([parameter], [torch.ones(3, 3)], [adamw_state(parameter)], [flag(1.0)], epsilon=1e-8, **OPTIONS)
    lion_([parameter], [torch.ones(3, 3)], [lion_state(parameter)], [flag(1.0)], **OPTIONS)
    assert not torch.equal(parameter, randn(3, 3))
