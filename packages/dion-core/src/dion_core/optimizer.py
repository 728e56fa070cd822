"""The base of the four optimizers: parameter groups, state, plan, step. What differs is in `rules.Rule`."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from dion_core.buckets import MemberGradients
from dion_core.checkpoint import START, read_groups, write_groups_
from dion_core.copies import copied_tensors, differing_copies
from dion_core.layerwise import keeping_for
from dion_core.membership import check_group_ranks, check_members, checked_names, listed, replica_group, stepping_group
from dion_core.operands import Operands, Rates, StepOperands
from dion_core.options import check_group, check_options, check_structure, identity, structure, warn_of_group
from dion_core.pipeline import agree_on_rows, step_all
from dion_core.plan import Plan
from dion_core.preflight import compare_plans, report_failure
from dion_core.preparation import prepare
from dion_core.presence import Presence
from dion_core.process_groups import through
from dion_core.report import Report, make_report
from dion_core.rules import Rule
from dion_core.running import StepRunner
from dion_core.state import WAITED, carried_state, loaded_state, loaded_states, waiting_times
from dion_core.tiling import agree_on_shards, gathered, own_shards

logger = logging.getLogger("dion_core")

Parameters = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]


class MatrixOptimizer(Optimizer):
    """Orthonormalized updates for matrices, AdamW or Lion for the rest, in one torch Optimizer.

    Construction is collective: all ranks that hold the parameters build the optimizer together, compare their
    plans, and raise alike if one of them cannot. So are `add_param_group` and `load_state_dict`.

    `state_dict` is no collective: each rank gets its part of the state, and groups of plain data (see `checkpoint`).
    """

    rule: ClassVar[Rule]

    # torch.amp.GradScaler then leaves unscaling and skipping to `step`, which agrees on the skip over all ranks, and
    # sets `grad_scale` and `found_inf` for its duration.
    _step_supports_amp_scaling = True

    def __init__(self, params: Parameters, options: dict[str, Any]) -> None:
        """Builds state and plan.

        Args:
            params: parameters, named parameters, or groups of either.
            options: every option by its name; the optimizer-wide ones are taken out, the rest are the
                defaults of the groups.
        """
        self._transport = options.pop("transport")
        self._nonfinite = options.pop("nonfinite")
        given_group, self._given_state = options.pop("group"), options.pop("state")
        self._replicas, self._replicated = replica_group(given_group), given_group is not None
        self._names: dict[Tensor, str] = {}
        self._structure: list[tuple[Any, ...]] = []
        self._plan: Plan | None = None
        self._identities: list[tuple[int, ...]] = []
        self._past: list[int] = [0, 0, 0]
        self._num_steps = 0
        self._runner = StepRunner(self._nonfinite)
        self._warned = self._stepped = False
        entries = [dict(entry) if isinstance(entry, dict) else entry for entry in listed(params)]
        self._group, self._device = stepping_group(entries, self._replicas)
        with self._raised_by_all():
            if isinstance(params, Tensor):
                raise TypeError("params is a Tensor; an iterable of parameters is needed, such as [parameter]")
            check_group_ranks(self._replicas, self._group)
            check_options({**options, "nonfinite": self._nonfinite})
            self._keeping = keeping_for(self._given_state, self._group, replicated=self._replicated)
            super().__init__(cast(Parameters, entries), {"algorithm": "matrix", **options, **START})
            self.register_state_dict_pre_hook(lambda optimizer: self._follow_parameters())
            self.register_state_dict_post_hook(_write_groups)
        self._agree_on_shards()
        with self._raised_by_all():
            self._skipped = torch.zeros((), device=self._device)
            plan = self._make_plan()
        self._adopt(plan)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. Collective over the ranks that hold the parameters, whichever gradients they have.

        Args:
            closure: re-evaluates the model with gradients enabled and returns the loss; called once.

        Returns:
            What the closure returned, else None.

        Raises:
            ValueError: a group key that the plan is made from was changed, or a gradient is sparse or lies elsewhere
                than its parameter. If that happens on one rank alone, the others meet the time-out.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        plan = self._current_plan()
        self._stepped = True
        gradients = self._gradients()
        if not self._warned and all(gradient is None for gradient in gradients):
            logger.warning("a step found no gradient here; was the optimizer built before the model was sharded?")
            self._warned = True
        scaled = getattr(self, "found_inf", None) is not None or getattr(self, "grad_scale", None) is not None
        gradients = self._runner.gradients(plan, gradients, scaled=scaled)
        of_buckets = [bucket.gradients(gradients) for bucket in plan.stepped]
        operands = self._operands.of_step(self.state, agree_on_rows(plan.stepped, of_buckets, self.state))
        rates = self._rates.of_step()
        work = partial(self._launch, plan, gradients, operands, rates)
        self._runner.run(work, plan, operands, (gradients, rates, self.state), scaled=scaled)
        if plan.session is not None:
            plan.session.end()
        self._num_steps += 1
        return loss

    def capture(self) -> None:
        """Makes the steps that follow replays of one CUDA graph: the next one runs as it is, then one is captured.

        Learning rate, weight decay, momentum and beta2 may change from step to step. Whatever else changes (another
        option, a group, message sizes of a transport that learns) is noticed, and the step captured anew. A graph keeps
        the memory that a step needs until `release`, which is to be called before process groups are destroyed.

        Raises:
            ValueError: something cannot be captured, by name: a parameter that is not on a GPU, a group of MPI, a
                transport that reads on the host, matrices split by columns, heads or blocks cut unevenly,
                nonfinite="skip".
                A later step raises it for a parameter without a gradient and for a loss scaler.
        """
        self._runner.capture(self._current_plan())

    def release(self) -> None:
        """Ends `capture` and frees the graph with its memory; steps run as they are again."""
        self._runner.release()

    def _launch(
        self,
        plan: Plan,
        gradients: Sequence[Tensor | None],
        operands: Sequence[Operands],
        rates: Sequence[float | Tensor],
    ) -> None:
        """All work on the device."""
        presence = Presence(
            gradients,
            self._group,
            self._device,
            skip_nonfinite=self._nonfinite == "skip",
            found_inf=getattr(self, "found_inf", None),
        )
        step_all(plan, self.state, operands, presence, rates)
        if presence.may_skip:
            self._skipped += presence.skipped

    def _gradients(self) -> list[Tensor | None]:
        """This rank's gradients, divided by the scale of a loss scaler that has not done so itself."""
        gradients = self._member_gradients.of_step()
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if scale is None:
            return gradients
        return [None if g is None else (g / scale.to(g.device)).to(g.dtype) for g in gradients]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group and makes its state. Collective once the optimizer is built.

        Raises:
            ValueError: an option or a parameter is not allowed; the optimizer stays as it was.
            TransportError: ranks disagree; the optimizer stays as it was.
        """
        if self._plan is None:  # called by the constructor
            self._add_group(param_group)
            return
        groups = list(self.param_groups)
        try:
            with self._raised_by_all():
                self._add_group(param_group)
            self._agree_on_shards()
            with self._raised_by_all():
                plan = self._make_plan()
            self._adopt(plan)
        except Exception:
            for group in self.param_groups[len(groups) :]:
                for parameter in group["params"]:
                    self.state.pop(parameter, None)
                    self._names.pop(parameter, None)
            self.param_groups = groups
            raise

    def state_dict(self) -> dict[str, Any]:
        """Groups and state as torch's optimizers give them; in layer-wise mode, what this rank keeps."""
        return self._keeping.marked(super().state_dict())

    def full_state_dict(self, to: int | None = None) -> dict[str, Any]:
        """The whole state in plain tensors on the CPU, which loads at any number of ranks and in any mode. Collective.

        Args:
            to: the global rank that gets it, the others getting an empty dict; None: all ranks.

        Raises:
            ValueError: `to` is not a rank of this optimizer.
        """
        if to is not None and to not in self._group.ranks:
            raise ValueError(f"to={to} is not allowed: the ranks of this optimizer are {list(self._group.ranks)}")
        given = gathered(self.state_dict(), self.param_groups, self._replicas)
        with through(self._replicas):
            whole = self._keeping.whole(given, self._parameters(), to)
        return whole if to in (None, self._group.ranks[self._group.rank]) else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave; every state tensor keeps its documented dtype. Collective.

        Raises:
            ValueError: something does not fit this optimizer; nothing is changed then.
            TransportError: ranks disagree.
        """
        self._follow_parameters()
        before = self.param_groups, self.state
        try:
            with self._raised_by_all():
                given = dict(state_dict)
                for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
                    given = pre_hook(self, given) or given
                given = self._keeping.own_part(own_shards(given, self.param_groups), self._parameters())
                groups, learned = self._checked_groups(given)
                loaded = loaded_states(given, self._parameters(), self._names, self.state)
                self.param_groups, self.state = groups, defaultdict(dict, {**before[1], **loaded})
                plan = self._make_plan()
            self._adopt(plan)
        except Exception:
            self.param_groups, self.state = before
            raise
        if plan.session is not None:
            plan.session.load_state_dict(learned)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def report(self) -> Report:
        """What was planned, and what happened since the last report, on this rank, as plain data.

        Never a collective. Reading it waits for the device.
        """
        assert self._plan is not None
        num_steps, self._num_steps = self._num_steps, 0
        past, self._past = self._past, [0, 0, 0]
        return make_report(self._plan, self.state, num_steps, self._skipped, past)

    def check_replicas(self) -> list[str]:
        """Which copies of parameters and state differ between ranks, a line each by name; empty if all are bit-equal.

        Of replicated parameters (DDP, HSDP) and of what is replicated beside a split; layer-wise state has no copies,
        and of declared shards only values a row where columns are divided, and counts of steps.
        Collective, for use in between steps: it reads all of them once, and waits for the device.
        """
        assert self._plan is not None
        states = self.state if self._plan.state_mode == "like_parameters" else {}
        tensors = copied_tensors(self.param_groups, self._names, states)
        return differing_copies(tensors, self._group, self._replicas, self._device)

    @contextmanager
    def _raised_by_all(self) -> Iterator[None]:
        """What fails in here on this rank fails on all: the others learn of it in their preflight."""
        try:
            yield
        except Exception as error:
            report_failure(error, self._group, self._device)
            raise

    def __getstate__(self) -> dict[str, Any]:
        """Refuses copies: process groups and the open transport cannot be copied."""
        raise TypeError(f"{type(self).__name__} cannot be pickled or deep-copied; save and load its state_dict()")

    def _add_group(self, group: dict[str, Any]) -> None:
        number, name = len(self.param_groups), type(self).__name__
        check_group(group, self.defaults, number, name)
        names = checked_names(group, number, self._names, self._group, self._replicas)
        warn_of_group(group, number, name)
        super().add_param_group(dict(group))
        self._names.update(names)
        self._init_state(self.param_groups[-1])

    def _checked_groups(self, state_dict: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """New groups from the saved ones, and what the transport had learned; raises ValueError, changing nothing."""
        groups, learned = read_groups(state_dict["param_groups"], self.param_groups)
        for number, (group, live) in enumerate(zip(groups, self.param_groups, strict=True)):
            check_group(group, {**self.defaults, **live}, number, type(self).__name__)
        return groups, learned

    def _init_state(self, group: dict[str, Any]) -> None:
        """Makes the state of every trainable parameter of a group that has none yet."""
        for parameter in group["params"]:
            if parameter.requires_grad and not self.state.get(parameter):
                self.state[parameter] = self._keeping.first_state(parameter, group, self.rule)

    def _parameters(self) -> list[Tensor]:
        """All parameters, in the order of their numbers in a state dict."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _agree_on_shards(self) -> None:
        """All ranks learn here if one has failed, before they would wait for it in new groups."""
        agree_on_shards(self.param_groups, self._names, self._group, self._replicas, self._device)

    def _make_plan(self) -> Plan:
        transport = (self._plan and self._plan.choice) or self._transport
        with through(self._replicas):
            return self._keeping.make_plan(self.param_groups, self._names, self.rule, self._replicas, transport)

    def _adopt(self, plan: Plan) -> None:
        """Compiles for the plan, compares it with the other ranks' and opens its transport. Collective."""
        with self._raised_by_all():
            prepare(plan)
        kind = f"{type(self).__name__}, nonfinite={self._nonfinite!r}, state={self._keeping!r}"
        compare_plans([kind, *plan.describe(self._group.size)], self._group, self._device, own=plan.describe_own())
        plan.open()
        self._keeping.adopt(plan, self.state)
        self._set_waiting(plan)
        if self._plan is not None:
            self._past = [past + count for past, count in zip(self._past, self._plan.row_counts(), strict=True)]
        self._plan = plan
        self._member_gradients = MemberGradients(plan.members)
        self._operands, self._rates = StepOperands(plan.stepped), Rates(plan.elementwise)
        self._runner.adopt(plan, self._group, self._device)
        self._structure = [structure(group) for group in self.param_groups]
        self._identities = [identity(group) for group in self.param_groups]

    def _follow_parameters(self) -> None:
        """Starts anew with parameters that stand in the place of others, or lie on another device. Collective then.

        Frameworks that shard or move a model after the optimizer was built from it do so before the first step.
        """
        if self._plan is None or [identity(group) for group in self.param_groups] == self._identities:
            return
        parameters = self._parameters()
        # One rank alone may have state; that a step was taken all know, and raise without a message.
        with nullcontext() if self._stepped else self._raised_by_all():
            carried = carried_state(self.state, self._names, parameters, stepped=self._stepped)
        self._names = dict(zip(parameters, self._names.values(), strict=True))
        self._group, self._device = stepping_group(self.param_groups, self._replicas)
        self._plan, self.state = None, defaultdict(dict)
        with self._raised_by_all():
            check_members(self._names, self._replicas, self._group)
            self._keeping = keeping_for(self._given_state, self._group, replicated=self._replicated)
            self._skipped = torch.zeros((), device=self._device)
            for group in self.param_groups:
                self._init_state(group)
            plan = self._make_plan()
        self._adopt(plan)
        for parameter, state in carried.items():
            live = self.state[parameter]
            for key, value in loaded_state(self._names[parameter], state, live).items():
                live[key].copy_(value)

    def _set_waiting(self, plan: Plan) -> None:
        """Provides for waiting times where rows may be deferred; where they cannot, none waits."""
        for member in plan.deferring:
            self.state[member.parameter].setdefault(WAITED, waiting_times(member.parameter, member.group))
        may_wait = {member.number for member in plan.deferring}
        for member in plan.members:
            if member.number not in may_wait and WAITED in self.state[member.parameter]:
                self.state[member.parameter][WAITED].zero_()

    def _current_plan(self) -> Plan:
        """The plan, made again where parameters began or ceased to require gradients."""
        self._follow_parameters()
        now = [structure(group) for group in self.param_groups]
        if now != self._structure:
            check_structure(now, self._structure)
            with self._raised_by_all():
                for group in self.param_groups:
                    self._init_state(group)
                plan = self._make_plan()
            self._adopt(plan)
        assert self._plan is not None
        return self._plan


def _write_groups(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """The first hook on a new state dict, so that the hooks of others see what is saved."""
    assert isinstance(optimizer, MatrixOptimizer)
    session = optimizer._plan.session if optimizer._plan is not None else None
    write_groups_(state_dict["param_groups"], session.state_dict() if session is not None else {})
