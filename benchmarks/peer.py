"""The public `dion` package (microsoft/dion) as one more optimizer to be timed, where it can be imported."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh


class _Arrived:
    def wait(self, *_: Any) -> bool:
        return True


def build_peer(parameters: list[nn.Parameter], mesh: DeviceMesh, fraction: float, *, scope: str, loopback: bool) -> Any:
    """Its NorDion2 with its fast kernels; `loopback`: on the collectives of a process group that goes nowhere.

    Raises:
        ImportError: the package is not installed.
    """
    from dion import NorDion2 as Peer

    if loopback:
        dist.all_to_all, dist.all_gather = _copy_all, _copy_to_all
    torch._dynamo.reset()
    return Peer(
        parameters,
        distributed_mesh=mesh,
        lr=0.01,
        weight_decay=0.01,
        fraction=fraction,
        selection_scope=scope,
        use_gram_newton_schulz=find_spec("gram_newton_schulz") is not None,  # else its own kernels in Triton
        use_polar_express=True,
        use_triton=True,
        triton_post_ortho=True,
    )


def _copy_all(outputs: list[Tensor], inputs: list[Tensor], **_: Any) -> _Arrived:
    torch._foreach_copy_(outputs, inputs)
    return _Arrived()


def _copy_to_all(outputs: list[Tensor], tensor: Tensor, **_: Any) -> _Arrived:
    for output in outputs:
        output.copy_(tensor)
    return _Arrived()
