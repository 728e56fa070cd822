"""Where the state of an optimizer lies: as its parameters do. The other way is in `layerwise`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor
from torch.distributed.tensor import DTensor

from dion_core.collectives import Group
from dion_core.meshes import whole_tensor
from dion_core.plan import Plan, make_plan
from dion_core.registry import Choice
from dion_core.rules import Rule
from dion_core.state import State, new_state
from dion_core.transport import Transport

PART = "layerwise"
"""Key of a state dict that holds the parameters of one rank alone, and says of which one of how many."""


class Keeping(Protocol):
    """Decides which state is on this rank."""

    def first_state(self, parameter: Tensor, group: Mapping[str, Any], rule: Rule) -> State:
        """The state of a new parameter, before there is a plan with it."""

    def make_plan(
        self,
        groups: Sequence[Mapping[str, Any]],
        names: Mapping[Tensor, str],
        rule: Rule,
        replicas: Group,
        transport: str | Transport | Choice,
    ) -> Plan:
        """The plan of all parameters, as `plan.make_plan` says. What earlier plans decided about state is kept."""

    def adopt(self, plan: Plan, states: dict[Tensor, State]) -> None:
        """Makes the state that the plan puts on this rank, in place of what is missing; no communication."""

    def marked(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """What `state_dict` gives: says so if it is not the whole state."""

    def own_part(self, state_dict: dict[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
        """Of a state dict that is to be loaded, what belongs on this rank.

        Args:
            state_dict: given to `load_state_dict`.
            parameters: all of them, in the order of its numbers.

        Raises:
            ValueError: it is the part of another rank.
        """

    def whole(self, state_dict: dict[str, Any], parameters: Sequence[Tensor], to: int | None) -> dict[str, Any]:
        """The state of all parameters in plain tensors on the CPU, on rank `to` or on all. Collective."""


class LikeParameters:
    """State has the layout of its parameter."""

    def first_state(self, parameter: Tensor, group: Mapping[str, Any], rule: Rule) -> State:
        return new_state(parameter, group, rule)

    def make_plan(
        self,
        groups: Sequence[Mapping[str, Any]],
        names: Mapping[Tensor, str],
        rule: Rule,
        replicas: Group,
        transport: str | Transport | Choice,
    ) -> Plan:
        return make_plan(groups, names, rule, replicas, transport)

    def adopt(self, plan: Plan, states: dict[Tensor, State]) -> None:
        pass

    def marked(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict

    def own_part(self, state_dict: dict[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
        if PART in state_dict:
            part = state_dict[PART]
            raise ValueError(
                f"this is what rank {part['rank']} of {part['world_size']} kept layer by layer, without what other "
                "ranks did: save full_state_dict() there"
            )
        return state_dict

    def whole(self, state_dict: dict[str, Any], parameters: Sequence[Tensor], to: int | None) -> dict[str, Any]:
        return on_host(state_dict)

    def __repr__(self) -> str:
        return "like_parameters"


def on_host(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict with state in plain whole tensors on the CPU. Collective where there are DTensors."""
    states = {
        number: {key: _host_copy(value) for key, value in state.items()}
        for number, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


def _host_copy(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    whole = whole_tensor(value) if isinstance(value, DTensor) else value
    return whole.detach().to("cpu", copy=True)
