"""Sorts a model's parameters into groups: hidden matrices for the matrix algorithm, the rest for AdamW or Lion.

`param_rules` has the rules; here overrides are applied, groups are made, and a table shows what went where.

Example: norms and biases left undecayed, and a router as a matrix:

    >>> groups = param_groups_for(
    ...     model,
    ...     lr=0.02,
    ...     elementwise={"lr": 1e-3},
    ...     overrides={
    ...         "*.bias": {"weight_decay": 0.0},
    ...         "*norm*": {"weight_decay": 0.0},
    ...         "*.router.weight": "matrix",
    ...     },
    ... )
    >>> print(groups)
    >>> optimizer = NorDion2(groups)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from dion_core.options import check_options
from dion_core.param_rules import Place, Verdict, find_heads, verdict

Override = str | Mapping[str, Any]

ADAMW_LR = 3e-4
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""What torch.compile, activation checkpointing and FSDP put into the names of parameters."""
_NUMBER = re.compile(r"(?<![^.])\d+(?=\.)")
"""A whole part of a name: the number of a layer."""


@dataclass(frozen=True)
class Sorted:
    """One trainable parameter: all its names (several if it is tied), its group options, and why it has them."""

    names: tuple[str, ...]
    parameter: nn.Parameter
    options: Mapping[str, Any]
    reason: str


class ParamGroups(list[dict[str, Any]]):
    """Parameter groups as any optimizer takes them, which print as a table of what went where and why.

    The table shows the groups as they were made; it does not follow changes.
    """

    def __init__(self, entries: Sequence[Sorted], frozen: Sequence[nn.Parameter]) -> None:
        """Groups the entries by their options: matrices first, then in the order of the model.

        Args:
            entries: of every trainable parameter.
            frozen: the parameters that are left out.
        """
        by_options: dict[Any, list[Sorted]] = {}
        for entry in sorted(entries, key=lambda entry: entry.options["algorithm"] != "matrix"):
            by_options.setdefault(_key(entry.options), []).append(entry)
        self._entries = list(by_options.values())
        self._frozen = frozen
        super().__init__(
            {"params": [(entry.names[0], entry.parameter) for entry in members], **members[0].options}
            for members in self._entries
        )

    def __repr__(self) -> str:
        rows = [_rows(members) for members in self._entries]
        widths = [max(map(len, column)) for column in zip(*(row for part in rows for row in part), strict=True)]
        lines = []
        for number, (members, part) in enumerate(zip(self._entries, rows, strict=True)):
            options = ", ".join(f"{name}={value!r}" for name, value in members[0].options.items())
            lines.append(f"group {number}: {options}: {_count([entry.parameter for entry in members])}")
            for row in part:
                cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
                lines.append("  " + "  ".join(cells).rstrip())
        if self._frozen:
            lines.append(f"frozen, in no group: {_count(self._frozen)}")
        return "\n".join(lines)


def param_groups_for(
    model: nn.Module,
    *,
    lr: float | Tensor | None = None,
    elementwise: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Override] | None = None,
) -> ParamGroups:
    """Groups with every trainable parameter of the model once, under its name; printed, a table of what went where.

    Matrices of hidden layers, convolutions and experts go to the matrix algorithm, everything else to AdamW, and so
    does what may or may not be a hidden matrix: the table says why, `overrides` corrects it. Parameters that are
    frozen now are in no group. Nothing is read but names, types and shapes, so that a model on the meta device, sharded
    or compiled is sorted alike; an optimizer wants the groups of the model as it will be trained, after `fully_shard`.

    Args:
        model: any module; names are those in a model without wrappers (DDP, torch.compile, checkpointing).
        lr: of the matrices; None leaves it to the optimizer.
        elementwise: options of everything else, beside {"algorithm": "adamw", "lr": 3e-4}. Lion needs an lr.
        overrides: by pattern of names (as in `fnmatch`; a tied tensor has several), an algorithm or group options.
            Every pattern that matches is applied, so that later ones win.

    Raises:
        ValueError: a pattern matches nothing, an option is not allowed, a Lion group has no lr, or a shape is unknown.
    """
    wishes = _checked_wishes(lr, elementwise or {}, overrides or {})
    places = list(_places(model))
    heads = find_heads(places)
    by_parameter: dict[nn.Parameter, list[Place]] = {}
    for place in places:
        by_parameter.setdefault(place.parameter, []).append(place)
    trainable = {parameter: same for parameter, same in by_parameter.items() if parameter.requires_grad}
    wishes.check_patterns([place.name for same in trainable.values() for place in same])
    entries = []
    for parameter, same in trainable.items():
        # One use as an embedding or a head keeps a tied tensor from the matrix algorithm.
        found = min((verdict(place, heads) for place in same), key=lambda each: each.algorithm == "matrix")
        names = tuple(place.name for place in same)
        options, reason = wishes.apply(names, found)
        entries.append(Sorted(names, parameter, options, reason))
    return ParamGroups(entries, [parameter for parameter in by_parameter if parameter not in trainable])


