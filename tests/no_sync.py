"""A block in which the host must not wait for a GPU."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_sync() -> Iterator[None]:
    """In here torch raises where an operator would make the host wait."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.synchronize()
    _set_mode("error")
    try:
        yield
    finally:
        _set_mode(mode)


def _set_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode(mode)
