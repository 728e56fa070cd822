"""Which layout can go on from which: ``python -m tests.checkpoint_table`` trains, saves and loads, and prints it.

``--write`` puts the table into docs/checkpoints.md; a test compares the page with it.
"""

import tempfile
from pathlib import Path

import torch

from benchmarks.pages import DOCS, publish
from dion_core.testing.ranks import pool
from tests.checkpoint_cases import PLACES, Place, resume, train_and_save
from tests.mesh_cases import ROUNDINGS
from tests.training import Snapshot

OPTIMIZER = "NorDion2"
SAME, CLOSE = "=", "~"
Saved = dict[Place, tuple[str, list[Snapshot]]]
"""By layout the directory of its checkpoint, and what `train_and_save` returned."""


def saved_in(place: Place, directory: Path) -> tuple[str, list[Snapshot]]:
    """Trains and saves in one layout."""
    where = str(directory / f"{place.layout}-{place.world_size}")
    return where, pool(place.world_size).run(train_and_save, place, OPTIMIZER, "sharded", where)[0]


def column(loaded_at: Place, saved: Saved) -> list[str]:
    """For each layout of saving how the resumed run equals the unbroken one: bit for bit, or to rounding.

    Raises:
        AssertionError: the state after a load is another one than was saved, or a run went another way.
    """
    cells = []
    for saved_at, (where, (at_save, unbroken)) in saved.items():
        # One call for each, so that the time-out of the pool is for one: all together take a quarter minute under load.
        by_rank = pool(loaded_at.world_size).run(resume, loaded_at, OPTIMIZER, "sharded", [where])
        assert all(bits(at_load) == bits(at_save) for ((at_load, _),) in by_rank), (saved_at, loaded_at)
        ((_, resumed),) = by_rank[0]
        cells.append(_verdict(resumed, unbroken))
    return cells


def bits(snapshot: Snapshot) -> dict[str, tuple[torch.dtype, list[float]]]:
    """Names, dtypes and exact values."""
    return {name: (value.dtype, value.double().flatten().tolist()) for name, value in snapshot.items()}


def _verdict(resumed: Snapshot, unbroken: Snapshot) -> str:
    if bits(resumed) == bits(unbroken):
        return SAME
    assert resumed.keys() == unbroken.keys()
    for name, value in resumed.items():
        assert torch.allclose(value, unbroken[name], rtol=0, atol=ROUNDINGS), name
    return CLOSE


def table(columns: list[list[str]]) -> str:
    """The columns of all layouts in Markdown: a line for each place of saving."""
    lines = [["saved at \\ loaded at", *map(str, PLACES)]]
    lines += [[str(place), *cells] for place, cells in zip(PLACES, zip(*columns, strict=True), strict=True)]
    rows = ["| " + " | ".join(line) + " |\n" for line in lines]
    return rows[0] + "|---" * len(lines[0]) + "|\n" + "".join(rows[1:])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        made = {place: saved_in(place, Path(scratch)) for place in PLACES}
        found = table([column(place, made) for place in PLACES])
    publish(found, DOCS / "checkpoints.md", "resume", description=__doc__)
