"""Which winners go when a pool is too small, against loops; and that none of them waits too long."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dion_comm_capped.admission import keep, strongest
from dion_core.collectives import SoloGroup
from dion_core.deferral import wait_, with_age
from dion_core.layout import Axis, RowTables, split_layout
from dion_core.rows import RowSelection
from dion_core.selection import GlobalRows
from tests.unit.test_layout import CPU, fake_group

Entry = tuple[int, int]  # matrix and slot


def make_selection(
    count: Sequence[int], ratio: Sequence[Sequence[float]], age: Sequence[Sequence[int]]
) -> RowSelection:
    slots = len(ratio[0])
    index = torch.arange(slots).expand(len(count), slots) * 3 + 1
    counts = torch.tensor(count)
    return RowSelection(index, counts, counts[None], torch.tensor(ratio), torch.tensor(age, dtype=torch.int32))


def loop(selection: RowSelection, owners: Sequence[int], capacity: Sequence[int], max_wait: int) -> set[Entry]:
    """The admitted entries, pool by pool: overdue rows oldest first, then by ratio, then the lower row."""
    admitted: set[Entry] = set()
    for owner, room in enumerate(capacity):
        waiting = [
            (matrix, slot)
            for matrix, of_matrix in enumerate(owners)
            if of_matrix == owner
            for slot in range(int(selection.count[matrix]))
        ]

        def urgency(entry: Entry) -> tuple[float, ...]:
            matrix, slot = entry
            age, ratio = int(selection.age[entry]), float(selection.ratio[entry])
            return (-age if age >= max_wait else 0, -ratio, slot, matrix)

        admitted |= set(sorted(waiting, key=urgency)[:room])
    return admitted


@st.composite
def cases(draw: st.DrawFn) -> tuple[RowSelection, list[int], list[int], int]:
    num_matrices, slots, size = draw(st.integers(1, 5)), draw(st.integers(1, 6)), draw(st.integers(1, 3))

    def table(values: st.SearchStrategy) -> list[list]:
        return [[draw(values) for _ in range(slots)] for _ in range(num_matrices)]

    selection = make_selection(
        [draw(st.integers(0, slots)) for _ in range(num_matrices)],
        table(st.sampled_from([0.0, 1.0, 1.5, 2.0, 100.0])),
        table(st.integers(0, 6)),
    )
    owners = [draw(st.integers(0, size - 1)) for _ in range(num_matrices)]
    return selection, owners, [draw(st.integers(0, 12)) for _ in range(size)], draw(st.integers(1, 5))


@settings(deadline=None, max_examples=300)
@given(cases())
def test_strongest_and_keep_equal_a_loop(case: tuple[RowSelection, list[int], list[int], int]) -> None:
    selection, owners, capacity, max_wait = case
    admitted = strongest(selection, torch.tensor(owners), torch.tensor(capacity), max_wait=max_wait)
    expected = loop(selection, owners, capacity, max_wait)
    assert {(int(matrix), int(slot)) for matrix, slot in admitted.nonzero()} == expected
    for owner, room in enumerate(capacity):
        assert sum(owners[matrix] == owner for matrix, _ in expected) <= room
    kept = keep(selection, admitted)
    assert torch.equal(kept.count_by_rank, selection.count_by_rank)
    for matrix in range(len(owners)):
        slots = sorted(slot for other, slot in expected if other == matrix)
        order = slots + [slot for slot in range(selection.index.shape[1]) if slot not in slots]
        assert int(kept.count[matrix]) == len(slots)
        for name in ("index", "ratio", "age"):
            assert torch.equal(getattr(kept, name)[matrix], getattr(selection, name)[matrix, order])


def test_the_example_of_the_specification() -> None:
    """Four winners, two slots: the two strongest go, and with no further gradient the two others follow."""
    group = fake_group(0, 2)
    tables = RowTables(split_layout(group, Axis.ROWS, (8, 1)), CPU)
    norms = torch.tensor([[1.00, 1.03, 1.01, 1.02, 0, 0, 0, 0]])
    waited = [torch.zeros(4, 1, dtype=torch.int32)]
    applied = []
    for _ in range(2):
        chosen = with_age(GlobalRows(0.5).select(norms, tables, torch.ones(1, dtype=torch.bool)), waited)
        admitted = keep(chosen, strongest(chosen, torch.tensor([1]), torch.tensor([9, 2]), max_wait=8))
        wait_(waited, chosen, admitted)
        applied.append(admitted.index[0, :2].tolist())
        norms[0, applied[-1]] *= 0.95
    assert applied == [[1, 3], [0, 2]]


def test_among_equals_no_matrix_comes_first() -> None:
    selection = make_selection([5, 5, 5, 5], [[1.0] * 5] * 4, [[0] * 5] * 4)
    admitted = strongest(selection, torch.zeros(4, dtype=torch.int64), torch.tensor([10]), max_wait=8)
    assert admitted.sum(dim=1).tolist() == [3, 3, 2, 2]


class Overload:
    """Rank 0 of four holds all winners of N equal matrices, whose rows differ in strength up to 100-fold."""

    def __init__(self, *, matrices: int, rows: int, slots: int, fraction: float, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        logarithm = torch.rand(matrices, rows, generator=generator, dtype=torch.float64)
        self.strength = 100**logarithm
        self.norm = torch.zeros(matrices, rows, dtype=torch.float64)
        self.waited = torch.zeros(matrices, rows, 1, dtype=torch.int32)
        self.owner, self.slots = torch.zeros(matrices, dtype=torch.int64), torch.tensor([slots])
        layout = split_layout(SoloGroup(), Axis.ROWS, (rows, 1)).stack(matrices)
        self._tables, self._selector = RowTables(layout, CPU), GlobalRows(fraction)

    def step(self, max_wait: int) -> tuple[RowSelection, RowSelection]:
        """The winners and those admitted, of a gradient that points along the momentum."""
        self.norm += self.strength
        active = torch.ones(len(self.norm), dtype=torch.bool)
        waited = list(self.waited)
        chosen = with_age(self._selector.select(self.norm, self._tables, active), waited)
        admitted = keep(chosen, strongest(chosen, self.owner, self.slots, max_wait=max_wait))
        wait_(waited, chosen, admitted)
        decay = torch.where(admitted.valid(), 0.95, 1.0).double()
        self.norm.scatter_(1, admitted.index, self.norm.gather(1, admitted.index) * decay)
        return chosen, admitted


@pytest.mark.parametrize("slots", [3, 10, 31, 60])
@pytest.mark.parametrize("max_wait", [1, 8])
def test_no_winner_waits_longer_than_the_bound(slots: int, max_wait: int) -> None:
    """Every row is a winner in every step, 64 of them."""
    overload = Overload(matrices=4, rows=16, slots=slots, fraction=1.0, seed=slots)
    bound = max_wait + math.ceil(64 / slots)
    applied = torch.zeros(4, 16, dtype=torch.int64)
    for _ in range(200):
        chosen, admitted = overload.step(max_wait)
        assert int(chosen.count.sum()) == 64
        assert int(admitted.count.sum()) == slots
        assert int(overload.waited.max()) <= bound
        applied.scatter_add_(1, admitted.index, admitted.valid().long())
    assert int(applied.min()) >= 200 // (bound + 1)


def test_no_winner_waits_longer_where_winners_change() -> None:
    """Half of the rows win; a row's wait counts while it stays a winner."""
    overload = Overload(matrices=4, rows=32, slots=20, fraction=0.5, seed=0)
    waiting = torch.zeros(4, 32, dtype=torch.int64)
    for _ in range(200):
        chosen, admitted = overload.step(8)
        won, applied = (torch.zeros(4, 32, dtype=torch.bool) for _ in range(2))
        won.scatter_(1, chosen.index, chosen.valid())
        applied.scatter_(1, admitted.index, admitted.valid())
        waiting = torch.where(won & ~applied, waiting + 1, 0)
        assert int(waiting.max()) <= 8 + math.ceil(64 / 20)


def test_the_order_of_the_matrices_does_not_matter() -> None:
    """Numbered the other way round, each matrix is served as often as before."""
    overload = Overload(matrices=6, rows=16, slots=24, fraction=1.0, seed=1)
    reverse = Overload(matrices=6, rows=16, slots=24, fraction=1.0, seed=1)
    reverse.strength = overload.strength.flip(0)
    served, served_in_reverse = torch.zeros(6, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)
    for _ in range(200):
        served += overload.step(8)[1].count
        served_in_reverse += reverse.step(8)[1].count
    assert int(served.sum()) == 200 * 24
    assert int((served - served_in_reverse.flip(0)).abs().max()) <= 0.02 * 200 * 24 / 6
