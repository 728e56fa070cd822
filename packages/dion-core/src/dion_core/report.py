"""What an optimizer planned and what happened, as plain data of this rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dion_core.buckets import MatrixBucket
from dion_core.collectives import num_bytes
from dion_core.delivery import Target
from dion_core.ownership import imbalance, most_at_once
from dion_core.placements import local_tensor
from dion_core.plan import Plan
from dion_core.state import WAITED, State
from dion_core.transport import Traffic

Report = dict[str, Any]

TABLE_BYTES = 64
"""At most, for each row of a bucket whose score is known here: scores, indices, places and factors of a step."""


def make_report(
    plan: Plan, states: Mapping[Tensor, State], num_steps: int, skipped: Tensor, past: Sequence[int]
) -> Report:
    """The report of this rank, JSON-serializable; row and step counts start again from 0.

    Reading the counters waits for the device; nothing is communicated.

    Args:
        plan: of the optimizer, with the counters of its buckets.
        states: of its parameters.
        num_steps: how many steps were taken since the last report.
        skipped: 0-dim counter of those that were skipped; set to 0.
        past: rows chosen, applied and left out as not finite under earlier plans, since the last report.
    """
    buckets = [_bucket(target, [plan.buckets[number] for number in target.sources]) for target in plan.targets]
    rows = _rows(buckets, states, past)
    num_skipped = int(skipped)
    skipped.zero_()
    transport = None
    if plan.choice is not None:
        choice = plan.choice
        transport = {"name": choice.name, "options": repr(choice.transport), "reason": choice.reason}
    return {
        "transport": transport,
        "buckets": buckets,
        "owner_load": [
            {"ranks": list(ranks), "cost": list(load), "imbalance": imbalance(load)}
            for ranks, load in plan.loads.items()
        ],
        "state": _state(plan, states),
        "values": [{"name": each.name, "traffic": _traffic(each.traffic())} for each in plan.shared],
        "bytes_per_step": sum(bucket["traffic"]["bytes"] for bucket in buckets)
        + sum(each.traffic().num_bytes for each in plan.shared),
        "workspace_bytes": _workspace(plan, buckets),
        "host_reads_per_step": plan.session.host_reads if plan.session is not None else 0,
        "host_waits": plan.session.host_waits if plan.session is not None else 0,
        "rows": rows,
        "steps": {"taken": num_steps - num_skipped, "skipped": num_skipped},
    }


def _workspace(plan: Plan, reports: Sequence[Report]) -> int:
    """Bytes of GPU memory that a step needs besides what stays: 0 where it is not known.

    That is on a CPU, and with orthogonalizers that do not say what they need.
    """
    inside = []
    for target in plan.targets:
        entry, bucket = target.bucket, target.bucket.bucket
        of_orthogonalizer = getattr(entry.orthogonalizer, "workspace", None)
        sample = torch.empty(0, bucket.shape[1], dtype=bucket.dtype, device=bucket.device)
        owned = len(bucket.owned(bucket.rank))
        known = of_orthogonalizer(sample, owned, bucket.total_rows) if of_orthogonalizer is not None else 0
        if not known:
            return 0
        inside.append(known)
    return workspace_bytes(plan, reports, inside)


def workspace_bytes(plan: Plan, reports: Sequence[Report], inside: Sequence[int]) -> int:
    """Bytes that a step needs besides what stays.

    Args:
        plan: of the optimizer.
        reports: of its buckets, as in the report.
        inside: what the orthogonalizer needs for each.
    """
    buffers = []
    for target, report in zip(plan.targets, reports, strict=True):
        bucket, gathers = target.bucket.bucket, target.bucket.selector.needs_all_scores
        rows = bucket.shape[0] if gathers else bucket.layout.max_rows(bucket.group.rank)
        tables = TABLE_BYTES * bucket.num_matrices * (rows + bucket.layout.group.size)
        buffers.append(report["traffic"]["bytes"] + tables)
    return most_at_once(list(zip(buffers, inside, strict=True)))


def _rows(buckets: Sequence[Report], states: Mapping[Tensor, State], past: Sequence[int]) -> Report:
    """Rows of all buckets, under earlier plans too, and those that wait now."""
    names = ("chosen", "applied", "nonfinite")
    rows = {
        name: sum(bucket["rows"][name] for bucket in buckets) + before for name, before in zip(names, past, strict=True)
    }
    rows["deferred"] = rows["chosen"] - rows["applied"]
    waited = [local_tensor(state[WAITED]) for state in states.values() if WAITED in state]
    rows["waiting"] = sum(int((steps > 0).sum()) for steps in waited)
    rows["oldest_waiting"] = max((int(steps.max()) for steps in waited if steps.numel()), default=0)
    return rows


def _state(plan: Plan, states: Mapping[Tensor, State]) -> Report:
    """Which state is on this rank, and how much of it."""
    here = {member.name: states[member.parameter] for member in plan.members if states.get(member.parameter)}
    tensors = [local_tensor(tensor) for state in here.values() for tensor in state.values()]
    return {"mode": plan.state_mode, "parameters": list(here), "bytes": sum(map(num_bytes, tensors))}


def _traffic(traffic: Traffic) -> Report:
    return {
        "forward": list(traffic.forward),
        "back": list(traffic.back),
        "outer_forward": [list(each) for each in traffic.outer_forward],
        "outer_back": [list(each) for each in traffic.outer_back],
        "bytes": traffic.num_bytes,
        "collectives": traffic.collectives,
    }


def _bucket(target: Target, sources: Sequence[MatrixBucket]) -> Report:
    """Of matrices that are updated together; rows are counted where their state is."""
    entry, counts = target.bucket, dict.fromkeys(("chosen", "applied", "nonfinite"), 0)
    for source in sources:
        counters = {"chosen": source.chosen, "applied": source.applied, "nonfinite": source.nonfinite}
        for name, by_matrix in counters.items():
            counts[name] += int(by_matrix.sum())
            by_matrix.zero_()
    counts["deferred"] = counts["chosen"] - counts["applied"]
    bucket = entry.bucket
    return {
        "name": bucket.name,
        "shape": list(bucket.shape),
        "parameters": [part.name for part in entry.parts],
        "axis": str(bucket.layout.axis),
        "outer_axes": [{"axis": str(each.axis), "ranks": list(each.group.ranks)} for each in bucket.layout.outer],
        "wire_dtype": str(bucket.dtype).removeprefix("torch."),
        "selector": repr(entry.selector),
        "exchange": type(entry.exchange if entry.has_state else target.delivery).__name__,
        "owners": list(bucket.owners),
        "total_rows": bucket.total_rows,
        "traffic": _traffic(target.delivery.traffic(entry)),
        "rows": counts,
    }
