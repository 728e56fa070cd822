"""One rank on a node: trains the demo's model when told to, and says what every step waited for and sent.

Started by `benchmarks.nodes_pool` with the environment of a launcher. Work comes as lines of JSON on standard input,
results go as lines of JSON to standard output; the end of the input ends the process, whatever it is doing.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR

sys.path.append(str(Path(__file__).parents[1] / "examples"))

from dion_core import NorDion2
from dion_core.collectives import Call, Group, Handle, Reduction, observe
from dion_core.prediction.measuring import Ranks, Sizes, measure
from dion_core.process_groups import group_of, stand_in
from text_demo.rank import Rank
from text_demo.settings import Run, Settings
from train_text import build_model, build_optimizer, lr_factor

SIZES = Sizes(link_bytes=[2**14, 2**17, 2**20, 2**22], sides=[32, 96], copy_bytes=2**22, batch=4)
"""What is measured of the machine: messages and matrices of about the sizes that the demo's model has."""

NICENESS = -15


@dataclass(frozen=True)
class Training:
    """What to train.

    Attributes:
        transport: its name.
        num_steps: measured.
        warm_up: steps before these.
        fraction: of the rows.
        min_batch_size: sequences a step at least, of all ranks together.
        weights: whether digests of the weights at the end are wanted.
    """

    transport: str
    num_steps: int = 5
    warm_up: int = 2
    fraction: float = 0.25
    min_batch_size: int = 8
    weights: bool = False

    @property
    def settings(self) -> Settings:
        """Of the demo's program."""
        return Settings(steps=self.warm_up + self.num_steps, fraction=self.fraction, min_batch_size=self.min_batch_size)


@dataclass(frozen=True)
class Step:
    """What one rank saw of one step of the optimizer.

    Attributes:
        seconds: from where all ranks stand at its start to the end on this one.
        waited: of these, those in which it did nothing but wait for messages.
        in_node: bytes that it sent to other ranks of its node.
        between: bytes that it sent to other nodes.
        link: bytes that left the node over its link, headers included, until all ranks were done; 0 for ranks that
            are not the first of their node.
    """

    seconds: float
    waited: float
    in_node: int
    between: int
    link: int


@dataclass
class Waits:
    """Seconds waited."""

    seconds: float = 0.0


@dataclass(frozen=True)
class _TimedHandle:
    handle: Handle
    waits: Waits

    def wait(self) -> None:
        started = time.perf_counter()
        self.handle.wait()
        self.waits.seconds += time.perf_counter() - started


