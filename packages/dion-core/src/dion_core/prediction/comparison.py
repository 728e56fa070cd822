"""What each transport would cost a step, and which to take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from dion_core.buckets import MatrixBucket
from dion_core.layout import Axis
from dion_core.ownership import imbalance
from dion_core.placements import local_tensor
from dion_core.prediction.machine import Machine
from dion_core.prediction.timing import BucketWork, Times, newton_schulz_flops, predict
from dion_core.prediction.traffic import Question, RankPlan, Sent, plans
from dion_core.registry import AUTO_ORDER, available_transports
from dion_core.report import Report
from dion_core.transport import Transport, TransportError

SCORE_BYTES, ROW_BYTES = 4, 8
"""That a rank sends to every other: of the score of a row, and of a row that is normalized."""
ALIKE = 0.02
"""Predictions that differ by less than this part of a step are no reason to prefer a transport."""
NO_TRANSPORT = "(none)"
"""In place of a name where matrices do not lie in pieces."""


@dataclass(frozen=True)
class Answer:
    """What one transport would cost.

    Attributes:
        transport: its name, or `NO_TRANSPORT`.
        refused: why it cannot serve the question; everything below is then empty.
        exact: whether it makes the choice of the whole matrix at every W.
        may_defer: whether rows may have to wait.
        host_reads: a step.
        sent: bytes of the rank that sends most, in a typical step.
        mean_bytes: over the ranks, or None where not all were looked at.
        start_bytes: the most that a rank sends in the first step.
        workspace: GPU memory that a step needs besides what stays, of the rank that needs most.
        flops: of Newton-Schulz, of the rank that has most.
        imbalance: of the owners' loads.
        times: predicted.
        buckets: as the optimizer's report has them, of rank 0, in a typical step.
        work: what the times were predicted from.
    """

    transport: str
    refused: str = ""
    exact: bool = True
    may_defer: bool = False
    host_reads: int = 0
    sent: Sent = field(default_factory=Sent)
    mean_bytes: float | None = None
    start_bytes: int = 0
    workspace: int = 0
    flops: float = 0.0
    imbalance: float = 1.0
    times: Times | None = None
    buckets: Sequence[Report] = ()
    work: Sequence[BucketWork] = ()


@dataclass(frozen=True)
class Comparison:
    """The answers of all transports, and the one to take."""

    answers: Sequence[Answer]
    recommended: str | None
    reason: str


def compare(
    question: Question,
    machine: Machine,
    *,
    transports: Mapping[str, str | Transport] | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> Comparison:
    """The costs of a step with each transport.

    Args:
        question: what is to be planned.
        machine: the rates by which times are predicted.
        transports: by the name to show; None takes all that are installed.
        progress: told each name before its turn.
    """
    given = transports if transports is not None else {name: name for name in available_transports()}
    answers: list[Answer] = []
    for name, transport in given.items():
        progress(name)
        found = answer(question, machine, name, transport)
        if found.transport == NO_TRANSPORT:
            return Comparison([found], None, "no matrix lies in pieces on several ranks: no transport is needed")
        answers.append(found)
    return Comparison(answers, *recommend(answers))


def answer(question: Question, machine: Machine, name: str, transport: str | Transport) -> Answer:
    """What one transport costs, or why it cannot serve."""
    try:
        ranks = plans(question, transport)
    except (ValueError, TransportError) as error:
        return Answer(name, refused=str(error))
    first, choice = ranks[0].plan, ranks[0].plan.choice
    work = bucket_work(ranks)
    reads = ranks[0].typical["host_reads_per_step"]
    chosen = {type(entry.selector).__name__ for entry in first.transported}
    complete = len(ranks) == question.mesh.world_size
    return Answer(
        transport=name if choice is not None else NO_TRANSPORT,
        exact=not chosen & {"LocalRows", "SlackRows"},
        may_defer=choice is not None and choice.transport.may_defer,
        host_reads=reads,
        sent=max((each.sent for each in ranks), key=lambda sent: sent.total),
        mean_bytes=sum(each.sent.total for each in ranks) / len(ranks) if complete else None,
        start_bytes=max(each.at_start["bytes_per_step"] for each in ranks),
        workspace=max(each.workspace for each in ranks),
        flops=_most_flops(first.buckets, question.mesh.world_size),
        imbalance=max((imbalance(load) for load in first.loads.values()), default=1.0),
        times=predict(work, machine, elementwise_bytes=_elementwise_bytes(ranks[0]), host_reads=reads),
        buckets=ranks[0].typical["buckets"],
        work=work,
    )


def recommend(answers: Sequence[Answer]) -> tuple[str | None, str]:
    """The name of the fastest transport that is exact, or else of the fastest, and why.

    Where predictions are alike, fewer host reads decide, then what never defers, then the order of "auto".
    """
    served = [each for each in answers if not each.refused]
    candidates = [each for each in served if each.exact] or served
    if not candidates:
        return None, "no installed transport serves this; see the reasons"
    fastest = min(_step(each) for each in candidates)
    alike = [each for each in candidates if _step(each) <= fastest * (1 + ALIKE)]
    order = {name: place for place, name in enumerate(AUTO_ORDER)}
    best = min(alike, key=lambda each: (each.host_reads, each.may_defer, order.get(each.transport, len(order))))
    why = f"{_milliseconds(best)} a step"
    if best.exact:
        why += ", exact while nothing is deferred" if best.may_defer else ", exact"
    others = [f"{each.transport} {_milliseconds(each)}" for each in candidates if each is not best]
    if others:
        why += f"; {', '.join(others)}"
    if best.host_reads == 0 and any(each.host_reads for each in candidates):
        why += "; and the host never waits"
    for each in served:
        saved = _step(best) - _step(each)
        if best.exact and not each.exact and saved > ALIKE * _step(best):
            why += f"; {each.transport} would save {1e3 * saved:.2f} ms, but its choice depends on the number of ranks"
    return best.transport, why


def _milliseconds(answer: Answer) -> str:
    return f"{1e3 * _step(answer):.2f} ms"


def _step(answer: Answer) -> float:
    return answer.times.step if answer.times is not None else float("inf")


def bucket_work(ranks: Sequence[RankPlan]) -> list[BucketWork]:
    """By bucket, the work of a step on whichever rank everybody waits for."""
    return [_work(ranks, number, entry) for number, entry in enumerate(ranks[0].plan.buckets)]


def _work(ranks: Sequence[RankPlan], number: int, entry: MatrixBucket) -> BucketWork:
    bucket, layout = entry.bucket, entry.bucket.layout
    rows, columns = bucket.total_rows, bucket.shape[1]
    # What a rank receives on the way to the owners is what it sends on the way back, headers apart.
    messages = [each for rank in ranks for each in (rank.traffic[number].forward, rank.traffic[number].back)]
    busiest = max(messages, key=lambda sent: (sent.between, sent.in_node, sent.itself))
    both = [rank.traffic[number] for rank in ranks]
    nothing = Sent()
    width = max(layout.columns(rank) for rank in range(layout.group.size))
    held = max(layout.max_rows(rank) for rank in range(layout.group.size))
    chosen = rows if layout.axis is not Axis.ROWS else rows / max(1, layout.num_holders)
    parameter = local_tensor(entry.members[0].parameter)
    momentum = entry.options["momentum_dtype"] or parameter.dtype
    exchanged = layout.axis in (Axis.ROWS, Axis.COLUMNS) and layout.group.size > 1
    normalized = layout.group.size * bucket.num_matrices * chosen * ROW_BYTES if _normalizes(entry) else 0.0
    scores = layout.group.size * bucket.num_matrices * held * SCORE_BYTES
    return BucketWork(
        forward=busiest if any(each.forward.total for each in both) else nothing,
        back=busiest if any(each.back.total for each in both) else nothing,
        flops=max_owned(bucket.owners) * newton_schulz_flops(rows, columns),
        shorter_side=min(rows, columns),
        elements=bucket.num_matrices * held * width,
        chosen=bucket.num_matrices * chosen * width,
        parameter_bytes=parameter.element_size(),
        momentum_bytes=momentum.itemsize,
        wire_bytes=bucket.dtype.itemsize,
        score_bytes=scores if exchanged and entry.selector.needs_all_scores else 0,
        row_bytes=normalized if exchanged else 0.0,
    )


def max_owned(owners: Sequence[int]) -> int:
    """The most matrices that one rank owns."""
    return max(map(list(owners).count, set(owners)), default=0)


def _normalizes(entry: MatrixBucket) -> bool:
    return type(entry.rule.normalizer).__name__ != "NoNormalizer"


def _most_flops(buckets: Sequence[MatrixBucket], world_size: int) -> float:
    load = [0.0] * world_size
    for entry in buckets:
        bucket = entry.bucket
        flops = newton_schulz_flops(bucket.total_rows, bucket.shape[1])
        for owner in bucket.owners:
            load[bucket.layout.ranks[owner]] += flops
    return max(load)


def _elementwise_bytes(rank: RankPlan) -> float:
    """Parameters and each state read and written, gradients read."""
    total = 0
    for members in rank.plan.elementwise:
        states = 2 if members[0].group["algorithm"] == "adamw" else 1
        parts: list[Tensor] = [local_tensor(member.parameter) for member in members]
        total += sum((3 + 2 * states) * part.numel() * part.element_size() for part in parts)
    return float(total)
