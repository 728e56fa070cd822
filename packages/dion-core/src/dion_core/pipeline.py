"""One step, from gradients to weights, for every optimizer and every transport.

accumulate + score -> gather scores -> select -> admit -> reserve -> take + decay -> orthogonalize (owner)
-> normalize -> decay weights + add. The buckets' exchanges are interleaved, so that the messages of one are
under way while another computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from dion_core.buckets import MatrixBucket
from dion_core.collectives import Group, split
from dion_core.delivery import Target, Update
from dion_core.elementwise import adamw_, lion_
from dion_core.layout import Axis, in_pieces
from dion_core.operands import Gradients, Operands, States
from dion_core.ops import accumulate_, take_and_decay_, update_, wait_, with_age
from dion_core.placements import local_tensor
from dion_core.plan import Plan
from dion_core.presence import Presence
from dion_core.recording import varying
from dion_core.rows import RowSelection, overflowing_rows
from dion_core.selection import added_scores
from dion_core.steps import BUCKETS_IN_FLIGHT, Steps, interleave, run

Count = tuple[Tensor, Tensor]
"""A counter of rows by matrix, and what it is to be raised by."""


def step_matrices(
    plan: Plan, operands: Sequence[Operands], presence: Presence, others: Sequence[Steps[None]] = ()
) -> None:
    """Updates the matrix parameters and their state in place. Collective; no value is read on the host.

    Args:
        plan: of the optimizer.
        operands: of the buckets that it steps.
        presence: the gradients of the step.
        others: what else is to overlap with the messages of the buckets; started before them.
    """
    of_buckets = operands[: len(plan.buckets)]
    scores = [
        accumulate_(
            each.momentum,
            each.gradients,
            bucket.nonfinite,
            maximize=bucket.options["maximize"],
            proceed=presence.proceed.to(bucket.bucket.device),
        )
        for bucket, each in zip(plan.buckets, of_buckets, strict=True)
    ]
    active = plan.active(presence)  # which waits for the other ranks: by now the device has work
    known = _gather_scores(plan, scores)
    selections = [
        bucket.selector.select(score, bucket.tables, of_bucket)
        for bucket, score, of_bucket in zip(plan.buckets, known, active, strict=False)
    ]
    if plan.session is not None:
        run(plan.session.begin(selections[: len(plan.transported)]))
    counts = list[Count]()
    moves = [move(*each, counts) for each in zip(plan.buckets, of_buckets, selections, strict=True)]
    stages = [
        apply(target, operands[target.number], active[target.number], [moves[number] for number in target.sources])
        for target in plan.targets
    ]
    for line in plan.lines:  # what ranks do not have in common must not change the order of what they have
        of_line = [stage for stage, target in zip(stages, plan.targets, strict=True) if target.bucket.line == line]
        interleave([*others, *of_line], in_flight=BUCKETS_IN_FLIGHT)
        others = ()
    interleave(others, in_flight=BUCKETS_IN_FLIGHT)  # where there are no buckets
    if counts:
        counters, rows = map(list, zip(*counts, strict=True))
        torch._foreach_add_(counters, rows)


def step_all(
    plan: Plan, state: States, operands: Sequence[Operands], presence: Presence, rates: Sequence[float | Tensor]
) -> None:
    """Updates all parameters and their state in place: all work of a step on the device. Collective.

    Args:
        plan: of the optimizer.
        state: of all parameters.
        operands: of the buckets that it steps.
        presence: the gradients of the step.
        rates: the learning rate of each group of `plan.elementwise`.
    """

    def elementwise() -> Steps[None]:
        if plan.elementwise:
            varying(partial(_step_elementwise, plan, presence.masks), presence.gradients, rates, state)
        yield from ()

    step_matrices(plan, operands, presence, [elementwise(), *(values.share() for values in plan.shared)])


def _step_elementwise(
    plan: Plan,
    masks: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    rates: Sequence[float | Tensor],
    state: States,
) -> None:
    """Updates the AdamW and Lion parameters and their state in place, at once: nothing is sent.

    Args:
        plan: of the optimizer.
        masks: of all parameters, from `Presence`.
        gradients: of all parameters.
        rates: the learning rate of each group of `plan.elementwise`.
        state: of all parameters.
    """
    for members, rate in zip(plan.elementwise, rates, strict=True):
        options = members[0].group
        parameters = [local_tensor(member.parameter) for member in members]
        of_members = [gradients[member.number] for member in members]
        states = [{key: local_tensor(value) for key, value in state[member.parameter].items()} for member in members]
        active = [masks[member.number].to(parameters[0].device) for member in members]
        common = {key: options[key] for key in ("betas", "weight_decay", "maximize")} | {"lr": rate}
        if options["algorithm"] == "adamw":
            adamw_(parameters, of_members, states, active, epsilon=options["epsilon"], **common)
        else:
            lion_(parameters, of_members, states, active, **common)


def agree_on_rows(buckets: Sequence[MatrixBucket], gradients: Sequence[Gradients], state: States) -> list[Gradients]:
    """The gradients, a row that one rank would leave out being NaN on all ranks that hold its columns. Collective.

    Only column-split matrices need it, whose rows no rank sees whole; all of a group share one message.
    """
    agreed = list(gradients)
    flags: dict[Group, list[tuple[int, Tensor]]] = {}
    for number, bucket in enumerate(buckets):
        groups = bucket.bucket.layout.column_groups
        if groups:
            left_out = overflowing_rows(
                bucket.matrices([local_tensor(state[member.parameter]["momentum"]) for member in bucket.members]),
                gradients[number],
                maximize=bucket.options["maximize"],
            )
            flags.setdefault(groups[0], []).append((number, left_out.to(torch.uint8)))
    for group, entries in flags.items():
        message = torch.cat([left_out.flatten() for _, left_out in entries])
        group.named("rows that are not finite").all_reduce(message, "max").wait()
        for number, left_out in entries:
            part, message = message[: left_out.numel()], message[left_out.numel() :]
            agreed[number] = [
                None if gradient is None else torch.where(row[: len(gradient), None], torch.nan, gradient)
                for gradient, row in zip(gradients[number], part.view(left_out.shape).bool(), strict=True)
            ]
    return agreed


def _gather_scores(plan: Plan, scores: Sequence[Tensor]) -> list[Tensor]:
    """For every bucket the scores its selector needs: of the whole matrices, or of this rank's own rows."""
    buckets, known = plan.buckets, list(scores)
    # Rows of which ranks hold some columns each have their scores added up first.
    parts = [
        layout.outer[-1].group if bucket.selector.needs_scores and layout.outer and layout.column_groups else None
        for bucket in buckets
        if (layout := bucket.bucket.layout)
    ]
    lengths = [[score.numel()] * (group.size if group else 0) for group, score in zip(parts, known, strict=True)]
    for gathered, starts in _gathered(parts, known, lengths):
        for n, of_bucket in starts.items():
            known[n] = added_scores(known[n], gathered, of_bucket)
    lines, lengths = [], []
    for bucket in buckets:
        layout = bucket.bucket.layout
        lines.append(layout.group if bucket.selector.needs_all_scores and in_pieces(layout) else None)
        lengths.append([layout.num_matrices * layout.max_rows(rank) for rank in range(layout.group.size)])
    for gathered, starts in _gathered(lines, known, lengths):
        by_rows = {n: each for n, each in starts.items() if buckets[n].bucket.layout.axis is Axis.ROWS}
        if by_rows:
            found = plan.whole_scores.of_rows(gathered, by_rows, {n: buckets[n].tables for n in by_rows})
        for n, of_bucket in starts.items():
            known[n] = found[n] if n in by_rows else added_scores(known[n], gathered, of_bucket)
    return known


