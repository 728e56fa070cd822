"""Cooperative steps: a function that yields whenever a collective has been launched.

`yield` means "my message is under way, let somebody else compute". `interleave` keeps a few such functions
in flight, so that the communication of one bucket overlaps the arithmetic of the next. The order in which
they run depends on their number alone, hence every rank issues its collectives in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from typing import TypeVar

T = TypeVar("T")

Steps = Generator[None, None, T]

BUCKETS_IN_FLIGHT = 3
"""One whose rows are under way, one that is orthogonalized, and one whose results come back."""


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


def interleave(stages: Sequence[Steps[T]], *, in_flight: int = 3) -> list[T]:
    """The results of all `stages`, in their order, with up to `in_flight` of them running in turn.

    At most two start at once; each resumption lets one more run beside them, up to `in_flight`, and what has room
    starts before the next resumption. So the stages that run stand at different places: where each sends, computes and
    sends back, three are enough that one computes while the rows of the next and the results of the one before are
    under way.

    Example: a, b and c, which yield after each of their two messages: a sends, b sends, a computes, c sends,
    b computes, a ends, c computes, b ends, c ends.

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
    waiting = deque(enumerate(stages))
    running: deque[tuple[int, Steps[T]]] = deque()
    limit = min(in_flight, 2)
    try:
        while waiting or running:
            if waiting and len(running) < limit:
                number, steps = waiting.popleft()
            else:
                number, steps = running.popleft()
                limit = min(limit + 1, in_flight)
            try:
                next(steps)
            except StopIteration as stop:
                results[number] = stop.value
            else:
                running.append((number, steps))
    finally:  # after an error the others let go of their buffers now, not when the traceback is forgotten
        for _, steps in running:
            steps.close()
    return [results[number] for number in range(len(stages))]
