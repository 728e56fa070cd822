"""One truth about traffic: what is planned is what is sent, and the host reads what it is said to read.

Every transport, layout and number of ranks: bytes to every peer, collectives and their order, reads on the host.
"""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dion_comm_capped import Capped
from dion_comm_nccl import LocalTopRows
from dion_core import Dion2, available_transports
from dion_core.collectives import Call, observe
from dion_core.testing.ranks import pool
from dion_core.transport import Transport
from tests.training import Cell, build, random_problem, set_gradients, whole_mesh

INSTANCES: dict[str, Transport] = {
    "capped, packed": Capped(always_pack=True),
    "capped, packed, 1.0": Capped(capacity=1.0, always_pack=True),
    "capped, packed, 1.0, varlen": Capped(capacity=1.0, on_overflow="varlen", always_pack=True),
    "local, slack 2": LocalTopRows(slack=2.0),
}
TRANSPORTS = (*available_transports(), *INSTANCES)
LAYOUTS = ("shard0", "shard1", "replicate", "ddp")
NUM_STEPS = 3

# Three shapes in several, of which no number of ranks divides all; two rows are fewer than three or four ranks.
PROBLEM = random_problem([(17, 12)] * 2 + [(9, 8)] * 5 + [(40, 6)] * 3 + [(2, 5)], adamw=[(7,)], num_steps=NUM_STEPS)

