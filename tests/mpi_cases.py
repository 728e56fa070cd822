"""What the tests under mpirun look at, for the ranks and for who compares what they found."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from tests.mesh_cases import Case, Mesh, Weight
from tests.multiprocess import test_collectives as collectives
from tests.multiprocess.test_world_size import exact_cells
from tests.training import Cell

WORLD_SIZES = (1, 2, 3, 4)
LAYOUTS = {
    1: ("declared0",),
    2: ("ddp", "declared1", "shard0", "shard1"),
    3: ("declared0",),
    4: ("hsdp",),
}
"""By number of ranks what is trained; every transport is tested at each of them."""
WITHOUT_TORCH = ("ddp", "declared0", "declared1")


_FEW = (Weight((17, 12)), Weight((9, 10)), Weight((32, 6), {"num_heads": 8}, (4,) * 8))
_BESIDE = tuple(Weight((rows, 12), places=("0",), axes=(axis,)) for rows in (17, 9) for axis in ("a", "b"))
MESHES: dict[str, tuple[Mesh, tuple[Weight, ...]]] = {
    "hsdp": (Mesh((2, 2), ("r", "0")), _FEW),
    "fsdp over tp of rows, in another order": (Mesh((2, 2), ("s0/2", "0"), ranks=(3, 1, 0, 2)), _FEW),
    "tiles": (Mesh((2, 2), ("0", "1")), _FEW),
    "hsdp of columns": (Mesh((2, 2), ("r", "1")), _FEW),
    "experts and fsdp": (Mesh((2, 2), ("0", "-2")), (Weight((17, 12), places=("0", "0")), Weight((5, 8, 6)))),
    "parts that cross": (Mesh((2, 2), ("s0/2", "0")), (*_BESIDE, *_FEW)),
}
"""Meshes of four ranks and the weights on them, some of which lie on a part."""


def on_mesh(name: str) -> list[Case]:
    """What is trained on a mesh."""
    mesh, weights = MESHES[name]
    chosen = {"fraction": 0.4, "transport": "capped"}
    return [Case(mesh, weights, "NorMuon", {"transport": "full"}), Case(mesh, weights, "NorDion2", chosen)]


def cells(layout: str) -> list[Cell]:
    """What is trained in a layout: every optimizer with every transport."""
    chosen: dict[Any, Cell] = {}
    for cell in exact_cells(layout):
        chosen.setdefault((cell.optimizer, str(cell.options["transport"])), replace(cell, steps=(1, 3)))
    return list(chosen.values())


def collective_cases(world_size: int) -> list[tuple[Callable[..., Any], Sequence[Any]]]:
    """The functions and arguments of `by_collective`."""
    lengths = [each[:world_size] for each in collectives.LENGTHS.values()]
    splits = [collectives.splits_of(world_size, rule) for rule in collectives.SPLITS.values()]
    small, dtypes = (1, 5), collectives.DTYPES
    return [
        *((collectives.gather, case) for case in product(lengths, dtypes)),
        *((collectives.reduce, case) for case in product(small, dtypes, collectives.REDUCTIONS)),
        *((collectives.scatter, case) for case in product(small, dtypes, collectives.REDUCTIONS)),
        *((collectives.spread, case) for case in product(small, dtypes, range(world_size))),
        *((collectives.exchange, case) for case in product(splits, dtypes)),
    ]
