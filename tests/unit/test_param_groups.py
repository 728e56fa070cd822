"""Which parameters of real model classes go where, and why."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations

from dion_core import Dion2, Muon, NorDion2, NorMuon, param_groups_for
from dion_core.param_groups import ParamGroups
from dion_core.param_rules import ELONGATED, THIN
from tests.param_models import (
    MODELS,
    ConvNet,
    LowRank,
    MixtureOfExperts,
    gpt2,
    llama,
    transformer,
)

OPTIMIZERS = (Muon, NorMuon, Dion2, NorDion2)


def algorithms(groups: ParamGroups) -> dict[str, str]:
    """The algorithm of every parameter by its name; a parameter in two groups fails."""
    pairs = [(name, group["algorithm"]) for group in groups for name, _ in group["params"]]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def matrices_of(groups: ParamGroups) -> set[str]:
    return {name for name, algorithm in algorithms(groups).items() if algorithm == "matrix"}


def options_of(groups: ParamGroups, name: str) -> dict[str, Any]:
    """The options of the group that a parameter is in."""
    [found] = [group for group in groups if name in dict(group["params"])]
    return {key: value for key, value in found.items() if key != "params"}


def reason_of(groups: ParamGroups, name: str) -> str:
    """The last cell of the parameter's line in the table."""
    [line] = [line for line in str(groups).splitlines() if re.match(rf"  {re.escape(name)}(?= )", line)]
    return re.split(r"  +", line)[-1]


# --- what goes where


@pytest.mark.parametrize("make", MODELS)
def test_every_parameter_is_in_exactly_one_group_under_its_name(make: Callable[[], nn.Module]) -> None:
    model = make()
    groups = param_groups_for(model)
    pairs = [pair for group in groups for pair in group["params"]]
    assert len(pairs) == len({id(parameter) for _, parameter in pairs})
    wanted = dict(model.named_parameters())
    assert {name: id(parameter) for name, parameter in pairs} == {name: id(one) for name, one in wanted.items()}
    assert all(parameter.ndim >= 2 for name, parameter in pairs if name in matrices_of(groups))


def test_layers_of_torch() -> None:
    attention = ("in_proj_weight", "out_proj.weight")
    kinds = {"encoder": ("self_attn",), "decoder": ("self_attn", "multihead_attn")}
    assert matrices_of(param_groups_for(transformer())) == {
        f"{stack}.layers.{layer}.{weight}"
        for stack, attentions in kinds.items()
        for layer in (0, 1)
        for weight in (
            "linear1.weight",
            "linear2.weight",
            *(f"{one}.{part}" for one in attentions for part in attention),
        )
    }


def test_llama() -> None:
    groups = param_groups_for(llama())
    weights = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    assert matrices_of(groups) == {f"model.layers.{layer}.{weight}.weight" for layer in (0, 1) for weight in weights}
    assert reason_of(groups, "lm_head.weight") == "output head by its name"
    assert reason_of(groups, "model.norm.weight") == "norm (LlamaRMSNorm)"
    assert reason_of(groups, "model.embed_tokens.weight") == "embedding (Embedding)"


def test_gpt2_has_rows_that_are_inputs_and_a_tied_head() -> None:
    groups = param_groups_for(gpt2())
    weights = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert matrices_of(groups) == {f"transformer.h.{layer}.{weight}.weight" for layer in (0, 1) for weight in weights}
    table = str(groups)
    assert "transformer.wte.weight = lm_head.weight" in table
    assert reason_of(groups, "transformer.h.*.mlp.c_fc.weight") == "Conv1D, rows are inputs"


def test_convolutions_are_flattened() -> None:
    groups = param_groups_for(ConvNet(), lr=0.02)
    inside = {f"blocks.{block}.{name}.weight" for block in range(2) for name in ("first", "second")}
    assert matrices_of(groups) == {"stem.weight", "projection.weight", *inside}
    assert options_of(groups, "blocks.0.first.weight") == {"algorithm": "matrix", "lr": 0.02, "flatten": True}
    assert options_of(groups, "projection.weight") == {"algorithm": "matrix", "lr": 0.02}
    assert reason_of(groups, "blocks.*.second.weight") == "Conv2d"
    assert reason_of(groups, "blocks.*.norm.weight") == "norm (BatchNorm2d)"
    assert reason_of(groups, "fc.weight") == "output head: the last linear layer"
    groups = param_groups_for(ConvNet(), overrides={"stem.weight": "adamw"})
    assert options_of(groups, "stem.weight") == {"algorithm": "adamw", "lr": 3e-4}
    [bucket] = [each for each in Muon(groups).report()["buckets"] if "blocks.0.first.weight" in each["parameters"]]
    assert bucket["shape"] == [16, 16 * 3 * 3]


