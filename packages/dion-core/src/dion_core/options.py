"""Checks the options of an optimizer and of its parameter groups, and says what is allowed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor

from dion_core.declared import SHARD, check_shard_key
from dion_core.newton_schulz import ORTHOGONALIZERS, orthogonalizer
from dion_core.rules import SCALES, SCOPES
from dion_core.views import VIEW_KEYS, check_view_keys

logger = logging.getLogger("dion_core")

ALGORITHMS = ("matrix", "adamw", "lion")
NONFINITE = ("rows", "skip")
DTYPES = (None, torch.float16, torch.bfloat16, torch.float32, torch.float64)

WIRE_DTYPES = (None, torch.bfloat16, torch.float32, torch.float64)

OPTIMIZER_WIDE = ("transport", "nonfinite", "group", "state")
"""Options of the whole optimizer, which a parameter group cannot override."""
STRUCTURAL = (
    "algorithm",
    "scope",
    "fraction",
    "scale",
    "momentum_dtype",
    "wire_dtype",
    "orthogonalizer",
    *VIEW_KEYS,
    SHARD,
)
"""Group keys that the plan is made from, so that they cannot change between steps."""
_TRAINABLE = attrgetter("requires_grad")

RATES = ("lr", "weight_decay", "momentum", "beta2")
"""Group keys that may be set anew before every step, to numbers or 0-dim tensors."""


def _number(value: object) -> float | None:
    if isinstance(value, Tensor):
        return float(value) if value.ndim == 0 else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _within(low: float, high: float, *, open_low: bool = False, open_high: bool = False) -> Callable[[Any], bool]:
    def check(value: object) -> bool:
        number = _number(value)
        if number is None:
            return False
        above = number > low if open_low else number >= low
        return above and (number < high if open_high else number <= high)

    return check


def _betas(value: object) -> bool:
    below_one = _within(0, 1, open_high=True)
    return isinstance(value, Iterable) and len(pair := list(value)) == 2 and all(map(below_one, pair))


def _orthogonalizer(value: object) -> bool:
    try:
        orthogonalizer(cast(Any, value))
    except ValueError:
        return False
    return True


_INFINITY = float("inf")
_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "lr": (_within(0, _INFINITY, open_high=True), "a finite number >= 0, or a 0-dim tensor of one"),
    "momentum": (_within(0, 1, open_high=True), "0 <= momentum < 1"),
    "beta2": (_within(0, 1, open_high=True), "0 <= beta2 < 1"),
    "weight_decay": (_within(0, _INFINITY, open_high=True), "a finite number >= 0"),
    "fraction": (_within(0, 1, open_low=True), "0 < fraction <= 1"),
    "orthogonalizer": (_orthogonalizer, f"{', '.join(map(repr, ORTHOGONALIZERS))} or a callable object"),
    "epsilon": (_within(0, _INFINITY, open_high=True), "a finite number >= 0"),
    "betas": (_betas, "two numbers, each 0 <= beta < 1"),
    "scale": (lambda value: value in SCALES, f"one of {SCALES}"),
    "scope": (lambda value: value in (None, *SCOPES), f"one of {(None, *SCOPES)}"),
    "algorithm": (lambda value: value in ALGORITHMS, f"one of {ALGORITHMS}"),
    "nonfinite": (lambda value: value in NONFINITE, f"one of {NONFINITE}"),
    "momentum_dtype": (lambda value: value in DTYPES, "None or a floating dtype"),
    "wire_dtype": (
        lambda value: value in WIRE_DTYPES,
        "None, torch.bfloat16, torch.float32 or torch.float64 (the range of float16 is too small for momentum)",
    ),
    **{
        name: (lambda value: isinstance(value, bool), "True or False")
        for name in ("nesterov", "cautious_weight_decay", "maximize")
    },
}

OPTIONS = tuple(_CHECKS)
"""Every option that this module knows to check, of whichever optimizer."""


def check_options(options: Mapping[str, Any], where: str = "") -> None:
    """Raises ValueError for the first option whose value is not allowed, naming it, its value and what is.

    Args:
        options: names and values; names that are not known are passed over.
        where: said after the value, to tell a parameter group.
    """
    for name, value in options.items():
        if name in _CHECKS:
            check, allowed = _CHECKS[name]
            if not check(value):
                raise ValueError(f"{name}={value!r}{where} is not allowed: {allowed}")


def check_group(group: Mapping[str, Any], defaults: Mapping[str, Any], number: int, optimizer: str) -> None:
    """Raises ValueError for a parameter group that holds what it cannot.

    Args:
        group: the group as the user gave it.
        defaults: the options of this optimizer.
        number: of the group.
        optimizer: its name.
    """
    where = f" in parameter group {number}"
    if "params" not in group:
        raise ValueError(f'parameter group {number} has no "params"; it has {sorted(group)}')
    for name in OPTIMIZER_WIDE:
        if name in group:
            raise ValueError(f"{name}{where} is an option of the whole optimizer: give it to {optimizer}(...)")
    if group.get("algorithm", "matrix") == "matrix":
        check_view_keys(group, where)
    check_shard_key(group, where)
    for name in OPTIONS:
        if name in group and name not in defaults and name not in OPTIMIZER_WIDE:
            raise ValueError(f"{name}={group[name]!r}{where}: {optimizer} has no such option")
    check_options(group, where)


def check_parameter(parameter: Tensor, name: str, *, matrix: bool) -> None:
    """Raises ValueError for a tensor that cannot be optimized as its group says."""
    if parameter.is_meta:
        raise ValueError(f"{name}: a meta tensor has no values; materialize the model before the optimizer")
    if parameter.dtype not in DTYPES:
        allowed = ", ".join(str(dtype) for dtype in DTYPES if dtype is not None)
        raise ValueError(f"{name}: dtype {parameter.dtype} is not supported: one of {allowed} is needed")
    if any(length > 1 and stride == 0 for length, stride in zip(parameter.shape, parameter.stride(), strict=True)):
        raise ValueError(f"{name}: strides {parameter.stride()}: elements share memory; give a copy (clone)")
    if matrix and parameter.ndim < 2:
        hint = 'give it to a group with algorithm="adamw" or "lion"'
        shape = tuple(parameter.shape)
        raise ValueError(f"{name}: shape {shape} is not a matrix (2 dimensions or more are needed); {hint}")


def warn_of_group(group: Mapping[str, Any], number: int, optimizer: str) -> None:
    """Logs what a parameter group as given holds that is allowed and seldom meant."""
    known = (*OPTIONS, *VIEW_KEYS, SHARD, "params")
    for name in group:
        close = [] if name in known else get_close_matches(name, known, n=1, cutoff=0.75)
        if close:
            message = "key %r in parameter group %d is not an option of %s and has no effect; did you mean %r?"
            logger.warning(message, name, number, optimizer, close[0])
    algorithm = group.get("algorithm", "matrix")
    if algorithm != "matrix" and "lr" not in group:
        logger.warning("parameter group %d has algorithm=%r and takes the lr of the matrices", number, algorithm)


def identity(group: Mapping[str, Any]) -> tuple[int, ...]:
    """Tells whether it is the group that the plan was made from, with its parameters where they were."""
    parameters = group["params"]
    return (id(group), hash(parameters[0].device) if parameters else 0, *map(id, parameters))


def structure(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """What the plan is made from: the structural options and which parameters are trainable.

    Raises:
        ValueError: a rate was set to a tensor that is not 0-dim, which construction refuses too.
    """
    for name in RATES:
        if isinstance(group.get(name), Tensor) and group[name].ndim:
            check_options({name: group[name]}, " in a parameter group")
    with torch._C.DisableTorchFunctionSubclass():  # to look for one takes as long as to read
        trainable = tuple(map(_TRAINABLE, group["params"]))
    values = (group.get(name) for name in STRUCTURAL)
    # A list is copied, since it could be changed in place.
    return (*(tuple(value) if isinstance(value, list) else value for value in values), trainable)


def check_structure(now: Sequence[tuple[Any, ...]], planned: Sequence[tuple[Any, ...]]) -> None:
    """Raises ValueError where a structural option is another one than when the plan was made.

    Args:
        now: of every group what `structure` gives.
        planned: what it gave then.
    """
    for number, (values, before) in enumerate(zip(now, planned, strict=True)):
        for name, value, old in zip(STRUCTURAL, values, before, strict=False):
            if value != old:
                raise ValueError(
                    f"{name}={value!r} in parameter group {number}: it was {old!r} when the plan was made and cannot "
                    "change; make another optimizer"
                )
