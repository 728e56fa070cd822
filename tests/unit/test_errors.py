"""Bad input gets one clear error that names the parameter or option, its value, and what is allowed."""

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dion_comm_nccl import FullShard
from dion_core import Dion2, Muon, NorDion2, NorMuon
from dion_core.newton_schulz import NewtonSchulz
from dion_core.registry import _entries
from dion_core.transport import TransportError

OPTIMIZERS = (Muon, NorMuon, Dion2, NorDion2)
DION2_FAMILY = (Dion2, NorDion2)


def matrix(*shape: int, **options: Any) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape or (4, 4), **options))


def refused(
    make: Callable[[], object], *parts: str, kind: type[Exception] | tuple[type[Exception], ...] = ValueError
) -> None:
    """The call raises, and its message has all the parts."""
    with pytest.raises(kind) as caught:
        make()
    for part in parts:
        assert part in str(caught.value), f"{part!r} is not in {caught.value!r}"


BAD_OPTIONS: tuple[tuple[tuple[type, ...], str, tuple[Any, ...], str], ...] = (
    (OPTIMIZERS, "lr", (-0.1, float("inf"), float("nan"), "0.1", None, torch.ones(2)), "a finite number >= 0"),
    (OPTIMIZERS, "momentum", (-0.1, 1.0, 2, float("nan")), "0 <= momentum < 1"),
    (OPTIMIZERS, "weight_decay", (-0.1, float("inf")), "a finite number >= 0"),
    (OPTIMIZERS, "scale", ("spectral", 0.2), "one of ('spectral_norm', 'rms_norm', None)"),
    (OPTIMIZERS, "orthogonalizer", ("newton", 5, NewtonSchulz), "'auto'"),
    (OPTIMIZERS, "momentum_dtype", (torch.int32, "bf16"), "None or a floating dtype"),
    (OPTIMIZERS, "wire_dtype", (torch.int32, "bf16", torch.float16), "None, torch.bfloat16, torch.float32"),
    (OPTIMIZERS, "betas", ((0.9,), (0.9, 1.0), 0.9), "two numbers, each 0 <= beta < 1"),
    (OPTIMIZERS, "epsilon", (-1e-8,), "a finite number >= 0"),
    (OPTIMIZERS, "maximize", (1, "no"), "True or False"),
    ((NorMuon, NorDion2), "beta2", (-0.1, 1.0), "0 <= beta2 < 1"),
    ((Muon, NorMuon), "nesterov", (1, None), "True or False"),
    ((Muon, NorMuon), "cautious_weight_decay", (0,), "True or False"),
    (DION2_FAMILY, "fraction", (0, 0.0, -0.25, 1.5, 2, float("nan"), "0.25", True), "0 < fraction <= 1"),
    (DION2_FAMILY, "scope", ("row", "GLOBAL"), "one of (None, 'all', 'local', 'global')"),
)


@pytest.mark.parametrize(("kinds", "name", "values", "allowed"), BAD_OPTIONS, ids=[row[1] for row in BAD_OPTIONS])
def test_options_out_of_range(kinds: tuple[type, ...], name: str, values: tuple[Any, ...], allowed: str) -> None:
    for kind in kinds:
        for value in values:
            refused(lambda kind=kind, value=value: kind([matrix()], **{name: value}), name, repr(value), allowed)
            groups = [{"params": [matrix()]}, {"params": [matrix()], name: value}]
            refused(lambda kind=kind, groups=groups: kind(groups), name, repr(value), "in parameter group 1", allowed)


def test_options_of_the_whole_optimizer() -> None:
    for kind in OPTIMIZERS:
        refused(lambda kind=kind: kind([matrix()], nonfinite="ignore"), "nonfinite='ignore'", "('rows', 'skip')")
        for name, value in (("transport", "full"), ("nonfinite", "skip"), ("group", None)):
            groups = [{"params": [matrix()], name: value}]
            whole = "is an option of the whole optimizer"
            refused(lambda kind=kind, groups=groups: kind(groups), name, "parameter group 0", whole, kind.__name__)


@pytest.mark.parametrize("name", ["nonsense", "capped", "varlen"])
def test_a_transport_that_is_not_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {key: entry for key, entry in _entries().items() if key in ("full", "local")}
    monkeypatch.setattr("dion_core.registry._entries", lambda: installed)
    command = {"capped": "`pip install dion-comm-capped`", "varlen": "`pip install dion-comm-varlen`"}
    for kind in OPTIMIZERS:
        parts = (f"transport={name!r} is not installed", "installed: full, local", command.get(name, "'capped'"))
        refused(lambda kind=kind: kind([matrix()], transport=name), *parts, kind=TransportError)