def test_experts_are_matrices() -> None:
    groups = param_groups_for(MixtureOfExperts())
    weights = ("shared.weight", "experts.up", "experts.down")
    assert matrices_of(groups) == {f"layers.{layer}.{weight}" for layer in range(3) for weight in weights}
    assert options_of(groups, "layers.1.experts.up") == {"algorithm": "matrix", "flatten": False}
    assert reason_of(groups, "layers.*.experts.up") == "stack of 4 matrices"
    [bucket] = [each for each in Muon(groups).report()["buckets"] if each["shape"] == [64, 32]]
    assert bucket["parameters"][:2] == ["layers.0.experts.up (slice 0)", "layers.0.experts.up (slice 1)"]
    assert reason_of(groups, "layers.*.experts.up_bias") == "bias"
    assert reason_of(groups, "layers.*.gate.weight") == "thin: low-rank factor, router or small head"
    assert reason_of(groups, "position") == "2-D of MixtureOfExperts: may not be a hidden matrix"
    assert reason_of(groups, "unembedding_matrix.weight").startswith("output head: as many outputs")


@pytest.mark.parametrize(
    ("rows", "columns", "matrix"),
    [
        (THIN - 1, ELONGATED * (THIN - 1), False),
        (ELONGATED * (THIN - 1), THIN - 1, False),
        (THIN - 1, ELONGATED * (THIN - 1) - 1, True),
        (THIN, 100 * THIN, True),
        (4, 4, True),
        (1, 8, False),
    ],
)
def test_thin_matrices_are_elementwise(rows: int, columns: int, matrix: bool) -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"up": nn.Linear(columns, rows)})])})
    assert (algorithms(param_groups_for(model))["layers.0.up.weight"] == "matrix") is matrix


def test_low_rank_factors_are_elementwise_and_what_is_frozen_is_left_out() -> None:
    groups = param_groups_for(LowRank(128, 64))
    assert algorithms(groups) == {"lora_A.default.weight": "adamw", "lora_B.default.weight": "adamw"}
    assert reason_of(groups, "lora_A.default.weight") == "low-rank factor (LoRA)"
    assert str(groups).splitlines()[-1] == "frozen, in no group: 2 tensors, 16,512 parameters"
    assert matrices_of(param_groups_for(LowRank(128, 64), overrides={"lora_*": "matrix"})) == set(algorithms(groups))


def linear_weights_of(model: nn.Module) -> dict[str, str]:
    """The algorithms of all but embeddings and biases."""
    found = algorithms(param_groups_for(model))
    return {name: each for name, each in found.items() if name.endswith(".weight") and "words" not in name}


def test_heads_are_found_by_name_outside_the_numbered_layers() -> None:
    def attention() -> nn.Module:
        return nn.ModuleDict({"heads": nn.ModuleList([nn.Linear(32, 64), nn.Linear(64, 32)])})

    layers = nn.ModuleList([attention(), attention()])
    hidden = {f"layers.{layer}.heads.{head}.weight": "matrix" for layer in (0, 1) for head in (0, 1)}
    assert linear_weights_of(nn.ModuleDict({"layers": layers})) == hidden
    heads = nn.ModuleList([nn.Linear(32, 48), nn.Linear(32, 48)])
    several = nn.ModuleDict({"layers": layers, "heads": heads, "pooler": nn.Linear(32, 32)})
    elementwise = {"heads.0.weight": "adamw", "heads.1.weight": "adamw"}
    assert linear_weights_of(several) == {**hidden, **elementwise, "pooler.weight": "matrix"}


def test_heads_are_found_by_the_size_of_the_vocabulary() -> None:
    # A hidden layer has as many outputs as the vocabulary.
    hidden = {"up": nn.Linear(32, 64), "down": nn.Linear(64, 32)}
    model = nn.ModuleDict({"words": nn.Embedding(64, 32), **hidden, "guess": nn.Linear(32, 64)})
    assert linear_weights_of(model) == {"up.weight": "matrix", "down.weight": "matrix", "guess.weight": "adamw"}
    model["pooler"] = nn.Linear(32, 33)  # the last one, but not of that size
    assert linear_weights_of(model)["guess.weight"] == "adamw"
    assert linear_weights_of(model)["pooler.weight"] == "matrix"


def test_outputs_of_conv1d_are_its_columns() -> None:
    from transformers.pytorch_utils import Conv1D

    model = nn.ModuleDict({"words": nn.Embedding(64, 32), "guess": Conv1D(64, 32), "down": Conv1D(32, 64)})
    assert linear_weights_of(model) == {"guess.weight": "adamw", "down.weight": "matrix"}


