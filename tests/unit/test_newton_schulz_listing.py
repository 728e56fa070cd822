"""The list of products, worked through in plain torch: exact in float64, within the band in emulated float16."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

import pytest
import torch
from torch import Tensor

from dion_core.newton_schulz import POLAR_EXPRESS, QUINTIC, NewtonSchulz
from dion_core.newton_schulz_kernels.listing import (
    FIELDS,
    RESULT,
    Add,
    Kind,
    Product,
    Store,
    list_products,
    parts_of,
)
from dion_core.step_pairs import Coefficients


def lower_twice(value: Tensor) -> Tensor:
    """What the kernel stores: the lower triangle, and once more transposed."""
    return value.tril() + value.tril(-1).mT


def half(value: Tensor) -> Tensor:
    return value.half().float()


Segments = tuple[tuple[Coefficients, ...], ...]


def work_through(segments: Segments, x: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """The result; buffers and the other copy hold NaN until they are written, and no product overwrites a factor."""
    tall, m, listing = x.shape[0] > x.shape[1], min(x.shape), list_products(segments)
    copies = {0: rounded(x), 1: torch.full_like(x, float("nan"))}
    buffers = [torch.full((m, m), float("nan"), dtype=x.dtype) for _ in range(listing.buffers)]
    for product in listing.products:
        if product.kind == Kind.APPLY:
            x, q, (store,) = copies[product.right], buffers[product.left], product.operations
            assert isinstance(store, Store)
            assert store.target != product.right
            copies[store.target] = rounded(x @ q if tall else q @ x)
        elif product.kind == Kind.GRAM:
            assert product.left == product.right
            x = copies[product.left]
            operate(product, x.mT @ x if tall else x @ x.mT, buffers, rounded)
        else:
            operate(product, product.alpha * (buffers[product.left] @ buffers[product.right].mT), buffers, rounded)
    assert product.kind == Kind.APPLY
    return copies[RESULT]


def operate(product: Product, value: Tensor, buffers: list[Tensor], rounded: Callable[[Tensor], Tensor]) -> None:
    """What is done with the value of a symmetric product, in order."""
    for operation in product.operations:
        if isinstance(operation, Add):
            value = value + operation.factor * buffers[operation.buffer]
            continue
        assert product.kind == Kind.GRAM or operation.target not in (product.left, product.right)
        value = value + operation.diagonal * torch.eye(len(value), dtype=value.dtype)
        buffers[operation.target] = lower_twice(rounded(value))


def normalized(x: Tensor) -> Tensor:
    return x / torch.linalg.matrix_norm(x)


@pytest.mark.parametrize("shape", [(12, 40), (24, 24), (40, 12), (1, 8)])
@pytest.mark.parametrize("restart_after", ["auto", None, 1, 2, 3, 5])
@pytest.mark.parametrize("coefficients", [POLAR_EXPRESS, QUINTIC])
def test_the_list_is_the_iteration(
    shape: tuple[int, int],
    restart_after: int | Literal["auto"] | None,
    coefficients: tuple[tuple[float, float, float], ...],
) -> None:
    torch.manual_seed(0)
    x = torch.randn(*shape, dtype=torch.float64)
    orthogonalize = NewtonSchulz(coefficients, restart_after)
    result = work_through(orthogonalize.kernel_segments(*x.shape), normalized(x), lambda value: value)
    torch.testing.assert_close(result, orthogonalize(x[None])[0], rtol=1e-9, atol=1e-9)


def test_how_many_products_and_buffers_there_are() -> None:
    def counts(iteration: NewtonSchulz, shape: tuple[int, int]) -> tuple[list[int], int]:
        listing = list_products(iteration.kernel_segments(*shape))
        ends = [0, *(n + 1 for n, product in enumerate(listing.products) if product.kind == Kind.APPLY)]
        return [end - start for start, end in pairwise(ends)], listing.buffers

    assert counts(NewtonSchulz(), (8, 9)) == ([10, 6], 5)
    assert counts(NewtonSchulz(), (8, 8)) == ([3, 6, 6], 4)
    assert counts(NewtonSchulz(restart_after=None), (8, 9)) == ([3] * 5, 2)
    cubic = NewtonSchulz([(1.5, -0.5, 0.0)] * 5)  # no pairs of such
    assert counts(cubic, (8, 9)) == ([11, 7], 4)


@pytest.mark.parametrize(
    ("batch", "m", "n", "parts"),
    [
        (12, 1536, 1664, [3, 3, 3, 3]),
        (7, 1536, 1664, [4, 3]),
        (5, 1536, 1664, [5]),
        (25, 1536, 6144, [7, 6, 6, 6]),
        (11, 1536, 6144, [11]),
        (1, 8192, 8192, [1]),
        (5, 8192, 8192, [3, 2]),
        (4, 5120, 5120, [2, 2]),
        (96, 384, 1536, [24, 24, 24, 24]),
        (45, 384, 1536, [45]),
        (12, 4480, 5120, [2, 2, 2, 2, 2, 2]),
        (4, 5120, 20480, [2, 2]),
    ],
)
def test_how_many_matrices_are_worked_on_together(batch: int, m: int, n: int, parts: list[int]) -> None:
    """A product of a matrix of order 1536 has 78 blocks, one of order 384 has 6."""
    assert parts_of(batch, m, n) == parts


def test_the_table_says_which_matrices_each_part_has() -> None:
    listing = list_products([POLAR_EXPRESS[:1]])
    whole, parts = listing.table([5]), listing.table([2, 2, 1])
    length = FIELDS * len(listing.products)
    rows = torch.tensor(parts[: 3 * length]).view(3, -1, FIELDS)
    assert rows[:, :, 6:].unique(dim=1).tolist() == [[[0, 2]], [[2, 2]], [[4, 1]]]
    expected = torch.tensor(whole[:length]).view(-1, FIELDS)
    assert torch.equal(rows[:, :, :4], expected[:, :4].expand(3, -1, -1))
    assert torch.equal(rows[:, :, 4:6], (expected[:, 4:6] + 2 * length).expand(3, -1, -1))  # the same operations
    assert parts[3 * length :] == whole[length:]


def test_the_table_carries_the_bits_of_the_numbers() -> None:
    numbers = torch.tensor(list_products([POLAR_EXPRESS[:1]]).table([1]), dtype=torch.int32)
    a, b, c = POLAR_EXPRESS[0]
    product = numbers[FIELDS : 2 * FIELDS]
    first, last = product[4:6].tolist()
    assert product[:3].tolist() == [Kind.SYMMETRIC, 0, 0]
    torch.testing.assert_close(product[3:4].view(torch.float32), torch.tensor([c]))
    assert numbers[first:last].view(2, 4)[:, [0, 2]].tolist() == [[0, 0], [1, 1]]  # gram is added, buffer 1 stored to
    torch.testing.assert_close(numbers[first:last].view(torch.float32)[1::4], torch.tensor([b, a]))
    assert last < numbers.numel()


def spectrum(m: int, n: int, decades: float) -> Tensor:
    u = torch.linalg.qr(torch.randn(m, m))[0]
    v = torch.linalg.qr(torch.randn(n, m))[0]
    return (u * torch.logspace(0, -decades, m)) @ v.mT


SPECTRA: dict[str, Callable[[], Tensor]] = {
    "aspect 4": lambda: torch.randn(160, 640),
    "square": lambda: torch.randn(160, 160),
    "square, 4 decades": lambda: spectrum(160, 160, 4),
    "rank 8": lambda: torch.randn(160, 8) @ torch.randn(8, 320),
    "wide by 16": lambda: torch.randn(160, 176),
    "2 decades": lambda: spectrum(160, 320, 2),
    "4 decades": lambda: spectrum(160, 320, 4),
}


POLAR_6_TO_8 = [(*POLAR_EXPRESS, *POLAR_EXPRESS[-1:] * more) for more in (1, 2, 3)]
ITERATIONS = {
    "Polar Express": NewtonSchulz(),
    "quintic": NewtonSchulz(QUINTIC),
    **{f"Polar Express, {len(steps)} steps": NewtonSchulz(steps) for steps in POLAR_6_TO_8},
}


def largest(coefficients: Sequence[Coefficients], singular_values: Tensor) -> float:
    for a, b, c in coefficients:
        singular_values = a * singular_values + b * singular_values**3 + c * singular_values**5
    return singular_values.max().item()


@pytest.mark.parametrize("name", ITERATIONS)
@pytest.mark.parametrize("spectrum_name", SPECTRA)
def test_in_float16_singular_values_stay_in_the_band(spectrum_name: str, name: str) -> None:
    """Within 0.01 of the largest that the polynomial makes of these, and none that should be 0.83 below it."""
    torch.manual_seed(0)
    x, iteration = normalized(SPECTRA[spectrum_name]()), ITERATIONS[name]
    result = work_through(iteration.kernel_segments(*x.shape), x, half)
    before, after = torch.linalg.svdvals(half(x).double()), torch.linalg.svdvals(result.double())
    assert after.max().item() < largest(iteration.coefficients, before) + 0.01
    if name == "Polar Express":
        assert after[before > 0.004].min().item() > 0.83


@pytest.mark.parametrize("restart_after", [1, 4, 5])
def test_a_pair_is_no_worse_than_its_steps(restart_after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments that somebody asks for may overshoot by themselves; that they end with a pair adds nothing to it."""
    torch.manual_seed(0)
    x, iteration = normalized(SPECTRA["2 decades"]()), NewtonSchulz(restart_after=restart_after)
    exact = iteration(x.double()[None])[0]

    def error() -> float:
        return (work_through(iteration.kernel_segments(*x.shape), x, half).double() - exact).norm().item()

    paired = error()
    monkeypatch.setattr("dion_core.newton_schulz_kernels.listing.step_pair", lambda *_: None)
    assert paired < 1.3 * error()
