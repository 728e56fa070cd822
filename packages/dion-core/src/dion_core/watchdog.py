"""Watches collectives on GPUs, where waiting with a time-out would block the host.

One daemon thread for the process looks at the collectives that are under way. One that is not done by its
deadline is logged by name, and its communicator is aborted. What was launched then ends with undefined values and no
error of its own, so the failure is kept, and every collective that follows raises it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from dion_core.events import recorded_event

logger = logging.getLogger("dion_core")

INTERVAL = 0.25
"""Seconds between two looks."""


class Work(Protocol):
    """A collective under way."""

    def is_completed(self) -> bool:
        """Whether it has ended; never blocks."""


class Watched:
    """A collective on a GPU as the watchdog sees it.

    A work holds its tensors. The watchdog may look at it long after the step has gone on, so once the stream waits for
    the work, an event behind it stands in its place.
    """

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works
        self._event: torch.cuda.Event | None = None

    def waited(self) -> None:
        """The current stream waits for the works: it lets go of them."""
        self._event = recorded_event()
        self._works = ()

    def is_completed(self) -> bool:
        works, event = self._works, self._event  # in this order: an event is there before the works are gone
        return event.query() if event is not None else all(work.is_completed() for work in works)


class _Entry(NamedTuple):
    works: Sequence[Work]
    what: str
    seconds: float
    deadline: float
    abort: Callable[[], None]


class Watchdog:
    """Calls `abort` for every collective that is not done in time. The thread runs only while there are some."""

    def __init__(self) -> None:
        self.failure = ""
        """What was aborted, if anything was: nothing that this process has sent since can be trusted."""
        self._lock = threading.Lock()
        self._watched: list[_Entry] = []
        self._thread: threading.Thread | None = None

    def watch(self, works: Sequence[Work], what: str, seconds: float, abort: Callable[[], None]) -> None:
        """Watches until all works have completed, or `seconds` have passed.

        Args:
            works: that belong together.
            what: names bucket, rank and collective, for the log.
            seconds: until `abort` is called.
            abort: ends the communicator.
        """
        with self._lock:
            self._watched.append(_Entry(works, what, seconds, time.monotonic() + seconds, abort))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="dion-core watchdog", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(INTERVAL)
            now = time.monotonic()
            with self._lock:
                self._watched = [entry for entry in self._watched if not all(w.is_completed() for w in entry.works)]
                late = [entry for entry in self._watched if entry.deadline < now]
                self._watched = [entry for entry in self._watched if entry not in late]
                if not self._watched and not late:
                    self._thread = None
                    return
            for entry in late:
                self.failure = f"{entry.what} did not end within {entry.seconds:.0f} s; its communicator is aborted"
                logger.error(self.failure)
                try:
                    entry.abort()
                except Exception:  # it may be gone already; the others are still to be watched
                    logger.exception("the communicator of %s could not be aborted", entry.what)


WATCHDOG = Watchdog()
"""The one of this process."""
