"""The session of all buckets of an optimizer, where a mesh of several axes holds them.

A transport knows one axis of a mesh, and uses the choices of all buckets of its session for each. So it is opened for
the shares of buckets that `dion_core.nested` makes, and once for every set of buckets that the same ranks have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dion_core.nested import innermost, nested, parts_of
from dion_core.rows import RowSelection
from dion_core.steps import Steps
from dion_core.transport import Bucket, Session, Transport


class NestedSession(Session):
    """The session of a transport that was opened for shares of buckets."""

    def __init__(self, inner: Session, buckets: Sequence[Bucket]) -> None:
        of_all = iter(inner.exchanges)
        super().__init__([nested(bucket, of_all) for bucket in buckets])
        self._inner = inner
        self._parts = [parts_of(innermost(bucket)) for bucket in buckets]

    def begin(self, selections: Sequence[RowSelection]) -> Steps[None]:
        both = zip(selections, self._parts, strict=True)
        return self._inner.begin([part.of(selection) for selection, parts in both for part in parts])

    def end(self) -> None:
        self._inner.end()

    def state_dict(self) -> dict[str, Any]:
        return self._inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._inner.load_state_dict(state_dict)

    @property
    def host_reads(self) -> int:  # type: ignore[override]
        return self._inner.host_reads

    @property
    def host_waits(self) -> int:  # type: ignore[override]
        return self._inner.host_waits

    @property
    def sizes(self) -> int:  # type: ignore[override]
        return self._inner.sizes


Line = tuple[int, ...] | None
"""The ranks that have certain buckets, where others have others; None: all ranks have them."""
_LINES = "lines"


class JoinedSession(Session):
    """The sessions of one transport, each for buckets that other ranks have with it.

    Ranks need not have the same number of them: of a stack with fewer experts than places some have nothing. So a state
    is kept by line, and what a state dict of another rank does not say of a line stays as it is on all of its ranks.
    """

    def __init__(self, sessions: Mapping[Line, Session]) -> None:
        super().__init__([exchange for session in sessions.values() for exchange in session.exchanges])
        self._by_line = sessions

    def begin(self, selections: Sequence[RowSelection]) -> Steps[None]:
        rest = list(selections)
        for session in self._by_line.values():
            here, rest = rest[: len(session.exchanges)], rest[len(session.exchanges) :]
            yield from session.begin(here)

    def end(self) -> None:
        for session in self._by_line.values():
            session.end()

    def state_dict(self) -> dict[str, Any]:
        states = {line: session.state_dict() for line, session in self._by_line.items()}
        common = states.pop(None, {})
        own = {_key(line): state for line, state in states.items() if state}
        return {**common, _LINES: own} if own else common

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own = state_dict.get(_LINES, {})
        for line, session in self._by_line.items():
            if line is None:
                session.load_state_dict({name: value for name, value in state_dict.items() if name != _LINES})
            elif _key(line) in own:
                session.load_state_dict(own[_key(line)])

    @property
    def host_reads(self) -> int:  # type: ignore[override]
        return sum(session.host_reads for session in self._by_line.values())

    @property
    def host_waits(self) -> int:  # type: ignore[override]
        return sum(session.host_waits for session in self._by_line.values())

    @property
    def sizes(self) -> int:  # type: ignore[override]
        return sum(session.sizes for session in self._by_line.values())


def _key(line: Line) -> str:
    return ",".join(map(str, line or ()))


def open_session(transport: Transport, by_line: Mapping[Line, Sequence[Bucket]]) -> Session:
    """The session of all buckets. Collective, line after line.

    A transport may use the choices of all buckets of a session for each, so ranks must have a session in common.

    Args:
        transport: to open.
        by_line: the buckets that the same ranks have.
    """
    sessions: dict[Line, Session] = {}
    for line, buckets in by_line.items():
        session = transport.open([leaf for bucket in buckets for leaf in innermost(bucket)])
        nests = any(bucket.layout.outer for bucket in buckets)
        sessions[line] = NestedSession(session, buckets) if nests else session
    return JoinedSession(sessions)
