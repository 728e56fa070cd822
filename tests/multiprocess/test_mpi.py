"""The optimizers under mpirun: conformance, the bits of one process, declared shards, and how errors end."""

import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from dion_core import available_transports
from dion_core.testing.cells import cases
from tests import mpi_cases
from tests.mpi_ranks import ROOT, mpirun
from tests.multiprocess import test_collectives as collectives
from tests.multiprocess import test_meshes as of_meshes
from tests.multiprocess.test_world_size import COLUMNS
from tests.training import assembled, assert_close, assert_equal_bits, train_cells

on_every_world_size = pytest.mark.parametrize("world_size", mpi_cases.WORLD_SIZES)


def run_program(what: str, world_size: int, folder: Path, seconds: float) -> list[dict[str, Any]]:
    """What the ranks found, by rank."""
    ended = mpirun(world_size, "-m", "tests.mpi_program", what, folder, seconds=seconds)
    assert ended.code == 0, ended.output
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world_size)]


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict[str, Any]]]:
    """By number of ranks what they found: one start of mpirun for all tests of that number."""

    @cache
    def found(world_size: int) -> list[dict[str, Any]]:
        return run_program("suite", world_size, tmp_path_factory.mktemp("mpi"), 115.0)

    return found


Suite = Callable[[int], list[dict[str, Any]]]


@on_every_world_size
def test_collectives(suite: Suite, world_size: int) -> None:
    check_collectives(suite(world_size))
    for rank, found in enumerate(suite(world_size)):
        same_parity = [float(other) for other in range(rank % 2, world_size, 2)]
        assert found["parts"] == [[float(other) for other in reversed(range(world_size))], same_parity]
        assert all(found["halves"]), found["halves"]
        assert found["null"].endswith("is not allowed: an intracommunicator of which this rank is one")


@on_every_world_size
@pytest.mark.parametrize("name", available_transports())
def test_transports(suite: Suite, name: str, world_size: int) -> None:
    wanted = list(cases(available_transports()[name], world_size))
    for found in suite(world_size):
        outcomes = found["conformance"][name]
        assert [outcome.case for outcome in outcomes] == wanted
        assert not [outcome for outcome in outcomes if outcome.failures]


@pytest.mark.parametrize(
    ("world_size", "layout"), [(size, layout) for size, layouts in mpi_cases.LAYOUTS.items() for layout in layouts]
)
def test_optimizers(suite: Suite, world_size: int, layout: str) -> None:
    # torch.distributed numbers the ranks the other way round.
    order = suite(world_size) if layout in mpi_cases.WITHOUT_TORCH else suite(world_size)[::-1]
    check_cells(layout, [found["cells"][layout] for found in order])


@pytest.mark.parametrize("name", mpi_cases.MESHES)
def test_meshes(suite: Suite, name: str) -> None:
    """Sub-communicators in place of the process groups of a mesh and of its parts; nothing goes through these."""
    by_rank = [found["meshes"][name] for found in suite(4)]
    for number, case in enumerate(mpi_cases.on_mesh(name)):
        exact = not {"1"} & set(mpi_cases.MESHES[name][0].places)
        of_meshes.check(case, [outcomes[number] for outcomes in by_rank], exact=exact)


@on_every_world_size
def test_runs_go_on_and_state_is_layerwise(suite: Suite, world_size: int) -> None:
    for found in suite(world_size):
        for way in ("own", "whole"):
            assert_equal_bits(found["resumed"][way], found["resumed"]["unbroken"], way)
        assert_equal_bits(*found["layerwise"], "layerwise")
        assert found["resumed"]["shapes"] == [(17, 32), None]


@on_every_world_size
def test_wrong_declarations(suite: Suite, world_size: int) -> None:
    check_refusals(suite(world_size), world_size)


def test_counts_above_2_to_the_31(suite: Suite) -> None:
    length = 2**31 + 5
    sent, received = ([2, length - 2], [0, 2]), ([3, 0], [0, 3])
    (found,) = suite(1)
    assert found["counts"] == [[*sent], [*received], True, length, [[length - 3, 3], [0, length - 3]]]