def test_a_transport_that_does_not_serve_the_scope() -> None:
    for kind in (Muon, NorMuon):
        parts = ("transport='local'", "all rows", "it serves local", "installed transports that do: ", "full")
        refused(lambda kind=kind: kind([matrix()], transport="local"), *parts)
    for kind in DION2_FAMILY:
        for name, scope, serves in (
            ("local", "global", "local"),
            ("local", "all", "local"),
            ("full", "local", "global"),
        ):
            parts = (f"transport={name!r} does not serve scope {scope}", f"serves {'all, ' * (name == 'full')}{serves}")
            refused(lambda kind=kind, name=name, scope=scope: kind([matrix()], transport=name, scope=scope), *parts)
            groups = [{"params": [matrix()], "scope": scope}]
            refused(lambda kind=kind, name=name, groups=groups: kind(groups, transport=name), *parts)


def test_parameters_that_are_not_matrices() -> None:
    hint = 'give it to a group with algorithm="adamw" or "lion"'
    for kind in OPTIMIZERS:
        refused(lambda kind=kind: kind([("layer.weight", matrix(5))]), "layer.weight", "(5,)", hint)
        refused(lambda kind=kind: kind([nn.Parameter(torch.tensor(1.0))]), "parameter 0 of group 0", "()", hint)
        refused(lambda kind=kind: kind([matrix(), matrix(5)]), "parameter 1 of group 0", "not a matrix")
        kind([{"params": [matrix(5), matrix(2, 3, 4), nn.Parameter(torch.tensor(1.0))], "algorithm": "adamw"}])


def test_tensors_that_cannot_be_optimized() -> None:
    for kind in OPTIMIZERS:
        meta = [("embedding", matrix()), ("head", matrix(device="meta"))]
        refused(lambda kind=kind, meta=meta: kind(meta), "head", "meta", "materialize the model")
        for algorithm in ("matrix", "adamw"):
            for dtype in (torch.int32, torch.complex64):
                group = {"params": [("codes", torch.ones(4, 4, dtype=dtype))], "algorithm": algorithm}
                refused(lambda kind=kind, group=group: kind([group]), "codes", str(dtype), "one of torch.float16")
            expanded = {"params": [("shared", nn.Parameter(torch.ones(1, 4).expand(4, 4)))], "algorithm": algorithm}
            refused(lambda kind=kind, group=expanded: kind([group]), "shared", "strides (0, 1)", "clone")
        refused(lambda kind=kind: kind([matrix() * 2]), "non-leaf")
        refused(lambda kind=kind: kind([matrix(), "weight"]), "parameter 1 of group 0", "str", kind=TypeError)
        refused(lambda kind=kind: kind(matrix()), "params", "[parameter]", kind=TypeError)
        refused(lambda kind=kind: kind([]), "empty parameter list")


def test_a_tied_tensor() -> None:
    tied = matrix()
    for kind in OPTIMIZERS:
        both = [("embedding.weight", tied), ("head.weight", tied)]
        refused(lambda kind=kind, both=both: kind(both), "embedding.weight", "head.weight", "tied tensor")
        for algorithm in ("matrix", "adamw"):
            groups = [{"params": both[:1]}, {"params": both[1:], "algorithm": algorithm}]
            refused(lambda kind=kind, g=groups: kind(g), "embedding.weight", "head.weight", "tied tensor")
        refused(lambda kind=kind: kind([tied, tied]), "parameter 0 of group 0", "parameter 1 of group 0")


def test_options_of_another_optimizer() -> None:
    for kind, foreign in ((Muon, "fraction"), (NorMuon, "scope"), (Muon, "beta2"), (Dion2, "nesterov")):
        value = {"fraction": 0.5, "scope": "global", "beta2": 0.9, "nesterov": False}[foreign]
        groups = [{"params": [matrix()], foreign: value}]
        refused(lambda kind=kind, g=groups: kind(g), f"{foreign}={value!r}", f"{kind.__name__} has no such option")
        refused(lambda kind=kind, o={foreign: value}: kind([matrix()], **o), foreign, kind=TypeError)
    groups = [{"params": [matrix()], "algorithm": "sgd"}]
    refused(lambda: Muon(groups), "algorithm='sgd'", "('matrix', 'adamw', 'lion')")


STRUCTURAL_CHANGES = {
    "algorithm": "adamw",
    "fraction": 0.5,
    "scope": "local",
    "scale": None,
    "momentum_dtype": torch.float64,
    "wire_dtype": torch.bfloat16,
    "orthogonalizer": "quintic",
}


