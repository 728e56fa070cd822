"""The state that a rank keeps of the parameters it owns: views of flat buffers, and how the whole of it is gathered.

Of every bucket and every kind of state ("momentum", "second_moment", "exp_avg", ...) a rank has one buffer, in which
the tensors of its parameters lie back to back, with the shapes and strides that they would have alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dion_core.collectives import Group, num_bytes, split
from dion_core.placements import local_tensor
from dion_core.rules import Rule
from dion_core.shard_layout import ALIGNMENT, FlatBucket
from dion_core.state import State, new_state


@dataclass(frozen=True)
class OwnedBucket:
    """Parameters whose state lies in the same flat buffers; all have the same kinds of state.

    Attributes:
        parameters: in the order of the walk.
        names: of them.
        templates: the state of each, in shapes, strides and dtypes alone.
        flat: which rank keeps what, and where.
    """

    parameters: tuple[Tensor, ...]
    names: tuple[str, ...]
    templates: tuple[State, ...]
    flat: FlatBucket

    def kept_by(self, rank: int) -> list[tuple[Tensor, State]]:
        """The parameters of the rank with their templates, as they lie in its buffers."""
        return [(self.parameters[place], self.templates[place]) for place in self.flat.kept_by(rank)]


@dataclass(frozen=True)
class Ownership:
    """The buckets of all parameters so far, and the cost of every rank."""

    buckets: tuple[OwnedBucket, ...]
    loads: tuple[int, ...]

    @cached_property
    def owners(self) -> dict[Tensor, int]:
        """The rank that keeps each parameter."""
        return {
            parameter: rank
            for bucket in self.buckets
            for parameter, rank in zip(bucket.parameters, bucket.flat.ranks, strict=True)
        }


def template(parameter: Tensor, group: Mapping[str, Any], rule: Rule) -> State:
    """The state of a parameter before its first step, on the meta device."""
    local = local_tensor(parameter)
    like = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="meta")
    return new_state(like, group, rule)


def place_flat(bucket: OwnedBucket, rank: int, states: dict[Tensor, State]) -> None:
    """The state of what the rank keeps lies in flat buffers: zeros, and the values that `states` had already."""
    kept = bucket.kept_by(rank)
    for key in kept[0][1] if kept else ():
        present = [states.get(parameter, {}).get(key) for parameter, _ in kept]
        templates = [of_parameter[key] for _, of_parameter in kept]
        starts, length = _starts(templates)
        if _lie_flat(present, starts, length):
            continue
        buffer = torch.zeros(length, dtype=templates[0].dtype, device=local_tensor(kept[0][0]).device)
        for (parameter, _), like, start, value in zip(kept, templates, starts, present, strict=True):
            view = buffer.as_strided(like.shape, like.stride(), start)
            if value is not None:
                view.copy_(value)
            states[parameter] = {**states.get(parameter, {}), key: view}


def _starts(templates: Sequence[Tensor]) -> tuple[list[int], int]:
    """The element at which each of the tensors starts in their buffer, and its length."""
    starts, end = [], 0
    for each in templates:
        starts.append(end)
        end += -(-each.numel() // ALIGNMENT) * ALIGNMENT
    return starts, end


def _lie_flat(tensors: Sequence[Tensor | None], starts: Sequence[int], length: int) -> bool:
    """Whether all are there, in one buffer of that length, at those places."""
    present = [tensor for tensor in tensors if tensor is not None]
    if len(present) < len(tensors):
        return False
    buffers = {tensor.untyped_storage().data_ptr() for tensor in present}
    whole = present[0].untyped_storage().nbytes() == length * present[0].itemsize
    return len(buffers) == 1 and whole and [tensor.storage_offset() for tensor in present] == list(starts)


def gather_state(
    bucket: OwnedBucket, group: Group, states: Mapping[Tensor, State], to: int | None
) -> Iterator[tuple[Tensor, State]]:
    """The parameters of the bucket with their whole state on the CPU, on one rank or on all. Collective.

    Args:
        bucket: of the parameters.
        group: the ranks that keep its state.
        states: what this rank keeps.
        to: the rank of the group that gets it, the others getting nothing; None: all of them.
    """
    of_ranks = [bucket.kept_by(rank) for rank in range(group.size)]
    sizes = [sum(num_bytes(like) for _, each in kept for like in each.values()) for kept in of_ranks]
    device = local_tensor(bucket.parameters[0]).device
    pieces = [_bytes(states[parameter][key]) for parameter, each in of_ranks[group.rank] for key in each]
    message = torch.cat([*pieces, torch.empty(0, dtype=torch.uint8, device=device)])
    named = group.named(f"the state of {bucket.names[0]} and {len(bucket.names) - 1} more")
    if to is None:
        received = message.new_empty(sum(sizes))
        named.all_gather(split(received, sizes), message).wait()
    else:
        incoming = sizes if group.rank == to else [0] * group.size
        outgoing = [sizes[group.rank] if rank == to else 0 for rank in range(group.size)]
        received = message.new_empty(sum(incoming))
        named.all_to_all(received, message, incoming, outgoing).wait()
    if to in (None, group.rank):
        yield from _unpacked([each for kept in of_ranks for each in kept], received.cpu())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _unpacked(kept: Sequence[tuple[Tensor, State]], received: Tensor) -> Iterator[tuple[Tensor, State]]:
    start = 0
    for parameter, templates in kept:
        state = {}
        for key, like in templates.items():
            piece = received[start : start + num_bytes(like)].clone()  # a start of its own suits every dtype
            state[key] = piece.view(like.dtype).view(like.shape)
            start += num_bytes(like)
        yield parameter, state
