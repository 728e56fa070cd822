"""Nodes on one machine: network namespaces joined by a switch, over links whose speed is set.

Every node is a namespace with a loopback and one link, eth0, to a switch: a bridge in a namespace of its own. Nothing
leads from there to the machine's own network. A link is shaped at both of its ends, each way by a token bucket. Needs
root, and `ip` and `tc` (package iproute2).
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import NoReturn, Self

PREFIX = "dion-nodes"
MTU = 1500
PAYLOAD_SHARE = (MTU - 52) / (MTU + 14)
"""Of a link's rate what is left to a sender: of a frame's 14 + 1500 bytes IP takes 20 and TCP with timestamps 32."""
BURST = 16 * 1024
"""Bytes that may pass at once after a pause: small beside messages, and more than a frame."""
QUEUE = 64 * 2**20
"""Bytes that may wait before a link: more than all connections have under way, so that nothing is dropped."""
RESEND_AFTER = "5s"
"""How late an acknowledgement must be for its data to be sent again."""
SUBNET = "10.77.0.0/24"
"""Of the nodes; outside the namespaces nobody sees it."""
COMMAND_SECONDS = 20.0
_numbers = itertools.count()


class NetworkError(RuntimeError):
    """A network that cannot be made here; the message says which command failed, and how."""


@dataclass(frozen=True)
class Link:
    """The speed of every node's link, each way.

    Attributes:
        bits_per_second: None leaves it as fast as the machine moves bytes.
    """

    bits_per_second: float | None = None

    def payload(self, ranks_per_node: int) -> float:
        """Bytes/s left to each of the ranks that share a link; infinite where it is not shaped."""
        if self.bits_per_second is None:
            return float("inf")
        return self.bits_per_second / 8 * PAYLOAD_SHARE / ranks_per_node


@contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Ctrl-C and SIGTERM inside wait until the end: what is being removed is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_on_sigterm() -> None:
    """From now on SIGTERM leaves the `with` blocks of the main thread, as Ctrl-C does; the exit code is 143."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


class Network:
    """Namespaces, one a node, which exist inside a `with` block and are gone after it, however it ends.

    Their names hold the number of this process and are used once. What a process left that was killed without a
    chance to remove it is removed when the next network is made.

    Raises:
        NetworkError: on entering: root, a program or the kernel's support is missing. Nothing is left behind.
    """

    def __init__(self, num_nodes: int) -> None:
        prefix = f"{PREFIX}-{os.getpid()}-{next(_numbers)}"
        self.switch = f"{prefix}-switch"
        self.nodes = [f"{prefix}-{node}" for node in range(num_nodes)]

    @property
    def addresses(self) -> list[str]:
        """Of the nodes."""
        return [f"10.77.0.{node + 1}" for node in range(len(self.nodes))]

    def __enter__(self) -> Self:
        check_programs()
        try:
            with interrupts_held_back():
                remove_leftovers()
                self._make()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _make(self) -> None:
        for name in (self.switch, *self.nodes):
            _call("ip", "netns", "add", name)
            _call("ip", "-n", name, "link", "set", "lo", "up")
        _call("ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge")
        _call("ip", "-n", self.switch, "link", "set", "bridge", "up")
        for node, (name, address) in enumerate(zip(self.nodes, self.addresses, strict=True)):
            port = f"port{node}"
            pair = ("type", "veth", "peer", "name", "eth0", "netns", name)
            _call("ip", "-n", self.switch, "link", "add", port, *pair)
            _call("ip", "-n", self.switch, "link", "set", port, "master", "bridge")
            _call("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for end in ((self.switch, port), (name, "eth0")):
                _call("ip", "-n", end[0], "link", "set", end[1], "mtu", str(MTU), "addrgenmode", "none", "up")
            _steady(name, address)

    def shape(self, link: Link) -> None:
        """Gives every link this speed, each way; what is under way meanwhile may be lost and sent again.

        Raises:
            NetworkError: the kernel lacks what the link needs.
        """
        ends = [(self.switch, f"port{node}") for node in range(len(self.nodes))]
        for namespace, device in (*ends, *((name, "eth0") for name in self.nodes)):
            place = ("tc", "-n", namespace, "qdisc")
            _call(*place, "delete", "dev", device, "root", check=False)
            if link.bits_per_second is not None:
                bucket = ("tbf", "rate", f"{link.bits_per_second:.0f}bit", "burst", str(BURST), "limit", str(QUEUE))
                _call(*place, "add", "dev", device, "root", *bucket)

    def enter(self, node: int) -> tuple[str, ...]:
        """What stands before a command that is to run on a node."""
        return ("ip", "netns", "exec", self.nodes[node])

    def remove(self) -> None:
        """The namespaces are gone, and with them their links."""
        with interrupts_held_back():
            for name in (*self.nodes, self.switch):
                _call("ip", "netns", "delete", name, check=False)


def check_programs() -> None:
    """Raises NetworkError where something is missing that can be seen beforehand."""
    if os.geteuid() != 0:
        raise NetworkError("network namespaces need root")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise NetworkError(f"the program {program} is missing (package iproute2)")


def reason_against() -> str:
    """Why shaped networks cannot be made here; empty where they can. One is made to see."""
    try:
        with Network(2) as network:
            network.shape(Link(1e9))
    except NetworkError as error:
        return str(error)
    return ""


def existing() -> list[str]:
    """The names of all namespaces of such networks, of other processes too."""
    listed = _call("ip", "netns", "list", check=False).stdout
    return [name for line in listed.splitlines() if (name := line.split()[0]).startswith(f"{PREFIX}-")]


def remove_leftovers() -> None:
    """Namespaces of processes that are no more are removed."""
    for name in existing():
        owner = re.match(rf"{PREFIX}-(\d+)-", name)
        if owner and not os.path.exists(f"/proc/{owner[1]}"):
            _call("ip", "netns", "delete", name, check=False)


def _steady(name: str, address: str) -> None:
    """The node sends as fast as its link takes, on every machine alike.

    Reno is what every kernel has and allows. There is no slow start anew after each pause between messages. Nothing
    is dropped, but much may wait before a slow link: what takes longer than usual is not to be sent again at once.
    """
    settings = {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": "0"}
    writes = "; ".join(f"echo {value} > /proc/sys/net/ipv4/{key}" for key, value in settings.items())
    _call("ip", "netns", "exec", name, "sh", "-c", f"set -e; {writes}")
    route = (SUBNET, "dev", "eth0", "scope", "link", "src", address, "rto_min", RESEND_AFTER)
    _call("ip", "-n", name, "route", "replace", *route)


def _call(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    shown = " ".join(command)
    try:
        # In a session of its own: Ctrl-C on the terminal is answered here, and cuts no command short.
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False, start_new_session=True
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetworkError(f"{shown}: {error}") from error
    if check and done.returncode:
        raise NetworkError(f"{shown}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done
