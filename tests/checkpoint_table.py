"""Which layout can go on from which: ``python -m tests.checkpoint_table`` trains, saves and loads, and prints it.

``--write`` puts the table into docs/checkpoints.md; a test compares the page with it.
"""

import tempfile
from pathlib import Path

import torch

from benchmarks.pages import DOCS, publish
from dion_core.testing.ranks import pool
from tests.checkpoint_cases import PLACES, Place, resume, train_and_save
from tests.training import Snapshot

OPTIMIZER = "NorDion2"
SAME, CLOSE = "=", "~"
TOLERANCE = 1e-6
"""Absolute, of weights and state of size about 1: sums over split columns are in another order."""


def resume_table(directory: Path) -> dict[tuple[Place, Place], str]:
    """By (saved at, loaded at) how the resumed run equals the unbroken one: bit for bit, or to rounding.

    Raises:
        AssertionError: the state after a load is another one than was saved, or a run went another way.
    """
    directories = [str(directory / str(number)) for number in range(len(PLACES))]
    saved = [
        pool(place.world_size).run(train_and_save, place, OPTIMIZER, "sharded", where)[0]
        for place, where in zip(PLACES, directories, strict=True)
    ]
    cells = {}
    for loaded_at in PLACES:
        by_rank = pool(loaded_at.world_size).run(resume, loaded_at, OPTIMIZER, "sharded", directories)
        for number, saved_at in enumerate(PLACES):
            assert all(bits(of_rank[number][0]) == bits(saved[number][0]) for of_rank in by_rank), (saved_at, loaded_at)
            cells[saved_at, loaded_at] = _verdict(by_rank[0][number][1], saved[number][1])
    return cells


def bits(snapshot: Snapshot) -> dict[str, tuple[torch.dtype, list[float]]]:
    """Names, dtypes and exact values."""
    return {name: (value.dtype, value.double().flatten().tolist()) for name, value in snapshot.items()}


def _verdict(resumed: Snapshot, unbroken: Snapshot) -> str:
    if bits(resumed) == bits(unbroken):
        return SAME
    assert resumed.keys() == unbroken.keys()
    for name, value in resumed.items():
        assert torch.allclose(value, unbroken[name], rtol=0, atol=TOLERANCE), name
    return CLOSE


def table(cells: dict[tuple[Place, Place], str]) -> str:
    """The cells in Markdown: a line for each place of saving, a column for each of loading."""
    lines = [["saved at \\ loaded at", *map(str, PLACES)]]
    lines += [[str(saved_at), *(cells[saved_at, loaded_at] for loaded_at in PLACES)] for saved_at in PLACES]
    rows = ["| " + " | ".join(line) + " |\n" for line in lines]
    return rows[0] + "|---" * len(lines[0]) + "|\n" + "".join(rows[1:])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        found = table(resume_table(Path(scratch)))
    publish(found, DOCS / "checkpoints.md", "resume", description=__doc__)
