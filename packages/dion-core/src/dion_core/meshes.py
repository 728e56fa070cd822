"""Which ranks of a mesh hold which part of a tensor: groups of ranks in the order in which their parts lie.

Several axes of a mesh can split one dimension of a tensor (FSDP2 over tensor parallelism). Each divides what those
before it have left, in an order that need not be that of the mesh: a `_StridedShard` divides after axes to its right.
A rank still holds one piece of the dimension; only the order of the pieces is another than that of the ranks.

Example: 8 rows over a (2, 2) mesh with (_StridedShard(0, split_factor=2), Shard(0)). The second axis divides first, so
that mesh places (0, 0), (1, 0), (0, 1), (1, 1), which are ranks 0, 2, 1, 3, hold two rows each in this order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, placement_types

from dion_core.collectives import Group, SoloGroup, gathered_parts
from dion_core.layout import Segment, shard_segments
from dion_core.process_groups import ordered_group_of, part_of_all

# Private in every version of torch so far, and from some version on not derived from Shard.
_StridedShard: type | None = getattr(placement_types, "_StridedShard", None)


def split_dim(placement: object, ndim: int) -> int | None:
    """The dimension that a placement splits, counted from the front; None if it splits none."""
    strided = _StridedShard is not None and isinstance(placement, _StridedShard)
    dim: int | None = getattr(placement, "dim", None) if strided or type(placement) is Shard else None
    return None if dim is None else dim % ndim


@dataclass(frozen=True)
class MeshAxes:
    """What the axes of a mesh do to a tensor.

    Attributes:
        mesh: of the tensor.
        copies: the axes along which ranks hold equal parts.
        splits: for every dimension that is split the axes that do so, the one that divides first in front.
    """

    mesh: DeviceMesh
    copies: tuple[int, ...]
    splits: dict[int, tuple[int, ...]]

    def group(self, axes: Sequence[int]) -> Group:
        """The ranks that differ from this one along the given axes alone, the last axis changing fastest."""
        return axes_group(self.mesh, axes)

    def ranks(self, axes: Sequence[int]) -> tuple[int, ...]:
        """The global numbers of those ranks."""
        return _line(self.mesh, axes)

    def segments(self, dim: int, length: int) -> tuple[Segment, ...]:
        """The (offset, length) that each rank of `group(splits[dim])` holds of the dimension, ascending."""
        pieces: tuple[Segment, ...] = ((0, length),)
        for axis in self.splits.get(dim, ()):
            size = self.mesh.size(axis)
            pieces = tuple((start + o, n) for start, left in pieces for o, n in shard_segments(left, size))
        return pieces

    def held(self, dim: int, length: int) -> Segment:
        """The (offset, length) that this rank holds of the dimension."""
        axes = self.splits.get(dim, ())
        coordinate, place = self.mesh.get_coordinate(), 0
        assert coordinate is not None
        for axis in axes:
            place = place * self.mesh.size(axis) + coordinate[axis]
        return self.segments(dim, length)[place]


def mesh_axes(tensor: DTensor) -> MeshAxes | None:
    """What the axes of a tensor's mesh do to it; None where a placement is not known. Axes of one rank do nothing."""
    mesh, copies, splits = tensor.device_mesh, list[int](), dict[int, tuple[int, ...]]()
    for axis in reversed(range(mesh.ndim)):
        placement = tensor.placements[axis]
        dim = split_dim(placement, tensor.ndim)
        if mesh.size(axis) == 1:
            continue
        if placement == Replicate():
            copies.insert(0, axis)
        elif dim is None:
            return None
        else:
            after = splits.get(dim, ())
            factor = getattr(placement, "split_factor", 1)
            # It divides what the axes to its right have left that make up the factor.
            place = [n for n in range(len(after) + 1) if math.prod(map(mesh.size, after[:n])) == factor]
            if not place:
                return None
            splits[dim] = (*after[: place[0]], axis, *after[place[0] :])
    return MeshAxes(mesh, tuple(copies), splits)


def whole_tensor(tensor: DTensor) -> Tensor:
    """The whole tensor on every rank, wherever its parts lie. Collective.

    `full_tensor` takes the ranks of every axis to ascend. Where they do not, it puts parts in the places of others.

    Example: 4 rows with Shard(0) on a mesh of ranks 1, 0. Rank 1 holds the first two, which come first here; torch
    numbers the ranks of a process group in ascending order and has them come last.
    """
    axes = mesh_axes(tensor)
    if axes is None:
        return tensor.full_tensor()  # not as a parameter of these optimizers lies
    part = tensor.to_local().detach()
    for dim, of_dim in axes.splits.items():
        lengths = [length for _, length in axes.segments(dim, tensor.shape[dim])]
        group = axes.group(of_dim).named("a whole tensor")
        part = torch.cat(gathered_parts(part, dim, lengths, group), dim)
    return part


def mesh_group(mesh: DeviceMesh) -> Group:
    """All ranks of a mesh as one group, in the order of the mesh. Collective where that group does not exist yet."""
    return axes_group(mesh, range(mesh.ndim))


def axes_group(mesh: DeviceMesh, axes: Sequence[int]) -> Group:
    """The ranks that differ from this one along the axes alone, the last one changing fastest. Collective as above."""
    ranks, wide = _line(mesh, axes), [axis for axis in axes if mesh.size(axis) > 1]
    if not wide:
        return SoloGroup()
    if (part := part_of_all(ranks)) is not None:  # needs no process group
        return part
    if len(wide) == 1:
        return ordered_group_of(mesh.get_group(wide[0]), ranks)
    return ordered_group_of(_process_group(ranks), ranks)


def _line(mesh: DeviceMesh, axes: Sequence[int]) -> tuple[int, ...]:
    coordinate, ascending = mesh.get_coordinate(), sorted(axes)
    assert coordinate is not None
    line = mesh.mesh[tuple(slice(None) if axis in axes else coordinate[axis] for axis in range(mesh.ndim))]
    ranks: list[int] = line.permute([ascending.index(axis) for axis in axes]).flatten().tolist()
    return tuple(ranks)


_made: tuple[dist.ProcessGroup | None, dict[tuple[int, ...], dist.ProcessGroup]] = (None, {})
"""The process groups that were made here, under the default group of that time."""


def _process_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """A process group of these global ranks, made once. `mesh._flatten` would need names for the axes of the mesh."""
    global _made
    world = dist.group.WORLD
    assert world is not None
    if len(ranks) == dist.get_world_size():
        return world
    if _made[0] is not world:
        _made = (world, {})
    known, key = _made[1], tuple(sorted(ranks))
    if key not in known:
        # A backend that only pretends, for planning, has no options.
        timeout = getattr(world._get_backend(world._device_types[0]).options, "_timeout", None)
        group = dist.new_group(list(key), timeout=timeout, use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        known[key] = group
    return known[key]
