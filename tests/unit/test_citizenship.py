"""The optimizers are optimizers of torch: schedulers, hooks, profiler, compiled models, checkpointing, clipping."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR
from torch.utils.checkpoint import checkpoint_sequential

import dion_core
from dion_core import Dion2, Muon, NorDion2
from tests.small_model import make_batches, make_model, make_optimizer, train_model
from tests.training import OPTIMIZERS

STEPS = 9


class AllOnes:
    """An orthogonalizer whose every result is 1: a step then moves a weight by its learning rate."""

    def __call__(self, matrices: Tensor) -> Tensor:
        return torch.ones_like(matrices)


def sequential(optimizer: torch.optim.Optimizer) -> LRScheduler:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 5)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5], gamma=0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=8, power=2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, [0.01, 1e-5], [0.02, 1e-4], step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [0.02, 1e-4], total_steps=STEPS + 1),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SWALR": lambda o: SWALR(o, swa_lr=0.05, anneal_epochs=4),
    "SequentialLR": sequential,
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def test_the_table_has_every_scheduler_of_torch() -> None:
    known = {name for name in lr_scheduler.__all__ if name not in ("LRScheduler",)} | {"SWALR"}
    assert known == set(SCHEDULERS)


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_c39_each_step_uses_the_rate_of_that_step(name: str, as_tensor: bool) -> None:
    """Two groups with rates of their own; what torch's AdamW is given by the same scheduler is what a step uses."""

    def rate(value: float) -> float | Tensor:
        return torch.tensor(value, dtype=torch.float64) if as_tensor else value

    def groups() -> list[dict[str, Any]]:
        weights = [nn.Parameter(torch.zeros(4, 4, dtype=torch.float64)) for _ in range(2)]
        return [{"params": [weight], "lr": rate(lr)} for weight, lr in zip(weights, (0.02, 1e-5), strict=True)]

    theirs = torch.optim.AdamW(groups(), betas=(0.9, 0.95))
    ours = Muon(groups(), weight_decay=0.0, scale=None, orthogonalizer=AllOnes())
    schedulers = [SCHEDULERS[name](theirs), SCHEDULERS[name](ours)]
    moved = [0.0, 0.0]
    for _ in range(STEPS):
        for number, (group, wanted) in enumerate(zip(ours.param_groups, theirs.param_groups, strict=True)):
            assert float(group["lr"]) == float(wanted["lr"])
            assert group["betas"] == wanted["betas"]  # two schedulers cycle these
            (weight,) = group["params"]
            weight.grad = torch.ones_like(weight)
            moved[number] += float(group["lr"])
        theirs.step()
        ours.step()
        for group, wanted in zip(ours.param_groups, moved, strict=True):
            assert torch.allclose(group["params"][0], torch.full((4, 4), -wanted, dtype=torch.float64), rtol=1e-12)
        for scheduler in schedulers:
            scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    assert len({float(lr) for lr in moved}) == 2


def test_c39_floats_and_tensors_may_replace_each_other() -> None:
    weight = nn.Parameter(torch.zeros(4, 4))
    optimizer = Muon([weight], lr=0.5, weight_decay=0.0, scale=None, orthogonalizer=AllOnes())
    for rate in (0.5, torch.tensor(0.25), 0.125, torch.tensor(1.0, dtype=torch.float64)):
        before = weight.detach().clone()
        optimizer.param_groups[0]["lr"] = rate
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert torch.equal(before - weight, torch.full((4, 4), float(rate)))