READING = {"_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "_unique2", "unique_dim"}
"""Operators that need a value of the device on the host."""


class Operators(TorchDispatchMode):
    """Notes which operators run that need a value on the host.

    `bool`, `int`, `float`, `item`, an index and a tensor given where a number is wanted all come down to the
    operators of `READING`; a mask given as an index, to `nonzero`.
    """

    def __init__(self, reads: list[str]) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        masks = name in ("index", "index_put", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        if name in READING or masks:
            self.reads.append(place())
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Notes calls that move values between device and host, which on a CPU run no operator."""

    def __init__(self, reads: list[str], copies: list[str]) -> None:
        super().__init__()
        self.reads, self.copies = reads, copies

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("tolist", "numpy", "cpu"):
            self.reads.append(place())
        indices = args[1] if name in ("__getitem__", "__setitem__") else ()
        lists = any(isinstance(index, list) for index in (indices if isinstance(indices, tuple) else (indices,)))
        if lists or name in ("tensor", "as_tensor", "new_tensor", "from_numpy"):
            self.copies.append(place())
        return func(*args, **(kwargs or {}))


def place() -> str:
    """The innermost line of the package on the stack."""
    frames = [frame for frame in traceback.extract_stack() if "dion_co" in frame.filename]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "outside the package"


@contextmanager
def host_waits() -> Iterator[tuple[list[str], list[str]]]:
    """Collects where the block reads values on the host, and where it makes tensors of Python's numbers.

    On a GPU both wait for the device.
    """
    reads: list[str] = []
    copies: list[str] = []
    with Operators(reads), Functions(reads, copies):
        yield reads, copies
    for places in (reads, copies):  # learned budgets are computed on the host, from counts that have been read
        places[:] = [each for each in places if not each.startswith("budgets.py:")]


class Step(NamedTuple):
    """What one step did on one rank, and what its report says afterwards."""

    calls: list[Call]
    reads: list[str]
    copies: list[str]
    report: dict[str, Any]


def cells_of(name: str, layout: str) -> list[Cell]:
    """Every scope of the transport: NorMuon for all rows, Dion2 and NorDion2 for a choice.

    Where nothing is split the transport has no rows to move: one of the two there, the other with the next transport.
    """
    transport: Any = INSTANCES.get(name, name)
    scopes = sorted((INSTANCES.get(name) or available_transports()[name]).scopes)
    choosing = ("Dion2", "NorDion2")
    if layout not in ("shard0", "shard1"):
        turn = (TRANSPORTS.index(name) + LAYOUTS.index(layout)) % len(choosing)
        choosing = choosing[turn : turn + 1]
    cells = []
    for scope in scopes:
        for optimizer in ("NorMuon",) if scope == "all" else choosing:
            options = {"transport": transport} | ({} if scope == "all" else {"scope": scope})
            cells.append(Cell(PROBLEM, optimizer, layout, options))
    return cells


def measure(cells: Sequence[Cell]) -> list[list[Step]]:
    """By cell and step."""
    mesh, measured = whole_mesh(), []
    for cell in cells:
        optimizer, parameters = build(cell, mesh)
        steps = []
        for gradients in PROBLEM.gradients:
            set_gradients(parameters, gradients, cell, mesh)
            with observe() as calls, host_waits() as (reads, copies):
                optimizer.step()
            steps.append(Step(calls, reads, copies, optimizer.report()))
        measured.append(steps)
    return measured


def sent(calls: Sequence[Call]) -> list[tuple[int, ...]]:
    return [call.sent for call in calls]


def assert_planned(step: Step, world_size: int) -> None:
    """Every bucket sent what its report plans, and nothing else was sent but small sums of known purposes."""
    labels = {"presence flags", "row scores", "rows that are not finite"}
    for bucket in step.report["buckets"]:
        calls = [call for call in step.calls if call.label == bucket["name"]]
        planned = [tuple(bucket["traffic"][way]) for way in ("forward", "back")]
        assert sent(calls) == [way for way in planned if way], bucket["name"]
        assert len(calls) == bucket["traffic"]["collectives"]
        assert all(call.size == world_size for call in calls)
        assert bucket["traffic"]["bytes"] == sum(map(sum, sent(calls)))
        labels |= {bucket["name"], f"row statistics of {bucket['name']}"}
    assert {call.label for call in step.calls} <= labels
    moved = [call for call in step.calls if call.label.startswith("bucket")]
    assert step.report["bytes_per_step"] == sum(map(sum, sent(moved)))


def assert_read(name: str, layout: str, number: int, step: Step) -> None:
    """The reads are those that the report states, and the one of a learned budget in its first step.

    Where nothing is read, nothing is copied to the device either once the tables are there.
    """
    stated = int(layout == "shard0" and name in ("varlen", "uniform", "capped, packed, 1.0, varlen"))
    assert step.report["host_reads_per_step"] == stated
    learns = name in ("capped", "capped, packed") and layout == "shard0" and number == 0
    assert len(step.reads) == stated + learns, step.reads
    file = "capped.py" if name.startswith("capped") else "varlen.py"
    assert all(read.startswith(f"{file}:") for read in step.reads), step.reads
    if stated + learns == 0 and number > 0:
        assert step.copies == []


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("name", TRANSPORTS)
def test_planned_is_measured(name: str, world_size: int) -> None:
    for layout in LAYOUTS:
        cells = cells_of(name, layout)
        by_rank = pool(world_size).run(measure, cells)
        for cell, of_cell in zip(cells, zip(*by_rank, strict=True), strict=True):
            for number, steps in enumerate(zip(*of_cell, strict=True)):
                orders = {tuple((call.name, call.size, call.label) for call in step.calls) for step in steps}
                assert len(orders) == 1, (cell.optimizer, layout, orders)
                for step in steps:
                    assert_planned(step, world_size)
                    assert_read(name, layout, number, step)
                to_others = [
                    sum(call.sent) - call.sent[rank]
                    for rank, step in enumerate(steps)
                    for call in step.calls
                    if call.label.startswith("bucket")
                ]
                assert any(to_others), (cell.optimizer, layout, "nothing was sent")


def forward_by_step(transport: Transport | str) -> list[list[tuple[int, ...]]]:
    """By step, what rank 0 of 3 sends forward for each bucket."""
    cell = Cell(PROBLEM, "Dion2", "shard0", {"transport": transport})
    [steps], *_ = pool(3).run(measure, [cell])
    return [[tuple(bucket["traffic"]["forward"]) for bucket in step.report["buckets"]] for step in steps]


def test_the_comparison_is_not_vacuous() -> None:
    """Sizes of a step are those of the step, equal ones are equal, and fixed ones are fixed and the largest."""
    varlen, uniform, full = (forward_by_step(name) for name in ("varlen", "uniform", "full"))
    assert len({tuple(map(tuple, step)) for step in varlen}) == NUM_STEPS
    assert len({tuple(map(tuple, step)) for step in uniform}) > 1
    assert all(len(set(bucket)) == 1 for step in uniform for bucket in step)
    assert full[0] == full[1] == full[2]
    assert all(sum(map(sum, step)) < sum(map(sum, full[0])) for step in varlen)


def test_waits_are_noticed() -> None:
    """The negative control: every way to read a value, or to copy one to the device, is counted once."""
    value = torch.tensor([3])
    reading: list[Callable[[], object]] = [
        lambda: bool(value),
        lambda: int(value),
        lambda: float(value),
        lambda: value.item(),
        lambda: value.tolist(),
        lambda: value.nonzero(),
        lambda: value.numpy(),
        lambda: value.cpu(),
        lambda: [0, 1, 2, 3][value],
        lambda: value[value > 2],
        lambda: torch.equal(value, value),
        lambda: torch.add(value, value, alpha=value[0]),
    ]
    copying: list[Callable[[], object]] = [
        lambda: torch.tensor(3),
        lambda: value.new_tensor(3),
        lambda: value[[0]],
        lambda: value[None][:, [0]],
    ]
    for wanted, calls in enumerate((copying, reading)):
        for call in calls:
            with host_waits() as (reads, copies):
                call()
            assert (len(reads), len(copies)) == (wanted, 1 - wanted), (call, reads, copies)
    with host_waits() as waits:
        torch.where(value > 2, value, 0).argsort().index_select(0, torch.zeros(1, dtype=torch.int64))[:, None]
    assert waits == ([], [])


def test_a_step_on_one_process_waits_for_nothing() -> None:
    parameters = [torch.nn.Parameter(weight.clone()) for weight in PROBLEM.weights.values() if weight.ndim == 2]
    optimizer = Dion2(parameters)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        with host_waits() as waits:
            optimizer.step()
    assert waits == ([], [])
