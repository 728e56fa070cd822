"""Cooperative steps: results, order, overlap, the limit of stages in flight, and errors."""

from collections.abc import Sequence
from itertools import pairwise, product

import pytest

from dion_core.steps import Steps, interleave, run

Trace = list[str]


def stage(trace: Trace, name: str, num_yields: int) -> Steps[str]:
    """Notes every part it runs, a0 to a<num_yields>, and its end, whichever way it ends."""
    try:
        for part in range(num_yields):
            trace.append(f"{name}{part}")
            yield
        trace.append(f"{name}{num_yields}")
        return name.upper()
    finally:
        trace.append(f"{name} ended")


def failing_stage(trace: Trace, name: str, num_yields: int, error: BaseException) -> Steps[str]:
    for part in range(num_yields):
        trace.append(f"{name}{part}")
        yield
    raise error


def exchange(trace: Trace, name: str) -> Steps[str]:
    """The shape of a bucket's step: compute, launch, wait, compute."""
    trace.append(f"{name} computes")
    trace.append(f"{name} launches")
    yield
    trace.append(f"{name} waits")
    return name


def trace_of(num_yields: Sequence[int], in_flight: int) -> Trace:
    trace: Trace = []
    interleave([stage(trace, chr(97 + i), n) for i, n in enumerate(num_yields)], in_flight=in_flight)
    return trace


@pytest.mark.parametrize("num_yields", [0, 1, 5])
def test_run_goes_to_the_end(num_yields: int) -> None:
    trace: Trace = []
    assert run(stage(trace, "a", num_yields)) == "A"
    assert trace == [*(f"a{part}" for part in range(num_yields + 1)), "a ended"]


def test_run_passes_errors_on() -> None:
    with pytest.raises(KeyError, match="lost"):
        run(failing_stage([], "a", 2, KeyError("lost")))


@pytest.mark.parametrize("in_flight", [1, 2, 3, 10])
@pytest.mark.parametrize("num_yields", [(), (0,), (3,), (0, 0, 0), (3, 0, 1, 2, 0), (0, 1, 2, 3)])
def test_results_stand_in_the_order_of_the_stages(num_yields: tuple[int, ...], in_flight: int) -> None:
    stages = [stage([], chr(97 + i), n) for i, n in enumerate(num_yields)]
    assert interleave(stages, in_flight=in_flight) == ["A", "B", "C", "D", "E"][: len(num_yields)]


def test_a_stage_computes_while_the_message_of_the_one_before_is_under_way() -> None:
    trace: Trace = []
    assert interleave([exchange(trace, name) for name in "abc"]) == ["a", "b", "c"]
    assert trace[:5] == ["a computes", "a launches", "b computes", "b launches", "a waits"]
    assert trace[5:] == ["c computes", "c launches", "b waits", "c waits"]


def test_the_whole_order() -> None:
    def parts(trace: Trace) -> str:
        return " ".join(entry for entry in trace if "ended" not in entry)

    assert parts(trace_of((1, 1, 1), 1)) == "a0 a1 b0 b1 c0 c1"
    assert parts(trace_of((1, 1, 1), 2)) == "a0 b0 a1 c0 b1 c1"
    assert parts(trace_of((1, 1, 1), 3)) == "a0 b0 a1 c0 b1 c1"
    assert parts(trace_of((2, 2, 2), 2)) == "a0 b0 a1 b1 a2 c0 b2 c1 c2"
    assert parts(trace_of((2, 2, 2, 2), 3)) == "a0 b0 a1 c0 b1 a2 d0 c1 b2 d1 c2 d2"
    assert parts(trace_of((3, 1, 1), 3)) == "a0 b0 a1 c0 b1 a2 c1 a3"
    assert parts(trace_of((1, 1, 1, 1, 1), 4)) == "a0 b0 a1 c0 d0 b1 e0 c1 d1 e1"
    assert parts(trace_of((0, 2, 2, 2), 3)) == "a0 b0 c0 b1 d0 c1 b2 d1 c2 d2"


def test_every_exchange_after_the_first_has_another_one_to_hide_behind() -> None:
    """Between two turns of a stage, which wait for its message, another one computes."""
    turns = [entry for entry in trace_of((2,) * 7, 3) if "ended" not in entry]
    computing = {f"{name}1" for name in "abcdefg"}
    for sent, waited in [(f"{name}{part}", f"{name}{part + 1}") for name in "bcdef" for part in (0, 1)]:
        between = turns[turns.index(sent) + 1 : turns.index(waited)]
        assert computing & set(between), (sent, waited)


@pytest.mark.parametrize("in_flight", [1, 2, 3, 4])
def test_limit_turns_and_order_for_many_lengths(in_flight: int) -> None:
    for num_yields in product(range(4), repeat=4):
        trace = trace_of(num_yields, in_flight)
        assert trace == trace_of(num_yields, in_flight)
        running: dict[str, int] = {}  # by stage, how often it ran
        started: list[str] = []
        for entry in trace:
            name = entry[0]
            if entry.endswith("ended"):
                del running[name]
                continue
            if name not in running:
                started.append(name)
            running[name] = running.get(name, 0) + 1
            assert entry == f"{name}{running[name] - 1}"
            assert len(running) <= in_flight
        assert started == ["a", "b", "c", "d"]
        for earlier, later in pairwise(trace):
            if earlier[0] == later[0] and not later.endswith("ended"):  # nobody else was in flight
                assert _unfinished(trace, later, in_flight) == {later[0]}


def _unfinished(trace: Trace, entry: str, in_flight: int) -> set[str]:
    """The stages that may run at `entry`: the first `in_flight` that have not ended by then."""
    ended = {each[0] for each in trace[: trace.index(entry)] if each.endswith("ended")}
    return set([name for name in "abcd" if name not in ended][:in_flight])


@pytest.mark.parametrize("in_flight", [0, -1])
def test_at_least_one_must_be_in_flight(in_flight: int) -> None:
    trace: Trace = []
    with pytest.raises(ValueError, match=f"in_flight={in_flight}"):
        interleave([stage(trace, "a", 1)], in_flight=in_flight)
    assert trace == []


@pytest.mark.parametrize("error", [ValueError("five"), KeyboardInterrupt(), StopAsyncIteration()])
def test_an_error_ends_all_stages(error: BaseException) -> None:
    trace: Trace = []
    stages = [
        stage(trace, "a", 3),
        failing_stage(trace, "b", 1, error),
        stage(trace, "c", 3),
        stage(trace, "d", 3),
    ]
    with pytest.raises(type(error)) as caught:
        interleave(stages, in_flight=3)
    assert caught.value is error  # its traceback keeps every frame alive: nothing was closed by chance
    assert [entry for entry in trace if "ended" not in entry] == ["a0", "b0", "a1", "c0"]
    assert sorted(entry for entry in trace if "ended" in entry) == ["a ended", "c ended"]
    assert all(next(each, "closed") == "closed" for each in stages[:3])