@pytest.mark.parametrize("algorithm", ["matrix", "adamw", "lion"])
@pytest.mark.parametrize("key", ["lr", "weight_decay", "momentum", "beta2"])
def test_a_rate_that_is_set_to_a_tensor_with_a_dimension_is_refused_as_at_construction(
    key: str, algorithm: str
) -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    wrong, message = torch.tensor([0.5]), rf"{key}=tensor\(\[0\.5000\]\) in .*parameter group.* is not allowed"
    with pytest.raises(ValueError, match=message):
        NorDion2([{"params": [weight], "algorithm": algorithm, "lr": 0.1, key: wrong}])
    optimizer = NorDion2([{"params": [weight], "algorithm": algorithm, "lr": 0.1}])
    before = optimizer.param_groups[0][key]
    optimizer.param_groups[0][key] = wrong
    weight.grad = torch.eye(4)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert torch.equal(weight, torch.ones(4, 4))
    optimizer.param_groups[0][key] = before
    optimizer.step()
    assert not torch.equal(weight, torch.ones(4, 4))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rate_and_decay_as_tensors_give_the_weights_that_numbers_give(name: str) -> None:
    results = []
    for kind in (float, lambda value: torch.tensor(value, dtype=torch.float64)):
        model = make_model()
        optimizer = make_optimizer(model, name)
        for group in optimizer.param_groups:
            group.update(lr=kind(0.02), weight_decay=kind(0.5))
        train_model(model, optimizer, make_batches(4))
        results.append([parameter.detach() for parameter in model.parameters()])
    assert all(torch.allclose(one, other, rtol=1e-12) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_hooks_of_a_step(name: str) -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    weight.grad = torch.eye(4)
    optimizer = getattr(dion_core, name)([weight])
    seen: list[str] = []

    def note(when: str) -> Callable[..., None]:
        return lambda one, *_: seen.append(f"{when} {one is optimizer} {bool(weight.eq(1).all())}")

    pre = optimizer.register_step_pre_hook(note("before"))
    optimizer.register_step_post_hook(note("after"))
    optimizer.step()
    assert seen == ["before True True", "after True False"]
    pre.remove()
    optimizer.step(lambda: seen.append("closure"))
    assert seen[2:] == ["closure", "after True False"]


def test_the_profiler_names_the_step() -> None:
    model = make_model()
    for name in OPTIMIZERS:
        optimizer = make_optimizer(model, name)
        train_model(model, optimizer, make_batches(4, num_steps=1))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            train_model(model, optimizer, make_batches(4, num_steps=1))
        names = {event.name for event in profile.events()}
        assert f"Optimizer.step#{name}.step" in names
        assert f"Optimizer.zero_grad#{name}.zero_grad" in names


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_group_added_in_the_middle_of_a_run(name: str) -> None:
    """The old group goes on as if alone, the new one starts as in an optimizer of its own, and a scheduler has both."""
    start = torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(50))

    def gradients(step: int) -> Tensor:
        return torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(60 + step))

    together = [nn.Parameter(value.clone()) for value in start]
    alone = [nn.Parameter(value.clone()) for value in start]
    optimizer = getattr(dion_core, name)([together[0]])
    others = [getattr(dion_core, name)([alone[0]])]
    for step in range(4):
        if step == 2:
            added = [({}, 1), ({"algorithm": "adamw", "lr": 0.003}, 2)]
            for options, number in added:
                optimizer.add_param_group({"params": [together[number]], **options})
                others.append(getattr(dion_core, name)([{"params": [alone[number]], **options}]))
        for number, gradient in enumerate(gradients(step)):
            together[number].grad = alone[number].grad = gradient
        optimizer.step()
        for other in others:
            other.step()
    assert all(map(torch.equal, together, alone))
    for one, other, theirs in zip(together, alone, others, strict=True):
        assert optimizer.state[one].keys() == theirs.state[other].keys()
        assert all(torch.equal(value, theirs.state[other][key]) for key, value in optimizer.state[one].items())
    resumed = getattr(dion_core, name)(
        [{"params": [together[0]]}, {"params": [together[1]]}, {"params": [together[2]], "algorithm": "adamw"}]
    )
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [group["lr"] for group in resumed.param_groups] == [0.02, 0.02, 0.003]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_compiled_model_and_a_checkpointed_one_train_like_the_plain_one(name: str) -> None:
    inputs, targets = make_batches(8)
    plain = make_model()
    train_model(plain, make_optimizer(plain, name), (inputs, targets))
    compiled = make_model()
    optimizer = make_optimizer(compiled, name)
    train_model(torch.compile(compiled, backend="aot_eager"), optimizer, (inputs, targets))
    outside = make_model()
    wrapped = torch.compile(outside, backend="aot_eager")
    train_model(wrapped, make_optimizer(wrapped, name), (inputs, targets))  # from the parameters of the compiled one
    recomputed = make_model()
    optimizer = make_optimizer(recomputed, name)
    for batch, wanted in zip(inputs, targets, strict=True):
        found = checkpoint_sequential(recomputed, 2, batch.requires_grad_(), use_reentrant=False)
        nn.functional.mse_loss(found, wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
    for other in (compiled, outside, recomputed):
        for one, two in zip(plain.parameters(), other.parameters(), strict=True):
            assert torch.allclose(one, two, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_clipped_gradients_of_all_groups(name: str) -> None:
    """Clipping scales all gradients alike; what is AdamW's feels it, an orthogonalized first update does not."""
    results = []
    for limit in (1e-3, 1e9):
        model = make_model()
        optimizer = make_optimizer(model, name, weight_decay=0.0)
        inputs, targets = make_batches(8, num_steps=1)
        nn.functional.mse_loss(model(inputs[0]), targets[0]).backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), limit, error_if_nonfinite=True))
        optimizer.step()
        results.append((norm, optimizer, dict(model.named_parameters())))
    (norm, clipped, small), (same_norm, free, large) = results
    assert norm == same_norm > 1e-3
    assert torch.allclose(small["0.weight"], large["0.weight"], rtol=1e-4)
    for one, other in ((small["0.weight"], large["0.weight"]), (small["0.bias"], large["0.bias"])):
        key = "momentum" if one.ndim == 2 else "exp_avg"
        ratio = clipped.state[one][key].norm() / free.state[other][key].norm()
        assert float(ratio) == pytest.approx(1e-3 / norm, rel=1e-4)


