"""The list of products, worked through in plain torch: exact in float64, within the band in emulated float16."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dion_core.newton_schulz import POLAR_EXPRESS, QUINTIC, NewtonSchulz
from dion_core.newton_schulz_kernels.listing import NOTHING, RESULT, Kind, Listing, list_products


def lower_twice(value: Tensor) -> Tensor:
    """What the kernel stores: the lower triangle, and once more transposed."""
    return value.tril() + value.tril(-1).mT


def half(value: Tensor) -> Tensor:
    return value.half().float()


def work_through(listing: Listing, x: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """The result of the listing; buffers hold NaN until they are written, and no product overwrites a factor."""
    tall = x.shape[0] > x.shape[1]
    m = min(x.shape)
    buffers = [torch.full((m, m), float("nan"), dtype=x.dtype) for _ in range(listing.buffers)]
    xs = [rounded(x), torch.full_like(x, float("nan"))]
    for product in listing.products:
        if product.kind == Kind.APPLY:
            left, right = buffers[product.left], xs[product.right]
            value = rounded(right @ left if tall else left @ right)
            if product.target == RESULT:
                return value
            assert product.target != product.right
            xs[product.target] = value
            continue
        if product.kind == Kind.GRAM:
            left, right = xs[product.left], xs[product.right]
            value = left.mT @ right if tall else left @ right.mT
        else:
            assert product.target not in (product.left, product.right)
            value = product.alpha * (buffers[product.left] @ buffers[product.right].mT)
            if product.added != NOTHING:
                value = value + product.beta * buffers[product.added]
            value = value + product.gamma * torch.eye(m, dtype=x.dtype)
        buffers[product.target] = lower_twice(rounded(value))
    return buffers[listing.products[-1].target]


def normalized(x: Tensor) -> Tensor:
    return x / torch.linalg.matrix_norm(x)


def segments(optimizer: NewtonSchulz, shape: torch.Size) -> tuple[tuple[tuple[float, float, float], ...], ...]:
    return tuple(segment.coefficients for segment in optimizer.segments(*shape))


@pytest.mark.parametrize("shape", [(12, 40), (24, 24), (40, 12), (1, 8)])
@pytest.mark.parametrize("restart_after", [None, 1, 2, 3, 5])
@pytest.mark.parametrize("coefficients", [POLAR_EXPRESS, QUINTIC])
def test_the_list_is_the_iteration(
    shape: tuple[int, int],
    restart_after: int | None,
    coefficients: tuple[tuple[float, float, float], ...],
) -> None:
    torch.manual_seed(0)
    x = torch.randn(*shape, dtype=torch.float64)
    orthogonalize = NewtonSchulz(coefficients, restart_after)
    listing = list_products(segments(orthogonalize, x.shape))
    result = work_through(listing, normalized(x), lambda value: value)
    torch.testing.assert_close(result, orthogonalize(x[None])[0], rtol=1e-9, atol=1e-9)


def test_without_the_last_application_the_polynomial_is_left() -> None:
    torch.manual_seed(0)
    x = normalized(torch.randn(8, 20, dtype=torch.float64))
    listing = list_products([POLAR_EXPRESS[:3]], apply_last=False)
    polynomial = work_through(listing, x, lambda value: value)
    expected = NewtonSchulz(POLAR_EXPRESS[:3], None)(x[None])[0]
    torch.testing.assert_close(polynomial @ x, expected, rtol=1e-9, atol=1e-9)


def test_how_many_products_and_buffers_there_are() -> None:
    two = list_products([POLAR_EXPRESS[:2], POLAR_EXPRESS[2:]])
    assert [product.kind for product in two.products].count(Kind.SYMMETRIC) == 14
    assert (len(two.products), two.buffers) == (18, 4)
    classical = list_products([(step,) for step in POLAR_EXPRESS])
    assert (len(classical.products), classical.buffers) == (15, 2)


def test_fields_carry_the_bits_of_the_factors() -> None:
    product = list_products([POLAR_EXPRESS[:1]]).products[1]
    a, b, c = POLAR_EXPRESS[0]
    numbers = torch.tensor(product.fields(), dtype=torch.int32)
    assert numbers[:5].tolist() == [Kind.SYMMETRIC, 0, 0, 0, 1]
    torch.testing.assert_close(numbers[5:].view(torch.float32), torch.tensor([c, b, a]))


def spectrum(m: int, n: int, decades: float) -> Tensor:
    u = torch.linalg.qr(torch.randn(m, m))[0]
    v = torch.linalg.qr(torch.randn(n, m))[0]
    return (u * torch.logspace(0, -decades, m)) @ v.mT


@pytest.mark.parametrize(
    ("name", "bound"),
    [("aspect 4", 1.13), ("square", 1.13), ("rank 8", 1.13), ("wide by 16", 1.18), ("2 decades", 1.18), ("4", 1.18)],
)
def test_in_float16_singular_values_stay_in_the_band(name: str, bound: float) -> None:
    torch.manual_seed(0)
    made: dict[str, Callable[[], Tensor]] = {
        "aspect 4": lambda: torch.randn(160, 640),
        "square": lambda: torch.randn(160, 160),
        "rank 8": lambda: torch.randn(160, 8) @ torch.randn(8, 320),
        "wide by 16": lambda: torch.randn(160, 176),
        "2 decades": lambda: spectrum(160, 320, 2),
        "4": lambda: spectrum(160, 320, 4),
    }
    x = normalized(made[name]())
    result = work_through(list_products(segments(NewtonSchulz(), x.shape)), x, half)
    before, after = torch.linalg.svdvals(x.double()), torch.linalg.svdvals(result.double())
    assert after.max() < bound
    assert after[before > 0.004].min() > 0.83
