"""Predicted times by hand, bytes by link, and the figures of the public review threads."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dion_core.prediction.blocks import block_answers
from dion_core.prediction.comparison import ALIKE, Answer, compare, recommend
from dion_core.prediction.machine import H200, Machine, load, rate_at, save
from dion_core.prediction.meshes import MeshShape
from dion_core.prediction.models import ModelError, groups_of
from dion_core.prediction.scaling import amdahl, grown
from dion_core.prediction.timing import BucketWork, Times, message_seconds, newton_schulz_flops, predict
from dion_core.prediction.traffic import Question, Sent, plans

SLOW = Machine(
    name="one byte, and one FLOP, a second",
    copy=1.0,
    newton_schulz=((1.0, 1.0),),
    in_node=((1.0, 1.0),),
    between=((1.0, 0.5),),
    latency=3.0,
    host_read=100.0,
)
WORK = BucketWork(
    forward=Sent(itself=4, in_node=10),
    back=Sent(itself=4, in_node=10),
    flops=50.0,
    shorter_side=4,
    elements=8,
    chosen=2.0,
    parameter_bytes=2,
    momentum_bytes=2,
    wire_bytes=2,
)


def inventory(name: str, mesh: MeshShape, **options: object) -> Question:
    return Question(groups_of(name, torch.bfloat16), mesh, options={"fraction": 0.25, **options})


def test_the_stages_of_one_bucket_by_hand() -> None:
    """8 elements at 6 bytes, 2 taken at 6; 3 s and 10 bytes there and back; 50 FLOPs; 8 * 4 and 2 * 2 bytes."""
    times = predict([WORK], SLOW, elementwise_bytes=7.0, host_reads=1)
    assert times.stages == {
        "accumulate": 48.0,
        "select": 0.0,
        "take": 12.0,
        "exchange": 26.0,
        "newton_schulz": 50.0,
        "normalize": 0.0,
        "update": 36.0,
        "elementwise": 7.0,
    }
    assert times.step == 48 + 100 + 7 + 12 + 13 + 50 + 13 + 36
    assert times.exposed == 100 + 26


def test_messages_of_one_bucket_are_under_way_while_another_is_worked_on() -> None:
    """take, take, wait, Newton-Schulz, Newton-Schulz, update, update.

    The second take hides 12 of the 13 s of the first message, the first Newton-Schulz all of the second, the second
    Newton-Schulz the first message back, and the first update the last one.
    """
    times = predict([WORK, WORK], SLOW, elementwise_bytes=0.0, host_reads=0)
    assert times.stages["exchange"] == 52.0
    assert times.exposed == pytest.approx(13 - 12)
    assert times.step == 2 * (48 + 12 + 50 + 36) + 1


def test_scores_are_waited_for_and_their_bytes_count() -> None:
    times = predict([replace(WORK, score_bytes=20, row_bytes=6.0)], SLOW, elementwise_bytes=0.0, host_reads=0)
    assert times.stages["select"] == 3 + 20
    assert times.stages["normalize"] == 2 * 2 + 3 + 6
    assert times.exposed == 23 + 26 + 9


@pytest.mark.parametrize(
    ("sent", "seconds"),
    [
        (Sent(), 0.0),
        (Sent(itself=8), 3 + 8 / 0.5),  # a copy reads and writes
        (Sent(itself=8, in_node=30, between=20), 3 + 20 / 0.5),
        (Sent(in_node=50, between=20), 3 + 50),
    ],
)
def test_links_work_side_by_side(sent: Sent, seconds: float) -> None:
    assert message_seconds(sent, SLOW) == seconds


def test_one_rate_for_all_counts_the_bytes_to_itself() -> None:
    machine = SLOW.with_links(in_node=None, between=None, every=2.0)
    assert message_seconds(Sent(4, 10, 6), machine) == 3 + 20 / 2
    changed = SLOW.with_links(in_node=5.0, between=None, every=None)
    assert message_seconds(Sent(in_node=10), changed) == 3 + 2


def test_rates_between_the_sizes_measured() -> None:
    points = ((1e6, 10.0), (16e6, 40.0))
    assert [rate_at(points, size) for size in (1.0, 1e6, 16e6, 1e9)] == [10.0, 10.0, 40.0, 40.0]
    assert rate_at(points, 4e6) == pytest.approx(20.0)


def test_flops_of_newton_schulz_by_hand() -> None:
    """2 x 2: three Gram matrices and nine products of 8, three of 16. 2 x 8: two of 32, twelve of 8, two of 64."""
    assert newton_schulz_flops(2, 2) == (3 + 9) * 8 + 3 * 16
    assert newton_schulz_flops(8, 2) == newton_schulz_flops(2, 8) == 2 * 32 + 12 * 8 + 2 * 64


def test_bytes_by_link_by_hand() -> None:
    """Four ranks on two nodes, one 8 x 4 matrix, all rows taken: 2 rows of 8 bytes each, all of them to owner 0.

    Rank 0 has 16 bytes for itself and gives back 16 to every rank; rank 3 sends 16 to rank 0 on the other node.
    """
    groups = [{"params": [("w", nn.Parameter(torch.empty(8, 4, dtype=torch.bfloat16, device="meta")))]}]
    ranks = plans(Question(groups, MeshShape(2, 2, shard=4), "muon"), "full")
    assert [each.sent for each in ranks] == [
        Sent(itself=32, in_node=16, between=32),
        Sent(in_node=16),
        Sent(between=16),
        Sent(between=16),
    ]


def test_typical_bytes_of_exact_transports() -> None:
    """A quarter of 16 rows over two ranks is 2 a rank, 16 bytes each way; before a step any rank may have all 4."""
    groups = [{"params": [("w", nn.Parameter(torch.empty(16, 4, dtype=torch.bfloat16, device="meta")))]}]
    question = Question(groups, MeshShape(1, 2, shard=2), options={"fraction": 0.25})
    owner, other = plans(question, "varlen")
    assert (owner.sent.total, other.sent.total) == (2 * 8 + 4 * 8, 2 * 8)
    assert (owner.at_start["bytes_per_step"], other.at_start["bytes_per_step"]) == (4 * 8 + 8 * 8, 4 * 8)


@pytest.mark.parametrize(("world_size", "full", "local"), [(4, 2543, 636), (8, 1271, 318), (16, 636, 159)])
def test_mean_bytes_of_5120x8(world_size: int, full: int, local: int) -> None:
    question = inventory("5120x8", MeshShape(world_size // 4, 4, shard=world_size))
    found = compare(question, H200, transports={"full": "full", "local": "local"})
    means = [each.mean_bytes for each in found.answers]
    assert [round(mean / 1e6) for mean in means if mean is not None] == [full, local]


REVIEW = {
    # W: GB/s a rank; exchange in ms of full and of capped; whole optimizer step in ms of both
    4: (276e9, (9.5, 2.9), (35.5, 28.1)),
    8: (25.2e9, (54.1, 14.3), (60.2, 22.5)),
    16: (12.5e9, (58.7, 16.2), (60.2, 18.8)),
}


def test_node_scaling_of_the_review() -> None:
    """Payloads exactly, exchange within 15 %; full stays where it is from 2 nodes to 4, capped shrinks."""
    steps, payloads = {}, {}
    for world_size, (link, exchange, _) in REVIEW.items():
        question = inventory("5120x8", MeshShape(world_size // 4, 4, shard=world_size))
        machine = H200.with_links(in_node=None, between=None, every=link)
        answers = {each.transport: each for each in block_answers(question, machine)}
        payloads[world_size] = [round(each.sent.total / 1e6) for each in answers.values()]
        for name, milliseconds in zip(("full", "capped"), exchange, strict=True):
            times = answers[name].times
            assert times is not None
            assert 1e3 * times.stages["exchange"] == pytest.approx(milliseconds, rel=0.15)
            steps[world_size, name] = 1e3 * times.step
    assert payloads == {4: [2621, 655, 673], 8: [1363, 341, 361], 16: [734, 184, 205]}
    measured_full, measured_capped = ([REVIEW[size][2][n] for size in (8, 16)] for n in range(2))
    assert measured_full[0] == measured_full[1]
    assert steps[16, "full"] == pytest.approx(steps[8, "full"], rel=0.1)
    assert [steps[size, "full"] for size in (8, 16)] == pytest.approx(measured_full, rel=0.15)
    assert [steps[size, "capped"] for size in (8, 16)] == pytest.approx(measured_capped, rel=0.15)
    assert steps[16, "capped"] < 0.9 * steps[8, "capped"]
    assert steps[4, "full"] - steps[4, "capped"] < steps[8, "full"] - steps[8, "capped"]


def test_two_classes_of_work() -> None:
    """The review's table: all but one class follow the fraction, all follow W, and a message to one peer both."""
    table = amdahl(inventory("5120x8", MeshShape(1, 2, shard=2)), H200, "local")
    assert set(table.values) == {(2, 0.25), (2, 0.5), (4, 0.25), (4, 0.5)}
    for name, measured in {"newton_schulz": 0.50, "chosen_rows": 0.54, "all_rows": 0.50, "bytes_sent": 0.51}.items():
        assert table.by_world[name] == pytest.approx(measured, rel=0.1), name
    for name, measured in {"newton_schulz": 1.64, "chosen_rows": 1.86, "all_rows": 1.00, "bytes_sent": 2.00}.items():
        assert table.by_fraction[name] == pytest.approx(measured, rel=0.1), name
    assert table.by_fraction["bytes_sent"] == 2.0
    assert table.by_fraction["all_rows"] == 1.0
    assert table.by_world["bytes_to_a_peer"] == pytest.approx(0.26, rel=0.05)


