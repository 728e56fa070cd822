"""Newton-Schulz against singular value decompositions in float64, and the promises its docstrings make."""

import math

import pytest
import torch
from torch import Tensor

from dion_core.newton_schulz import POLAR_EXPRESS, QUINTIC, NewtonSchulz, _normalize
from tests.reference import SAFETY, polar_express

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
CLASSICAL = NewtonSchulz(restart_after=None)

# The slope of the composed polynomial at 0, about 800, is the most that it amplifies a rounding error.
AMPLIFICATION = math.prod(a for a, _, _ in POLAR_EXPRESS)

WIDE, TALL, SQUARE = (3, 8, 20), (3, 20, 8), (3, 12, 12)
SHAPES = [WIDE, TALL, SQUARE, (1, 16, 64), (1, 1, 17), (2, 19, 1), (1, 1, 1), (1, 9, 10)]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    """Gaussian matrices; the same values at every dtype, apart from rounding."""
    return torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def of_rank(rank: int, rows: int, columns: int) -> Tensor:
    """One (1, rows, columns) matrix of the given rank, float64."""
    return randn(1, rows, rank, seed=1) @ randn(1, rank, columns, seed=2)


def by_polar_express(matrices: Tensor) -> Tensor:
    """The tests' own reference, float64, matrix by matrix."""
    return torch.stack([torch.from_numpy(polar_express(matrix.double().numpy())) for matrix in matrices])


def by_svd(matrices: Tensor, coefficients: tuple[tuple[float, float, float], ...]) -> Tensor:
    """The same for any coefficients, as given."""
    left, values, right = torch.linalg.svd(matrices.double(), full_matrices=False)
    values = values / torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    for a, b, c in coefficients:
        values = a * values + b * values**3 + c * values**5
    result: Tensor = left @ (values[..., None] * right)
    return result


def tolerance(dtype: torch.dtype, compute: torch.dtype) -> float:
    """Largest error of an entry: amplified rounding of a few sums, plus rounding the result once.

    The most that these cases showed is 1.45 * AMPLIFICATION * eps, for a rank of 1 on the Gram matrix.
    """
    return 3 * AMPLIFICATION * torch.finfo(compute).eps + torch.finfo(dtype).eps


def largest_difference(left: Tensor, right: Tensor) -> float:
    assert left.shape == right.shape
    return (left.double() - right.double()).abs().max().item()


# Values


