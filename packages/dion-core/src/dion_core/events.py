"""Events on GPUs, for less time of the host than `torch.cuda.Event.record` takes, which asks for the stream anew."""

from __future__ import annotations

from functools import lru_cache

import torch


def recorded_event(index: int | None = None) -> torch.cuda.Event:
    """An event that is over once the current stream has done all that it was given so far.

    Args:
        index: of the GPU; None for the current one.
    """
    event = torch.cuda.Event()
    on_device = torch.cuda.current_device() if index is None else index
    event.record(_stream(*torch._C._cuda_getCurrentStream(on_device)))
    return event


@lru_cache(maxsize=64)
def _stream(stream_id: int, device_index: int, device_type: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
