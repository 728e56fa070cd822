"""One step of the parameters; of the matrices, from gradients to weights, for every optimizer and every transport.

accumulate + score -> gather scores -> select -> admit -> reserve -> take + decay -> orthogonalize (owner)
-> normalize -> decay weights + add. The buckets' exchanges are interleaved, so that the messages of one are
under way while another computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from dion_core.buckets import MatrixBucket
from dion_core.collectives import Group, split
from dion_core.delivery import Target, Update
from dion_core.elementwise import adamw_, lion_
from dion_core.layout import Axis
from dion_core.operands import Gradients, Operands, States
from dion_core.ops import accumulate_, take_and_decay_, update_, wait_, with_age
from dion_core.placements import local_tensor
from dion_core.plan import Plan
from dion_core.presence import Presence
from dion_core.rows import RowSelection, overflowing_rows
from dion_core.selection import whole_scores
from dion_core.steps import Steps, interleave, run

BUCKETS_IN_FLIGHT = 2


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
    active = [bucket.active(presence) for bucket in plan.stepped]
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
    known = _gather_scores(plan.buckets, scores)
    selections = [
        bucket.selector.select(score, bucket.tables, of_bucket)
        for bucket, score, of_bucket in zip(plan.buckets, known, active, strict=False)
    ]
    if plan.session is not None:
        run(plan.session.begin(selections[: len(plan.transported)]))
    moves = [_move(*each) for each in zip(plan.buckets, of_buckets, selections, strict=True)]
    stages = [
        _apply(target, operands[target.number], active[target.number], [moves[number] for number in target.sources])
        for target in plan.targets
    ]
    interleave([*others, *stages], in_flight=BUCKETS_IN_FLIGHT)


def step_elementwise(plan: Plan, state: States, presence: Presence, rates: Sequence[float | Tensor]) -> Steps[None]:
    """Updates the AdamW and Lion parameters and their state in place, at once: nothing is sent.

    Args:
        plan: of the optimizer.
        state: of all parameters.
        presence: the gradients of the step.
        rates: the learning rate of each group of `plan.elementwise`.
    """
    for members, rate in zip(plan.elementwise, rates, strict=True):
        options = members[0].group
        parameters = [local_tensor(member.parameter) for member in members]
        gradients = [presence.gradients[member.number] for member in members]
        states = [{key: local_tensor(value) for key, value in state[member.parameter].items()} for member in members]
        active = [presence.masks[member.number].to(parameters[0].device) for member in members]
        common = {key: options[key] for key in ("betas", "weight_decay", "maximize")} | {"lr": rate}
        if options["algorithm"] == "adamw":
            adamw_(parameters, gradients, states, active, epsilon=options["epsilon"], **common)
        else:
            lion_(parameters, gradients, states, active, **common)
    yield from ()


def agree_on_rows(buckets: Sequence[MatrixBucket], gradients: Sequence[Gradients], state: States) -> list[Gradients]:
    """The gradients, a row that one rank would leave out being NaN on all ranks that hold its columns. Collective.

    Only column-split matrices need it, whose rows no rank sees whole; all of a group share one message.
    """
    agreed = list(gradients)
    flags: dict[Group, list[tuple[int, Tensor]]] = {}
    for number, bucket in enumerate(buckets):
        layout = bucket.bucket.layout
        if layout.axis is Axis.COLUMNS:
            left_out = overflowing_rows(
                bucket.matrices([local_tensor(state[member.parameter]["momentum"]) for member in bucket.members]),
                gradients[number],
                maximize=bucket.options["maximize"],
            )
            flags.setdefault(layout.group, []).append((number, left_out.to(torch.uint8)))
    for group, entries in flags.items():
        message = torch.cat([left_out.flatten() for _, left_out in entries])
        group.named("rows that are not finite").all_reduce(message, "max").wait()
        for number, left_out in entries:
            part, message = message[: left_out.numel()], message[left_out.numel() :]
            agreed[number] = [
                None if gradient is None else torch.where(row[:, None], torch.nan, gradient)
                for gradient, row in zip(gradients[number], part.view(left_out.shape).bool(), strict=True)
            ]
    return agreed


def _gather_scores(buckets: Sequence[MatrixBucket], scores: Sequence[Tensor]) -> list[Tensor]:
    """For every bucket the scores its selector needs: of the whole matrices, or this rank's own.

    All buckets of one group and dtype share one message.
    """
    messages: dict[tuple[Group, torch.dtype], list[int]] = {}
    for number, (bucket, score) in enumerate(zip(buckets, scores, strict=True)):
        layout = bucket.bucket.layout
        if bucket.selector.needs_all_scores and layout.axis in (Axis.ROWS, Axis.COLUMNS):
            messages.setdefault((layout.group, score.dtype), []).append(number)
    known = list(scores)
    pending = []
    for (group, _), numbers in messages.items():
        tensors = [scores[n].flatten() for n in numbers]
        message = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        lengths = [
            [buckets[n].bucket.num_matrices * buckets[n].bucket.layout.max_rows(rank) for n in numbers]
            for rank in range(group.size)
        ]
        gathered = message.new_empty(sum(map(sum, lengths)))
        outputs = split(gathered, [sum(of_rank) for of_rank in lengths])
        starts = list(accumulate([length for of_rank in lengths for length in of_rank], initial=0))
        pending.append((group.named("row scores").all_gather(outputs, message), numbers, gathered, starts))
    for handle, numbers, gathered, starts in pending:
        handle.wait()
        for place, n in enumerate(numbers):
            of_bucket = tuple(starts[place : -1 : len(numbers)])
            known[n] = whole_scores(scores[n], gathered, of_bucket, buckets[n].tables)
    return known


def _move(bucket: MatrixBucket, operands: Operands, chosen: RowSelection) -> Steps[Update]:
    """What the rows chosen do to the parameters, after they were taken out of the momentum."""
    options, scalars = bucket.options, operands.scalars
    chosen = with_age(chosen, operands.waited)
    selection = bucket.exchange.admit(chosen)
    wait_(operands.waited, chosen, selection)
    bucket.chosen += chosen.count
    if selection is not chosen:
        bucket.refused += chosen.count - selection.count
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


def _apply(target: Target, operands: Operands, active: Tensor, moves: Sequence[Steps[Update]]) -> Steps[None]:
    """Brings the updates that are computed here to the parameters of the target."""
    updates = []
    for move in moves:
        updates.append((yield from move))
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
