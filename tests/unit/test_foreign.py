"""State dicts of other optimizers: a run that is continued here has the momentum that theirs would have had."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dion_core
from dion_core import Dion2, Muon, NorMuon, import_state_dict

BEFORE, AFTER = 3, 4
SHAPES = ((16, 12), (8, 20))


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(draw(shape, seed)) for seed, shape in enumerate(shapes)]


def set_gradients(given: list[nn.Parameter], step: int) -> None:
    for place, parameter in enumerate(given):
        parameter.grad = draw(tuple(parameter.shape), 10 * (step + 1) + place)


def copies(given: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(each.detach().clone()) for each in given]


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.95, 0.6])
def test_a_run_of_torchs_muon_is_continued(momentum: float, nesterov: bool) -> None:
    """Its buffer is an average of gradients, ours a decayed sum: the same up to a factor, before and after."""
    theirs_given = parameters(*SHAPES)
    options = {"lr": 0.01, "momentum": momentum, "nesterov": nesterov, "weight_decay": 0.1}
    theirs = torch.optim.Muon(theirs_given, adjust_lr_fn="match_rms_adamw", **options)
    for step in range(BEFORE):
        set_gradients(theirs_given, step)
        theirs.step()
    ours_given = copies(theirs_given)
    ours = Muon(ours_given, lr=0.5, scale="rms_norm", orthogonalizer="quintic")
    told = import_state_dict(ours, theirs.state_dict())
    assert told[0] == "group 0: state of 2 of 2 parameters from torch.optim.Muon"
    assert len(told) == 2
    assert "lr=0.01" in told[1]
    assert {name: ours.param_groups[0][name] for name in options} == options
    for step in range(BEFORE, BEFORE + AFTER):
        before = [each.detach().clone() for each in ours_given]
        for given, optimizer in ((theirs_given, theirs), (ours_given, ours)):
            set_gradients(given, step)
            optimizer.step()
        for mine, other, old in zip(ours_given, theirs_given, before, strict=True):
            buffer = theirs.state[other]["momentum_buffer"]
            wanted = buffer * momentum / (1 - momentum)
            assert torch.allclose(ours.state[mine]["momentum"], wanted, rtol=1e-12, atol=1e-12)
            moved = float((mine - old).detach().norm())
            # They orthogonalize in bfloat16.
            assert float((mine - other).detach().norm()) < 0.02 * moved * (step - BEFORE + 1)


def test_the_update_of_torchs_original_scale_is_told_where_it_differs() -> None:
    given = parameters(*SHAPES)
    theirs = torch.optim.Muon(given, lr=0.01)
    set_gradients(given, 0)
    theirs.step()
    told = import_state_dict(Muon(copies(given)), theirs.state_dict())
    wide = math.sqrt(8 / 20)
    assert told[-1] == f"group 0: updates are {wide:g} times theirs with scale='spectral_norm': parameter 1"
    plain = import_state_dict(Muon(copies(given), scale=None), theirs.state_dict())
    assert plain[-1] == f"group 0: updates are {1 / math.sqrt(16 / 12):g} times theirs with scale=None: parameter 0"


def dion_state(
    name: str, given: list[nn.Parameter], options: dict[str, Any]
) -> tuple[dict[str, Any], Callable[[], None]]:
    """What an optimizer of the package dion saves, and what a step does to its momentum, by its formulas."""
    state: dict[int, dict[str, Tensor]] = {n: {"momentum": torch.zeros_like(each)} for n, each in enumerate(given)}
    chooses = "dion2" in name
    decay = options["ef_decay" if name == "dion2" else "mu"]

    def step() -> None:
        for number, parameter in enumerate(given):
            momentum = state[number]["momentum"]
            if not chooses:  # decayed before the gradient is added
                momentum.mul_(decay).add_(parameter.grad)
                continue
            momentum.add_(parameter.grad)
            count = math.ceil(options["fraction"] * len(momentum))
            rows = momentum.abs().sum(dim=1).topk(count).indices
            momentum[rows] *= decay

    if "nor" in name:
        for number, parameter in enumerate(given):
            state[number]["variance_neuron"] = draw((len(parameter), 1), 70 + number).square()
    group = {"params": list(range(len(given))), "algorithm": name, "step": BEFORE, "beta1": 0.9, "beta2": 0.95}
    group |= {"adjust_lr": "spectral_norm", "flatten": False, "epsilon": 1e-8, **options}
    return {"state": state, "param_groups": [group]}, step


DION = {
    "muon": {"mu": 0.9, "lr": 0.01, "nesterov": True, "cautious_wd": True},
    "normuon": {"mu": 0.9, "muon_beta2": 0.8, "weight_decay": 0.2},
    "dion2": {"ef_decay": 0.9, "fraction": 0.25, "selection_scope": "local"},
    "nordion2": {"mu": 0.9, "muon_beta2": 0.8, "fraction": 0.25, "selection_scope": "local"},
}
OURS = {"muon": "Muon", "normuon": "NorMuon", "dion2": "Dion2", "nordion2": "NorDion2"}


@pytest.mark.parametrize("name", DION)
def test_a_run_of_the_package_dion_is_continued(name: str) -> None:
    given, options = parameters(*SHAPES), DION[name]
    saved, step = dion_state(name, given, options)
    for number in range(BEFORE):
        set_gradients(given, number)
        step()
    mine = copies(given)
    ours = getattr(dion_core, OURS[name])(mine, **({"scope": "local"} if "dion2" in name else {}))
    told = import_state_dict(ours, copy.deepcopy(saved))
    assert told[0] == f"group 0: state of 2 of 2 parameters from {OURS[name]} of dion"
    group = ours.param_groups[0]
    assert group["momentum"] == 0.9
    for theirs, wanted in (("muon_beta2", "beta2"), ("nesterov", "nesterov"), ("cautious_wd", "cautious_weight_decay")):
        assert theirs not in options or group[wanted] == options[theirs]
    factor = 1.0 if "dion2" in name else 0.9
    for number, parameter in enumerate(mine):
        if "nor" in name:
            second_moment = ours.state[parameter]["second_moment"]
            assert torch.equal(second_moment, saved["state"][number]["variance_neuron"].float())
    for number in range(BEFORE, BEFORE + AFTER):
        set_gradients(given, number)
        set_gradients(mine, number)
        step()
        ours.step()
        for place, parameter in enumerate(mine):
            wanted = factor * saved["state"][place]["momentum"]
            assert torch.allclose(ours.state[parameter]["momentum"], wanted, rtol=1e-12, atol=1e-12)


def test_adamw_and_lion_beside_matrices() -> None:
    """Those inside the package dion, and torch's AdamW whose groups follow those of torch's Muon."""
    given = parameters((8, 6), (5,), (4,))
    saved, _ = dion_state("muon", given[:1], {"mu": 0.95})
    averages = {"momentum": draw((5,), 80), "variance": draw((5,), 81).square(), "step_dev": torch.tensor(7.0)}
    saved["state"] |= {1: averages, 2: {"momentum": draw((4,), 82)}}
    common = {"lr": 0.003, "beta1": 0.8, "beta2": 0.9, "epsilon": 1e-6, "weight_decay": 0.0}
    saved["param_groups"] += [
        {"params": [1], "algorithm": "adamw", **common},
        {"params": [2], "algorithm": "lion", **common},
    ]
    groups = [
        {"params": [one], "algorithm": kind} for one, kind in zip(given, ("matrix", "adamw", "lion"), strict=True)
    ]
    ours = Muon(groups)
    import_state_dict(ours, saved)
    adamw, lion = ours.state[given[1]], ours.state[given[2]]
    assert torch.equal(adamw["exp_avg"], averages["momentum"])
    assert torch.equal(adamw["exp_avg_sq"], averages["variance"])
    assert adamw["step"] == 7
    assert torch.equal(lion["exp_avg"], saved["state"][2]["momentum"])
    for group in ours.param_groups[1:]:
        assert (group["lr"], group["betas"], group["epsilon"], group["weight_decay"]) == (0.003, (0.8, 0.9), 1e-6, 0.0)
    del averages["step_dev"]  # as older versions saved it
    saved["param_groups"][1]["step"] = 5
    import_state_dict(ours, saved)
    assert ours.state[given[1]]["step"] == 5

    matrices, vectors = parameters((8, 6)), parameters((5,))
    muon, adam = torch.optim.Muon(matrices), torch.optim.AdamW(vectors, lr=0.004)
    for optimizer, of_it in ((muon, matrices), (adam, vectors)):
        set_gradients(of_it, 0)
        optimizer.step()
    mine = [*copies(matrices), *copies(vectors)]
    ours = Muon([{"params": mine[:1]}, {"params": mine[1:], "algorithm": "adamw"}])
    told = import_state_dict(ours, muon.state_dict(), adam.state_dict())
    assert "group 1: state of 1 of 1 parameters from torch.optim.AdamW" in told
    set_gradients(vectors, 1)
    set_gradients(mine[1:], 1)
    adam.step()
    ours.step()
    assert torch.allclose(mine[1], vectors[0], rtol=1e-12)


def test_second_moments_of_rows_that_one_of_them_lacks() -> None:
    given = parameters((8, 6))
    with_moment, _ = dion_state("normuon", given, DION["normuon"])
    assert any("left out" in line for line in import_state_dict(Muon(copies(given)), with_moment))
    without, _ = dion_state("muon", given, DION["muon"])
    mine = NorMuon(copies(given))
    set_gradients(mine.param_groups[0]["params"], 0)
    mine.step()
    assert any("starts at zero" in line for line in import_state_dict(mine, without))
    assert not mine.state[mine.param_groups[0]["params"][0]]["second_moment"].any()
    kernel = nn.Parameter(draw((4, 3, 2), 5))
    state, _ = dion_state("normuon", [kernel], DION["normuon"] | {"flatten": True})
    state["state"][0]["variance_neuron"] = moments = draw((4, 3, 1), 6).square()
    flat = NorMuon([{"params": [kernel], "flatten": True}])
    assert any("flattened" in line for line in import_state_dict(flat, state))
    assert torch.allclose(flat.state[kernel]["second_moment"], moments.mean(dim=(1, 2))[:, None].float())


def test_what_is_kept_and_what_has_no_counterpart_is_told() -> None:
    given = parameters((8, 6))
    saved, _ = dion_state("dion2", given, DION["dion2"] | {"fraction": 0.5, "cautious_wd": True})
    told = import_state_dict(Dion2(copies(given)), saved)
    assert "group 0: keeps fraction=0.25, theirs is fraction=0.5" in told
    assert "group 0: keeps scope=None, theirs is selection_scope='local'" in told
    assert "group 0: cautious_wd=True has no counterpart here" in told


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "other groups": (lambda saved: saved["param_groups"].append({"params": []}), r"groups of \[2, 0\]"),
    "fewer parameters": (lambda saved: saved["param_groups"][0]["params"].pop(), r"groups of \[1\]"),
    "another algorithm": (lambda saved: saved["param_groups"][0].update(algorithm="dion"), "'dion'.*known there.*muon"),
    "unknown": (lambda saved: saved["param_groups"][0].pop("algorithm"), "cannot be imported"),
    "other names": (lambda saved: saved["param_groups"][0].update(param_names=["a", "c"]), "'c' where .* 'b'"),
    "another shape": (
        lambda saved: saved["state"][0].update(momentum=torch.ones(3, 3)),
        "a: the saved state 'momentum'",
    ),
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_does_not_fit_is_refused_and_nothing_moves(change: str) -> None:
    alter, message = REFUSED[change]
    given = parameters(*SHAPES)
    saved, _ = dion_state("muon", given, DION["muon"])
    alter(saved)
    ours = Muon(list(zip("ab", given, strict=True)))
    set_gradients(given, 0)
    ours.step()
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises(ValueError, match=message):
        import_state_dict(ours, saved)
    after = ours.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for number, state in before["state"].items():
        assert all(torch.equal(after["state"][number][key], value) for key, value in state.items())


def test_sgd_with_momentum_is_not_taken_for_muon() -> None:
    given = parameters((8, 6))
    theirs = torch.optim.SGD(given, lr=0.1, momentum=0.9)
    set_gradients(given, 0)
    theirs.step()
    with pytest.raises(ValueError, match="cannot be imported"):
        import_state_dict(Muon(copies(given)), theirs.state_dict())
