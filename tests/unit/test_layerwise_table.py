"""The table of layer-wise state: a cell by hand, shares of the real optimizer, and the page as it is printed."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.layerwise import Share, share, table
from benchmarks.pages import DOCS
from dion_core import NorDion2
from dion_core.inventories import Inventory
from dion_core.testing.ranks import pool

SHAPES: Inventory = {(64, 32): 5, (16, 128): 3, (100, 20): 2}


def test_one_cell_by_hand() -> None:
    """Three matrices of 8 x 8 and two ranks: rank 0 keeps two, at 2 bytes an element and 8 a row. Loads are 2 to 1."""
    one = 8 * 8 * 2 + 8 * 8
    assert share({(8, 8): 3}, 2) == Share([2 * one, one], 2 / 1.5)


def state_report(shapes: Inventory) -> dict[str, Any]:
    weights = [torch.zeros(shape, dtype=torch.bfloat16) for shape, count in shapes.items() for _ in range(count)]
    parameters = [nn.Parameter(weight) for weight in weights]
    optimizer = NorDion2(parameters, fraction=0.25, group=dist.group.WORLD, state="layerwise")
    return optimizer.report()


def test_shares_are_those_of_the_optimizer() -> None:
    reports = pool(3).run(state_report, SHAPES)
    planned = share(SHAPES, 3)
    assert [report["state"]["bytes"] for report in reports] == planned.state
    assert reports[0]["owner_load"][0]["imbalance"] == planned.work


def test_the_page_has_the_table_that_the_command_makes() -> None:
    page = (DOCS / "ownership.md").read_text(encoding="utf-8")
    assert f"<!-- layerwise: begin -->\n{table()}<!-- layerwise: end -->" in page
