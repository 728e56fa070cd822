"""Recorded steps do again what they did, wherever their memory is, and what cannot be done again is never replayed.

The driver is replaced: the one kernel here doubles numbers, which it finds by the addresses that it is given.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dion_core import cuda_driver, tape
from dion_core.block import ALIGNMENT, Use, arranged
from dion_core.collectives import Handle, message
from dion_core.cuda_driver import DriverKernel
from dion_core.recording import Launch, recorder, varying
from dion_core.replay import Recording, StepReplay
from dion_core.tape import Tape

CPU = torch.device("cpu")
LARGE = 2**21
"""Elements of what the system gives memory of its own, so that it can be made to lie elsewhere."""
KERNEL = DriverKernel(7, 32, 0, ["Q", "Q", "i"], [0, 8, 16])


class Driver:
    """Doubles `number` floats of one address into another."""

    def __init__(self) -> None:
        self.launched: list[tuple[int, int, int]] = []

    def cuLaunchKernelEx(self, start: int, function: int, parameters: Any, extra: None) -> int:
        assert function == 7
        source, target = (ctypes.c_uint64.from_address(parameters[place]).value for place in (0, 1))
        number = ctypes.c_int32.from_address(parameters[2]).value
        self.launched.append((source, target, number))
        for place in range(number):
            value = ctypes.c_float.from_address(source + 4 * place)
            ctypes.c_float.from_address(target + 4 * place).value = 2 * value.value
        return 0


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(cuda_driver, "_driver", lambda: driver)
    return driver


def double(source: Tensor, target: Tensor, number: int, descriptors: tuple[Any, ...] = ()) -> None:
    """Launches the kernel as `launching.launch` does; a descriptor stands for the address of the source."""
    packed = [descriptor.base.data_ptr() for descriptor in descriptors]
    arguments = [target, number] if descriptors else [source, target, number]
    values = [each.data_ptr() if isinstance(each, Tensor) else each for each in arguments]
    told = recorder()
    if told is None:
        KERNEL.launch(1, 1, 0, [*packed, *values])
    else:
        told.launch(Launch(KERNEL, None, (1, 1), 0, descriptors, packed, arguments, values))


def recorded(work: Callable[[], None], foreign: tuple[Tensor, ...] = ()) -> tuple[Tape | None, str]:
    recording = Recording(CPU, [each.untyped_storage().data_ptr() for each in foreign])
    return recording.record(work), recording.reason


def taped(work: Callable[[], None]) -> Tape:
    made, reason = recorded(work)
    assert made is not None, reason
    return made


def size_of_block(made: Tape) -> int:
    return made._block._num_bytes


def start_elsewhere(made: Tape) -> None:
    """Does the launches in other memory than the block."""
    start = made._block.take()
    other = torch.empty(size_of_block(made), dtype=torch.uint8)
    assert other.data_ptr() != start
    made._block.give_back()
    for launch in made._launches:
        launch.move(other.data_ptr())
    cuda_driver.launch_all([launch.call for launch in made._launches])
    made._start = -1


class Values:
    """What lasts from step to step."""

    def __init__(self, number: int = 64) -> None:
        self.given = torch.zeros(number)
        self.result = torch.zeros(number)

    def renew(self, seed: int) -> Tensor:
        return self.given.copy_(torch.randn(len(self.given), generator=torch.Generator().manual_seed(seed)))


def test_operations_of_torch_are_done_again_in_every_form() -> None:
    values = Values()

    def work() -> None:
        squares = values.given.square()  # a new tensor
        pair = torch.cat([squares, values.given])
        halves = pair.view(2, -1)  # a view
        product = halves.to(torch.float64) @ torch.ones(len(values.given), 1, dtype=torch.float64)
        room = torch.empty(2, 64)
        room.copy_(halves).mul_(2)  # in place
        room += product.float()
        torch._foreach_add_([room], [halves])
        torch.index_select(room, 0, torch.ones(1, dtype=torch.int64), out=values.result.view(1, -1))

    def expected(given: Tensor) -> Tensor:
        return 3 * given + given.double().sum().float()

    values.renew(0)
    made = taped(work)
    torch.testing.assert_close(values.result, expected(values.given))
    for seed in range(1, 5):
        values.renew(seed)
        made.replay(())
        torch.testing.assert_close(values.result, expected(values.given))


def test_launches_and_operations_follow_each_other(driver: Driver) -> None:
    values = Values()

    def work() -> None:
        first = torch.empty(64)
        double(values.given, first, 40)
        second = first.neg()
        double(second[8:], values.result[8:], 16)

    values.renew(0)
    made = taped(work)
    for seed in range(1, 5):
        values.renew(seed)
        made.replay(())
        assert torch.equal(values.result[8:24], -4 * values.given[8:24])
    assert len(driver.launched) == 2 * 5


class Address:
    """As the descriptors of kernels have it, which keep no memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._address = tensor.data_ptr()

    def data_ptr(self) -> int:
        return self._address


