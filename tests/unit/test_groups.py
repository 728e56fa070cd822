"""Groups of ranks by name: how they are found, what is said where something is missing, and what launchers tell."""

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from dion_core import NorDion2, groups
from dion_core.collectives import SoloGroup
from dion_core.groups import available_groups, foreign_group
from dion_core.transport import TransportError


def forget() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "dion_comm_mpi"]:
        del sys.modules[name]


@pytest.fixture
def without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    forget()
    yield
    forget()


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The package on a made-up MPI, so that this process does not become a rank."""
    monkeypatch.setitem(sys.modules, "mpi4py", MagicMock())
    forget()
    import dion_comm_mpi

    yield dion_comm_mpi
    forget()


def optimizer(group: Any) -> NorDion2:
    parameter = nn.Parameter(torch.ones(4, 4))
    parameter.grad = torch.ones(4, 4)
    return NorDion2([parameter], group=group)


def test_installed_groups() -> None:
    assert available_groups() == ("mpi", "nccl")


def test_without_mpi4py_the_error_names_the_command_and_the_core_works(without_mpi4py: None) -> None:
    with pytest.raises(ImportError, match=r"pip install mpi4py"):
        import dion_comm_mpi  # noqa: F401
    with pytest.raises(TransportError, match=r"group 'mpi' .* cannot be imported: .*pip install mpi4py"):
        optimizer("mpi")
    assert set(groups.loading_errors()) == {"mpi", "nccl"}
    assert all("pip install mpi4py" in error for error in groups.loading_errors().values())
    optimizer(None).step()


def test_without_cupy_the_error_names_the_command(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(ImportError, match=r"pip install cupy-cuda12x nvidia-nccl-cu12"):
        package.nccl_group()


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "entry_points", lambda group: [])
    with pytest.raises(TransportError, match=r"group='mpi' is not installed .*`pip install dion-comm-mpi` brings it"):
        optimizer("mpi")


def test_groups_are_taken_as_they_are() -> None:
    group = SoloGroup()
    assert foreign_group(group) is group
    assert foreign_group(object()) is None
    optimizer(group).step()


def test_a_communicator_becomes_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    communicator = SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 1)
    made = []

    def make(given: Any) -> SoloGroup:
        made.append(given)
        return SoloGroup()

    monkeypatch.setattr(groups, "entry_points", lambda group: [SimpleNamespace(name="mpi", load=lambda: make)])
    optimizer(communicator).step()
    assert made == [communicator]


@pytest.mark.parametrize(
    ("environment", "launcher", "local_rank"),
    [
        ({}, None, None),
        (
            {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
            "mpirun of Open MPI",
            1,
        ),
        ({"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALRANKID": "2", "HYDI_CONTROL_FD": "7"}, "mpirun of MPICH", 2),
        ({"PMI_SIZE": "4", "PMI_RANK": "3"}, "mpirun of MPICH", None),
        ({"SLURM_PROCID": "5", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "1"}, "srun", 1),
        # srun with an MPI that it serves by PMI
        (
            {"SLURM_PROCID": "5", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "1", "PMI_RANK": "5", "PMI_SIZE": "8"},
            "srun",
            1,
        ),
        # mpirun inside of an allocation of Slurm
        (
            {
                "SLURM_PROCID": "0",
                "SLURM_STEP_ID": "0",
                "SLURM_LOCALID": "0",
                "HYDI_CONTROL_FD": "7",
                "MPI_LOCALRANKID": "3",
            },
            "mpirun of MPICH",
            3,
        ),
        (
            {
                "SLURM_PROCID": "0",
                "SLURM_STEP_ID": "0",
                "SLURM_LOCALID": "0",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_RANK": "3",
                "OMPI_COMM_WORLD_LOCAL_RANK": "2",
            },
            "mpirun of Open MPI",
            2,
        ),
        # a shell in an allocation, where nothing was launched
        ({"SLURM_JOB_ID": "17"}, None, None),
    ],
)
def test_what_launchers_tell(
    environment: dict[str, str], launcher: str | None, local_rank: int | None, package: Any
) -> None:
    assert package.launcher(environment) == launcher
    assert package.local_rank(environment) == local_rank


def test_the_gpus_of_a_machine_are_dealt_out(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert package.local_device() == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for name in ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.setenv(name, "8")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "6")
    assert package.local_device() == torch.device("cuda", 2)
    communicator = MagicMock()
    communicator.Split_type.return_value.Get_rank.return_value = 3
    assert package.local_device(communicator) == torch.device("cuda", 3)


def test_an_error_aborts_all_ranks_after_it_is_shown(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[BaseException] = []
    world = sys.modules["mpi4py"].MPI.COMM_WORLD  # type: ignore[attr-defined]
    world.Get_size.return_value = 2
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(error))
    package.abort_together()
    hook = sys.excepthook
    package.abort_together()
    assert sys.excepthook is hook
    error = RuntimeError("broken")
    sys.excepthook(RuntimeError, error, None)
    assert shown == [error]
    world.Abort.assert_called_once_with(1)
