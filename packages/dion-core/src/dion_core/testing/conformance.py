"""The conformance suite of transports: installing a transport tests it.

Inside every rank of an initialized process group, `check_all("name")`, or `check_all(MyTransport(option=2))`,
runs the transport through all cells of `cells.py` and returns what failed. `check_transport` runs one cell.

A cell passes if, on every rank,

* the rows come back as one process makes them that has the whole matrices (the oracle): with the same bits
  where world-size invariance is promised (rows or nothing split, on a CPU, as many rows admitted as a matrix
  may have), else to `TOLERANCE`;
* nothing is admitted that was not chosen, rows stand in ascending order, and all chosen rows are admitted,
  unless the class of the transport has `may_defer = True`: the oracle takes the admitted rows then;
* values in unused slots do not matter, and what belongs to the caller is not modified;
* owners orthogonalize every matrix once, and exactly the rows that it has;
* all ranks issue the same collectives, as many as planned, with the planned bytes to every peer (`traffic()` is
  asked after the step, when a transport whose sizes vary knows them);
* the cell is not vacuous: the shards are what they are called, and rows go to other ranks.

Legend: N matrices, W ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from dion_core.collectives import Call, Group, observe
from dion_core.layout import Axis
from dion_core.process_groups import TorchGroup
from dion_core.registry import choose_transport
from dion_core.testing.cells import Case, cases, vacuous
from dion_core.testing.trial import Trial, admitted_everywhere, oracle, play, stage
from dion_core.transport import Transport

TOLERANCE = {
    "cpu": {torch.float64: 1e-9, torch.float32: 2e-3, torch.bfloat16: 3e-2},
    "cuda": {torch.float64: 1e-9, torch.float32: 2e-2, torch.bfloat16: 6e-2},
}
"""Largest difference of an entry (their root mean square is about 0.3) by device and wire dtype. On CUDA
Newton-Schulz computes in fp16 unless the wire is fp64, batched, and some matrices are nearly singular."""

_UNUSED = (math.nan, 1e30)  # what stands in unused slots, in turn


def _default_group() -> Group:
    assert dist.group.WORLD is not None, "a process group is needed"
    return TorchGroup(dist.group.WORLD)


@dataclass(frozen=True)
class Outcome:
    """What one cell showed on this rank.

    Attributes:
        case: the cell.
        failures: what was wrong, a sentence each; empty if the cell passed on this rank.
        bytes_to_others: bytes that this rank sent to other ranks.
        deferred: rows of this rank that were chosen and not admitted.
        raised: some rank raised, so that the ranks may be out of step.
    """

    case: Case
    failures: tuple[str, ...]
    bytes_to_others: int
    deferred: int
    raised: bool


def check_all(transport: str | Transport, device: str = "cpu", *, group: Group | None = None) -> list[Outcome]:
    """The outcome of every cell. Collective.

    Ends early if a rank raises, since later cells would show nothing but the consequences.

    Args:
        transport: the name of an installed one, or an instance with options.
        device: where the rows lie; one that the group serves.
        group: the ranks; None takes the default process group of torch.distributed.

    Raises:
        TransportError: no transport of that name is installed.
    """
    if isinstance(transport, str):
        transport = choose_transport(transport, frozenset(), chooses_rows=True).transport
    outcomes: list[Outcome] = []
    group = group or _default_group()
    for case in cases(transport, group.size):
        outcomes.append(check_transport(transport, case, device, group=group))
        if outcomes[-1].raised:
            break
    return outcomes


def check_transport(transport: Transport, case: Case, device: str = "cpu", *, group: Group | None = None) -> Outcome:
    """Runs one cell on the ranks of a group, or of the default process group. Collective.

    What is wrong is returned and not raised, so that no rank leaves the others waiting.
    """
    group = group or _default_group()
    failures: list[str] = []
    trials: list[list[Trial]] = []
    with observe() as calls:
        try:
            steps = stage(case, group, torch.device(device))
            trials = [play(transport, steps, unused=fill) for fill in _UNUSED]
        except Exception as error:
            failures.append(f"raised {type(error).__name__}: {error}")
    status = _Status.of(calls, trials[0] if not failures else [], group.rank)
    try:
        by_rank = status.gather(group, device)
    except Exception as error:  # a rank raised or went another way, while others wait in the transport
        error.add_note(f"in cell {case}; before that on this rank: {'; '.join(failures) or 'nothing raised'}")
        raise
    raised = any(each.raised for each in by_rank)
    deferred = 0
    if not raised:
        failures += _disagreements(by_rank, calls)
        if group.size > 1 and case.twist != "idle" and not any(each.bytes_to_others for each in by_rank):
            failures.append("vacuous: nothing was sent to another rank")
        for trial, again in zip(*trials, strict=True):
            failures += _wrong(transport, case, trial, again)
            deferred += int(trial.chosen.count.sum() - trial.admitted.count.sum())
        failures += vacuous(case, trials[0][0].problem, trials[0][0].chosen)
    return Outcome(case, tuple(failures), status.bytes_to_others, deferred, raised)


@dataclass(frozen=True)
class _Status:
    """What the ranks tell each other after a cell."""

    raised: bool
    bytes_to_others: int
    collectives: int  # digest
    agreed: int  # digest of what all ranks are to know alike of the admitted rows

    @staticmethod
    def of(calls: Sequence[Call], trials: Sequence[Trial], rank: int) -> _Status:
        to_others = sum(sum(call.sent) - call.sent[rank] for call in calls if rank < len(call.sent))
        agreed = []
        for trial in trials:
            agreed.append(trial.admitted.count_by_rank.tolist())
            if trial.problem.bucket.layout.axis is not Axis.ROWS:
                agreed.append(trial.admitted.index[trial.admitted.valid()].tolist())
        names = [(call.name, call.size) for call in calls]
        return _Status(not trials, to_others, _digest(names), _digest(agreed))

    def gather(self, group: Group, device: str) -> list[_Status]:
        values = [self.raised, self.bytes_to_others, self.collectives, self.agreed]
        message = torch.tensor(values, dtype=torch.int64, device=device)
        outputs = [torch.empty_like(message) for _ in range(group.size)]
        group.all_gather(outputs, message).wait()
        return [_Status(bool(raised), *rest) for raised, *rest in torch.stack(outputs).tolist()]


def _digest(value: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")


def _disagreements(by_rank: Sequence[_Status], calls: Sequence[Call]) -> Iterator[str]:
    if len({each.collectives for each in by_rank}) > 1:
        issued = ", ".join(f"{call.name} of {call.size}" for call in calls)
        yield f"collectives: not the same on all ranks; here {issued}"
    if len({each.agreed for each in by_rank}) > 1:
        yield "admitted: the ranks do not know the same counts (or rows, where rows are not split)"


def _wrong(transport: Transport, case: Case, trial: Trial, again: Trial) -> Iterator[str]:
    """What is wrong with a bucket, of which `again` had other values in unused slots. Collective."""
    everywhere = admitted_everywhere(trial)
    admission = [*_admission(trial, may_defer=transport.may_defer), *_form(trial)]
    yield from admission
    if trial.modified or again.modified:
        yield "modified: momentum or selection of the caller changed"
    yield from _told(trial)
    yield from _shapes(trial, everywhere)
    yield from _traffic(trial)
    if admission:
        return  # rows that cannot be told from others cannot be compared
    for number, (one, other) in enumerate(zip(trial.received(), again.received(), strict=True)):
        bound = 0.0 if one.device.type == "cpu" else TOLERANCE["cuda"][one.dtype]
        if not _close(one, other, bound):
            yield f"unused slots: what stands in them changes matrix {number}"
    yield from _values(case, trial, everywhere)


def _admission(trial: Trial, *, may_defer: bool) -> Iterator[str]:
    chosen, admitted = trial.chosen, trial.admitted
    if not torch.equal(chosen.count_by_rank, admitted.count_by_rank):
        yield "admitted: count_by_rank is not that of the choice"
    counts = zip(chosen.count.tolist(), admitted.count.tolist(), strict=True)
    for matrix, (most, count) in enumerate(counts):
        wanted = chosen.index[matrix, :most].tolist()
        given = admitted.index[matrix, :count].tolist()
        if count > most or not set(given) <= set(wanted):
            yield f"admitted: rows {given} of matrix {matrix}, of which {wanted} were chosen"
        if any(one >= other for one, other in pairwise(given)):
            yield f"admitted: rows {given} of matrix {matrix} are not ascending"
        if count < most and not may_defer:
            yield f"admitted: {count} of {most} rows of matrix {matrix}, by a transport without may_defer"


def _form(trial: Trial) -> Iterator[str]:
    bucket, results = trial.problem.bucket, trial.results
    columns = bucket.layout.columns(bucket.layout.group.rank)
    for name, rows in (("reserved", trial.reserved), ("results", results)):
        if rows.slot.shape != trial.admitted.index.shape:
            yield f"form: {name} has slots {tuple(rows.slot.shape)} for {tuple(trial.admitted.index.shape)} rows"
        if rows.values.dtype != bucket.dtype or rows.values.dim() != 2 or rows.values.shape[1] != columns:
            yield f"form: {name} is {rows.values.dtype} {tuple(rows.values.shape)}, not {bucket.dtype} (S, {columns})"
        if rows.slot.numel() and not 0 <= int(rows.slot.min()) <= int(rows.slot.max()) < len(rows.values):
            yield f"form: {name} has slots outside 0 to {len(rows.values) - 1}"


def _told(trial: Trial) -> Iterator[str]:
    """What ranks of other axes of a mesh rely on."""
    if trial.told is None:
        return
    number, slot = trial.told
    valid = trial.admitted.valid()
    if not torch.equal(slot[valid], trial.results.slot[valid]) or bool((slot < 0).any()):
        yield f"results: result_slot said {slot[valid].tolist()}, and they lie in {trial.results.slot[valid].tolist()}"
    if bool((slot[valid] >= number).any()) or number > len(trial.results.values):
        yield f"results: num_results {number} for slots {slot[valid].tolist()} of {len(trial.results.values)} rows"
    if trial.rounds != trial.planned.collectives:
        yield f"results: {trial.rounds} yields for {trial.planned.collectives} collectives planned"


def _shapes(trial: Trial, everywhere: Tensor) -> Iterator[str]:
    """Owners get k x C: no padding rows, and no matrix twice or by a rank that does not own it."""
    bucket, given = trial.problem.bucket, [shape for shape in trial.spy.shapes if shape[0]]
    owned, (rows, columns) = len(bucket.owned(bucket.layout.group.rank)), (bucket.total_rows, bucket.shape[1])
    matrices = sum(number for number, *_ in given)
    if bool((everywhere.sum(dim=1) == rows).all()):
        right = matrices == owned and {tuple(shape[1:]) for shape in given} <= {(rows, columns)}
    else:  # a transport that knows the counts may leave rows out, and matrices of which none is left
        right = matrices <= owned and all(shape[1] <= rows and shape[2] == columns for shape in given)
    if not right and not trial.spy.in_segments:
        yield f"shapes: orthogonalized {given}; this rank owns {owned} matrices of {rows} x {columns}"


def _traffic(trial: Trial) -> Iterator[str]:
    """The first collectives send what is planned for the way forward, all others what is planned for the way back."""
    planned, calls = trial.planned, trial.calls
    size = trial.problem.bucket.layout.group.size
    plan = [tuple(way) or (0,) * size for way in (planned.forward, planned.back)]

    def sent(part: Sequence[Call]) -> tuple[int, ...]:
        return tuple(sum(call.sent[peer] for call in part) for peer in range(size))

    if len(calls) != planned.collectives:
        yield f"traffic: {planned.collectives} collectives planned, {len(calls)} issued"
    if not any([sent(calls[:turn]), sent(calls[turn:])] == plan for turn in range(len(calls) + 1)):
        yield f"traffic: planned forward and back {plan}, sent {[call.sent for call in calls]}"


def _values(case: Case, trial: Trial, everywhere: Tensor) -> Iterator[str]:
    bucket = trial.problem.bucket
    device, permuted = bucket.device.type, case.twist == "permuted"
    promised = device == "cpu" and bucket.layout.axis is not Axis.COLUMNS and not (permuted or trial.spy.in_segments)
    expected = oracle(trial.problem, everywhere, backwards=permuted)
    momentum = trial.problem.local(trial.problem.whole)
    for matrix, received in enumerate(trial.received()):
        rows = trial.admitted.index[matrix, : len(received)]
        exact = promised and int(everywhere[matrix].sum()) == bucket.total_rows
        bound = 0.0 if exact else TOLERANCE[device][bucket.dtype]
        wanted = expected[matrix].index_select(0, rows)
        if not _close(received, wanted, bound):
            worst = (received.double() - wanted.double()).abs().max().item()
            yield f"values: matrix {matrix} differs from the oracle by {worst:.1e}, allowed {bound:.1e}"
        zero = (momentum[matrix].index_select(0, rows) == 0).all(dim=1)
        if received[zero].any():
            yield f"values: zero rows of matrix {matrix} did not stay zero"


def _close(one: Tensor, other: Tensor, bound: float) -> bool:
    """Whether no entry differs by more than the bound; NaN is never close."""
    return bool(((one.double() - other.double()).abs() <= bound).all())
