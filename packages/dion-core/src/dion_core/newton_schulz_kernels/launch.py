"""Launches of Triton kernels at a small part of the usual host time.

Triton looks at every argument of every launch to find the compiled kernel, which takes longer than many a kernel
runs. Here the caller names what a kernel was compiled for, and only the first launch looks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

_compiled: dict[Hashable, Any] = {}


def launch(
    kernel: Any,
    grid: tuple[int, int],
    arguments: Sequence[Any],
    constants: tuple[Hashable, ...],
    *,
    key: Hashable,
    device: torch.device,
    **options: Any,
) -> None:
    """Launches `kernel` on a grid on the current stream of `device`.

    Args:
        kernel: a jitted function, whose integers are not specialized.
        grid: numbers of programs.
        arguments: tensors, descriptors and integers, in order.
        constants: the compile-time constants, which follow them.
        key: what else the compiled kernel depends on: dtypes, and which pointers are multiples of 16.
        device: of all tensors.
        options: for the compiler, the same for the same kernel, constants and key.
    """
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, grid, arguments, constants, key=key, device=device, **options)
    full_key = (kernel.__name__, device.index, constants, key)
    compiled = _compiled.get(full_key)
    if compiled is None:
        _compiled[full_key] = kernel[grid](*arguments, *constants, **options)
    else:
        compiled[(*grid, 1)](*arguments, *constants)
