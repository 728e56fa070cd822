"""Layer-wise state is saved and loaded at any number of ranks and in the other mode; what cannot be is refused."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dion_core import Dion2, LayerWise, Muon, NorDion2
from dion_core.testing.ranks import pool
from tests.layerwise_cases import KINDS, SMALL, Run, assert_same, through_bytes

OPTIONS = {"fraction": 0.25, "momentum_dtype": torch.float32}
DTYPE = torch.bfloat16
ORDINARY = "like_parameters"


def unbroken() -> dict[str, Tensor]:
    run = Run("NorDion2", OPTIONS, layout="plain", dtype=DTYPE)
    for number in (1, 2, 3, 4):
        run.step(number)
    return run.whole()


def save(mode: Any) -> tuple[dict[str, Any], list[Tensor]]:
    """The whole state and the weights after two steps."""
    run = Run("NorDion2", {**OPTIONS, "state": mode}, dtype=DTYPE)
    run.step(1)
    run.step(2)
    return run.optimizer.full_state_dict(), run.weights()


def resume(mode: Any, state: dict[str, Any], weights: Sequence[Tensor]) -> tuple[dict[str, Tensor], int]:
    """Two more steps of an optimizer that has the state; how many parameters have state here."""
    run = Run("NorDion2", {**OPTIONS, "state": mode}, dtype=DTYPE, weights=weights)
    before = copy.deepcopy(state)
    run.optimizer.load_state_dict(state)
    assert_nested_equal(state, before)
    num_kept = sum(bool(run.optimizer.state[parameter]) for parameter in run.parameters)
    run.step(3)
    run.step(4)
    return run.whole(), num_kept


def assert_nested_equal(one: Any, other: Any) -> None:
    if isinstance(one, Mapping):
        assert one.keys() == other.keys()
        for key in one:
            assert_nested_equal(one[key], other[key])
    elif isinstance(one, Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


@pytest.mark.parametrize(
    ("before", "mode", "after", "other"),
    [
        *((4, SMALL, after, LayerWise(bucket_elements=2000)) for after in (1, 2, 3, 4)),
        (4, SMALL, 2, ORDINARY),
        (3, "layerwise", 1, ORDINARY),
        (2, ORDINARY, 3, SMALL),
        (1, ORDINARY, 4, "layerwise"),
    ],
    ids=str,
)
def test_a_resumed_run_is_the_unbroken_one(before: int, mode: Any, after: int, other: Any) -> None:
    [wanted] = pool(1).run(unbroken)
    saved = pool(before).run(save, mode)
    state, weights = through_bytes(saved[-1][0]), saved[0][1]
    for of_rank, _ in saved:
        assert "layerwise" not in of_rank
        assert_nested_equal(of_rank["state"], state["state"])
    resumed = pool(after).run(resume, other, state, weights)
    for result, _ in resumed:
        assert_same(result, wanted, (before, mode, after, other))
    copies = after if other == ORDINARY else 1
    assert sum(num_kept for _, num_kept in resumed) == copies * len(KINDS)


def full_state_for(to: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
    run = Run("NorDion2", {**OPTIONS, "state": SMALL}, dtype=DTYPE)
    run.step(1)
    return run.optimizer.full_state_dict(to=to), run.optimizer.full_state_dict()


def test_one_rank_gets_the_whole_state() -> None:
    for rank, (of_rank, everywhere) in enumerate(pool(3).run(full_state_for, 1)):
        if rank == 1:
            assert_nested_equal(of_rank, everywhere)
            assert len(of_rank["state"]) == len(KINDS)
            tensors = [tensor for state in of_rank["state"].values() for tensor in state.values()]
            assert all(tensor.device.type == "cpu" for tensor in tensors)
            assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == len(tensors)
        else:
            assert of_rank == {}
    for error in pool(2).run_expecting_error(full_state_for, 2):
        assert "to=2 is not allowed: the ranks of this optimizer are [0, 1]" in str(error)


def own_state_and_back() -> tuple[int, int]:
    """What one rank keeps loads where it came from, bit for bit; how many tensors are kept, in how many buffers."""
    run = Run("NorDion2", {**OPTIONS, "state": SMALL}, dtype=DTYPE)
    run.step(1)
    state = through_bytes(run.optimizer.state_dict())
    assert state["layerwise"] == {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    assert 0 < sum(map(bool, state["state"].values())) < len(KINDS) == len(state["state"])
    other = Run("NorDion2", {**OPTIONS, "state": SMALL}, dtype=DTYPE, weights=run.weights())
    other.optimizer.load_state_dict(state)
    kept, loaded = run.kept(), other.kept()
    buffers = [len({tensor.untyped_storage().data_ptr() for tensor in each.values()}) for each in (kept, loaded)]
    assert buffers[0] == buffers[1]
    assert all(kept[name].storage_offset() == value.storage_offset() for name, value in loaded.items())
    run.step(2)
    other.step(2)
    assert_same(run.whole(), other.whole(), "after the load")
    return len(kept), buffers[1]


def test_the_own_state_of_a_rank_loads_where_it_was_saved() -> None:
    kept, buffers = zip(*pool(3).run(own_state_and_back), strict=True)
    assert sum(buffers) < sum(kept), "not flat"


def load_of_another(mode: Any, state: dict[str, Any]) -> None:
    Run("NorDion2", {**OPTIONS, "state": mode}, dtype=DTYPE).optimizer.load_state_dict(state)


def own_state() -> dict[str, Any]:
    return Run("NorDion2", {**OPTIONS, "state": SMALL}, dtype=DTYPE).optimizer.state_dict()


@pytest.mark.parametrize(("world_size", "mode"), [(2, ORDINARY), (3, SMALL), (1, SMALL)], ids=str)
def test_the_own_state_of_a_rank_is_refused_elsewhere(world_size: int, mode: Any) -> None:
    """By all ranks, where only some would miss something."""
    state = pool(2).run(own_state)[0]
    errors = pool(world_size).run_expecting_error(load_of_another, mode, state)
    assert all("save full_state_dict() there" in str(error) for error in errors), errors
    assert all("rank 0 of 2" in str(error) for error in errors)


def names_and_state(directory: str, mode: Any) -> dict[str, Tensor]:
    """Saves with torch.distributed.checkpoint after two steps, as a model's optimizer is saved."""
    run, model = modelled(mode)
    run.step(1)
    run.step(2)
    dcp.save({"optimizer": get_optimizer_state_dict(model, run.optimizer)}, checkpoint_id=directory)
    return run.whole()


