"""A kept pool of gloo (or NCCL) processes for tests: torch is imported once a process, and a hang fails.

``pool(4).run(function, *args)`` calls a module-level function on four ranks, each with the same arguments and
one thread, and returns the results by rank. The function finds its rank from ``torch.distributed``, where the
default group is ready. Groups and meshes must not be kept between calls: after a call in which a rank raised
(it may have left a collective half-way), or that replaced the default group, that group is made anew.

Arguments and results travel as bytes of ``torch.save``: tensors of every dtype arrive as copies with the same
bits, without shared memory. Warnings are errors on every rank. POSIX only.
"""

import atexit
import contextlib
import datetime
import faulthandler
import io
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

# Importing torch takes seconds, more on a busy machine; no other time-out includes it.
_STARTUP_SECONDS = 180.0
# A stuck collective gives up before the pool does: an exception that shows the place, and the pool lives on.
_SHARE = 0.8


class RankError(RuntimeError):
    """Some ranks raised, hung or died; the message names them and holds their tracebacks.

    Attributes:
        errors: by rank, what it raised.
        lost: by rank, how it hung or died; the pool is closed if there is any, and if no group could be made.
    """

    def __init__(self, call: object, errors: dict[int, BaseException], lost: dict[int, str]) -> None:
        self.errors = errors
        self.lost = lost
        texts = {rank: error.__notes__[-1] for rank, error in errors.items()} | lost
        name = getattr(call, "__qualname__", call)
        super().__init__("\n".join([f"{name}:", *(f"rank {rank} {texts[rank]}" for rank in sorted(texts))]))


class _Outcome(NamedTuple):
    value: Any
    error: BaseException | None
    in_step: bool  # the default group can serve the next call
    joined: bool = True  # there was a default group


class RankPool:
    """World-size many processes that form one group and answer calls until the pool is closed.

    Attributes:
        timeout: seconds that a call may take if it does not say otherwise; collectives give up at 80 % of it.
        closed: no further call is possible: closed by the user, or killed after a rank hung, died or found no group.

    Raises:
        ValueError: ``world_size`` is below 1, or above the number of GPUs where ``device_type`` is "cuda".
        RankError: a process did not come up.
    """

    def __init__(self, world_size: int, *, timeout: float = 60.0, device_type: str = "cpu") -> None:
        """Starts the processes.

        Args:
            world_size: how many.
            timeout: see the attribute.
            device_type: "cpu" for a gloo group, "cuda" for one of NCCL in which every rank has a GPU of its own.
        """
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        if device_type == "cuda" and world_size > torch.cuda.device_count():
            raise ValueError(f"world_size must be at most {torch.cuda.device_count()}, the GPUs here, got {world_size}")
        self.world_size = world_size
        self.timeout = timeout
        self.closed = False
        self._generation = -1  # of the default process group; -1 is none
        self._directory = tempfile.TemporaryDirectory(prefix="rank-pool-")
        self._processes: list[SpawnProcess] = []
        self._connections: list[Connection] = []
        context = multiprocessing.get_context("spawn")
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                self._connections.append(ours)
                with theirs:  # only the child keeps it, so that the pipe ends when the child does
                    where = (self._directory.name, rank, world_size, timeout * _SHARE, device_type)
                    process = context.Process(target=_serve, args=(theirs, *where), daemon=True)
                    process.start()
                self._processes.append(process)
            self.run(os.getpid, timeout=_STARTUP_SECONDS)  # all are up; only then does the group's time run
            self.run(os.getpid, timeout=_STARTUP_SECONDS)
        except BaseException:
            self._kill()
            raise

    def run(self, function: Callable[..., T], *args: object, timeout: float | None = None) -> list[T]:
        """What ``function(*args)`` returns on every rank, by rank.

        Args:
            function: found by its module and name on the ranks, so no lambda and no local function.
            args: the same for every rank; anything that pickles, tensors included.
            timeout: seconds until a rank that has not answered counts as hung; None takes the pool's.

        Raises:
            RankError: a rank raised (the pool stays), hung, died or found no group (all its processes are killed).
            RuntimeError: the pool is closed.
        """
        outcomes = self._call(function, args, timeout)
        if errors := _errors(dict(enumerate(outcomes))):
            raise RankError(function, errors, {})
        return [each.value for each in outcomes]

    def run_expecting_error(
        self, function: Callable[..., object], *args: object, timeout: float | None = None
    ) -> list[BaseException | None]:
        """What ``function(*args)`` raises on every rank, by rank, or None; otherwise like :meth:`run`.

        In place of an exception that does not survive pickling stands a RuntimeError that names its type.
        """
        return [each.error for each in self._call(function, args, timeout)]

    def close(self) -> None:
        """The processes have ended and are reaped; a second call does nothing."""
        if self.closed:
            return
        self.closed = True
        for connection in self._connections:
            connection.close()  # an idle rank reads the end of the pipe and leaves
        deadline = time.monotonic() + 5.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        self._directory.cleanup()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        self.close()

    def _call(self, function: Callable[..., object], args: object, timeout: float | None) -> list[_Outcome]:
        if self.closed:
            raise RuntimeError("the pool is closed")
        call = _to_bytes((function, args))
        answers: dict[int, _Outcome] = {}
        try:
            for connection in self._connections:
                with contextlib.suppress(BrokenPipeError):  # died while idle; reading from it says so
                    connection.send((self._generation, sys.path, call))
            if lost := self._collect(answers, self.timeout if timeout is None else timeout):
                raise RankError(function, _errors(answers), lost)
        except BaseException:  # an interrupt too: late answers would be taken for those of the next call
            self._kill()
            raise
        if not all(each.joined for each in answers.values()):
            self._kill()  # torch numbers groups, those too that were not made, and ranks would go on to count apart
        elif not all(each.in_step for each in answers.values()):
            self._generation += 1
        return [answers[rank] for rank in range(self.world_size)]

    def _collect(self, answers: dict[int, _Outcome], timeout: float) -> dict[int, str]:
        """Fills in the answers by rank; returns the ranks that will not answer, and why."""
        deadline = time.monotonic() + timeout
        lost: dict[int, str] = {}
        while not lost and (waiting := [rank for rank in range(self.world_size) if rank not in answers]):
            pipes = [self._connections[rank] for rank in waiting]
            ready = wait(pipes, max(0.0, deadline - time.monotonic()))
            if not ready:
                return self._stacks(waiting, f"did not answer in {timeout} s:")
            for rank in waiting:
                if self._connections[rank] in ready:
                    try:
                        answers[rank] = _from_bytes(self._connections[rank].recv_bytes())
                    except (EOFError, OSError):
                        self._processes[rank].join(5.0)
                        lost[rank] = f"died with exit code {self._processes[rank].exitcode}"
        return lost

    def _stacks(self, ranks: list[int], reason: str) -> dict[int, str]:
        """The reason and, by rank, where each thread stands."""
        for pid in [self._processes[rank].pid for rank in ranks]:
            assert pid is not None
            os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)  # the handler writes at once, in whatever code the process is
        files = [Path(self._directory.name, f"stacks-{rank}") for rank in ranks]
        stacks = [file.read_text() if file.exists() else "still starting" for file in files]
        return {rank: f"{reason}\n{text}" for rank, text in zip(ranks, stacks, strict=True)}


