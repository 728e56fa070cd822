"""Layer-wise state: the bits of the replicated mode, a W-th of the memory, and the traffic that is planned."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dion_core.collectives import Call, Handle, observe
from dion_core.process_groups import TorchGroup
from dion_core.testing.ranks import pool
from tests.layerwise_cases import KINDS, MODES, NUM_STEPS, SMALL, Run, assert_same

SETTINGS: tuple[tuple[str, torch.dtype, dict[str, Any]], ...] = (
    ("Muon", torch.float32, {}),
    ("Muon", torch.bfloat16, {"nesterov": True, "cautious_weight_decay": True}),
    ("NorMuon", torch.bfloat16, {"scale": "rms_norm"}),
    ("NorMuon", torch.float16, {"momentum_dtype": torch.float32}),
    ("Dion2", torch.float32, {"fraction": 0.25}),
    ("Dion2", torch.bfloat16, {"fraction": 1.0}),
    ("Dion2", torch.bfloat16, {"fraction": 0.25, "scope": "local", "maximize": True}),
    ("NorDion2", torch.float32, {"fraction": 0.25, "wire_dtype": torch.bfloat16}),
    ("NorDion2", torch.float32, {"fraction": 1.0}),
    ("NorDion2", torch.bfloat16, {"fraction": 0.25, "nonfinite": "skip"}),
    ("NorDion2", torch.float64, {"fraction": 0.25}),
)


def train(layout: str, more: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """Whole weights and state after training, for every setting."""
    results = []
    for optimizer, dtype, options in SETTINGS:
        run = Run(optimizer, {**options, **more}, layout=layout, dtype=dtype)
        for number in range(1, NUM_STEPS + 1):
            run.step(number)
        results.append(run.whole())
    return results


@cache
def one_process(layout: str = "plain") -> list[dict[str, Tensor]]:
    """Plain tensors and ordinary state."""
    return pool(1).run(train, layout, {})[0]


@pytest.mark.parametrize(
    ("world_size", "layout", "mode"),
    [*((world_size, "ddp", SMALL) for world_size in (1, 2, 3, 4)), (3, "ddp", "layerwise"), (2, "replicate", SMALL)],
    ids=str,
)
def test_the_bits_are_those_of_one_process(world_size: int, layout: str, mode: Any) -> None:
    alone = one_process("contiguous" if layout == "replicate" else "plain")
    for rank, results in enumerate(pool(world_size).run(train, layout, {"state": mode})):
        for setting, result, wanted in zip(SETTINGS, results, alone, strict=True):
            assert_same(result, wanted, (rank, setting))


def test_the_comparison_is_not_vacuous() -> None:
    """Every parameter and every state tensor moved; no row ever waits here."""
    for result, (optimizer, dtype, _) in zip(one_process(), SETTINGS, strict=True):
        start = Run(optimizer, {}, layout="plain", dtype=dtype).whole()
        moving = {name: value for name, value in result.items() if not name.endswith("waited")}
        assert all(not torch.equal(value, start[name]) for name, value in moving.items())
        assert len(moving) == len(KINDS) * 2 + 2 * 2 + ("Nor" in optimizer) * 11


def train_with_gaps(layout: str, more: Mapping[str, Any]) -> dict[str, Tensor]:
    """In step 2 some gradients are missing on every rank, in step 3 some are not finite."""
    run = Run("NorDion2", {"fraction": 0.25, **more}, layout=layout)
    run.step(1)
    run.step(2, absent=(0, 5, 7, 11, 13))
    for parameter in run.parameters:
        parameter.grad = torch.full_like(parameter, 0.5)
        parameter.grad[0] = torch.nan
    run.optimizer.step()
    return run.whole()


@pytest.mark.parametrize("nonfinite", ["rows", "skip"])
def test_gradients_that_are_missing_or_not_finite(nonfinite: str) -> None:
    [wanted] = pool(1).run(train_with_gaps, "plain", {"nonfinite": nonfinite})
    for result in pool(3).run(train_with_gaps, "ddp", {"nonfinite": nonfinite, "state": SMALL}):
        assert_same(result, wanted, nonfinite)


def without_the_owners_gradients(mode: Any) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """Weights before and after a step for which rank 0 has no gradients, and the state."""
    run = Run("NorDion2", {"fraction": 0.25, "state": mode})
    run.step(1)
    before = run.weights()
    run.step(2, absent=range(len(KINDS)) if dist.get_rank() == 0 else ())
    return before, run.weights(), run.whole()


def test_a_gradient_that_the_owner_lacks_counts_as_zero() -> None:
    """The step happens, since another rank has gradients, and all ranks end with one set of weights."""
    by_rank = pool(2).run(without_the_owners_gradients, SMALL)
    for before, after, state in by_rank:
        assert all(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
        assert all(map(torch.equal, after, by_rank[0][1]))
        assert_same(state, by_rank[0][2], "state")
    assert float(by_rank[0][2]["11.step"]) == 2


def memory(mode: Any) -> tuple[dict[str, int], list[int], dict[str, Any]]:
    """Elements of state by tensor, elements of the flat buffers they lie in, and the report."""
    run = Run("NorDion2", {"state": mode})
    run.step(1)
    kept = run.kept()
    buffers = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() // 4 for value in kept.values()}
    return {name: value.numel() for name, value in kept.items()}, list(buffers.values()), run.optimizer.report()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_rank_keeps_its_share_of_the_state(world_size: int) -> None:
    """Together the ranks keep every element once; the largest share is 1.3 of the mean and a matrix at most."""
    [(whole, _, ordinary)] = pool(1).run(memory, "like_parameters")
    for mode in MODES:
        by_rank = pool(world_size).run(memory, mode)
        names = [name for kept, _, _ in by_rank for name in kept]
        assert sorted(names) == sorted(whole), "kept twice, or by nobody"
        shares = [sum(kept.values()) for kept, _, _ in by_rank]
        assert sum(shares) == sum(whole.values())
        assert max(shares) <= 1.3 * sum(shares) / world_size + max(whole.values())
        for kept, buffers, report in by_rank:
            # One buffer for every kind of state and bucket; every tensor is rounded up to 64 elements in it.
            assert sum(buffers) == sum(-(-elements // 64) * 64 for elements in kept.values())
            assert report["state"]["mode"] == "layerwise"
            assert report["state"]["bytes"] == 4 * sum(kept.values())
            owned = {f"p{name.split('.')[0]}" for name in kept}
            assert set(report["state"]["parameters"]) == owned
        assert ordinary["state"]["mode"] == "like_parameters"
        assert ordinary["state"]["bytes"] == sum(report["state"]["bytes"] for _, _, report in by_rank)


def step_and_report(optimizer: str, mode: Any) -> tuple[list[Call], dict[str, Any], dict[str, Tensor]]:
    run = Run(optimizer, {"state": mode}, dtype=torch.bfloat16)
    with observe() as calls:
        run.step(1)
    return calls, run.optimizer.report(), run.kept()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("optimizer", ["NorMuon", "Dion2"])
def test_planned_is_measured(optimizer: str, world_size: int) -> None:
    by_rank = pool(world_size).run(step_and_report, optimizer, SMALL)
    orders = {tuple((call.name, call.label) for call in calls) for calls, _, _ in by_rank}
    assert len(orders) == 1, orders
    for calls, report, _ in by_rank:
        planned = [*report["buckets"], *report["values"]]
        assert len({each["name"] for each in planned}) == len(planned)
        for each in planned:
            sent = [call.sent for call in calls if call.label == each["name"]]
            assert len(sent) == each["traffic"]["collectives"]
            assert list(map(sum, zip(*sent, strict=True))) == each["traffic"]["back"]
            assert each["traffic"]["bytes"] == sum(map(sum, sent))
        assert {call.label for call in calls} == {"presence flags", *(each["name"] for each in planned)}
        moved = [call for call in calls if call.label != "presence flags"]
        assert report["bytes_per_step"] == sum(sum(call.sent) for call in moved)
    # Rows are those chosen and no more: a quarter of 40 rows of 100 in bf16, with a count, row numbers and factors.
    rows = 40 if optimizer == "NorMuon" else 10
    largest = [each for _, report, _ in by_rank for each in report["buckets"] if each["shape"] == [40, 100]]
    owned = {max(each["traffic"]["back"]) for each in largest}
    assert owned == {0, rows * 100 * 2 + 4 * (1 + 2 * rows)}


def test_rows_are_counted_where_their_state_is() -> None:
    by_rank = pool(2).run(step_and_report, "Dion2", SMALL)
    [(_, alone, _)] = pool(1).run(step_and_report, "Dion2", SMALL)
    assert sum(report["rows"]["chosen"] for _, report, _ in by_rank) == alone["rows"]["chosen"] > 0
    for _, report, _ in by_rank:
        assert 0 < report["rows"]["chosen"] < alone["rows"]["chosen"]
        assert all(each["exchange"] == "FromOwners" for each in report["buckets"])
        (load,) = report["owner_load"]
        assert load["ranks"] == [0, 1]
        assert sum(load["cost"]) == alone["owner_load"][0]["cost"][0]


EVENTS: list[tuple[str, str]] = []


@dataclass(frozen=True)
class NotedHandle:
    """A handle that notes when it is waited for."""

    handle: Handle
    label: str

    def wait(self) -> None:
        EVENTS.append(("wait", self.label))
        self.handle.wait()


def noting_gather(group: TorchGroup, outputs: Sequence[Tensor], tensor: Tensor) -> Handle:
    EVENTS.append(("launch", group.label))
    return NotedHandle(ALL_GATHER(group, outputs, tensor), group.label)


def noting_orthogonalizer(matrices: Tensor) -> Tensor:
    EVENTS.append(("compute", str(list(matrices.shape))))
    return matrices.clone()


ALL_GATHER = TorchGroup.all_gather


def events_of_a_step() -> list[tuple[str, str]]:
    run = Run("Muon", {"state": SMALL, "orthogonalizer": noting_orthogonalizer})
    with patch.object(TorchGroup, "all_gather", noting_gather):
        EVENTS.clear()
        run.step(1)
    return EVENTS


def test_updates_of_one_bucket_are_computed_while_others_are_under_way() -> None:
    by_rank = pool(2).run(events_of_a_step)
    overlapped = 0
    for events in by_rank:
        under_way: set[str] = set()
        for kind, label in events:
            overlapped += kind == "compute" and bool(under_way)
            if kind == "launch":
                under_way.add(label)
            elif kind == "wait":
                under_way.discard(label)
        launched = [label for kind, label in events if kind == "launch"]
        assert not under_way
        assert launched == [label for kind, label in by_rank[0] if kind == "launch"]
    computed = sum(kind == "compute" for events in by_rank for kind, _ in events)
    assert overlapped == computed > 4, "values of AdamW and Lion are under way when the first one is computed"
