"""What row choice promises for arbitrary fractions, scores and layouts."""

import math
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from dion_core.selection import AllRows, GlobalRows, LocalRows, rows_to_select
from tests.unit.test_layout import random_holders, rows_of
from tests.unit.test_selection import best, check, select_everywhere

fractions = st.floats(0, 1, exclude_min=True)
row_counts = st.integers(1, 200_000)
patient = settings(deadline=None)
bounded = settings(patient, max_examples=60)


@patient
@given(fraction=fractions, rows=row_counts)
def test_the_count_is_at_least_one_and_at_most_all(fraction: float, rows: int) -> None:
    assert 1 <= rows_to_select(fraction, rows) <= rows


@patient
@given(fraction=fractions, rows=row_counts)
def test_the_count_is_the_exact_ceiling_up_to_the_small_term(fraction: float, rows: int) -> None:
    exact = Fraction(fraction) * rows
    # The term itself, and the rounding of the product.
    slack = Fraction(rows) * (Fraction(1, 10**9) + Fraction(1, 2**52))
    assert max(1, math.ceil(exact - slack)) <= rows_to_select(fraction, rows) <= max(1, math.ceil(exact))


@patient
@given(digits=st.integers(1, 10**6), rows=st.integers(1, 1000))
def test_the_count_of_a_decimal_fraction_is_that_of_its_digits(digits: int, rows: int) -> None:
    """Six digits times 1000 rows stay a multiple of 1e-6 above a whole number, more than the small term."""
    exact = math.ceil(Fraction(digits, 10**6) * rows)
    assert rows_to_select(digits / 10**6, rows) == exact


@patient
@given(fraction=fractions, other=fractions, rows=row_counts, more=row_counts)
def test_the_count_grows_with_rows_and_fraction(fraction: float, other: float, rows: int, more: int) -> None:
    count = rows_to_select(fraction, rows)
    assert count <= rows_to_select(fraction, rows + more)
    assert count <= rows_to_select(max(fraction, other), rows)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[list[int]], int, list[list[float]], float, list[bool]]:
    """(holders, W, scores, fraction, active) of some matrices, their rows scattered, with many equal scores."""
    size, num_matrices, rows = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 14))
    holders = random_holders(draw(st.integers(0, 2**31)), num_matrices, rows, size)
    values = st.one_of(st.integers(-1, 3).map(float), st.floats(0, 2.0**100, width=32))
    scores = draw(
        st.lists(st.lists(values, min_size=rows, max_size=rows), min_size=num_matrices, max_size=num_matrices)
    )
    active = draw(st.lists(st.booleans(), min_size=num_matrices, max_size=num_matrices))
    return holders, size, scores, draw(st.floats(0.001, 1)), active


@bounded
@given(case=cases())
def test_every_selector_equals_its_loop_on_every_rank(
    case: tuple[list[list[int]], int, list[list[float]], float, list[bool]],
) -> None:
    holders, size, scores, fraction, active = case
    rows = len(holders[0])
    in_all = rows_to_select(fraction, rows)
    in_each = rows_to_select(fraction, -(-rows // size))
    by_rule: list[tuple[AllRows | GlobalRows | LocalRows, list[list[int]]]] = [
        (AllRows(), []),
        (GlobalRows(fraction), []),
        (LocalRows(fraction), []),
    ]
    for matrix, on in enumerate(active):
        shards = [rows_of(holders, rank, matrix) for rank in range(size)]
        by_rule[0][1].append(list(range(rows * on)))
        by_rule[1][1].append(best(scores[matrix], range(rows), in_all * on))
        by_rule[2][1].append(sorted(row for held in shards for row in best(scores[matrix], held, in_each * on)))
    for selector, chosen in by_rule:
        check(selector, select_everywhere(selector, scores, holders, size, active), holders, chosen)
