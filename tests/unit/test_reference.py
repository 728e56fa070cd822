"""The reference itself, against hand-computed cases and the plain Newton-Schulz iteration."""

import ast
import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import tests.reference
from tests.reference import (
    Array,
    Options,
    ReferenceElementwise,
    ReferenceMatrix,
    chunk_shards,
    polar_express,
    rows_to_select,
    update_scale,
)

MATRIX_ALGORITHMS = ("muon", "normuon", "dion2", "nordion2")
NORMALIZED = ("normuon", "nordion2")

# A single row has one singular value, its norm: what Polar Express makes of exactly 1, worked out apart from
# the reference as the scalar iteration x -> a x + b x^3 + c x^5 with x / 1.05 for x.
ONE_ROW = 1.0
for _a, _b, _c in (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
):
    _x = ONE_ROW / 1.05
    ONE_ROW = _a * _x + _b * _x**3 + _c * _x**5


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


def update_of(gradient: Array, **options: object) -> Array:
    """The first update of a zero weight, unscaled: U with zeros in the rows that were not applied."""
    matrix = ReferenceMatrix(
        np.zeros_like(gradient),
        dataclasses.replace(Options("muon", lr=1.0, weight_decay=0.0, scale=None), **options),
    )
    matrix.step(gradient)
    return -matrix.weight


def assert_same(one: ReferenceMatrix, other: ReferenceMatrix) -> None:
    np.testing.assert_array_equal(one.weight, other.weight)
    np.testing.assert_array_equal(one.momentum, other.momentum)
    if one.second_moment is None or other.second_moment is None:
        assert one.second_moment is other.second_moment
    else:
        np.testing.assert_array_equal(one.second_moment, other.second_moment)


def test_reference_shares_no_code_with_the_package() -> None:
    tree = ast.parse(Path(tests.reference.__file__).read_text(encoding="utf-8"))
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    imported += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert {name.split(".")[0] for name in imported} == {"math", "collections", "dataclasses", "numpy"}


class TestCounts:
    @pytest.mark.parametrize(
        ("fraction", "rows", "count"),
        [
            (0.07, 100, 7),
            (0.35, 17, 6),
            (0.25, 32, 8),
            (0.25, 3, 1),
            (0.01, 1, 1),
            (1.0, 17, 17),
            (0.5, 0, 0),
        ],
    )
    def test_rows_to_select(self, fraction: float, rows: int, count: int) -> None:
        assert rows_to_select(fraction, rows) == count

    @pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 8])
    def test_chunk_shards_are_those_of_torch_chunk(self, world_size: int) -> None:
        for rows in range(1, 41):
            pieces = torch.arange(rows).chunk(world_size)
            expected = [(int(piece[0]), len(piece)) for piece in pieces]
            expected += [(rows, 0)] * (world_size - len(pieces))
            assert chunk_shards(rows, world_size) == expected

    def test_chunk_shards_of_no_rows_are_empty(self) -> None:
        assert chunk_shards(0, 2) == [(0, 0), (0, 0)]

    def test_fewer_rows_than_needed_leave_ranks_empty(self) -> None:
        assert [rows for _, rows in chunk_shards(18, 8)] == [3, 3, 3, 3, 3, 3, 0, 0]


class TestPolarExpress:
    @pytest.mark.parametrize("shape", [(8, 8), (5, 12), (12, 5), (1, 6), (6, 1)])
    def test_equals_the_matrix_iteration(self, shape: tuple[int, int]) -> None:
        matrix = random(*shape)
        x = torch.from_numpy(matrix / np.linalg.norm(matrix))
        for a, b, c in tests.reference.POLAR_EXPRESS:
            x = x / 1.05
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
        np.testing.assert_allclose(polar_express(matrix), x.numpy(), rtol=0, atol=1e-12)

    @pytest.mark.parametrize("shape", [(16, 16), (8, 32), (32, 8)])
    def test_singular_values_of_a_well_conditioned_matrix_are_near_one(self, shape: tuple[int, int]) -> None:
        left, _, right = np.linalg.svd(random(*shape), full_matrices=False)
        matrix = (left * np.linspace(1.0, 10.0, min(shape))) @ right
        values = np.linalg.svd(polar_express(matrix), compute_uv=False)
        assert values.min() > 0.84
        assert values.max() < 1.14

    @pytest.mark.parametrize("factor", [1e-200, 1e-10, 1e20, 1e200])
    def test_does_not_depend_on_the_scale(self, factor: float) -> None:
        matrix = random(6, 9)
        np.testing.assert_allclose(polar_express(matrix * factor), polar_express(matrix), rtol=0, atol=1e-12)

    def test_zero_stays_zero(self) -> None:
        matrix = random(6, 9)
        matrix[[1, 4]] = 0.0
        others = np.delete(matrix, [1, 4], axis=0)
        result = polar_express(matrix)
        assert not result[[1, 4]].any()
        np.testing.assert_allclose(np.delete(result, [1, 4], axis=0), polar_express(others), atol=1e-12)
        assert not polar_express(np.zeros((3, 4))).any()
        assert polar_express(np.zeros((0, 4))).shape == (0, 4)

    def test_one_row(self) -> None:
        np.testing.assert_allclose(polar_express(np.array([[3.0, 4.0]])), [[0.6 * ONE_ROW, 0.8 * ONE_ROW]])