@dataclass(frozen=True)
class TimedGroup:
    """A `Group` that passes everything on, and adds up how long its handles are waited for."""

    group: Group
    waits: Waits = field(compare=False)

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.group.ranks

    def named(self, label: str) -> TimedGroup:
        return replace(self, group=self.group.named(label))

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> Handle:
        return self._timed(self.group.all_gather(outputs, tensor))

    def all_reduce(self, tensor: Tensor, reduction: Reduction) -> Handle:
        return self._timed(self.group.all_reduce(tensor, reduction))

    def reduce_scatter(self, output: Tensor, tensor: Tensor, reduction: Reduction) -> Handle:
        return self._timed(self.group.reduce_scatter(output, tensor, reduction))

    def broadcast(self, tensor: Tensor, source: int) -> Handle:
        return self._timed(self.group.broadcast(tensor, source))

    def all_to_all(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> Handle:
        return self._timed(self.group.all_to_all(output, tensor, output_splits, input_splits))

    def _timed(self, handle: Handle) -> Handle:
        return _TimedHandle(handle, self.waits)


def train(rank: Rank, job: Training, ranks_per_node: int) -> dict[str, Any]:
    """The demo's training with one transport; what this rank saw of the steps measured, JSON-serializable."""
    settings, waits = job.settings, Waits()
    group = rank.mesh.get_group()
    model = build_model(rank, settings)
    with stand_in(group, TimedGroup(group_of(group), waits)):
        optimizer = build_optimizer(model, Run(job.transport, job.transport, exact=False), settings)
    assert isinstance(optimizer, NorDion2)
    scheduler = LambdaLR(optimizer, partial(lr_factor, num_steps=settings.steps))
    batches = settings.corpus().training_batches(
        settings.batch_size, rank=rank.rank, world_size=rank.world_size, seed=settings.seed
    )
    steps = []
    for number, (inputs, targets) in zip(range(settings.steps), batches, strict=False):
        loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        if number == job.warm_up:
            optimizer.report()  # counts rows from here on
        steps.append(_measured_step(optimizer, rank, waits, ranks_per_node))
        optimizer.zero_grad()
        scheduler.step()
    rows = optimizer.report()["rows"]
    return {
        "steps": [asdict(step) for step in steps[job.warm_up :]],
        "rows": {name: rows[name] for name in ("chosen", "deferred")},
        "loss": float(loss.detach()),
        "weights": _digests(model) if job.weights else {},
    }


def _measured_step(optimizer: NorDion2, rank: Rank, waits: Waits, ranks_per_node: int) -> Step:
    """All ranks start together, and what one has sent is counted when all are done."""
    dist.barrier()
    waits.seconds = 0.0
    before, started = _link_bytes(), time.perf_counter()
    with observe() as calls:
        optimizer.step()
    seconds = time.perf_counter() - started
    dist.barrier()
    node = rank.rank // ranks_per_node
    peers = [peer for peer in range(rank.world_size) if peer != rank.rank]
    return Step(
        seconds=seconds,
        waited=waits.seconds,
        in_node=_sent(calls, [peer for peer in peers if peer // ranks_per_node == node]),
        between=_sent(calls, [peer for peer in peers if peer // ranks_per_node != node]),
        link=_link_bytes() - before if rank.rank % ranks_per_node == 0 else 0,
    )


def _sent(calls: Sequence[Call], peers: Sequence[int]) -> int:
    """Bytes of rows that a transport sent to these ranks."""
    return sum(call.sent[peer] for call in calls if call.name == "all_to_all" for peer in peers)


def _link_bytes() -> int:
    """Bytes that have left this namespace over eth0; 0 where there is none."""
    for line in Path("/proc/net/dev").read_text(encoding="utf-8").splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "eth0":
            return int(counters.split()[8])
    return 0


def _digests(model: torch.nn.Module) -> dict[str, str]:
    """Of the bits of every whole parameter, by name."""
    found = {}
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        found[name] = hashlib.sha256(whole.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    return found


def profile(rank: Rank, ranks_per_node: int) -> dict[str, Any]:
    """The machine's rates while all ranks are busy alike, as `dion bench` measures them."""
    nodes = torch.arange(rank.world_size).view(-1, ranks_per_node)
    in_node, _ = dist.new_subgroups_by_enumeration(nodes.tolist())
    between, _ = dist.new_subgroups_by_enumeration(nodes.T.tolist())
    ranks = Ranks(rank.device, in_node if ranks_per_node > 1 else None, between)
    return asdict(measure(ranks, SIZES, lambda name: None))


def _take_precedence() -> None:
    """This process runs before others of the machine, where the kernel grants it: what they do is not to be measured.

    Sessions share the cores first, where the kernel groups processes by them, and the processes of one then do.
    """
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
        group = Path("/proc/self/autogroup")
        if group.exists():
            group.write_text(str(NICENESS), encoding="utf-8")


def _orders() -> queue.Queue[str]:
    """Lines of standard input as they come."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)  # the parent is done, or gone: nobody wants what this process may still be doing

    threading.Thread(target=read, daemon=True).start()
    return lines


def main() -> None:
    """Joins the other ranks and answers what it is asked, until nobody asks any more."""
    _take_precedence()
    orders = _orders()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ["COLLECTIVE_SECONDS"])))
    world_size, ranks_per_node = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    mesh = init_device_mesh("cpu", (world_size,))
    nobody = Pipe(duplex=False)[1]  # the demo's ranks tell their parent of progress; here none is told
    rank = Rank(dist.get_rank(), world_size, torch.device("cpu"), mesh, nobody)
    while True:
        order = json.loads(orders.get())
        if order == "profile":
            answer = profile(rank, ranks_per_node)
        else:
            answer = train(rank, Training(**order), ranks_per_node)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
