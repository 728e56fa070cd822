"""State dicts of other optimizers as ours: of `torch.optim.Muon`, of the public dion package, and of AdamW beside them.

Ours keeps the momentum as it is after a step: M <- momentum * (M + G). Theirs keep another form of the same sum:

| from | tensor | ours |
|---|---|---|
| torch.optim.Muon | B <- momentum * B + (1 - momentum) * G, an average | momentum / (1 - momentum) * B |
| dion: Muon, NorMuon | B <- mu * B + G, not yet decayed | mu * B |
| dion: Dion2, NorDion2 (Dion3) | M, the chosen rows decayed | M |

Example: momentum 0.75 and gradients 4 and 8. The average is 1, then 0.75 + 2 = 2.75. Ours is 3, then 0.75 * 11 = 8.25,
which is 3 * 2.75.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dion_core.optimizer import MatrixOptimizer
from dion_core.rules import update_scale

logger = logging.getLogger("dion_core")

Group = Mapping[str, Any]
State = Mapping[str, Tensor]

_MATRIX_OPTIONS = {
    "lr": "lr",
    "initial_lr": "initial_lr",
    "momentum": "momentum",
    "mu": "momentum",
    "ef_decay": "momentum",
    "muon_beta2": "beta2",
    "weight_decay": "weight_decay",
    "nesterov": "nesterov",
    "cautious_wd": "cautious_weight_decay",
    "maximize": "maximize",
}
_ELEMENTWISE_OPTIONS = {
    "lr": "lr",
    "initial_lr": "initial_lr",
    "betas": "betas",
    "eps": "epsilon",
    "epsilon": "epsilon",
    "weight_decay": "weight_decay",
    "maximize": "maximize",
}
_FIXED = {"fraction": "fraction", "selection_scope": "scope", "flatten": "flatten", "num_heads": "num_heads"}
"""What the plan is made from: it stays as it was given to our optimizer, and differences are told."""


@dataclass(frozen=True)
class _Source:
    """One kind of group of another optimizer, and its state as ours."""

    name: str
    convert: Callable[[State, Group], dict[str, Tensor]]


def import_state_dict(optimizer: MatrixOptimizer, *state_dicts: Mapping[str, Any]) -> list[str]:
    """The optimizer goes on where others stood; returns what was done, line by line. Collective.

    Takes their state, and the values of options that may change between steps (lr, momentum, weight decay, ...).

    Args:
        optimizer: whose groups have the parameters of theirs, in their order.
        state_dicts: of `torch.optim.Muon`, `torch.optim.AdamW`, or of Muon, NorMuon, Dion2, NorDion2 of the package
            dion; state by number or by name. The groups of several follow each other.

    Raises:
        ValueError: other groups than ours, or an optimizer that is not known. Nothing is changed then.
    """
    with optimizer._raised_by_all():
        converted, told = _converted(optimizer, state_dicts)
    optimizer.load_state_dict(converted)
    for line in told:
        logger.info(line)
    return told


def _converted(
    optimizer: MatrixOptimizer, state_dicts: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], list[str]]:
    """A state dict of ours, and what is to be told of it."""
    theirs = [(given, group) for given in state_dicts for group in given["param_groups"]]
    sizes, wanted = [len(group["params"]) for _, group in theirs], [len(g["params"]) for g in optimizer.param_groups]
    if sizes != wanted:
        raise ValueError(f"the state dicts have groups of {sizes} parameters, the optimizer of {wanted}")
    told: list[str] = []
    groups: list[dict[str, Any]] = []
    states: dict[int, dict[str, Tensor]] = {}
    for number, ((given, group), ours) in enumerate(zip(theirs, optimizer.param_groups, strict=True)):
        _check_names(group, ours, number)
        source = _source(group, ours, number)
        values, lines = _options(group, ours)
        first = sum(wanted[:number])
        found = {first + n: given["state"][key] for n, key in enumerate(group["params"]) if given["state"].get(key)}
        converted = {key: source.convert(state, group) for key, state in found.items()}
        lines = [*_fitted_(converted, optimizer, ours, first), *lines]
        states |= converted
        groups.append({**values, "params": list(range(first, first + sizes[number]))})
        told.append(f"group {number}: state of {len(found)} of {sizes[number]} parameters from {source.name}")
        told += [f"group {number}: {line}" for line in lines]
    return {"state": states, "param_groups": groups}, told


def _check_names(group: Group, ours: Group, number: int) -> None:
    theirs, names = group.get("param_names"), ours.get("param_names")
    if theirs is None and group["params"] and isinstance(group["params"][0], str):
        theirs = group["params"]
    if theirs is not None and names is not None and list(theirs) != list(names):
        pair = next(pair for pair in zip(theirs, names, strict=True) if pair[0] != pair[1])
        raise ValueError(f"group {number}: the state dict has {pair[0]!r} where the optimizer has {pair[1]!r}")


def _source(group: Group, ours: Group, number: int) -> _Source:
    """What kind of group it is; raises ValueError where it cannot be ours."""
    algorithm, wanted = group.get("algorithm"), ours["algorithm"]
    if algorithm is None and "ns_coefficients" in group:
        algorithm = "torch.optim.Muon"
    elif algorithm is None and "amsgrad" in group:
        algorithm = "torch.optim.AdamW"
    sources = {
        "matrix": {
            "torch.optim.Muon": _Source("torch.optim.Muon", _of_torch_muon),
            "muon": _Source("Muon of dion", _of_dion_muon),
            "normuon": _Source("NorMuon of dion", _of_dion_muon),
            "dion2": _Source("Dion2 of dion", _of_dion2),
            "nordion2": _Source("NorDion2 of dion", _of_dion2),
        },
        "adamw": {
            "torch.optim.AdamW": _Source("torch.optim.AdamW", _of_torch_adamw),
            "adamw": _Source("AdamW of dion", _of_dion_adamw),
        },
        "lion": {"lion": _Source("Lion of dion", _of_dion_lion)},
    }[wanted]
    if algorithm not in sources:
        raise ValueError(
            f"group {number}: algorithm {algorithm!r} with {sorted(group)} cannot be imported where the optimizer has "
            f"algorithm={wanted!r}; known there: {', '.join(sources)}"
        )
    return sources[algorithm]


def _scaled(value: Tensor, factor: float) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32)) * factor


def _of_torch_muon(state: State, group: Group) -> dict[str, Tensor]:
    decay = float(group["momentum"])
    return {"momentum": _scaled(state["momentum_buffer"], decay / (1 - decay))}


def _of_dion_muon(state: State, group: Group) -> dict[str, Tensor]:
    return _with_second_moment(state, _scaled(state["momentum"], float(group["mu"])))


def _of_dion2(state: State, group: Group) -> dict[str, Tensor]:
    return _with_second_moment(state, state["momentum"])


def _with_second_moment(state: State, momentum: Tensor) -> dict[str, Tensor]:
    if "variance_neuron" not in state:
        return {"momentum": momentum}
    return {"momentum": momentum, "second_moment": _scaled(state["variance_neuron"], 1.0)}


def _of_torch_adamw(state: State, group: Group) -> dict[str, Tensor]:
    return {name: state[name] for name in ("step", "exp_avg", "exp_avg_sq")}


def _of_dion_adamw(state: State, group: Group) -> dict[str, Tensor]:
    step = state["step_dev"] if "step_dev" in state else torch.tensor(float(group["step"]))
    return {"step": step, "exp_avg": state["momentum"], "exp_avg_sq": state["variance"]}


def _of_dion_lion(state: State, group: Group) -> dict[str, Tensor]:
    return {"exp_avg": state["momentum"]}


def _fitted_(
    states: Mapping[int, dict[str, Tensor]], optimizer: MatrixOptimizer, ours: Group, first: int
) -> Sequence[str]:
    """Gives the states the second moment that our optimizer has, or takes it away; says so."""
    lines = set()
    for number, state in states.items():
        live = optimizer.state.get(ours["params"][number - first], {})
        wanted, given = live.get("second_moment"), state.get("second_moment")
        if wanted is None and given is not None:
            del state["second_moment"]
            lines.add("their second moment of rows is left out: this optimizer has none")
        elif wanted is not None and given is None and "momentum" in state:
            state["second_moment"] = torch.zeros_like(wanted)
            lines.add("the second moment of rows starts at zero: theirs has none")
        elif wanted is not None and given is not None and given.shape != wanted.shape:
            # Averages of parts of a row: their mean is the average of the row.
            state["second_moment"] = given.flatten(1).mean(dim=1, keepdim=True)
            lines.add("a flattened row takes the mean of their second moments, which are of parts of it")
    return sorted(lines)


def _options(group: Group, ours: Group) -> tuple[dict[str, Any], list[str]]:
    """The options that are taken over, by our names, and what is to be told."""
    matrix = ours["algorithm"] == "matrix"
    names = _MATRIX_OPTIONS if matrix else _ELEMENTWISE_OPTIONS
    given = dict(group)
    if "beta1" in given:
        given["betas"] = (given["beta1"], given["beta2"])
    values, lines = {}, []
    for theirs, name in names.items():
        if theirs in given and (name in ours or name == "initial_lr"):
            values[name] = given[theirs]
        elif given.get(theirs):
            lines.append(f"{theirs}={given[theirs]!r} has no counterpart here")
    taken = [f"{name}={value!r}" for name, value in values.items() if name not in ours or ours[name] != value]
    if taken:
        lines.append(f"takes {', '.join(taken)}")
    if matrix:
        lines += [
            f"keeps {name}={ours.get(name)!r}, theirs is {theirs}={group[theirs]!r}"
            for theirs, name in _FIXED.items()
            if theirs in group and (group[theirs] or None) != (ours.get(name) or None)
        ]
        lines += _scale_lines(group, ours)
    return values, lines


def _scale_lines(group: Group, ours: Group) -> list[str]:
    """Says which updates have another size than theirs."""
    ratios: dict[float, list[str]] = {}
    for number, parameter in enumerate(ours["params"]):
        if not parameter.numel() or ours.get("num_heads") or ours.get("split_sizes"):
            continue
        shape, flatten = parameter.shape, bool(ours.get("flatten"))
        rows, columns = (shape[0], math.prod(shape[1:])) if flatten else shape[-2:]
        if "adjust_lr_fn" in group:
            tall = group["adjust_lr_fn"] != "match_rms_adamw"
            theirs = math.sqrt(max(1, rows / columns)) if tall else update_scale("rms_norm", rows, columns)
        else:
            theirs = update_scale(group["adjust_lr"], rows, columns)
        ratio = round(update_scale(ours["scale"], rows, columns) / theirs, 6)
        ratios.setdefault(ratio, []).append(f"parameter {number}")
    return [
        f"updates are {ratio:g} times theirs with scale={ours['scale']!r}: {', '.join(members)}"
        for ratio, members in ratios.items()
        if ratio != 1
    ]
