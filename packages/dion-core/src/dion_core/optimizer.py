"""The base of the four optimizers: parameter groups, state, plan, step. What differs is in `rules.Rule`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from dion_core.collectives import Group, SoloGroup, TorchGroup
from dion_core.elementwise import adamw_, adamw_state, lion_, lion_state
from dion_core.options import STRUCTURAL, check_group, check_options, check_parameter
from dion_core.pipeline import step_matrices
from dion_core.placements import local_tensor, mesh_group, row_state_like, state_like
from dion_core.plan import (
    Member,
    Plan,
    draft_buckets,
    matrix_layouts,
    momentum_dtype,
    needs_transport,
    open_plan,
)
from dion_core.preflight import compare_plans
from dion_core.presence import Presence
from dion_core.registry import Choice, choose_transport
from dion_core.report import Report, make_report
from dion_core.rules import Rule

Parameters = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]
ProcessGroupLike = ProcessGroup | DeviceMesh | None


class MatrixOptimizer(Optimizer):
    """Orthonormalized updates for matrices, AdamW or Lion for the rest, in one torch Optimizer.

    Construction is collective: all ranks that hold the parameters build the optimizer together, compare their
    plans, and raise alike if one of them cannot. So are `add_param_group` and `load_state_dict`.
    """

    rule: ClassVar[Rule]

    def __init__(self, params: Parameters, options: dict[str, Any]) -> None:
        """Builds state and plan.

        Args:
            params: parameters, named parameters, or groups of either.
            options: every option by its name; the optimizer-wide ones are taken out, the rest are the
                defaults of the groups.
        """
        self._transport = options.pop("transport")
        self._nonfinite = options.pop("nonfinite")
        self._replicas = options.pop("group")
        self._names: dict[Tensor, str] = {}
        self._structure: list[tuple[Any, ...]] = []
        self._plan: Plan | None = None
        self._choice: Choice | None = None
        self._num_steps = 0
        entries = [dict(entry) if isinstance(entry, dict) else entry for entry in params]
        self._group, self._device = _find_group(entries, self._replicas)
        try:
            check_options({**options, "nonfinite": self._nonfinite})
            super().__init__(cast(Parameters, entries), {"algorithm": "matrix", **options})
        except (ValueError, TypeError, RuntimeError) as error:
            compare_plans([], error, self._group, self._device)
            raise
        self._skipped = torch.zeros((), device=self._device)
        self._build()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Collective over the ranks that hold the parameters, whichever gradients they have.

        Args:
            closure: re-evaluates the model with gradients enabled and returns the loss; called once.

        Returns:
            What the closure returned, else None.

        Raises:
            ValueError: a group key that the plan is made from was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        plan = self._current_plan()
        members = [*_matrix_members(plan), *(member for group in plan.elementwise for member in group)]
        by_number = sorted(members, key=lambda member: member.number)
        presence = Presence(
            [member.gradient for member in by_number],
            self._group,
            self._device,
            skip_nonfinite=self._nonfinite == "skip",
        )
        step_matrices(plan, self.state, presence)
        for group in plan.elementwise:
            self._step_elementwise(group, presence)
        self._num_steps += 1
        self._skipped += presence.skipped
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group and makes its state. Collective once the optimizer is built.

        Raises:
            ValueError: an option or a parameter is not allowed; the optimizer stays as it was.
            TransportError: ranks disagree.
        """
        number = len(self.param_groups)
        built = self._plan is not None
        try:
            entries = self._check_new_group(param_group, number)
            super().add_param_group({**param_group, "params": entries})
        except (ValueError, TypeError) as error:
            if built:
                compare_plans([], error, self._group, self._device)
            raise
        self._init_state(self.param_groups[-1])
        if built:
            try:
                self._build()
            except Exception:
                for parameter in self.param_groups.pop()["params"]:
                    self.state.pop(parameter, None)
                    self._names.pop(parameter, None)
                self._structure = [_structure(group) for group in self.param_groups]
                raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave; every state tensor keeps its documented dtype. Collective.

        Raises:
            ValueError: a state tensor has another shape than this optimizer's; nothing is changed then.
        """
        saved_ids = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        loaded = []
        for number, parameter in zip(saved_ids, parameters, strict=False):
            saved, live = state_dict["state"].get(number, {}), self.state.get(parameter, {})
            loaded.append((parameter, self._loaded_state(parameter, saved, live)))
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        for parameter, state in loaded:
            if state:
                self.state[parameter] = state
        self._build()

    def report(self) -> Report:
        """What was planned, and what happened since the last report, on this rank, as plain data.

        Never a collective. Reading it waits for the device.
        """
        plan = self._current_plan()
        num_steps, self._num_steps = self._num_steps, 0
        return make_report(plan, self._choice, num_steps, self._skipped)

    def _check_new_group(self, group: dict[str, Any], number: int) -> list[Any]:
        """The group's parameters as a list; raises ValueError before anything of the optimizer has changed."""
        check_group(group, self.defaults, number, type(self).__name__)
        given = group["params"]
        entries = [given] if isinstance(given, Tensor) else list(given)
        matrix = group.get("algorithm", "matrix") == "matrix"
        names: dict[Tensor, str] = {}
        for place, entry in enumerate(entries):
            name, parameter = entry if isinstance(entry, tuple) else (None, entry)
            name = name or f"parameter {place} of group {number}"
            if not isinstance(parameter, Tensor):
                raise TypeError(f"{name} is {type(parameter).__name__}; a Tensor is needed")
            other = names.get(parameter) or self._names.get(parameter)
            if other is not None:
                raise ValueError(f"{name} is the same tensor as {other}: a tied tensor is given once")
            check_parameter(parameter, name, matrix=matrix)
            _check_ranks(parameter, name, self._group)
            names[parameter] = name
        self._names.update(names)
        return entries

    def _init_state(self, group: dict[str, Any]) -> None:
        """Makes the state of every trainable parameter of a group that has none yet."""
        for parameter in group["params"]:
            if not parameter.requires_grad or self.state.get(parameter):
                continue
            if group["algorithm"] == "matrix":
                state = {"momentum": state_like(parameter, momentum_dtype(parameter, group))}
                if self.rule.normalizer.has_second_moment:
                    state["second_moment"] = row_state_like(parameter)
            else:
                state = adamw_state(parameter) if group["algorithm"] == "adamw" else lion_state(parameter)
            self.state[parameter] = state

    def _loaded_state(
        self, parameter: Tensor, saved: dict[str, Any], live: dict[str, Any]
    ) -> dict[str, Any]:
        state = dict(live)
        for key, value in saved.items():
            if key not in live:
                raise ValueError(f"{self._names[parameter]}: state {key!r} is not kept by {type(self).__name__}")
            if value.shape != live[key].shape:
                raise ValueError(
                    f"{self._names[parameter]}: state {key!r} has shape {tuple(value.shape)}; "
                    f"{tuple(live[key].shape)} is needed"
                )
            state[key] = value.detach().to(device=live[key].device, dtype=live[key].dtype).clone()
        return state

    def _build(self) -> None:
        """Makes the plan, compares it with the other ranks', and opens the transport."""
        matrices: list[Member] = []
        elementwise: list[list[Member]] = []
        for group, member in self._members():
            if group["algorithm"] == "matrix":
                if member.parameter.numel():
                    matrices.append(member)
            else:
                if not elementwise or elementwise[-1][0].group is not group:
                    elementwise.append([])
                elementwise[-1].append(member)
        failure: Exception | None = None
        lines: list[str] = []
        try:
            layouts = matrix_layouts(matrices, _plain_replicas(self._replicas))
            scopes = {member.group["scope"] for member in matrices if "scope" in member.group}
            self._choice = None
            if needs_transport(layouts):
                for scope in sorted(scopes, key=str) or [None]:
                    self._choice = choose_transport(self._transport, scope, chooses_rows=self.rule.chooses_rows)
            buckets, loads = draft_buckets(matrices, layouts, self.rule, self._choice)
            lines = [type(self).__name__, f"transport {self._choice and self._choice.transport!r}"]
            lines += [bucket.describe() for bucket in buckets]
            lines += [_describe(group) for group in elementwise]
            lines += [_hyperparameters(group) for group in self.param_groups]
        except (ValueError, RuntimeError) as error:
            failure = error
        compare_plans(lines, failure, self._group, self._device)
        self._plan = open_plan(buckets, loads, elementwise, self._choice)
        self._structure = [_structure(group) for group in self.param_groups]

    def _members(self) -> Iterator[tuple[dict[str, Any], Member]]:
        number = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    yield group, Member(parameter, self._names[parameter], group, number)
                    number += 1

    def _current_plan(self) -> Plan:
        """The plan, made again where parameters began or ceased to require gradients."""
        structure = [_structure(group) for group in self.param_groups]
        if structure != self._structure:
            for number, (now, planned) in enumerate(zip(structure, self._structure, strict=True)):
                for name, value, before in zip(STRUCTURAL, now, planned, strict=False):
                    if value != before:
                        raise ValueError(
                            f"{name}={value!r} in parameter group {number}: it was {before!r} when the plan was "
                            "made and cannot change; make another optimizer"
                        )
            for group in self.param_groups:
                self._init_state(group)
            self._build()
        assert self._plan is not None
        return self._plan

    def _step_elementwise(self, members: Sequence[Member], presence: Presence) -> None:
        options = members[0].group
        parameters = [local_tensor(member.parameter) for member in members]
        gradients = [member.gradient for member in members]
        states = [
            {key: local_tensor(value) for key, value in self.state[member.parameter].items()} for member in members
        ]
        active = [presence.masks[member.number] for member in members]
        common = {key: options[key] for key in ("lr", "betas", "weight_decay", "maximize")}
        if options["algorithm"] == "adamw":
            adamw_(parameters, gradients, states, active, epsilon=options["epsilon"], **common)
        else:
            lion_(parameters, gradients, states, active, **common)


