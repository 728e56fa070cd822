"""Shards that the user declares: a plain tensor that is a part of a larger one, whose other parts other ranks hold.

For jobs without torch.distributed, and for frameworks that shard in a way of their own. A parameter group says it by
its key "shard"; that of all ranks tile the whole tensor is checked when the optimizer is made (see `tiling`).

Example: rows 5 to 7 of eight, on the second of two ranks:

    {"params": [weight], "shard": DeclaredShard(axis=0, size=8, offset=5)}  # weight has the shape (3, C)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from dion_core.layout import Segment

SHARD = "shard"
"""The group key."""


@dataclass(frozen=True)
class DeclaredShard:
    """Which part of whole tensors the plain tensors of a parameter group are on this rank.

    Attributes:
        axis: the dimension that is divided; counted from the end if below 0.
        size: of the whole tensor along it, the same on all ranks.
        offset: where this rank's part begins; the tensor itself says how long it is.
        ranges: by rank the (offset, length) of the parts, once all ranks know them; set by the optimizer.

    Raises:
        ValueError: a number that cannot be.
    """

    axis: int
    size: int
    offset: int
    ranges: tuple[Segment, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        """Refuses what cannot be."""
        for name, least in (("axis", None), ("size", 0), ("offset", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
                allowed = "a whole number" + (f" >= {least}" if least is not None else "")
                raise ValueError(f"{name}={value!r} of a declared shard is not allowed: {allowed}")

    @property
    def plain(self) -> tuple[int, int, int]:
        """Axis, size and offset, as a state dict has them."""
        return self.axis, self.size, self.offset


def whole_shape(tensor: Tensor, options: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of the whole tensor that a parameter is a part of, by the options of its group."""
    shape, shard = list(tensor.shape), options.get(SHARD)
    if shard is not None:
        shape[shard.axis] = shard.size
    return tuple(shape)


def check_shard_key(options: Mapping[str, Any], where: str) -> None:
    """Raises ValueError where the group key is something else than a declared shard."""
    shard = options.get(SHARD)
    if shard is not None and not isinstance(shard, DeclaredShard):
        raise ValueError(f"{SHARD}={shard!r}{where} is not allowed: None or DeclaredShard(axis, size, offset)")


def check_declared(parameter: Tensor, name: str, options: Mapping[str, Any], num_ranks: int) -> None:
    """Raises ValueError for a parameter that cannot be the part that its group declares, by its name."""
    shard = options.get(SHARD)
    if shard is None:
        return
    if isinstance(parameter, DTensor):
        raise ValueError(f"{name} is a DTensor, which says itself where it lies: {SHARD} is for plain tensors")
    shape = tuple(parameter.shape)
    if not -parameter.ndim <= shard.axis < parameter.ndim:
        raise ValueError(f"{name}: {shard!r} names an axis that shape {shape} does not have")
    end = shard.offset + shape[shard.axis]
    if end > shard.size:
        raise ValueError(f"{name}: {shard!r} of shape {shape} ends at {end}, after the end of the whole tensor")
    if num_ranks == 1 and shape[shard.axis] != shard.size:
        raise ValueError(
            f"{name}: {shard!r} of shape {shape} is not the whole tensor, and no ranks are known that hold the rest: "
            "give group="
        )
