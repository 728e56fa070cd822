"""Ranks that have matrices of their own: on a part of the mesh, or other experts of a stack. What they do not have in
common must not reach what they have in common, and what should be in common and is not is told by all ranks.
"""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from dion_comm_capped import Capped
from dion_core import Dion2, NorMuon, TransportError
from dion_core.testing.ranks import pool
from tests.mesh_cases import Mesh, placed

pytestmark = pytest.mark.usefixtures("fresh_ranks")

SQUARE, TURNED = Mesh((2, 2), ("0", "0")), Mesh((2, 2), ("0", "0"), ranks=(3, 1, 0, 2))


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def on(mesh: DeviceMesh, value: Tensor, *placements: Any) -> nn.Parameter:
    return nn.Parameter(placed(value, mesh, placements or [Shard(0)] * mesh.ndim))


def jumping(step: int, part: int) -> Tensor:
    """A gradient whose largest rows lie in one half, in every part in another one and for another time."""
    rows = torch.ones(64, 1)
    rows[32 * ((step // (3 + 2 * part)) % 2) :][:32] = 10.0
    return drawn(100 * step + part, 64, 6) * rows


def crossing_parts(steps: int) -> tuple[list[int], list[Tensor]]:
    """All matrices lie on parts, which cross; a vector alone lies on the whole mesh."""
    mesh = SQUARE.make()
    weights = {axis: on(mesh[axis], jumping(0, number)) for number, axis in enumerate("ab")}
    vector = on(mesh, torch.ones(8), Shard(0), Replicate())
    groups = [{"params": list(weights.items())}, {"params": [("v", vector)], "algorithm": "adamw", "lr": 1e-3}]
    optimizer = Dion2(groups, transport=Capped(on_overflow="varlen", always_pack=True))
    places = [mesh["b"].get_local_rank(), 2 + mesh["a"].get_local_rank()]
    for step in range(steps):
        for weight, place in zip(weights.values(), places, strict=True):
            weight.grad = placed(jumping(step, place), weight.device_mesh, [Shard(0)])
        optimizer.step()
    return places, [weight.full_tensor().detach() for weight in weights.values()]  # type: ignore[attr-defined]


def test_parts_that_cross_beside_a_vector_on_the_whole_mesh() -> None:
    """What a transport learns of one part must not set the sizes of messages in another one."""
    steps = 20
    for places, found in pool(4).run(crossing_parts, steps):
        alone = [nn.Parameter(jumping(0, number)) for number in range(2)]
        optimizer = Dion2(alone)
        for step in range(steps):
            for weight, place in zip(alone, places, strict=True):
                weight.grad = jumping(step, place)
            optimizer.step()
        assert all(torch.equal(one, other.detach()) for one, other in zip(found, alone, strict=True))


def one_rank_parts() -> list[Tensor]:
    """A matrix on a part of one rank, whose load other ranks do not know, and matrices of which two share the work."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
    values = [drawn(0, 8, 6), drawn(1, 30, 26), drawn(2, 9, 6), drawn(3, 9, 6)]
    whole = on(mesh, values[0], Shard(0), Shard(0), Replicate())
    weights = [whole, on(mesh["c"], values[1]), *(on(mesh["a"], value) for value in values[2:])]
    optimizer = NorMuon([(f"w{number}", weight) for number, weight in enumerate(weights)])
    for weight in weights:
        weight.grad = weight.detach().clone()
    optimizer.step()
    assert optimizer.check_replicas() == []
    return [weight.full_tensor().detach() for weight in weights]  # type: ignore[attr-defined]


def test_a_matrix_on_a_part_of_one_rank() -> None:
    alone = [nn.Parameter(value) for value in (drawn(0, 8, 6), drawn(1, 30, 26), drawn(2, 9, 6), drawn(3, 9, 6))]
    for weight in alone:
        weight.grad = weight.detach().clone()
    NorMuon(alone).step()
    for found in pool(4).run(one_rank_parts):
        assert all(torch.equal(one, other.detach()) for one, other in zip(found, alone, strict=True))


def resumed_from(writer: int) -> bool:
    """Whether a run that goes on with what that rank's transport had learned is the unbroken one on this rank.

    Of the experts ranks 2 and 3 have none. Whole state dicts, and `torch.distributed.checkpoint`, give all ranks what
    one of them wrote.
    """
    mesh = SQUARE.make()

    def build() -> tuple[list[nn.Parameter], Any]:
        weights = [on(mesh, jumping(0, 1)), on(mesh, drawn(1, 1, 16, 6), Shard(0), Shard(1))]
        named = [("dense", weights[0]), ("experts", weights[1])]
        return weights, Dion2(named, transport=Capped(on_overflow="varlen", always_pack=True))

    def step(weights: list[nn.Parameter], optimizer: Any, number: int) -> None:
        for weight, gradient in zip(weights, (jumping(number, 1), drawn(number, 1, 16, 6)), strict=True):
            weight.grad = placed(gradient, mesh, weight.placements)  # type: ignore[attr-defined]
        optimizer.step()

    weights, optimizer = build()
    for number in range(12):
        step(weights, optimizer, number)
    state, written = optimizer.state_dict(), [[group["carried"] for group in optimizer.state_dict()["param_groups"]]]
    assert written[0] != [""]
    dist.broadcast_object_list(written, src=writer)
    for group, carried in zip(state["param_groups"], written[0], strict=True):
        group["carried"] = carried
    resumed, its_optimizer = build()
    with torch.no_grad():
        for weight, other in zip(weights, resumed, strict=True):
            other.copy_(weight)
    its_optimizer.load_state_dict(state)
    for number in range(12, 16):
        step(weights, optimizer, number)
        step(resumed, its_optimizer, number)
    both = [[weight.full_tensor() for weight in each] for each in (weights, resumed)]  # type: ignore[attr-defined]
    return all(torch.equal(one, other) for one, other in zip(*both, strict=True))


@pytest.mark.parametrize("writer", [0, 2])
def test_what_one_rank_wrote_of_its_transport_suits_all(writer: int) -> None:
    assert pool(4).run(resumed_from, writer) == [True] * 4


def other_meshes(way: str) -> None:
    """Builds an optimizer on meshes that are not the same on rank 1."""
    mesh, turned, odd = SQUARE.make(), TURNED.make(), dist.get_rank() == 1
    whole = on(turned if way == "order" and odd else mesh, torch.ones(8, 6))
    part = on(mesh["b" if way == "part" and odd else "a"], torch.ones(8, 6))
    plain, group = nn.Parameter(torch.ones(8, 6)), mesh["a" if way == "group" and odd else "b"]
    NorMuon([("whole", whole), ("part", part), ("plain", plain)], group=group)


OTHER_MESHES = {
    "order": ("ranks [1] have 'whole: matrix", "with ranks [[3, 1], [0, 2]]'"),
    "part": ("what lies on ranks [0, 1] alone", "ranks [1] have '1 x 8x6 rows over 2 ranks"),
    "group": ("what lies on ranks [0, 1] alone", "ranks [1] have '(nothing)'"),
}


@pytest.mark.parametrize("way", OTHER_MESHES)
def test_other_meshes_on_one_rank_are_told_by_all(way: str) -> None:
    messages = [str(error) for error in pool(4).run_expecting_error(other_meshes, way)]
    assert len(set(messages)) == 1
    assert messages[0].startswith("ranks disagree about the optimizer's plan")
    assert all(told in messages[0] for told in OTHER_MESHES[way]), messages[0]


def whole_state() -> list[bool]:
    """Whether the whole state is that of the pieces, on a mesh that has its ranks in another order and on its parts."""
    mesh = TURNED.make()
    ways: list[tuple[DeviceMesh, list[Any]]] = [
        (mesh, [Shard(0), Shard(0)]),
        (mesh, [_StridedShard(0, split_factor=2), Shard(0)]),
        (mesh, [Shard(1), Shard(0)]),
        (mesh, [Replicate(), Shard(1)]),
        (mesh["a"], [Shard(0)]),
        (mesh["b"], [Shard(1)]),
    ]
    values = [drawn(number, 7, 6) for number in range(len(ways))]
    weights = [on(way[0], value, *way[1]) for way, value in zip(ways, values, strict=True)]
    optimizer = NorMuon([(f"w{number}", weight) for number, weight in enumerate(weights)])
    for weight, value in zip(weights, values, strict=True):
        optimizer.state[weight]["momentum"].copy_(placed(value, weight.device_mesh, weight.placements))  # type: ignore[attr-defined]
    states = optimizer.full_state_dict()["state"]
    return [torch.equal(states[number]["momentum"], value) for number, value in enumerate(values)]


def test_the_whole_state_of_a_mesh_in_another_order() -> None:
    for found in pool(4).run(whole_state):
        assert found == [True] * len(found)


def on_rank_0_alone() -> None:
    NorMuon([("w", on(DeviceMesh("cpu", [0]), torch.ones(8, 6)))])


def test_a_mesh_of_one_rank_is_refused_on_others() -> None:
    first, *others = pool(4).run_expecting_error(on_rank_0_alone)
    assert first is None
    for rank, error in enumerate(others, start=1):
        assert isinstance(error, ValueError)
        assert str(error).startswith("w lies on DeviceMesh")
        assert str(error).endswith(f"ranks [0], of which this one, {rank}, is none")


def sharded_afterwards() -> None:
    """Parameters come to lie on parts that cross after the optimizer was built, and none on all ranks."""
    mesh = SQUARE.make()
    optimizer = NorMuon([("a", nn.Parameter(torch.ones(8, 6))), ("b", nn.Parameter(torch.ones(8, 6)))])
    optimizer.param_groups[0]["params"][:] = [on(mesh[axis], torch.ones(8, 6)) for axis in "ab"]
    optimizer.step()


def test_parameters_that_are_replaced_are_checked_like_new_ones() -> None:
    for error in pool(4).run_expecting_error(sharded_afterwards):
        assert isinstance(error, ValueError)
        assert "b lies on DeviceMesh" in str(error)
        assert "one of them must have all" in str(error)


def fails_beside_new_groups(odd: int) -> str:
    """What a rank raises where another one cannot be built, on a mesh of which two axes need a group of their own."""
    mesh = Mesh((2, 2, 2), ("r", "0", "0")).make()
    parameter = nn.Parameter(placed(torch.ones(6, 4), mesh, [Replicate(), Shard(0), Shard(0)]))
    start = time.monotonic()
    with pytest.raises((ValueError, TransportError)) as caught:
        NorMuon([("w", parameter)], lr=-1.0 if dist.get_rank() == odd else 0.1)
    assert time.monotonic() - start < 30
    return str(caught.value)


@pytest.mark.slow
def test_a_rank_that_fails_leaves_nobody_in_a_new_group() -> None:
    for rank, message in enumerate(pool(8).run(fails_beside_new_groups, 5)):
        assert "lr=-1.0" in message, (rank, message)
