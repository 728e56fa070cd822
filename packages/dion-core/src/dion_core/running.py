"""How the device work of steps is run: as it is, by replay where steps are alike, or as a captured graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from dion_core.capture import StepGraph, check_capturable, form, form_of_others, is_replayable, replay_form
from dion_core.collectives import Group
from dion_core.operands import Operands, States, storages
from dion_core.plan import Plan
from dion_core.process_groups import watch_stream
from dion_core.replay import StepReplay


class StepRunner:
    """Runs the steps of one optimizer.

    Args:
        nonfinite: the option.
    """

    def __init__(self, nonfinite: str) -> None:
        self._nonfinite = nonfinite
        self._graph: StepGraph | None = None
        self._replay: StepReplay | None = None
        self._num_plans = 0

    def adopt(self, plan: Plan, group: Group, device: torch.device) -> None:
        """The steps that follow are those of another plan, taken together by the ranks of the group."""
        alike = is_replayable(plan, group, nonfinite=self._nonfinite)
        self._group, self._device, self._replay = group, device, StepReplay(device) if alike else None
        self._num_plans += 1

    def capture(self, plan: Plan) -> None:
        """The steps that follow are captured; raises ValueError as `check_capturable`."""
        check_capturable(plan, self._group, nonfinite=self._nonfinite)
        self._graph = self._graph or StepGraph()

    def release(self) -> None:
        """None are any more."""
        if self._graph is not None:
            self._graph.release()
            self._graph = None

    def gradients(self, plan: Plan, gradients: list[Tensor | None], *, scaled: bool) -> list[Tensor | None]:
        """The gradients that the step works with.

        Args:
            plan: of the optimizer.
            gradients: of all its members.
            scaled: whether a loss scaler takes part.

        Raises:
            ValueError: the step is captured, and some are missing, or a scaler takes part.
        """
        if self._graph is None:
            return gradients
        if scaled:
            raise ValueError("a captured step cannot serve a loss scaler: call release() first")
        return self._graph.gradients(plan, gradients)

    def run(
        self,
        work: Callable[[], None],
        plan: Plan,
        operands: Sequence[Operands],
        varying: tuple[Sequence[Tensor | None], Sequence[float | Tensor], States],
        *,
        scaled: bool,
    ) -> None:
        """Does the work of a step.

        Args:
            work: all of it on the device.
            plan: of the optimizer.
            operands: of the buckets that it steps.
            varying: gradients of all members, learning rates of the groups that are no matrices, and the state.
            scaled: whether a loss scaler takes part.
        """
        gradients, _, state = varying
        if self._replay is not None and (self._graph is not None or scaled):
            self._replay.forget()  # what a transport keeps from step to step may lie elsewhere after this one
        if self._graph is not None:
            self._graph.run(work, (self._num_plans, form(plan, operands), form_of_others(plan, state)))
            for group in dict.fromkeys((self._group, *plan.exchange_groups)):
                watch_stream(group, "a captured step", self._device)
        elif self._replay is not None and not scaled:
            alike = replay_form(plan, operands, gradients, state)
            self._replay.run(work, alike, varying, partial(storages, operands, gradients))
        else:
            work()
