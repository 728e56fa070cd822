"""Where the parameters of a story lie: placed by torch, and which elements of the whole each rank holds then.

Nothing here is of the package under test. What a rank holds is read off a tensor of numbers that torch has placed like
the parameter, so that it is right for every mesh and every kind of shards.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from dion_core.testing.ranks import pool
from tests.mesh_cases import made_once, placement

Spot = tuple[str, ...]
"""What each axis of a mesh does to a tensor, as in `mesh_cases.Mesh`, or one word of `WORDS`."""

WORDS = ("plain", "ddp")
"""Tensors that are not distributed: of every rank its own, and copies over the default group."""


def split_dim(place: str) -> int | None:
    """The dimension that an axis splits, if any."""
    return None if place in ("r", *WORDS) else int(place.removeprefix("s").split("/")[0])


def mesh_of(sizes: tuple[int, ...], ranks: tuple[int, ...]) -> DeviceMesh:
    """The mesh of that shape over these ranks, or all in order. Collective."""
    return made_once(sizes, ranks, False, dist.group.WORLD)  # type: ignore[arg-type]


def placed(value: Tensor, spot: Spot, mesh: DeviceMesh, *, turned: bool = False) -> Tensor:
    """A copy of a whole tensor as it lies on this rank; turned: stored in another order of its dimensions."""
    if spot[0] in WORDS:
        return stored(value.clone(), turned=turned)
    lying = distribute_tensor(value.clone(), mesh, [placement(place) for place in spot], src_data_rank=None)
    if not turned:
        return lying
    local = stored(lying.to_local(), turned=True)
    shape, stride = value.shape, stored(value, turned=True).stride()
    return DTensor.from_local(local, mesh, lying.placements, run_check=False, shape=shape, stride=stride)


def stored(value: Tensor, *, turned: bool) -> Tensor:
    """The value; turned: in channels_last from three dimensions on, of two the columns one after the other."""
    return value.movedim(1, -1).contiguous().movedim(-1, 1) if turned else value


def of_rows(spot: Spot, kept: int) -> Spot:
    """Where a tensor with one value a row lies: copied along the axes that split dimensions from `kept` on."""
    return tuple("r" if (dim := split_dim(place)) is not None and dim >= kept else place for place in spot)


def numbers_here(sizes: tuple[int, ...], ranks: tuple[int, ...], wanted: Sequence[tuple[Spot, Any]]) -> list[Tensor]:
    """For each spot and shape the numbers of the elements that this rank holds, in order."""
    mesh, held = mesh_of(sizes, ranks), []
    for spot, shape in wanted:
        numbers = placed(torch.arange(math.prod(shape)).view(shape), spot, mesh)
        held.append((numbers.to_local() if isinstance(numbers, DTensor) else numbers).flatten())
    return held


@cache
def numbers_by_rank(
    sizes: tuple[int, ...], ranks: tuple[int, ...], wanted: tuple[tuple[Spot, tuple[int, ...]], ...]
) -> list[tuple[Tensor, ...]]:
    """For each spot and shape, by rank the numbers of the elements that it holds."""
    return list(zip(*pool(math.prod(sizes)).run(numbers_here, sizes, ranks, wanted), strict=True))


def first_copies(sizes: tuple[int, ...], ranks: tuple[int, ...], spot: Spot) -> list[int]:
    """For every rank the first one of those that hold copies of what it holds."""
    grid = torch.tensor(ranks) if ranks else torch.arange(math.prod(sizes))
    grid = grid.view(sizes)
    if spot[0] in WORDS:
        return [0] * grid.numel()
    first = grid
    for axis, place in enumerate(spot):
        if place == "r":
            first = first.narrow(axis, 0, 1).expand(sizes)
    by_rank = dict(zip(grid.flatten().tolist(), first.flatten().tolist(), strict=True))
    return [by_rank[rank] for rank in range(grid.numel())]


def joined(parts: Sequence[Tensor | None], held: Sequence[Tensor], shape: Sequence[int], name: str) -> Tensor:
    """The whole tensor from the parts of all ranks that have one; copies are checked to be bit-equal."""
    present = [(part, numbers) for part, numbers in zip(parts, held, strict=True) if part is not None]
    whole = torch.empty(math.prod(shape), dtype=present[0][0].dtype)
    filled = torch.zeros(math.prod(shape), dtype=torch.bool)
    for part, numbers in present:
        assert part.numel() == numbers.numel(), f"{name}: a rank holds {tuple(part.shape)}"
        known = filled[numbers]
        assert torch.equal(whole[numbers][known], part.flatten()[known]), f"{name} differs between ranks"
        whole[numbers] = part.flatten()
        filled[numbers] = True
    assert filled.all(), f"no rank holds all of {name}"
    return whole.view(tuple(shape))
