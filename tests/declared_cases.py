"""Plain tensors of which every rank declares the part that it holds.

The layouts "declared0" and "declared1" are parts of rows or columns, which are not equally long: the first rank holds
the last ones.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dion_core import DeclaredShard

DECLARED = ("declared0", "declared1")


def declared(shape: Sequence[int], layout: str, rank: int, world_size: int) -> tuple[DeclaredShard, int]:
    """What a rank declares of a tensor, and how much it holds. The last rank holds nothing if there are three or more.

    The parts grow: 17 over 4 gives 9 on rank 0, the 6 before them on rank 1, and 2 on rank 2.
    """
    axis = min(int(layout[-1]), len(shape) - 1)
    size, parts = shape[axis], world_size - (world_size > 2)
    ends = [0] * (world_size - parts) + [size * n * (n + 1) // (parts * (parts + 1)) for n in range(parts + 1)]
    place = world_size - 1 - rank
    start, end = ends[place], ends[place + 1]
    return DeclaredShard(axis, size, start), end - start


def declared_part(value: Tensor, layout: str, mesh: DeviceMesh) -> Tensor:
    """A copy of what this rank holds of a whole tensor."""
    shard, length = declared(value.shape, layout, mesh.get_rank(), mesh.size())
    return value.narrow(shard.axis, shard.offset, length).clone()


def shard_of(shape: Sequence[int], layout: str, mesh: DeviceMesh | None) -> DeclaredShard | None:
    """What this rank declares of a tensor; None in other layouts, and where no mesh says which rank this is."""
    if mesh is None or layout not in DECLARED:
        return None
    return declared(shape, layout, mesh.get_rank(), mesh.size())[0]
