"""Which steps are run as they are, which are recorded, and which replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dion_core import recorder as recorder_module
from dion_core.block import Block
from dion_core.recording import recorder, varying
from dion_core.replay import StepReplay
from dion_core.tape import Run
from tests.replay_cases import CPU, Values


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


def test_a_step_goes_on_as_it_is_where_there_is_no_room(step: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [step("a") for _ in range(4)] == [False, False, True, True]

    def fail(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr(Block, "take", fail)
        assert not step("a")
    assert [step("a") for _ in range(2)] == [False, False]  # it would be asked for in every step
    assert [step("ccc") for _ in range(3)] == [False, False, True]
    with monkeypatch.context() as patch:
        patch.setattr(recorder_module, "Block", fail)
        assert [step("bb") for _ in range(3)] == [False] * 3
    assert [step("a") for _ in range(3)] == [False, False, True]


def test_what_someone_else_captures_is_run_as_it_is(step: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [step("a") for _ in range(4)] == [False, False, True, True]
    with monkeypatch.context() as patch:
        patch.setattr(StepReplay, "_is_being_captured", lambda self: True)
        assert [step("a") for _ in range(3)] == [False] * 3
    assert [step("a") for _ in range(3)] == [False, False, True]


def test_after_an_error_in_a_replay_the_next_one_is_right(step: Steps) -> None:
    for _ in range(3):
        step("a")
    made = step.replayed._tape
    assert made is not None
    waited = list[str]()

    class Handle:
        def wait(self) -> None:
            waited.append("waited")

    def fail(run: Run) -> None:
        run.handles[5] = Handle()
        raise RuntimeError("boom")

    made._steps.append(fail)
    with pytest.raises(RuntimeError, match="boom"):
        step.replayed.run(lambda: None, "a", (torch.zeros(64),), tuple)
    assert waited == ["waited"]
    assert made._block._storage.nbytes() == 0
    made._steps.pop()
    assert step("a")


def test_inference_mode_and_what_is_run_otherwise_end_replays(step: Steps) -> None:
    assert [step("a") for _ in range(3)] == [False, False, True]
    step.values = Values()
    with torch.inference_mode():
        assert not step("a")
    assert [step("a") for _ in range(3)] == [False, False, True]
    step.replayed.forget()
    assert [step("a") for _ in range(3)] == [False, False, True]
