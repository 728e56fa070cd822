"""N tensors of one shape as one operand, with their addresses on the device, so that one kernel serves them all.

Legend: N matrices of a bucket, R local rows and C local columns of one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import attrgetter, or_
from typing import Any

import torch
from torch import Tensor

_DTYPE = attrgetter("dtype")

ALIGNMENT = 16
"""Bytes: rows that start at multiples of it are read and written in the widest accesses."""


@dataclass(frozen=True)
class Matrices(Sequence[Any]):
    """N tensors (R, C) of one dtype, device and pair of strides, or None where one is missing.

    A sequence of its tensors, so that plain torch can go through them one by one (typed `Any`, since a gradient
    may be missing and a parameter not).

    Attributes:
        tensors: the N tensors.
        addresses: (N,) int64 on their device, where each starts; 0 where it is missing.
        shape: (R, C).
        stride: elements from one row to the next, and from one column to the next.
        dtype: of the tensors.
        aligned: columns are adjacent, and every row of every tensor starts at a multiple of `ALIGNMENT` bytes.
        starts: what `addresses` holds, on the host.
    """

    tensors: Sequence[Tensor | None]
    addresses: Tensor
    shape: tuple[int, int]
    stride: tuple[int, int]
    dtype: torch.dtype
    aligned: bool
    starts: Sequence[int]

    def __getitem__(self, number: int | slice) -> Any:
        return self.tensors[number]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def of(self, tensors: Sequence[Tensor | None]) -> Matrices:
        """The same with other tensors, which lie where and as these do; with none it keeps no memory."""
        return Matrices(tensors, self.addresses, self.shape, self.stride, self.dtype, self.aligned, self.starts)

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether `tensors`, of the same shape, lie where and as those do that it was made of."""
        if self.starts != list(map(Tensor.data_ptr, tensors)) or not set(map(_DTYPE, tensors)) <= {self.dtype}:
            return False
        if self.stride == (self.shape[1], 1):  # of each it is faster to ask this than the strides
            return all(map(Tensor.is_contiguous, tensors))
        return set(map(Tensor.stride, tensors)) <= {self.stride}


def matrices(
    tensors: Sequence[Tensor | None], addresses: Tensor, like: Tensor, before: Matrices | None = None
) -> Matrices:
    """The tensors as one operand, without a copy where they have one dtype and one pair of strides.

    Args:
        tensors: N tensors of one shape. Where they differ they become contiguous, in the dtype that holds all values.
        addresses: (N,) int64 of the tensors as returned, which may be written later than this is called.
        like: (R, C), what they are like where all are missing.
        before: what was made of others; its very `starts` are kept where these lie where and as they did.
    """
    missing = type(None) in set(map(type, tensors))
    present: Sequence[Any] = [tensor for tensor in tensors if tensor is not None] if missing else tensors
    # Of contiguous tensors, which it is faster to find out, strides differ where only one element lies.
    dense = all(map(Tensor.is_contiguous, present)) and len(set(map(_DTYPE, present))) <= 1
    if not dense and not alike(present):
        # Not the first one's: its dtype may hold less than the others, and its elements may share memory.
        wide = reduce(torch.promote_types, map(_DTYPE, present))
        tensors = [None if tensor is None else tensor.to(wide).contiguous() for tensor in tensors]
    first = next((tensor for tensor in tensors if tensor is not None), like)
    shape, stride, dtype = first.shape, first.stride(), first.dtype
    if missing:
        places = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    else:
        places = list(map(Tensor.data_ptr, tensors))  # type: ignore[arg-type]
    form = (places, shape, stride, dtype)
    if before is not None and (before.starts, before.shape, before.stride, before.dtype) == form:
        return before.of(tensors)
    adjacent = stride[1] == 1 and stride[0] * first.itemsize % ALIGNMENT == 0
    aligned = adjacent and reduce(or_, places, 0) % ALIGNMENT == 0
    rows, columns = shape
    return Matrices(tensors, addresses, (rows, columns), (stride[0], stride[1]), dtype, aligned, places)


def alike(tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors have one dtype and one pair of strides."""
    return len(set(map(_DTYPE, tensors))) <= 1 and len(set(map(Tensor.stride, tensors))) <= 1


def stacked(tensors: Sequence[Tensor | None], like: Tensor | None = None) -> Matrices:
    """The tensors as one operand with addresses of its own, for a single call. Copies them to the device."""
    first = next(tensor for tensor in (*tensors, like) if tensor is not None)
    made = matrices(tensors, torch.empty(0, dtype=torch.int64, device=first.device), first)
    return replace(made, addresses=torch.tensor(made.starts, dtype=torch.int64, device=first.device))


class DeviceNumbers:
    """Integers and floats in one device tensor that the host rewrites by one pinned copy, without a wait.

    The tensor never moves, so that a captured graph reads what was written last.
    """

    def __init__(self, num_integers: int, num_floats: int, device: torch.device) -> None:
        self._values = torch.zeros(num_integers + num_floats, dtype=torch.int64, device=device)
        self.integers = self._values[:num_integers]
        """(num_integers,) int64."""
        self.floats = self._values[num_integers:].view(torch.float64)
        """(num_floats,) float64."""
        self._written = b""

    def write(self, integers: array[int], floats: Sequence[float]) -> None:
        """Brings the numbers to the device, on the current stream, if any has changed since the last call."""
        content = integers.tobytes() + array("d", floats).tobytes()
        if content == self._written:
            return
        # The host allocator of torch keeps pinned memory from reuse until the copy is done.
        host = torch.frombuffer(bytearray(content), dtype=torch.int64)
        pinned = host.pin_memory() if self._values.is_cuda else host
        self._values.copy_(pinned, non_blocking=True)
        self._written = content