def load_checkpoint(directory: str, mode: Any) -> dict[str, Tensor]:
    run, model = modelled(mode)
    state = {"optimizer": get_optimizer_state_dict(model, run.optimizer)}
    dcp.load(state, checkpoint_id=directory)
    set_optimizer_state_dict(model, run.optimizer, state["optimizer"])
    return run.whole()


def modelled(mode: Any) -> tuple[Run, nn.Module]:
    run = Run("NorDion2", {**OPTIONS, "state": mode}, dtype=DTYPE)
    model = nn.Module()
    for number, parameter in enumerate(run.parameters):
        model.register_parameter(f"p{number}", parameter)
    return run, model


@pytest.mark.parametrize(
    ("before", "mode", "after", "other"),
    [(4, SMALL, 2, "layerwise"), (2, SMALL, 3, ORDINARY), (2, ORDINARY, 3, SMALL), (2, SMALL, 1, SMALL)],
    ids=str,
)
def test_torch_distributed_checkpoint(before: int, mode: Any, after: int, other: Any, tmp_path: Path) -> None:
    """Every rank saves what it keeps, and reads what it keeps then."""
    wanted = pool(before).run(names_and_state, str(tmp_path), mode)[0]
    for result in pool(after).run(load_checkpoint, str(tmp_path), other):
        state = {name: value for name, value in result.items() if not name.endswith("weight")}
        assert_same(state, {name: wanted[name] for name in state}, (before, after))


