"""The products of all segments of Newton-Schulz steps, as the list that one kernel works through.

With q = r + a I and r = b G + c G^2, a step is Q <- Q q and G <- q G q, and a segment ends with X <- Q X. The last two
steps are one pair, whose q is a polynomial in four products (module `step_pairs`), if their coefficients allow it. The
list holds numbers instead of tensors: of buffers, each m x m for every matrix of a part of the batch, and of the two
copies of X, of which a segment reads one and writes the other, or the last one the result.

Example: the first of several segments, of three steps, of which the last two are a pair (products 1 to 3 are step 1):

    Gram        X 0, X 0 -> 0      G
    symmetric   0, 0 -> 1          r = c G G + b G
    symmetric   1, 0 -> 2          q G = r G + a G
    symmetric   2, 1 -> 0          q G q = (q G) r + a (q G), in the place of G
    symmetric   0, 0 -> 2          T of the pair
    symmetric   0, 2 -> 3          C
    symmetric   3, 3 -> 4, 2       A, and B, in the place of T
    symmetric   4, 2 -> 0          q of the pair, in the place of G
    symmetric   0, 1 -> 3          Q = q (of the pair) r (of step 1) + a (of step 1) q (of the pair)
    apply       3, X 0 -> X 1      Q X

How G is updated matters. Only half of a product is computed, which makes a rounding error symmetric that in a whole
product has an antisymmetric part, and only the symmetric part is harmful. q G q with one and the same rounded q on
both sides belongs to the X that Q makes; G q q does not. And a I enters in the wide accumulator of a product, instead
of being rounded with r.

Legend: G, Q, X as in `dion_core.newton_schulz`; a, b, c the coefficients of a step.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, chain

from dion_core.step_pairs import Coefficients, StepPair, step_pair

RESULT = -1
"""Target of `APPLY` in the last segment, in the dtype of the result; of the others it is a copy of X."""
BLOCK = 128
"""Side of the blocks that the kernel works out."""
BLOCKS_AT_ONCE = 132
"""Tiles that run at the same time, one on each multiprocessor of an H200."""
ENOUGH_BLOCKS = 450
"""Of a symmetric product in tiles of two: so many keep a GPU busy, though they wait for those of the product before."""
SMALL_ORDER = 512
"""Matrices up to this order are worked on in tiles of one block."""
FIELDS = 8
"""Numbers of a product in the table; an operation takes half as many."""


class Kind(IntEnum):
    """What a product multiplies."""

    GRAM = 0
    """X X^T, or X^T X if X is tall."""
    SYMMETRIC = 1
    """Two m x m buffers whose product is symmetric."""
    APPLY = 2
    """Q X for the left buffer, or X Q if X is tall."""


@dataclass(frozen=True)
class Add:
    """Value <- value + factor * buffer `buffer`."""

    buffer: int
    factor: float


@dataclass(frozen=True)
class Store:
    """Value <- value + diagonal * I, and buffer `target` <- value, rounded. The value itself stays as it is."""

    target: int
    diagonal: float = 0.0


@dataclass(frozen=True)
class Product:
    """Value = alpha * left right, and what is done with it, in order; the last operation is a `Store`.

    A buffer that is added may be stored to afterwards, a factor may not. In the place of X stands which copy it is.
    """

    kind: Kind
    left: int
    right: int
    operations: tuple[Add | Store, ...]
    alpha: float = 1.0


@dataclass(frozen=True)
class Listing:
    """The products in order, and how many m x m buffers they need."""

    products: tuple[Product, ...]
    buffers: int

    def flops(self, m: int, n: int) -> int:
        """Floating-point operations of the products of one matrix with sides m <= n, symmetric ones at half cost."""
        cost = {Kind.GRAM: m * m * n, Kind.SYMMETRIC: m**3, Kind.APPLY: 2 * m * m * n}
        return sum(cost[product.kind] for product in self.products)

    def table(self, parts: Sequence[int]) -> list[int]:
        """What the kernel reads: for each product of each part `FIELDS` int32, and after them four of each operation.

        Of a product: kind, left, right, the bits of alpha, where its operations begin and end in the table, the first
        matrix of the part and how many it has. Of an operation: the buffer, the bits of its number, 1 if it is a
        `Store`.

        Args:
            parts: how many matrices each has, none more than the one before.
        """
        rows: list[list[int]] = []
        operations: list[int] = []
        start = FIELDS * len(self.products) * len(parts)
        for product in self.products:
            first = start + len(operations)
            for operation in product.operations:
                if isinstance(operation, Add):
                    operations += [operation.buffer, _bits(operation.factor), 0, 0]
                else:
                    operations += [operation.target, _bits(operation.diagonal), 1, 0]
            last = start + len(operations)
            rows.append([int(product.kind), product.left, product.right, _bits(product.alpha), first, last])
        firsts = accumulate(parts, initial=0)
        of_parts = [[*row, first, size] for first, size in zip(firsts, parts, strict=False) for row in rows]
        return [*chain.from_iterable(of_parts), *operations]


def triangle(m: int, wide: int = 1) -> int:
    """How many tiles of `wide` blocks a symmetric product of order m has."""
    count = -(-m // BLOCK)
    squares = count // wide
    return wide * squares * (squares + 1) // 2 + count % wide * (squares + 1)


def parts_of(batch: int, m: int, n: int) -> list[int]:
    """How many of `batch` matrices are worked on together: enough to keep a GPU busy.

    The largest parts come first: what a tile waits for is counted as if its slot had had a matrix of each earlier part.

    In tiles of one block these are so many that all tiles of a product are begun before the first one of the next
    product. Tiles of two, which are faster by a few hundredths, need more. Where n is not much longer than m, and m x m
    buffers outweigh the matrices themselves, the former are taken.

    Example: 7 of 1536 x 1664 as 4 and 3: a product of one has 78 blocks, and while the third is worked on, 2 * 78 tiles
    are between those of the first and what waits for them.
    """
    blocks = triangle(m)
    few = 1 - (-BLOCKS_AT_ONCE // blocks)
    enough = few if n < 2 * m or m <= SMALL_ORDER else max(few, -(-ENOUGH_BLOCKS // blocks))
    parts = max(1, batch // enough)
    return [batch // parts + (part < batch % parts) for part in range(parts)]


def _bits(value: float) -> int:
    """The bits of a float32."""
    bits: int = struct.unpack("i", struct.pack("f", value))[0]
    return bits


def list_products(segments: Sequence[Sequence[Coefficients]]) -> Listing:
    """Returns the products of all segments, each of which begins with its Gram matrix and ends with Q X.

    Args:
        segments: (a, b, c) of each step, by segment.
    """
    pool, products = _Pool(), list[Product]()
    for number, steps in enumerate(segments):
        copy, gram = number % 2, pool.take()
        products.append(Product(Kind.GRAM, copy, copy, (Store(gram),)))
        polynomial = _list_steps(products, pool, gram, steps)
        target = RESULT if number == len(segments) - 1 else 1 - copy
        products.append(Product(Kind.APPLY, polynomial, copy, (Store(target),)))
        pool.give(polynomial)
    return Listing(tuple(products), pool.size)


def _list_steps(products: list[Product], pool: _Pool, gram: int, steps: Sequence[Coefficients]) -> int:
    """Appends the products of a segment's steps and returns the buffer that holds Q then."""
    # Only at the end: where G goes on, its null space would amplify a pair's rounding errors more than a step's.
    pair = step_pair(*steps[-2:]) if len(steps) > 1 else None
    rests: list[tuple[int, float]] = []
    for a, b, c in steps[: -1 if pair is None else -2]:
        rest, half = pool.take(), pool.take()
        products.append(_symmetric(gram, gram, (Add(gram, b), Store(rest)), alpha=c))
        products.append(_symmetric(rest, gram, (Add(gram, a), Store(half))))
        products.append(_symmetric(half, rest, (Add(half, a), Store(gram))))
        pool.give(half)
        rests.append((rest, a))
    polynomial = _list_last(products, pool, gram, steps[-1]) if pair is None else _list_pair(products, pool, gram, pair)
    for rest, a in reversed(rests):
        longer = pool.take()
        products.append(_symmetric(polynomial, rest, (Add(polynomial, a), Store(longer))))
        pool.give(polynomial)
        pool.give(rest)
        polynomial = longer
    return polynomial


