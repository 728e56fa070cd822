"""Starts programs under mpirun for tests: bounded in time, and with nothing left behind."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
_BESIDE = Path(sys.executable).with_name("mpirun")
MPIRUN = _BESIDE if _BESIDE.exists() else Path(shutil.which("mpirun") or _BESIDE)
"""That of the MPI library which is installed beside this Python, else the machine's."""


class Ended(NamedTuple):
    """How a job ended: its exit code, None where it was killed for its time, and what it printed."""

    code: int | None
    output: str


def mpirun(world_size: int, *arguments: object, seconds: float = 100.0, **environment: str) -> Ended:
    """Runs Python with the arguments on so many ranks. All processes of the job are gone when it returns.

    Args:
        world_size: ranks, all on this machine.
        arguments: of Python.
        seconds: after which all is killed.
        environment: variables beside those of this process.
    """
    command = [str(MPIRUN), "-n", str(world_size), sys.executable, *map(str, arguments)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | environment
    process = subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=seconds)
        code: int | None = process.returncode
    except subprocess.TimeoutExpired:
        code = None
    finally:
        left = _kill(process.pid)
    if code is None:
        output, _ = process.communicate()
    elif left:
        raise AssertionError(f"processes of the job were left behind: {output}")
    return Ended(code, output)


def leave_out_dynamo() -> None:
    """Optimizers of this process do not import torch._dynamo, which takes as long as half of torch, in every rank."""
    from torch.optim import Optimizer

    for name in ("add_param_group", "load_state_dict", "state_dict"):
        method = getattr(Optimizer, name)
        setattr(Optimizer, name, getattr(method, "__wrapped__", method))


def _kill(group: int) -> bool:
    """Ends all processes of a group; whether there were any."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
