"""The report: plain data, counters that start again, figures of the plan, and silence on the wire."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dion_comm_nccl import FullShard, LocalTopRows
from dion_core import Dion2, Muon, NorDion2
from dion_core.buckets import Member, Part, make_buckets
from dion_core.builtin import LocalExchange
from dion_core.collectives import SoloGroup, observe
from dion_core.layout import Axis, split_layout
from dion_core.ownership import newton_schulz_cost
from dion_core.plan import Plan
from dion_core.registry import Choice
from dion_core.report import Report, make_report
from dion_core.rows import RowSelection
from dion_core.transport import Transport
from dion_core.views import Views


class MuteGroup(SoloGroup):
    """One of several ranks that must not communicate."""

    def _refuse(self, *arguments: object) -> Any:
        raise AssertionError("a collective was issued")

    all_gather = all_reduce = reduce_scatter = broadcast = all_to_all = _refuse


@dataclass(frozen=True)
class HesitantExchange(LocalExchange):
    """Admits one row less of every matrix than were chosen."""

    def admit(self, selection: RowSelection) -> RowSelection:
        counts = (selection.count_by_rank - 1).clamp(min=0)
        return RowSelection.unranked(selection.index, counts[0], counts)


def parameter(seed: int, *shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


def give_gradients(parameters: Sequence[Tensor], seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for each in parameters:
        each.grad = torch.randn(each.shape, generator=generator)


def as_json(report: Report) -> Report:
    """The report, which has survived JSON unchanged."""
    survivor: Report = json.loads(json.dumps(report, allow_nan=False))
    assert survivor == report
    return survivor


def test_rows_and_steps_since_the_last_report() -> None:
    """Quarters of 8, 8 and 10 rows are 2, 2 and 3; the bias is no matrix."""
    matrices = [parameter(1, 8, 6), parameter(2, 8, 6), parameter(3, 10, 4)]
    bias = parameter(4, 5)
    optimizer = NorDion2([{"params": matrices}, {"params": [bias], "algorithm": "adamw"}], fraction=0.25)
    assert as_json(optimizer.report())["steps"] == {"taken": 0, "skipped": 0}
    for step in range(3):
        give_gradients([*matrices, bias], step)
        optimizer.step()
    report = as_json(optimizer.report())
    assert report["rows"] == {
        "chosen": 21,
        "applied": 21,
        "nonfinite": 0,
        "deferred": 0,
        "waiting": 0,
        "oldest_waiting": 0,
    }
    assert [bucket["rows"]["chosen"] for bucket in report["buckets"]] == [12, 9]
    assert report["steps"] == {"taken": 3, "skipped": 0}
    assert report["transport"] is None
    assert report["bytes_per_step"] == 0
    again = as_json(optimizer.report())
    assert again["rows"] == {
        "chosen": 0,
        "applied": 0,
        "nonfinite": 0,
        "deferred": 0,
        "waiting": 0,
        "oldest_waiting": 0,
    }
    assert again["steps"] == {"taken": 0, "skipped": 0}
    optimizer.step()
    assert as_json(optimizer.report())["rows"]["applied"] == 7


def test_all_rows_and_absent_gradients() -> None:
    matrices = [parameter(1, 8, 6), parameter(2, 10, 4)]
    optimizer = Muon(matrices)
    give_gradients(matrices)
    matrices[1].grad = None
    optimizer.step()
    report = as_json(optimizer.report())
    assert report["rows"] == {
        "chosen": 8,
        "applied": 8,
        "nonfinite": 0,
        "deferred": 0,
        "waiting": 0,
        "oldest_waiting": 0,
    }
    assert [bucket["rows"]["applied"] for bucket in report["buckets"]] == [8, 0]


def test_rows_that_are_not_finite() -> None:
    matrix = parameter(1, 8, 6)
    optimizer = Dion2([matrix], fraction=0.5)
    give_gradients([matrix])
    assert matrix.grad is not None
    matrix.grad[2, 1], matrix.grad[5, 0], matrix.grad[5, 3] = torch.inf, torch.nan, torch.nan
    optimizer.step()
    report = as_json(optimizer.report())
    assert report["rows"] == {
        "chosen": 4,
        "applied": 4,
        "nonfinite": 2,
        "deferred": 0,
        "waiting": 0,
        "oldest_waiting": 0,
    }
    assert as_json(optimizer.report())["rows"]["nonfinite"] == 0


def test_skipped_steps() -> None:
    matrix = parameter(1, 8, 6)
    optimizer = Dion2([matrix], fraction=0.5, nonfinite="skip")
    for step in range(3):
        give_gradients([matrix])
        if step == 1:
            assert matrix.grad is not None
            matrix.grad[0, 0] = torch.nan
        optimizer.step()
    report = as_json(optimizer.report())
    assert report["steps"] == {"taken": 2, "skipped": 1}
    assert report["rows"]["applied"] == 8
    assert as_json(optimizer.report())["steps"] == {"taken": 0, "skipped": 0}


def test_deferred_rows() -> None:
    matrices = [parameter(1, 8, 6), parameter(2, 8, 6)]
    optimizer = Dion2(matrices, fraction=0.5)
    assert optimizer._plan is not None
    (bucket,) = optimizer._plan.buckets
    bucket.exchange = HesitantExchange(bucket.bucket)
    for step in range(2):
        give_gradients(matrices, step)
        optimizer.step()
    report = as_json(optimizer.report())
    assert report["rows"] == {
        "chosen": 16,
        "applied": 12,
        "nonfinite": 0,
        "deferred": 4,
        "waiting": 0,
        "oldest_waiting": 0,
    }
    assert report["buckets"][0]["exchange"] == "HesitantExchange"


def planned(transport: Transport, rank: int) -> Report:
    """The report of one of four ranks: three matrices of 8 x 6 in bf16 split by rows, two of 4 x 4 by columns."""
    group = MuteGroup(rank, 4, (8, 9, 10, 11))
    options = {
        "fraction": 0.5,
        "scope": None,
        "momentum_dtype": None,
        "wire_dtype": None,
        "orthogonalizer": "auto",
        "scale": None,
    }
    shapes = [((8, 6), Axis.ROWS, torch.bfloat16)] * 3 + [((4, 4), Axis.COLUMNS, torch.float32)] * 2
    layouts = [split_layout(group, axis, shape) for shape, axis, _ in shapes]
    members = [
        Member(torch.zeros(layout.local_shape(), dtype=dtype), f"weight {number}", options, number)
        for number, (layout, (*_, dtype)) in enumerate(zip(layouts, shapes, strict=True))
    ]
    parts = [Part(member, Views(member.name, ("",))) for member in members]
    choice = Choice("a transport", transport, "for a test")
    buckets, loads = make_buckets(parts, layouts, Dion2.rule, choice)
    plan = Plan(members, buckets, [], choice, loads, [options])
    with patch("dion_core.plan._warm_up"):  # nobody is there to be connected with
        plan.open()
    plan.buckets[0].chosen[1] += 7
    plan.buckets[0].applied[1] += 5
    with observe() as calls:
        report = as_json(make_report(plan, {}, 3, torch.tensor(1.0), [0, 0, 0]))
    assert calls == []
    return report


@pytest.mark.parametrize(
    ("transport", "forward"),
    [
        (FullShard(), [2 * 6 * 2, 2 * 6 * 2, 2 * 6 * 2, 0]),  # 2 rows of 6 bf16 of one matrix to each owner
        (LocalTopRows(), [6 * 2, 6 * 2, 6 * 2, 0]),
    ],
    ids=repr,
)
def test_the_plan_of_several_ranks(transport: Transport, forward: list[int]) -> None:
    """Costs 6 * 4^2 of 4 chosen rows, three times, then 4 * 2^2 twice: to the idle rank."""
    large, small = newton_schulz_cost(4, 6), newton_schulz_cost(2, 4)
    assert (large, small) == (96, 16)
    reports = [planned(transport, rank) for rank in range(4)]
    for rank, report in enumerate(reports):
        rows, columns = report["buckets"]
        assert report["transport"] == {"name": "a transport", "options": repr(transport), "reason": "for a test"}
        (load,) = report["owner_load"]
        assert (load["ranks"], load["cost"]) == ([8, 9, 10, 11], [large, large, large, 2 * small])
        assert load["imbalance"] == pytest.approx(1.2)  # 96 of a mean of (3 * 96 + 32) / 4 = 80
        assert (rows["owners"], columns["owners"]) == ([0, 1, 2], [3, 3])
        assert (rows["axis"], columns["axis"]) == ("rows", "columns")
        assert (rows["wire_dtype"], columns["wire_dtype"]) == ("bfloat16", "float32")
        assert (rows["shape"], rows["total_rows"]) == ([8, 6], 4)
        assert rows["parameters"] == ["weight 0", "weight 1", "weight 2"]
        assert rows["traffic"]["forward"] == forward
        assert rows["traffic"]["back"] == [forward[rank]] * 4
        assert columns["traffic"]["forward"] == [0, 0, 0, 2 * 2 * 1 * 4]  # 2 rows of 2 matrices, 1 column, fp32
        assert columns["traffic"]["back"] == ([2 * 2 * 1 * 4] * 4 if rank == 3 else [0] * 4)
        assert all(each["traffic"]["collectives"] == 2 for each in report["buckets"])
        assert report["host_reads_per_step"] == 0
        for each in report["buckets"]:
            assert each["traffic"]["bytes"] == sum(each["traffic"]["forward"]) + sum(each["traffic"]["back"])
        assert report["bytes_per_step"] == rows["traffic"]["bytes"] + columns["traffic"]["bytes"]
        assert report["rows"] == {
            "chosen": 7,
            "applied": 5,
            "nonfinite": 0,
            "deferred": 2,
            "waiting": 0,
            "oldest_waiting": 0,
        }
        assert report["steps"] == {"taken": 2, "skipped": 1}
    sent = sum(sum(each["traffic"]["forward"]) for report in reports for each in report["buckets"])
    assert sent == sum(sum(each["traffic"]["back"]) for report in reports for each in report["buckets"])
