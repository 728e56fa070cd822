"""Declared shards over torch.distributed: the same bits as whole tensors, whatever the parts and whoever holds them."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import dion_core
from dion_core import DeclaredShard, NorDion2
from dion_core.testing.ranks import RankError, pool
from tests.mpi_cases import cells
from tests.multiprocess.test_world_size import COLUMNS
from tests.training import assert_close, assert_equal_bits, train_cells

# (shape, group keys, axis); parts are ceil(size / W) long, so that heads and blocks are cut.
VIEWS: tuple[tuple[tuple[int, ...], dict[str, Any], int], ...] = (
    ((30, 7), {"num_heads": 2}, 0),
    ((30, 7), {"num_heads": 3}, -1),
    ((13, 40), {"split_sizes": (6, 4, 3)}, 0),
    ((9, 4, 3, 2), {"flatten": True}, 0),
    ((4, 3, 8, 6), {}, 0),
    ((2, 5, 8, 6), {}, 1),
    ((3, 9, 6), {}, -2),
    ((7, 3), {"algorithm": "adamw", "lr": 0.01}, 0),
    ((5,), {"algorithm": "lion", "lr": 0.01}, 0),
)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_rows_give_the_bits_of_whole_tensors(world_size: int) -> None:
    wanted = train_cells(cells("plain"), 1)
    for cell, actual, other in zip(
        cells("declared0"), train_cells(cells("declared0"), world_size), wanted, strict=True
    ):
        for step, one, two in zip(cell.steps, actual, other, strict=True):
            assert_equal_bits(one, two, f"{cell.optimizer} {cell.options} after {step} steps")


def test_columns_agree_to_rounding() -> None:
    wanted = train_cells(cells("plain"), 1)
    for cell, actual, other in zip(cells("declared1"), train_cells(cells("declared1"), 3), wanted, strict=True):
        if cell.options.get("wire_dtype") is None and actual[-1]["matrix0.weight"].dtype is torch.float32:
            doubled = {name: value.double() for name, value in other[-1].items()}
            assert_close(actual[-1], doubled, COLUMNS, f"{cell.optimizer} {cell.options}")


def drawn(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape, _, _ in VIEWS]


def part(value: Tensor, axis: int) -> tuple[Tensor, DeclaredShard]:
    size = value.shape[axis]
    longest = -(-size // dist.get_world_size())
    start = min(dist.get_rank() * longest, size)
    length = min(longest, size - start)
    return value.narrow(axis, start, length).clone(), DeclaredShard(axis, size, start)


def built() -> tuple[NorDion2, list[nn.Parameter]]:
    """An optimizer of all views on this rank; some of its groups come later."""
    parts = [part(value, axis) for value, (_, _, axis) in zip(drawn(0), VIEWS, strict=True)]
    parameters = [nn.Parameter(value) for value, _ in parts]
    groups = [
        {"params": [(f"weight{number}", parameter)], "shard": shard, **keys}
        for number, (parameter, (_, shard), (_, keys, _)) in enumerate(zip(parameters, parts, VIEWS, strict=True))
    ]
    optimizer = NorDion2(groups[:5], group=dist.group.WORLD, transport="full")
    for group in groups[5:]:
        optimizer.add_param_group(group)
    return optimizer, parameters


def step(optimizer: NorDion2, parameters: list[nn.Parameter], number: int) -> None:
    for parameter, gradient, (_, _, axis) in zip(parameters, drawn(number), VIEWS, strict=True):
        parameter.grad = part(gradient, axis)[0]
    optimizer.step()


def train_views() -> tuple[list[Tensor], dict[str, Any], list[str]]:
    """This rank's parts after three steps, the whole state, and what differs between copies."""
    optimizer, parameters = built()
    for number in (1, 2, 3):
        step(optimizer, parameters, number)
    return [each.detach() for each in parameters], optimizer.full_state_dict(), optimizer.check_replicas()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_views_and_elementwise_groups(world_size: int) -> None:
    ((whole, state, _),) = pool(1).run(train_views)
    by_rank = pool(world_size).run(train_views)
    for number, (wanted, (_, keys, axis)) in enumerate(zip(whole, VIEWS, strict=True)):
        actual = torch.cat([parts[number] for parts, _, _ in by_rank], dim=axis)
        if axis == -1 and "algorithm" not in keys:
            torch.testing.assert_close(actual, wanted, rtol=2e-6, atol=2e-6)
        else:
            assert torch.equal(actual, wanted), VIEWS[number]
    for _, of_rank, differing in by_rank:
        assert not differing
        assert of_rank["state"].keys() == state["state"].keys()
        for number, of_parameter in of_rank["state"].items():
            for key, value in of_parameter.items():
                assert value.shape == state["state"][number][key].shape, (number, key)
                torch.testing.assert_close(value, state["state"][number][key], rtol=2e-6, atol=2e-6)


def with_a_flipped_bit() -> list[list[str]]:
    """What differs before and after a bit of rank 1 was flipped, of momentum and then of a value a row."""
    optimizer, parameters = built()
    step(optimizer, parameters, 1)
    said = [optimizer.check_replicas()]
    for key in ("momentum", "second_moment"):
        if dist.get_rank() == 1:
            optimizer.state[parameters[1]][key].view(torch.int32)[0, 0] ^= 1
        said.append(optimizer.check_replicas())
    return said


