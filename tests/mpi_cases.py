"""What the tests under mpirun look at, for the ranks and for who compares what they found."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from tests.multiprocess import test_collectives as collectives
from tests.multiprocess.test_world_size import exact_cells
from tests.training import Cell

LAYOUTS = {1: ("declared0",), 2: ("ddp", "declared1", "shard0"), 3: ("declared0",), 4: ("hsdp",)}
"""By number of ranks what is trained; all layouts with all of them in `whole_suite`."""
TRANSPORTS = {1: ("uniform",), 2: ("capped", "full"), 3: ("varlen",), 4: ("local",)}
"""By number of ranks what passes the conformance suite; likewise."""
WITHOUT_TORCH = ("ddp", "declared0", "declared1")


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
