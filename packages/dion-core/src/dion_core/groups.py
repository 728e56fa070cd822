"""Groups of ranks that torch.distributed does not know: found by entry-point name, or made from a communicator."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, Protocol

from dion_core.collectives import Group, TransportError

ENTRY_POINT_GROUP = "dion.groups"
KNOWN_PACKAGES = {"mpi": "dion-comm-mpi", "nccl": "dion-comm-mpi"}
"""Which package brings the groups that the project itself makes."""


class Communicator(Protocol):
    """What a communicator of mpi4py is known by, which need not be installed."""

    def Get_rank(self) -> int: ...

    def Get_size(self) -> int: ...


def available_groups() -> tuple[str, ...]:
    """The names of the installed groups."""
    return tuple(sorted({entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)}))


def loading_errors() -> dict[str, str]:
    """Of every installed group what is wrong with it, "" if nothing is."""
    errors = {}
    for name in available_groups():
        try:
            check: Callable[[], object] = getattr(
                _factory(name), "check", object
            )  # what a group needs beside its package
            check()
            errors[name] = ""
        except (TransportError, ImportError) as error:
            errors[name] = str(error)
    return errors


def foreign_group(given: Any) -> Group | None:
    """The group of that name, of a communicator of mpi4py, or given as it is; None for anything else. Collective.

    Raises:
        TransportError: no group of that name is installed, or its package cannot be imported.
    """
    if isinstance(given, str):
        return _factory(given)()
    if hasattr(given, "Get_rank") and hasattr(given, "Get_size"):
        return _factory("mpi")(given)
    if hasattr(given, "all_to_all") and hasattr(given, "all_gather"):
        group: Group = given
        return group
    return None


def _factory(name: str) -> Callable[..., Group]:
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        if entry.name == name:
            try:
                factory: Callable[..., Group] = entry.load()
            except Exception as error:  # whatever a package's import may raise
                raise TransportError(f"group {name!r} ({entry.value}) cannot be imported: {error}") from error
            return factory
    package = KNOWN_PACKAGES.get(name)
    hint = f"`pip install {package}` brings it" if package else f"known: {sorted(KNOWN_PACKAGES)}"
    raise TransportError(
        f"group={name!r} is not installed (installed: {', '.join(available_groups()) or 'none'}); {hint}"
    )
