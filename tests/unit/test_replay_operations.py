"""Operations of torch are recorded as what they are: done again as they were, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dion_core.recording import recorder
from tests.replay_cases import Late, Values, recorded

OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "div": lambda x: torch.div(x, 0.7, rounding_mode="floor"),
    "div tensor": lambda x: torch.div(x, x.abs() + 1, rounding_mode="trunc"),
    "sum": lambda x: x.sum(),
    "sum of rows": lambda x: x.view(8, 8).sum(1, keepdim=True),
    "sum in fp64": lambda x: x.view(8, 8).sum(0, dtype=torch.float64),
    "mean": lambda x: x.mean(),
    "max": lambda x: x.max(),
    "amax": lambda x: x.view(8, 8).amax(1),
    "any": lambda x: (x > 2).any(),
    "all": lambda x: (x.view(8, 8) > -1).all(dim=1),
    "prod": lambda x: x.view(8, 8).prod(1),
    "arange": lambda x: torch.arange(0, 16, 2) * x[:8],
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "where in range": lambda x: x.clamp(min=-0.5, max=0.5),
    "index": lambda x: x[torch.arange(63, -1, -1)],
    "gather": lambda x: x.gather(0, torch.arange(32)),
    "sort of": lambda x: x.argsort(stable=True).to(torch.float32),
    "norm": lambda x: x / x.norm(),
    "softmax": lambda x: x.view(8, 8).softmax(1),
    "product": lambda x: torch.baddbmm(x.view(1, 8, 8), x.view(1, 8, 8), x.view(1, 8, 8), beta=0.5, alpha=2.0),
    "half": lambda x: x.half().float().contiguous(),
    "stack": lambda x: torch.stack([x, -x]).flip(0),
    "zeros": lambda x: torch.zeros(64).add_(x),
    "full": lambda x: x.new_full((64,), 3.0) * x,
    "cumulated": lambda x: x.cumsum(0),
    "constant": lambda x: torch.tensor([2.0, 3.0])[1] * x,
    "repeated": lambda x: x.repeat(2).expand(3, 128),
    "some": lambda x: x[x > 0].sum(),
    "written": lambda x: torch.tensor([0.0] * 64).add_(x),
    "written by name": lambda x: torch.add(c := torch.tensor([0.0] * 64), x, out=c),
    "random": lambda x: torch.rand_like(x) * 0 + x,
}
REFUSED = {"some", "written", "written by name", "max", "mean", "random", "prod", "sort of"}
"""Those that may be: nothing is wrong with others that are."""


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_done_again_as_it_was_or_refused(name: str) -> None:
    values, operation, results = Values(), OPERATIONS[name], [torch.empty(0)]

    def work() -> None:
        result = operation(values.given)
        torch.empty(result.shape, dtype=result.dtype).copy_(result)
        results[0] = operation(values.given).clone()

    values.renew(0)
    made, reason = recorded(work)
    assert (made is None) == bool(reason)
    assert made is not None or name in REFUSED, reason
    assert not (made and name in ("some", "written", "written by name"))
    for seed in range(1, 4):
        values.renew(seed)
        if made is not None:
            made.replay(())
            torch.testing.assert_close(results[0], operation(values.given), rtol=0, atol=0)


GRADIENT = torch.ones(64)


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (lambda: torch.ones(()).item(), "other results than one tensor"),
        (lambda: torch.ones(3).sort(), "other results than one tensor"),
        (lambda: torch.zeros(64).add_(GRADIENT), "may be another one in the next step"),
        (lambda: torch.zeros(64) + GRADIENT[3:4], "may be another one in the next step"),
        (lambda: Late().broadcast([GRADIENT], 0), "may be another one in the next step"),
        (lambda: torch.zeros(3).to("meta"), "brings values to meta"),
        (lambda: recorder().refuse("launched by others"), "launched by others"),  # type: ignore[union-attr]
    ],
    ids=["host", "two", "in place", "view", "message", "device", "told"],
)
def test_what_cannot_be_done_again_is_refused(work: Callable[[], Any], reason: str) -> None:
    made, why = recorded(lambda: (work(), None)[1], foreign=(GRADIENT,))
    assert made is None
    assert reason in why
