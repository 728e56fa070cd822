"""What Newton-Schulz promises to transports, for arbitrary float64 matrices."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dion_core.newton_schulz import POLAR_EXPRESS, NewtonSchulz
from tests.reference import polar_express

# Rounding errors grow by the slope of the composed polynomial at 0, about 800. The factor covers sums of them
# and the Gram segments of four steps, which amplify them once more.
TOLERANCE = 100 * math.prod(a for a, _, _ in POLAR_EXPRESS) * torch.finfo(torch.float64).eps

sides = st.integers(1, 9)
scales = st.integers(-300, 300).map(lambda exponent: 10.0**exponent)
seeds = st.integers(0, 2**31)


@st.composite
def batches(draw: st.DrawFn) -> Tensor:
    """(B, m, n) with B 1 to 4, each of a rank of its own (0 for zero) and badly conditioned at times."""
    count, rows, columns = draw(st.integers(1, 4)), draw(sides), draw(sides)
    generator = torch.Generator().manual_seed(draw(seeds))
    matrices = torch.zeros(count, rows, columns, dtype=torch.float64)
    for matrix in matrices:
        rank = draw(st.integers(0, min(rows, columns)))
        values = torch.logspace(0, draw(st.integers(-8, 0)), rank, dtype=torch.float64)
        left = torch.randn(rows, rank, dtype=torch.float64, generator=generator)
        matrix += (left * values) @ torch.randn(rank, columns, dtype=torch.float64, generator=generator)
    return matrices


@st.composite
def sparse_batches(draw: st.DrawFn) -> Tensor:
    """(1, m, n) of small whole numbers: many zeros, equal rows, exact rank deficiency."""
    rows, columns = draw(sides), draw(sides)
    values = draw(st.lists(st.integers(-2, 2), min_size=rows * columns, max_size=rows * columns))
    return torch.tensor(values, dtype=torch.float64).reshape(1, rows, columns)


anything = st.one_of(batches(), sparse_batches())
bounded = settings(deadline=None, max_examples=60)


def assert_close(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=TOLERANCE)


@bounded
@given(matrices=anything, scale=scales)
def test_equals_the_reference_at_every_scale(matrices: Tensor, scale: float) -> None:
    result = NewtonSchulz()(matrices * scale)
    for matrix, expected in zip(result, matrices, strict=True):
        assert_close(matrix, torch.from_numpy(polar_express(expected.numpy())))


@bounded
@given(matrices=anything, restart_after=st.sampled_from([None, 1, 2, 3, 4]))
def test_segments_change_nothing_beyond_rounding(matrices: Tensor, restart_after: int | None) -> None:
    assert_close(NewtonSchulz(restart_after=restart_after)(matrices), NewtonSchulz()(matrices))


@bounded
@given(matrices=anything, data=st.data())
def test_row_permutations_commute(matrices: Tensor, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(matrices.shape[1])))
    assert_close(NewtonSchulz()(matrices[:, order]), NewtonSchulz()(matrices)[:, order])


@bounded
@given(matrices=anything, data=st.data())
def test_zero_rows_anywhere_stay_zero_and_change_no_other_row(matrices: Tensor, data: st.DataObject) -> None:
    count, rows, columns = matrices.shape
    total = rows + data.draw(st.integers(1, 6))
    kept = sorted(data.draw(st.permutations(range(total)))[:rows])
    padded = torch.zeros(count, total, columns, dtype=torch.float64)
    padded[:, kept] = matrices
    result = NewtonSchulz()(padded)
    assert_close(result[:, kept], NewtonSchulz()(matrices))
    assert not result[(padded == 0).all(dim=-1)].any()


@bounded
@given(matrices=anything)
def test_transposes_and_signs_commute(matrices: Tensor) -> None:
    result = NewtonSchulz()(matrices)
    assert_close(NewtonSchulz()(matrices.mT), result.mT)
    assert torch.equal(NewtonSchulz()(-matrices), -result)


@bounded
@given(matrices=batches(), offset=st.integers(0, 9))
def test_bits_depend_on_the_matrix_alone(matrices: Tensor, offset: int) -> None:
    storage = torch.empty(matrices.numel() + offset, dtype=torch.float64)
    moved = storage[offset:].view_as(matrices).copy_(matrices)
    result = NewtonSchulz()(moved)
    assert torch.equal(moved, matrices)
    for i in range(len(matrices)):
        assert torch.equal(result[i], NewtonSchulz()(matrices[i : i + 1].clone())[0])
