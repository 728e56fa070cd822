"""Ranks that need not exist: their places on nodes, and parameters that lie on them as FSDP2, HSDP, DDP or TP put them.

Legend: W ranks; a mesh is (replicate, shard, tensor), the last one inside of nodes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from dion_core.collectives import Group, Silence, SoloGroup
from dion_core.prediction.models import Groups
from dion_core.process_groups import group_of, stand_in
from dion_core.views import is_flattened


@dataclass(frozen=True)
class MeshShape:
    """How W = nodes * gpus_per_node ranks share the parameters.

    Attributes:
        replicate: ranks with equal copies (DDP, the outer axis of HSDP).
        shard: ranks among which rows are split (FSDP2).
        tensor: ranks of tensor parallelism: rows are split where there are as many as columns or more, else columns;
            of convolutions the outputs.

    Raises:
        ValueError: the axes do not multiply to W.
    """

    nodes: int = 1
    gpus_per_node: int = 1
    replicate: int = 1
    shard: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        if min(self.nodes, self.gpus_per_node, *self.axes) < 1 or math.prod(self.axes) != self.world_size:
            raise ValueError(
                f"replicate {self.replicate} * shard {self.shard} * tensor {self.tensor} ranks must be nodes "
                f"{self.nodes} * {self.gpus_per_node} GPUs a node = {self.world_size}"
            )

    @classmethod
    def of(
        cls,
        nodes: int,
        gpus_per_node: int,
        *,
        replicate: int | None = None,
        shard: int | None = None,
        tensor: int | None = None,
    ) -> MeshShape:
        """The mesh whose axes that are not given are 1, and take what the others leave: shard first, else replicate."""
        world_size, given = nodes * gpus_per_node, (replicate or 1) * (shard or 1) * (tensor or 1)
        left = max(1, world_size // given)
        if shard is None:
            return cls(nodes, gpus_per_node, replicate or 1, left, tensor or 1)
        return cls(nodes, gpus_per_node, replicate or left, shard, tensor or 1)

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def axes(self) -> tuple[int, int, int]:
        return self.replicate, self.shard, self.tensor

    def node(self, rank: int) -> int:
        """The node on which a rank runs."""
        return rank // self.gpus_per_node

    def describe(self) -> str:
        """A line such as "16 ranks: 2 nodes x 8 GPUs; shard 16"."""
        names = zip(("replicate", "shard", "tensor"), self.axes, strict=True)
        axes = ", ".join(f"{name} {size}" for name, size in names if size > 1)
        where = f"{_counted(self.nodes, 'node')} x {_counted(self.gpus_per_node, 'GPU')}"
        return f"{_counted(self.world_size, 'rank')}: {where}" + (f"; {axes}" if axes else "")


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


class Seat(Silence):
    """A `Group` of ranks of which this process can be each in turn; its collectives do nothing."""

    def __init__(self, ranks: Sequence[int], taken: int) -> None:
        self.ranks = tuple(ranks)
        self.take(taken)

    def take(self, rank: int) -> None:
        """Makes this process that global rank, which is one of `ranks`."""
        self._place = self.ranks.index(rank)

    @property
    def rank(self) -> int:
        return self._place

    @property
    def size(self) -> int:
        return len(self.ranks)


@contextmanager
def as_rank(shape: MeshShape, rank: int) -> Iterator[DeviceMesh | None]:
    """Makes this process rank `rank` of W for the duration of the block, in groups that are a `Seat`.

    Gives the mesh of the axes that are longer than 1, or None where no axis splits the parameters.

    Raises:
        RuntimeError: torch.distributed is in use already.
    """
    if shape.world_size == 1:
        yield None
        return
    if dist.is_initialized():
        raise RuntimeError("planning pretends to be other ranks: not in a process that is a rank already")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = sys.excepthook  # torch puts its own in the place, which writes a rank before every line
    dist.init_process_group("fake", rank=rank, world_size=shape.world_size, store=FakeStore())
    try:
        with ExitStack() as seats:
            mesh = None
            groups = [_world()]
            if shape.shard * shape.tensor > 1:
                mesh = init_device_mesh("cpu", tuple(size for size in shape.axes if size > 1))
                groups += mesh.get_all_groups()
            for group in dict.fromkeys(groups):
                seats.enter_context(stand_in(group, Seat(dist.get_process_group_ranks(group), rank)))
            yield mesh
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def placed(groups: Groups, shape: MeshShape, mesh: DeviceMesh | None) -> tuple[Groups, Group]:
    """The groups with every parameter on the mesh, and the ranks that hold equal copies of plain tensors."""
    if mesh is None:
        replicas = SoloGroup() if shape.world_size == 1 else group_of(_world())
        return [dict(group) for group in groups], replicas
    on_mesh: Groups = [
        {
            **group,
            "params": [
                (name, _on_mesh(parameter, shape, mesh, flatten=is_flattened(parameter, group)))
                for name, parameter in group["params"]
            ],
        }
        for group in groups
    ]
    return on_mesh, SoloGroup()


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _on_mesh(parameter: Tensor, shape: MeshShape, mesh: DeviceMesh, *, flatten: bool) -> Tensor:
    placements = _placements(parameter, shape, flatten=flatten)
    local, _ = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
    part = torch.empty(local, dtype=parameter.dtype, device="meta")
    whole = DTensor.from_local(
        part, mesh, placements, shape=parameter.shape, stride=parameter.stride(), run_check=False
    )
    # Not nn.Parameter(whole): that detaches, and torch's cache then gives an equal mesh, which was another rank's.
    return whole.requires_grad_(parameter.requires_grad)


def _placements(parameter: Tensor, shape: MeshShape, *, flatten: bool) -> list[Placement]:
    """Of the axes that are longer than 1."""
    tensor: Placement = Replicate()
    if flatten:  # a convolution, by its outputs
        tensor = Shard(0)
    elif parameter.ndim >= 2:
        rows, columns = parameter.shape[-2:]
        tensor = Shard(parameter.ndim - (2 if rows >= columns else 1))
    shard: Placement = Shard(0)
    if shape.tensor > 1 and tensor == Shard(0):  # FSDP2 splits what tensor parallelism has split before
        shard = _StridedShard(0, split_factor=shape.tensor)
    places = zip((Replicate(), shard, tensor), shape.axes, strict=True)
    return [place for place, size in places if size > 1]
