"""The first communication of an optimizer: all ranks compare their plans, and all raise alike if they differ."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from dion_core.collectives import Group
from dion_core.transport import TransportError

HASH_BYTES = 32
_FAILED = "failed: "


def compare_plans(plan: Sequence[str], group: Group, device: torch.device) -> None:
    """Returns on every rank of the group, or raises on every rank.

    One gather of a fixed-size hash; only if hashes differ do all gather the full plans.

    Args:
        plan: what this rank is going to do, a line a bucket. Lines hold nothing that may differ by rank.
        group: the ranks that step together.
        device: of the messages.

    Raises:
        TransportError: naming the first line that differs and its ranks, or the ranks that have failed.
    """
    plans = _exchange(plan, group, device)
    if plans:
        raise TransportError(_difference(plans, group))


def report_failure(error: Exception, group: Group, device: torch.device) -> None:
    """Takes part in the others' comparison, in place of a plan, so that they raise too."""
    _exchange([f"{_FAILED}{type(error).__name__}: {error}"], group, device)


def _exchange(plan: Sequence[str], group: Group, device: torch.device) -> list[list[str]]:
    """The plans of all ranks if they differ, else nothing."""
    text = "\n".join(plan).encode()
    digest = hashlib.sha256(text).digest()
    hashes = _gather(digest, [HASH_BYTES] * group.size, group, device)
    if all(other == digest for other in hashes):
        return []
    lengths = _gather(len(text).to_bytes(8, "little"), [8] * group.size, group, device)
    sizes = [int.from_bytes(length, "little") for length in lengths]
    return [plan.decode().split("\n") for plan in _gather(text, sizes, group, device)]


def _gather(message: bytes, sizes: Sequence[int], group: Group, device: torch.device) -> list[bytes]:
    outputs = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    group.named("the preflight").all_gather(outputs, _tensor(message, device)).wait()
    return [bytes(output.tolist()) for output in outputs]


def _tensor(message: bytes, device: torch.device) -> Tensor:
    return torch.tensor(list(message), dtype=torch.uint8, device=device)


def _difference(plans: Sequence[Sequence[str]], group: Group) -> str:
    failed = {rank: plan[0] for rank, plan in enumerate(plans) if plan[0].startswith(_FAILED)}
    if failed:
        reasons = "; ".join(f"rank {group.ranks[rank]}: {why.removeprefix(_FAILED)}" for rank, why in failed.items())
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
