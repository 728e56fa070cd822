"""One step of the matrix parameters, from gradients to weights, for every optimizer and every transport.

accumulate + score -> gather scores -> select -> admit -> reserve -> take + decay -> orthogonalize (owner)
-> normalize -> decay weights + add. The buckets' exchanges are interleaved, so that the messages of one are
under way while another computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from dion_core.buckets import MatrixBucket
from dion_core.collectives import Group, split
from dion_core.deferral import wait_, with_age
from dion_core.layout import Axis
from dion_core.ops import accumulate_, take_and_decay_, update_
from dion_core.placements import local_tensor
from dion_core.plan import Plan
from dion_core.presence import Presence
from dion_core.rows import RowSelection, overflowing_rows
from dion_core.selection import whole_scores
from dion_core.state import WAITED
from dion_core.steps import Steps, interleave, run

State = Mapping[Tensor, Mapping[str, Any]]
Gradients = Sequence[Tensor | None]

BUCKETS_IN_FLIGHT = 2


def step_matrices(plan: Plan, state: State, presence: Presence) -> None:
    """Updates the matrix parameters and their state in place. Collective; no value is read on the host."""
    gradients = _agree_on_rows(plan.buckets, [bucket.gradients(presence) for bucket in plan.buckets], state)
    scores = [
        _accumulate(bucket, of_bucket, state, presence)
        for bucket, of_bucket in zip(plan.buckets, gradients, strict=True)
    ]
    known = _gather_scores(plan.buckets, scores)
    selections = [
        bucket.selector.select(score, bucket.tables, bucket.active(presence))
        for bucket, score in zip(plan.buckets, known, strict=True)
    ]
    if plan.session is not None:
        run(plan.session.begin(selections[: len(plan.transported)]))
    stages = [
        _move_and_apply(bucket, of_bucket, selection, state, presence)
        for bucket, of_bucket, selection in zip(plan.buckets, gradients, selections, strict=True)
    ]
    interleave(stages, in_flight=BUCKETS_IN_FLIGHT)


def _agree_on_rows(buckets: Sequence[MatrixBucket], gradients: Sequence[Gradients], state: State) -> list[Gradients]:
    """The gradients, a row that one rank would leave out being NaN on all ranks that hold its columns.

    Only column-split matrices need it, whose rows no rank sees whole; all of a group share one message.
    """
    agreed = list(gradients)
    flags: dict[Group, list[tuple[int, Tensor]]] = {}
    for number, bucket in enumerate(buckets):
        layout = bucket.bucket.layout
        if layout.axis is Axis.COLUMNS:
            left_out = overflowing_rows(
                _local(bucket, state, "momentum"), gradients[number], maximize=bucket.options["maximize"]
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


def _accumulate(bucket: MatrixBucket, gradients: Gradients, state: State, presence: Presence) -> Tensor:
    return accumulate_(
        _local(bucket, state, "momentum"),
        gradients,
        bucket.nonfinite,
        maximize=bucket.options["maximize"],
        proceed=presence.proceed.to(bucket.bucket.device),
    )


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


def _move_and_apply(
    bucket: MatrixBucket, gradients: Gradients, chosen: RowSelection, state: State, presence: Presence
) -> Steps[None]:
    options = bucket.options
    waited = _local(bucket, state, WAITED) if bucket.may_defer else []
    chosen = with_age(chosen, waited)
    selection = bucket.exchange.admit(chosen)
    wait_(waited, chosen, selection)
    bucket.chosen += chosen.count
    bucket.applied += selection.count
    rows = bucket.exchange.reserve(selection)
    take_and_decay_(
        _local(bucket, state, "momentum"),
        gradients,
        selection,
        rows,
        decay=options["momentum"],
        nesterov=options.get("nesterov", False),
        maximize=options["maximize"],
    )
    results = yield from bucket.exchange.orthogonalize(rows, selection, bucket.orthogonalizer)
    normalizer = bucket.rule.normalizer
    second_moment = _local(bucket, state, "second_moment") if normalizer.has_second_moment else []
    row_scale = yield from normalizer.row_scale(
        results, selection, second_moment, bucket.bucket, beta2=options.get("beta2", 0.0)
    )
    update_(
        [local_tensor(member.parameter) for member in bucket.members],
        results,
        selection,
        row_scale * bucket.scale,
        learning_rate=options["lr"],
        weight_decay=options["weight_decay"],
        active=bucket.active(presence),
        cautious=options.get("cautious_weight_decay", False),
    )


def _local(bucket: MatrixBucket, state: State, key: str) -> list[Tensor]:
    return [local_tensor(state[member.parameter][key]) for member in bucket.members]
