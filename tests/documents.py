"""Runs programs as the ranks of a launcher would: for documents, and for frameworks that read its environment."""

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch.distributed as dist

from dion_core.testing.ranks import RankPool


@cache
def framework_ranks(world_size: int) -> RankPool:
    """Ranks apart from those of other tests: frameworks set seeds, hooks and loggers of their process."""
    return RankPool(world_size, timeout=110.0)


@contextmanager
def launched() -> Iterator[None]:
    """The environment that torchrun gives; warnings, which frameworks have of their own, are no errors."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    ours = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    ours |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "test"}
    ours |= {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    before = dict(os.environ)
    os.environ.update(ours)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        if "accelerate" in sys.modules:  # keeps what the first program asked for
            from accelerate.state import AcceleratorState, GradientState

            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()


def run_program(code: str, document: str, first_line: int) -> None:
    """Runs a program on this rank, with the document's file name and line numbers for tracebacks."""
    compiled = compile("\n" * (first_line - 1) + code, document, "exec")
    with launched():
        exec(compiled, {"__name__": "__main__"})


def call_launched(function: Callable[..., Any], args: tuple[object, ...]) -> Any:
    """What the function returns, in the environment of a launcher."""
    with launched():
        return function(*args)


def on_launched_ranks(world_size: int, function: Callable[..., Any], *args: object) -> list[Any]:
    """What the function returns on every rank, by rank."""
    return framework_ranks(world_size).run(call_launched, function, args)
