"""Plays a cell of the conformance suite through a transport, as an optimizer would, and records what happened.

Legend: N matrices, R rows and C columns of a whole matrix, K slots a matrix, W ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from dion_core.collectives import Call, Group, observe
from dion_core.layout import Axis
from dion_core.newton_schulz import NewtonSchulz, Segment
from dion_core.rows import Rows, RowSelection
from dion_core.steps import Steps, T, interleave, run
from dion_core.testing.cells import NUM_STEPS, Case, Problem, problems
from dion_core.transport import Exchange, Traffic, Transport


@dataclass
class Spy:
    """Newton-Schulz that remembers what it was asked for.

    Attributes:
        shapes: (matrices, rows, columns) of every call.
        in_segments: asked for segments: nobody held a whole matrix, and sums of Gram matrices round otherwise.
    """

    inner: NewtonSchulz = field(default_factory=NewtonSchulz)
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    in_segments: bool = False

    def __call__(self, matrices: Tensor) -> Tensor:
        self.shapes.append(tuple(matrices.shape))
        return self.inner(matrices)

    def segments(self, rows: int, columns: int) -> tuple[Segment, ...]:
        self.in_segments = True
        return self.inner.segments(rows, columns)


@dataclass(frozen=True)
class Trial:
    """What one bucket did in one step, on this rank.

    Attributes:
        chosen: the rows that the optimizer wanted.
        admitted: those that the transport let through, as it gave them.
        reserved: where they were to be written.
        results: what came back.
        spy: the orthogonalizer.
        calls: the collectives that the bucket issued.
        planned: its traffic, asked for afterwards.
        modified: the transport changed what belongs to its caller.
        told: how many rows come back and where, as the exchange said before; None where it does not say.
        rounds: how often it let others compute.
    """

    problem: Problem
    chosen: RowSelection
    admitted: RowSelection
    reserved: Rows
    results: Rows
    spy: Spy
    calls: list[Call]
    planned: Traffic
    modified: bool
    told: tuple[int, Tensor] | None
    rounds: int

    def received(self) -> list[Tensor]:
        """By matrix, its (count, C local) admitted rows as they came back."""
        counts = self.admitted.count.tolist()
        slots = zip(self.results.slot, counts, strict=True)
        return [self.results.values.index_select(0, slot[:count]) for slot, count in slots]


def stage(case: Case, group: Group, device: torch.device) -> list[list[Problem]]:
    """By step of a cell, its problems. Playing does not change them."""
    return [problems(case, group, device, step) for step in range(NUM_STEPS if case.twist == "steps" else 1)]


def play(transport: Transport, steps: Sequence[Sequence[Problem]], *, unused: float) -> list[Trial]:
    """The trials of all buckets and steps of a cell, in one session that is opened for it. Collective.

    Args:
        steps: by step, a problem a bucket.
        unused: what stands in slots that hold no admitted row.
    """
    session = transport.open([problem.bucket for problem in steps[0]])
    trials = []
    for step in steps:
        wanted = [problem.selected for problem in step]
        chosen = [_copy(rows) for rows in wanted]
        run(session.begin(chosen))
        moves = [
            _move(exchange, problem, rows, unused, tells=transport.outer_axes)
            for exchange, problem, rows in zip(session.exchanges, step, zip(chosen, wanted, strict=True), strict=True)
        ]
        trials += interleave(moves, in_flight=len(moves))
        session.end()
    return trials


def admitted_everywhere(trial: Trial) -> Tensor:
    """(N, R) bool: the rows that all ranks together admitted. Collective."""
    problem, layout = trial.problem, trial.problem.bucket.layout
    num_matrices, rows = layout.num_matrices, layout.shape[0]
    position, index = problem.tables.position, trial.admitted.index
    mask = torch.zeros(num_matrices * rows + 1, dtype=torch.int32, device=position.device)
    if position.shape[1]:
        # A wrong index is the affair of another check; here it must not keep this rank from its collective.
        place = position.gather(1, index.clamp(0, position.shape[1] - 1))
        mask[place[trial.admitted.valid()]] = 1
    if layout.axis is Axis.ROWS:  # one message to every rank, of which gloo needs a row one after the other to add
        size, everywhere = layout.group.size, mask.repeat(layout.group.size)
        by_rank, lengths = torch.empty_like(everywhere), [len(mask)] * size
        layout.group.all_to_all(by_rank, everywhere, lengths, lengths).wait()
        mask = by_rank.view(size, -1).amax(dim=0)
    return mask[:-1].view(num_matrices, rows) > 0


def oracle(problem: Problem, admitted: Tensor, *, backwards: bool) -> list[Tensor]:
    """By matrix, this rank's (R local, C local) of what one process makes of the whole matrices; else zero.

    One matrix at a time, of its admitted rows alone. (`LocalExchange` passes the suite, hence does the same.)

    Args:
        admitted: (N, R) bool.
        backwards: give the rows to Newton-Schulz in descending order.
    """
    wire, orthogonalize = problem.whole.to(problem.bucket.dtype), NewtonSchulz()
    result = torch.zeros_like(wire)
    for matrix, mask in enumerate(admitted):
        rows = mask.nonzero().flatten()
        rows = rows.flip(0) if backwards else rows
        result[matrix, rows] = orthogonalize(wire[matrix, rows][None])[0]
    return problem.local(result)


def _move(
    exchange: Exchange, problem: Problem, selected: tuple[RowSelection, RowSelection], unused: float, *, tells: bool
) -> Steps[Trial]:
    """A bucket's part of a step; `selected` are the rows for the transport, and a copy that it does not get."""
    (chosen, wanted), momentum, spy = selected, problem.local(problem.whole), Spy()
    admitted = exchange.admit(chosen)
    before = _copy(admitted)
    rows = exchange.reserve(admitted)
    rows.values.fill_(unused)
    _write(momentum, admitted, rows, unused)
    told = (exchange.num_results(), exchange.result_slot(admitted).clone()) if tells else None
    calls: list[Call] = []
    rounds: list[None] = []
    results = yield from _watched(exchange.orthogonalize(rows, admitted, spy), calls, rounds)
    intact = [
        *map(torch.equal, momentum, problem.local(problem.whole)),
        _same(chosen, wanted),
        _same(admitted, before),
    ]
    modified, planned = not all(intact), exchange.traffic()
    return Trial(problem, wanted, before, rows, results, spy, calls, planned, modified, told, len(rounds))


