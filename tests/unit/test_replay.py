"""Recorded steps do again what they did, wherever their memory is, and what cannot be done again is never replayed.

The driver is replaced: the one kernel here doubles numbers, which it finds by the addresses that it is given.
"""

from __future__ import annotations

import gc
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dion_core import cuda_driver, tape
from dion_core.block import ALIGNMENT, Use, arranged
from dion_core.recording import varying
from dion_core.replay import StepReplay
from dion_core.steps import Steps, interleave
from dion_core.tape import Run, Tape
from tests.replay_cases import CPU, Driver, Late, Values, double, recorded, taped


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(cuda_driver, "_driver", lambda: driver)
    return driver


def size_of_block(made: Tape) -> int:
    return made._block._num_bytes


def start_elsewhere(made: Tape) -> None:
    """Does the launches in other memory than the block."""
    start = made._block.take()
    other = torch.empty(size_of_block(made), dtype=torch.uint8)
    assert other.data_ptr() != start
    made._block.give_back()
    for launches in made._launches:
        launches.move(other.data_ptr())
        launches(Run(()))
    made._start = -1


def test_operations_of_torch_are_done_again() -> None:
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
    assert len(driver.streams) == 2 * 4, "an operation of torch lies between the launches of a replay"
    assert driver.graphs
    del made
    gc.collect()
    assert not driver.graphs
    assert driver.mode == 0, "as it was"


def test_a_step_whose_launches_make_no_graph_runs_as_it_is(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(StepReplay, "_stream", lambda self: 0)
    values, replayed = Values(), StepReplay(CPU)
    driver.ready_error = 2
    with caplog.at_level("INFO", logger="dion_core"):
        for number in range(1, 6):
            values.renew(number)
            replayed.run(lambda: double(values.given, values.result, 40), "form", (), list)
            assert torch.equal(values.result[:40], 2 * values.given[:40])
            assert len(driver.launched) == number
    (line,) = caplog.messages
    assert "launches cannot be put into a graph: CUDA error 2 (out of memory)" in line
    gc.collect()
    assert not driver.graphs


def test_nothing_is_freed_while_someone_else_captures(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepReplay, "_stream", lambda self: 0)
    values, replayed = Values(), StepReplay(CPU)

    def step() -> None:
        replayed.run(lambda: double(values.given, values.result, 40), "form", (), list)

    for _ in range(4):
        step()
    assert (len(driver.streams), len(driver.graphs)) == (2, 2)
    with monkeypatch.context() as patch:
        patch.setattr(StepReplay, "_is_being_captured", lambda self: True)
        step()
        assert (len(driver.streams), len(driver.graphs)) == (2, 2)
    step()
    assert not driver.graphs


def test_launches_go_to_the_streams_that_they_went_to(driver: Driver) -> None:
    values, between = Values(), torch.zeros(64)

    def work() -> None:
        for source, target, stream in ((values.given, between, 5), (between, between, 5), (between, values.result, 6)):
            double(source, target, 40, stream=stream)

    values.renew(0)
    made = taped(work)
    values.renew(1)
    made.replay(())
    assert driver.streams == [5, 6]
    assert torch.equal(values.result[:40], 8 * values.given[:40])


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


def test_a_launch_on_what_may_be_another_tensor_is_refused() -> None:
    gradient = torch.ones(64)
    made, why = recorded(lambda: double(gradient, torch.empty(64), 4), foreign=(gradient,))
    assert made is None
    assert "may be another one in the next step" in why


def test_there_is_no_memory_between_replays_and_none_is_taken_twice() -> None:
    values = Values(4096)

    def work() -> None:
        sums = values.given
        for _ in range(10):  # each needs only the one before
            sums = sums + 1
        values.result.copy_(sums)

    made = taped(work)
    assert size_of_block(made) == 2 * 4 * 4096
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


def test_a_constant_is_not_taken_for_a_buffer_whose_address_it_has() -> None:
    values = Values()

    def work() -> None:
        for size in range(1, 65):
            torch.empty(size).fill_(1.0)
            constant = torch.tensor([7.0] * size)  # perhaps where the buffer was
            values.result[size - 1 : size].copy_(constant[:1])

    made = taped(work)
    values.result.zero_()
    made.replay(())
    assert torch.equal(values.result, torch.full((64,), 7.0))


def test_a_collective_may_be_called_by_names_and_waited_for_twice() -> None:
    values, group = Values(), Late()

    def work() -> None:
        sent = values.given.clone()
        handle = group.broadcast(source=5, tensors=[sent])
        handle.wait()
        handle.wait()
        values.result.copy_(sent)

    made = taped(work)
    values.renew(1)
    made.replay(())
    assert torch.equal(values.result, values.given + 5)


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


USES = st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 12), st.integers(1, 6)), max_size=12)


@given(USES)
def test_buffers_in_use_at_the_same_time_do_not_overlap(given_uses: list[tuple[int, int, int]]) -> None:
    uses = [Use(size, first, first + length) for size, first, length in given_uses]
    starts, total, _ = arranged(uses)
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
    assert arranged(uses)[:2] == ([2048, 0, 2048, 2048], 3072)


def of_six_buckets() -> list[Use]:
    """Rows sent and received in MiB, and what Newton-Schulz takes."""
    uses, time = list[Use](), count()

    def bucket(rows: int, work: int) -> Steps[None]:
        started = next(time)
        yield
        at_work = next(time)
        uses.append(Use(work * 2**20, at_work, at_work + 1))
        yield
        came_back = next(time)
        uses.append(Use(rows * 2**20, started, came_back))
        yield
        uses.append(Use(rows * 2**20, started, next(time)))

    interleave([bucket(*sizes) for sizes in [(29, 68), (54, 34), (29, 68), (29, 68), (58, 17), (29, 68)]])
    return uses


def test_buffers_of_six_buckets_fill_no_more_than_is_needed_at_once() -> None:
    """Placed by size or time alone they leave gaps."""
    uses = of_six_buckets()
    last = max(use.end for use in uses)
    needed = max(sum(use.num_bytes for use in uses if use.first <= now < use.end) for now in range(last))
    assert arranged(uses).num_bytes == needed


def test_an_order_of_an_earlier_step_is_taken_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    uses = of_six_buckets()
    longer = [use._replace(num_bytes=use.num_bytes + 1024 * (number % 3)) for number, use in enumerate(uses)]
    found, expected = arranged(uses), arranged(longer)
    wasteful = sorted(range(len(uses)), key=lambda number: uses[number].num_bytes)
    assert arranged(longer, wasteful) == arranged(longer, wasteful[1:]) == expected
    monkeypatch.setattr("dion_core.block._found", None)  # nothing is searched for
    again = arranged(longer, found.order)
    assert again.order == found.order
    assert again.num_bytes <= 1.01 * expected.num_bytes
