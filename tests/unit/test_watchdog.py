"""The watchdog of collectives on GPUs, with works that are told when to end."""

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from dion_core import collectives, process_groups, watchdog
from dion_core.collectives import TransportError
from dion_core.watchdog import Watchdog

INTERVAL = 0.02


@dataclass
class FakeWork:
    """A collective that ends when it is told to, and counts who asks."""

    done: bool = False
    looks: list[float] = field(default_factory=list)

    def is_completed(self) -> bool:
        self.looks.append(time.monotonic())
        return self.done


@dataclass
class Communicator:
    """Notes how often it was aborted; its works have ended then, as those of NCCL have."""

    works: list[FakeWork] = field(default_factory=list)
    aborted: list[float] = field(default_factory=list)
    error: Exception | None = None

    def abort(self) -> None:
        self.aborted.append(time.monotonic())
        for work in self.works:
            work.done = True
        if self.error is not None:
            raise self.error


@pytest.fixture
def dog(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watchdog]:
    monkeypatch.setattr(watchdog, "INTERVAL", INTERVAL)
    dog = Watchdog()
    yield dog
    until(lambda: dog._thread is None)


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Waits for the condition, with a limit that no busy machine reaches."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(INTERVAL / 4)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "dion-core watchdog"]


def test_a_finished_work_is_dropped(dog: Watchdog, caplog: pytest.LogCaptureFixture) -> None:
    works, communicator = [FakeWork(), FakeWork(done=True)], Communicator()
    dog.watch(works, "all_to_all for bucket w on rank 0", 60.0, communicator.abort)
    until(lambda: len(works[0].looks) > 2)
    assert len(dog._watched) == 1, "one of its works has not ended"
    works[0].done = True
    until(lambda: dog._thread is None)
    assert dog._watched == []
    assert communicator.aborted == []
    assert caplog.records == []


def test_a_late_work_is_named_and_aborted_once(dog: Watchdog, caplog: pytest.LogCaptureFixture) -> None:
    late, communicator = FakeWork(), Communicator()
    start = time.monotonic()
    dog.watch([late], "all_to_all for bucket w on rank 0", 0.2, communicator.abort)
    until(lambda: bool(communicator.aborted))
    assert communicator.aborted[0] - start >= 0.2
    until(lambda: dog._thread is None)
    time.sleep(5 * INTERVAL)
    assert len(communicator.aborted) == 1
    assert dog.failure.startswith("all_to_all for bucket w on rank 0")
    [record] = caplog.records
    assert (record.name, record.levelno) == ("dion_core", logging.ERROR)
    expected = "all_to_all for bucket w on rank 0 did not end within 0 s; its communicator is aborted"
    assert record.getMessage() == expected


def test_a_work_that_has_ended_is_not_late(dog: Watchdog) -> None:
    communicator = Communicator()
    dog.watch([FakeWork(done=True)], "in time", 0.0, communicator.abort)  # looked at after its deadline
    until(lambda: dog._thread is None)
    assert communicator.aborted == []


def test_each_is_judged_by_its_own_deadline(dog: Watchdog, caplog: pytest.LogCaptureFixture) -> None:
    works, communicators = [FakeWork() for _ in range(3)], [Communicator() for _ in range(3)]
    for number, (work, communicator) in enumerate(zip(works, communicators, strict=True)):
        dog.watch([work], f"collective {number}", 0.1 if number == 1 else 60.0, communicator.abort)
    until(lambda: bool(communicators[1].aborted))
    assert [len(each.aborted) for each in communicators] == [0, 1, 0]
    assert [record.getMessage().split(" did")[0] for record in caplog.records] == ["collective 1"]
    assert [entry.what for entry in dog._watched] == ["collective 0", "collective 2"]
    for work in works:
        work.done = True


def test_what_shared_an_aborted_communicator_is_not_aborted_again(dog: Watchdog) -> None:
    works = [FakeWork(), FakeWork()]
    communicator = Communicator(works)
    dog.watch(works[:1], "first", 0.05, communicator.abort)
    dog.watch(works[1:], "second", 60.0, communicator.abort)
    until(lambda: dog._thread is None)
    assert len(communicator.aborted) == 1


def test_the_thread_ends_when_nothing_is_watched_and_starts_again(dog: Watchdog) -> None:
    before = threads()
    for _ in range(3):
        works = [FakeWork(), FakeWork()]
        for work in works:
            dog.watch([work], "collective", 60.0, Communicator().abort)
        [thread] = [each for each in threads() if each not in before]
        assert thread.daemon
        for work in works:
            work.done = True
        thread.join(10.0)
        assert not thread.is_alive()
        assert dog._thread is None


def test_it_does_not_wait_busily(dog: Watchdog) -> None:
    work = FakeWork()
    dog.watch([work], "collective", 60.0, Communicator().abort)
    until(lambda: len(work.looks) > 5)
    work.done = True
    until(lambda: dog._thread is None)
    gaps = [after - before for before, after in zip(work.looks, work.looks[1:], strict=False)]
    assert min(gaps) >= 0.9 * INTERVAL


def test_a_failing_abort_leaves_the_others_watched(dog: Watchdog, caplog: pytest.LogCaptureFixture) -> None:
    """A communicator that is already gone raises; that must not be the end of watching."""
    gone, sound = Communicator(error=RuntimeError("already gone")), Communicator()
    dog.watch([FakeWork()], "first", 0.05, gone.abort)
    dog.watch([FakeWork()], "second", 0.05 + 5 * INTERVAL, sound.abort)
    until(lambda: bool(sound.aborted))
    until(lambda: dog._thread is None)
    assert any("already gone" in f"{record.getMessage()} {record.exc_text}" for record in caplog.records)
    work = FakeWork(done=True)
    dog.watch([work], "third", 60.0, sound.abort)
    until(lambda: dog._thread is None)
    assert work.looks


def test_after_an_abort_every_collective_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was launched before the abort ends without an error of its own, with values that mean nothing."""
    monkeypatch.setattr(collectives.WATCHDOG, "failure", "all_to_all for a bucket did not end within 18 s")
    with pytest.raises(TransportError, match="all_to_all for a bucket did not end"):
        process_groups._Pending().wait()


class FakeEvent:
    """An event on a stream that has got past it once `passed` is set."""

    passed = False

    def query(self) -> bool:
        return FakeEvent.passed


def test_a_work_is_let_go_of_once_the_stream_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the tensors of its collective, and the watchdog may look only many steps later."""
    monkeypatch.setattr(watchdog, "recorded_event", FakeEvent)
    work = FakeWork(done=False)
    watched = watchdog.Watched([work])
    gone = weakref.ref(work)
    assert not watched.is_completed()
    work.done = True
    assert watched.is_completed()
    watched.waited()
    del work
    assert gone() is None
    assert not watched.is_completed()
    monkeypatch.setattr(FakeEvent, "passed", True)
    assert watched.is_completed()


def test_waiting_for_a_collective_lets_go_of_its_work() -> None:
    class Waited:
        calls = 0

        def waited(self) -> None:
            self.calls += 1

    watched = Waited()
    pending = process_groups._Pending([], [], "nothing", watched)  # type: ignore[arg-type]
    pending.wait()
    pending.wait()
    assert watched.calls == 1
