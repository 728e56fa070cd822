"""Reads from a parameter itself where its rows lie, and makes its optimizer state alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dion_core.collectives import Group, SoloGroup, group_of
from dion_core.layout import Axis, Layout, shard_segments, split_layout


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; a plain tensor itself. Shares storage with what was given."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def local_part(tensor: Tensor) -> Tensor:
    """As `local_tensor`, the tensor itself where it is plain, and without the detour that autograd needs: for steps."""
    part: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return part


def has_address(tensor: Tensor) -> bool:
    """Whether this rank's part has memory of its own (or no elements); a tensor that wraps others has none."""
    part = local_part(tensor)
    return not part.numel() or part.data_ptr() != 0


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


def parameter_layouts(parameter: Tensor, name: str, replicas: Group, *, flatten: bool = False) -> list[Layout]:
    """Where each of the matrices lies that a parameter holds: one, or those of a stack.

    Args:
        parameter: a DTensor, whose mesh and placements say it, or a plain tensor.
        name: for the error.
        replicas: the ranks that hold equal copies of a plain tensor (a `SoloGroup` if there are none).
        flatten: all dimensions after the first are columns; else the last two are rows and columns.

    Raises:
        ValueError: a layout that is not supported, by the parameter's name.
    """
    shape = _matrix_shape(parameter, flatten)
    leading = () if flatten else parameter.shape[:-2]
    if not isinstance(parameter, DTensor):
        axis = Axis.WHOLE if replicas.size == 1 else Axis.REPLICATED
        return [split_layout(replicas, axis, shape)] * math.prod(leading)
    mesh, split = parameter.device_mesh, _split_mesh_dims(parameter)
    if not split:
        group = mesh_group(mesh)
        axis = Axis.WHOLE if group.size == 1 else Axis.REPLICATED
        return [split_layout(group, axis, shape)] * math.prod(leading)
    dim = _checked_shard(parameter, name, flatten)
    group = group_of(mesh.get_group(split[0]))
    pieces = shard_segments(parameter.shape[dim], group.size)
    expected, local = list(parameter.shape), tuple(local_tensor(parameter).shape)
    expected[dim] = pieces[group.rank][1]
    if tuple(expected) != local:
        raise ValueError(
            f"{name}: rank {group.rank} holds {local} of {tuple(parameter.shape)} with Shard({dim}) "
            f"over {group.size} ranks; {tuple(expected)} was expected"
        )
    if dim < len(leading):
        return _spread_layouts(group, shape, leading, dim)
    axis = Axis.ROWS if dim == len(leading) else Axis.COLUMNS
    return [split_layout(group, axis, shape)] * math.prod(leading)


def _checked_shard(parameter: DTensor, name: str, flatten: bool) -> int:
    """The dimension along which the parameter is split over ranks."""
    split, placements = _split_mesh_dims(parameter), parameter.placements
    place = placements[split[0]]
    if len(split) > 1 or type(place) is not Shard:
        raise ValueError(
            f"{name}: placements {tuple(placements)} on {parameter.device_mesh} are not supported; "
            "supported: Shard(0) or Shard(1), of a stack any Shard, on one mesh axis, Replicate() on the others"
        )
    assert isinstance(place, Shard)
    dim = place.dim % parameter.ndim
    if flatten and dim:
        raise ValueError(
            f"{name}: Shard({dim}) of shape {tuple(parameter.shape)} cuts the columns of the flattened matrix, which "
            "is not supported; supported: Shard(0)"
        )
    return dim


def split_stack(parameter: Tensor) -> tuple[int, int, int] | None:
    """The leading dimension along which ranks hold different matrices, the first one here, and how many there are.

    None where there is no such dimension. For parameters that `parameter_layouts` takes.
    """
    if not isinstance(parameter, DTensor) or not (split := _split_mesh_dims(parameter)):
        return None
    place, mesh = parameter.placements[split[0]], parameter.device_mesh
    dim = place.dim % parameter.ndim if isinstance(place, Shard) else parameter.ndim
    if dim >= parameter.ndim - 2:
        return None
    rank = group_of(mesh.get_group(split[0])).rank
    return dim, shard_segments(parameter.shape[dim], mesh.size(split[0]))[rank][0], parameter.shape[dim]


def _split_mesh_dims(parameter: DTensor) -> list[int]:
    """The mesh dimensions over which ranks hold different values."""
    mesh = parameter.device_mesh
    return [dim for dim, place in enumerate(parameter.placements) if mesh.size(dim) > 1 and place != Replicate()]


def _spread_layouts(group: Group, shape: tuple[int, int], leading: Sequence[int], dim: int) -> list[Layout]:
    """The matrices of a stack that is split along leading dimension `dim`: all rows of each lie on one rank."""
    layouts = {}
    pieces = shard_segments(leading[dim], group.size)
    for index in range(leading[dim]):
        holds = [offset <= index < offset + length for offset, length in pieces]
        segments = tuple((((0, shape[0]),) if here else (),) for here in holds)
        layouts[index] = Layout(group, Axis.ROWS, shape, segments)
    return [layouts[place[dim]] for place in product(*map(range, leading))]


def _matrix_shape(tensor: Tensor, flatten: bool) -> tuple[int, int]:
    if flatten:
        return tensor.shape[0], math.prod(tensor.shape[1:])
    return tensor.shape[-2], tensor.shape[-1]


def state_like(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros with the parameter's global shape, strides, mesh and placements, in `dtype`."""
    return torch.zeros_like(parameter, dtype=dtype, requires_grad=False, memory_format=torch.preserve_format)


def row_state_like(parameter: Tensor, dtype: torch.dtype, *, flatten: bool = False) -> Tensor:
    """Zeros in `dtype`, one a row, split by rows as the parameter is; replicated where its columns are split.

    (R, 1) of a matrix, also of one that is flattened; (..., R, 1) of a stack (..., R, C).
    """
    kept = 1 if flatten else parameter.ndim - 1
    shape = (*parameter.shape[:kept], 1)
    if not isinstance(parameter, DTensor):
        return torch.zeros(shape, dtype=dtype, device=parameter.device)
    local = local_tensor(parameter)
    placements = [
        Replicate() if isinstance(place, Shard) and place.dim % parameter.ndim >= kept else place
        for place in parameter.placements
    ]
    zeros = torch.zeros(*local.shape[:kept], 1, dtype=dtype, device=local.device)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        zeros, parameter.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
