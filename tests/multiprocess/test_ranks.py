"""The pool of ranks: results, errors, hangs, deaths, reuse and transport."""

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dion_core.testing import ranks
from dion_core.testing.ranks import RankError, RankPool, pool


class TwoArgumentError(Exception):
    """Pickles, but does not unpickle: __init__ wants more than ``args`` holds."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} and {right}")


def rank_and_sum() -> tuple[int, int, float]:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item()


def settings() -> tuple[int, int, str]:
    return os.getpid(), torch.get_num_threads(), dist.get_backend()


def echo(*values: object) -> tuple[object, ...]:
    return values


def raise_on(raising: tuple[int, ...], error: BaseException) -> int:
    if dist.get_rank() in raising:
        raise error
    return dist.get_rank()


def raise_two_argument_error() -> None:
    raise TwoArgumentError(1, 2)


def unpicklable_result() -> object:
    return lambda: None


def warn() -> None:
    warnings.warn("careful", UserWarning, stacklevel=1)


def sleep_on(rank: int, seconds: float) -> int:
    if dist.get_rank() == rank:
        time.sleep(seconds)
    return rank


def leave_others_in_a_collective() -> None:
    if dist.get_rank() == 0:
        raise KeyError("left early")
    dist.all_reduce(torch.ones(4))


def destroy_the_group() -> None:
    dist.destroy_process_group()


def make_no_more_groups() -> None:
    """On rank 0."""
    rank = dist.get_rank()
    dist.destroy_process_group()

    def fail(**_: object) -> None:
        raise RuntimeError("no group")

    if rank == 0:
        dist.init_process_group = fail


def die(rank: int, signal_number: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal_number) if signal_number else os._exit(3)
    time.sleep(30)


def die_soon() -> None:
    threading.Timer(0.2, os._exit, (5,)).start()


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


@pytest.fixture
def single() -> Iterator[RankPool]:
    """A pool of one rank, quick to start, that a test may break."""
    own = RankPool(1)
    yield own
    own.close()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_by_rank(world_size: int) -> None:
    expected = [(rank, world_size, sum(range(world_size))) for rank in range(world_size)]
    assert pool(world_size).run(rank_and_sum) == expected


def test_pool_is_kept() -> None:
    pids, threads, backends = zip(*pool(2).run(settings), strict=True)
    assert pids == tuple(pool(2).run(os.getpid))
    assert len({os.getpid(), *pids}) == 3
    assert threads == (1, 1)
    assert backends == ("gloo", "gloo")


@pytest.mark.parametrize("world_size", [0, -1])
def test_world_size_is_checked(world_size: int) -> None:
    with pytest.raises(ValueError, match=f"got {world_size}"):
        RankPool(world_size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.bool])
def test_tensors_arrive_with_equal_bits(dtype: torch.dtype) -> None:
    tensor = torch.randn(5, 4).mul(10).to(dtype).t()
    for (answer,) in pool(2).run(echo, tensor):
        assert isinstance(answer, Tensor)
        assert (answer.dtype, answer.stride()) == (dtype, tensor.stride())
        assert torch.equal(answer, tensor)


def test_arguments_and_results_of_other_kinds() -> None:
    values = ({"a": [1, None]}, np.arange(3), torch.tensor([float("nan"), -0.0]), torch.empty(0, 3), "text")
    for answer in pool(2).run(echo, *values):
        assert answer[0] == values[0]
        np.testing.assert_array_equal(answer[1], values[1])
        assert torch.equal(answer[2].view(torch.int32), values[2].view(torch.int32))
        assert (answer[3].shape, answer[4]) == ((0, 3), "text")


def test_large_arguments_and_results() -> None:
    tensor = torch.arange(2_000_000)
    assert all(torch.equal(answer[0], tensor) for answer in pool(2).run(echo, tensor))


def test_an_exception_on_one_rank_names_it() -> None:
    pids = pool(3).run(os.getpid)
    with pytest.raises(RankError, match=r"raise_on:\nrank 1 raised:\n(.*\n)*.*ValueError: five") as caught:
        pool(3).run(raise_on, (1,), ValueError("five"))
    assert "test_ranks.py" in str(caught.value)
    assert list(caught.value.errors) == [1]
    assert caught.value.lost == {}
    assert pool(3).run(os.getpid) == pids
    assert [each[2] for each in pool(3).run(rank_and_sum)] == [3.0] * 3


def test_exceptions_by_rank() -> None:
    every = pool(3).run_expecting_error(raise_on, (0, 1, 2), ValueError("alike"))
    assert [(type(each), str(each)) for each in every] == [(ValueError, "alike")] * 3
    some = pool(3).run_expecting_error(raise_on, (0, 2), SystemExit(4))
    assert [type(each) for each in some] == [SystemExit, type(None), SystemExit]
    assert pool(3).run_expecting_error(rank_and_sum) == [None] * 3


def test_what_does_not_pickle_is_an_error() -> None:
    pids = pool(2).run(os.getpid)
    with pytest.raises(Exception, match="lambda"):
        pool(2).run(lambda: None)
    with pytest.raises(RankError, match="lambda"):
        pool(2).run(unpicklable_result)
    for error in pool(2).run_expecting_error(raise_two_argument_error):
        assert isinstance(error, RuntimeError)
        assert str(error) == "TwoArgumentError: 1 and 2"
    assert pool(2).run(os.getpid) == pids


def test_warnings_are_errors() -> None:
    assert [type(each) for each in pool(2).run_expecting_error(warn)] == [UserWarning] * 2


def test_a_replaced_group_is_made_anew() -> None:
    pool(2).run(destroy_the_group)
    assert pool(2).run(rank_and_sum) == [(0, 2, 1.0), (1, 2, 1.0)]


def test_a_pool_whose_ranks_find_no_group_ends() -> None:
    own_pool = RankPool(2, timeout=3.0)
    pids = own_pool.run(os.getpid)
    own_pool.run(make_no_more_groups)
    with pytest.raises(RankError) as caught:
        own_pool.run(rank_and_sum)
    assert str(caught.value.errors[0]) == "no group"
    assert "rank 1" in str(caught.value), "the other waits for it in vain"
    assert own_pool.closed
    assert not any(is_running(pid) for pid in pids)


def test_a_stuck_collective_gives_up_and_a_hang_ends_the_pool() -> None:
    own_pool = RankPool(2, timeout=3.0)  # one pool for both: starting one is slow
    pids = own_pool.run(os.getpid)
    with pytest.raises(RankError) as caught:
        own_pool.run(leave_others_in_a_collective)
    assert [type(caught.value.errors[rank]) for rank in (0, 1)] == [KeyError, RuntimeError]
    assert "in leave_others_in_a_collective" in str(caught.value)
    assert own_pool.run(rank_and_sum) == [(0, 2, 1.0), (1, 2, 1.0)]
    assert own_pool.run(os.getpid) == pids

    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 did not answer in 0\.5 s") as caught:
        own_pool.run(sleep_on, 1, 60.0, timeout=0.5)
    assert time.monotonic() - start < 10
    assert "in sleep_on" in caught.value.lost[1]
    assert list(caught.value.lost) == [1]
    assert own_pool.closed
    assert not any(is_running(pid) for pid in pids)


def test_a_rank_that_exits_is_noticed_at_once_and_the_pool_replaced() -> None:
    pids = pool(2).run(os.getpid)
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 died with exit code 3"):
        pool(2).run(die, 1, 0)
    assert time.monotonic() - start < 10
    assert not any(is_running(pid) for pid in pids)
    assert [each[2] for each in pool(2).run(rank_and_sum)] == [1.0, 1.0]
    assert not set(pids) & set(pool(2).run(os.getpid))


def test_a_rank_that_is_killed(single: RankPool) -> None:
    with pytest.raises(RankError, match="rank 0 died with exit code -9"):
        single.run(die, 0, signal.SIGKILL)
    assert single.closed


def test_a_rank_that_died_while_idle(single: RankPool) -> None:
    single.run(die_soon)
    time.sleep(1.0)
    with pytest.raises(RankError, match="rank 0 died with exit code 5"):
        single.run(os.getpid)


def test_an_interrupted_call_closes_the_pool(monkeypatch: pytest.MonkeyPatch, single: RankPool) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ranks, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        single.run(os.getpid)
    assert single.closed
    with pytest.raises(RuntimeError, match="closed"):
        single.run(os.getpid)


@pytest.mark.parametrize("call", ["pool(1).run(time.sleep, 60)", "time.sleep(60)"], ids=["busy", "idle"])
def test_ranks_end_with_their_parent(call: str) -> None:
    script = (
        "import os, signal, time\n"
        "from dion_core.testing.ranks import pool\n"
        "print(*pool(1).run(os.getpid), pool(1)._directory.name, flush=True)\n"
        f"{call}\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        pid, directory = parent.stdout.readline().split()
        assert is_running(int(pid))
        parent.kill()
    deadline = time.monotonic() + 10
    while is_running(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(int(pid))
    assert not Path(directory).exists()


def test_close_leaves_nothing_behind(single: RankPool) -> None:
    pids = single.run(os.getpid)
    directory = Path(single._directory.name)
    assert directory.exists()
    single.close()
    single.close()
    assert not directory.exists()
    assert not any(is_running(pid) for pid in pids)