@pytest.mark.parametrize("dtype", [F64, F32, F16, BF16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_result_is_the_polynomial_of_the_singular_values(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    matrices = randn(*shape, dtype=dtype)
    result = NewtonSchulz()(matrices)
    assert result.dtype == dtype
    compute = F64 if dtype == F64 else F32
    assert largest_difference(result, by_polar_express(matrices)) < tolerance(dtype, compute)


@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
@pytest.mark.parametrize(("rank", "rows", "columns"), [(1, 8, 24), (3, 8, 24), (3, 24, 8), (5, 12, 12)])
def test_rank_deficient_matrices(rank: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    matrices = of_rank(rank, rows, columns).to(dtype)
    result = NewtonSchulz()(matrices)
    # Against the matrix before rounding, whose missing singular values are exactly zero.
    assert largest_difference(result, by_polar_express(of_rank(rank, rows, columns))) < tolerance(dtype, dtype)


@pytest.mark.parametrize("shape", [WIDE, TALL, SQUARE], ids=str)
def test_quintic_and_other_coefficients(shape: tuple[int, ...]) -> None:
    for coefficients in (QUINTIC, POLAR_EXPRESS[:1], POLAR_EXPRESS[1:4], ((1.5, -0.5, 0.0),) * 7):
        restart_after = min(2, len(coefficients))
        result = NewtonSchulz(coefficients, restart_after=restart_after)(randn(*shape))
        assert largest_difference(result, by_svd(randn(*shape), coefficients)) < 1e-11


def test_coefficient_tables() -> None:
    assert QUINTIC == ((3.4445, -4.7750, 2.0315),) * 5
    assert len(POLAR_EXPRESS) == 5
    assert POLAR_EXPRESS[0][0] == pytest.approx(8.28721201814563 / SAFETY, rel=1e-15)
    assert POLAR_EXPRESS[4][2] == pytest.approx(0.4188073119525673 / SAFETY**5, rel=1e-15)
    for coefficients, low, high in ((QUINTIC, 0.68, 1.21), (POLAR_EXPRESS, 0.84, 1.13)):
        values = torch.linspace(0.003, 1, 100_001, dtype=F64)
        for a, b, c in coefficients:
            values = a * values + b * values**3 + c * values**5
        assert low < values.min().item()
        assert values.max().item() < high


@pytest.mark.parametrize("restart_after", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("shape", [WIDE, TALL, (1, 9, 10), (1, 1, 7)], ids=str)
def test_gram_segments_equal_the_classical_iteration(shape: tuple[int, ...], restart_after: int) -> None:
    gram = NewtonSchulz(restart_after=restart_after)
    assert largest_difference(gram(randn(*shape)), CLASSICAL(randn(*shape))) < 1e-11
    # Without a restart the null space of a deficient Gram matrix is where errors grow.
    deficient = of_rank(2, *shape[1:])
    assert largest_difference(gram(deficient), CLASSICAL(deficient)) < 1e-10


def test_segments_are_what_a_sum_of_gram_matrices_over_ranks_needs() -> None:
    whole = randn(8, 24)
    shards = list((whole / torch.linalg.matrix_norm(whole)).chunk(3, dim=1))
    for segment in NewtonSchulz().segments(8, 24):
        gram = sum((shard @ shard.mT for shard in shards), torch.zeros(8, 8, dtype=F64))
        before = gram.clone()
        polynomial = segment(gram)
        assert torch.equal(gram, before)
        shards = [polynomial @ shard for shard in shards]
    assert largest_difference(torch.cat(shards, dim=1), NewtonSchulz()(whole[None])[0]) < 1e-11


@pytest.mark.parametrize("shape", [WIDE, TALL, SQUARE], ids=str)
def test_batched_products_agree_with_single_ones(shape: tuple[int, ...]) -> None:
    # What other devices run, on this one. A zero matrix must not become NaN there either.
    matrices = randn(*shape)
    matrices[1] = 0
    result = NewtonSchulz()._orthogonalize(matrices)
    assert result.is_contiguous()
    assert largest_difference(result, NewtonSchulz()(matrices)) < 1e-11
    assert not result[1].any()


# Precision


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_float16_gram_keeps_singular_values_in_the_band(seed: int) -> None:
    iteration = NewtonSchulz(compute_dtype=F16)
    for rows, columns in ((64, 256), (256, 64)):
        values = torch.linalg.svdvals(iteration(randn(2, rows, columns, seed=seed, dtype=F32)))
        assert values.min().item() > 0.84
        assert values.max().item() < 1.13


@pytest.mark.parametrize("rank", [1, 2])
def test_float16_gram_needs_its_restart_on_low_ranks(rank: int) -> None:
    matrices = of_rank(rank, 64, 256)
    bound = 1.15 * math.sqrt(rank)
    assert torch.linalg.matrix_norm(NewtonSchulz(compute_dtype=F16)(matrices)).item() < bound
    # Rounding errors grow in the null space of the Gram matrix: a norm of 5 and more, or not finite at all.
    without = NewtonSchulz(compute_dtype=F16, restart_after=5)(matrices)
    assert not torch.linalg.matrix_norm(without).item() < 2 * bound


def test_bfloat16_is_computed_with_one_step_segments_only() -> None:
    iteration = NewtonSchulz(compute_dtype=BF16, restart_after=None)
    values = torch.linalg.svdvals(iteration(randn(2, 64, 256, dtype=F32)))
    # Entries carry 8 bits, which moves the band's edges of 0.846 and 1.124 by a few hundredths.
    assert values.min().item() > 0.8
    assert values.max().item() < 1.16
    with pytest.raises(ValueError, match=r"bfloat16.*restart_after=None.*restart_after='auto'"):
        NewtonSchulz(compute_dtype=BF16)


@pytest.mark.parametrize("shape", [WIDE, SQUARE], ids=str)
def test_compute_dtype_by_default_and_by_request(shape: tuple[int, ...]) -> None:
    for dtype in (F16, BF16, F32):
        matrices = randn(*shape, dtype=dtype)
        in_f32 = NewtonSchulz(compute_dtype=F32)(matrices)
        assert torch.equal(NewtonSchulz()(matrices), in_f32)
        assert torch.equal(in_f32, NewtonSchulz()(matrices.float()).to(dtype))
    wide = randn(*shape)
    assert torch.equal(NewtonSchulz()(wide), NewtonSchulz(compute_dtype=F64)(wide))
    assert largest_difference(NewtonSchulz(compute_dtype=F16)(wide), NewtonSchulz()(wide)) > 1e-6


def test_autocast_does_not_reach_the_products() -> None:
    matrices = randn(*WIDE, dtype=F32)
    with torch.autocast("cpu", dtype=BF16):
        assert torch.equal(NewtonSchulz()(matrices), NewtonSchulz()(matrices.clone()))
        inside = NewtonSchulz()(matrices)
        assert torch.is_autocast_enabled("cpu")
    assert torch.equal(inside, NewtonSchulz()(matrices))


# Scale


@pytest.mark.parametrize("shape", [(1, 256, 256), (1, 64, 200), (1, 200, 64)], ids=str)
def test_scale_does_not_matter(shape: tuple[int, ...]) -> None:
    unit = randn(*shape, dtype=F32)
    unit /= torch.linalg.matrix_norm(unit, keepdim=True)
    expected = by_polar_express(unit)
    for scale in (1.0, 1e-6, 1e-8, 1e-10, 1e20, 1e30, 1e-30):
        assert largest_difference(NewtonSchulz()(unit * scale), expected) < tolerance(F32, F32), scale


@pytest.mark.parametrize("dtype", [F64, F32, F16, BF16], ids=str)
@pytest.mark.parametrize("shape", [WIDE, TALL, SQUARE], ids=str)
def test_extremes_of_the_dtype_give_the_same_bits(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    # Small whole numbers times a power of two are exact, at the smallest subnormal number as well.
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randint(-3, 4, shape, generator=generator).to(dtype)
    info = torch.finfo(dtype)
    expected = NewtonSchulz()(matrices)
    largest = 2.0 ** (math.frexp(info.max)[1] - 2)
    for scale in (info.smallest_normal * info.eps, info.smallest_normal, largest):
        assert torch.equal(NewtonSchulz()(matrices * scale), expected)
    # The largest number itself, in every entry: a row norm of it is infinite.
    full = torch.full(shape, info.max, dtype=dtype)
    assert torch.equal(NewtonSchulz()(full), NewtonSchulz()(torch.ones_like(full)))


def test_normalization_precedes_the_cast_to_float16() -> None:
    matrices = randn(1, 32, 32, dtype=F32) * 1e6
    result = NewtonSchulz(compute_dtype=F16)(matrices)
    assert result.isfinite().all()
    assert torch.linalg.svdvals(result).max().item() < 1.13


def test_norm_of_many_entries_is_accurate() -> None:
    # One running float32 sum of these 2^22 squares is off by 7e-5.
    matrices = torch.rand(1, 64, 2**16, generator=torch.Generator().manual_seed(0))
    norm = torch.linalg.vector_norm(_normalize(matrices), dtype=F64).item()
    assert norm == pytest.approx(1, abs=1e-5)


# Zeros and neighbours


@pytest.mark.parametrize("compute_dtype", [None, F16], ids=str)
@pytest.mark.parametrize("shape", [WIDE, TALL, SQUARE], ids=str)
def test_odd_matrix_leaves_its_neighbours_bitwise_alone(
    shape: tuple[int, ...], compute_dtype: torch.dtype | None
) -> None:
    iteration = NewtonSchulz(compute_dtype=compute_dtype)
    matrices = randn(*shape, dtype=F32)
    expected = iteration(matrices)
    for value in (0.0, math.inf, math.nan, 1e30):
        matrices[1] = value
        result = iteration(matrices)
        assert torch.equal(result[[0, 2]], expected[[0, 2]])
        if value == 0:
            assert torch.equal(result[1], torch.zeros_like(result[1]))


@pytest.mark.parametrize("dtype", [F64, F32, F16, BF16], ids=str)
@pytest.mark.parametrize("shape", [WIDE, TALL, SQUARE, (1, 1, 5), (1, 5, 1)], ids=str)
def test_zero_stays_zero(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    result = NewtonSchulz()(torch.zeros(shape, dtype=dtype))
    assert torch.equal(result, torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
@pytest.mark.parametrize("added", [1, 3, 4, 9])
def test_appended_zero_rows_change_nothing_and_stay_zero(added: int, dtype: torch.dtype) -> None:
    # 8 x 12 becomes square with 4 rows more, and tall with 9.
    matrices = randn(2, 8, 12, dtype=dtype)
    result = NewtonSchulz()(torch.cat([matrices, torch.zeros(2, added, 12, dtype=dtype)], dim=1))
    assert not result[:, 8:].any()
    assert largest_difference(result[:, :8], NewtonSchulz()(matrices)) < tolerance(dtype, dtype)


@pytest.mark.parametrize("dtype", [F64, F32], ids=str)
@pytest.mark.parametrize("shape", [WIDE, TALL, SQUARE], ids=str)
def test_row_permutations_commute(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    matrices = randn(*shape, dtype=dtype)
    order = torch.randperm(shape[1], generator=torch.Generator().manual_seed(0))
    permuted = NewtonSchulz()(matrices[:, order])
    assert largest_difference(permuted, NewtonSchulz()(matrices)[:, order]) < tolerance(dtype, dtype)


# Bits and storage


def layouts(matrices: Tensor) -> dict[str, Tensor]:
    """The same values in other storage: off alignment, with gaps, transposed, within a larger tensor."""
    count, rows, columns = matrices.shape
    misaligned = torch.empty(matrices.numel() + 1, dtype=matrices.dtype)[1:].view_as(matrices)
    gaps = torch.empty(count, rows, 2 * columns, dtype=matrices.dtype)[..., ::2]
    larger = torch.empty(count + 1, rows + 2, columns + 3, dtype=matrices.dtype)[1:, 1:-1, 2:-1]
    views = {"misaligned": misaligned, "gaps": gaps, "larger": larger}
    for view in views.values():
        view.copy_(matrices)
    views["transposed"] = matrices.mT.contiguous().mT
    views["batch last"] = matrices.movedim(0, 2).clone().movedim(2, 0)
    return views


@pytest.mark.parametrize("dtype", [F64, F32, F16, BF16], ids=str)
@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (12, 12), (33, 70), (1, 17), (17, 1)], ids=str)
def test_bits_depend_on_the_matrix_alone(shape: tuple[int, int], dtype: torch.dtype) -> None:
    matrices = randn(7, *shape, dtype=dtype)
    alone = torch.cat([NewtonSchulz()(matrices[i : i + 1].clone()) for i in range(7)])
    for count in range(1, 8):
        assert torch.equal(NewtonSchulz()(matrices[:count]), alone[:count])
        assert torch.equal(NewtonSchulz()(matrices[-count:]), alone[-count:])
    for name, view in layouts(matrices).items():
        assert torch.equal(view, matrices)
        assert torch.equal(NewtonSchulz()(view), alone), name
    expanded = matrices[:1].expand(4, -1, -1)
    assert torch.equal(NewtonSchulz()(expanded), alone[:1].expand(4, -1, -1))


@pytest.mark.parametrize("iteration", [NewtonSchulz(), CLASSICAL], ids=["gram", "classical"])
@pytest.mark.parametrize("dtype", [F64, F32, F16, BF16], ids=str)
@pytest.mark.parametrize("shape", [WIDE, TALL, SQUARE], ids=str)
def test_input_is_kept_and_output_is_new(shape: tuple[int, ...], dtype: torch.dtype, iteration: NewtonSchulz) -> None:
    matrices = randn(*shape, dtype=dtype)
    before = matrices.clone()
    result = iteration(matrices)
    assert torch.equal(matrices, before)
    assert result.dtype == dtype
    assert result.is_contiguous()
    assert result.untyped_storage().data_ptr() != matrices.untyped_storage().data_ptr()


@pytest.mark.parametrize("shape", [(0, 4, 8), (3, 0, 8), (3, 4, 0), (0, 0, 0)], ids=str)
def test_empty_matrices(shape: tuple[int, ...]) -> None:
    for dtype in (F64, BF16):
        result = NewtonSchulz()(torch.empty(shape, dtype=dtype))
        assert result.shape == shape
        assert result.dtype == dtype


# Calls


@pytest.mark.parametrize("matrices", [torch.ones(4, 8), torch.ones(1, 1, 4, 8), torch.ones(1, 4, 8).long()])
def test_anything_but_a_batch_of_floating_matrices_is_refused(matrices: Tensor) -> None:
    with pytest.raises(ValueError, match=r"matrices must be floating \(B, m, n\), got torch"):
        NewtonSchulz()(matrices)


def test_rows_in_a_buffer_are_the_matrices_that_they_make_up() -> None:
    torch.manual_seed(0)
    rows, place = torch.randn(9, 6), torch.tensor([[8, 3, -1], [0, 1, 5]])
    matrices = torch.stack([torch.stack([rows[8], rows[3], torch.zeros(6)]), rows[[0, 1, 5]]])
    assert torch.equal(NewtonSchulz().of_rows(rows, place), NewtonSchulz()(matrices))
    nothing = NewtonSchulz().of_rows(torch.empty(0, 6), torch.full((1, 2), -1))
    assert torch.equal(nothing, torch.zeros(1, 2, 6))
