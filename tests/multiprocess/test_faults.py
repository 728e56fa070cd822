"""Ranks that die, stop, come late or go their own way: the others raise in bounded time and say where."""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from dion_comm_capped import Capped
from dion_core import NorDion2, buckets
from dion_core.newton_schulz import NewtonSchulz, Orthogonalizer
from dion_core.placements import local_tensor
from dion_core.rows import RowSelection
from dion_core.testing.ranks import RankError, RankPool, pool
from dion_core.transport import Transport, TransportError
from tests.faulty_transports import Faulty, Sound
from tests.training import (
    Cell,
    Snapshot,
    assert_equal_bits,
    build,
    local,
    place,
    random_problem,
    set_gradients,
    snapshot,
    whole_mesh,
)

SECONDS = 8.0
"""Of a call in the pools here; collectives give up at 80 % of it."""
ODD = 1
"""The rank that is at fault."""

WHERE = r"(all_\w+) for ([\w ]+|[\w ]*bucket [^()]+ \(\d+x\d+\)) on rank (\d) among ranks \(0, 1, 2\) failed: "
AT_FIRST = r"presence flags|row scores"
"""What the collectives are for that come before those of the buckets."""
IN_A_BUCKET = r"(row statistics of )?bucket w\d and 2 more \(\d+x\d+\)"


class Survivors(RankPool):
    """A pool that waits for the answers of those that are left when a rank has died."""

    def _collect(self, answers: dict[int, Any], timeout: float) -> dict[int, str]:
        lost: dict[int, str] = {}
        while len(answers) < self.world_size:
            gone = super()._collect(answers, timeout)
            lost |= gone
            answers |= dict.fromkeys(gone)
        for rank in lost:
            del answers[rank]
        return lost


@pytest.fixture(scope="module")
def trio() -> Iterator[RankPool]:
    """Three ranks whose collectives give up soon."""
    own = RankPool(3, timeout=SECONDS)
    yield own
    own.close()


@contextmanager
def in_time() -> Iterator[None]:
    """The block ends within the time-out of the collectives and a little for the rest, on a busy machine too."""
    start = time.monotonic()
    try:
        yield
    finally:
        assert time.monotonic() - start < 1.5 * SECONDS


@dataclass(frozen=True)
class Disturbed:
    """Newton-Schulz that does something first in its n-th call on the odd rank."""

    what: Literal["exit", "kill", "raise", "nothing"] = "nothing"
    in_call: int = 0
    calls: list[int] = field(default_factory=list, repr=False, compare=False)

    def __call__(self, matrices: Tensor) -> Tensor:
        self.calls.append(len(matrices))
        if dist.get_rank() == ODD and len(self.calls) == self.in_call:
            disturb(self.what)
        return NewtonSchulz()(matrices)


def disturb(what: str) -> None:
    if what == "exit":
        os._exit(7)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "raise":
        raise RuntimeError("out of slots")


def small(transport: str | Transport = "varlen", orthogonalizer: Orthogonalizer | None = None) -> torch.optim.Optimizer:
    """An optimizer of three row-sharded matrices of each of two shapes, with gradients."""
    mesh, generator, parameters = whole_mesh(), torch.Generator().manual_seed(0), []
    for number, shape in enumerate([(9, 6)] * 3 + [(12, 4)] * 3):
        value, gradient = (torch.randn(shape, generator=generator) for _ in range(2))
        parameter = nn.Parameter(place(value, Shard(0), mesh))
        parameter.grad = place(gradient, Shard(0), mesh)
        parameters.append((f"w{number}", parameter))
    return NorDion2(parameters, fraction=0.5, transport=transport, orthogonalizer=orthogonalizer or "auto")


def die(what: str, when: str) -> None:
    """Two sound steps; in the third the odd rank dies."""
    # Each rank orthogonalizes two buckets a step: the fifth call is that of the first bucket in the third step.
    optimizer = small(orthogonalizer=Disturbed(what if when == "in a step" else "nothing", in_call=5))
    for _ in range(2):
        optimizer.step()
    if when == "between steps" and dist.get_rank() == ODD:
        disturb(what)
    with in_time():
        optimizer.step()