def _matrix_members(plan: Plan) -> list[Member]:
    return [member for bucket in plan.buckets for member in bucket.members]


def _structure(group: dict[str, Any]) -> tuple[Any, ...]:
    trainable = tuple(parameter.requires_grad for parameter in group["params"])
    return (*(group.get(name) for name in STRUCTURAL), trainable)


def _hyperparameters(group: dict[str, Any]) -> str:
    names = ("lr", "momentum", "beta2", "weight_decay", "betas", "epsilon", "maximize")
    more = ("nesterov", "cautious_weight_decay", *STRUCTURAL)
    return ", ".join(f"{name}={group[name]}" for name in (*names, *more) if name in group)


def _describe(members: Sequence[Member]) -> str:
    shapes = ", ".join(
        f"{member.name} {tuple(member.parameter.shape)} {member.parameter.dtype}" for member in members
    )
    return f"{members[0].group['algorithm']}: {shapes}"


def _plain_replicas(group: ProcessGroupLike) -> Group:
    """The ranks that hold equal copies of plain tensors."""
    if group is None:
        return SoloGroup()
    if isinstance(group, DeviceMesh):
        return mesh_group(group)
    replicas = TorchGroup(group)
    return replicas if replicas.size > 1 else SoloGroup()


def _tensors(entries: Iterable[Any]) -> Iterator[Tensor]:
    for entry in entries:
        if isinstance(entry, Tensor):
            yield entry
        elif isinstance(entry, tuple) and len(entry) == 2:
            yield from _tensors([entry[1]])
        elif isinstance(entry, dict):
            # The group keeps a list, so that a generator given once can be read again.
            given = entry.get("params", [])
            entry["params"] = [given] if isinstance(given, Tensor) else list(given)
            yield from _tensors(entry["params"])


def _find_group(entries: list[Any], replicas: ProcessGroupLike) -> tuple[Group, torch.device]:
    """The ranks that step together, and the device of their small messages, from the parameters themselves."""
    tensors = [tensor for tensor in _tensors(entries) if not tensor.is_meta]
    device = local_tensor(tensors[0]).device if tensors else torch.device("cpu")
    for tensor in tensors:
        if isinstance(tensor, DTensor) and tensor.device_mesh.size() > 1:
            return mesh_group(tensor.device_mesh), device
    return _plain_replicas(replicas), device


def _check_ranks(parameter: Tensor, name: str, group: Group) -> None:
    if not isinstance(parameter, DTensor):
        return
    ranks = sorted(parameter.device_mesh.mesh.flatten().tolist())
    if ranks != sorted(group.ranks) and len(ranks) > 1:
        raise ValueError(
            f"{name}: lies on {parameter.device_mesh}, ranks {ranks}, while other parameters of this optimizer "
            f"lie on ranks {sorted(group.ranks)}; use one optimizer for each set of ranks"
        )
