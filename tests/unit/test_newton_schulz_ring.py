"""Slices in shared memory: no group of warps takes one before it has arrived, whenever copies arrive.

The code that makes room for slices runs here as it is, on barriers in Python; what waits for slices, and the copy
engine, are modelled.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("triton")

from dion_core.newton_schulz_kernels import loading

STAGES = {1: 5, 2: 3}
"""Slots, by the blocks of a tile."""


class NotYetError(Exception):
    """A wait that is not over."""


class Barrier:
    """As Hopper has them: a wait tells even phases from odd ones only."""

    def __init__(self, count: int) -> None:
        self.count = self.missing = count
        self.phase = 0

    def arrive(self) -> None:
        self.missing -= 1
        if not self.missing:
            self.phase, self.missing = self.phase + 1, self.count

    def is_over(self, parity: int) -> bool:
        return self.phase & 1 != parity


class Waits:
    """In the place of the functions for barriers."""

    @staticmethod
    def wait(barrier: Barrier, parity: int) -> None:
        if not barrier.is_over(parity):
            raise NotYetError

    @staticmethod
    def expect(barrier: Barrier, num_bytes: int, pred: bool) -> None:
        """Bytes are not modelled: a copy arrives as a whole."""


class Slots:
    """What the kernel indexes."""

    def __init__(self, make: Callable[[int], Any], number: int) -> None:
        self._slots = [make(slot) for slot in range(number)]

    def index(self, slot: int) -> Any:
        return self._slots[slot]


class Program:
    """One program of the kernel, with tiles of so many slices each."""

    def __init__(self, lengths: Sequence[int], wide: int, chance: random.Random) -> None:
        self.lengths, self.wide, self.chance, self.stages = lengths, wide, chance, STAGES[wide]
        self.full, self.empty = Slots(lambda _: Barrier(1), self.stages), Slots(lambda _: Barrier(wide), self.stages)
        self.ring = (Slots(int, self.stages), Slots(int, self.stages), self.full, self.empty)
        self.places: list[int] = []
        """The first slice of each tile that was passed on."""
        self.under_way: list[int] = []
        self.there: dict[int, int] = {}
        """By slot the slice that has arrived last."""

    def produce(self) -> Iterator[None]:
        at = 0
        for length in self.lengths:
            self.places.append(at)
            for _ in range(length):
                while not self._has_room(at):
                    yield
                self.under_way.append(at)
                at += 1
                yield

    def _has_room(self, at: int) -> bool:
        try:
            slot, _, _ = loading.make_room.fn(self.ring, at, False, self.wide, 64, self.stages)
        except NotYetError:
            return False
        assert slot == at % self.stages
        return True

    def copy(self) -> None:
        """One copy arrives, not always the oldest."""
        if self.under_way:
            at = self.under_way.pop(self.chance.randrange(len(self.under_way)))
            self.there[at % self.stages] = at
            self.full.index(at % self.stages).arrive()

    def consume(self, group: int) -> Iterator[None]:
        own = range(len(self.lengths)) if self.wide == 2 else range(group, len(self.lengths), 2)
        for tile in own:
            while len(self.places) <= tile:
                yield
            for at in range(self.places[tile], self.places[tile] + self.lengths[tile]):
                while not self.full.index(at % self.stages).is_over(at // self.stages & 1):
                    yield
                assert self.there.get(at % self.stages) == at, "a slice was taken that had not arrived"
                yield
                if at > self.places[tile]:  # the product of the slice before is over
                    self.empty.index((at - 1) % self.stages).arrive()
            self.empty.index(at % self.stages).arrive()
            for _ in range(self.chance.randrange(6)):  # handing over takes a while
                yield

    def run(self) -> None:
        actors = [self.produce(), self.consume(0), self.consume(1)]
        for _ in range(20_000):
            if not actors:
                return
            actor = self.chance.choice([*actors, None])
            if actor is None:
                self.copy()
            elif next(actor, "end") == "end":
                actors.remove(actor)
        raise AssertionError("it hangs")


@pytest.fixture(autouse=True)
def barriers_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "mbarrier", Waits)


@pytest.mark.parametrize("wide", [1, 2])
@pytest.mark.parametrize("slices", [*range(1, 8), None], ids=str)
def test_a_slice_is_taken_when_it_has_arrived(slices: int | None, wide: int) -> None:
    for seed in range(150):
        chance = random.Random(seed)
        lengths = [slices or chance.choice([1, 2, 3, 4, 5, 6, 9]) for _ in range(12)]
        Program(lengths, wide, chance).run()
