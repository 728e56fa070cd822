"""Finds the installed transports by entry-point name, and picks the one an optimizer asked for."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from importlib.metadata import EntryPoint

from dion_core.transport import INTERFACE_VERSION, Bucket, Scope, Transport, TransportError

logger = logging.getLogger("dion_core")

ENTRY_POINT_GROUP = "dion.transports"
KNOWN_PACKAGES = {
    "full": "dion-comm-nccl",
    "local": "dion-comm-nccl",
    "capped": "dion-comm-capped",
    "varlen": "dion-comm-varlen",
    "uniform": "dion-comm-varlen",
}
"""Which package brings the transports that the project itself makes."""
AUTO_ORDER = ("capped", "varlen", "full")
"""What `transport="auto"` tries, best first: exact transports alone."""


@dataclass(frozen=True)
class Choice:
    """A transport, its name, and why it was taken."""

    name: str
    transport: Transport
    reason: str


def available_transports() -> dict[str, type[Transport]]:
    """The installed transports by name, ordered by name.

    Raises:
        TransportError: a name is taken twice, a package cannot be imported, or it was made for another version
            of the transport interface.
    """
    return {name: _load(entry) for name, entry in _entries().items()}


def choose_transport(transport: str | Transport | Choice, scopes: Set[Scope], *, chooses_rows: bool) -> Choice:
    """The transport that was asked for, or for "auto" the best exact one that is installed.

    Args:
        transport: a name, "auto", an instance with options, or an earlier choice, which is kept.
        scopes: those asked for; empty leaves it to the transport.
        chooses_rows: whether the optimizer applies a choice of rows (Dion2) or all of them (Muon).

    Raises:
        TransportError: it is not installed, or cannot be used.
        ValueError: it does not serve the scopes.
    """
    entries = _entries()
    if isinstance(transport, Choice):
        choice = transport
    elif isinstance(transport, Transport):
        choice = Choice(type(transport).__name__, transport, "given as an instance")
    elif not isinstance(transport, str):
        raise ValueError(f"transport={transport!r} is not allowed: a name, 'auto', or an instance such as FullShard()")
    elif transport == "auto":
        choice = _automatic(scopes, entries)
    elif transport in entries:
        choice = Choice(transport, _load(entries[transport])(), "asked for by name")
    else:
        raise TransportError(_missing(transport, entries))
    if not scopes <= choice.transport.scopes:
        purpose = f"scope {_names(scopes)}" if chooses_rows else "all rows, which this optimizer applies"
        raise ValueError(
            f"transport={choice.name!r} does not serve {purpose}; it serves {_names(choice.transport.scopes)}; "
            f"installed transports that do: {', '.join(_serving(scopes, entries)) or 'none'}"
        )
    return choice


def check_axes(choice: Choice, buckets: Sequence[Bucket]) -> None:
    """Raises ValueError where the transport does not serve the way a bucket's matrices are split."""
    for bucket in buckets:
        if bucket.layout.axis not in choice.transport.axes:
            raise ValueError(
                f"transport={choice.name!r} does not serve matrices split by {bucket.layout.axis}: "
                f"{bucket.describe()}; it serves {sorted(choice.transport.axes)}"
            )
        if bucket.layout.outer and not choice.transport.outer_axes:
            raise ValueError(
                f"transport={choice.name!r} does not serve matrices that several axes of a mesh hold: "
                f"{bucket.describe()}; it serves one axis, {sorted(choice.transport.axes)}"
            )


def _automatic(scopes: Set[Scope], entries: Mapping[str, EntryPoint]) -> Choice:
    for name in (*AUTO_ORDER, "local"):  # a local choice is never taken unasked
        if name not in entries or not (scopes or name in AUTO_ORDER):
            continue
        kind = _load(entries[name])
        if scopes <= kind.scopes:
            reason = "serves scope local" if name == "local" else "the best exact transport that is installed"
            if kind.may_defer:
                reason = "the global choice without host reads in few bytes, exact while nothing is deferred"
            logger.info("transport='auto' takes %r: %s", name, reason)
            return Choice(name, kind(), reason)
    if entries and scopes:
        raise ValueError(f"transport='auto': none of {', '.join(entries)} serves scope {_names(scopes)}")
    raise TransportError(
        "transport='auto': matrices that lie in pieces on several ranks need a transport, and none that fits is "
        f"installed (installed: {', '.join(entries) or 'none'}); `pip install dion-comm-nccl` brings 'full'"
    )


def _serving(scopes: Set[Scope], entries: Mapping[str, EntryPoint]) -> list[str]:
    """The usable transports that serve the scopes; for a message, so that a broken one is passed over."""
    serving = []
    for name, entry in entries.items():
        with suppress(TransportError):
            if scopes <= _load(entry).scopes:
                serving.append(name)
    return serving


def _names(scopes: Set[Scope]) -> str:
    return ", ".join(sorted(scopes))


def _missing(name: str, entries: Mapping[str, EntryPoint]) -> str:
    listed = ", ".join(entries) or "none"
    package = KNOWN_PACKAGES.get(name)
    hint = f"; `pip install {package}` brings {name!r}" if package else f"; known: {sorted(KNOWN_PACKAGES)}"
    return f"transport={name!r} is not installed (installed: {listed}){hint}"


def entry_points(*, group: str) -> tuple[EntryPoint, ...]:
    """Those of a group."""
    return _read_entry_points(group, tuple(sys.path))


@lru_cache(maxsize=4)  # reading takes longer than all else that building a small optimizer does
def _read_entry_points(group: str, _search_path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    return tuple(metadata.entry_points(group=group))


def _entries() -> dict[str, EntryPoint]:
    """The installed entry points by name, ordered by name; raises TransportError for a name taken twice."""
    found: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: (entry.name, entry.value)):
        other = found.get(entry.name)
        if other is not None and other.value != entry.value:
            raise TransportError(
                f"transport {entry.name!r} is installed twice: {other.value} and {entry.value}; uninstall one"
            )
        found[entry.name] = entry
    return found


def _load(entry: EntryPoint) -> type[Transport]:
    where = f"transport {entry.name!r} ({entry.value})"
    try:
        kind = entry.load()
    except Exception as error:  # whatever a package's import may raise
        raise TransportError(f"{where} cannot be imported: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Transport)):
        raise TransportError(f"{where} is not a dion_core Transport class")
    version = getattr(kind, "interface_version", None)
    if version != INTERFACE_VERSION:
        raise TransportError(
            f"{where} was made for interface version {version}; this dion-core has {INTERFACE_VERSION}: install "
            "matching versions"
        )
    return kind
