"""The ranks of all nodes as processes, started once, asked one thing at a time, and ended whatever happens."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from benchmarks.namespaces import Network, interrupts_held_back

ROOT = Path(__file__).parents[1]
PORT = 29500
"""Where the ranks meet: inside the namespace of the first node nobody else uses it."""
GRACE_SECONDS = 3.0
LINES_SHOWN = 30


class NodesError(RuntimeError):
    """A rank failed, or did not answer in time; the message has the last lines of what it printed."""


class Nodes:
    """Ranks on the nodes of a network, or without one on the machine's loopback, inside a `with` block.

    Attributes:
        seconds: within which every answer must come; past it all processes are killed.
    """

    def __init__(self, network: Network | None, num_nodes: int, ranks_per_node: int, *, seconds: float) -> None:
        self.network, self.seconds = network, seconds
        self._num_nodes, self._ranks_per_node = num_nodes, ranks_per_node
        self._processes: list[subprocess.Popen[bytes]] = []
        self._printed: list[IO[bytes]] = []

    @property
    def world_size(self) -> int:
        return self._num_nodes * self._ranks_per_node

    def __enter__(self) -> Self:
        port = PORT if self.network else _free_port()
        try:
            for rank in range(self.world_size):
                with interrupts_held_back():
                    self._start(rank, port)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _start(self, rank: int, port: int) -> None:
        node, place = divmod(rank, self._ranks_per_node)
        network = self.network
        environment = {
            "RANK": rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": place,
            "LOCAL_WORLD_SIZE": self._ranks_per_node,
            "MASTER_ADDR": network.addresses[0] if network else "127.0.0.1",
            "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": "eth0" if network else "lo",
            "OMP_NUM_THREADS": 1,
            "COLLECTIVE_SECONDS": self.seconds,
        }
        self._printed.append(tempfile.TemporaryFile())  # noqa: SIM115 closed in `end`
        self._processes.append(
            subprocess.Popen(
                [*(network.enter(node) if network else ()), sys.executable, "-m", "benchmarks.nodes_rank"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._printed[-1],
                env=os.environ | {name: str(value) for name, value in environment.items()},
                cwd=ROOT,
                start_new_session=True,  # a group of its own, which can be killed whole
            )
        )

    def ask(self, order: object) -> list[Any]:
        """What every rank answers, by rank.

        Raises:
            NodesError: one failed or none came in time. All have been ended.
        """
        line = (json.dumps(order) + "\n").encode()
        try:
            for rank in range(self.world_size):
                self._tell(rank, line)
            return [json.loads(answer) for answer in self._answers()]
        except NodesError:
            self.end()
            raise

    def _tell(self, rank: int, line: bytes) -> None:
        stream = self._processes[rank].stdin
        assert stream is not None
        try:
            stream.write(line)
            stream.flush()
        except BrokenPipeError:
            raise self._error("ended before it was asked", rank) from None

    def _answers(self) -> list[bytes]:
        """A line of each rank."""
        found, deadline = [b""] * self.world_size, time.monotonic() + self.seconds
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout is not None
                selector.register(process.stdout.fileno(), selectors.EVENT_READ, rank)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise self._error(f"no answer within {self.seconds:g} s")
                for key, _ in ready:
                    part = os.read(key.fd, 2**16)
                    found[key.data] += part
                    if not part:
                        raise self._error("ended", key.data)
                    if part.endswith(b"\n"):
                        selector.unregister(key.fd)
        return found

    def _error(self, what: str, rank: int | None = None) -> NodesError:
        """With what the rank printed, or of all the one that printed most: others say only that it is gone."""
        time.sleep(0.5)  # a rank's last words may be on their way
        texts = []
        for printed in self._printed:
            printed.seek(0)
            texts.append(printed.read().decode(errors="replace").strip().splitlines()[-LINES_SHOWN:])
        shown = rank if rank is not None else max(range(len(texts)), key=lambda number: len(texts[number]))
        return NodesError("\n".join([f"rank {shown}: {what}", *texts[shown]]))

    def end(self) -> None:
        """All processes are gone and reaped, with whatever they started."""
        with interrupts_held_back():
            for process in self._processes:
                assert process.stdin is not None
                with suppress(BrokenPipeError):
                    process.stdin.close()  # an idle rank leaves by itself
            deadline = time.monotonic() + GRACE_SECONDS
            for process in self._processes:
                try:
                    process.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                assert process.stdout is not None
                process.stdout.close()
            for printed in self._printed:
                printed.close()
            self._processes, self._printed = [], []


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
