"""Two Newton-Schulz steps as one polynomial of the Gram matrix, in four products instead of five.

Two steps ``X <- q1(G) X`` and ``X <- q2(G1) X`` with ``G = X X^T`` and ``G1 = G q1(G)^2`` make ``X <- P(G) X`` with
``P = q2(G1) q1(G)`` of degree 12. Step by step, P takes the products G G, q1 G, (q1 G) q1, G1 G1 and q2 q1. These four,
G G, G T, C C and A B, give the same polynomial; small letters are numbers:

    T = G G + t1 G + t0 I
    C = c2 G T + c1 T + c0 I
    A = C C + a1 T + a0 I
    B = A + b3 C + b2 T + b1 G + b0 I
    P = A B + p3 C + p1 G + p0 I

How the numbers are found: with S = (A + B) / 2 and L = (B - A) / 2, ``P = S^2 - L^2 + K`` where S has degree 6, L and
K have degree 3. The highest terms of P down to degree 7 fix S but for its constant, as in a square root by hand; then
``P - S^2`` has degree 6, its terms down to degree 4 fix L, and the rest is K. Two numbers stay free: b3, which is
chosen so that everything stays as small as it can, and the constant of L, which makes K need no T. Each factor is
symmetric like G and commutes with it.

Rounding errors of P are about those of steps one after the other, since no number is large: for steps 2 to 5 of Polar
Express none exceeds 4.4, and no factor has a larger norm than 6.

That a polynomial takes fewer products than its degree is long known: Paterson and Stockmeyer 1973, "On the
number of nonscalar multiplications necessary to evaluate polynomials"; Sastre 2018, "Efficient evaluation of matrix
polynomials"; Bader, Blanes, Casas 2019, "Computing the matrix exponential with an optimized Taylor polynomial
approximation", who evaluate degree 12 in this form.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

Coefficients = tuple[float, float, float]
"""(a, b, c) of one step ``p(s) = a s + b s^3 + c s^5``."""

_B3: Final = 0.8  # far below or above it other numbers become large
_LARGEST: Final = 32.0  # above it rounding errors of the factors would show

Polynomial = list[float]


@dataclass(frozen=True)
class StepPair:
    """The numbers of two steps; for each factor in the order of the module, the constant last."""

    t: tuple[float, float]
    c: tuple[float, float, float]
    a: tuple[float, float]
    b: tuple[float, float, float, float]
    p: tuple[float, float, float]


@lru_cache(maxsize=256)
def step_pair(first: Coefficients, second: Coefficients) -> StepPair | None:
    """Returns the numbers of two steps; None if there are none, or if one of them is large."""
    target = _composed(first, second)
    if not 0 < target[12] < math.inf:
        return None
    numbers = _solve(target)
    if numbers is None:
        return None
    factors = (numbers.t, numbers.c, numbers.a, numbers.b, numbers.p)
    return numbers if all(abs(number) <= _LARGEST for factor in factors for number in factor) else None


def _composed(first: Coefficients, second: Coefficients) -> Polynomial:
    """P: 13 coefficients, the constant first."""
    q1 = list(first)
    gram = _times([0.0, 1.0], _times(q1, q1))
    square = _times(gram, gram)
    a, b, c = second
    q2 = [c * x + b * y for x, y in zip(square, gram + [0.0] * 5, strict=True)]
    q2[0] += a
    return _times(q2, q1)


def _times(left: Polynomial, right: Polynomial) -> Polynomial:
    product = [0.0] * (len(left) + len(right) - 1)
    for i, x in enumerate(left):
        for j, y in enumerate(right):
            product[i + j] += x * y
    return product


def _solve(target: Polynomial) -> StepPair | None:
    """The numbers for P = `target`, whose coefficient of degree 12 is positive."""
    s = [0.0] * 7
    s[6] = math.sqrt(target[12])
    for k in range(5, 0, -1):
        s[k] = (target[6 + k] - sum(s[i] * s[6 + k - i] for i in range(k + 1, 6))) / (2 * s[6])
    c3 = math.sqrt(s[6])
    c2 = s[5] / (2 * c3)
    c1 = (s[4] - c2 * c2) / (2 * c3)
    l3 = _B3 * c3 / 2
    s[0] = (target[6] - 2 * (s[5] * s[1] + s[4] * s[2]) - s[3] * s[3] + l3 * l3) / (2 * s[6])
    d = [target[k] - sum(s[i] * s[k - i] for i in range(k + 1)) for k in range(6)]  # P - S^2
    l2 = -d[5] / (2 * l3)
    l1 = -(d[4] + l2 * l2) / (2 * l3)
    k3, k2 = d[3] + 2 * l2 * l1, d[2] + l1 * l1
    slope = 2 * (l2 - l3 * c2 / c3)
    if slope == 0:
        return None
    l0 = (k3 * c2 / c3 - k2) / slope
    k3, k1, k0 = k3 + 2 * l0 * l3, d[1] + 2 * l0 * l1, d[0] + l0 * l0
    c0 = (s[3] - l3 - 2 * c2 * c1) / (2 * c3)
    a2, a1, a0 = s[2] - l2 - c1 * c1 - 2 * c0 * c2, s[1] - l1 - 2 * c0 * c1, s[0] - l0 - c0 * c0
    return None if a2 == 0 else _in_terms_of_t((c3, c2, c1, c0), (a2, a1, a0), (l2, l1, l0), (k3, k1, k0))


def _in_terms_of_t(
    cubic: tuple[float, ...], rest: tuple[float, ...], half: tuple[float, ...], added: tuple[float, ...]
) -> StepPair:
    """The numbers from those of powers of G, highest first.

    Args:
        cubic: of C.
        rest: of A - C^2.
        half: of L, but for its first.
        added: of K, but for that of G^2.
    """
    c3, c2, c1, c0 = cubic
    a2, a1, a0 = rest
    l2, l1, l0 = half
    k3, k1, k0 = added
    t1 = a1 / a2
    d1 = c2 - c3 * t1
    t0 = (c1 - d1 * t1) / c3
    b2 = 2 * l2 - _B3 * c2
    p3 = k3 / c3
    return StepPair(
        t=(t1, t0),
        c=(c3, d1, c0 - d1 * t0),
        a=(a2, a0 - a2 * t0),
        b=(_B3, b2, 2 * l1 - _B3 * c1 - b2 * t1, 2 * l0 - _B3 * c0 - b2 * t0),
        p=(p3, k1 - p3 * c1, k0 - p3 * c0),
    )
