"""Every installed transport passes the conformance suite, and the suite fails what is broken."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from dion_comm_capped import Capped
from dion_comm_nccl import FullShard
from dion_core.builtin import LocalExchange, ReplicatedExchange
from dion_core.collectives import SoloGroup
from dion_core.layout import Axis
from dion_core.process_groups import TorchGroup
from dion_core.registry import available_transports
from dion_core.testing.cells import Case, cases, problems, vacuous
from dion_core.testing.conformance import Outcome, check_all, check_transport
from dion_core.testing.ranks import pool
from dion_core.testing.trial import play, stage
from dion_core.transport import Bucket, Scope, Session, Transport
from tests.faulty_transports import FAULTS, Faulty, Opened, Sound

WORLD_SIZES = (1, 2, 3, 4, pytest.param(8, marks=pytest.mark.slow))
PLAIN = Case("global", Axis.ROWS, "uneven", 3, torch.float32)


@dataclass(frozen=True)
class BuiltIn(Transport):
    """The exchanges of the core that need no transport, as if they were one."""

    axes: frozenset[Axis]
    scopes: ClassVar[frozenset[Scope]] = frozenset({"all", "global"})
    default_scope: ClassVar[Scope] = "global"

    def open(self, buckets: Sequence[Bucket]) -> Session:
        kind = LocalExchange if Axis.WHOLE in self.axes else ReplicatedExchange
        return Opened([kind(bucket) for bucket in buckets])


def run_suite(transport: str | Transport, world_size: int) -> list[list[Outcome]]:
    """By rank all outcomes, after asserting that every cell was run, none failed and none was vacuous."""
    by_rank = pool(world_size).run(check_all, transport, timeout=110.0)
    wanted = list(cases(available_transports()[transport] if isinstance(transport, str) else transport, world_size))
    found = failures(by_rank)
    assert not found, "\n".join(found)
    assert all([outcome.case for outcome in outcomes] == wanted for outcomes in by_rank)
    for outcomes in zip(*by_rank, strict=True):
        moved = sum(outcome.bytes_to_others for outcome in outcomes)
        assert (moved > 0) == (world_size > 1) or outcomes[0].case.twist == "idle", outcomes[0].case
    return by_rank


def failures(by_rank: Sequence[Sequence[Outcome]]) -> list[str]:
    return [
        f"rank {rank}: {outcome.case}: {failure}"
        for rank, outcomes in enumerate(by_rank)
        for outcome in outcomes
        for failure in outcome.failures
    ]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", available_transports())
def test_installed_transports(name: str, world_size: int) -> None:
    by_rank = run_suite(name, world_size)
    if not available_transports()[name].may_defer:
        assert sum(outcome.deferred for outcomes in by_rank for outcome in outcomes) == 0


# Pools and deferral occur by these options even in small cells. Where columns are split they change nothing, so that
# cells of split rows alone are run.
CAPPED: dict[str, Capped] = {
    "learned, packed": Capped(always_pack=True),
    "1.0, packed": Capped(capacity=1.0, always_pack=True),
    "1.0, packed, varlen": Capped(capacity=1.0, on_overflow="varlen", always_pack=True),
    "binomial": Capped(capacity="binomial"),
}


def check_rows(transport: Transport) -> tuple[list[Outcome], int]:
    """The outcomes of all cells of split rows, and how many more bytes this rank planned to send than to send back.

    Over all ranks those are the bytes of the headers.
    """
    assert dist.group.WORLD is not None
    chosen = [case for case in cases(transport, dist.get_world_size()) if case.axis is Axis.ROWS]
    [outcomes] = check_each([transport], chosen)
    headers = 0
    for case in chosen:
        if case.num_matrices == 5:
            steps = stage(case, TorchGroup(dist.group.WORLD), torch.device("cpu"))
            for trial in play(transport, steps, unused=0.0):
                headers += sum(trial.planned.forward) - sum(trial.planned.back)
    return outcomes, headers


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", CAPPED)
def test_capped_with_options(name: str, world_size: int) -> None:
    by_rank, headers = zip(*pool(world_size).run(check_rows, CAPPED[name], timeout=110.0), strict=True)
    assert failures(by_rank) == []
    deferred = sum(outcome.deferred for outcomes in by_rank for outcome in outcomes)
    if name == "1.0, packed":
        assert (deferred > 0) == (world_size > 1), "one rank has room for all"
    if name == "1.0, packed, varlen":
        assert deferred == 0
    assert sum(headers) > 0 or (name == "binomial" and world_size < 3), "no pool was packed"


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_replicated_exchange(world_size: int) -> None:
    run_suite(BuiltIn(frozenset({Axis.REPLICATED})), world_size)


def test_local_exchange() -> None:
    run_suite(BuiltIn(frozenset({Axis.WHOLE})), 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", available_transports())
def test_on_one_gpu(name: str) -> None:
    device = torch.device("cuda:0")
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    try:
        outcomes = check_all(name, "cuda:0")
    finally:
        dist.destroy_process_group()
    assert failures([outcomes]) == []
    assert [outcome.case for outcome in outcomes] == list(cases(available_transports()[name], 1))


def test_cells_are_the_whole_grid() -> None:
    """Scopes x axes x shards x numbers of matrices x wire dtypes, on every world size above one."""
    grid = product(
        ("all", "global"),
        (Axis.ROWS, Axis.COLUMNS),
        ("even", "uneven", "empty", "skewed"),
        (1, 3, 5),
        (torch.float64, torch.float32, torch.bfloat16),
    )
    for world_size in (2, 3, 4):
        made = [case for case in cases(FullShard, world_size) if case.twist == "plain"]
        assert {Case(*cell) for cell in grid} <= set(made)
        assert len({str(case) for case in cases(FullShard, world_size)}) == len([*cases(FullShard, world_size)])


@pytest.mark.parametrize("claimed", ["uneven", "empty", "skewed", "few", "ragged"])
@pytest.mark.parametrize("axis", [Axis.ROWS, Axis.COLUMNS])
def test_a_cell_that_is_not_what_it_is_called_is_vacuous(axis: Axis, claimed: str) -> None:
    case = Case("global", axis, "even", 5, torch.float32)
    [problem] = problems(case, SoloGroup(size=4, ranks=(0, 1, 2, 3)), torch.device("cpu"))
    chosen = problem.selected
    assert not [*vacuous(case, problem, chosen)]
    assert any(claimed in text for text in vacuous(replace(case, shards=claimed), problem, chosen))


def check_each(transports: Sequence[Transport], chosen: Sequence[Case]) -> list[list[Outcome]]:
    return [[check_transport(transport, case) for case in chosen] for transport in transports]


def outcomes_of(transports: Sequence[Transport]) -> list[list[list[Outcome]]]:
    """By transport and rank, the outcomes of one step and of three."""
    by_rank = pool(2).run(check_each, transports, [PLAIN, replace(PLAIN, twist="steps")])
    return [list(outcomes) for outcomes in zip(*by_rank, strict=True)]


def test_a_sound_exchange_passes() -> None:
    """So it is the fault alone that the suite reports in the next test."""
    [by_rank] = outcomes_of([Faulty(Sound)])
    assert failures(by_rank) == []


def test_faults_are_reported() -> None:
    for (kind, expected), by_rank in zip(FAULTS.items(), outcomes_of([Faulty(kind) for kind in FAULTS]), strict=True):
        found = failures(by_rank)
        assert any(expected in failure for failure in found), (kind.__name__, found)


class SecretlyDeferring(Capped):
    may_defer: ClassVar[bool] = False


def test_a_transport_may_defer_only_if_it_says_so() -> None:
    """`Capped` does; the oracle then takes the rows that were admitted."""
    [by_rank] = outcomes_of([SecretlyDeferring(capacity=1.0, always_pack=True)])
    assert any("without may_defer" in failure for failure in failures(by_rank))
    [by_rank] = outcomes_of([Capped(capacity=1.0, always_pack=True)])
    assert failures(by_rank) == []
    assert sum(outcome.deferred for outcomes in by_rank for outcome in outcomes) > 0