def _gathered(
    groups: Sequence[Group | None], scores: Sequence[Tensor], lengths: Sequence[Sequence[int]]
) -> Iterator[tuple[Tensor, dict[int, tuple[int, ...]]]]:
    """Scores of all ranks, and by number of the bucket where those of each rank begin in them.

    All buckets of one group and dtype share one message.

    Args:
        groups: that gather, by bucket; None where nothing is gathered.
        scores: of this rank, by bucket.
        lengths: how many scores every rank of the group has, by bucket.
    """
    messages: dict[tuple[Group, torch.dtype], list[int]] = {}
    for number, (group, score) in enumerate(zip(groups, scores, strict=True)):
        if group is not None:
            messages.setdefault((group, score.dtype), []).append(number)
    pending = []
    for (group, _), numbers in messages.items():
        tensors = [scores[n].flatten() for n in numbers]
        message = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        by_rank = [[lengths[n][rank] for n in numbers] for rank in range(group.size)]
        gathered = message.new_empty(sum(map(sum, by_rank)))
        outputs = split(gathered, [sum(of_rank) for of_rank in by_rank])
        starts = list(accumulate([length for of_rank in by_rank for length in of_rank], initial=0))
        pending.append((group.named("row scores").all_gather(outputs, message), numbers, gathered, starts))
    for handle, numbers, gathered, starts in pending:
        handle.wait()
        yield gathered, {n: tuple(starts[place : -1 : len(numbers)]) for place, n in enumerate(numbers)}


def move(bucket: MatrixBucket, operands: Operands, chosen: RowSelection, counts: list[Count]) -> Steps[Update]:
    """What the rows chosen do to the parameters, after they were taken out of the momentum.

    `counts` gets what its counters are to be raised by.
    """
    options, scalars = bucket.options, operands.scalars
    chosen = with_age(chosen, operands.waited)
    selection = bucket.exchange.admit(chosen)
    wait_(operands.waited, chosen, selection)
    counts += [(bucket.chosen, chosen.count), (bucket.applied, selection.count)]
    rows = bucket.exchange.reserve(selection)
    take_and_decay_(
        operands.momentum,
        operands.gradients,
        selection,
        rows,
        decay=scalars["momentum"],
        nesterov=options.get("nesterov", False),
        maximize=options["maximize"],
    )
    results = yield from bucket.exchange.orthogonalize(rows, selection, bucket.orthogonalizer)
    row_scale = yield from bucket.rule.normalizer.row_scale(
        results, selection, operands.second_moment, bucket.bucket, beta2=scalars["beta2"]
    )
    return Update(results, selection, row_scale)


def apply(target: Target, operands: Operands, active: Tensor, moves: Sequence[Steps[Update]]) -> Steps[None]:
    """Brings the updates that are computed here to the parameters of the target."""
    updates = []
    for each in moves:
        updates.append((yield from each))
    update = yield from target.delivery.deliver(updates)
    bucket, scalars = target.bucket, operands.scalars
    update_(
        operands.parameters,
        update.rows,
        update.selection,
        update.row_scale,
        learning_rate=scalars["lr"],
        weight_decay=scalars["weight_decay"],
        active=active,
        cautious=bucket.options.get("cautious_weight_decay", False),
        scale=bucket.scale,
    )
