"""Runs cells where their ranks are: in a kept pool on this machine, in one process, or through a launcher.

A setting of the environment, `DION_BENCH_LAUNCHER`, holds commands that start processes, one a line or divided by
semicolons: `torchrun --nproc-per-node 8`, `mpirun -np 16`, or `srun --ntasks 16`. Each is started once, followed by
a Python module that `benchmarks.launched` describes; the number of processes is the world size of its cells.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore

from benchmarks.stepping import LARGE, Cell, Figures, Running
from dion_core.testing.loopback import loopback
from dion_core.testing.ranks import RankError, RankPool

LAUNCHER = "DION_BENCH_LAUNCHER"
ROOT = Path(__file__).parent.parent
Measured = dict[str, Figures]
"""By `Cell.key` the figures, or {"error": text}; cells that cannot be measured here are missing."""
Measurement = Callable[[Cell, str], Figures]

POOL_SECONDS = 120.0
LAUNCH_SECONDS = 3600.0


def num_gpus() -> int:
    """How many GPUs this machine has."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def in_pool(measurement: Measurement, cells: Iterable[Cell], device: str) -> Measured:
    """The figures of the cells, on kept processes of this machine: of gloo on a CPU, of NCCL with a GPU each."""
    measured: Measured = {}
    for world_size, group in groupby(sorted(cells, key=lambda cell: cell.world_size), lambda cell: cell.world_size):
        if device == "cuda" and world_size > num_gpus():
            continue
        pool = RankPool(world_size, device_type=device, timeout=POOL_SECONDS)
        for cell in group:
            if pool.closed:  # a rank of the last cell hung or died
                pool = RankPool(world_size, device_type=device, timeout=POOL_SECONDS)
            try:
                measured[cell.key] = pool.run(measurement, cell, device)[0]
            except RankError as error:
                measured[cell.key] = {"error": str(error)}
        pool.close()
    return measured


def in_loopback(measurement: Callable[[Running], Figures], cells: Iterable[Cell], device: str) -> Measured:
    """The figures of the cells, of one rank of each whose messages do not leave this process."""
    measured: Measured = {}
    if device == "cuda" and not num_gpus():
        return measured
    for cell in cells:
        try:
            with loopback(cell.world_size, device) as (mesh, _):
                measured[cell.key] = measurement(Running(cell, mesh))
        except Exception as error:  # one cell that fails is no reason to lose the others
            measured[cell.key] = {"error": f"{type(error).__name__}: {error}"}
    return measured


def launchers() -> list[str]:
    """The commands of the setting; empty without it."""
    return [line.strip() for line in os.environ.get(LAUNCHER, "").replace(";", "\n").splitlines() if line.strip()]


def everywhere(measurement: Measurement, cells: Sequence[Cell]) -> Measured:
    """The figures of the cells that can be measured with a rank on each GPU, or where the launchers start ranks."""
    if launchers():
        return launched(measurement, cells)
    return in_pool(measurement, [cell for cell in cells if cell.inventory in LARGE], "cuda")


def merged(one: Measured, other: Measured) -> Measured:
    """The figures of both; a cell that failed in one of them has failed."""
    together: Measured = {}
    for name in one.keys() & other.keys():
        failed = next((each for each in (one[name], other[name]) if "error" in each), None)
        together[name] = failed or one[name] | other[name]
    return together


def launched(measurement: Measurement, cells: Sequence[Cell]) -> Measured:
    """The figures of the cells whose world sizes the launchers start, as rank 0 reports them.

    Args:
        measurement: one that `benchmarks.launched` knows.
        cells: those of other world sizes are passed over.

    Raises:
        RuntimeError: a launcher ended before it measured anything.
    """
    measured: Measured = {}
    for command in launchers():
        measured |= _launched(command, measurement, cells)
    return measured


def _launched(command: str, measurement: Measurement, cells: Sequence[Cell]) -> Measured:
    """The figures of one launcher, started anew for the cells after one that fails."""
    measured: Measured = {}
    while left := [cell for cell in cells if cell.key not in measured]:
        job = {"measurement": measurement.__name__, "cells": [cell.as_dict() for cell in left]}
        try:
            found, ended = _launch(command, job)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            if not measured:
                raise
            print(f"{error}; {len(left)} cells are left out", file=sys.stderr)
            break
        measured |= found
        if ended:
            break
    return measured


def _launch(command: str, job: dict[str, Any]) -> tuple[Measured, bool]:
    """What one start of a launcher has measured, through a store of this process, and whether it got through."""
    host = _host()
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=POOL_SECONDS))
    store.set("job", json.dumps(job))
    words = [*_words(command), "-m", "benchmarks.launched", f"{host}:{store.port}"]
    environment = {**os.environ, "SLURM_KILL_BAD_EXIT": "1"}  # srun would leave the other ranks waiting
    ended = subprocess.run(words, cwd=ROOT, env=environment, timeout=LAUNCH_SECONDS, stdout=sys.stderr, check=False)
    found: Measured = json.loads(store.get("report")) if store.check(["report"]) else {}
    if not ended.returncode and store.check(["report"]):
        return found, True
    if store.check(["error"]):  # the rank that failed may be in a cell that rank 0 has not begun
        failed, error = json.loads(store.get("error"))
        return {**found, failed: {"error": error}}, False
    if not store.check(["measuring"]):
        raise RuntimeError(f"{shlex.join(words)} ended with {ended.returncode} and no report")
    failed = store.get("measuring").decode()
    if failed in found:  # it ended between two cells
        return found, False
    return {**found, failed: {"error": f"its ranks ended with {ended.returncode}"}}, False


def _words(command: str) -> list[str]:
    """The command with this Python at its end, or as torchrun in it: one found elsewhere may have other packages."""
    words: list[str] = []
    for word in shlex.split(command):
        words += [sys.executable, "-m", "torch.distributed.run"] if Path(word).name == "torchrun" else [word]
    return words if sys.executable in words else [*words, sys.executable]


def _host() -> str:
    """A name of this machine by which others reach it."""
    try:
        socket.getaddrinfo(name := socket.gethostname(), None)
    except OSError:
        return "localhost"
    return name