class TestChoice:
    def test_ties_go_to_the_lower_row_by_l1_norm(self) -> None:
        # Both rows have L1 norm 2; by L2 norm the second would win.
        matrix = ReferenceMatrix(np.zeros((2, 2)), Options("dion2", fraction=0.5))
        assert matrix.step(np.array([[1.0, 1.0], [2.0, 0.0]])) == {0}

    def test_error_feedback_decays_applied_rows_only(self) -> None:
        options = Options("dion2", fraction=0.5, lr=0.5, weight_decay=0.0, scale=None)
        matrix = ReferenceMatrix(np.zeros((2, 2)), options)
        assert matrix.step(np.array([[3.0, 0.0], [0.0, 1.0]])) == {0}
        np.testing.assert_allclose(matrix.momentum, [[2.85, 0.0], [0.0, 1.0]])
        np.testing.assert_allclose(matrix.weight, [[-0.5 * ONE_ROW, 0.0], [0.0, 0.0]])
        assert matrix.step(np.array([[0.0, 0.0], [0.0, 2.0]])) == {1}
        np.testing.assert_allclose(matrix.momentum, [[2.85, 0.0], [0.0, 2.85]])
        np.testing.assert_allclose(matrix.weight, [[-0.5 * ONE_ROW, 0.0], [0.0, -0.5 * ONE_ROW]])

    @pytest.mark.parametrize("world_size", [1, 2, 4])
    def test_global_rows_do_not_depend_on_the_world_size(self, world_size: int) -> None:
        gradient = random(17, 32)
        best = np.argsort(-np.abs(gradient).sum(axis=1))[:6]
        matrix = ReferenceMatrix(
            np.zeros((17, 32)), Options("dion2", fraction=0.35), shards=chunk_shards(17, world_size)
        )
        assert matrix.step(gradient) == set(best.tolist())

    def test_local_takes_the_best_of_every_shard(self) -> None:
        scores = np.array([9.0, 8.0, 7.0, 1.0, 1.0, 2.0, 3.0, 3.0])
        gradient = scores[:, None] * np.array([[1.0, 0.0]])
        options = Options("dion2", fraction=0.25, scope="local")
        matrix = ReferenceMatrix(np.zeros((8, 2)), options, shards=chunk_shards(8, 4))
        assert matrix.step(gradient) == {0, 2, 5, 6}
        assert ReferenceMatrix(np.zeros((8, 2)), options).step(gradient) == {0, 1}  # one shard: as global

    @pytest.mark.parametrize(
        ("rows", "world_size", "fraction", "sizes"),
        [(32, 4, 0.25, [2, 2, 2, 2]), (3, 4, 0.25, [1, 1, 1, 0]), (17, 4, 0.8, [4, 4, 4, 2])],
    )
    def test_local_takes_no_more_than_the_shard_has(
        self, rows: int, world_size: int, fraction: float, sizes: list[int]
    ) -> None:
        shards = chunk_shards(rows, world_size)
        matrix = ReferenceMatrix(np.zeros((rows, 8)), Options("dion2", fraction=fraction, scope="local"), shards=shards)
        applied = matrix.step(random(rows, 8))
        assert [len(applied & set(range(start, start + size))) for start, size in shards] == sizes

    @pytest.mark.parametrize(("every", "top"), [("muon", "dion2"), ("normuon", "nordion2")])
    @pytest.mark.parametrize("scope", ["global", "local"])
    def test_fraction_one_is_the_algorithm_of_all_rows(self, every: str, top: str, scope: str) -> None:
        weight, shards = random(7, 5), chunk_shards(7, 4)
        one = ReferenceMatrix(weight, Options(every))
        other = ReferenceMatrix(weight, Options(top, fraction=1.0, scope=scope), shards=shards)
        for seed in (1, 2, 3):
            assert one.step(random(7, 5, seed=seed)) == other.step(random(7, 5, seed=seed)) == set(range(7))
            assert_same(one, other)


