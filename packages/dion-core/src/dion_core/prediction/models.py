"""The parameters to plan for, as tensors on the meta device: shapes alone, no memory."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dion_core.inventories import INVENTORIES, Inventory
from dion_core.param_groups import param_groups_for

Groups = list[dict[str, Any]]
"""Parameter groups; "params" holds (name, parameter) pairs."""


class ModelError(ValueError):
    """A model that cannot be read; the message says what would do."""


def groups_of(source: str, dtype: torch.dtype) -> Groups:
    """The parameter groups of a model, every parameter on the meta device and of that dtype.

    Args:
        source: the name of an inventory, the path of a Hugging Face config.json, or "module:function", a function
            without arguments that builds the model.
        dtype: of the parameters.

    Raises:
        ModelError: it is none of these, or building failed.
    """
    if source in INVENTORIES:
        return groups_of_inventory(INVENTORIES[source], dtype)
    if Path(source).is_file():
        return _groups_of_model(lambda: _from_config(source), source, dtype)
    module, colon, function = source.partition(":")
    if colon and module and function:
        return _groups_of_model(lambda: _from_function(module, function), source, dtype)
    raise ModelError(
        f"{source!r} is no model: give an inventory ({', '.join(INVENTORIES)}), the path of a config.json, or "
        "module:function"
    )


def groups_of_inventory(inventory: Inventory, dtype: torch.dtype) -> Groups:
    """One group with every matrix of the inventory."""
    params = [
        (f"{rows}x{columns} number {number}", nn.Parameter(torch.empty(rows, columns, dtype=dtype, device="meta")))
        for (rows, columns), count in inventory.items()
        for number in range(count)
    ]
    return [{"params": params, "algorithm": "matrix"}]


def _groups_of_model(build: Callable[[], object], source: str, dtype: torch.dtype) -> Groups:
    try:
        with torch.device("meta"):
            model = build()
    except ModelError:
        raise
    except Exception as error:  # whatever a model's code may raise
        raise ModelError(f"{source}: building the model raised {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{source} made {type(model).__name__}; a torch.nn.Module is needed")
    stray = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
    if stray:
        raise ModelError(f"{source}: {stray[0]} is not on the meta device: the model must not set a device itself")
    return list(param_groups_for(model.to(dtype)))


def _from_config(path: str) -> object:
    try:
        import transformers
    except ImportError as error:
        raise ModelError(f"{path}: reading a config.json needs transformers: pip install transformers") from error
    config = transformers.AutoConfig.from_pretrained(path)
    for name in getattr(config, "architectures", None) or ():
        if kind := getattr(transformers, name, None):
            return kind(config)
    automatic: Any = transformers.AutoModel
    return automatic.from_config(config)


def _from_function(module: str, function: str) -> object:
    here = str(Path.cwd())
    if here not in sys.path:  # as `python -m` has it, which a console script has not
        sys.path.insert(0, here)
    return getattr(importlib.import_module(module), function)()