def test_without_name_and_vocabulary_the_last_linear_layer_is_the_head() -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 40))
    assert linear_weights_of(model) == {"0.weight": "matrix", "2.weight": "adamw"}
    assert linear_weights_of(nn.ModuleDict({"layers": nn.ModuleList([model])})) == {
        "layers.0.0.weight": "matrix",
        "layers.0.2.weight": "matrix",
    }


def test_a_tied_tensor_is_given_once_under_its_first_name() -> None:
    model = llama(tied=True)
    groups = param_groups_for(model)
    assert "lm_head.weight" not in algorithms(groups)
    assert "model.embed_tokens.weight = lm_head.weight" in str(groups)
    head, words = nn.Linear(32, 64, bias=False), nn.Embedding(64, 32)
    words.weight = head.weight  # the name under which it is a matrix comes first
    groups = param_groups_for(nn.ModuleDict({"layers": nn.ModuleList([nn.Sequential(head)]), "words": words}))
    assert algorithms(groups) == {"layers.0.0.weight": "adamw"}
    assert "layers.0.0.weight = words.weight" in str(groups)
    shared = nn.Linear(32, 32, bias=False)
    twice = nn.ModuleDict({"layers": nn.ModuleList([nn.Sequential(shared), nn.Sequential(shared)])})
    groups = param_groups_for(twice)
    assert algorithms(groups) == {"layers.0.0.weight": "matrix"}
    assert "layers.0.0.weight = layers.1.0.weight" in str(groups)
    shared.register_parameter("again", shared.weight)
    assert "layers.0.0.weight = layers.0.0.again = layers.1.0.weight" in str(param_groups_for(twice))


def test_unknown_modules_are_ambiguous() -> None:
    class TheirLinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 32))

    class TheirNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(32, 32))

    layer = nn.ModuleDict({"lstm": nn.LSTM(32, 32), "linear": TheirLinear(), "norm": TheirNorm()})
    groups = param_groups_for(nn.ModuleDict({"layers": nn.ModuleList([layer]), "pos_table": nn.Bilinear(8, 8, 8)}))
    assert matrices_of(groups) == {"layers.0.linear.weight"}
    assert reason_of(groups, "layers.0.norm.gain") == "norm (TheirNorm)"
    assert reason_of(groups, "layers.0.lstm.weight_ih_l0") == "2-D of LSTM: may not be a hidden matrix"
    assert reason_of(groups, "pos_table.weight") == "embedding by its name"
    parametrized = nn.Sequential(nn.Sequential(parametrizations.weight_norm(nn.Linear(32, 32))), nn.Linear(32, 40))
    assert matrices_of(param_groups_for(parametrized)) == set()


# --- options and overrides


def test_options_of_groups() -> None:
    model = llama()
    groups = param_groups_for(model)
    assert [{k: v for k, v in group.items() if k != "params"} for group in groups] == [
        {"algorithm": "matrix"},
        {"algorithm": "adamw", "lr": 3e-4},
    ]
    lr = torch.tensor(0.01)
    groups = param_groups_for(model, lr=lr, elementwise={"algorithm": "lion", "lr": 1e-4, "betas": (0.9, 0.99)})
    assert groups[0]["lr"] is lr
    assert options_of(groups, "lm_head.weight") == {"algorithm": "lion", "lr": 1e-4, "betas": (0.9, 0.99)}
    assert options_of(param_groups_for(model, elementwise={"weight_decay": 0.0}), "lm_head.weight") == {
        "algorithm": "adamw",
        "lr": 3e-4,
        "weight_decay": 0.0,
    }


def test_later_overrides_win_and_options_add_up() -> None:
    overrides = {
        "*.self_attn.*": "adamw",
        "*.q_proj.weight": "matrix",
        "*.layers.1.*": {"weight_decay": 0.1, "momentum": 0.9},
        "*.layers.1.mlp.up_proj.*": {"weight_decay": 0.2},
        "lm_head.weight": {"algorithm": "lion", "lr": 1e-5},
    }
    groups = param_groups_for(llama(), lr=0.02, elementwise={"lr": 1e-3}, overrides=overrides)
    adamw, matrix = {"algorithm": "adamw", "lr": 1e-3}, {"algorithm": "matrix", "lr": 0.02}
    more = {"weight_decay": 0.1, "momentum": 0.9}
    assert options_of(groups, "model.layers.0.self_attn.k_proj.weight") == adamw
    assert options_of(groups, "model.layers.0.self_attn.q_proj.weight") == matrix
    assert options_of(groups, "model.layers.1.self_attn.k_proj.weight") == adamw | more
    assert options_of(groups, "model.layers.1.self_attn.q_proj.weight") == matrix | more
    assert options_of(groups, "model.layers.1.mlp.up_proj.weight") == matrix | more | {"weight_decay": 0.2}
    assert options_of(groups, "lm_head.weight") == {"algorithm": "lion", "lr": 1e-5}
    assert reason_of(groups, "model.layers.0.self_attn.k_proj.weight") == "overrides['*.self_attn.*']"
    assert reason_of(groups, "model.layers.1.mlp.down_proj.weight") == "Linear, overrides['*.layers.1.*']"


