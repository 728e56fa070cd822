"""A rehearsal meets the kernels that a step launches on rows, starts none of them and changes nothing.

Here tensors on the CPU pass for tensors on a GPU, kernels are the interpreter's, and none is run. Memory that a kernel
would fill holds the largest numbers instead: who took them for places would fail. That a first step then compiles
nothing is tested on GPUs (`gpu/test_counts.py`).
"""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

pytest.importorskip("triton")

from dion_comm_capped import Capped
from dion_comm_nccl import LocalTopRows
from dion_core import Dion2, Muon, NorDion2, NorMuon
from dion_core.preparation import rehearse
from dion_core.testing.loopback import loopback

MODULES = [
    *(f"dion_core.kernels.{name}" for name in ("choice", "compaction", "deferral", "neurons", "rows", "updating")),
    *(f"dion_comm_capped.kernels.{name}" for name in ("admission", "places")),
]
ROWS = {"_accumulate_kernel", "_take_and_decay_kernel", "_place_kernel", "_update_kernel"}
NORMALIZED = {"_factors_kernel", "_scale_kernel"}
CHOSEN = {"_choose_kernel"}
PACKED = {"_places_kernel", "_move_kernel"}
DEFERRED = {"_with_age_kernel", "_wait_kernel"}
POOLED = {"_last_admitted_kernel", "_keep_kernel", "_slots_kernel", "_write_headers_kernel", "_read_headers_kernel"}
CAPPED = ROWS | NORMALIZED | CHOSEN | PACKED | DEFERRED | POOLED


def full_of_largest(made: Tensor) -> Tensor:
    return made.fill_(torch.iinfo(made.dtype).max) if not made.dtype.is_floating_point else made.fill_(torch.nan)


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that would be launched, as they are."""
    names = []

    def meet(kernel: Any, *arguments: Any, **options: Any) -> None:
        names.append(kernel.fn.__name__)
        launch(kernel, *arguments, **options)

    launch = importlib.import_module("dion_core.launching").launch
    for module in MODULES:
        monkeypatch.setattr(f"{module}.launch", meet)
    return names


@pytest.mark.parametrize(
    ("kind", "transport", "options", "expected"),
    [
        (Muon, "full", {}, ROWS | PACKED),
        (NorMuon, "full", {}, ROWS | NORMALIZED | PACKED),
        (Dion2, "local", {}, ROWS | CHOSEN | PACKED),
        (Dion2, LocalTopRows(slack=2.0), {}, ROWS | CHOSEN | PACKED),
        (NorDion2, "full", {"scope": "global"}, ROWS | NORMALIZED | CHOSEN | PACKED),
        (NorDion2, "full", {"scope": "all"}, ROWS | NORMALIZED | PACKED),
        (NorDion2, "varlen", {}, ROWS | NORMALIZED | CHOSEN),
        (NorDion2, "capped", {}, CAPPED),
        (NorDion2, Capped(always_pack=True, on_overflow="varlen"), {}, CAPPED),
    ],
    ids=str,
)
@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=str)
def test_a_rehearsal_meets_all_kernels_of_rows_and_changes_nothing(
    kind: type[Any],
    transport: Any,
    options: dict[str, Any],
    expected: set[str],
    placement: Any,
    met: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with loopback(4, "cpu") as (mesh, _):
        parts = [torch.randn(6, 16, dtype=torch.bfloat16) for _ in range(3)]
        parameters = [nn.Parameter(DTensor.from_local(part, mesh, [placement], run_check=False)) for part in parts]
        optimizer = kind(parameters, transport=transport, **options)
        state = {number: optimizer.state[parameter] for number, parameter in enumerate(parameters)}
        before = copy.deepcopy(([part.clone() for part in parts], state))
        (bucket,) = optimizer._plan.buckets
        choice = optimizer._plan.choice
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "is_cuda", True)
            empty, new_empty, empty_like = torch.empty, Tensor.new_empty, torch.empty_like
            patch.setattr(torch, "empty", lambda *sizes, **how: full_of_largest(empty(*sizes, **how)))
            patch.setattr(torch, "empty_like", lambda *like, **how: full_of_largest(empty_like(*like, **how)))
            patch.setattr(Tensor, "new_empty", lambda self, *sizes: full_of_largest(new_empty(self, *sizes)))
            rehearse(bucket, choice.transport if choice is not None else None)
        if isinstance(placement, Replicate):  # nothing to move
            expected = expected - PACKED - DEFERRED - POOLED
        assert set(met) == expected
        assert len(met) == len(expected)
        assert not any(map(torch.any, (bucket.chosen, bucket.applied, bucket.nonfinite)))
        for part, same in zip(parts, before[0], strict=True):
            assert torch.equal(part, same)
        for number, of_parameter in state.items():
            for name, value in of_parameter.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(before[1][number][name])), name