def _list_last(products: list[Product], pool: _Pool, gram: int, step: Coefficients) -> int:
    """Appends the product that makes q of a step after which G is not needed, and returns its buffer."""
    a, b, c = step
    polynomial = pool.take()
    products.append(_symmetric(gram, gram, (Add(gram, b), Store(polynomial, a)), alpha=c))
    pool.give(gram)
    return polynomial


def _list_pair(products: list[Product], pool: _Pool, gram: int, pair: StepPair) -> int:
    """Appends the products that make q of a pair after which G is not needed, and returns its buffer, that of G."""
    (t1, t0), (c2, c1, c0), (a1, a0), (b3, b2, b1, b0), (p3, p1, p0) = pair.t, pair.c, pair.a, pair.b, pair.p
    t, c, a = pool.take(), pool.take(), pool.take()
    products.append(_symmetric(gram, gram, (Add(gram, t1), Store(t, t0))))
    products.append(_symmetric(gram, t, (Add(t, c1), Store(c, c0)), alpha=c2))
    make_b = (Add(c, b3), Add(t, b2), Add(gram, b1), Store(t, b0))
    products.append(_symmetric(c, c, (Add(t, a1), Store(a, a0), *make_b)))
    products.append(_symmetric(a, t, (Add(c, p3), Add(gram, p1), Store(gram, p0))))
    for buffer in (a, t, c):
        pool.give(buffer)
    return gram


def _symmetric(left: int, right: int, operations: tuple[Add | Store, ...], *, alpha: float = 1.0) -> Product:
    return Product(Kind.SYMMETRIC, left, right, operations, alpha)


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