def test_a_tied_tensor_is_overridden_by_each_of_its_names() -> None:
    groups = param_groups_for(gpt2(), overrides={"lm_head.*": {"lr": 0.5}})
    assert options_of(groups, "transformer.wte.weight")["lr"] == 0.5


def test_learning_rates_that_are_tensors_are_not_shared_by_value() -> None:
    rates = torch.tensor(0.1), torch.tensor(0.1)
    overrides = {"*.q_proj.*": {"lr": rates[0]}, "*.k_proj.*": {"lr": rates[1]}}
    groups = param_groups_for(llama(), overrides=overrides)
    assert options_of(groups, "model.layers.0.self_attn.q_proj.weight")["lr"] is rates[0]
    assert options_of(groups, "model.layers.1.self_attn.k_proj.weight")["lr"] is rates[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"overrides": {"*.mpl.*": "adamw"}},
            r"overrides\['\*\.mpl\.\*'\] matches no trainable parameter; there are 0\.w",
        ),
        ({"overrides": {"0.weight": "sgd"}}, r"algorithm='sgd' in overrides\['0\.weight'\]"),
        ({"overrides": {"0.weight": {"lr": -1.0}}}, r"lr=-1\.0 in overrides\['0\.weight'\]"),
        ({"overrides": {"0.weight": {"params": []}}}, '"params" in 0.weight'),
        ({"overrides": {"0.weight": "lion"}}, "0.weight: algorithm='lion' needs an lr"),
        ({"elementwise": {"algorithm": "lion"}}, "algorithm='lion' needs an lr"),
        ({"elementwise": {"algorithm": "matrix"}}, "algorithm='matrix' in elementwise"),
        ({"elementwise": {"betas": (1.0, 1.0)}}, "in elementwise"),
        ({"lr": -1.0}, r"lr=-1\.0 is not allowed"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        param_groups_for(nn.Sequential(nn.Linear(8, 8)), **arguments)


def test_a_pattern_for_frozen_parameters_only_is_refused() -> None:
    with pytest.raises(ValueError, match=r"overrides\['base\.\*'\] matches no trainable parameter"):
        param_groups_for(LowRank(32, 4), overrides={"base.*": "adamw"})


def test_lazy_parameters_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^1\.weight has no shape yet"):
        param_groups_for(nn.Sequential(nn.Linear(8, 8), nn.LazyLinear(8)))


# --- models as they are trained


def test_a_model_on_the_meta_device_is_sorted_alike() -> None:
    with torch.device("meta"):
        model = llama()
    assert algorithms(param_groups_for(model)) == algorithms(param_groups_for(llama()))


def test_wrappers_add_nothing_to_names() -> None:
    model = llama()
    plain = param_groups_for(model)
    whole = torch.compile(model, backend="eager")
    assert next(iter(whole.named_parameters()))[0].startswith("_orig_mod.")
    assert str(param_groups_for(whole)) == str(plain)
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    model.model.layers[1] = checkpoint_wrapper(model.model.layers[1])
    groups = param_groups_for(model, overrides={"model.layers.?.self_attn.*": {"momentum": 0.9}})
    assert algorithms(groups) == algorithms(plain)
    assert len([name for name in algorithms(groups) if "momentum" in options_of(groups, name)]) == 8


def test_the_table() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Sequential(nn.Linear(32, 48), nn.RMSNorm(48)) for _ in range(2))})
    model["layers"][1][0].bias.requires_grad_(False)
    assert str(param_groups_for(model, lr=0.02)).splitlines() == [
        "group 0: algorithm='matrix', lr=0.02: 2 tensors, 3,072 parameters",
        "  layers.*.*.weight  48 x 32  2 times  3,072  Linear",
        "group 1: algorithm='adamw', lr=0.0003: 3 tensors, 144 parameters",
        "  layers.0.0.bias    48                48     bias",
        "  layers.*.*.weight  48       2 times  96     norm (RMSNorm)",
        "frozen, in no group: 1 tensor, 48 parameters",
    ]
    assert str(param_groups_for(nn.ReLU())) == ""