def named(error: BaseException, rank: int, label: str) -> bool:
    """The error is a TransportError that names the collective, what it was for, and the rank."""
    found = re.match(WHERE, str(error))
    assert isinstance(error, TransportError), error
    assert found is not None, error
    assert int(found[3]) == rank
    return re.fullmatch(label, found[2]) is not None


@pytest.mark.slow
@pytest.mark.parametrize("what", ["exit", "kill"])
@pytest.mark.parametrize("when", ["between steps", "in a step"])
def test_a_rank_that_dies(what: str, when: str) -> None:
    own = Survivors(3, timeout=SECONDS)  # closed by the loss
    with pytest.raises(RankError) as caught:
        own.run(die, what, when, timeout=2 * SECONDS)
    assert caught.value.lost == {ODD: f"died with exit code {7 if what == 'exit' else -9}"}
    assert sorted(caught.value.errors) == [0, 2]
    for rank, error in caught.value.errors.items():
        assert named(error, rank, AT_FIRST if when == "between steps" else IN_A_BUCKET), error


def take_steps(skipped: int, delay: float) -> Tensor:
    """The weights after three steps. The odd rank skips some at the end, or is late for the second."""
    optimizer = small()
    for number in range(3):
        if dist.get_rank() == ODD and number == 1:
            time.sleep(delay)
        if dist.get_rank() == ODD and number >= 3 - skipped:
            continue
        with in_time():
            optimizer.step()
    return torch.cat([local(each).flatten() for each in optimizer.param_groups[0]["params"]])


@pytest.mark.slow
def test_a_rank_that_skips_a_step(trio: RankPool) -> None:
    errors = trio.run_expecting_error(take_steps, 1, 0.0, timeout=4 * SECONDS)
    assert errors[ODD] is None
    for rank in (0, 2):
        assert named(errors[rank], rank, AT_FIRST), errors[rank]


@pytest.mark.slow
def test_a_rank_that_is_late(trio: RankPool) -> None:
    """Less than the time-out late it changes nothing; more, and the others say what they waited for."""
    in_step = trio.run(take_steps, 0, 0.0)
    late = trio.run(take_steps, 0, 0.3 * SECONDS, timeout=4 * SECONDS)
    assert all(map(torch.equal, late, in_step))
    errors = trio.run_expecting_error(take_steps, 0, 0.95 * SECONDS, timeout=4 * SECONDS)
    for rank in (0, 2):
        assert named(errors[rank], rank, AT_FIRST), errors[rank]
    assert isinstance(errors[ODD], TransportError)
    assert all(map(torch.equal, trio.run(take_steps, 0, 0.0), in_step)), "the pool lives on"


class BreaksOnTheOddRank(Sound):
    """Raises before its second message."""

    calls = 0

    def admit(self, selection: RowSelection) -> RowSelection:
        self.calls += 1
        if self.calls == 2 and dist.get_rank() == ODD:
            disturb("raise")
        return self.inner.admit(selection)


def broken_steps(when: str) -> None:
    if when == "before the first message":
        optimizer = small(Faulty(BreaksOnTheOddRank))
    else:
        optimizer = small("varlen", Disturbed("raise", in_call=3))
    optimizer.step()
    with in_time():
        optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before the first message", "between the messages"])
def test_what_raises_on_one_rank_ends_the_step_of_the_others(when: str, trio: RankPool) -> None:
    errors = trio.run_expecting_error(broken_steps, when, timeout=4 * SECONDS)
    assert type(errors[ODD]) is RuntimeError
    assert str(errors[ODD]) == "out of slots"
    for rank in (0, 2):
        assert named(errors[rank], rank, IN_A_BUCKET), errors[rank]