def test_launches_move_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "described", lambda descriptor, compiled, number, address: [address])
    values = Values()

    def work() -> None:
        before, first = torch.empty(700), torch.empty(64)
        double(values.given, first, 40, (SimpleNamespace(base=Address(values.given)),))
        double(first, before, 40)
        double(before, values.result, 4, (SimpleNamespace(base=Address(before[2:])),))

    values.renew(0)
    made = taped(work)
    for seed in range(1, 7):
        values.renew(seed)
        made.replay(()) if seed % 2 else start_elsewhere(made)
        assert torch.equal(values.result[:4], 8 * values.given[2:6])


def test_there_is_no_memory_between_replays_and_none_is_taken_twice() -> None:
    values = Values(LARGE)

    def work() -> None:
        sums = values.given
        for _ in range(10):  # each needs only the one before
            sums = sums + 1
        values.result.copy_(sums)

    made = taped(work)
    assert size_of_block(made) == 2 * 4 * LARGE
    values.renew(1)
    made.replay(())
    torch.testing.assert_close(values.result, values.given + 10)
    assert made._block._storage.nbytes() == 0

    def fail() -> None:
        raise RuntimeError("boom")

    made = taped(lambda: (work(), varying(lambda function: function(), lambda: None))[1])
    with pytest.raises(RuntimeError, match="boom"):
        made.replay((fail,))
    assert made._block._storage.nbytes() == 0


def test_what_is_kept_after_the_step_is_written_again_where_it_is() -> None:
    values, kept = Values(), list[Tensor]()

    def work() -> None:
        kept[:] = [values.given + 1]
        values.result.copy_(kept[0])

    values.renew(0)
    made = taped(work)
    assert size_of_block(made) == 0
    values.renew(1)
    made.replay(())
    assert torch.equal(kept[0], values.given + 1)


class Arriving(NamedTuple):
    """Values that get to where they belong when they are waited for."""

    target: Tensor
    values: Tensor

    def wait(self) -> None:
        self.target.copy_(self.values)


class Late:
    """A group whose messages arrive when they are waited for."""

    def __init__(self) -> None:
        self.sent = self.prepared = 0

    @message
    def broadcast(self, tensors: list[Tensor], source: int) -> Callable[[], Handle]:
        self.prepared += 1

        def launch() -> Handle:
            self.sent += 1
            return Arriving(tensors[0], tensors[0] + source)  # not recorded: the whole message is

        return launch


def test_messages_are_sent_again_and_waited_for_where_they_were() -> None:
    values, group = Values(), Late()

    def work() -> None:
        one, other = values.given.clone(), values.given.clone()
        handles = [group.broadcast([each], source) for each, source in ((one, 5), (other, 7))]
        handles[1].wait()
        before = one - other  # the first has not arrived
        handles[0].wait()
        values.result.copy_(one + before)

    values.renew(0)
    made = taped(work)
    assert (group.prepared, group.sent) == (4, 2)
    for seed in range(1, 4):
        values.renew(seed)
        made.replay(())
        torch.testing.assert_close(values.result, values.given - 2)
    assert (group.prepared, group.sent) == (4, 8)


def test_what_varies_gets_the_arguments_of_its_step() -> None:
    values = Values()

    def add(gradient: Tensor, factor: float) -> None:
        values.result.add_(gradient * factor)

    def work() -> None:
        values.result.copy_(values.given)
        varying(add, torch.ones(64), 1.0)
        values.result.mul_(2)

    values.renew(0)
    made = taped(work)
    made.replay((torch.full((64,), 3.0), 2.0))
    torch.testing.assert_close(values.result, 2 * (values.given + 6))


GRADIENT = torch.ones(64)


