"""Which algorithm a parameter is meant for, from the module that holds it, its name and its shape.

The first line that fits decides:

| parameter | algorithm |
|---|---|
| below 2-D, or named a bias | AdamW |
| of an embedding or a norm (by type, or a class name that ends so) | AdamW |
| of a convolution | matrix, flattened to (outputs, everything else) |
| LoRA, by name | AdamW: see below |
| weight of a linear layer that is the output head | AdamW |
| weight of a linear layer, thin: fewer than 32 rows or columns, and 8 times as many of the other | AdamW: see below |
| weight of a linear layer, or of the projections of `nn.MultiheadAttention` | matrix |
| 3-D, of something called expert or MoE | matrix, one for each place in the stack |
| anything else, which may or may not be a hidden matrix | AdamW |

Linear layers are `nn.Linear`, classes whose name ends in Linear, and the Conv1D of Hugging Face's GPT-2. The last one
stores its weight as (in, out): its rows are inputs. With `scale="spectral_norm"` the factor is then sqrt(in / out)
instead of sqrt(out / in), and rows are chosen and normalized by input; `scale="rms_norm"` does not know the difference.

The output head lies outside the numbered layers. It is what is called so (lm_head, head, classifier, output, ...);
without such a name, the last linear layer with as many outputs as the first embedding has rows; without that too, the
model's last linear layer. What is tied to an embedding is an embedding under its first name.

Thin matrices are factors of low-rank updates, routers of few experts, heads of few classes. Their few singular values
tell which direction matters, an orthonormal update makes them all equal; and B of LoRA starts at zero, where that
would let it jump by lr * sqrt(out / rank) at once. AdamW costs little there, and its rates are what LoRA is tuned for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

THIN, ELONGATED = 32, 8
"""A thin matrix has fewer than `THIN` rows (or columns) and at least `ELONGATED` times as many columns (or rows)."""

MATRIX_KINDS: Mapping[str, Mapping[str, Any]] = {
    "matrix": {},
    "convolution": {"flatten": True},
    "stack": {"flatten": False},
}
"""What the optimizers take as matrices, with the group options that it needs."""

_NORM = re.compile(r"Norm(\dd)?$")
_HEAD = re.compile(r"(\w+_)?heads?|unembed(ding)?|embed_out|classifier|score|logits|output(_layer|_proj(ection)?)?")
_EMBEDDING = re.compile(r"embed|^w[tp]e$|^pos_|_token$")
_STACK = re.compile(r"expert|moe", re.IGNORECASE)


@dataclass(frozen=True)
class Place:
    """One name of a parameter: a tied one has several.

    Attributes:
        name: in the model, without what wrappers add.
        owner: the module that holds it.
        parameter: itself; a meta tensor will do.
    """

    name: str
    owner: nn.Module
    parameter: nn.Parameter

    @property
    def path(self) -> list[str]:
        """The names of the modules on the way, the owner's last."""
        return self.name.split(".")[:-1]

    @property
    def kind(self) -> str:
        """The class of the owner; that of FSDP2, which it puts before the model's own, is passed over."""
        names = (cls.__name__ for cls in type(self.owner).__mro__)
        return next(name for name in names if not name.startswith("FSDP"))


@dataclass(frozen=True)
class Verdict:
    """The algorithm of a parameter ("matrix" or "elementwise"), why, and the group options that come with it."""

    algorithm: str
    reason: str
    options: Mapping[str, Any] = field(default_factory=dict)


def find_heads(places: Sequence[Place]) -> dict[str, str]:
    """The names of the weights that make up the output head, each with the reason."""
    weights = [place for place in places if place.parameter.ndim == 2 and _is_linear(place)]
    outside = [place for place in weights if not any(part.isdigit() for part in place.path[:-1])]
    named = [place for place in outside if _is_head(place)]
    if named:
        return {place.name: "output head by its name" for place in named}
    rows = next((place.parameter.shape[0] for place in places if isinstance(place.owner, nn.Embedding)), None)
    as_many = [place for place in outside if _num_outputs(place) == rows]
    if as_many:
        return {as_many[-1].name: "output head: as many outputs as the embedding has rows"}
    if outside and outside[-1] is weights[-1]:
        return {outside[-1].name: "output head: the last linear layer"}
    return {}


def verdict(place: Place, heads: Mapping[str, str]) -> Verdict:
    """What the rules of this module say of a parameter under one of its names.

    Args:
        place: the parameter, its name and its owner.
        heads: what `find_heads` returned.
    """
    parameter, own = place.parameter, place.name.split(".")[-1]
    if _NORM.search(place.kind):
        return Verdict("elementwise", f"norm ({place.kind})")
    if "bias" in own.split("_"):
        return Verdict("elementwise", "bias")
    if parameter.ndim < 2:
        return Verdict("elementwise", f"{parameter.ndim}-D")
    if isinstance(place.owner, nn.Embedding | nn.EmbeddingBag) or place.kind.endswith("Embedding"):
        return Verdict("elementwise", f"embedding ({place.kind})")
    if isinstance(place.owner, nn.modules.conv._ConvNd):
        return _matrix("convolution", place.kind)
    if any(part.startswith("lora_") for part in place.name.split(".")):
        return Verdict("elementwise", "low-rank factor (LoRA)")
    if parameter.ndim == 2 and _is_linear(place):
        return _linear(place, heads)
    if any(_EMBEDDING.search(part) for part in place.name.split(".")):
        return Verdict("elementwise", "embedding by its name")
    if parameter.ndim == 3 and any(_STACK.search(word) for word in (place.name, place.kind)):
        return _matrix("stack", f"stack of {parameter.shape[0]} matrices")
    return Verdict("elementwise", f"{parameter.ndim}-D of {place.kind}: may not be a hidden matrix")


def _linear(place: Place, heads: Mapping[str, str]) -> Verdict:
    if place.name in heads:
        return Verdict("elementwise", heads[place.name])
    short, long = sorted(place.parameter.shape)
    if short < THIN and long >= ELONGATED * short:
        return Verdict("elementwise", "thin: low-rank factor, router or small head")
    return _matrix("matrix", place.kind + (", rows are inputs" if place.kind == "Conv1D" else ""))


def _matrix(kind: str, reason: str) -> Verdict:
    return Verdict("matrix", reason, MATRIX_KINDS[kind])


def _is_linear(place: Place) -> bool:
    if isinstance(place.owner, nn.MultiheadAttention):
        return place.name.endswith("proj_weight")
    return isinstance(place.owner, nn.Linear) or place.kind.endswith("Linear") or place.kind == "Conv1D"


def _is_head(place: Place) -> bool:
    """Whether the owner, or the numbered list that it is in, is called like an output head."""
    numbered = bool(place.path) and place.path[-1].isdigit()
    path = place.path[:-1] if numbered else place.path
    return bool(path) and not any(part.isdigit() for part in path) and _HEAD.fullmatch(path[-1]) is not None


def _num_outputs(place: Place) -> int:
    return place.parameter.shape[1 if place.kind == "Conv1D" else 0]
