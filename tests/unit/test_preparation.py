"""A rehearsal meets the kernels that a step launches on rows, starts none of them and changes nothing.

Here it runs on a CPU as on a GPU: kernels are the interpreter's, and none is run. That a first step then compiles
nothing is tested on GPUs (`gpu/test_counts.py`).
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

pytest.importorskip("triton")

from dion_core import Dion2, Muon, NorDion2, NorMuon, ops
from dion_core.kernels import choice, deferral, neurons, rows, updating
from dion_core.matrices import Matrices
from dion_core.preparation import rehearse
from dion_core.testing.loopback import loopback

COMMON = {"_accumulate_kernel", "_take_and_decay_kernel", "_place_kernel", "_update_kernel"}
NORMALIZED = {"_factors_kernel", "_scale_kernel"}
DEFERRED = {"_with_age_kernel", "_wait_kernel"}


@pytest.mark.parametrize(
    ("kind", "transport", "expected"),
    [
        (Muon, "full", COMMON),
        (NorMuon, "full", COMMON | NORMALIZED),
        (Dion2, "local", COMMON | {"_choose_kernel"}),
        (NorDion2, "full", COMMON | NORMALIZED | {"_choose_kernel"}),
        (NorDion2, "capped", COMMON | NORMALIZED | DEFERRED | {"_choose_kernel"}),
    ],
)
def test_a_rehearsal_meets_all_kernels_of_rows_and_changes_nothing(
    kind: type[Any], transport: str, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    met = []

    def meet(kernel: Any, *arguments: Any, **options: Any) -> None:
        met.append(kernel.fn.__name__)
        launch(kernel, *arguments, **options)

    launch = rows.launch
    with loopback(4, "cpu") as (mesh, _):
        parts = [torch.randn(6, 16, dtype=torch.bfloat16) for _ in range(3)]
        parameters = [nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)], run_check=False)) for part in parts]
        optimizer = kind(parameters, transport=transport)
        state = {number: optimizer.state[parameter] for number, parameter in enumerate(parameters)}
        before = copy.deepcopy(([part.clone() for part in parts], state))
        monkeypatch.setattr(ops, "_for_kernels", lambda tensor: True)
        monkeypatch.setattr(ops, "_on_device", lambda matrices: isinstance(matrices, Matrices))
        for module in (choice, deferral, neurons, rows, updating):
            monkeypatch.setattr(module, "launch", meet)
        (bucket,) = optimizer._plan.buckets
        rehearse(bucket, None)  # transports are rehearsed on GPUs: here they would take the values for real
        assert set(met) == expected
        assert len(met) == len(expected)
        assert not any(map(torch.any, (bucket.chosen, bucket.refused, bucket.nonfinite)))
        for part, same in zip(parts, before[0], strict=True):
            assert torch.equal(part, same)
        for number, of_parameter in state.items():
            for name, value in of_parameter.items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(before[1][number][name])), name
