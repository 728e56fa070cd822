"""Which ranks step together, read from the parameters before anything else is known about them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, get_rank
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dion_core.collectives import Group, SoloGroup
from dion_core.declared import check_declared
from dion_core.groups import Communicator, foreign_group
from dion_core.meshes import mesh_group
from dion_core.options import check_parameter
from dion_core.placements import local_tensor
from dion_core.process_groups import TorchGroup, divides, group_of
from dion_core.views import check_views, warn_of_views

ProcessGroupLike: TypeAlias = str | Communicator | Group | ProcessGroup | DeviceMesh | None
"""The name of an installed group, a communicator of mpi4py, a `Group`, or what torch.distributed has."""


def replica_group(group: ProcessGroupLike) -> Group:
    """The ranks that hold equal copies of plain tensors: those of `group`, or this one alone."""
    if group is None:
        return SoloGroup()
    foreign = foreign_group(group)
    if foreign is not None:
        return foreign if foreign.size > 1 else SoloGroup()
    if isinstance(group, DeviceMesh):
        return mesh_group(group)
    if not isinstance(group, ProcessGroup):
        raise TypeError(
            f"group={group!r} is not allowed: None, a ProcessGroup, a DeviceMesh, the name of an installed group "
            "('mpi', 'nccl'), a communicator of mpi4py, or a Group"
        )
    replicas = group_of(group)
    return replicas if replicas.size > 1 else SoloGroup()


def stepping_group(entries: list[Any], replicas: Group) -> tuple[Group, torch.device]:
    """The ranks that hold parts or copies of the parameters, and the device for their small messages.

    They are those of the largest mesh, or of `replicas` if these are more; other parameters may lie on some of them.

    Args:
        entries: parameters, (name, parameter) pairs, or groups of either. The "params" of a group is replaced
            by a list, so that a generator can be read again.
        replicas: the ranks of replicated plain tensors.

    Raises:
        ValueError: the process group cannot communicate where the parameters lie.
    """
    tensors = [tensor for tensor in _tensors(entries) if not tensor.is_meta]
    device = local_tensor(tensors[0]).device if tensors else torch.device("cpu")
    group = replicas
    largest = max((each for each in tensors if isinstance(each, DTensor)), key=_num_ranks, default=None)
    if largest is not None and divides(replicas):  # it serves the ranks of all meshes, in place of process groups
        device = local_tensor(largest).device
    elif largest is not None and _num_ranks(largest) > 1 and _num_ranks(largest) >= replicas.size:
        if largest.device_mesh.get_coordinate() is None:
            raise ValueError(f"this rank, {get_rank()}, is none of {largest.device_mesh}, on which its parameters lie")
        group, device = mesh_group(largest.device_mesh), local_tensor(largest).device
    _check_backend(group, device)
    return group, device


def _check_backend(group: Group, device: torch.device) -> None:
    """Raises ValueError where no collective of the group can take tensors of the device.

    Parameters on the CPU and a group of NCCL are what FSDP's CPUOffloadPolicy leads to.
    """
    if not isinstance(group, TorchGroup):
        return
    try:
        group.process_group._get_backend(device)
    except RuntimeError as error:
        raise ValueError(
            f"the parameters lie on {device.type}, for which their process group has no backend: make it with "
            'init_process_group(backend="cpu:gloo,cuda:nccl"), which serves both, as CPUOffloadPolicy needs'
        ) from error


def _num_ranks(tensor: DTensor) -> int:
    return tensor.device_mesh.size()


def check_ranks(parameter: Tensor, name: str, group: Group) -> None:
    """Raises ValueError where a DTensor lies on ranks that do not step together, or not on this one."""
    if not isinstance(parameter, DTensor):
        return
    mesh = parameter.device_mesh
    ranks = sorted(mesh.mesh.flatten().tolist())
    if len(ranks) > 1 and not set(ranks) <= set(group.ranks):
        raise ValueError(
            f"{name} lies on {mesh}, ranks {ranks}, while other parameters of this optimizer lie on ranks "
            f"{sorted(group.ranks)}: one of them must have all, so give group= a mesh of all those ranks, or use one "
            "optimizer for each set of ranks"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"{name} lies on {mesh}, ranks {ranks}, of which this one, {get_rank()}, is none")


def check_group_ranks(replicas: Group, group: Group) -> None:
    """Raises ValueError where the `group` given for plain tensors has ranks that do not step together."""
    if replicas.size > 1 and not set(replicas.ranks) <= set(group.ranks):
        raise ValueError(
            f"group= has ranks {sorted(replicas.ranks)}, while the DTensor parameters of this optimizer "
            f"lie on ranks {sorted(group.ranks)}: one of them must have all"
        )


def check_members(names: Mapping[Tensor, str], replicas: Group, group: Group) -> None:
    """Raises ValueError where parameters, or the copies of plain ones, have ranks that do not step together."""
    check_group_ranks(replicas, group)
    for parameter, name in names.items():
        check_ranks(parameter, name, group)


def checked_names(
    group: dict[str, Any], number: int, known: Mapping[Tensor, str], ranks: Group, replicas: Group
) -> dict[Tensor, str]:
    """The names of a new group's parameters, which are listed in it; nothing else has changed where that raises.

    Args:
        group: as the user gave it, its options checked.
        number: of the group, for parameters without a name.
        known: the names of the parameters that the optimizer has.
        ranks: of the optimizer.
        replicas: those that hold plain tensors.

    Raises:
        TypeError: something is no tensor.
        ValueError: a tensor comes twice, lies on other ranks, or cannot be what the group says it is.
    """
    group["params"] = given = listed(group["params"])
    matrix = group.get("algorithm", "matrix") == "matrix"
    names: dict[Tensor, str] = {}
    for place, (entry, told) in enumerate(zip_longest(given, group.get("param_names", ())[: len(given)])):
        name, parameter = entry if isinstance(entry, tuple) else (told, entry)
        name = name or f"parameter {place} of group {number}"
        if not isinstance(parameter, Tensor):
            raise TypeError(f"{name} is {type(parameter).__name__}; a Tensor is needed")
        other = names.get(parameter) or known.get(parameter)
        if other is not None:
            raise ValueError(f"{name} is the same tensor as {other}: a tied tensor is given once")
        check_parameter(parameter, name, matrix=matrix)
        check_declared(parameter, name, group, replicas.size)
        if matrix:
            check_views(parameter, name, group)
            warn_of_views(parameter, name, group)
        check_ranks(parameter, name, ranks)
        names[parameter] = name
    return names


def listed(parameters: Tensor | Iterable[Any]) -> list[Any]:
    """A parameter, or parameters given in any iterable, as a list."""
    if isinstance(parameters, set | frozenset):
        raise TypeError(f"params is a {type(parameters).__name__}, whose order differs by rank; give a list")
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _tensors(entries: Iterable[Any]) -> Iterator[Tensor]:
    for entry in entries:
        if isinstance(entry, Tensor):
            yield entry
        elif isinstance(entry, tuple) and len(entry) == 2:
            yield from _tensors([entry[1]])
        elif isinstance(entry, dict):
            if "params" not in entry:
                continue  # refused where groups are checked
            entry["params"] = listed(entry["params"])
            yield from _tensors(entry["params"])