class TestNormalization:
    def test_two_steps_by_hand(self) -> None:
        options = Options("normuon", lr=1.0, weight_decay=0.0, scale=None)
        matrix = ReferenceMatrix(np.zeros((2, 2)), options)
        matrix.step(np.array([[3.0, 0.0], [0.0, 0.0]]))  # one singular value, 1 when normalized
        assert matrix.second_moment is not None
        np.testing.assert_allclose(matrix.second_moment, [[0.05 * ONE_ROW**2 / 2], [0.0]])
        np.testing.assert_allclose(matrix.weight, [[-ONE_ROW, 0.0], [0.0, 0.0]])
        before = matrix.weight.copy()
        matrix.step(np.array([[0.15, 0.0], [0.0, 3.0]]))  # 0.95 * 3 + 0.15 = 3: U = h times the identity
        h = polar_express(3.0 * np.eye(2))[0, 0]
        v = [0.95 * 0.05 * ONE_ROW**2 / 2 + 0.05 * h**2 / 2, 0.05 * h**2 / 2]
        np.testing.assert_allclose(matrix.second_moment, [[v[0]], [v[1]]])
        # Rows are as 1 / sqrt(v), at the norm sqrt(2) h of U; the epsilon is 1e-7 of sqrt(v).
        rows = np.array([v[0] ** -0.5, v[1] ** -0.5])
        expected = np.diag(rows * math.sqrt(2) * h / np.linalg.norm(rows))
        np.testing.assert_allclose(before - matrix.weight, expected, rtol=1e-6, atol=1e-15)

    @pytest.mark.parametrize(("plain", "normalized"), [("muon", "normuon"), ("dion2", "nordion2")])
    def test_keeps_the_frobenius_norm(self, plain: str, normalized: str) -> None:
        gradient = random(12, 6) * np.arange(1, 13)[:, None]
        before = update_of(gradient, algorithm=plain, fraction=0.5)
        after = update_of(gradient, algorithm=normalized, fraction=0.5)
        assert np.linalg.norm(after) == pytest.approx(float(np.linalg.norm(before)), rel=1e-12)
        assert np.abs(after - before).max() > 1e-3

    def test_second_moment_moves_on_applied_rows_only(self) -> None:
        matrix = ReferenceMatrix(random(8, 4), Options("nordion2"))
        applied = matrix.step(random(8, 4, seed=1))
        assert matrix.second_moment is not None
        assert matrix.second_moment.shape == (8, 1)
        assert set(np.flatnonzero(matrix.second_moment[:, 0]).tolist()) == applied


