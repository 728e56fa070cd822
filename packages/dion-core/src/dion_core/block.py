"""The memory of one step as one block: where its tensors lie, and how few bytes hold them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

ALIGNMENT = 512
"""Bytes: buffers start at multiples of it, as torch's allocator gives them."""
MOVES, COMPARISONS = 300, 10**6
"""So many are tried, and fewer of many buffers: some hundredths of a second, once for all steps that are alike."""
SMALLEST_MOVED = 100
"""A buffer of less than this part of the memory is not moved."""
GAPS = 100
"""An order of an earlier step is taken where gaps are no more than this part of the memory."""


class Region(NamedTuple):
    """A tensor in the memory that a step has allocated.

    Attributes:
        buffer: the number of the allocation.
        dtype: of the tensor.
        start: its first element in the buffer.
        shape: of the tensor.
        stride: of the tensor.
    """

    buffer: int
    dtype: torch.dtype
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def offset(self) -> int:
        """The first byte in the buffer."""
        return self.start * self.dtype.itemsize


class Use(NamedTuple):
    """A buffer of so many bytes, from the allocation of number `first` to before that of number `end`."""

    num_bytes: int
    first: int
    end: int


class Arrangement(NamedTuple):
    """Where each buffer starts, bytes in all, and in which order the buffers were placed."""

    starts: list[int]
    num_bytes: int
    order: list[int]


def arranged(uses: Sequence[Use], before: Sequence[int] = ()) -> Arrangement:
    """Places all buffers so that none overlaps another that is in use at the same time.

    Each as low as it goes, in the best of a few orders: the largest first, or those that are used longest, or those
    that are there when most memory is needed, as they come or the last one first, and then those that are used longest;
    or an order that is found by moves (`_found`).

    Args:
        uses: of all buffers.
        before: the order for an earlier step, which is taken at once if it fits this one too.
    """
    times = sorted({use.first for use in uses})
    needed = {time: sum(use.num_bytes for use in uses if use.first <= time < use.end) for time in times}
    fullest = max(times, key=needed.__getitem__, default=0)
    if before and len(before) == len(uses):
        same = _placed(uses, before)
        if same.num_bytes <= needed[fullest] * (1 + 1 / GAPS):
            return same

    def is_other(use: Use) -> bool:
        return not use.first <= fullest < use.end

    orders: list[Callable[[Use], tuple[int, ...]]] = [
        lambda use: (-use.num_bytes,),
        lambda use: (-use.num_bytes * (use.end - use.first),),
        lambda use: (use.first - use.end, -use.num_bytes),
        lambda use: (is_other(use), use.first - use.end if is_other(use) else -use.first),
        lambda use: (is_other(use), use.first - use.end if is_other(use) else use.first),
        lambda use: (is_other(use), use.first - use.end if is_other(use) else -use.num_bytes),
    ]
    numbers = range(len(uses))
    ordered = [sorted(numbers, key=lambda number: key(uses[number])) for key in orders]
    _, _, longest_used, *_ = ordered
    ordered.append(_found(uses, longest_used, needed.get(fullest, 0)))
    return min((_placed(uses, order) for order in ordered), key=attrgetter("num_bytes"))


def _found(uses: Sequence[Use], order: Sequence[int], needed: int) -> list[int]:
    """Another order, in which the large buffers come first: one or another is moved, which stays if it does no harm.

    Args:
        uses: of all buffers.
        order: from which the moves begin.
        needed: bytes at the time when most are, below which no order comes.
    """
    large = [number for number in order if SMALLEST_MOVED * uses[number].num_bytes >= needed]
    small = [number for number in order if SMALLEST_MOVED * uses[number].num_bytes < needed]
    chance, fewest = random.Random(0), _placed(uses, large).num_bytes  # the same at every call
    for _ in range(min(MOVES, COMPARISONS // max(len(large), 1) ** 2)):
        if fewest <= needed + ALIGNMENT * len(large):
            break
        moved = list(large)
        moved.insert(chance.randrange(len(large)), moved.pop(chance.randrange(len(large))))
        num_bytes = _placed(uses, moved).num_bytes
        if num_bytes <= fewest:
            large, fewest = moved, num_bytes
    return [*large, *small]


def _placed(uses: Sequence[Use], order: Sequence[int]) -> Arrangement:
    """As `arranged`, in one order, which may leave some out."""
    starts, placed = [0] * len(uses), list[int]()
    for number in order:
        use, start = uses[number], 0
        beside = [other for other in placed if uses[other].first < use.end and use.first < uses[other].end]
        for other in sorted(beside, key=starts.__getitem__):
            if start + use.num_bytes <= starts[other]:
                break
            start = max(start, _aligned(starts[other] + uses[other].num_bytes))
        starts[number] = start
        placed.append(number)
    num_bytes = max((_aligned(start + use.num_bytes) for start, use in zip(starts, uses, strict=True)), default=0)
    return Arrangement(starts, num_bytes, list(order))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Block:
    """Memory, taken at once, that can be given back and taken again, while the tensors that were made of it stay.

    Args:
        num_bytes: of the memory, a multiple of `ALIGNMENT`.
        starts: where each buffer begins.
        others: buffers that have memory of their own, which stay.
        device: of the memory.
    """

    def __init__(
        self,
        num_bytes: int,
        starts: Mapping[int, int],
        others: Mapping[int, torch.UntypedStorage],
        device: torch.device,
    ) -> None:
        self._num_bytes, self._starts, self._others = num_bytes, starts, others
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._storage = self._bytes.untyped_storage()

    def take(self) -> int:
        """There is memory now, of which nothing is known; its address, which may be another one than before."""
        self._storage.resize_(self._num_bytes)
        return self._storage.data_ptr()

    def give_back(self) -> None:
        """There is none: its tensors must not be used."""
        self._storage.resize_(0)

    def tensors(self, value: Any) -> Any:
        """The value, with tensors for regions."""
        if type(value) is Region:
            return self._tensor(value)
        if type(value) is list:
            return [self.tensors(each) for each in value]
        return value

    def offset(self, buffer: int) -> int | None:
        """Where a buffer starts in the block, in bytes; None if it has memory of its own."""
        return self._starts.get(buffer)

    def _tensor(self, region: Region) -> Tensor:
        storage, start = self._others.get(region.buffer), region.start
        if storage is None:
            storage, start = self._storage, start + self._starts[region.buffer] // region.dtype.itemsize
        tensor = torch.empty(0, dtype=region.dtype, device=self._bytes.device)
        return tensor.set_(storage, start, region.shape, region.stride)
