"""The parameter groups in a state dict: plain data that every way of saving keeps, and what travels along in them.

`torch.distributed.checkpoint` takes two things of a state dict: the state of the parameters and the groups. Of a group
it takes plain data only where a state dict is full or offloaded, and only keys that the live group has where it is
flattened. So dtypes and orthogonalizers are written as text, 0-dim tensors as numbers, and all groups have two keys
from construction on: `LAYOUT`, and `CARRIED`, a text with what the transport has learned and with keys of others.

Example: a scheduler has added `initial_lr`, and the transport has learned budgets. The group in the state dict is

    {"lr": 0.01, "momentum_dtype": "torch.float32", "initial_lr": 0.02, "layout_version": 1,
     "carried": '{"keys": {"initial_lr": 0.02}, "transport": {"budgets": [4, 4]}}', ...}

while that of the live group is `"carried": ""`.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dion_core.buckets import stable_repr
from dion_core.declared import SHARD, DeclaredShard
from dion_core.newton_schulz import ORTHOGONALIZERS
from dion_core.options import OPTIONS
from dion_core.views import VIEW_KEYS

logger = logging.getLogger("dion_core")

Group = dict[str, Any]

LAYOUT_VERSION = 1
"""Counts the layouts of the optimizer state: which tensors there are, their shapes, and what they mean."""
LAYOUT, CARRIED = "layout_version", "carried"

START = {LAYOUT: LAYOUT_VERSION, CARRIED: ""}
"""What a live group has."""

_OURS = (*OPTIONS, *VIEW_KEYS, SHARD, "params", "param_names", LAYOUT, CARRIED)


def write_groups_(groups: Sequence[Group], transport: Mapping[str, Any]) -> None:
    """Makes the groups of a state dict plain data, with what is carried.

    Args:
        groups: of the state dict, changed in place.
        transport: what the transport has learned, JSON-serializable. The group with the fewest parameters carries it,
            since a flattened state dict repeats a group for each of them.
    """
    holders = sorted((group for group in groups if group["params"]), key=lambda group: len(group["params"]))
    for group in groups:
        carried: dict[str, Any] = {}
        if keys := {name: value for name, value in _plain_keys(group).items() if _is_json(value)}:
            carried["keys"] = keys
        if transport and group is holders[0]:
            carried["transport"] = transport
        group.update({LAYOUT: LAYOUT_VERSION, CARRIED: json.dumps(carried) if carried else ""})
        for name, value in group.items():
            if isinstance(value, Tensor) and not value.ndim:
                group[name] = value.item()
            elif isinstance(value, DeclaredShard):
                group[name] = value.plain
            elif isinstance(value, torch.dtype):
                group[name] = str(value)
            elif name == "orthogonalizer" and not isinstance(value, str):
                group[name] = stable_repr(value)


def read_groups(saved: Sequence[Mapping[str, Any]], live: Sequence[Group]) -> tuple[list[Group], dict[str, Any]]:
    """New groups with the saved values and the live parameters, and what the transport had learned.

    What a saved group does not say stays as it is; a number where the live group has a tensor becomes one. Nothing is
    changed.

    Raises:
        ValueError: other groups than the live ones, or another layout of the state.
    """
    sizes, wanted = ([len(group["params"]) for group in groups] for groups in (saved, live))
    if sizes != wanted:
        raise ValueError(f"the state dict has groups of {sizes} parameters, the optimizer of {wanted}")
    groups: list[Group] = []
    transport: dict[str, Any] = {}
    for number, (given, present) in enumerate(zip(saved, live, strict=True)):
        _check_layout(given.get(LAYOUT, LAYOUT_VERSION), number)
        _check_shard(given.get(SHARD), present.get(SHARD), number)
        carried = json.loads(given.get(CARRIED) or "{}")
        transport = carried.get("transport") or transport
        values = {
            name: _like(value, present.get(name)) for name, value in given.items() if name not in ("params", SHARD)
        }
        group = {**present, **carried.get("keys", {}), **values, **START}
        for name in ("momentum_dtype", "wire_dtype"):
            if isinstance(group.get(name), str):
                group[name] = getattr(torch, group[name].removeprefix("torch."), group[name])
        if "orthogonalizer" in present:
            group["orthogonalizer"] = _orthogonalizer(group["orthogonalizer"], present["orthogonalizer"], number)
        groups.append(group)
    return groups, transport


def _like(value: Any, live: Any) -> Any:
    """A copy of a saved value: a tensor like the live one in place of a number."""
    if isinstance(live, Tensor) and isinstance(value, int | float):
        return torch.full_like(live, value)
    return copy.deepcopy(value)


def _check_layout(version: Any, number: int) -> None:
    if int(version) != LAYOUT_VERSION:
        raise ValueError(
            f"parameter group {number} was saved with {LAYOUT}={int(version)}, and this version of dion-core has "
            f"{LAYOUT_VERSION}: use the version that saved it, or load the weights alone and start the optimizer afresh"
        )


def _check_shard(saved: Any, live: DeclaredShard | None, number: int) -> None:
    """Refuses what another rank saved: ways of saving that keep one of equal names do so with all plain tensors."""
    if saved and (live is None or tuple(saved) != live.plain):
        raise ValueError(
            f"parameter group {number} was saved where it was DeclaredShard{tuple(saved)}, and is {live!r} here: every "
            "rank loads what it saved itself, in a file of its own, or all load full_state_dict()"
        )


def _orthogonalizer(saved: Any, live: Any, number: int) -> Any:
    """The saved one if it can be made from its text, else the live one."""
    if not isinstance(saved, str) or saved in ORTHOGONALIZERS:
        return saved
    if saved != stable_repr(live):
        message = "parameter group %d was saved with orthogonalizer=%s, which a state dict cannot hold: %r stays"
        logger.warning(message, number, saved, live)
    return live


def _plain_keys(group: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that others have added, a 0-dim tensor as its value."""
    others = {name: value for name, value in group.items() if name not in _OURS}
    return {name: v.item() if isinstance(v, Tensor) and not v.ndim else v for name, v in others.items()}


def _is_json(value: Any) -> bool:
    """Whether JSON gives the value back as it was."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False