@pytest.mark.parametrize("key", STRUCTURAL_CHANGES)
def test_a_structural_key_cannot_change(key: str) -> None:
    weight, other = matrix(), matrix()
    weight.grad = torch.eye(4)
    optimizer = NorDion2([{"params": [other]}, {"params": [weight]}])
    before = optimizer.param_groups[1][key]
    optimizer.param_groups[1][key] = STRUCTURAL_CHANGES[key]
    message = (f"{key}={STRUCTURAL_CHANGES[key]!r}", "parameter group 1", repr(before))
    for _ in range(2):
        refused(optimizer.step, *message)
        assert torch.equal(weight, torch.ones(4, 4))
        assert not optimizer.state[weight]["momentum"].any()
    optimizer.param_groups[1][key] = before
    optimizer.step()
    assert not torch.equal(weight, torch.ones(4, 4))


def test_the_other_options_may_change() -> None:
    """Each step uses the values of that step, floats or tensors."""
    results = []
    for changed in (False, True):
        weight = matrix()
        options = {"lr": 0.1, "momentum": 0.8, "weight_decay": 0.3, "beta2": 0.5, "maximize": True}
        optimizer = NorMuon([weight], **({} if changed else options))
        if changed:
            optimizer.param_groups[0].update(options, lr=torch.tensor(0.1, dtype=torch.float64))
        for _ in range(2):
            weight.grad = torch.eye(4)
            optimizer.step()
        results.append(weight.detach())
    assert torch.allclose(*results, rtol=1e-6)
    assert not torch.equal(results[0], torch.ones(4, 4))


def test_unknown_group_keys_are_kept() -> None:
    for kind in OPTIMIZERS:
        group = {"params": [matrix()], "initial_lr": 0.5, "owner": "me"}
        optimizer = kind([group])
        added = {"params": [matrix(5)], "algorithm": "lion", "note": [1]}
        optimizer.add_param_group(added)
        assert set(group) == {"params", "initial_lr", "owner"}  # the caller's dictionary is the caller's
        saved = optimizer.state_dict()["param_groups"]
        assert (saved[0]["initial_lr"], saved[0]["owner"], saved[1]["note"]) == (0.5, "me", [1])
        optimizer.load_state_dict(optimizer.state_dict())
        assert (optimizer.param_groups[0]["owner"], optimizer.param_groups[1]["note"]) == ("me", [1])


def train(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


def test_requires_grad_may_change_later() -> None:
    for kind in OPTIMIZERS:
        for shape, algorithm in (((4, 6), "matrix"), ((5,), "adamw"), ((5,), "lion")):
            parameters = [matrix(*shape), matrix(*shape)]
            frozen = parameters[1].requires_grad_(False)
            optimizer = kind([{"params": parameters, "algorithm": algorithm}])
            assert not optimizer.state.get(frozen)
            train(optimizer, parameters[:1], seed=1)
            optimizer.step()
            assert torch.equal(frozen, torch.ones(shape))
            frozen.requires_grad_(True)
            parameters[0].grad = None
            (thawed,) = train(optimizer, [frozen], seed=2)
            fresh = matrix(*shape)
            assert torch.equal(thawed, train(kind([{"params": [fresh], "algorithm": algorithm}]), [fresh], seed=2)[0])
            state = {key: value.clone() for key, value in optimizer.state[frozen].items()}
            frozen.requires_grad_(False)
            optimizer.step()
            assert torch.equal(frozen, thawed)
            assert all(torch.equal(optimizer.state[frozen][key], value) for key, value in state.items())


BAD_GROUPS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"params": [("new", matrix(5))]}, "new"),
    ({"params": [("new", matrix())], "fraction": 0}, "fraction=0"),
    ({"params": [("new", matrix())], "transport": "full"}, "transport"),
    ({"params": [matrix()]}, "names"),
    ({"params": [("new", matrix() * 2)]}, "non-leaf"),
    ({"params": [("new", matrix()), ("tied", "old")]}, "tied"),
)


