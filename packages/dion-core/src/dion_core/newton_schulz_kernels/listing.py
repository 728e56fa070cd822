"""The products of a Newton-Schulz iteration, as the list that one kernel works through.

With q = r + a I and r = b G + c G^2, a step is Q <- Q q and G <- q G q, and a segment ends with X <- Q X. The list
holds these products for all segments, with numbers of buffers instead of tensors. Each buffer is m x m, of every
matrix of the batch, except that X has two of its own, from one of which to the other Q X goes.

Example: one segment of two steps (products 1 to 3 are step 1):

    Gram        X 0, X 0 -> 0      G
    symmetric   0, 0 -> 1          r = c G G + b G
    symmetric   1, 0 -> 2          q G = r G + a G
    symmetric   2, 1 -> 0          q G q = (q G) r + a (q G), in the place of G
    symmetric   0, 0 -> 2          q of step 2 = c G G + b G + a I
    symmetric   2, 1 -> 0          Q = q (of step 2) r (of step 1) + a (of step 1) q (of step 2)
    apply       0, X 0 -> result   Q X

How G is updated matters. Only half of a product is computed, which makes a rounding error symmetric that in a whole
product has an antisymmetric part, and only the symmetric part is harmful. q G q with one and the same rounded q on
both sides belongs to the X that Q makes; G q q does not. And a I enters in the wide accumulator of a product, instead
of being rounded with r. In emulation the largest singular value from spectra over two and four decades is 1.16 and
1.15 in this order, and 1.24 and 1.27 for G q q with rounded q (whole products as in `Segment`: 1.16 and 1.14).

Legend: G, Q, X as in `dion_core.newton_schulz`; a, b, c the coefficients of a step.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

Coefficients = tuple[float, float, float]

RESULT = -1
"""Target of the last `APPLY`: a buffer of its own, in the dtype of the result."""
NOTHING = -1
"""Number of the buffer to add if there is none."""


class Kind(IntEnum):
    """What a product multiplies."""

    GRAM = 0
    """X[a] X[b]^T, or X[a]^T X[b] if X is tall."""
    SYMMETRIC = 1
    """Two m x m buffers whose product is symmetric."""
    APPLY = 2
    """Q X for buffer a and X[b], or X Q if X is tall."""


@dataclass(frozen=True)
class Product:
    """Buffer `target` <- alpha * left right + beta * buffer `added` + gamma I."""

    kind: Kind
    left: int
    right: int
    target: int
    added: int = NOTHING
    alpha: float = 1.0
    beta: float = 0.0
    gamma: float = 0.0

    def fields(self) -> list[int]:
        """The row of the kernel's table: eight int32, of which the last three are the bits of float32."""
        numbers = [int(self.kind), self.left, self.right, self.added, self.target]
        return numbers + [
            struct.unpack("i", struct.pack("f", value))[0] for value in (self.alpha, self.beta, self.gamma)
        ]


@dataclass(frozen=True)
class Listing:
    """The products in order, and how many m x m buffers they need."""

    products: tuple[Product, ...]
    buffers: int


def list_products(segments: Sequence[Sequence[Coefficients]], *, apply_last: bool = True) -> Listing:
    """Returns the products of all segments; `segments[i]` holds the steps between two Gram matrices.

    Args:
        segments: (a, b, c) of each step, by segment.
        apply_last: False leaves out the last `APPLY`; Q is then the target of the last product.
    """
    products: list[Product] = []
    buffers = 0
    for number, steps in enumerate(segments):
        pool = _Pool()
        source = number % 2
        gram = pool.take()
        products.append(Product(Kind.GRAM, source, source, gram))
        polynomial = _list_steps(products, pool, gram, steps)
        if number < len(segments) - 1:
            products.append(Product(Kind.APPLY, polynomial, source, 1 - source))
        elif apply_last:
            products.append(Product(Kind.APPLY, polynomial, source, RESULT))
        buffers = max(buffers, pool.size)
    return Listing(tuple(products), buffers)


def _list_steps(products: list[Product], pool: _Pool, gram: int, steps: Sequence[Coefficients]) -> int:
    """Appends the products of a segment's steps and returns the buffer that holds Q then."""

    def append(left: int, right: int, target: int, added: int, *, alpha: float, beta: float, gamma: float) -> None:
        products.append(Product(Kind.SYMMETRIC, left, right, target, added, alpha, beta, gamma))

    rests: list[tuple[int, float]] = []
    for a, b, c in steps[:-1]:
        rest, half = pool.take(), pool.take()
        append(gram, gram, rest, gram, alpha=c, beta=b, gamma=0.0)
        append(rest, gram, half, gram, alpha=1.0, beta=a, gamma=0.0)
        append(half, rest, gram, half, alpha=1.0, beta=a, gamma=0.0)
        pool.give(half)
        rests.append((rest, a))
    a, b, c = steps[-1]
    polynomial = pool.take()
    append(gram, gram, polynomial, gram, alpha=c, beta=b, gamma=a)
    pool.give(gram)
    for rest, a in reversed(rests):
        longer = pool.take()
        append(polynomial, rest, longer, polynomial, alpha=1.0, beta=a, gamma=0.0)
        pool.give(polynomial)
        pool.give(rest)
        polynomial = longer
    return polynomial


class _Pool:
    """Numbers of buffers: the one freed last is taken first, since it is likeliest to be in the cache."""

    def __init__(self) -> None:
        self.size = 0
        self._free: list[int] = []

    def take(self) -> int:
        """A buffer that nothing needs any more, or a new one."""
        if not self._free:
            self._free.append(self.size)
            self.size += 1
        return self._free.pop()

    def give(self, buffer: int) -> None:
        """Marks `buffer` as not needed."""
        self._free.append(buffer)
