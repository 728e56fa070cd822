"""The first communication of an optimizer: all ranks compare their plans, and all raise alike if they differ."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from dion_core.collectives import Group
from dion_core.transport import TransportError

HASH_BYTES = 32


def compare_plans(plan: Sequence[str], failure: Exception | None, group: Group, device: torch.device) -> None:
    """Returns on every rank of the group, or raises on every rank.

    One gather of a fixed-size hash; only if hashes differ (or a rank failed) do all gather the full plans.

    Args:
        plan: what this rank is going to do, a line a bucket. Lines hold nothing that may differ by rank.
        failure: an error of this rank alone; every other rank is told of it.
        group: the ranks that step together.
        device: of the messages.

    Raises:
        Exception: `failure` itself, on the rank that had it.
        TransportError: on the others, naming the first line that differs and the ranks, or the ranks that failed.
    """
    lines = [f"error {type(failure).__name__}: {failure}"] if failure is not None else list(plan)
    text = "\n".join(lines).encode()
    digest = hashlib.sha256(text).digest()
    hashes = _gather(digest, [HASH_BYTES] * group.size, group, device)
    differ = any(other != digest for other in hashes)
    if differ:
        lengths = _gather(len(text).to_bytes(8, "little"), [8] * group.size, group, device)
        sizes = [int.from_bytes(length, "little") for length in lengths]
        plans = [plan.decode().split("\n") for plan in _gather(text, sizes, group, device)]
    if failure is not None:
        raise failure
    if differ:
        raise TransportError(_difference(plans, group))


def _gather(message: bytes, sizes: Sequence[int], group: Group, device: torch.device) -> list[bytes]:
    outputs = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    group.named("the preflight").all_gather(outputs, _tensor(message, device)).wait()
    return [bytes(output.tolist()) for output in outputs]


def _tensor(message: bytes, device: torch.device) -> Tensor:
    return torch.tensor(list(message), dtype=torch.uint8, device=device)


def _difference(plans: Sequence[Sequence[str]], group: Group) -> str:
    failed = {rank: plan[0] for rank, plan in enumerate(plans) if plan[0].startswith("error ")}
    if failed:
        reasons = "; ".join(f"rank {group.ranks[rank]}: {why[6:]}" for rank, why in failed.items())
        return f"the optimizer could not be built on every rank: {reasons}"
    for number in range(max(map(len, plans))):
        lines = [plan[number] if number < len(plan) else "(nothing)" for plan in plans]
        if len(set(lines)) > 1:
            by_line: dict[str, list[int]] = {}
            for rank, line in enumerate(lines):
                by_line.setdefault(line, []).append(group.ranks[rank])
            told = "; ".join(f"ranks {ranks} have {line!r}" for line, ranks in by_line.items())
            return f"ranks disagree about the optimizer's plan, line {number}: {told}"
    raise AssertionError("hashes differ and plans do not")
