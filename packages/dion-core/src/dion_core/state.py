"""The state of one parameter: made at construction, and taken back from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dion_core.buckets import momentum_dtype
from dion_core.elementwise import adamw_state, lion_state
from dion_core.placements import row_state_like, state_like
from dion_core.rules import Rule

State = dict[str, Tensor]

WAITED = "waited"
"""The steps that each row of a matrix has waited, where a transport may defer rows."""


def new_state(parameter: Tensor, group: Mapping[str, Any], rule: Rule) -> State:
    """The state before the first step.

    For a matrix: "momentum", zeros like the parameter (global shape, strides, mesh and placements) in its
    momentum dtype; for the NorMuon family also "second_moment", (R, 1) fp32. Where a transport may defer rows
    the plan adds "waited", (R, 1) int32. Else the state of AdamW or Lion.
    """
    if group["algorithm"] == "adamw":
        return adamw_state(parameter)
    if group["algorithm"] == "lion":
        return lion_state(parameter)
    state = {"momentum": state_like(parameter, momentum_dtype(parameter, group))}
    if rule.normalizer.has_second_moment:
        state["second_moment"] = row_state_like(parameter, torch.float32)
    return state


def loaded_state(name: str, saved: Mapping[str, Any], live: Mapping[str, Tensor]) -> State:
    """A copy of the saved state in the dtypes and on the devices of the live one, which is not changed.

    Raises:
        ValueError: a tensor that the live state does not have, or one of another shape, by the parameter's name.
    """
    state = dict(live)
    for key, value in saved.items():
        if key == WAITED and key not in live:
            continue  # saved with a transport that may defer rows; this one does not
        if key not in live:
            raise ValueError(f"{name}: the saved state {key!r} is not one of {sorted(live)}")
        if value.shape != live[key].shape:
            shapes = f"shape {tuple(value.shape)}; {tuple(live[key].shape)} is needed"
            raise ValueError(f"{name}: the saved state {key!r} has {shapes}")
        state[key] = value.detach().to(device=live[key].device, dtype=live[key].dtype).clone()
    return state