@pytest.mark.parametrize(
    ("work", "reason"),
    [
        (lambda: torch.ones(()).item(), "other results than one tensor"),
        (lambda: torch.ones(3).sort(), "other results than one tensor"),
        (lambda: torch.zeros(64).add_(GRADIENT), "may be another one in the next step"),
        (lambda: torch.zeros(64) + GRADIENT[3:4], "may be another one in the next step"),
        (lambda: double(GRADIENT, torch.empty(64), 4), "may be another one in the next step"),
        (lambda: Late().broadcast([GRADIENT], 0), "may be another one in the next step"),
        (lambda: torch.zeros(3).to("meta"), "brings values to meta"),
        (lambda: recorder().refuse("launched by others"), "launched by others"),  # type: ignore[union-attr]
    ],
    ids=["host", "two", "in place", "view", "launch", "message", "device", "told"],
)
def test_what_cannot_be_done_again_is_refused(work: Callable[[], Any], reason: str) -> None:
    made, why = recorded(lambda: (work(), None)[1], foreign=(GRADIENT,))
    assert made is None
    assert reason in why


class Steps:
    """A step whose form and gradient are chosen, and how often it was worked out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream = 0
        monkeypatch.setattr(StepReplay, "_stream", lambda replayed: self.stream)
        self.replayed, self.values, self.worked = StepReplay(CPU), Values(), 0

    def __call__(self, form: str, *, host: bool = False) -> bool:
        """Whether the step was replayed."""
        before, gradient = self.worked, torch.randn(64)
        self.values.renew(before)

        def work() -> None:
            self.worked += 1
            self.values.result.copy_(self.values.given + len(form))
            if host:
                self.values.given.sum().item()
            varying(self.values.result.add_, gradient)

        self.replayed.run(work, form, (gradient,), lambda: [gradient.untyped_storage().data_ptr()])
        torch.testing.assert_close(self.values.result, self.values.given + len(form) + gradient)
        return self.worked == before


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


def test_the_second_of_two_steps_alike_is_recorded_and_the_third_replayed(step: Steps) -> None:
    assert [step("a") for _ in range(5)] == [False, False, True, True, True]
    # A change that ends replays is recorded at once; one that follows it at once is not.
    assert [step("bb") for _ in range(3)] == [False, True, True]
    assert [step(form) for form in ("a", "bb", "a", "bb", "a", "a", "a")] == [False] * 6 + [True]
    step.stream = 1
    assert [step("a") for _ in range(2)] == [False, True]


def test_a_step_that_cannot_be_recorded_runs_as_it_is_and_says_why_once(
    step: Steps, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="dion_core"):
        assert not any(step("a", host=True) for _ in range(5))
    [said] = [record.getMessage() for record in caplog.records]
    assert said == "steps are not replayed: aten._local_scalar_dense.default has other results than one tensor"
    assert [step("bb") for _ in range(3)] == [False, False, True]


def test_an_error_while_a_step_is_recorded_leaves_nothing_behind(step: Steps) -> None:
    step("a")

    def fail() -> None:
        torch.zeros(3).add_(1)
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        step.replayed.run(fail, "a", (), tuple)
    assert recorder() is None
    assert [step("a") for _ in range(2)] == [False, True]


USES = st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 12), st.integers(1, 6)), max_size=12)


@given(USES)
def test_buffers_in_use_at_the_same_time_do_not_overlap(given_uses: list[tuple[int, int, int]]) -> None:
    uses = [Use(size, first, first + length) for size, first, length in given_uses]
    starts, total = arranged(uses)
    for number, (use, start) in enumerate(zip(uses, starts, strict=True)):
        assert start % ALIGNMENT == 0
        assert start + use.num_bytes <= total
        for other, other_start in list(zip(uses, starts, strict=True))[:number]:
            if use.first < other.end and other.first < use.end:
                assert start + use.num_bytes <= other_start or other_start + other.num_bytes <= start
    rounded = [-(-use.num_bytes // ALIGNMENT) * ALIGNMENT for use in uses]
    at_once = [
        sum(size for size, use in zip(rounded, uses, strict=True) if use.first <= t < use.end) for t in range(20)
    ]
    assert max(at_once, default=0) <= total <= sum(rounded)


def test_an_arrangement_by_hand() -> None:
    """Two small buffers follow each other where the large one is not yet, and not any more."""
    uses = [Use(100, 0, 2), Use(2000, 1, 4), Use(600, 2, 3), Use(600, 3, 5)]
    assert arranged(uses) == ([2048, 0, 2048, 2048], 3072)