class TestWeights:
    @pytest.mark.parametrize("algorithm", MATRIX_ALGORITHMS)
    def test_zero_gradient_decays_all_rows_and_nothing_else(self, algorithm: str) -> None:
        weight = random(4, 8)
        matrix = ReferenceMatrix(weight, Options(algorithm, lr=0.1, weight_decay=0.5))
        matrix.step(np.zeros((4, 8)))
        np.testing.assert_allclose(matrix.weight, weight * 0.95, rtol=1e-15)
        assert not matrix.momentum.any()
        assert (matrix.second_moment is not None) == (algorithm in NORMALIZED)
        assert matrix.second_moment is None or not matrix.second_moment.any()

    def test_decay_uses_the_base_learning_rate(self) -> None:
        weight = random(33, 32)
        options = Options("dion2", lr=0.1, weight_decay=0.5)
        matrix = ReferenceMatrix(weight, options)
        applied = matrix.step(random(33, 32, seed=1))
        others = [row for row in range(33) if row not in applied]
        assert len(applied) == 9
        np.testing.assert_allclose(matrix.weight[others], weight[others] * 0.95, rtol=1e-15)

    def test_cautious_decay_acts_where_signs_agree(self) -> None:
        weight = np.array([[2.0, 5.0], [7.0, -4.0]])
        options = Options("muon", lr=0.1, weight_decay=0.5, scale=None, cautious_weight_decay=True)
        matrix = ReferenceMatrix(weight, options)
        matrix.step(np.eye(2))  # U = h times the identity: agrees with 2.0, not with -4.0, is zero at 5.0 and 7.0
        h = polar_express(np.eye(2))[0, 0]
        expected = [[2.0 * 0.95 - 0.1 * h, 5.0], [7.0, -4.0 - 0.1 * h]]
        np.testing.assert_allclose(matrix.weight, expected, rtol=1e-12)

    def test_scale_is_of_the_true_shape(self) -> None:
        assert update_scale("spectral_norm", 33, 32) == pytest.approx(1.0155, abs=5e-5)
        assert update_scale("rms_norm", 33, 64) == pytest.approx(1.6)
        assert update_scale(None, 33, 32) == 1.0
        gradient = random(33, 32)
        plain = update_of(gradient)
        np.testing.assert_allclose(update_of(gradient, scale="spectral_norm"), math.sqrt(33 / 32) * plain)
        np.testing.assert_allclose(update_of(gradient, scale="rms_norm"), 0.2 * math.sqrt(33) * plain)

    def test_nesterov_orthogonalizes_gradient_plus_momentum(self) -> None:
        options = Options("muon", lr=1.0, momentum=0.5, weight_decay=0.0, scale=None, nesterov=True)
        matrix = ReferenceMatrix(np.zeros((3, 4)), options)
        first, second = random(3, 4, seed=1), random(3, 4, seed=2)
        matrix.step(first)
        np.testing.assert_allclose(matrix.momentum, 0.5 * first)
        before = matrix.weight.copy()
        matrix.step(second)
        np.testing.assert_allclose(before - matrix.weight, polar_express(second + 0.5 * (0.5 * first + second)))
        np.testing.assert_allclose(matrix.momentum, 0.5 * (0.5 * first + second))

    def test_momentum_of_muon_does_not_depend_on_the_update(self) -> None:
        matrix = ReferenceMatrix(random(4, 4), Options("muon", lr=0.0))
        matrix.step(np.ones((4, 4)))
        np.testing.assert_allclose(matrix.momentum, np.full((4, 4), 0.95))
        matrix.step(np.ones((4, 4)))
        np.testing.assert_allclose(matrix.momentum, np.full((4, 4), 1.95 * 0.95))

    def test_wire_rounds_rows_both_ways(self) -> None:
        seen = []

        def wire(rows: Array) -> Array:
            seen.append(rows.copy())
            return rows.astype(np.float16).astype(np.float64)

        gradient = random(8, 4)
        update = update_of(gradient, algorithm="dion2", wire=wire)
        applied = np.flatnonzero(update.any(axis=1))
        assert [rows.shape for rows in seen] == [(2, 4), (2, 4)]
        np.testing.assert_array_equal(seen[0], gradient[applied])
        rounded = seen[0].astype(np.float16).astype(np.float64)
        np.testing.assert_array_equal(seen[1], polar_express(rounded))
        np.testing.assert_array_equal(update[applied], seen[1].astype(np.float16).astype(np.float64))

    @pytest.mark.parametrize("algorithm", MATRIX_ALGORITHMS)
    def test_maximize_negates_the_gradient(self, algorithm: str) -> None:
        weight, gradient = random(6, 5), random(6, 5, seed=1)
        one = ReferenceMatrix(weight, Options(algorithm, maximize=True))
        other = ReferenceMatrix(weight, Options(algorithm))
        assert one.step(gradient) == other.step(-gradient)
        assert_same(one, other)

    def test_arguments_are_copied(self) -> None:
        weight, gradient = random(4, 4), random(4, 4, seed=1)
        gradient[2, 2] = np.nan
        kept = weight.copy(), gradient.copy()
        ReferenceMatrix(weight, Options("muon")).step(gradient)
        ReferenceElementwise(weight, Options("adamw")).step(gradient)
        np.testing.assert_array_equal(weight, kept[0])
        np.testing.assert_array_equal(gradient, kept[1])


