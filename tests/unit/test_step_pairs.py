"""Two steps in four products: the same polynomial, with small numbers, and only where there are such."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from dion_core.newton_schulz import POLAR_EXPRESS, QUINTIC
from dion_core.step_pairs import Coefficients, StepPair, step_pair

CUBIC = (1.5, -0.5, 0.0)
PAIRS = [*pairwise(POLAR_EXPRESS), (QUINTIC[0], QUINTIC[0])]
LARGEST = (1.0, 2.0, 1.97, 1.87, 1.25)
"""Largest singular value that each pair is given: 1 at first, what the steps before it make of that later."""


def one_after_the_other(first: Coefficients, second: Coefficients, g: Fraction) -> Fraction:
    """q2 q1, as the module `step_pairs` names them, without rounding."""
    a, b, c = map(Fraction, first)
    q1 = a + b * g + c * g**2
    a, b, c = map(Fraction, second)
    after = g * q1**2
    return q1 * (a + b * after + c * after**2)


def factors(pair: StepPair, g: Tensor) -> dict[str, Tensor]:
    """The factors as the module defines them, for numbers in place of matrices."""
    t = g * g + pair.t[0] * g + pair.t[1]
    c = pair.c[0] * g * t + pair.c[1] * t + pair.c[2]
    a = c * c + pair.a[0] * t + pair.a[1]
    b = a + pair.b[0] * c + pair.b[1] * t + pair.b[2] * g + pair.b[3]
    p = a * b + pair.p[0] * c + pair.p[1] * g + pair.p[2]
    return {"T": t, "C": c, "A": a, "B": b, "P": p}


@pytest.mark.parametrize(("steps", "largest"), list(zip(PAIRS, LARGEST, strict=True)), ids=str)
def test_a_pair_is_one_step_after_the_other(steps: tuple[Coefficients, Coefficients], largest: float) -> None:
    pair = step_pair(*steps)
    assert pair is not None
    g = torch.linspace(0, largest, 50, dtype=torch.float64) ** 2
    expected = torch.tensor([float(one_after_the_other(*steps, Fraction(float(x)))) for x in g], dtype=torch.float64)
    found = factors(pair, g)
    torch.testing.assert_close(found["P"], expected, rtol=1e-9, atol=3e-9)
    assert max(found[name].abs().max() for name in "TCAB") < 6


def test_numbers_of_the_pairs_in_use_are_small() -> None:
    for steps in (POLAR_EXPRESS[1:3], POLAR_EXPRESS[3:]):
        pair = step_pair(*steps)
        assert pair is not None
        assert max(abs(x) for x in (*pair.t, *pair.c, *pair.a, *pair.b, *pair.p)) < 4.4


@pytest.mark.parametrize(
    "steps",
    [
        (CUBIC, CUBIC),  # of degree 3, so that the pair's is not 12
        ((1.5, -0.5, 1e-6), (1.5, -0.5, 1e-6)),  # only with numbers of which little would be left
        ((2.0, -1.5, -0.5), (2.0, -1.5, 0.5)),  # the highest term is negative
        ((1.0, 1e60, 1.0), (1.0, 1e60, 1.0)),
        ((2.0, -1.5, 1e60), (2.0, -1.5, 1e60)),
        ((float("nan"), -1.5, 0.5), (2.0, -1.5, 0.5)),
        ((2.0, -1.5, 0.5), (float("nan"), -1.5, 0.5)),
        ((2.0, -1.5, 0.5), (float("inf"), -1.5, 0.5)),
    ],
    ids=str,
)
def test_steps_without_small_numbers_are_no_pair(steps: tuple[Coefficients, Coefficients]) -> None:
    assert step_pair(*steps) is None
