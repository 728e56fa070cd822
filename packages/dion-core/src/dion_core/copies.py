"""Whether ranks that should hold equal copies of parameters and state do so, bit by bit.

Each rank reduces every tensor to one number, all gather the numbers, and all compare alike. Nothing else is sent, and
no tensor is copied to the host.

Legend: T tensors, W ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dion_core.collectives import Group
from dion_core.declared import SHARD
from dion_core.meshes import split_dim
from dion_core.placements import local_tensor
from dion_core.tiling import is_divided

_CHUNK = 2**22
"""Elements that are reduced at a time, which bounds the memory that is needed."""
_ODD = 0x9E3779B97F4A7C15 - 2**64  # the golden ratio in 64 bits, as a signed number
_WORDS = {1: torch.uint8, 2: torch.int16}
"""By size of an element; longer ones are halved, else two changed highest bits of 64 would always cancel out."""


def fingerprint(tensor: Tensor) -> Tensor:
    """() int64 on the tensor's device: a number that any changed bit changes.

    Elements are taken as whole numbers and summed modulo 2^64 with odd factors that depend on their places: one that
    differs always shows, several that differ cancel out by chance alone, about once in 2^64.
    """
    words = tensor.detach().contiguous().flatten().view(_WORDS.get(tensor.element_size(), torch.int32))
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(words), _CHUNK):
        piece = words[start : start + _CHUNK].long()
        place = torch.arange(start, start + len(piece), device=tensor.device)
        factor = (place + 1) * _ODD
        factor = ((factor ^ (factor >> 31)) * _ODD) | 1
        total += (piece * factor).sum()
    return total


def copied_tensors(
    groups: Sequence[Mapping[str, Any]], names: Mapping[Tensor, str], state: Mapping[Tensor, Mapping[str, Any]]
) -> dict[str, tuple[Tensor, Tensor]]:
    """By name all parameters of the groups and their state, each with its parameter, as `differing_copies` takes them.

    Of declared shards without what is divided among the ranks, of which nobody holds copies: what is left are values a
    row where columns are divided, and counts of steps.
    """
    tensors = {}
    for shard, parameter in [(group.get(SHARD), each) for group in groups for each in group["params"]]:
        if shard is None:
            tensors[names[parameter]] = parameter, parameter
        for key, value in state.get(parameter, {}).items():
            if shard is None or not is_divided(key, value, shard.axis % parameter.ndim):
                tensors[f"{names[parameter]} ({key})"] = value, parameter
    return tensors


def differing_copies(
    tensors: Mapping[str, tuple[Tensor, Tensor]], group: Group, replicas: Group, device: torch.device
) -> list[str]:
    """Which copies differ, a line each, alike on all ranks; empty if none does. Collective, waits for the device.

    Args:
        tensors: by name a parameter or a tensor of its state, and that parameter; the same names in the same order on
            all ranks.
        group: the ranks that hold them.
        replicas: the ranks that hold copies of plain tensors.
        device: of the message.
    """
    if group.size == 1 or not tensors:
        return []
    sums = torch.stack([fingerprint(local_tensor(tensor)).to(device) for tensor, _ in tensors.values()])
    own = group.ranks[group.rank]
    first = [_first_holder(tensor, parameter, replicas, own) for tensor, parameter in tensors.values()]
    here = torch.stack([torch.tensor(first, device=device), sums])
    gathered = here.new_empty(group.size, *here.shape)
    group.named("the comparison of copies").all_gather(gathered.unbind(), here).wait()
    by_rank = sorted(zip(group.ranks, gathered.tolist(), strict=True))
    lines = []
    for number, name in enumerate(tensors):
        found: dict[int, dict[int, list[int]]] = {}
        for rank, (firsts, fingerprints) in by_rank:
            found.setdefault(firsts[number], {}).setdefault(fingerprints[number], []).append(rank)
        lines += [
            f"{name} differs: {' and '.join(f'ranks {same}' for same in copies.values())}"
            for copies in found.values()
            if len(copies) > 1
        ]
    return lines


def _first_holder(tensor: Tensor, parameter: Tensor, replicas: Group, own: int) -> int:
    """The lowest global rank among those that hold the same part of the tensor as this one, whose number is `own`."""
    if not isinstance(parameter, DTensor):
        return min(replicas.ranks) if replicas.size > 1 else own
    mesh = parameter.device_mesh
    if not isinstance(tensor, DTensor):  # a count of steps, say
        return int(mesh.mesh.min())
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    split = [split_dim(place, tensor.ndim) is not None for place in tensor.placements]
    copies = mesh.mesh[tuple(place if cut else slice(None) for place, cut in zip(coordinate, split, strict=True))]
    return int(copies.min())
