"""The table of docs/ownership.md: a cell by hand, bytes against the real plan, and the page as it is printed."""

import pytest

from benchmarks.balance import MODELS, Balance, balance, least_load, table
from benchmarks.pages import DOCS
from benchmarks.payload import payloads
from dion_comm_nccl import LocalTopRows
from dion_core.inventories import INVENTORIES


def test_one_cell_by_hand() -> None:
    """Three matrices of 8 x 4 over two ranks: a shard of 4 rows gives 1, so 2 x 4 are orthogonalized at 4 * 2^2 = 16.

    A row is 8 bytes. Each rank sends 3 rows to owners, and for each matrix owned 2 rows back: rank 0 owns two, rank 1
    one. Loads are 32 and 16, the share 24, and one of two ranks must own two. Blocks are of 2, one is a zero matrix:
    each rank sends 4 rows, and 4 back.
    """
    assert balance({(8, 4): 3}, 2) == Balance(
        sent=[(3 + 4) * 8, (3 + 2) * 8], block_sent=8 * 8, work=32 / 24, least_work=32 / 24, block_work=32 / 24
    )


def test_blocks_of_two_shapes_pile_up_on_the_first_rank() -> None:
    """One 16 x 4 (4 rows chosen, cost 64) and one 8 x 4 (cost 16): ours to two ranks, blocks both to rank 0."""
    found = balance({(16, 4): 1, (8, 4): 1}, 2)
    assert (found.work, found.block_work) == (64 / 40, 80 / 40)


@pytest.mark.parametrize(
    ("costs", "expected"), [([4, 4], 4), ([5, 5, 4, 1], 8), ([9, 1, 1], 9), ([1, 1, 1], 2), ([5, 4, 3, 2], 7)]
)
def test_no_assignment_goes_below_the_least_load(costs: list[int], expected: int) -> None:
    """Over two ranks, each reached by the best assignment but 5, 5, 4, 1, whose best is 9 and the bound 8."""
    assert least_load(costs, 2) == expected


@pytest.mark.parametrize(("inventory", "world_size"), [("1b", 16), ("5120x8", 8), ("14b", 12)])
def test_bytes_are_those_of_the_real_plan(inventory: str, world_size: int) -> None:
    """W 12 splits 5120 rows unevenly."""
    shapes = INVENTORIES[inventory]
    assert balance(shapes, world_size).sent == payloads(shapes, world_size, LocalTopRows(), "local")


@pytest.mark.parametrize(
    ("model", "millions"), [("Llama-3 8B", 6_979.3), ("Llama-3 70B", 68_451.0), ("Mixtral 8x7B", 46_439.3)]
)
def test_parameters_of_the_published_models(model: str, millions: float) -> None:
    """All published parameters less embeddings, output head, norms and routers, counted by hand."""
    parameters = sum(rows * columns * count for (rows, columns), count in MODELS[model].items())
    assert parameters / 1e6 == pytest.approx(millions, abs=0.1)


def test_the_page_has_the_table_that_the_command_makes() -> None:
    page = (DOCS / "ownership.md").read_text(encoding="utf-8")
    assert f"<!-- balance: begin -->\n{table()}<!-- balance: end -->" in page