def test_the_group_of_nccl_with_a_made_up_library(suite: Suite) -> None:
    of_nccl = [{**found["nccl"], "gloo": found["gloo"]} for found in suite(2)]
    check_collectives(of_nccl)
    check_cells("declared0", [found["cells"]["declared0"] for found in of_nccl])
    assert all('group="nccl" moves GPU tensors alone, got one on cpu' in found["refused"] for found in of_nccl)


def check_collectives(by_rank: list[dict[str, Any]]) -> None:
    """As gloo does them, which numbers the ranks the other way round."""
    world_size = len(by_rank)
    wanted = [found["gloo"] for found in by_rank[::-1]]
    for found, reference in zip(by_rank, wanted, strict=True):
        for actual, expected in zip(found["collectives"], reference, strict=True):
            pairs = zip(actual, expected, strict=True) if isinstance(actual, list) else [(actual, expected)]
            for one, other in pairs:
                collectives.assert_same_bits(one, other)
        # 257 is rounded to 256, 258 and 259 to 258 and 260.
        assert found["sum"] == {1: 256.0, 2: 256.0, 3: 258.0, 4: 260.0}[world_size]


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
        assert f"nobody holds [{4 * last + 3}, {4 * last + 4})" in hole
        assert ranges in hole
        assert f"rank {last} holds from {4 * last - 1} on what another rank holds to {4 * last - 1}" in overlap
        assert f"axis 0 of ({4 * world_size}, 4), rank {last} of weight, axis 0 of ({4 * world_size}, 5)" in columns
        assert f"could not be built on every rank: rank {last}: ValueError: weight: DeclaredShard" in sizes
        assert f"could not be built on every rank: rank {last}" in too_long
        assert f"rank 0 of weight, axis 0 of ({4 * world_size}, 4), rank {last} of nothing" in failing
    for found in by_rank:
        assert all(each.startswith(("ValueError", "TransportError", "nothing")) for each in found["refused"])


@pytest.mark.slow
def test_messages_longer_than_two_gigabytes(tmp_path: Path) -> None:
    _, (length, first, last, ones) = run_program("large", 2, tmp_path, 110.0)
    assert (length, first, last, ones) == (2**31 + 5, 1, 1, 2)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("one_raises", "RuntimeError: the data of rank 1 are broken"),
        pytest.param("one_is_interrupted", "KeyboardInterrupt", marks=pytest.mark.slow),
    ],
)
def test_an_error_of_one_rank_ends_all(what: str, said: str) -> None:
    ended = mpirun(2, "-m", "tests.mpi_errors", what, seconds=90.0)
    assert ended.code not in (0, None), ended.output
    assert said in ended.output


def test_a_rank_that_does_not_come_is_named_in_time(tmp_path: Path) -> None:
    ended = mpirun(3, "-m", "tests.mpi_errors", "one_is_absent", tmp_path, seconds=90.0)
    assert ended.code not in (0, None), ended.output
    for rank in (0, 2):
        here = f"on rank {rank} failed: ranks [1] did not come within 0.5 s"
        assert (tmp_path / f"{rank}.txt").read_text().splitlines() == [
            f"making a communicator of ranks (2, 1, 0) {here}",
            f"making a communicator of NCCL of ranks (0, 1, 2) {here}",
            f"making the group of the 3 ranks of a communicator failed on its rank {rank}: another one did not come "
            "within 0.5 s",
            f"all_reduce for presence flags on rank {rank} among ranks (0, 1, 2) failed: it did not end within 0.5 s",
        ]


def test_a_rank_that_comes_too_late_is_not_left_alone(tmp_path: Path) -> None:
    ended = mpirun(2, "-m", "tests.mpi_errors", "one_is_late", tmp_path, seconds=60.0)
    assert ended.code not in (0, None), ended.output
    for rank in (0, 1):
        said = (tmp_path / f"{rank}.txt").read_text()
        assert said == (
            f"making a communicator of ranks (1, 0) on rank {rank} failed: ranks [{1 - rank}] did not come within 0.5 s"
        )


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
    ended = mpirun(2, "-c", "import time; time.sleep(600)", seconds=1.0)
    assert ended.code is None
    assert time.monotonic() - start < 30


def test_the_python_of_the_ranks_is_this_one() -> None:
    assert mpirun(1, "-c", "import sys; print(sys.executable)").output.strip() == sys.executable