def _serve(
    connection: Connection, directory: str, rank: int, world_size: int, timeout: float, device_type: str
) -> None:
    """The life of one rank: answers calls until the parent closes the pipe or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the parent, which then kills the ranks
    threading.Thread(target=_end_with_parent, args=(directory,), daemon=True).start()
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    group: dict[str, Any] = {"backend": "gloo", "rank": rank, "world_size": world_size}
    group["timeout"] = datetime.timedelta(seconds=timeout)
    if device_type == "cuda":
        torch.cuda.set_device(rank)
        group |= {"backend": "nccl", "device_id": torch.device("cuda", rank)}
    joined = -1
    with contextlib.suppress(EOFError, OSError), Path(directory, f"stacks-{rank}").open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        while True:
            generation, search_path, call = connection.recv()
            sys.path.extend(entry for entry in search_path if entry not in sys.path)  # may have grown
            if generation != joined:
                group["init_method"] = f"file://{directory}/group-{generation}"
            connection.send_bytes(_answer(call, group if generation != joined else None))
            sys.stdout.flush()
            joined = generation
    _leave(directory, 0)  # the parent has closed the pool or has died: an idle rank may notice it here first


def _end_with_parent(directory: str) -> None:
    """Ends this process, whatever it is doing, when the parent has died."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    _leave(directory, 1)


def _leave(directory: str, code: int) -> None:
    """Ends this process without destroying groups, whose other ranks may be gone, and removes the pool's directory."""
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(code)


def _answer(call: bytes, new_group: dict[str, Any] | None) -> bytes:
    """The outcome of one call; where a new group is given, it becomes the default group first."""
    if new_group is not None:
        try:
            if dist.is_initialized():
                dist.destroy_process_group()
            dist.init_process_group(**new_group)
            dist.barrier()  # before one leaves the group again, all are in it
        except BaseException as error:
            return _to_bytes(_Outcome(None, _portable(error), in_step=False, joined=False))
    try:
        group = dist.group.WORLD
        function, args = _from_bytes(call)
        value = function(*args)
        return _to_bytes(_Outcome(value, None, dist.is_initialized() and dist.group.WORLD is group))
    except BaseException as error:  # SystemExit and a test framework's own too
        return _to_bytes(_Outcome(None, _portable(error), in_step=False))


def _portable(error: BaseException) -> BaseException:
    """The error, or what stands for one that does not survive pickling; the last note is its traceback."""
    text = "".join(traceback.format_exception(error))
    try:
        survives = type(_from_bytes(_to_bytes(error))) is type(error)
    except Exception:
        survives = False
    portable = error if survives else RuntimeError(f"{type(error).__qualname__}: {error}")
    portable.add_note(f"raised:\n{text}")
    return portable


def _errors(answers: dict[int, _Outcome]) -> dict[int, BaseException]:
    return {rank: each.error for rank, each in answers.items() if each.error is not None}


def _to_bytes(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _from_bytes(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


_pools: dict[tuple[int, str], RankPool] = {}


def pool(world_size: int, device_type: str = "cpu") -> RankPool:
    """The kept pool of this world size and device, made at the first call and again after it was closed."""
    key = (world_size, device_type)
    if key not in _pools or _pools[key].closed:
        _pools[key] = RankPool(world_size, device_type=device_type)
    return _pools[key]


@atexit.register
def close_pools() -> None:
    """All kept pools have ended; the next call of `pool` makes new ones."""
    for each in _pools.values():
        each.close()