def test_values_a_row_of_divided_columns_are_copies() -> None:
    wanted = [[], [], ["weight1 (second_moment) differs: ranks [0, 2] and ranks [1]"]]
    assert pool(3).run(with_a_flipped_bit) == [wanted] * 3


def resume(saved: dict[str, Any] | None) -> tuple[list[Tensor], list[str]]:
    """The parts after one step, a load and two more; and why the state of another rank is refused."""
    optimizer, parameters = built()
    step(optimizer, parameters, 1)
    own = copy.deepcopy(optimizer.state_dict())
    again, others = built()
    for one, other in zip(parameters, others, strict=True):
        other.data.copy_(one)
    again.load_state_dict(own if saved is None else saved)
    for number in (2, 3):
        step(again, others, number)
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, own)
    try:
        again.load_state_dict(states[(dist.get_rank() + 1) % len(states)])
    except ValueError as error:
        return [each.detach() for each in others], [str(error)]
    return [each.detach() for each in others], []


def one_step() -> dict[str, Any]:
    optimizer, parameters = built()
    step(optimizer, parameters, 1)
    return optimizer.full_state_dict()


@pytest.mark.parametrize("way", ["own", "of one process"])
def test_a_run_goes_on(way: str) -> None:
    saved = pool(1).run(one_step)[0] if way != "own" else None
    unbroken = pool(3).run(train_views)
    for (actual, refused), (wanted, _, _) in zip(pool(3).run(resume, saved), unbroken, strict=True):
        for one, other in zip(actual, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)
        assert "every rank loads what it saved itself" in refused[0]


def half_declared() -> str:
    """Two pairs of ranks hold parts, one of them with a hole, and a DTensor lies on all."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pairs", "parts"))
    rank = dist.get_rank()
    everywhere = distribute_tensor(torch.ones(4, 4), mesh, [Replicate(), Replicate()], src_data_rank=None)
    shard = DeclaredShard(0, 8, 4 * (rank % 2) + (rank == 3))
    here = nn.Parameter(torch.ones(4 - (rank == 3), 4))
    groups = [{"params": [("all", nn.Parameter(everywhere))]}, {"params": [("half", here)], "shard": shard}]
    try:
        NorDion2(groups, group=mesh["parts"])
    except ValueError as error:
        return str(error)
    return "nothing"


def test_all_ranks_refuse_what_some_declare() -> None:
    wanted = "half: the declared shards of axis 0 do not tile (8, 4): nobody holds [4, 5); rank 2 [0, 4), rank 3 [5, 8)"
    assert pool(4).run(half_declared) == [wanted] * 4


def build_unlike() -> None:
    """One rank declares a part and the others give copies."""
    rows = 4 if dist.get_rank() == 0 else 8
    known = {"shard": DeclaredShard(0, 8, 0)} if dist.get_rank() == 0 else {}
    NorDion2([{"params": [nn.Parameter(torch.ones(rows, 4))], **known}], group=dist.group.WORLD)


def test_ranks_that_do_not_declare_alike_all_raise() -> None:
    with pytest.raises(RankError) as caught:
        pool(3).run(build_unlike)
    assert set(caught.value.errors) == {0, 1, 2}
    assert "rank 0 of parameter 0 of group 0, axis 0 of (8, 4), rank 1 of nothing" in str(caught.value)


def refused(optimizer: str, shape: tuple[int, ...], shard: Any, match: str, **options: Any) -> None:
    parameter = nn.Parameter(torch.ones(shape))
    with pytest.raises(ValueError, match=match):
        getattr(dion_core, optimizer)([{"params": [("weight", parameter)], "shard": shard}], **options)


@pytest.mark.parametrize("optimizer", ["Muon", "NorMuon", "Dion2", "NorDion2"])
def test_what_cannot_be_declared_is_refused_by_name(optimizer: str) -> None:
    refused(optimizer, (4, 4), (0, 8, 0), r"shard=\(0, 8, 0\) in parameter group 0 .* DeclaredShard")
    refused(optimizer, (4, 4), DeclaredShard(2, 8, 0), r"weight: .* names an axis that shape \(4, 4\) does not have")
    refused(optimizer, (4, 4), DeclaredShard(0, 6, 4), "weight: .* ends at 8, after the end")
    refused(optimizer, (4, 4), DeclaredShard(0, 8, 0), "weight: .* is not the whole tensor, .* give group=")
    whole = DeclaredShard(0, 4, 0)
    refused(optimizer, (4, 4), whole, "is not supported with state", state="layerwise", group=None)
    for name, value in (("axis", 0.5), ("size", -1), ("offset", True)):
        with pytest.raises(ValueError, match=rf"{name}={value} of a declared shard is not allowed"):
            DeclaredShard(**{"axis": 0, "size": 4, "offset": 0, name: value})


def test_the_shard_of_a_group_cannot_change() -> None:
    parameter = nn.Parameter(torch.ones(4, 4))
    optimizer = NorDion2([{"params": [parameter], "shard": DeclaredShard(0, 4, 0)}])
    parameter.grad = torch.ones(4, 4)
    optimizer.step()
    optimizer.param_groups[0]["shard"] = DeclaredShard(1, 4, 0)
    with pytest.raises(
        ValueError, match=r"shard=DeclaredShard\(axis=1, size=4, offset=0\) in parameter group 0: it was"
    ):
        optimizer.step()
