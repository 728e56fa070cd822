"""Ranks compare their plans at construction: all raise alike, nothing hangs, and the ranks stay in step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dion_core import Dion2, Muon, NorDion2, NorMuon
from dion_core.testing.ranks import pool
from dion_core.transport import TransportError
from tests.training import local, place, whole_mesh

Groups = list[dict[str, Any]]


class Raised(NamedTuple):
    """The error of one rank."""

    kind: type[BaseException]
    message: str


def parameter(name: str, rows: int = 8, columns: int = 6, seed: int = 0, **options: Any) -> tuple[str, nn.Parameter]:
    """A named row-sharded parameter with a gradient."""
    generator = torch.Generator().manual_seed(seed)
    value, gradient = (torch.randn(rows, columns, generator=generator).to(**options) for _ in range(2))
    sharded = nn.Parameter(place(value, Shard(0), whole_mesh()))
    sharded.grad = place(gradient, Shard(0), whole_mesh())
    return name, sharded


def caught(make: Callable[[], object]) -> Raised:
    """The error that `make` raises; then the ranks show that they are in step, with a sound optimizer."""
    try:
        make()
    except Exception as error:
        raised = Raised(type(error), str(error))
    else:
        raised = Raised(type(None), "nothing was raised")
    NorDion2([parameter("sound")]).step()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()
    return raised


def last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def two_parameters(*, swapped: bool = False) -> Groups:
    names = ["second", "first"] if swapped else ["first", "second"]
    return [{"params": [parameter(name, 8 if name == "first" else 9) for name in names]}]


def with_vector(rows: int, dtype: torch.dtype = torch.float32) -> Groups:
    vector = nn.Parameter(place(torch.zeros(rows, dtype=dtype), Shard(0), whole_mesh()))
    return [*two_parameters(), {"params": [("vector", vector)], "algorithm": "adamw"}]


def frozen_second() -> Groups:
    groups = two_parameters()
    groups[0]["params"][1][1].requires_grad_(False)
    return groups


def column_sharded(name: str) -> tuple[str, nn.Parameter]:
    return name, nn.Parameter(place(torch.ones(8, 6), Shard(1), whole_mesh()))


def usual(kind: type[Any], **options: Any) -> Callable[[], object]:
    """Makes an optimizer of one parameter."""
    return lambda: kind([parameter("w")], **options)


# What the last rank does otherwise than the rest, and what the message shows of both.
DISAGREEMENTS: dict[str, tuple[Callable[[], object], Callable[[], object], tuple[str, str]]] = {
    "fraction": (usual(Dion2, fraction=0.25), usual(Dion2, fraction=0.5), ("0.25", "0.5")),
    "lr": (usual(Muon), usual(Muon, lr=0.03), ("lr=0.02", "lr=0.03")),
    "rows": (usual(Muon), lambda: Muon([parameter("w", 9)]), ("w: matrix (8, 6)", "w: matrix (9, 6)")),
    "columns": (usual(Muon), lambda: Muon([parameter("w", 8, 5)]), ("(8, 6)", "(8, 5)")),
    "dtype": (
        lambda: Muon([parameter("w", dtype=torch.bfloat16)]),
        lambda: Muon([parameter("w", dtype=torch.float16)]),
        ("torch.bfloat16", "torch.float16"),
    ),
    "wire": (usual(Muon), usual(Muon, wire_dtype=torch.bfloat16), ("wire_dtype=None", "wire_dtype=torch.bfloat16")),
    "transport": (
        usual(Dion2, transport="full"),
        usual(Dion2, transport="local"),
        ("FullShard()", "LocalTopRows(slack=None)"),
    ),
    "order": (lambda: NorDion2(two_parameters()), lambda: NorDion2(two_parameters(swapped=True)), ("first", "second")),
    "names": (lambda: Muon([parameter("one")]), lambda: Muon([parameter("other")]), ("one", "other")),
    "number": (lambda: Muon(two_parameters()), lambda: Muon([parameter("first")]), ("second: matrix", "transport")),
    "frozen": (lambda: Muon(two_parameters()), lambda: Muon(frozen_second()), ("second: matrix", "transport")),
    "axis": (usual(Muon), lambda: Muon([column_sharded("w")]), ("Shard(dim=0)", "Shard(dim=1)")),
    "optimizer": (usual(Muon), usual(NorMuon), ('"Muon,', '"NorMuon,')),
    "nonfinite": (usual(Muon), usual(Muon, nonfinite="skip"), ("nonfinite='rows'", "nonfinite='skip'")),
    "vector": (
        lambda: Muon(with_vector(5)),
        lambda: Muon(with_vector(6)),
        ("vector: adamw (5,)", "vector: adamw (6,)"),
    ),
    "vector dtype": (
        lambda: Muon(with_vector(5)),
        lambda: Muon(with_vector(5, torch.float64)),
        ("torch.float32", "torch.float64"),
    ),
}


def disagree() -> dict[str, Raised]:
    return {name: caught(odd if last() else most) for name, (most, odd, _) in DISAGREEMENTS.items()}


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_name_the_line_and_the_ranks_that_differ(world_size: int) -> None:
    by_rank = pool(world_size).run(disagree)
    most, odd = list(range(world_size - 1)), [world_size - 1]
    for name, (_, _, shown) in DISAGREEMENTS.items():
        kinds, messages = zip(*(of_rank[name] for of_rank in by_rank), strict=True)
        assert set(kinds) == {TransportError}, (name, messages)
        assert len(set(messages)) == 1
        assert "ranks disagree about the optimizer's plan, line " in messages[0], name
        usual_part, odd_part = messages[0].split(f"; ranks {odd} have ")
        assert f": ranks {most} have " in usual_part
        assert shown[0] in usual_part, messages[0]
        assert shown[1] in odd_part, messages[0]


def wrong_local_rows() -> nn.Parameter:
    return nn.Parameter(DTensor.from_local(torch.ones(7, 6), whole_mesh(), [Shard(0)], shape=(8, 6), stride=(6, 1)))


# What the last rank alone does wrong, its error, and a part of the message, which all ranks show.
FAULTS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "option": (lambda: Muon([parameter("w")], lr=-1.0), ValueError, "lr=-1.0 is not allowed"),
    "group option": (lambda: Dion2([{"params": [parameter("w")], "fraction": 2.0}]), ValueError, "fraction=2.0"),
    "vector": (lambda: Muon([("w", with_vector(5)[1]["params"][0][1])]), ValueError, "w: shape (5,) is not a matrix"),
    "meta": (lambda: Muon([parameter("w"), ("m", torch.ones(2, 2, device="meta"))]), ValueError, "m: a meta tensor"),
    "tied": (lambda: Muon([parameter("w")] * 2), ValueError, "tied"),
    "type": (lambda: Muon([parameter("w"), ("x", None)]), TypeError, "x is NoneType"),
    "one tensor": (lambda: Muon(parameter("w")[1]), TypeError, "params is a"),
    "transport": (lambda: Muon([parameter("w")], transport="nonsense"), TransportError, "transport='nonsense'"),
    "scope": (lambda: Muon([parameter("w")], transport="local"), ValueError, "transport='local' does not serve"),
    "layout": (lambda: Muon([("w", wrong_local_rows())]), ValueError, "w: rank "),
}


def one_rank_fails() -> dict[str, Raised]:
    return {name: caught(fault if last() else lambda: Muon([parameter("w")])) for name, (fault, _, _) in FAULTS.items()}


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_fault_of_one_rank_is_raised_by_all(world_size: int) -> None:
    *others, own = pool(world_size).run(one_rank_fails)
    for name, (_, kind, message) in FAULTS.items():
        assert own[name].kind is kind, own[name]
        assert message in own[name].message
        for of_rank in others:
            assert of_rank[name].kind is TransportError, of_rank[name]
            assert f"rank {world_size - 1}: {kind.__name__}: " in of_rank[name].message
            assert own[name].message in of_rank[name].message


def mixed_scopes() -> Groups:
    return [{"params": [parameter("w")], "scope": "global"}, {"params": [parameter("v")], "scope": "local"}]


@cache
def two_by_two(world: dist.ProcessGroup | None) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))


def on_the_mesh(*placements: Any) -> nn.Parameter:
    """Lies on all ranks as a 2 x 2 mesh."""
    return nn.Parameter(DTensor.from_local(torch.ones(4, 6), two_by_two(dist.group.WORLD), placements))


def on_part(axis: str) -> nn.Parameter:
    """Lies on half of the ranks."""
    return nn.Parameter(DTensor.from_local(torch.ones(4, 6), two_by_two(dist.group.WORLD)[axis], [Shard(0)]))


ALIKE: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "option": (lambda: Muon([parameter("w")], lr=-1.0), ("lr=-1.0 is not allowed",)),
    "scopes": (lambda: Dion2(mixed_scopes()), ("auto", "global, local")),
    "meshes": (
        lambda: Muon([("w", on_part("outer")), ("half", on_part("inner"))]),
        ("half lies on", "one of them must have all", "group= a mesh of all those ranks"),
    ),
    "partial": (
        lambda: Muon([("w", on_the_mesh(Partial(), Shard(0)))]),
        ("w: placements (Partial", "are not supported", "Shard of any dimension and Replicate()"),
    ),
    "strided": (
        lambda: Muon([("w", on_the_mesh(_StridedShard(0, split_factor=3), Shard(0)))]),
        ("w: placements (_StridedShard", "are not supported", "_StridedShard as fully_shard makes it"),
    ),
    "group": (
        lambda: Muon(
            [("w", on_part("outer")), ("plain", torch.ones(2, 2))], group=two_by_two(dist.group.WORLD)["inner"]
        ),
        ("group=", "lie on ranks", "one of them must have all"),
    ),
}


def all_fail() -> dict[str, Raised]:
    return {name: caught(fault) for name, (fault, _) in ALIKE.items()}


def test_a_fault_of_all_ranks_is_their_own() -> None:
    for of_rank in pool(4).run(all_fail):
        for name, (_, parts) in ALIKE.items():
            assert of_rank[name].kind is ValueError, of_rank[name]
            assert all(part in of_rank[name].message for part in parts), of_rank[name]


def weights(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    tensors = [each for group in optimizer.param_groups for each in group["params"]]
    states = [value for each in tensors for value in optimizer.state[each].values()]
    return [local(tensor) for tensor in (*tensors, *states)]


def vector_group() -> dict[str, Any]:
    vector = nn.Parameter(place(torch.ones(5), Shard(0), whole_mesh()))
    vector.grad = place(torch.arange(5.0), Shard(0), whole_mesh())
    return {"params": [("vector", vector)], "algorithm": "adamw", "lr": 0.1}


@contextmanager
def stays_as_it_was(optimizer: Any) -> Iterator[None]:
    """The block changes neither groups, state, plan nor counters."""
    groups = [dict(group) for group in optimizer.param_groups]
    states, tensors, report = list(optimizer.state), weights(optimizer), optimizer.report()
    yield
    assert [dict(group) for group in optimizer.param_groups] == groups
    assert list(optimizer.state) == states
    assert all(map(torch.equal, weights(optimizer), tensors))
    assert optimizer.report() == report


def grow(kind: type[Any]) -> None:
    """A group added later steps like one that was there; a failing one changes nothing."""
    together = kind([{"params": [parameter("a")]}, {"params": [parameter("b", 5, seed=1)]}, vector_group()])
    grown, twin = kind([parameter("a")]), kind([parameter("a")])
    grown.report()
    bad: list[dict[str, Any]] = [
        {"params": [parameter("b", 5)], "lr": -1.0},
        {"params": [parameter("b", 5)], "lr": -1.0 if last() else 0.02},
        {"params": [parameter("b", 5 + last())]},
        {"params": [parameter("b", 5)], "weight_decay": 0.1 * last()},
        {"params": [("a", grown.param_groups[0]["params"][0])] if last() else [parameter("b", 5)]},
    ]
    for number, group in enumerate(bad):
        with stays_as_it_was(grown):
            raised = caught(lambda group=group: grown.add_param_group(group))
        own = ValueError if number == 0 or (number in (1, 4) and last()) else TransportError
        assert raised.kind is own, (number, raised)
    grown.step()
    twin.step()
    assert all(map(torch.equal, weights(grown), weights(twin)))

    grown = kind([parameter("a")])
    grown.add_param_group({"params": [parameter("b", 5, seed=1)]})
    grown.add_param_group(vector_group())
    for optimizer in (together, grown):
        optimizer.step()
        optimizer.step()
    assert all(map(torch.equal, weights(together), weights(grown)))
    assert grown.report()["buckets"] == together.report()["buckets"]


@pytest.mark.parametrize("kind", [Muon, NorMuon, Dion2, NorDion2])
def test_add_param_group(kind: type[Any]) -> None:
    pool(2).run(grow, kind)


def load_wrongly() -> Raised:
    optimizer, other = NorDion2([parameter("a")]), NorDion2([parameter("a", 6)])
    optimizer.step()
    tensors = weights(optimizer)
    state = other.state_dict() if last() else optimizer.state_dict()
    raised = caught(lambda: optimizer.load_state_dict(state))
    assert all(map(torch.equal, weights(optimizer), tensors))
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    return raised


def test_a_state_that_does_not_fit_on_one_rank_is_refused_by_all() -> None:
    other, own = pool(2).run(load_wrongly)
    assert own.kind is ValueError
    assert "(6, 6)" in own.message
    assert other.kind is TransportError
    assert f"rank 1: ValueError: {own.message}" in other.message


def toggle() -> None:
    """A parameter frozen at construction and freed later steps like a new one on every rank."""
    groups = frozen_second()
    (_, first), (_, second) = groups[0]["params"]
    second.grad = place(torch.eye(9, 6), Shard(0), whole_mesh())
    optimizer = NorDion2(groups)
    before = local(second)
    optimizer.step()
    assert torch.equal(local(second), before)
    assert not optimizer.state.get(second)
    second.requires_grad_(True)
    first.grad = None
    optimizer.step()
    fresh = nn.Parameter(place(torch.zeros(9, 6), Shard(0), whole_mesh()))
    with torch.no_grad():
        fresh.to_local().copy_(before)
    fresh.grad = second.grad
    NorDion2([fresh]).step()
    assert torch.equal(local(second), local(fresh))
    assert not torch.equal(local(second), before)


def test_requires_grad_may_change_on_all_ranks() -> None:
    pool(2).run(toggle)
