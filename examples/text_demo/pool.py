"""One pool of ranks: started once, reporting to the parent, gone with the parent, however that ends."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from text_demo.rank import Rank, join_group

GRACE_SECONDS = 5.0  # how long a rank that was asked to end may take


class RankFailedError(RuntimeError):
    """A rank ended before its work was done; the message says which one, and its own traceback."""


@dataclass(frozen=True)
class _Failure:
    rank: int
    text: str


class _Finished:
    """What a rank sends last."""


def run_ranks(work: Callable[..., None], world_size: int, *arguments: Any) -> Generator[object, None, None]:
    """Calls `work(rank, *arguments)` on every rank of a new pool and yields what rank 0 tells, as it comes.

    Closing the iterator early, also by an exception such as KeyboardInterrupt, ends all ranks.

    Raises:
        RankFailedError: If a rank raised, or died without a word. The others are ended.
    """
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = (Path(folder) / "rendezvous").as_uri()
        ranks: list[tuple[BaseProcess, Connection]] = []
        try:
            _start(ranks, work, world_size, rendezvous, arguments)
            yield from _messages(ranks)
            for process, _ in ranks:
                process.join(GRACE_SECONDS)
        finally:
            with _interrupt_held_back():  # a second Ctrl-C must not leave ranks behind
                _end([process for process, _ in ranks])


def _start(
    ranks: list[tuple[BaseProcess, Connection]],
    work: Callable[..., None],
    world_size: int,
    rendezvous: str,
    arguments: tuple[Any, ...],
) -> None:
    """Adds the processes to `ranks` one by one, so that the caller knows them even if this is cut short."""
    context = get_context("spawn")
    resource_tracker.ensure_running()  # else the first start below does it, and lets interrupts through
    with _interrupt_held_back():
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(work, rank, world_size, rendezvous, sender, arguments), daemon=True
            )
            process.start()
            sender.close()  # only the rank holds it now, so that its end shows here as end of file
            ranks.append((process, receiver))


@contextmanager
def _interrupt_held_back() -> Iterator[None]:
    """Ctrl-C inside waits until the end; processes started inside never see it.

    A terminal sends it to the ranks as well as to the parent. The parent alone answers, by ending the ranks,
    instead of every rank printing a stack trace. Blocking is inherited: it holds while a rank still imports.
    """
    if threading.current_thread() is not threading.main_thread() or sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _messages(ranks: list[tuple[BaseProcess, Connection]]) -> Iterator[object]:
    """What the ranks send, until every one of them has finished."""
    waiting = {receiver: (rank, process) for rank, (process, receiver) in enumerate(ranks)}
    while waiting:
        for receiver in wait(list(waiting)):
            assert isinstance(receiver, Connection)
            rank, process = waiting[receiver]
            try:
                message = receiver.recv()
            except EOFError:  # the other end is closed: killed, out of memory, or a crash below Python
                process.join(GRACE_SECONDS)
                raise RankFailedError(f"rank {rank} died with exit code {process.exitcode}") from None
            if isinstance(message, _Failure):
                _raise_if_one_died(ranks)
                raise RankFailedError(f"rank {message.rank} failed:\n{message.text}")
            if isinstance(message, _Finished):
                del waiting[receiver]
            else:
                yield message


def _raise_if_one_died(ranks: list[tuple[BaseProcess, Connection]]) -> None:
    """A rank that dies makes the others fail, and their message may come first: name the one that died."""
    for rank, (process, _) in enumerate(ranks):
        process.join(0.1)  # a failed rank stays until it is ended, so one that is gone died before
        if process.exitcode:
            raise RankFailedError(f"rank {rank} died with exit code {process.exitcode}")


def _end(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(GRACE_SECONDS)
        if process.is_alive():  # inside a library call that does not return
            process.kill()
            process.join()


def _rank_main(
    work: Callable[..., None],
    rank: int,
    world_size: int,
    rendezvous: str,
    sender: Connection,
    arguments: tuple[Any, ...],
) -> None:
    """One rank's life: joins the process group, works, and says how it ended."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        device = join_group(rank, world_size, rendezvous)
        mesh = init_device_mesh(device.type, (world_size,))
        work(Rank(rank, world_size, device, mesh, sender), *arguments)
        distributed.destroy_process_group()
        sender.send(_Finished())
    except Exception:
        # Then wait to be ended: leaving would close connections, and what other ranks say about that would
        # hide the cause.
        sender.send(_Failure(rank, traceback.format_exc()))
        threading.Event().wait()


def _end_with_parent() -> None:
    """Ends this rank when its parent is gone without having ended it (killed, for instance)."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