@pytest.mark.parametrize(("group", "message"), BAD_GROUPS, ids=[row[1] for row in BAD_GROUPS])
def test_a_group_that_fails_leaves_the_optimizer_as_it_was(group: dict[str, Any], message: str) -> None:
    old, untouched = matrix(4, 6), matrix(4, 6)
    optimizer, twin = (NorDion2([("old", parameter)]) for parameter in (old, untouched))
    group = {**group, "params": [(each[0], old) if each[1:] == ("old",) else each for each in group["params"]]}
    before, report = optimizer.state_dict(), optimizer.report()
    with pytest.raises(ValueError, match=re.escape(message)):
        optimizer.add_param_group(group)
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    assert list(optimizer.state) == [old]
    assert optimizer.report() == report
    assert torch.equal(train(optimizer, [old], 3)[0], train(twin, [untouched], 3)[0])
    # What was refused can be given again in the right way.
    again = group["params"][0]
    tensor = again[1] if isinstance(again, tuple) else again
    algorithm = "matrix" if tensor.ndim == 2 else "adamw"
    if tensor.is_leaf:
        optimizer.add_param_group({"params": [("new", tensor)], "algorithm": algorithm})
        train(optimizer, [old, tensor], 4)
        assert not torch.equal(tensor, torch.ones_like(tensor))


def test_what_is_allowed_and_seldom_meant_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    groups = [{"params": [matrix()], "fracton": 1.0, "note": 1}, {"params": [matrix()], "algorithm": "adamw"}]
    optimizer = Dion2(groups)
    assert "'fracton' in parameter group 0" in caplog.text
    assert "did you mean 'fraction'" in caplog.text
    assert "note" not in caplog.text
    assert "parameter group 1 has algorithm='adamw' and takes the lr of the matrices" in caplog.text
    assert optimizer.param_groups[0]["fracton"] == 1.0
    optimizer.step()
    optimizer.step()
    assert caplog.text.count("a step found no gradient here") == 1


def test_a_group_without_params_and_other_kinds() -> None:
    refused(lambda: Dion2([{"parms": [matrix()]}]), "parameter group 0", '"params"', "parms")
    refused(lambda: Dion2([matrix()], group=4), "group=4", "ProcessGroup", "mpi4py", kind=TypeError)
    refused(lambda: Dion2([matrix()], group="world"), "group='world'", "known: ['mpi', 'nccl']", kind=TransportError)
    refused(lambda: Dion2([matrix()], transport=FullShard), "transport=", "an instance")


def test_a_load_keeps_what_the_saved_groups_do_not_say() -> None:
    theirs = torch.optim.AdamW([matrix()])
    theirs.param_groups[0]["params"][0].grad = torch.ones(4, 4)
    theirs.step()
    ours = Dion2([{"params": [matrix()], "algorithm": "adamw", "lr": 0.1}])
    ours.load_state_dict(theirs.state_dict())
    assert ours.param_groups[0]["algorithm"] == "adamw"
    assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]
    ours.step()


def test_copies_are_refused() -> None:
    optimizer = NorDion2([matrix()])
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="state_dict"):
            copied(optimizer)


def test_groups_that_were_replaced() -> None:
    def step(change: Callable[[Dion2], object]) -> None:
        optimizer = Dion2([{"params": [matrix()]}, {"params": [matrix()]}])
        optimizer.step()
        change(optimizer)
        optimizer.step()

    def replace_parameter(optimizer: Dion2) -> None:
        optimizer.param_groups[0]["params"][0] = matrix()

    def replace_group(optimizer: Dion2) -> None:
        optimizer.param_groups[0] = dict(optimizer.param_groups[0])

    for change in (replace_parameter, replace_group, lambda optimizer: optimizer.param_groups.pop()):
        refused(lambda change=change: step(change), "was replaced", "add_param_group")


def test_names_that_a_group_brings_along_are_told() -> None:
    group = {"params": [matrix(), nn.Parameter(torch.ones(3))], "param_names": ["up.weight", "up.bias"]}
    refused(lambda: Dion2([group]), "up.bias", "not a matrix")


def test_option_tensors_have_no_dimension() -> None:
    refused(lambda: NorDion2([matrix()], lr=torch.tensor([0.01])), "lr=", "0-dim")


def test_a_frozen_parameter_keeps_its_saved_state() -> None:
    parameters = [matrix(), matrix()]
    for parameter in parameters:
        parameter.grad = torch.ones(4, 4)
    optimizer = NorDion2(parameters)
    optimizer.step()
    saved = optimizer.state_dict()
    parameters[0].requires_grad_(False)
    resumed = NorDion2(parameters)
    resumed.load_state_dict(saved)
    assert torch.equal(resumed.state[parameters[0]]["momentum"], saved["state"][0]["momentum"])


def test_row_counts_outlive_a_plan() -> None:
    optimizer = Dion2([matrix()], fraction=0.5)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(4, 4)
    optimizer.step()
    optimizer.add_param_group({"params": [matrix()]})
    report = optimizer.report()
    assert (report["rows"]["chosen"], report["rows"]["applied"], report["steps"]["taken"]) == (2, 2, 1)
    assert optimizer.report()["rows"]["chosen"] == 0
