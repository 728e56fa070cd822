"""Optimizers' parameters made of the matrices of `dion_core.inventories`."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dion_core.inventories import Inventory
from dion_core.layout import shard_segments


def sharded_parameters(inventory: Inventory, mesh: DeviceMesh, dtype: torch.dtype) -> list[nn.Parameter]:
    """Random matrices whose rows are split over the mesh, as FSDP2 splits them."""
    parameters = []
    rank = mesh.get_local_rank()
    for (rows, columns), count in inventory.items():
        _, held = shard_segments(rows, mesh.size())[rank]
        for _ in range(count):
            shard = torch.randn(held, columns, device=mesh.device_type, dtype=dtype) * 0.02
            whole = DTensor.from_local(
                shard, mesh, [Shard(0)], shape=torch.Size((rows, columns)), stride=(columns, 1), run_check=False
            )
            parameters.append(nn.Parameter(whole))
    return parameters


def renew_gradients(parameters: list[nn.Parameter]) -> None:
    """Fresh random gradients, in the storage of the last ones."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        assert isinstance(parameter.grad, DTensor)
        parameter.grad.to_local().normal_()
