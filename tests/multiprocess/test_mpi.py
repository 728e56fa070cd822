"""The optimizers under mpirun: conformance, the bits of one process, declared shards, and how errors end."""

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dion_core.testing.ranks import pool
from tests import mpi_cases
from tests.mpi_ranks import ROOT, mpirun
from tests.multiprocess import test_collectives as collectives
from tests.multiprocess.test_world_size import COLUMNS
from tests.training import assembled, assert_close, assert_equal_bits, train_cells

WORLD_SIZES = (1, 2, 3, 4)


def by_gloo(cases: list[Any]) -> list[Any]:
    return [function(collectives.world(), *case) for function, case in cases]


def run_suite(what: str, world_size: int, folder: Path, seconds: float) -> list[dict[str, Any]]:
    """What the ranks found, by rank."""
    ended = mpirun(world_size, "-m", "tests.mpi_program", what, folder, seconds=seconds)
    assert ended.code == 0, ended.output
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


def check_suite(by_rank: list[dict[str, Any]]) -> None:
    """Everything that the ranks found is as it should be."""
    world_size = len(by_rank)
    check_collectives(by_rank)
    check_parts(by_rank)
    for name in by_rank[0]["conformance"]:
        failures = [outcome.failures for found in by_rank for outcome in found["conformance"][name] if outcome.failures]
        assert not failures, (name, failures[0])
        assert all(found["conformance"][name] for found in by_rank)
    for layout in by_rank[0]["cells"]:
        # torch.distributed numbers the ranks the other way round.
        order = by_rank if layout in mpi_cases.WITHOUT_TORCH else by_rank[::-1]
        check_cells(layout, [found["cells"][layout] for found in order])
    for found in by_rank:
        for way in ("own", "whole"):
            assert_equal_bits(found["resumed"][way], found["resumed"]["unbroken"], way)
        assert_equal_bits(*found["layerwise"], "layerwise")
        assert found["resumed"]["shapes"] == [(17, 32), None]
    check_refusals(by_rank, world_size)


def check_collectives(by_rank: list[dict[str, Any]]) -> None:
    """As gloo does them."""
    world_size = len(by_rank)
    wanted = pool(world_size).run(by_gloo, mpi_cases.collective_cases(world_size))
    for found, reference in zip(by_rank, wanted, strict=True):
        for actual, expected in zip(found["collectives"], reference, strict=True):
            pairs = zip(actual, expected, strict=True) if isinstance(actual, list) else [(actual, expected)]
            for one, other in pairs:
                collectives.assert_same_bits(one, other)
        # 257 is rounded to 256, 258 and 259 to 258 and 260.
        assert found["sum"] == {1: 256.0, 2: 256.0, 3: 258.0, 4: 260.0}[world_size]


def check_parts(by_rank: list[dict[str, Any]]) -> None:
    world_size = len(by_rank)
    for rank, found in enumerate(by_rank):
        same_parity = [float(other) for other in range(rank % 2, world_size, 2)]
        assert found["parts"] == [[float(other) for other in reversed(range(world_size))], same_parity]


def check_cells(layout: str, by_rank: list[list[Any]]) -> None:
    """The bits of one process with whole tensors, or, where columns are divided, its values."""
    cells = mpi_cases.cells(layout)
    for number, (cell, wanted) in enumerate(zip(cells, train_cells(mpi_cases.cells("plain"), 1), strict=True)):
        if number == len(by_rank[0]):
            break
        actual = assembled(cell, [outcomes[number] for outcomes in by_rank])
        where = f"{layout}: {cell.optimizer} {cell.options}"
        if layout not in ("shard1", "declared1"):
            assert_equal_bits(actual[-1], wanted[-1], where)
        elif cell.options.get("wire_dtype") is None and actual[-1]["matrix0.weight"].dtype is torch.float32:
            assert_close(actual[-1], {name: value.double() for name, value in wanted[-1].items()}, COLUMNS, where)


