"""A whole step as one CUDA graph, replayed until something changes that it cannot follow."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import repeat
from operator import is_
from typing import Any

import torch
from torch import Tensor

from dion_core.buckets import stable_repr
from dion_core.collectives import Group
from dion_core.operands import SCALARS, Operands, States
from dion_core.options import OPTIONS
from dion_core.placements import local_part
from dion_core.plan import Plan

logger = logging.getLogger("dion_core")

_PLAIN = (str, int, float)


class StepGraph:
    """Runs the device work of a step: once as it is, then captured, then by replay.

    The first run of every form compiles kernels and makes tables, which cannot be done while capturing.
    """

    def __init__(self) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None
        self._form: Hashable = None
        self._gradients: dict[int, Tensor] = {}

    def run(self, work: Callable[[], None], form: Hashable) -> None:
        """Does the work.

        Args:
            work: launches the same kernels on the same addresses as long as `form` is the same.
            form: whatever the work depends on that is not read from the device.
        """
        if form != self._form:
            if self._graph is not None:
                logger.info("the captured step is captured anew: sizes, options or tensors have changed")
            self.release()
            self._form = form
            work()
            return
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            # Other threads (a data loader, a watchdog) may go on calling CUDA meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                work()
            self._graph = graph
        self._graph.replay()

    def gradients(self, plan: Plan, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of a step, those of elementwise groups copied to where they lie in every step.

        Raises:
            ValueError: some are missing, by name.
        """
        missing = [m.name for m, gradient in zip(plan.members, gradients, strict=True) if gradient is None]
        if missing:
            raise ValueError(f"a captured step needs all gradients; these parameters have none: {', '.join(missing)}")
        copied = {
            member.number: gradient
            for members in plan.elementwise
            for member in members
            if (gradient := gradients[member.number]) is not None
        }
        for number, gradient in copied.items():
            if number not in self._gradients:
                self._gradients[number] = torch.empty_like(gradient)
        if copied:
            torch._foreach_copy_([self._gradients[number] for number in copied], list(copied.values()))
        return [self._gradients.get(number, gradient) for number, gradient in enumerate(gradients)]

    def release(self) -> None:
        """Frees the graph and its memory."""
        if self._graph is not None:
            torch.cuda.synchronize()
            self._graph.reset()
        self._graph, self._form = None, None


def check_capturable(plan: Plan, group: Group, *, nonfinite: str) -> None:
    """Raises ValueError for what a captured step cannot do, by name.

    Args:
        plan: of the optimizer.
        group: the ranks that step together.
        nonfinite: the option.
    """
    obstacle = next(_obstacles(plan, group, nonfinite), None)
    if obstacle is not None:
        raise ValueError(f"a step cannot be captured{obstacle}")


def is_replayable(plan: Plan, group: Group, *, nonfinite: str) -> bool:
    """Whether steps may be replayed where they turn out to be alike; as in `check_capturable`.

    What is not of this project has to say so, since it may do more than what is seen of it: see `Transport.replayable`.
    """
    devices = {local_part(member.parameter).device for member in plan.members}
    parts: list[Any] = [group, *plan.exchange_groups, *(values.group for values in plan.shared)]
    parts += [bucket.orthogonalizer for bucket in plan.buckets]
    parts += [plan.choice.transport] if plan.choice is not None else []
    all_say_so = all(getattr(part, "replayable", False) for part in parts)
    return len(devices) == 1 and all_say_so and not any(_obstacles(plan, group, nonfinite))


def _obstacles(plan: Plan, group: Group, nonfinite: str) -> Iterator[str]:
    if getattr(group, "waits_on_host", False):
        yield ": its ranks communicate by MPI, for which the host waits"
    for member in plan.members:
        if not local_part(member.parameter).is_cuda:
            yield f": {member.name} is on {local_part(member.parameter).device}"
    if plan.session is not None and plan.session.host_reads and plan.choice is not None:
        yield (
            f": {plan.choice.transport} reads on the host {plan.session.host_reads} times a "
            "step; transports without a host read are allowed, such as capped, local and full"
        )
    for bucket in plan.buckets:
        if bucket.bucket.layout.column_groups:
            yield f": {bucket.bucket.name} is split by columns, not by rows"
        if not bucket.addressable:
            yield f": a tensor of {bucket.bucket.name} wraps others"
        if bucket.ragged:
            yield (
                f": of {bucket.bucket.name} some rank holds more rows of one matrix than of "
                "another (heads or blocks that a shard cuts); it would not follow new gradients"
            )
    if nonfinite == "skip":
        yield ' with nonfinite="skip"; nonfinite="rows" is allowed'


def form(plan: Plan, operands: Sequence[Operands]) -> Hashable:
    """All that the device work of matrices depends on beside what it reads from the device."""
    read = [name for name in OPTIONS if name not in SCALARS]
    options = [tuple(_frozen(group[name]) for name in read if name in group) for group in plan.groups]
    sizes = plan.session.sizes if plan.session is not None else 0
    return (sizes, *options, *(each.form for each in operands))


def _frozen(value: object) -> Hashable:
    """Equal for equal options, also where one is changed in place."""
    if value is None or isinstance(value, _PLAIN):
        return value
    plain = isinstance(value, tuple) and all(part is None or isinstance(part, _PLAIN) for part in value)
    return value if plain else stable_repr(value)


def form_of_others(plan: Plan, state: States) -> Hashable:
    """The same for the parameters that are no matrices."""
    tensors = [
        tensor
        for members in plan.elementwise
        for member in members
        for tensor in (member.parameter, *state[member.parameter].values())
    ]
    decays = [members[0].group["weight_decay"] for members in plan.elementwise]
    return (*decays, *(local_part(tensor).data_ptr() for tensor in tensors))


def replay_form(
    plan: Plan, operands: Sequence[Operands], gradients: Sequence[Tensor | None], state: States
) -> Hashable:
    """All that the work of a step depends on when it is replayed: gradients may be missing, others are stepped anew."""
    others = form_of_others(plan, state) if plan.shared else ()
    return (form(plan, operands), others, tuple(map(is_, gradients, repeat(None))))
