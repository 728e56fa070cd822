"""Reads from a parameter itself where its rows lie, and makes its optimizer state alike."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dion_core.collectives import Group, SoloGroup, group_of
from dion_core.layout import Axis, Layout, split_layout


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; a plain tensor itself. Shares storage with what was given."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def local_part(tensor: Tensor) -> Tensor:
    """As `local_tensor`, the tensor itself where it is plain, and without the detour that autograd needs: for steps."""
    part: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return part


def mesh_group(mesh: DeviceMesh) -> Group:
    """All ranks of a mesh as one group. Collective where that group does not exist yet."""
    if mesh.size() == 1:
        return SoloGroup()
    wide = [dim for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    if len(wide) == 1:
        return group_of(mesh.get_group(wide[0]))
    if mesh.size() == dist.get_world_size():
        assert dist.group.WORLD is not None
        return group_of(dist.group.WORLD)
    return group_of(mesh._flatten().get_group())


def parameter_layout(parameter: Tensor, name: str, replicas: Group) -> Layout:
    """Where one 2-D parameter lies.

    Args:
        parameter: a DTensor, whose mesh and placements say it, or a plain tensor.
        name: for the error.
        replicas: the ranks that hold equal copies of a plain tensor (a `SoloGroup` if there are none).

    Raises:
        ValueError: a layout that is not supported, by the parameter's name.
    """
    shape = (parameter.shape[0], parameter.shape[1])
    if not isinstance(parameter, DTensor):
        axis = Axis.WHOLE if replicas.size == 1 else Axis.REPLICATED
        return split_layout(replicas, axis, shape)
    mesh, placements = parameter.device_mesh, parameter.placements
    split = [dim for dim, place in enumerate(placements) if mesh.size(dim) > 1 and place != Replicate()]
    if not split:
        group = mesh_group(mesh)
        return split_layout(group, Axis.WHOLE if group.size == 1 else Axis.REPLICATED, shape)
    if len(split) > 1 or type(placements[split[0]]) is not Shard:
        raise ValueError(
            f"{name}: placements {tuple(placements)} on {mesh} are not supported; "
            "supported: Shard(0) or Shard(1) on one mesh axis, Replicate() on the others"
        )
    place = placements[split[0]]
    assert isinstance(place, Shard)
    group = group_of(mesh.get_group(split[0]))
    layout = split_layout(group, Axis.COLUMNS if place.dim == 1 else Axis.ROWS, shape)
    if layout.local_shape() != tuple(local_tensor(parameter).shape):
        raise ValueError(
            f"{name}: rank {group.rank} holds {tuple(local_tensor(parameter).shape)} of {shape} with {place} "
            f"over {group.size} ranks; {layout.local_shape()} was expected"
        )
    return layout


def state_like(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros with the parameter's global shape, strides, mesh and placements, in `dtype`."""
    return torch.zeros_like(parameter, dtype=dtype, requires_grad=False, memory_format=torch.preserve_format)


def row_state_like(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """(R, 1) zeros in `dtype`, split by rows as the parameter is; replicated where its columns are split."""
    shape = (parameter.shape[0], 1)
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, dtype=dtype, device=parameter.device)
    local = local_tensor(parameter)
    placements = [
        Replicate() if isinstance(place, Shard) and place.dim == 1 else place for place in parameter.placements
    ]
    zeros = torch.zeros(local.shape[0], 1, dtype=dtype, device=local.device)
    return DTensor.from_local(
        zeros, parameter.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=(1, 1)
    )