def check_refusals(by_rank: list[dict[str, Any]], world_size: int) -> None:
    """Wrong declarations are refused on all ranks alike, by name, with ranks and ranges."""
    last = world_size - 1
    hole, overlap, columns, sizes, too_long, failing, captured = by_rank[0]["refused"]
    assert ("communicate by MPI" if world_size > 1 else "is on cpu") in captured
    ranges = f"rank {last} [{4 * last}, {4 * last + 3})"
    if world_size == 1:
        assert "is not the whole tensor" in hole
        assert "offset=-1 of a declared shard is not allowed" in overlap
        assert columns == "nothing"
        assert "ends at 4, after the end" in sizes
    else:
        for found in by_rank[1:]:
            assert found["refused"][:2] == [hole, overlap]
        assert f"weight: the declared shards of axis 0 do not tile ({4 * world_size}, 4)" in hole
        assert f"nobody holds {4 * last + 3} to {4 * last + 3}" in hole
        assert ranges in hole
        assert f"rank {last} holds from {4 * last - 1} on what another rank holds to {4 * last - 1}" in overlap
        assert f"axis 0 of ({4 * world_size}, 4), rank {last} of weight, axis 0 of ({4 * world_size}, 5)" in columns
        assert f"could not be built on every rank: rank {last}: ValueError: weight: DeclaredShard" in sizes
        assert f"could not be built on every rank: rank {last}" in too_long
        assert "parameters with declared shards" in failing
    for found in by_rank:
        assert all(each.startswith(("ValueError", "TransportError", "nothing")) for each in found["refused"])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_under_mpirun(world_size: int, tmp_path: Path) -> None:
    check_suite(run_suite("suite", world_size, tmp_path, 100.0))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_everything_under_mpirun(world_size: int, tmp_path: Path) -> None:
    check_suite(run_suite("whole_suite", world_size, tmp_path, 110.0))


def test_the_group_of_nccl_with_a_made_up_library(tmp_path: Path) -> None:
    by_rank = run_suite("nccl", 2, tmp_path, 100.0)
    check_collectives(by_rank)
    check_cells("declared0", [found["cells"]["declared0"] for found in by_rank])
    assert all('group="nccl" moves GPU tensors alone, got one on cpu' in found["refused"] for found in by_rank)


@pytest.mark.slow
def test_messages_longer_than_two_gigabytes(tmp_path: Path) -> None:
    _, (length, first, last, ones) = run_suite("large", 2, tmp_path, 110.0)
    assert (length, first, last, ones) == (2**31 + 5, 1, 1, 2)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("one_raises", "RuntimeError: the data of rank 1 are broken"),
        (
            "one_is_late",
            "TransportError: all_reduce for presence flags on rank 0 among ranks (0, 1) failed: it did not",
        ),
    ],
)
def test_an_error_of_one_rank_ends_all(what: str, said: str) -> None:
    start = time.monotonic()
    ended = mpirun(2, "-m", "tests.mpi_errors", what, seconds=90.0)
    assert ended.code not in (0, None), ended.output
    assert said in ended.output
    assert time.monotonic() - start < 80


def test_a_library_for_one_thread_is_refused() -> None:
    ended = mpirun(1, "-m", "tests.mpi_errors", "one_thread", seconds=90.0)
    assert ended.code not in (0, None), ended.output
    assert 'set `mpi4py.rc.thread_level = "serialized"`' in ended.output


def test_the_example_trains() -> None:
    ended = mpirun(2, ROOT / "examples" / "train_mpi.py", "--steps", "6", seconds=100.0)
    assert ended.code == 0, ended.output
    line = next(line for line in ended.output.splitlines() if line.startswith("validation on 2 ranks"))
    assert line.endswith("copies that differ: none")
    assert 3.0 < float(line.split()[4]) < 6.0  # 8 at the start, 4.8 for one who knows how often each byte occurs


def test_a_job_that_hangs_is_killed() -> None:
    start = time.monotonic()
    ended = mpirun(2, "-c", "import time; time.sleep(600)", seconds=2.0)
    assert ended.code is None
    assert time.monotonic() - start < 30


def test_the_python_of_the_ranks_is_this_one() -> None:
    assert mpirun(1, "-c", "import sys; print(sys.executable)").output.strip() == sys.executable