def test_predictions_of_an_h200_are_near_what_was_measured() -> None:
    """Stages of docs/performance.md in ms: one rank of W."""
    for name, world_size, measured in (
        ("5120x8", 4, {"accumulate": 0.88, "take": 0.25, "newton_schulz": 15.8, "update": 0.70}),
        ("14b", 8, {"accumulate": 2.64, "take": 0.75, "newton_schulz": 31.6, "update": 2.08}),
    ):
        question = inventory(name, MeshShape(1, world_size, shard=world_size))
        times = compare(question, H200, transports={"local": "local"}).answers[0].times
        assert times is not None
        for stage, milliseconds in measured.items():
            assert 1e3 * times.stages[stage] == pytest.approx(milliseconds, rel=0.12), (name, stage)


def test_workspace_is_near_what_was_measured() -> None:
    """918 and 1321 MiB above the steady state (docs/performance.md)."""
    for name, world_size, measured in (("5120x8", 4, 918), ("14b", 8, 1321)):
        question = inventory(name, MeshShape(1, world_size, shard=world_size))
        found = compare(question, H200, transports={"local": "local"}).answers[0]
        assert found.workspace / 2**20 == pytest.approx(measured, rel=0.15)


def answer_in(name: str, seconds: float, **fields: object) -> Answer:
    return Answer(name, times=Times({}, seconds, 0.0), **fields)  # type: ignore[arg-type]


