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
_SEPARATOR = b"\0"
_Plan = list[list[str]]


Own = tuple[Sequence[str], Sequence[str]]
"""Which matrices a rank has that others may not have, and what it is going to do with them, a line a bucket."""


def compare_plans(plan: Sequence[str], group: Group, device: torch.device, *, own: Own = ((), ())) -> None:
    """Returns on every rank of the group, or raises on every rank.

    One gather of fixed-size hashes; only if they differ do all gather the full plans.

    Args:
        plan: what this rank is going to do, a line a bucket. Lines hold nothing that may differ by rank.
        group: the ranks that step together.
        device: of the messages.
        own: what may differ by rank, and has to be the same only on ranks that have the same matrices.

    Raises:
        TransportError: naming the first line that differs and its ranks, or the ranks that have failed.
    """
    plans = _exchange([plan, *own], group, device)
    if plans:
        raise TransportError(_difference(plans, group))


def gather_lines(kind: str, lines: Sequence[str], group: Group, device: torch.device) -> list[list[str]]:
    """The lines of all ranks, by rank. Collective; meets the other exchanges of this module without harm.

    Args:
        kind: what the lines are, the same on every rank.
        lines: of this rank.
        group: the ranks that step together.
        device: of the messages.

    Raises:
        TransportError: other ranks have something else to say, or have failed.
    """
    plans = _exchange([[kind, *lines], (), ()], group, device)
    if any(common[0] != kind for common, *_ in plans):
        raise TransportError(_difference(plans, group))
    return [common[1:] for common, *_ in plans] or [list(lines)] * group.size


def report_failure(error: Exception, group: Group, device: torch.device) -> None:
    """Takes part in the others' comparison, in place of a plan, so that they raise too."""
    _exchange([[f"{_FAILED}{type(error).__name__}: {error}"], (), ()], group, device)


def _exchange(parts: Sequence[Sequence[str]], group: Group, device: torch.device) -> list[_Plan]:
    """The plans of all ranks (common lines, matrices of its own, lines for those) if they differ, else nothing."""
    texts = ["\n".join(lines).encode() for lines in parts]
    digest = b"".join(hashlib.sha256(text).digest() for text in texts)
    hashes = _gather(digest, [len(digest)] * group.size, group, device)
    by_rank = [(each[:HASH_BYTES], each[HASH_BYTES:-HASH_BYTES], each[-HASH_BYTES:]) for each in hashes]
    if len({common for common, _, _ in by_rank}) == 1 and len({(has, does) for _, has, does in by_rank}) == len(
        {has for _, has, _ in by_rank}
    ):
        return []
    text = _SEPARATOR.join(texts)
    lengths = _gather(len(text).to_bytes(8, "little"), [8] * group.size, group, device)
    sizes = [int.from_bytes(length, "little") for length in lengths]
    return [
        [part.decode().split("\n") for part in each.split(_SEPARATOR)] for each in _gather(text, sizes, group, device)
    ]


def _gather(message: bytes, sizes: Sequence[int], group: Group, device: torch.device) -> list[bytes]:
    outputs = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    group.named("the preflight").all_gather(outputs, _tensor(message, device)).wait()
    return [bytes(output.tolist()) for output in outputs]


def _tensor(message: bytes, device: torch.device) -> Tensor:
    return torch.tensor(list(message), dtype=torch.uint8, device=device)


def _difference(whole: Sequence[_Plan], group: Group) -> str:
    plans = [plan for plan, _, _ in whole]
    failed = {rank: plan[0] for rank, plan in enumerate(plans) if plan[0].startswith(_FAILED)}
    if failed:
        reasons = "; ".join(f"rank {group.ranks[rank]}: {why.removeprefix(_FAILED)}" for rank, why in failed.items())
        return f"the optimizer could not be built on every rank: {reasons}"
    # Ranks with the same matrices have the same plan for them.
    alike = [[rank for rank in range(group.size) if whole[rank][1] == matrices] for _, matrices, _ in whole]
    for ranks, of_ranks in ((range(group.size), plans), *((ranks, [whole[r][2] for r in ranks]) for ranks in alike)):
        for number in range(max(map(len, of_ranks))):
            lines = [plan[number] if number < len(plan) else "(nothing)" for plan in of_ranks]
            if len(set(lines)) > 1:
                by_line: dict[str, list[int]] = {}
                for rank, line in zip(ranks, lines, strict=True):
                    by_line.setdefault(line, []).append(group.ranks[rank])
                told = "; ".join(f"ranks {ranks} have {line!r}" for line, ranks in by_line.items())
                return f"ranks disagree about the optimizer's plan, line {number}: {told}"
    raise AssertionError("hashes differ and plans do not")
