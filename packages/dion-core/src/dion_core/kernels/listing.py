"""The products of a Newton-Schulz iteration, as the list that one kernel works through.

With q = a I + b G + c G^2, a step is Q <- Q q and G <- G q^2, and a segment ends with X <- Q X. The list holds these
products for all segments, with numbers of buffers instead of tensors. Each buffer is m x m, of every matrix of the
batch, except that X has two of its own, from one of which to the other Q X goes.

Example: one segment of two steps (the first three products are step 1):

    Gram        X 0, X 0 -> 0            G
    symmetric   0, 0 -> 1                q = a I + b G + c G^2      adds b times buffer 0, and a on the diagonal
    symmetric   0, 1 -> 2                G q
    symmetric   2, 1 -> 0                G q^2, in the place of G
    symmetric   0, 0 -> 2                the q of step 2
    symmetric   1, 2 -> 0                Q = q q
    apply       0, X 0 -> result         Q X

Unlike in `Segment`, a enters q before q is rounded, so that two of three products of a step add nothing. In
emulation that made the largest singular values smaller (1.138 instead of 1.160 where they differed most).

Legend: G, Q, q, X as in `dion_core.newton_schulz`; a, b, c the coefficients of a step.
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
    polynomial: int | None = None
    for step, (a, b, c) in enumerate(steps, start=1):
        factor = pool.take()
        products.append(Product(Kind.SYMMETRIC, gram, gram, factor, added=gram, alpha=c, beta=b, gamma=a))
        if step < len(steps):
            half = pool.take()
            products.append(Product(Kind.SYMMETRIC, gram, factor, half))
            products.append(Product(Kind.SYMMETRIC, half, factor, gram))
            pool.give(half)
        else:
            pool.give(gram)
        if polynomial is None:
            polynomial = factor
        else:
            longer = pool.take()
            products.append(Product(Kind.SYMMETRIC, polynomial, factor, longer))
            pool.give(polynomial)
            pool.give(factor)
            polynomial = longer
    assert polynomial is not None, "a segment has at least one step"
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