class TestMissingAndNonfinite:
    @pytest.mark.parametrize("algorithm", MATRIX_ALGORITHMS)
    @pytest.mark.parametrize("bad", [None, np.inf, -np.inf, np.nan])
    def test_no_gradient_or_a_skipped_step_moves_nothing(self, algorithm: str, bad: float | None) -> None:
        options = Options(algorithm, nonfinite="skip")
        one, other = ReferenceMatrix(random(6, 5), options), ReferenceMatrix(random(6, 5), options)
        broken = None if bad is None else random(6, 5, seed=9)
        if broken is not None:
            broken[3, 1] = bad
        for seed in (1, 2):
            one.step(random(6, 5, seed=seed))
            other.step(random(6, 5, seed=seed))
            assert one.step(broken) == set()
            assert_same(one, other)

    @pytest.mark.parametrize("bad", [np.inf, np.nan])
    def test_rows_with_a_nonfinite_gradient_score_lowest(self, bad: float) -> None:
        options = Options("dion2", fraction=0.5, lr=0.1, weight_decay=0.0)
        matrix = ReferenceMatrix(np.zeros((4, 2)), options)
        matrix.step(np.array([[9.0, 0.0], [0.0, 8.0], [7.0, 0.0], [0.0, 0.0]]))  # applies rows 0 and 1
        applied = matrix.step(np.array([[0.0, bad], [1.0, 0.0], [bad, bad], [0.0, 0.0]]))
        assert applied == {1, 3}  # row 3 has a finite score of zero, which is above rows 0 and 2
        np.testing.assert_allclose(
            matrix.momentum, [[8.55, 0.0], [0.95, 0.95 * 7.6], [7.0, 0.0], [0.0, 0.0]], rtol=1e-12
        )
        assert np.isfinite(matrix.weight).all()
        assert matrix.step(np.full((4, 2), bad)) == {0, 1}  # none is finite: ties to the lower row

    @pytest.mark.parametrize("nesterov", [False, True])
    def test_nonfinite_rows_count_as_zero_under_muon(self, nesterov: bool) -> None:
        options = Options("muon", nesterov=nesterov)
        one, other = ReferenceMatrix(random(4, 6), options), ReferenceMatrix(random(4, 6), options)
        broken, zeroed = random(4, 6, seed=2), random(4, 6, seed=2)
        broken[1, 3] = np.nan
        zeroed[1] = 0.0
        for wrong, right in ((broken, zeroed), (zeroed, zeroed)):
            assert one.step(wrong) == other.step(right) == {0, 1, 2, 3}
            assert_same(one, other)

    @pytest.mark.parametrize("algorithm", ["adamw", "lion"])
    def test_elementwise(self, algorithm: str) -> None:
        broken, zeroed = random(5, seed=1), random(5, seed=1)
        broken[[1, 3]], zeroed[[1, 3]] = [np.nan, np.inf], 0.0
        one = ReferenceElementwise(random(5), Options(algorithm))
        other = ReferenceElementwise(random(5), Options(algorithm))
        skipping = ReferenceElementwise(random(5), Options(algorithm, nonfinite="skip"))
        one.step(broken)
        other.step(zeroed)
        other.step(None)
        skipping.step(broken)
        np.testing.assert_array_equal(one.weight, other.weight)
        np.testing.assert_array_equal(one.first_moment, other.first_moment)
        np.testing.assert_array_equal(skipping.weight, random(5))
        assert (one.num_steps, other.num_steps, skipping.num_steps) == (1, 1, 0)


class TestRefusals:
    @pytest.mark.parametrize(
        "wrong",
        [{"algorithm": "sgd"}, {"scope": "all"}, {"scale": "none"}, {"nonfinite": "row"}, {"nesterov": True}],
    )
    def test_misspelt_choices(self, wrong: dict[str, object]) -> None:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Options(**({"algorithm": "dion2"} | wrong))

    def test_algorithms_of_the_other_kind(self) -> None:
        with pytest.raises(ValueError, match="adamw"):
            ReferenceMatrix(np.zeros((2, 2)), Options("adamw"))
        with pytest.raises(ValueError, match="muon"):
            ReferenceElementwise(np.zeros((2, 2)), Options("muon"))

    def test_shards_that_do_not_cover_the_matrix(self) -> None:
        with pytest.raises(ValueError, match="5 rows"):
            ReferenceMatrix(np.zeros((5, 2)), Options("dion2", scope="local"), shards=chunk_shards(4, 2))
