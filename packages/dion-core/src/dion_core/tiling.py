"""Declared shards of all ranks together: they tile each tensor, and what is whole is gathered from them or cut by them.

Legend: W ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dion_core.collectives import Group, gathered_parts
from dion_core.declared import SHARD, DeclaredShard
from dion_core.preflight import gather_lines
from dion_core.state import ROW_STATE

_KIND = "declared shards of checked parameters"


def agree_on_shards(
    groups: Sequence[dict[str, Any]], names: Mapping[Tensor, str], group: Group, replicas: Group, device: torch.device
) -> None:
    """The declared shards of the groups know those of all ranks, which have checked their parameters. Collective.

    One that has failed is known here, before the others would wait for it in new groups of ranks.

    Args:
        groups: parameter groups, whose shards are replaced.
        names: of the parameters.
        group: the ranks that step together.
        replicas: those that hold the plain tensors: the same ones, or this one alone.
        device: of the messages.

    Raises:
        ValueError: the shards of a parameter do not tile it, with its name, on all ranks alike.
        TransportError: ranks declare shards of other parameters, or some rank has failed.
    """
    new = [each for each in groups if each.get(SHARD) is not None and not each[SHARD].ranges]
    declared = [(each, parameter) for each in new for parameter in each["params"]] if replicas.size > 1 else []
    lines = [_line(names[parameter], parameter, each[SHARD], replicas) for each, parameter in declared]
    gathered_lines = zip(group.ranks, gather_lines(_KIND, lines, group, device), strict=True)
    by_rank = {rank: [json.loads(line) for line in of_rank] for rank, of_rank in gathered_lines}
    for ranks in {tuple(entry["ranks"]): None for of_rank in by_rank.values() for entry in of_rank}:
        # All ranks look at the parts of all, so that all raise.
        holders = {rank: by_rank[rank] for rank in ranks}
        _check_same_parameters(holders)
        for of_parameter in zip(*holders.values(), strict=True):
            _check_tiling(dict(zip(ranks, of_parameter, strict=True)))
    if replicas.size == 1:
        for each in new:
            each[SHARD] = replace(each[SHARD], ranges=((0, each[SHARD].size),))
    for place, (each, _) in enumerate(declared):
        entries = [by_rank[rank][place] for rank in replicas.ranks]
        each[SHARD] = replace(each[SHARD], ranges=tuple((entry["offset"], entry["length"]) for entry in entries))


def _line(name: str, parameter: Tensor, shard: DeclaredShard, replicas: Group) -> str:
    axis, shape = shard.axis % parameter.ndim, list(parameter.shape)
    length, shape[axis] = shape[axis], shard.size
    where = {"ranks": replicas.ranks, "axis": axis, "offset": shard.offset, "length": length}
    return json.dumps({"name": name, "shape": shape, **where})


def _check_same_parameters(by_rank: Mapping[int, Sequence[Mapping[str, Any]]]) -> None:
    """Raises ValueError where ranks declare shards of other parameters, axes or whole shapes."""
    whole = {rank: [_whole(entry) for entry in entries] for rank, entries in by_rank.items()}
    first, wanted = next(iter(whole.items()))
    for rank, given in whole.items():
        for number in range(max(len(given), len(wanted))):
            one, other = (each[number] if number < len(each) else "nothing" for each in (wanted, given))
            if one != other:
                raise ValueError(
                    f"ranks declare shards of other tensors: rank {first} of {one}, rank {rank} of {other}"
                )


def _whole(entry: Mapping[str, Any]) -> str:
    return f"{entry['name']}, axis {entry['axis']} of {tuple(entry['shape'])}"


def _check_tiling(by_rank: Mapping[int, Mapping[str, Any]]) -> None:
    """Raises ValueError where the parts of a parameter leave a hole or overlap."""
    first = next(iter(by_rank.values()))
    size = first["shape"][first["axis"]]
    parts = sorted((each["offset"], each["offset"] + each["length"], rank) for rank, each in by_rank.items())
    end, wrong = 0, ""
    for start, stop, rank in [part for part in parts if part[1] > part[0]] + [(size, size, None)]:
        if start > end:
            wrong = f"nobody holds [{end}, {start})"
        elif start < end and rank is not None:
            wrong = f"rank {rank} holds from {start} on what another rank holds to {end - 1}"
        if wrong:
            break
        end = stop
    if wrong:
        told = ", ".join(
            f"rank {rank} [{each['offset']}, {each['offset'] + each['length']})" for rank, each in by_rank.items()
        )
        raise ValueError(
            f"{first['name']}: the declared shards of axis {first['axis']} do not tile {tuple(first['shape'])}: "
            f"{wrong}; {told}"
        )


def gathered(state_dict: dict[str, Any], groups: Sequence[Mapping[str, Any]], replicas: Group) -> dict[str, Any]:
    """A state dict in which state of declared shards is whole, on the CPU. Collective where there are some.

    Args:
        state_dict: of this rank.
        groups: the live ones.
        replicas: the ranks that hold the parts.
    """

    def whole(value: Tensor, axis: int, shard: DeclaredShard, length: int) -> Tensor:
        lengths = [length for _, length in shard.ranges]
        parts = gathered_parts(value, axis, lengths, replicas.named("the state of declared shards"))
        in_order = sorted(range(len(parts)), key=lambda rank: shard.ranges[rank])
        return torch.cat([parts[rank] for rank in in_order], dim=axis).cpu()

    changed = _mapped(state_dict, groups, whole)
    for group in changed["param_groups"]:
        group.pop(SHARD, None)
    return changed


def own_shards(state_dict: dict[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A state dict in which whole state of parameters with declared shards is cut to this rank's part."""

    def part(value: Tensor, axis: int, shard: DeclaredShard, length: int) -> Tensor:
        return value.narrow(axis, shard.offset, length) if value.shape[axis] == shard.size else value

    saved = state_dict["param_groups"]
    given = [{} if of_saved.get(SHARD) else each for each, of_saved in zip(groups, saved, strict=False)]
    return _mapped(state_dict, given, part)


def _mapped(
    state_dict: dict[str, Any],
    groups: Sequence[Mapping[str, Any]],
    change: Callable[[Tensor, int, DeclaredShard, int], Tensor],
) -> dict[str, Any]:
    """The state dict with every tensor changed that is divided as its parameter is; nothing is changed in place.

    `change` gets the tensor, its axis, the declared shard, and how long this rank's part of the parameter is.
    """
    states = dict(state_dict["state"])
    for saved, live in zip(state_dict["param_groups"], groups, strict=False):
        shard = live.get(SHARD)
        if shard is None:
            continue
        for number, parameter in zip(saved["params"], live["params"], strict=False):
            axis = shard.axis % parameter.ndim
            if states.get(number):
                states[number] = {
                    key: change(value, axis, shard, parameter.shape[axis]) if is_divided(key, value, axis) else value
                    for key, value in states[number].items()
                }
    return {**state_dict, "state": states, "param_groups": [dict(each) for each in state_dict["param_groups"]]}


def is_divided(key: str, value: Any, axis: int) -> bool:
    """Whether a tensor of the state is divided along that axis of its parameter: values a row are not by columns."""
    if not isinstance(value, Tensor) or not value.ndim:
        return False
    return axis < value.ndim - 1 if key in ROW_STATE else True
