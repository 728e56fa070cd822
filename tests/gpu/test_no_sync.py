"""A step on a GPU never makes the host wait for the device, once shapes, tables and compiled kernels are there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dion_comm_capped import Capped
from dion_comm_nccl import LocalTopRows
from dion_core import Dion2, Muon, NorDion2, NorMuon, available_transports
from dion_core.layout import Axis
from dion_core.newton_schulz import NewtonSchulz
from dion_core.process_groups import TorchGroup
from dion_core.rows import Rows, RowSelection
from dion_core.steps import run
from dion_core.testing.cells import Case, problems
from dion_core.transport import Exchange, Session, Transport
from tests.no_sync import no_sync

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

WARM_UP = 3
SHAPES = [(96, 64), (96, 64), (64, 96), (64, 64), (17, 32), (1, 8)]
TRANSPORTS: dict[str, Transport] = {
    **{name: kind() for name, kind in available_transports().items()},
    "capped, packed": Capped(always_pack=True),
    "capped, packed, 1.0": Capped(capacity=1.0, always_pack=True),
    "capped, packed, varlen": Capped(capacity=1.0, on_overflow="varlen", always_pack=True),
    "local, slack 2": LocalTopRows(slack=2.0),
}
MUST_READ = ("varlen", "uniform", "capped, packed, varlen")


@pytest.fixture(scope="module")
def nccl() -> Iterator[TorchGroup]:
    """A world of one rank on NCCL."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    assert dist.group.WORLD is not None
    yield TorchGroup(dist.group.WORLD)
    dist.destroy_process_group()


def test_a_wait_is_noticed() -> None:
    """The negative control: reading a value, and copying one to the device."""
    value = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="synchroniz"), no_sync():
        value.sum().item()
    with pytest.raises(RuntimeError, match="synchroniz"), no_sync():
        torch.tensor([1.0, 2.0], device="cuda")
    value.sum().item()  # allowed again


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"nonfinite": "skip"}], ids=["rows", "skip"])
@pytest.mark.parametrize("kind", [Muon, NorMuon, Dion2, NorDion2])
def test_a_step_does_not_wait(kind: type[Any], options: dict[str, Any], dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def parameter(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(shape, generator=generator, device="cuda", dtype=dtype))

    matrices, vector, other = [parameter(*shape) for shape in SHAPES], parameter(64), parameter(7, 3)
    optimizer = kind(
        [
            {"params": matrices},
            {"params": [vector], "algorithm": "adamw", "lr": 0.1},
            {"params": [other], "algorithm": "lion", "lr": 0.1},
        ],
        lr=0.1,  # so that bf16 shows a step
        **options,
    )

    def give_gradients() -> None:
        for each in (*matrices, vector, other):
            each.grad = torch.randn(each.shape, generator=generator, device="cuda", dtype=dtype)

    for _ in range(WARM_UP):
        give_gradients()
        optimizer.step()
    give_gradients()
    before = [each.detach().clone() for each in (*matrices, vector, other)]
    with no_sync():
        optimizer.step()
    assert not any(torch.equal(one, each) for one, each in zip(before, (*matrices, vector, other), strict=True))


@pytest.mark.parametrize("kind", [Muon, NorDion2])
def test_a_step_with_a_loss_scaler_does_not_wait(kind: type[Any]) -> None:
    """The scale and the skip of torch.amp.GradScaler stay on the device."""
    parameters = [nn.Parameter(torch.randn(shape, device="cuda")) for shape in SHAPES]
    optimizer = kind(parameters)
    optimizer.grad_scale, optimizer.found_inf = torch.full((), 1024.0, device="cuda"), torch.zeros((), device="cuda")
    for number in range(WARM_UP + 2):
        for each in parameters:
            each.grad = torch.randn_like(each)
        if number < WARM_UP:
            optimizer.step()
            continue
        optimizer.found_inf.fill_(number - WARM_UP)  # the last step is skipped
        before = [each.detach().clone() for each in parameters]
        with no_sync():
            optimizer.step()
        moved = [not torch.equal(one, each) for one, each in zip(before, parameters, strict=True)]
        assert moved == [number == WARM_UP] * len(parameters)


def exchanged(session: Session, exchange: Exchange, chosen: RowSelection, momentum: list[torch.Tensor]) -> Rows:
    """One step of the only bucket of a session, as an optimizer takes it."""
    run(session.begin([chosen]))
    admitted = exchange.admit(chosen)
    rows = exchange.reserve(admitted)
    for matrix, state in enumerate(momentum):
        taken = state.index_select(0, admitted.index[matrix]).to(rows.values.dtype)
        rows.values.index_copy_(0, rows.slot[matrix], taken)
    results = run(exchange.orthogonalize(rows, admitted, NewtonSchulz()))
    session.end()
    return results


@pytest.mark.parametrize("axis", [Axis.ROWS, Axis.COLUMNS])
@pytest.mark.parametrize("name", TRANSPORTS)
def test_an_exchange_does_not_wait(name: str, axis: Axis, nccl: TorchGroup) -> None:
    """On one rank of NCCL, its matrices laid out as if their rows (or columns) were split."""
    transport = TRANSPORTS[name]
    case = Case(transport.default_scope, axis, "even", 5, torch.float32)
    [problem] = problems(case, nccl, torch.device("cuda", 0))
    session = transport.open([problem.bucket])
    [exchange] = session.exchanges
    if session.host_reads:
        assert name in MUST_READ
        pytest.skip("reads on the host in every step, and says so")
    chosen, momentum = problem.selected, problem.local(problem.whole)
    for _ in range(WARM_UP):
        expected = exchanged(session, exchange, chosen, momentum)
    with no_sync():
        rows = exchanged(session, exchange, chosen, momentum)
    valid = chosen.valid()
    received, wanted = (each.values[each.slot[valid]] for each in (rows, expected))
    assert received.shape[0] == 5 * problem.bucket.total_rows
    assert torch.equal(received, wanted)