def _write(momentum: Sequence[Tensor], admitted: RowSelection, rows: Rows, unused: float) -> None:
    """Writes the admitted rows, then `unused` to the places of all other entries, which `Rows` allows."""
    counts = admitted.count.tolist()
    for state, index, slot, count in zip(momentum, admitted.index, rows.slot, counts, strict=True):
        values = state.index_select(0, index[:count]).to(rows.values.dtype)
        rows.values.index_copy_(0, slot[:count], values)
        rows.values.index_fill_(0, slot[count:], unused)


def _watched(steps: Steps[T], calls: list[Call], rounds: list[None]) -> Steps[T]:
    """The same steps; the collectives that they issue, and not what runs between them, go into `calls`.

    `rounds` gets an entry for every yield.
    """
    while True:
        with observe() as issued:
            try:
                next(steps)
            except StopIteration as stop:
                result: T = stop.value
                return result
            finally:
                calls += issued
        rounds.append(None)
        yield


def _tensors(selection: RowSelection) -> Iterator[Tensor]:
    for each in fields(selection):
        if isinstance(value := getattr(selection, each.name), Tensor):
            yield value


def _copy(selection: RowSelection) -> RowSelection:
    return RowSelection(*(tensor.clone() for tensor in _tensors(selection)))


def _same(one: RowSelection, other: RowSelection) -> bool:
    return all(map(torch.equal, _tensors(one), _tensors(other)))
