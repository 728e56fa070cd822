"""Cooperative steps: a function that yields whenever a collective has been launched.

`yield` means "my message is under way, let somebody else compute". `interleave` keeps a few such functions
in flight, so that the communication of one bucket overlaps the arithmetic of the next. The order in which
they run depends on their number alone, hence every rank issues its collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

T = TypeVar("T")

Steps = Generator[None, None, T]


def done(value: T) -> Steps[T]:
    """Steps that communicate nothing and give `value`: for what is a generator only because others must be one."""
    return value
    yield


def run(steps: Steps[T]) -> T:
    """The result of `steps`, run by itself from its start to its end."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: T = stop.value
            return result


def interleave(stages: Sequence[Steps[T]], *, in_flight: int = 2) -> list[T]:
    """The results of all `stages`, in their order, with `in_flight` of them running alternately.

    One starts as soon as another has ended, before a third is resumed: what that waits for then has more time.

    Args:
        stages: generators, each run to its end.
        in_flight: how many may have started and not ended. More hide longer messages and hold more buffers.

    Raises:
        ValueError: `in_flight` is below 1.
        BaseException: what a stage raised; the others that have started are closed.
    """
    if in_flight < 1:
        raise ValueError(f"in_flight={in_flight}: at least 1 is needed")
    results: dict[int, T] = {}
    waiting = iter(enumerate(stages))
    running: list[tuple[int, Steps[T]]] = []
    try:
        while True:
            entry = next(waiting, None) if len(running) < in_flight else None
            if entry is None and not running:
                return [results[number] for number in range(len(stages))]
            number, steps = entry or running.pop(0)
            try:
                next(steps)
            except StopIteration as stop:
                results[number] = stop.value
            else:
                running.append((number, steps))
    finally:  # after an error the others let go of their buffers now, not when the traceback is forgotten
        for _, steps in running:
            steps.close()
