"""Groups of MPI on GPUs: the suite of transports, and the bits of torch's own NCCL group."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from dion_core import available_transports
from tests.mpi_ranks import mpirun

NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS < 1, reason="needs CUDA"),
    pytest.mark.skipif(find_spec("mpi4py") is None, reason="needs mpi4py"),
]


@pytest.mark.skipif(find_spec("cupy") is None, reason="needs CuPy")
@pytest.mark.parametrize("world_size", [size for size in (1, 2) if size <= max(NUM_GPUS, 1)])
def test_groups_of_mpi_do_what_nccl_of_torch_does(world_size: int, tmp_path: Path) -> None:
    ended = mpirun(world_size, "-m", "tests.gpu.mpi_program", tmp_path, seconds=280.0)
    assert ended.code == 0, ended.output
    for rank in range(world_size):
        found = torch.load(tmp_path / f"{rank}.pt")
        for name in ("nccl", "mpi"):
            assert found[name]["failures"] == []
            for transport in available_transports():
                for way in ("mesh", "declared"):
                    weights = found[name]["weights"][f"{transport}, {way}"]
                    for one, other in zip(weights, found["torch"][transport], strict=True):
                        assert torch.equal(one, other), (name, transport, way)


def test_a_library_that_knows_gpus_is_handed_their_memory(tmp_path: Path) -> None:
    """The library is made up; it copies on the GPU what it takes by DLPack."""
    ended = mpirun(1, "-m", "tests.gpu.mpi_program", tmp_path, "aware", seconds=280.0)
    assert ended.code == 0, ended.output


def test_a_library_that_does_know_gpus(tmp_path: Path) -> None:
    said = mpirun(1, "-m", "tests.gpu.mpi_program", tmp_path, "knows_gpus", seconds=100.0)
    if "knows True" not in said.output:
        pytest.skip(f"the MPI library does not know GPUs: {said.output.strip()}")
    ended = mpirun(1, "-m", "tests.gpu.mpi_program", tmp_path, "by_library", seconds=280.0)
    assert ended.code == 0, ended.output
