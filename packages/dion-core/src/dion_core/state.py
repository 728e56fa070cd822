"""The state of one parameter: made at construction, and taken back from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dion_core.buckets import momentum_dtype
from dion_core.elementwise import adamw_state, lion_state
from dion_core.placements import local_part, row_state_like, state_like
from dion_core.rules import Rule
from dion_core.views import is_flattened

State = dict[str, Tensor]

WAITED = "waited"
"""The steps that each row of a matrix has waited: 0 where nothing defers rows.

Optimizers that choose rows have it with every transport and number of ranks, so that their checkpoints have the same
keys and fit all of them.
"""

ROW_STATE = ("second_moment", WAITED)
"""Keys of state with one value a row."""

_REMEDY = (
    "build the optimizer as it was when it was saved (torch.distributed.checkpoint fits tensors to other ranks), "
    "or load the weights alone and start the optimizer afresh"
)


def new_state(parameter: Tensor, group: Mapping[str, Any], rule: Rule) -> State:
    """The state before the first step.

    For a matrix: "momentum", zeros like the parameter (global shape, strides, mesh and placements) in its
    momentum dtype; for the NorMuon family also "second_moment", fp32, one a row: (R, 1), also of a weight that is
    flattened or divided by rows, and (..., R, 1) of a stack; for the Dion2 family "waited", int32, of that shape.
    Else the state of AdamW or Lion.
    """
    if group["algorithm"] == "adamw":
        return adamw_state(parameter)
    if group["algorithm"] == "lion":
        return lion_state(parameter)
    state = {"momentum": state_like(parameter, momentum_dtype(parameter, group))}
    if rule.normalizer.has_second_moment:
        flatten = is_flattened(parameter, group)
        state["second_moment"] = row_state_like(parameter, torch.float32, flatten=flatten)
    if rule.chooses_rows:
        state[WAITED] = waiting_times(parameter, group)
    return state


def waiting_times(parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Zeros, int32, one a row of a matrix parameter."""
    return row_state_like(parameter, torch.int32, flatten=is_flattened(parameter, group))


def loaded_state(name: str, saved: Mapping[str, Any], live: Mapping[str, Tensor] | None) -> State:
    """A copy of the saved state in the dtypes and on the devices of the live one, which is not changed.

    Args:
        name: of the parameter, for errors.
        saved: its saved state. Waiting times may be missing (no row waits then), or be there where no transport
            defers rows now.
        live: the state that it has; None for a frozen parameter, which keeps what was saved.

    Raises:
        ValueError: other keys than the live state has, or a tensor of another shape or in another place.
    """
    if live is None:
        return {key: torch.as_tensor(value).detach().clone() for key, value in saved.items()}
    # A key that a checkpoint lacks comes back as an empty dictionary where it was flattened.
    saved = {key: value for key, value in saved.items() if not isinstance(value, Mapping)}
    given, wanted = saved.keys() - {WAITED}, live.keys() - {WAITED}
    if given != wanted:
        raise ValueError(f"{name}: the saved state has {sorted(given)}, {sorted(wanted)} are needed; {_REMEDY}")
    state = dict(live)
    if WAITED in live:
        state[WAITED] = torch.zeros_like(live[WAITED])
    for key in [key for key in live if key in saved]:
        value, old = torch.as_tensor(saved[key]), live[key]
        if value.shape != old.shape or _place(value) != _place(old):
            raise ValueError(
                f"{name}: the saved state {key!r} has shape {tuple(value.shape)} {_place(value)}; "
                f"{tuple(old.shape)} {_place(old)} is needed; {_REMEDY}"
            )
        state[key] = _stored_like(value.detach().to(device=old.device, dtype=old.dtype), old)
    return state


def loaded_states(
    state_dict: Mapping[str, Any],
    parameters: Sequence[Tensor],
    names: Mapping[Tensor, str],
    live: Mapping[Tensor, Mapping[str, Tensor]],
) -> dict[Tensor, State]:
    """Copies of all saved states by parameter.

    Args:
        state_dict: of an optimizer.
        parameters: those that its groups number, in order.
        names: of the parameters, for errors.
        live: the states that they have; nothing is changed.

    Raises:
        ValueError: as `loaded_state`.
    """
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    return {
        parameter: loaded_state(names[parameter], saved, live.get(parameter))
        for number, parameter in zip(numbers, parameters, strict=True)
        if (saved := state_dict["state"].get(number))
    }


def carried_state(
    states: Mapping[Tensor, Mapping[str, Tensor]],
    names: Mapping[Tensor, str],
    parameters: Sequence[Tensor],
    *,
    stepped: bool,
) -> dict[Tensor, Mapping[str, Tensor]]:
    """The states that are not zero, where the optimizer may go on with other parameters than those it was built from.

    Args:
        states: by parameter, as they are.
        names: of the parameters that it was built from.
        parameters: that are now in its groups, in the same order.
        stepped: whether a step was taken with the former ones.

    Raises:
        ValueError: a step was taken, there are other parameters than before, or a replaced one has state.
    """
    shapes = [parameter.shape for parameter in names]
    filled = {
        parameter: state
        for parameter, state in states.items()
        if any(bool(local_part(value).any()) for value in state.values())
    }
    here = set(parameters)
    if stepped or [parameter.shape for parameter in parameters] != shapes or not here.issuperset(filled):
        raise ValueError(
            "param_groups or a parameter in it was replaced, or moved to another device: change values in place, add "
            "groups by add_param_group; parameters are replaced or moved before the first step and before a load"
        )
    return filled


def _stored_like(value: Tensor, live: Tensor) -> Tensor:
    """A copy with the strides of the live tensor, where a convolution in channels_last was saved in another format."""
    if local_part(value).stride() == local_part(live).stride():
        return value.clone()
    return torch.empty_like(live).copy_(value)


def _place(tensor: Tensor) -> str:
    if isinstance(tensor, DTensor):
        return f"with placements {tensor.placements} on {tuple(tensor.device_mesh.mesh.shape)} ranks"
    return "in one piece"
