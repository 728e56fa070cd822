"""Commands whose options are the fields of a dataclass: one name for what would else be many parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

Options = TypeVar("Options")


def command(kind: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Makes a function of one dataclass a function of its fields, as typer reads them.

    Args:
        kind: the dataclass; annotations of its fields say how options are called and explained.
    """

    def of_fields(function: Callable[[Options], None]) -> Callable[..., None]:
        def run(**values: Any) -> None:
            function(kind(**values))

        hints = get_type_hints(kind, include_extras=True)
        parameters = [
            each.replace(annotation=hints[each.name], kind=inspect.Parameter.KEYWORD_ONLY)
            for each in inspect.signature(kind).parameters.values()
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = hints
        run.__name__, run.__doc__ = function.__name__, function.__doc__
        return run

    return of_fields