def test_the_fastest_exact_transport_is_recommended() -> None:
    local = answer_in("local", 1.0, exact=False)
    full, capped = answer_in("full", 3.0), answer_in("capped", 2.0, may_defer=True)
    name, reason = recommend([local, full, capped])
    assert name == "capped"
    assert "exact while nothing is deferred" in reason
    assert "local would save 1000.00 ms" in reason
    assert recommend([local])[0] == "local"
    assert recommend([Answer("x", refused="no")])[0] is None


def test_what_is_alike_is_decided_by_host_reads_and_deferral() -> None:
    varlen = answer_in("varlen", 2.0, host_reads=1)
    capped = answer_in("capped", 2.0 + ALIKE, may_defer=True)
    full = answer_in("full", 2.0 + ALIKE)
    assert recommend([varlen, capped])[0] == "capped"
    assert recommend([capped, full])[0] == "full"


def test_a_mesh_grows_by_nodes() -> None:
    assert grown(MeshShape(1, 2, shard=2), 4) == MeshShape(1, 4, shard=4)
    assert grown(MeshShape(1, 4, shard=4), 32) == MeshShape(4, 8, shard=32)
    assert grown(MeshShape(2, 4, shard=8), 16) == MeshShape(4, 4, shard=16)
    assert grown(MeshShape(2, 4, replicate=2, shard=4), 16) == MeshShape(4, 4, replicate=2, shard=8)


def test_rows_over_fewer_ranks_than_there_are() -> None:
    """Owners are numbered among all ranks that share the work, copies of shards too."""
    asked = inventory("5120x8", MeshShape(2, 4, replicate=2, shard=4))
    found = compare(asked, H200, transports={"full": "full"}).answers[0]
    square, tall = (newton_schulz_flops(rows // 4, 5120) for rows in (5120, 20480))
    assert (33 * square + 16 * tall) / 8 <= found.flops < (33 * square + 16 * tall) / 4


def test_profiles_are_kept_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    save(SLOW, path)
    assert load(path) == SLOW
    content = json.loads(path.read_text())
    for changes in ({"format": 0}, {"in_node": []}, {"copy": 0}, {"between": [[2, 1], [1, 1]]}, {"color": "red"}):
        path.write_text(json.dumps({**content, **changes}))
        with pytest.raises(ValueError, match="machine profile"):
            load(path)


def test_models_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "builders_of_test.py").write_text("def three():\n    return 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for source, message in {
        "6144x8": "is no model: give an inventory",
        "builders_of_test:three": "made int",
        "builders_of_test:four": "has no attribute 'four'",
        "no_such_module_here:f": "ModuleNotFoundError",
    }.items():
        with pytest.raises(ModelError, match=message):
            groups_of(source, torch.float32)


def calls_of(transport: str, world_size: int) -> int:
    """Calls, of Python and of builtins, that plan a step: they are alike in every run, as no clock is."""
    question = inventory("5120x8", MeshShape.of(world_size // 8, 8))
    calls, before = 0, sys.getprofile()

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        plans(question, transport)
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize("transport", ["capped", "full", "uniform"])
def test_planning_takes_no_more_work_for_a_rank_of_many(transport: str) -> None:
    """Pairs of ranks grow with the square: nothing may go over all of them."""
    calls_of(transport, 64)  # what is computed once a process
    assert calls_of(transport, 1024) < 4 * calls_of(transport, 256)
