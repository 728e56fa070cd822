"""How long a step takes, from bytes and products: every stage at its rate, messages under way beside other buckets.

The order is that of the real step, since the same `interleave` runs it, on a clock in place of a device.
Legend: f the fraction of rows taken, p, g, m bytes of an element of parameter, gradient and momentum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from dion_core.newton_schulz import NewtonSchulz
from dion_core.newton_schulz_kernels.listing import list_products
from dion_core.prediction.machine import Machine, rate_at
from dion_core.prediction.traffic import Sent
from dion_core.steps import BUCKETS_IN_FLIGHT, Steps, interleave

STAGES = ("accumulate", "select", "take", "exchange", "newton_schulz", "normalize", "update", "elementwise")
"""In the order of a step. "elementwise" is AdamW and Lion, "select" with the gathered scores."""


@dataclass(frozen=True)
class BucketWork:
    """What a step does for one bucket on the rank that everybody waits for.

    Attributes:
        forward: bytes that are under way to the owners together, on the rank that sends or receives most.
        back: the same of the results.
        flops: of Newton-Schulz on the owner with most matrices.
        shorter_side: of the orthogonalized matrices.
        elements: of the parameters on this rank.
        chosen: elements of the rows taken on this rank.
        parameter_bytes: p.
        momentum_bytes: m.
        wire_bytes: of an element on the wire.
        score_bytes: what the rank sends of scores, 0 where the choice needs no others.
        row_bytes: what it sends for the normalization of rows.
    """

    forward: Sent
    back: Sent
    flops: float
    shorter_side: int
    elements: int
    chosen: float
    parameter_bytes: int
    momentum_bytes: int
    wire_bytes: int
    score_bytes: int = 0
    row_bytes: float = 0.0


@dataclass(frozen=True)
class Times:
    """A predicted step, in seconds.

    Attributes:
        stages: by name of `STAGES`, each as if alone.
        step: from the first kernel to the last.
        exposed: the part of `step` in which no kernel runs: messages that nothing hides, and host reads.
    """

    stages: dict[str, float]
    step: float
    exposed: float


@lru_cache(maxsize=1024)
def newton_schulz_flops(rows: int, columns: int) -> float:
    """FLOPs of Newton-Schulz on one matrix as the kernels work it out, symmetric products at half cost."""
    segments = NewtonSchulz().kernel_segments(rows, columns)
    return float(list_products(segments).flops(*sorted((rows, columns))))


def accumulate_bytes(work: BucketWork) -> float:
    """The gradient read, momentum read and written."""
    return work.elements * (work.parameter_bytes + 2 * work.momentum_bytes)


def take_bytes(work: BucketWork) -> float:
    """Of the rows taken, momentum read and written, and the wire's buffer written."""
    return work.chosen * (2 * work.momentum_bytes + work.wire_bytes)


def update_bytes(work: BucketWork) -> tuple[float, float]:
    """Parameters read and written for the decay; and the update of the rows taken, read."""
    return 2.0 * work.elements * work.parameter_bytes, work.chosen * work.wire_bytes


def message_seconds(sent: Sent, machine: Machine) -> float:
    """Of one all-to-all: links work side by side, so the slowest counts; where one rate serves all, their sum."""
    if not sent.total:
        return 0.0
    if machine.itself is not None and machine.in_node == machine.between == ((1.0, machine.itself),):
        return machine.latency + sent.total / machine.itself
    own = sent.itself / (machine.itself or machine.copy / 2)
    in_node = sent.in_node / rate_at(machine.in_node, max(1, sent.in_node))
    between = sent.between / rate_at(machine.between, max(1, sent.between))
    return machine.latency + max(own, in_node, between)


@dataclass
class _Clock:
    """A device and a wire, each busy until a time."""

    machine: Machine
    device: float = 0.0
    wire: float = 0.0
    computed: float = 0.0
    stages: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    def compute(self, stage: str, seconds: float) -> None:
        self.device += seconds
        self.computed += seconds
        self.stages[stage] += seconds

    def send(self, stage: str, seconds: float) -> float:
        """When the message is there."""
        self.wire = max(self.wire, self.device) + seconds
        self.stages[stage] += seconds
        return self.wire

    def wait(self, until: float) -> None:
        self.device = max(self.device, until)


def predict(work: Sequence[BucketWork], machine: Machine, *, elementwise_bytes: float, host_reads: int) -> Times:
    """The times of a step.

    Args:
        work: of the buckets, in their order.
        machine: its rates.
        elementwise_bytes: that AdamW and Lion move.
        host_reads: in a step.
    """
    clock = _Clock(machine)
    for each in work:
        clock.compute("accumulate", accumulate_bytes(each) / machine.copy)
    scores = sum(each.score_bytes for each in work)
    if scores:
        link = machine.between if any(each.forward.between for each in work) else machine.in_node
        clock.wait(clock.send("select", machine.latency + scores / rate_at(link, scores)))
    clock.device += host_reads * machine.host_read
    clock.compute("elementwise", elementwise_bytes / machine.copy)
    interleave([_bucket(each, clock) for each in work], in_flight=BUCKETS_IN_FLIGHT)
    return Times(clock.stages, clock.device, clock.device - clock.computed)


def _bucket(work: BucketWork, clock: _Clock) -> Steps[None]:
    machine = clock.machine
    clock.compute("take", take_bytes(work) / machine.copy)
    if work.forward.total:
        arrived = clock.send("exchange", message_seconds(work.forward, machine))
        yield
        clock.wait(arrived)
    clock.compute("newton_schulz", work.flops / rate_at(machine.newton_schulz, work.shorter_side))
    if work.back.total:
        arrived = clock.send("exchange", message_seconds(work.back, machine))
        yield
        clock.wait(arrived)
    if work.row_bytes:
        clock.compute("normalize", work.chosen * work.wire_bytes / machine.copy)
        link = machine.between if work.forward.between else machine.in_node
        arrived = clock.send("normalize", machine.latency + work.row_bytes / rate_at(link, work.row_bytes))
        yield
        clock.wait(arrived)
    clock.compute("update", sum(update_bytes(work)) / machine.copy)
