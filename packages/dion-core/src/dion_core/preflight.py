"""The first communication of an optimizer: all ranks compare their plans, and all raise alike if they differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from dion_core.collectives import Group
from dion_core.transport import TransportError

HASH_BYTES, SIZE_BYTES = 32, 8
_FAILED = "failed: "
_SEPARATOR = b"\0"

Own = Mapping[tuple[int, ...], Sequence[str]]
"""By set of global ranks what they alone are going to do, a line a bucket: other ranks may have other matrices."""
_OwnText = dict[str, str]
"""By the ranks, as text, their lines, or the hash of them."""


def compare_plans(plan: Sequence[str], group: Group, device: torch.device, *, own: Own | None = None) -> None:
    """Returns on every rank of the group, or raises on every rank.

    A gather of fixed-size hashes, and one of a hash for each set of ranks of `own` if there are any; only where they
    differ do all gather the full plans.

    Args:
        plan: what this rank is going to do, a line a bucket. Lines hold nothing that may differ by rank.
        group: the ranks that step together.
        device: of the messages.
        own: what has to be the same on those ranks alone, of which this one is one.

    Raises:
        TransportError: naming the first line that differs and its ranks, or the ranks that have failed.
    """
    texts = {_key(ranks): "\n".join(lines) for ranks, lines in (own or {}).items()}
    _compare("\n".join(plan), texts, group, device)


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
    plans, owns = _differing("\n".join([kind, *lines]), {}, group, device)
    if any(plan[0] != kind for plan in plans):
        raise TransportError(_difference(plans, owns, group))
    return [plan[1:] for plan in plans] or [list(lines)] * group.size


def report_failure(error: Exception, group: Group, device: torch.device) -> None:
    """Takes part in the others' comparison, in place of a plan, so that they raise too."""
    with suppress(TransportError):  # which says the same to the others
        _compare(f"{_FAILED}{type(error).__name__}: {error}", {}, group, device)


def _compare(common: str, own: _OwnText, group: Group, device: torch.device) -> None:
    plans, owns = _differing(common, own, group, device)
    if plans:
        raise TransportError(_difference(plans, owns, group))


def _differing(
    common: str, own: _OwnText, group: Group, device: torch.device
) -> tuple[list[list[str]], list[_OwnText]]:
    """The plans of all ranks, and those for sets of ranks, if they differ; else nothing."""
    hashes = json.dumps({ranks: _digest(text).hex() for ranks, text in own.items()}).encode() if own else b""
    first = _gather(_digest(common) + len(hashes).to_bytes(SIZE_BYTES, "little"), group, device)
    own_hashes = [_own(text) for text in _gather_texts(hashes, [each[HASH_BYTES:] for each in first], group, device)]
    if len({each[:HASH_BYTES] for each in first}) == 1 and not _odd_ones(own_hashes, group):
        return [], []
    text = common.encode() + _SEPARATOR + json.dumps(own).encode()
    sizes = _gather(len(text).to_bytes(SIZE_BYTES, "little"), group, device)
    plans, owns = [], []
    for each in _gather_texts(text, sizes, group, device):
        of_rank, own_text = each.split(_SEPARATOR)
        plans.append(of_rank.decode().split("\n"))
        owns.append(_own(own_text))
    return plans, owns


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _key(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _own(text: bytes) -> _OwnText:
    texts: _OwnText = json.loads(text) if text else {}
    return texts


def _odd_ones(owns: Sequence[_OwnText], group: Group) -> list[str]:
    """The sets of ranks of which not all have the same text for them."""
    place = {str(rank): place for place, rank in enumerate(group.ranks)}
    return [
        ranks
        for ranks in dict.fromkeys(ranks for of_rank in owns for ranks in of_rank)
        if len({owns[place[rank]].get(ranks) for rank in ranks.split(", ")}) > 1
    ]


def _gather(message: bytes, group: Group, device: torch.device) -> list[bytes]:
    """The messages of all ranks, of one length."""
    return _gather_sized(message, [len(message)] * group.size, group, device)


def _gather_texts(message: bytes, sizes: Sequence[bytes], group: Group, device: torch.device) -> list[bytes]:
    """The messages of all ranks, whose lengths all know; sends nothing if all are empty."""
    lengths = [int.from_bytes(size, "little") for size in sizes]
    return _gather_sized(message, lengths, group, device) if any(lengths) else [b""] * group.size


def _gather_sized(message: bytes, sizes: Sequence[int], group: Group, device: torch.device) -> list[bytes]:
    outputs = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    group.named("the preflight").all_gather(outputs, _tensor(message, device)).wait()
    return [bytes(output.tolist()) for output in outputs]


def _tensor(message: bytes, device: torch.device) -> Tensor:
    return torch.tensor(list(message), dtype=torch.uint8, device=device)


def _difference(plans: Sequence[Sequence[str]], owns: Sequence[_OwnText], group: Group) -> str:
    failed = {rank: plan[0] for rank, plan in enumerate(plans) if plan[0].startswith(_FAILED)}
    if failed:
        reasons = "; ".join(f"rank {group.ranks[rank]}: {why.removeprefix(_FAILED)}" for rank, why in failed.items())
        return f"the optimizer could not be built on every rank: {reasons}"
    told = _first_difference(dict(sorted(zip(group.ranks, plans, strict=True))))
    if told:
        return f"ranks disagree about the optimizer's plan, {told}"
    ranks = _odd_ones(owns, group)[0]
    by_rank = {rank: each.get(ranks, "").split("\n") for rank, each in sorted(zip(group.ranks, owns, strict=True))}
    told = _first_difference({rank: lines for rank, lines in by_rank.items() if str(rank) in ranks.split(", ")})
    return f"ranks disagree about the optimizer's plan for what lies on ranks [{ranks}] alone, {told}"


def _first_difference(plans: Mapping[int, Sequence[str]]) -> str:
    """The first line in which the plans differ, and who has what; "" if there is none."""
    for number in range(max(map(len, plans.values()))):
        by_line: dict[str, list[int]] = {}
        for rank, plan in plans.items():
            by_line.setdefault((plan[number] if number < len(plan) else "") or "(nothing)", []).append(rank)
        if len(by_line) > 1:
            told = "; ".join(f"ranks {ranks} have {line!r}" for line, ranks in by_line.items())
            return f"line {number}: {told}"
    return ""