def _places(model: nn.Module) -> Iterator[Place]:
    """Every name of every parameter, in the order of the model."""
    inner = getattr(model, "_orig_mod", model)
    root: nn.Module = inner.module if isinstance(inner, DistributedDataParallel) else inner
    for path, module in root.named_modules(remove_duplicate=False):
        for own, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = ".".join(part for part in [*path.split("."), own] if part and part not in _WRAPPERS)
            if is_lazy(parameter):
                raise ValueError(f"{name} has no shape yet: run the lazy module once before its parameters are sorted")
            yield Place(name, module, parameter)


@dataclass(frozen=True)
class _Wishes:
    """What the user wants beside the rules.

    Attributes:
        rest: the algorithm of what is no matrix.
        defaults: group options by algorithm.
        patterns: group options by pattern of names, the later ones stronger.
    """

    rest: str
    defaults: Mapping[str, Mapping[str, Any]]
    patterns: Mapping[str, Mapping[str, Any]]

    def check_patterns(self, names: Sequence[str]) -> None:
        """Raises ValueError for a pattern that matches none of the names."""
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                known = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
                raise ValueError(f"overrides[{pattern!r}] matches no trainable parameter; there are {known or 'none'}")

    def apply(self, names: Sequence[str], found: Verdict) -> tuple[dict[str, Any], str]:
        """The options and the reason of a parameter with these names, of which the rules found this."""
        matching = [pattern for pattern in self.patterns if any(fnmatchcase(name, pattern) for name in names)]
        changes = {key: value for pattern in matching for key, value in self.patterns[pattern].items()}
        ruled = "matrix" if found.algorithm == "matrix" else self.rest
        algorithm = changes.get("algorithm", ruled)
        options = {**self.defaults[algorithm], **(found.options if algorithm == ruled else {}), **changes}
        if algorithm != "matrix" and "lr" not in options:
            raise ValueError(f"{names[0]}: algorithm={algorithm!r} needs an lr of its own")
        decisive = [pattern for pattern in matching if "algorithm" in self.patterns[pattern]]
        if decisive:
            return options, f"overrides[{decisive[-1]!r}]"
        return options, ", ".join([found.reason, *(f"overrides[{pattern!r}]" for pattern in matching)])


def _checked_wishes(
    lr: float | Tensor | None, elementwise: Mapping[str, Any], overrides: Mapping[str, Override]
) -> _Wishes:
    matrices = {"algorithm": "matrix"} if lr is None else {"algorithm": "matrix", "lr": lr}
    check_options(matrices)
    defaults = {"matrix": matrices, "adamw": {"algorithm": "adamw", "lr": ADAMW_LR}, "lion": {"algorithm": "lion"}}
    check_options(elementwise, " in elementwise")
    rest = elementwise.get("algorithm", "adamw")
    if rest == "matrix":
        raise ValueError("algorithm='matrix' in elementwise is not allowed: 'adamw' or 'lion'")
    patterns = {}
    for pattern, value in overrides.items():
        patterns[pattern] = {"algorithm": value} if isinstance(value, str) else dict(value)
        check_options(patterns[pattern], f" in overrides[{pattern!r}]")
    for where, options in (("elementwise", elementwise), *patterns.items()):
        if "params" in options:
            raise ValueError(f'"params" in {where} is not allowed: only options of a group')
    return _Wishes(rest, {**defaults, rest: {**defaults[rest], **elementwise}}, patterns)


def _key(options: Mapping[str, Any]) -> Any:
    """Equal for options that may share a group: tensors, which a scheduler changes in place, by identity."""
    values = ((name, id(value) if isinstance(value, Tensor) else repr(value)) for name, value in options.items())
    return tuple(sorted(values, key=lambda item: item[0]))


def _rows(members: Sequence[Sorted]) -> list[tuple[str, ...]]:
    """The lines of a group: name, shape, how often, number of parameters, reason; numbered layers are one line."""
    folded: dict[tuple[str, ...], list[Sorted]] = {}
    for entry in members:
        name = " = ".join(dict.fromkeys(_NUMBER.sub("*", name) for name in entry.names))
        shape = " x ".join(map(str, entry.parameter.shape)) or "scalar"
        folded.setdefault((name, shape, entry.reason), []).append(entry)
    rows: list[tuple[str, ...]] = []
    for (name, shape, reason), same in folded.items():
        if len(same) == 1:
            name = " = ".join(same[0].names)
        times = f"{len(same)} times" if len(same) > 1 else ""
        rows.append((name, shape, times, f"{_numel([entry.parameter for entry in same]):,}", reason))
    return rows


def _numel(parameters: Sequence[nn.Parameter]) -> int:
    return sum(math.prod(parameter.shape) for parameter in parameters)


def _count(parameters: Sequence[nn.Parameter]) -> str:
    return f"{len(parameters)} tensor{'s' * (len(parameters) != 1)}, {_numel(parameters):,} parameters"
