"""Which parameters have a gradient on some rank: one small maximum over the ranks, used as a device mask.

The work of a step is fixed by the parameter list, so a rank whose gradients are missing still takes part. A
parameter that no rank has a gradient for keeps its weight, state, decay and step count; one that some ranks
have a gradient for counts as zero on the others. Nothing is read on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property, lru_cache

import torch
from torch import Tensor

from dion_core.collectives import Group, Handle


@lru_cache(maxsize=16)
def _flags(here: tuple[bool, ...], device: torch.device) -> Tensor:
    """(P + 1,) uint8: 1 for each parameter with a gradient, and a 0. Kept, since a copy from the host waits."""
    return torch.tensor([*here, False], dtype=torch.uint8, device=device)


@cache  # for good: captured steps, in which no gradient is missing, read it at its address
def _complete(number: int, device: torch.device) -> Tensor:
    """`_flags` of so many parameters that all have gradients."""
    return _flags((True,) * number, device)


@cache
def _always(device: torch.device) -> Tensor:
    """0-dim bool: true."""
    return torch.ones((), dtype=torch.bool, device=device)


class Presence:
    """The gradients of one step, and the flags of the P parameters on their way between the ranks."""

    def __init__(
        self,
        gradients: Sequence[Tensor | None],
        group: Group,
        device: torch.device,
        *,
        skip_nonfinite: bool,
        found_inf: Tensor | None,
    ) -> None:
        """Launches the reduction.

        Args:
            gradients: of the P parameters on this rank, local parts; None where there is none.
            group: the ranks that step together.
            device: of the flags.
            skip_nonfinite: whether one non-finite value anywhere makes all ranks skip the step.
            found_inf: 0-dim, above 0 where a loss scaler wants the step skipped, which one rank can decide for all;
                None without a scaler.
        """
        self.gradients = gradients
        self.may_skip = skip_nonfinite or found_inf is not None
        self._device = device
        here = tuple(gradient is not None for gradient in gradients)
        self._flags = (_complete(len(here), device) if all(here) else _flags(here, device)).clone()
        if skip_nonfinite:
            bad = [~gradient.isfinite().all() for gradient in gradients if gradient is not None]
            if bad:
                self._flags[-1] = torch.stack([flag.to(device) for flag in bad]).any()
        if found_inf is not None:
            self._flags[-1] = torch.maximum(self._flags[-1], (found_inf.to(device) <= 0).logical_not())
        self._handle: Handle = group.named("presence flags").all_reduce(self._flags, "max")

    @cached_property
    def _agreed(self) -> Tensor:
        self._handle.wait()
        return self._flags

    @cached_property
    def skipped(self) -> Tensor:
        """0-dim uint8: 1 where the whole step is skipped, else 0."""
        return self._agreed[-1]

    @cached_property
    def proceed(self) -> Tensor:
        """0-dim bool: the step is not skipped. Waits for the reduction only where a step can be skipped."""
        if not self.may_skip:
            return _always(self._device)
        return self.skipped == 0

    @cached_property
    def active(self) -> Tensor:
        """(P,) bool: some rank has a gradient, and the step is not skipped."""
        present = self._agreed[:-1].view(torch.bool)
        return present & self.proceed if self.may_skip else present

    @cached_property
    def masks(self) -> Sequence[Tensor]:
        """P 0-dim fp32 masks.

        A gradient here means that some rank has one, so all parameters that have one share a tensor, and AdamW
        takes all that share one in one fused call.
        """
        proceed = self.proceed.float()
        masks = self.active.float().unbind()
        return [mask if g is None else proceed for g, mask in zip(self.gradients, masks, strict=True)]