def other_owners() -> str:
    """What a rank raises where the owners of the odd one were computed otherwise."""
    assign = buckets.assign_owners

    def reversed_owners(*arguments: Any) -> Any:
        owners, loads = assign(*arguments)
        return [1 - owner for owner in owners], loads

    with patch.object(buckets, "assign_owners", reversed_owners if dist.get_rank() == ODD else assign):
        try:
            small("full")
        except TransportError as error:
            message = str(error)
        else:
            message = "nothing was raised"
    small("full").step()
    return message


def test_owners_that_differ_are_found_before_the_first_step() -> None:
    one, other = pool(2).run(other_owners)
    assert one == other
    assert re.fullmatch(
        r"ranks disagree about the optimizer's plan, line \d+: "
        r"ranks \[0\] have '3 x 9x6 .*owners \[0, 1, 0\].*w0, w1, w2'; "
        r"ranks \[1\] have '3 x 9x6 .*owners \[1, 0, 1\].*w0, w1, w2'",
        one,
    ), one


# Gradients of two matrices of which a quarter is far more than three rows a pair, and of the other algorithms.
SCALED = random_problem([(48, 6)] * 2 + [(9, 4)], adamw=[(5,)], lion=[(4, 3)], num_steps=4, seed=5)
SCALE = 1024.0  # a power of two rounds nothing


def step_by_hand(optimizer: Any) -> None:
    """Sets what torch.amp.GradScaler sets for the duration of a step, by this rank's own gradients."""
    gradients = [local(each.grad) for group in optimizer.param_groups for each in group["params"]]
    optimizer.grad_scale = torch.tensor(SCALE)
    optimizer.found_inf = torch.tensor(float(not all(each.isfinite().all() for each in gradients)))
    optimizer.step()
    del optimizer.grad_scale, optimizer.found_inf


def train(cell: Cell, infinite: int | None, way: str) -> tuple[list[Snapshot], dict[str, Any]]:
    """Weights and state after every step, and the report.

    With a scaler, each rank has its own, and only the odd rank has an infinity in one of the steps; "unscaled",
    that step is left out.
    """
    mesh, snapshots = whole_mesh(), []
    optimizer, parameters = build(cell, mesh)
    scaler = torch.amp.GradScaler("cpu", SCALE, enabled=way == "GradScaler")
    scaler.scale(torch.zeros(1))  # puts its scale on the device
    for number, gradients in enumerate(SCALED.gradients):
        set_gradients(parameters, gradients, cell, mesh)
        for parameter in parameters.values():
            parameter.grad *= SCALE if way == "by hand" else scaler.get_scale()
        if number == infinite and dist.get_rank() == ODD:
            local_tensor(parameters["matrix0"].grad)[0, 0] = torch.inf
        if way == "by hand":
            step_by_hand(optimizer)
        elif way == "GradScaler" or number != infinite:
            scaler.step(optimizer)
            scaler.update()
        snapshots.append(snapshot(optimizer, parameters))
    return snapshots, optimizer.report()


@pytest.mark.parametrize("way", ["by hand", "GradScaler"])
@pytest.mark.parametrize("layout", ["shard0", "shard1", "ddp"])
@pytest.mark.parametrize("infinite", [0, 2, None])
def test_ranks_agree_on_a_step_that_a_loss_scaler_skips(infinite: int | None, layout: str, way: str) -> None:
    """Nothing moves on any rank in that step, and the others are those without scaling and without that step."""
    for transport in ("full", "varlen", Capped(always_pack=True)):
        cell = Cell(SCALED, "NorDion2", layout, {"transport": transport})
        runs = zip(*(pool(2).run(train, cell, infinite, each) for each in (way, "unscaled")), strict=True)
        for (snapshots, report), (wanted, _) in runs:
            for number, (one, other) in enumerate(zip(snapshots, wanted, strict=True)):
                assert_equal_bits(one, other, f"{transport} step {number}")
            skipped = int(infinite is not None)
            assert report["steps"] == {"taken": 4 - skipped, "skipped": skipped}
