"""The session of all buckets of an optimizer, where a mesh of several axes holds them.

A transport knows one axis of a mesh, and uses the choices of all buckets of its session for each. So it is opened for
the shares of buckets that `dion_core.nested` makes, and once for every set of buckets that the same ranks have.
"""

from __future__ import annotations

from collections.abc import Sequence
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


class JoinedSession(Session):
    """Several sessions of one transport, each for buckets that other ranks have with it."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        super().__init__([exchange for session in sessions for exchange in session.exchanges])
        self._sessions = sessions

    def begin(self, selections: Sequence[RowSelection]) -> Steps[None]:
        rest = list(selections)
        for session in self._sessions:
            here, rest = rest[: len(session.exchanges)], rest[len(session.exchanges) :]
            yield from session.begin(here)

    def end(self) -> None:
        for session in self._sessions:
            session.end()

    def state_dict(self) -> dict[str, Any]:
        return {"sessions": [session.state_dict() for session in self._sessions]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict.get("sessions", [])
        if len(saved) == len(self._sessions):
            for session, each in zip(self._sessions, saved, strict=True):
                session.load_state_dict(each)

    @property
    def host_reads(self) -> int:  # type: ignore[override]
        return sum(session.host_reads for session in self._sessions)

    @property
    def host_waits(self) -> int:  # type: ignore[override]
        return sum(session.host_waits for session in self._sessions)

    @property
    def sizes(self) -> int:  # type: ignore[override]
        return sum(session.sizes for session in self._sessions)


def open_session(transport: Transport, runs: Sequence[Sequence[Bucket]]) -> Session:
    """The session of all buckets. Collective, run after run: the buckets of a run are those that the same ranks have.

    A transport may use the choices of all buckets of a session for each, so ranks must have a session in common.
    """
    sessions = []
    for buckets in runs:
        session = transport.open([leaf for bucket in buckets for leaf in innermost(bucket)])
        nests = any(bucket.layout.outer for bucket in buckets)
        sessions.append(NestedSession(session, buckets) if nests else session)
    return sessions[0] if len(sessions) == 1 else JoinedSession(sessions)