def grow(mode: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """One more group after a step, one parameter thawed after another; and what was kept before and after."""
    run = Run("NorDion2", {**OPTIONS, "state": mode}, dtype=DTYPE, frozen=(0, 11))
    run.step(1)
    before = {name: value.clone() for name, value in run.kept().items()}
    late = [nn.Parameter(torch.ones(8, 6, dtype=DTYPE)), nn.Parameter(torch.ones(5, 6, dtype=DTYPE))]
    run.optimizer.add_param_group({"params": [("late0", late[0]), ("late1", late[1])]})
    run.parameters += late
    after = {name: value.clone() for name, value in run.kept().items()}
    for number in (2, 3):
        if number == 3:
            run.parameters[0].requires_grad_(True)
            run.parameters[11].requires_grad_(True)
        for place, parameter in enumerate(run.parameters):
            parameter.grad = torch.full_like(parameter, 0.1 * place) if parameter.requires_grad else None
        run.optimizer.step()
    return run.whole(), before, after


def test_groups_and_parameters_that_come_later() -> None:
    """What is kept stays where it is, and the run is that of the other mode."""
    [(wanted, *_)] = pool(1).run(grow, ORDINARY)
    by_rank = pool(3).run(grow, SMALL)
    for result, before, after in by_rank:
        assert_same(result, wanted, "grown")
        assert_same(before, {name: after[name] for name in before}, "kept")
    news = [set(after) - set(before) for _, before, after in by_rank]
    assert sorted(name for of_rank in news for name in of_rank) == sorted(
        f"{number}.{key}" for number in (14, 15) for key in ("momentum", "second_moment", "waited")
    )


def failed_group() -> None:
    """A group that is refused leaves everything as it was."""
    run = Run("NorDion2", {**OPTIONS, "state": SMALL}, dtype=DTYPE)
    run.step(1)
    before = {name: value.clone() for name, value in run.kept().items()}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = distribute_tensor(torch.ones(8, 6), mesh, [Shard(0)])
    with pytest.raises(ValueError, match=r"sharded one: placements .* leave state= out"):
        run.optimizer.add_param_group({"params": [("sharded one", nn.Parameter(sharded))]})
    assert_same(run.kept(), before, "after the failure")
    run.step(2)


def test_a_failed_group_changes_nothing() -> None:
    pool(2).run(failed_group)


def tied_storage(mode: Any) -> tuple[list[str], list[Tensor]]:
    """Two parameters with one storage, as a head and an embedding can be, beside others."""
    shared = torch.ones(16, 8)
    head, embedding = nn.Parameter(shared), nn.Parameter(shared)
    others = [nn.Parameter(torch.ones(16, 8)) for _ in range(4)]
    names = ["head", "one", "two", "three", "four", "embedding"]
    entries = list(zip(names, [head, *others, embedding], strict=True))
    optimizer = Muon([{"params": entries, "algorithm": "adamw", "lr": 0.1}], group=dist.group.WORLD, state=mode)
    for number, (_, parameter) in enumerate(entries):
        parameter.grad = torch.full_like(parameter, 1.0 + number)
    optimizer.step()
    return optimizer.report()["state"]["parameters"], [parameter.detach() for _, parameter in entries]


def test_parameters_with_one_storage_stay_on_one_rank() -> None:
    [(_, wanted)] = pool(1).run(tied_storage, ORDINARY)
    by_rank = pool(4).run(tied_storage, LayerWise(bucket_elements=1))
    assert any({"head", "embedding"} <= set(names) for names, _ in by_rank)
    assert len([names for names, _ in by_rank if names]) > 1
    for _, weights in by_rank:
        assert all(map(torch.equal, weights, wanted))


def build_sharded() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    Dion2([("w", nn.Parameter(distribute_tensor(torch.ones(8, 6), mesh, [Shard(0)])))], state="layerwise")


def build_without_group() -> None:
    Dion2([("w", nn.Parameter(torch.ones(8, 6)))], state="layerwise")


def build_with_modes_by_rank() -> None:
    mode = ORDINARY if dist.get_rank() == 0 else SMALL
    Dion2([("w", nn.Parameter(torch.ones(8, 6)))], state=mode, group=dist.group.WORLD)


def build_with_transport_of_no_use() -> None:
    Muon([("w", nn.Parameter(torch.ones(8, 6)))], state="layerwise", group=dist.group.WORLD, transport="capped")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (build_sharded, "w: placements (Shard(dim=0),) on"),
        (build_sharded, "leave state= out"),
        (build_without_group, 'w is a plain tensor, and state="layerwise" needs the ranks'),
        (build_with_modes_by_rank, "state=LayerWise(bucket_elements=700)"),
        (build_with_transport_of_no_use, "transport='capped' does not serve all rows"),
    ],
)
def test_refused_on_every_rank(build: Any, message: str) -> None:
    errors = pool(2).run_expecting_error(build)
    assert all(message in str(error) for error in errors), errors


@pytest.mark.parametrize("mode", ["zero", None, 3])
def test_modes_that_are_none(mode: Any) -> None:
    with pytest.raises(ValueError, match=r"is not allowed: \"like_parameters\", \"layerwise\" or LayerWise\(\.\.\.\)"):
        NorDion2([nn.Parameter(torch.ones(8, 6))], state=mode)


@pytest.mark.parametrize("size", [0, -1, 2.5, True])
def test_bucket_sizes_that_cannot_be(size: Any) -> None:
    with pytest.raises(ValueError, match=r"bucket_elements=.* a whole number >= 1"):
        LayerWise(bucket_elements=size)


def test_a_group_has_no_state_of_its_own() -> None:
    with pytest.raises(ValueError, match="state in parameter group 0 is an option of the whole optimizer"):
        NorDion2([{"params": [nn.Parameter(torch.ones(8, 6))], "state": "layerwise"}])


def flipped_bit() -> list[list[str]]:
    """What `check_replicas` says before and after a bit of one copy was flipped; state that one rank has is no copy."""
    run = Run("NorDion2", {"state": "layerwise"})
    run.step(1)
    said = [run.optimizer.check_replicas()]
    if dist.get_rank() == 1:
        run.parameters[3].detach().view(torch.int32)[0, 0] ^= 1
    return [*said, run.optimizer.check_replicas()]


def test_copies_of_weights_are_compared_and_state_without_copies_is_not() -> None:
    for said in pool(3).run(flipped_bit):
        assert said == [[], ["p3 differs: ranks [0, 2] and ranks [1]"]]


def replaced_after_a_load() -> None:
    """One matrix: of two ranks one has state, and parameters are replaced, which is too late where there is some."""
    weight = nn.Parameter(torch.ones(6, 4))
    optimizer = NorDion2([("w", weight)], group=dist.group.WORLD, state="layerwise")
    state = optimizer.full_state_dict()
    state["state"][0]["momentum"] += 1
    optimizer.load_state_dict(state)
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(6, 4))
    optimizer.step()


def test_parameters_replaced_where_one_rank_has_state_are_refused_by_all() -> None:
    errors = pool(2).run_expecting_error(replaced_after_a_load)
    assert sorted(type(error).__name__ for error in errors) == ["TransportError", "ValueError"]
    assert all("before the first step and before a load" in str(error) for error in errors)