def test_it_prints_and_has_the_defaults_of_torch() -> None:
    optimizer = NorDion2([nn.Parameter(torch.ones(4, 4))], lr=0.5)
    assert repr(optimizer).startswith("NorDion2 (\nParameter Group 0\n")
    assert optimizer.defaults["lr"] == 0.5
    assert isinstance(optimizer, torch.optim.Optimizer)


class Marked(nn.Parameter):
    """A tensor of another class with torch's own behaviour."""


class Logged(Tensor):
    """A tensor whose operations go through its class."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("algorithm", ["matrix", "adamw", "lion"])
def test_c45_parameters_of_a_subclass_get_the_update_of_plain_ones(name: str, algorithm: str) -> None:
    start, gradient = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(70))
    results = []
    for kind in (nn.Parameter, Marked, lambda value: value.as_subclass(Logged).requires_grad_()):
        weight = kind(start.clone())
        other = nn.Parameter(start.clone())
        optimizer = getattr(dion_core, name)([{"params": [weight, other], "algorithm": algorithm}])
        for _ in range(3):
            weight.grad = other.grad = gradient
            optimizer.step()
        assert torch.equal(weight.detach().as_subclass(Tensor), other)
        results.append(other.detach())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert not torch.equal(results[0], start)


def test_empty_groups_and_tensors_without_elements_step() -> None:
    empty, weight = nn.Parameter(torch.zeros(0, 4)), nn.Parameter(torch.ones(4, 4))
    optimizer = Dion2([{"params": [empty, weight]}, {"params": [], "algorithm": "lion", "lr": 0.1}])
    empty.grad, weight.grad = torch.zeros(0, 4), torch.eye(4)
    optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.step()
    assert optimizer.state[empty]["momentum"].shape == (0, 4)
    assert not torch.equal(weight, torch.ones(4, 4))
