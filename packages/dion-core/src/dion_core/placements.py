"""Reads from a parameter itself where its rows lie, and makes its optimizer state alike."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from dion_core.collectives import Group, SoloGroup
from dion_core.layout import Axis, Layout, OuterAxis, Segment, split_layout
from dion_core.meshes import MeshAxes, mesh_axes, split_dim


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; a plain tensor itself. Shares storage with what was given."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def local_part(tensor: Tensor) -> Tensor:
    """As `local_tensor`, the tensor itself where it is plain, and without the detour that autograd needs: for steps."""
    part: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return part


def whole_tensor(tensor: DTensor) -> Tensor:
    """The tensor in one piece on this rank, by true offsets. Collective over its mesh.

    `full_tensor` joins pieces in the order of process groups, which is another where a mesh has its ranks turned round.
    """
    axes, whole = mesh_axes(tensor), local_tensor(tensor)
    if axes is None:
        return tensor.full_tensor().detach()
    for dim, splitting in axes.splits.items():
        group, before, after = axes.group(splitting), whole.shape[:dim], whole.shape[dim + 1 :]
        pieces = [whole.new_empty(*before, held, *after) for _, held in axes.segments(dim, tensor.shape[dim])]
        message = whole.contiguous().flatten()
        group.named("a whole tensor").all_gather([piece.view(-1) for piece in pieces], message).wait()
        whole = torch.cat(pieces, dim=dim)
    return whole


@dataclass(frozen=True)
class Place:
    """Where the matrices of one parameter lie.

    Attributes:
        layout: of each of those matrices that this rank holds parts of.
        leading: of every leading dimension of a stack the (first, number) of the places whose matrices those are.
        divided: other ranks hold other matrices of the stack.
    """

    layout: Layout
    leading: tuple[Segment, ...] = ()
    divided: bool = False


def has_address(tensor: Tensor) -> bool:
    """Whether this rank's part has memory of its own (or no elements); a tensor that wraps others has none."""
    part = local_part(tensor)
    return not part.numel() or part.data_ptr() != 0


def parameter_place(parameter: Tensor, name: str, replicas: Group, *, flatten: bool = False) -> Place:
    """Where the matrices lie that a parameter holds: one, or those of a stack. Collective if a group is made for it.

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
        return Place(split_layout(replicas, axis, shape), tuple((0, length) for length in leading))
    axes = _checked_axes(parameter, name, flatten)
    return Place(
        _layout(axes, shape, rows=len(leading), columns=len(leading) + 1),
        tuple(axes.held(dim, length) for dim, length in enumerate(leading)),
        divided=any(dim < len(leading) for dim in axes.splits),
    )


def _layout(axes: MeshAxes, shape: tuple[int, int], *, rows: int, columns: int) -> Layout:
    """The layout of a matrix whose rows and columns are those dimensions of the tensor."""
    by_rows, by_columns = axes.splits.get(rows, ()), axes.splits.get(columns, ())
    inner = by_rows or by_columns
    if not inner:
        group = axes.group(axes.copies)
        if group.size == 1:
            return split_layout(SoloGroup(ranks=axes.ranks(())), Axis.WHOLE, shape)
        return split_layout(group, Axis.REPLICATED, shape)
    pieces = axes.segments(rows, shape[0]) if by_rows else axes.segments(columns, shape[1])
    segments = tuple(((piece,),) for piece in pieces)
    outer, beside = [], axes.copies
    if axes.copies:
        outer.append(OuterAxis(axes.group(axes.copies), Axis.REPLICATED))
    if by_rows and by_columns:
        outer.append(OuterAxis(axes.group(by_columns), Axis.COLUMNS, axes.segments(columns, shape[1])))
        beside = (*beside, *by_columns)
    axis = Axis.ROWS if by_rows else Axis.COLUMNS
    workers = axes.ranks((*beside, *inner)) if outer else ()
    return Layout(axes.group(inner), axis, shape, segments, tuple(outer), workers)


def _checked_axes(parameter: DTensor, name: str, flatten: bool) -> MeshAxes:
    axes, placements = mesh_axes(parameter), tuple(parameter.placements)
    if axes is None:
        raise ValueError(
            f"{name}: placements {placements} on {parameter.device_mesh} are not supported; supported: Shard of any "
            "dimension and Replicate() on any axes of the mesh, and _StridedShard as fully_shard makes it"
        )
    cut = sorted(dim for dim in axes.splits if flatten and dim)
    if cut:
        raise ValueError(
            f"{name}: Shard({cut[0]}) of shape {tuple(parameter.shape)} cuts the columns of the flattened matrix, "
            "which is not supported; supported: Shard(0)"
        )
    expected = tuple(axes.held(dim, length)[1] for dim, length in enumerate(parameter.shape))
    local = tuple(local_tensor(parameter).shape)
    if expected != local:
        raise ValueError(
            f"{name}: rank {dist.get_rank()} holds {local} of {tuple(parameter.shape)} with placements {placements} on "
            f"{parameter.device_mesh}; {expected} was expected"
        )
    return axes


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
        Replicate() if (dim := split_dim(place, parameter.ndim)) is not None and dim >= kept else place
        for place in parameter.placements
    ]
    zeros = torch.zeros(*local.shape[:kept], 1, dtype=dtype, device=local.device)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        zeros, parameter.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
