"""The matrices of one parameter: heads, blocks, slices of a stack, a flattened convolution, or the parameter itself.

Everything inside works on plain (rows, columns) matrices. Here a parameter's local tensor, its gradient and its
state become such matrices, as views that share their storage, and the layout of the parameter becomes that of each.

Example: `split_sizes=(8, 2, 2)` of a (12, C) weight over two ranks. Rank 0 holds rows 0 to 5, which are 6 rows of
block 0, none of block 1 and none of block 2; rank 1 holds 2 rows of each.

Legend: R rows and C columns of one whole matrix.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise, product
from typing import Any

from torch import Tensor

from dion_core.collectives import Group
from dion_core.declared import SHARD, whole_shape
from dion_core.layout import Axis, Layout, Segment, in_pieces
from dion_core.placements import local_part, parameter_place

logger = logging.getLogger("dion_core")

VIEW_KEYS = ("num_heads", "split_sizes", "flatten")
"""Group keys that say which matrices a parameter is."""


@dataclass(frozen=True)
class Views:
    """How a parameter's tensors on this rank divide into matrices.

    Attributes:
        name: of the parameter.
        labels: what each matrix is called beside that name; "" where the parameter is one matrix.
        num_leading: how many leading dimensions number the matrices of a stack.
        divided: other ranks hold other matrices than this one: of the stack, or as the parameter of that name.
        in_pieces: its matrices lie in pieces on several ranks.
        order: the dimensions of a flattened tensor after the first, as they follow each other in storage; None where
            nothing is flattened.
        rows: how many rows of each block this rank holds; None where rows are not divided.
    """

    name: str
    labels: tuple[str, ...]
    num_leading: int = 0
    divided: bool = False
    in_pieces: bool = False
    order: tuple[int, ...] | None = None
    rows: tuple[int, ...] | None = None

    @property
    def plain(self) -> bool:
        """Whether tensors are matrices as they are."""
        return not self.num_leading and self.order is None and self.rows is None

    @cached_property
    def full_names(self) -> tuple[str, ...]:
        """Of every matrix the name of the parameter with the label."""
        return tuple(f"{self.name} ({label})" if label else self.name for label in self.labels)

    def describe(self, number: int) -> str:
        """One matrix, with the order of its columns, in which ranks must agree."""
        order = "" if self.order is None else f" flattened in the order {self.order}"
        return self.full_names[number] + order

    def of(self, tensor: Tensor, *, writable: bool = True) -> Sequence[Tensor]:
        """The matrices of one local tensor, all views of it.

        Args:
            tensor: the parameter, or a tensor of its shape, or one with a value a row (see `row_state_like`).
            writable: False allows copies, where a gradient is not stored as its parameter is.

        Raises:
            ValueError: a tensor that is to be flattened is not stored as the parameter was when the plan was made.
        """
        if self.num_leading:
            matrices = [tensor]
            for _ in range(self.num_leading):
                matrices = [matrix for stack in matrices for matrix in stack.unbind()]
            return matrices
        if self.order is not None and tensor.ndim > 2:
            tensor = self._flat(tensor, writable)
        return (tensor,) if self.rows is None else tensor.split_with_sizes(self.rows)

    def _flat(self, tensor: Tensor, writable: bool) -> Tensor:
        assert self.order is not None
        shape = (tensor.shape[0], math.prod(tensor.shape[1:]))
        permuted = tensor.permute(0, *self.order)
        if not writable:
            return permuted.reshape(shape)
        try:
            return permuted.view(shape)
        except RuntimeError as error:
            raise ValueError(
                f"{self.name}: strides {tensor.stride()} of shape {tuple(tensor.shape)} cannot be flattened in place; "
                "give a model its memory format before its optimizer is made"
            ) from error


def is_flattened(parameter: Tensor, options: Mapping[str, Any]) -> bool:
    """Whether all dimensions after the first are columns; of two there is nothing to flatten."""
    return bool(options.get("flatten")) and parameter.ndim > 2


def check_view_keys(options: Mapping[str, Any], where: str) -> None:
    """Raises ValueError for keys of a group of matrices that cannot be, whatever its parameters are."""
    heads, sizes, flatten = (options.get(name) for name in VIEW_KEYS)
    if heads is not None and not _counts(heads):
        raise ValueError(f"num_heads={heads!r}{where} is not allowed: None or a whole number >= 1")
    if sizes is not None and (not isinstance(sizes, list | tuple) or not sizes or not all(map(_counts, sizes))):
        raise ValueError(f"split_sizes={sizes!r}{where} is not allowed: None or a tuple of whole numbers >= 1")
    if flatten is not None and not isinstance(flatten, bool):
        raise ValueError(f"flatten={flatten!r}{where} is not allowed: True or False")
    given = [f"{name}={options[name]!r}" for name in VIEW_KEYS if options.get(name)]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)}{where} are not allowed together: only one of {VIEW_KEYS}")


def check_views(parameter: Tensor, name: str, options: Mapping[str, Any]) -> None:
    """Raises ValueError for a parameter that cannot be divided as its group says, by its name."""
    heads, sizes = options.get("num_heads"), options.get("split_sizes")
    shape = whole_shape(parameter, options)
    for key, value in (("num_heads", heads), ("split_sizes", sizes)):
        if value is not None and parameter.ndim != 2:
            raise ValueError(f"{name}: {key}={value!r} divides the rows of a matrix; shape {shape} is none")
    if heads is not None and shape[0] % heads:
        raise ValueError(f"{name}: num_heads={heads} does not divide the {shape[0]} rows of shape {shape}")
    if sizes is not None and sum(sizes) != shape[0]:
        raise ValueError(f"{name}: split_sizes={sizes!r} is {sum(sizes)} rows together; shape {shape} has {shape[0]}")


def warn_of_views(parameter: Tensor, name: str, options: Mapping[str, Any]) -> None:
    """Logs what is allowed and seldom meant: a convolution taken as one small matrix for each pair of channels."""
    if parameter.ndim > 3 and options.get("flatten") is None:
        *leading, rows, columns = parameter.shape
        logger.warning(
            "%s of shape %s is taken as %d matrices of %d x %d; flatten=True in its group makes it one matrix, "
            "flatten=False says that it is a stack",
            *(name, tuple(parameter.shape), math.prod(leading), rows, columns),
        )


def parameter_matrices(
    parameter: Tensor, name: str, options: Mapping[str, Any], replicas: Group
) -> tuple[Views, list[Layout]]:
    """The matrices of one parameter of which this rank holds parts, and where each lies.

    Args:
        parameter: as in `parameter_place`.
        name: of the parameter.
        options: of its group.
        replicas: the ranks that hold equal copies of a plain tensor.

    Raises:
        ValueError: a layout that is not supported, or a parameter that cannot be divided so, by its name.
    """
    check_views(parameter, name, options)
    flat = is_flattened(parameter, options)
    place = parameter_place(parameter, name, replicas, flatten=flat, shard=options.get(SHARD))
    layout = place.layout
    views = Views(name, ("",), divided=place.divided, in_pieces=in_pieces(layout))
    if flat:
        views = replace(views, order=_storage_order(parameter))
        views.of(local_part(parameter).detach())  # refuses now what the first step would
        return views, [layout]
    if parameter.ndim > 2:
        here = [range(first, first + number) for first, number in place.leading]
        labels = tuple(f"slice {', '.join(map(str, numbers))}" for numbers in product(*here))
        return replace(views, labels=labels, num_leading=len(here)), [layout] * len(labels)
    word, sizes = _row_blocks(parameter, options)
    if len(sizes) == 1:
        return views, [layout]
    layouts = [_rows_of(layout, start, stop) for start, stop in pairwise(accumulate(sizes, initial=0))]
    rows = tuple(layout.rows(layout.group.rank, 0) for layout in layouts)
    return replace(views, labels=tuple(f"{word} {number}" for number in range(len(sizes))), rows=rows), layouts


def _row_blocks(parameter: Tensor, options: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    rows, heads, sizes = whole_shape(parameter, options)[0], options.get("num_heads"), options.get("split_sizes")
    if heads is not None:
        return "head", (rows // heads,) * heads
    return "block", (rows,) if sizes is None else tuple(sizes)


def _rows_of(layout: Layout, start: int, stop: int) -> Layout:
    """The layout of the matrix that is rows start to stop of the one matrix of `layout`."""
    shape = (stop - start, layout.shape[1])
    if layout.axis is Axis.COLUMNS:
        return replace(layout, shape=shape)

    def inside(pieces: Sequence[Segment]) -> Iterator[Segment]:
        for offset, length in pieces:
            first, last = max(offset, start), min(offset + length, stop)
            if first < last:
                yield first - start, last - first

    segments = tuple((tuple(inside(of_rank[0])),) for of_rank in layout.segments)
    return replace(layout, shape=shape, segments=segments)


def _storage_order(parameter: Tensor) -> tuple[int, ...]:
    """The dimensions after the first from the longest stride to the shortest, so that flattening them is a view.

    The order of columns does not matter to an update; it is (1, 2, 3) of a contiguous convolution and (2, 3, 1) of
    one in channels_last. Dimensions of size 1, whose strides say nothing, come last.
    """
    shape, stride = parameter.shape, parameter.stride()
    return tuple(sorted(range(1, parameter.ndim), key=lambda dim: (shape[dim] == 1, -stride[dim])))


def _counts(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
