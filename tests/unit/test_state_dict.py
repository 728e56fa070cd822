"""State dicts: what they hold, that nothing is lost on the way, and that what does not fit changes nothing."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dion_core
from dion_core import Dion2, Muon, NorDion2
from dion_core.newton_schulz import NewtonSchulz
from tests.small_model import make_batches, make_model, make_optimizer, train_model
from tests.training import OPTIMIZERS

State = dict[str, Any]


def trained(name: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make_model()
    optimizer = make_optimizer(model, name, **options)
    train_model(model, optimizer, make_batches(4))
    return model, optimizer


def tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Weights and state."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [each for one in parameters for each in (one.detach(), *optimizer.state[one].values())]


def through_bytes(state: State) -> State:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


WAYS: dict[str, Callable[[State], State]] = {
    "weights_only": through_bytes,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_c42_a_state_dict_goes_through_bytes_and_copies(name: str, way: str) -> None:
    options = {"momentum_dtype": torch.float32, "orthogonalizer": NewtonSchulz(compute_dtype=torch.float64)}
    model, optimizer = trained(name, **options)
    saved = WAYS[way](optimizer.state_dict())
    fresh_model = make_model()
    fresh_model.load_state_dict(model.state_dict())
    fresh = make_optimizer(fresh_model, name, **options)
    fresh.load_state_dict(saved)
    for one, other in ((model, optimizer), (fresh_model, fresh)):
        train_model(one, other, make_batches(4))
    for one, other in zip(tensors(optimizer), tensors(fresh), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert fresh.param_groups[0]["momentum_dtype"] is torch.float32


def test_c36_a_wider_momentum_than_the_weight_keeps_its_bits() -> None:
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer, resumed = (Muon([weight], momentum_dtype=torch.float32) for _ in range(2))
    optimizer.state[weight]["momentum"].fill_(1.001)
    resumed.load_state_dict(through_bytes(optimizer.state_dict()))
    momentum = resumed.state[weight]["momentum"]
    assert momentum.dtype == torch.float32
    assert torch.equal(momentum, torch.full((4, 4), 1.001))


VERSIONS = {
    "int": int,
    "numpy": np.int64,
    "array": np.asarray,
    "tensor": torch.tensor,
    "float": float,
}


@pytest.mark.parametrize("kind", VERSIONS)
def test_the_version_of_the_layout_comes_back_in_any_form(kind: str) -> None:
    _, optimizer = trained("NorDion2")
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        assert group["layout_version"] == 1
        group["layout_version"] = VERSIONS[kind](1)
    optimizer.load_state_dict(saved)
    assert [type(group["layout_version"]) for group in optimizer.param_groups] == [int, int]
    saved["param_groups"][1]["layout_version"] = VERSIONS[kind](2)
    with pytest.raises(ValueError, match=r"group 1 was saved with layout_version=2, .* has 1: use the version"):
        optimizer.load_state_dict(saved)


def drop(key: str) -> Callable[[State], object]:
    return lambda saved: [group.pop(key) for group in saved["param_groups"]]


@pytest.mark.parametrize(
    "key", ["layout_version", "carried", "lr", "scale", "nonesuch", "algorithm", "betas", "fraction"]
)
def test_group_keys_that_are_missing_stay_as_they_are(key: str) -> None:
    model, optimizer = trained("NorDion2")
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        group.pop(key, None)
    before = [dict(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(saved)
    for group, old in zip(optimizer.param_groups, before, strict=True):
        assert {name: value for name, value in group.items() if name != "params"} == {
            name: value for name, value in old.items() if name != "params"
        }
    train_model(model, optimizer, make_batches(4))


REFUSED: dict[str, tuple[Callable[[State], object], str]] = {
    "an older second moment": (
        lambda saved: saved["state"][0].update(second_moment=torch.ones(17)),
        r"0.weight: the saved state 'second_moment' has shape \(17,\).*load the weights alone",
    ),
    "a key too few": (lambda saved: saved["state"][1].pop("momentum"), "3.weight: .*are needed; build the optimizer"),
    "a key too many": (lambda saved: saved["state"][1].update(q=torch.ones(2)), "3.weight: .*'q'"),
    "an option": (lambda saved: saved["param_groups"][0].update(fraction=2.0), "fraction=2.0"),
    "a dtype": (lambda saved: saved["param_groups"][0].update(wire_dtype="torch.int8"), "wire_dtype=torch.int8"),
    "no dtype": (lambda saved: saved["param_groups"][0].update(momentum_dtype="torch.save"), "momentum_dtype="),
    "a group too few": (
        lambda saved: saved["param_groups"].pop(),
        r"groups of \[2\] parameters, the optimizer of \[2, 4\]",
    ),
    "a parameter too few": (lambda saved: saved["param_groups"][1]["params"].pop(), r"groups of \[2, 3\]"),
    "a version": (lambda saved: saved["param_groups"][1].update(layout_version=0), "layout_version=0"),
}


@pytest.mark.parametrize("change", REFUSED)
def test_c43_what_does_not_fit_is_refused_before_anything_is_touched(change: str) -> None:
    alter, message = REFUSED[change]
    (model, optimizer), (twin_model, twin) = trained("NorDion2"), trained("NorDion2")
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        for value in state.values():
            value.add_(1)
    saved["param_groups"][0]["lr"] = 7.0
    alter(saved)
    groups, addresses = list(map(id, optimizer.param_groups)), [each.data_ptr() for each in tensors(optimizer)]
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert list(map(id, optimizer.param_groups)) == groups
    assert [each.data_ptr() for each in tensors(optimizer)] == addresses
    assert optimizer.param_groups[0]["lr"] == 0.02
    train_model(model, optimizer, make_batches(4))
    train_model(twin_model, twin, make_batches(4))
    assert all(map(torch.equal, tensors(optimizer), tensors(twin)))


def test_groups_are_plain_data_and_stay_what_they_were() -> None:
    orthogonalizer = NewtonSchulz(compute_dtype=torch.float64)
    _, optimizer = trained("NorDion2", momentum_dtype=torch.float32, wire_dtype=None, orthogonalizer=orthogonalizer)
    (saved, _) = optimizer.state_dict()["param_groups"]
    assert saved["momentum_dtype"] == "torch.float32"
    assert saved["wire_dtype"] is None
    assert saved["orthogonalizer"] == repr(orthogonalizer)
    assert optimizer.param_groups[0]["orthogonalizer"] is orthogonalizer
    plain = (int, float, str, tuple, list, type(None))
    for group in optimizer.state_dict()["param_groups"]:
        assert all(isinstance(value, plain) for value in group.values())


def test_an_orthogonalizer_that_text_cannot_hold_stays_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    saved = trained("Muon", orthogonalizer=NewtonSchulz(compute_dtype=torch.float64))[1].state_dict()
    _, alike = trained("Muon", orthogonalizer=NewtonSchulz(compute_dtype=torch.float64))
    alike.load_state_dict(saved)
    assert "orthogonalizer" not in caplog.text
    _, other = trained("Muon", orthogonalizer="quintic")
    other.load_state_dict(saved)
    assert other.param_groups[0]["orthogonalizer"] == "quintic"
    assert "group 0 was saved with orthogonalizer=NewtonSchulz(" in caplog.text
    named = trained("Muon", orthogonalizer="auto")[1].state_dict()
    other.load_state_dict(named)
    assert other.param_groups[0]["orthogonalizer"] == "auto"


def test_what_others_put_into_groups_is_kept_and_what_json_can_hold_is_carried() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    first = Dion2([{"params": [weight], "note": "a", "pair": (1, 2), "rate": torch.tensor(0.5), "object": {1, 2}}])
    saved = first.state_dict()["param_groups"][0]
    assert saved["pair"] == (1, 2)
    assert saved["object"] == {1, 2}
    bare = {"state": {}, "param_groups": [{"params": [0], "carried": saved["carried"]}]}
    second = Dion2([weight])
    second.load_state_dict(bare)
    group = second.param_groups[0]
    assert (group["note"], group["rate"]) == ("a", 0.5)
    assert "pair" not in group
    assert "object" not in group
    assert (group["carried"], group["lr"]) == ("", 0.02)


def test_rates_go_between_numbers_and_tensors() -> None:
    """A checkpoint has numbers, which no device and no form of the live rate matters to; the live form stays."""
    weight = nn.Parameter(torch.ones(4, 4))
    tensors_ = Muon([weight], lr=torch.tensor(0.1), weight_decay=torch.tensor(0.5, dtype=torch.float64))
    numbers = Muon([weight], lr=0.25)
    saved = through_bytes(tensors_.state_dict())
    assert saved["param_groups"][0]["lr"] == float(torch.tensor(0.1))
    assert type(saved["param_groups"][0]["lr"]) is float
    numbers.load_state_dict(saved)
    assert type(numbers.param_groups[0]["lr"]) is float
    rate = tensors_.param_groups[0]["lr"]
    rate.fill_(3.0)
    tensors_.load_state_dict(saved)
    group = tensors_.param_groups[0]
    assert torch.equal(group["lr"], torch.tensor(0.1))
    assert torch.equal(group["weight_decay"], torch.tensor(0.5, dtype=torch.float64))
    assert rate == 3.0
    theirs = torch.optim.SGD([weight], lr=torch.tensor(0.125)).state_dict()
    numbers.load_state_dict({"state": {}, "param_groups": [{"lr": theirs["param_groups"][0]["lr"], "params": [0]}]})
    assert torch.equal(numbers.param_groups[0]["lr"], torch.tensor(0.125))


def test_hooks_see_what_is_saved_and_change_what_is_loaded() -> None:
    _, optimizer = trained("NorDion2", momentum_dtype=torch.float32)
    seen: list[str] = []

    def after_saving(_: torch.optim.Optimizer, state: State) -> State:
        seen.append(state["param_groups"][0]["momentum_dtype"])
        return {**state, "mine": 1}

    def before_loading(_: torch.optim.Optimizer, state: State) -> State:
        seen.append("before loading")
        doubled = {n: {k: v * 2 if k == "momentum" else v for k, v in of.items()} for n, of in state["state"].items()}
        return {"state": doubled, "param_groups": state["param_groups"]}

    optimizer.register_state_dict_pre_hook(lambda _: seen.append("before saving"))
    optimizer.register_state_dict_post_hook(after_saving)
    optimizer.register_load_state_dict_pre_hook(before_loading)
    optimizer.register_load_state_dict_post_hook(lambda one: seen.append(f"after loading {one is optimizer}"))
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["mine"] == 1
    optimizer.load_state_dict(saved)
    assert seen == ["before saving", "torch.float32", "before loading", "after loading True"]
    for number, state in optimizer.state_dict()["state"].items():
        if "momentum" in state:
            assert torch.equal(state["momentum"], saved["state"][number]["momentum"] * 2)
    optimizer.register_load_state_dict_pre_hook(lambda _, state: state["param_groups"][0].update(lr=0.5))
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_keys_are_there_from_construction_on_for_all_that_is_trained() -> None:
    used, unused, frozen = (nn.Parameter(torch.ones(4, 4)) for _ in range(3))
    frozen.requires_grad_(False)
    optimizer = NorDion2([used, unused, frozen])
    keys = {number: set(state) for number, state in optimizer.state_dict()["state"].items()}
    assert keys == {number: {"momentum", "second_moment", "waited"} for number in (0, 1)}
    used.grad = torch.eye(4)
    optimizer.step()
    used.requires_grad_(False)
    optimizer.step()
    after = optimizer.state_dict()["state"]
    assert {number: set(state) for number, state in after.items()} == keys
    assert after[0]["momentum"].any()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_waits_on_one_rank(name: str) -> None:
    """Waiting times of another number of ranks do not outlive the load, since nothing defers rows here."""
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = getattr(dion_core, name)([weight])
    saved = copy.deepcopy(optimizer.state_dict())
    if "Dion" not in name:
        assert "waited" not in saved["state"][0]
        return
    saved["state"][0]["waited"].fill_(3)
    optimizer.load_state_dict(saved)
    assert not optimizer.state[weight]["waited"].any()
    assert saved["state"][0]["waited"].all()
