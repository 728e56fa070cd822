"""Meshes as frameworks make them, and what goes wrong on them: state, copies that differ, plans that differ."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dion_comm_capped import Capped
from dion_comm_nccl import FullShard
from dion_core import Dion2, NorDion2, NorMuon, TransportError, buckets
from dion_core.copies import fingerprint
from dion_core.meshes import mesh_axes
from dion_core.testing.ranks import pool
from tests.mesh_cases import Case, Mesh, Weight, build, compare_here, placed, set_gradients, values

pytestmark = pytest.mark.usefixtures("fresh_ranks")

STEPS = 3
HSDP, TILES = Mesh((2, 2), ("r", "0")), Mesh((2, 2), ("0", "1"))
WEIGHTS = (Weight((17, 12)), Weight((17, 12)), Weight((12, 10)))


class Model(nn.Module):
    """A column-parallel layer, a row-parallel one after it, an uneven column-parallel one beside both; and a norm and
    a router, of which tensor parallelism knows nothing: FSDP2 puts them on its own axes of the mesh alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 6, bias=False)
        self.down = nn.Linear(6, 8, bias=False)
        self.side = nn.Linear(8, 5, bias=False)
        self.norm = nn.LayerNorm(8)
        self.router = nn.Linear(8, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        side = self.side(x).square().sum(dim=-1, keepdim=True)
        routed = self.router(x).tanh().sum(dim=-1, keepdim=True)
        result: Tensor = 2 * self.norm(x + self.down(torch.tanh(self.up(x))) * side * routed)
        return result


def model_on(way: str) -> nn.Module:
    """The model in float64, laid out as frameworks do it."""
    torch.manual_seed(0)
    model = Model().double()
    if way == "one process":
        return model
    if way == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "fsdp")))
        return model
    names = ("dp", "fsdp", "tp")[-2 if dist.get_world_size() == 4 else -3 :]
    mesh = init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "side": ColwiseParallel(output_layouts=Replicate())}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh[names[:-1]])
    return model


def trained(way: str, kind: Any, options: dict[str, Any]) -> tuple[dict[str, Tensor], list[str], dict[str, str]]:
    """Whole parameters after some steps, what `check_replicas` says, and the placements, with the size of the mesh."""
    model = model_on(way)
    matrices = [(name, each) for name, each in model.named_parameters() if each.ndim == 2]
    others = [(name, each) for name, each in model.named_parameters() if each.ndim == 1]
    groups = [{"params": matrices}, {"params": others, "algorithm": "adamw", "lr": 1e-3}]
    optimizer = kind(groups, **options)
    data = torch.randn(STEPS, 6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for inputs in data:
        optimizer.zero_grad()
        (model(inputs) * inputs.roll(1)).sum().backward()
        optimizer.step()
    whole = {
        name: (each.full_tensor() if isinstance(each, DTensor) else each).detach().clone()
        for name, each in model.named_parameters()
    }
    differing = [] if way == "one process" else optimizer.check_replicas()
    lie = {
        name: f"{each.placements} on {each.device_mesh.size()}"
        for name, each in model.named_parameters()
        if isinstance(each, DTensor)
    }
    return whole, differing, lie


@pytest.mark.parametrize("way", ["hsdp", "tp"])
def test_models_of_frameworks_train_as_on_one_process(way: str) -> None:
    """An uneven (5, 8) weight over tensor parallelism and FSDP2 (C9), and tiles of (8, 6)."""
    agree_with_one_process(way, 4)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["hsdp", "tp"])
def test_models_of_frameworks_on_eight_ranks(way: str) -> None:
    agree_with_one_process(way, 8)


def agree_with_one_process(way: str, world_size: int) -> None:
    for kind, options in ((NorMuon, {"transport": "full"}), (NorDion2, {"fraction": 0.5, "transport": "varlen"})):
        wanted, _, _ = trained("one process", kind, {name: options[name] for name in options if name != "transport"})
        for found, differing, lie in pool(world_size).run(trained, way, kind, options):
            assert differing == []
            assert ("_StridedShard" in lie["side.weight"]) == (way == "tp"), lie
            assert ("Shard(dim=1)" in lie["down.weight"]) == (way == "tp"), lie
            on_some = {name for name, where in lie.items() if f"on {world_size}" not in where}
            assert on_some == ({"norm.weight", "norm.bias", "router.weight"} if way == "tp" else set()), lie
            for name in wanted:
                # Gradients of different ranks are summed in another order.
                torch.testing.assert_close(found[name], wanted[name], rtol=1e-6, atol=1e-6, msg=name)


def places_that_differ() -> list[str]:
    """Where this rank's pieces lie elsewhere than DTensor says, for all meshes of four ranks and lengths up to 17."""
    ways = [("0", "0"), ("s0/2", "0"), ("0", "1"), ("1", "0"), ("r", "0"), ("0", "r"), ("r", "s1/1"), ("r", "r")]
    meshes = [Mesh((2, 2), places) for places in ways] + [Mesh((4, 1), ("s0/1", "0")), Mesh((1, 4), ("s0/4", "0"))]
    wrong = []
    for mesh in meshes:
        made, placements = mesh.make(), mesh.placements(Weight((1, 1)))
        for length in range(1, 18):
            shape, replicate = (length, 19 - length), [Replicate()] * made.ndim
            tensor = DTensor.from_local(torch.empty(0), made, replicate, run_check=False, shape=shape, stride=(1, 1))
            tensor._spec = type(tensor._spec)(made, tuple(placements), tensor._spec.tensor_meta)
            axes = mesh_axes(tensor)
            assert axes is not None
            held = [axes.held(dim, tensor.shape[dim]) for dim in range(2)]
            sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, made, placements)
            for (offset, size), wanted_size, wanted in zip(held, sizes, offsets, strict=True):
                if size != wanted_size or (size and offset != wanted):
                    wrong.append(f"{mesh} {length}: {held}, {sizes} {offsets}")
    return wrong


def test_pieces_lie_where_torch_says() -> None:
    assert pool(4).run(places_that_differ) == [[]] * 4


def state_of_tiles() -> None:
    """C6: momentum lies as the parameter does; one value a row is held by all that hold parts of the row."""
    mesh = TILES.make()
    case = Case(TILES, (Weight((3, 1)), Weight((1, 8)), Weight((7, 6))), "NorDion2", {"transport": "capped"})
    optimizer, parameters = build(case, mesh)
    for parameter in parameters:
        state = optimizer.state[parameter]
        assert isinstance(parameter, DTensor)
        momentum, moment, waited = state["momentum"], state["second_moment"], state["waited"]
        assert (momentum.shape, momentum.stride()) == (parameter.shape, parameter.stride())
        assert (momentum.device_mesh, momentum.placements) == (mesh, parameter.placements)
        for each in (moment, waited):
            assert tuple(each.shape) == (parameter.shape[0], 1)
            assert (each.device_mesh, each.placements) == (mesh, (Shard(0), Replicate()))
            assert each.to_local().shape == (parameter.to_local().shape[0], 1)


def test_state_of_tiles() -> None:
    pool(4).run(state_of_tiles)


def flip(tensor: Tensor, rank: int) -> None:
    """Changes the lowest bit of the last element on one rank."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if dist.get_rank() == rank:
        local.detach().view(torch.int32).view(-1)[-1] ^= 1


def flipped() -> list[list[str]]:
    """What `check_replicas` says before and after single bits were flipped."""
    said = []
    optimizer, parameters = build(Case(HSDP, WEIGHTS, "NorMuon", {}), HSDP.make())
    said.append(optimizer.check_replicas())
    flip(parameters[1], 2)
    flip(optimizer.state[parameters[0]]["momentum"], 1)
    said.append(optimizer.check_replicas())
    optimizer, parameters = build(Case(TILES, WEIGHTS, "NorMuon", {}), TILES.make())
    flip(parameters[0], 1)  # not replicated: no copy
    flip(optimizer.state[parameters[2]]["second_moment"], 3)
    said.append(optimizer.check_replicas())
    plain, vector = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3))
    groups = [{"params": [("w", plain)]}, {"params": [("v", vector)], "algorithm": "adamw", "lr": 0.1}]
    ddp = NorMuon(groups, group=dist.group.WORLD)
    flip(plain, 0)
    flip(ddp.state[vector]["exp_avg"], 3)
    said.append(ddp.check_replicas())
    alone = NorMuon([("w", plain)])  # every rank's own
    said.append(alone.check_replicas())
    return said


def test_one_flipped_bit_is_found_by_name_on_all_ranks() -> None:
    for said in pool(4).run(flipped):
        assert said == [
            [],
            ["weight0 (momentum) differs: ranks [1] and ranks [3]", "weight1 differs: ranks [0] and ranks [2]"],
            ["weight2 (second_moment) differs: ranks [2] and ranks [3]"],
            ["w differs: ranks [0] and ranks [1, 2, 3]", "v (exp_avg) differs: ranks [0, 1, 2] and ranks [3]"],
            [],
        ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_every_bit_is_in_the_fingerprint(dtype: torch.dtype) -> None:
    tensor = (torch.randn(5, 3) * 50).to(dtype)
    seen = {int(fingerprint(tensor))}
    for byte in range(tensor.numel() * tensor.element_size()):
        for bit in range(8):
            changed = tensor.clone()
            changed.view(torch.uint8).view(-1)[byte] ^= 1 << bit
            seen.add(int(fingerprint(changed)))
    assert len(seen) == 1 + tensor.numel() * tensor.element_size() * 8
    if dtype.is_floating_point:  # two signs, in which the highest bit changes
        signs = torch.tensor([[-1, -1, 1], [1, -1, -1], [-1, 1, -1]], dtype=dtype)
        seen |= {int(fingerprint(tensor * sign)) for sign in signs}
        assert len(seen) == 4 + tensor.numel() * tensor.element_size() * 8
    assert int(fingerprint(tensor.T.contiguous().T)) in seen


def test_a_local_choice_is_that_of_one_replica() -> None:
    """Copies change nothing: the shards are those of two ranks; of tiles likewise, to a rounding."""
    options = {"fraction": 0.3, "scope": "local", "transport": "local"}
    two = Case(Mesh((2,), ("0",)), WEIGHTS, "NorDion2", options)
    reference = pool(2).run(whole_after_training, two)[0]
    for mesh, allowed in ((HSDP, -1.0), (TILES, 1e-6)):
        case = Case(mesh, WEIGHTS, "NorDion2", options)
        for [outcome] in pool(4).run(compare_here, [case], [reference]):
            assert max(error for errors in outcome.errors for error in errors.values()) <= allowed, mesh


def whole_after_training(case: Case) -> list[dict[str, Tensor]]:
    """On every rank: whole weights and state."""
    assert case.mesh is not None
    mesh = case.mesh.make()
    optimizer, parameters = build(case, mesh)
    for of_step in values(case)[1:]:
        set_gradients(case, mesh, parameters, of_step)
        optimizer.step()
    return [
        {name: value.full_tensor().detach() for name, value in {"weight": each, **optimizer.state[each]}.items()}
        for each in parameters
    ]


def deferring() -> tuple[dict[str, Any], list[str], list[list[int]], int]:
    """A run whose pools are too small: the report, copies, traffic planned and sent, and rows that wait."""
    mesh = HSDP.make()
    # All winners lie on one shard, which has room for half of them.
    large = torch.tensor([[9.0]] * 8 + [[1.0]] * 8)
    case = Case(HSDP, (Weight((16, 12)),) * 3, "Dion2", {"transport": Capped(1.0, always_pack=True)})
    optimizer, parameters = build(case, mesh)
    for of_step in values(case)[1:]:
        set_gradients(case, mesh, parameters, [gradient.nan_to_num(posinf=1) * large for gradient in of_step])
        optimizer.step()
    report = optimizer.report()
    waiting = sum(int((optimizer.state[each]["waited"].to_local() > 0).sum()) for each in parameters)
    return report["rows"], optimizer.check_replicas(), [bucket["owners"] for bucket in report["buckets"]], waiting


def test_deferred_rows_wait_on_every_replica_alike() -> None:
    by_rank = pool(4).run(deferring)
    for _, differing, owners, _ in by_rank:
        assert differing == []
        assert {owner // 2 for [owner] in owners} == {0, 1}, "both replicas work"
    for one, other in ((0, 2), (1, 3)):
        assert by_rank[one][0] == by_rank[other][0]
    assert by_rank[0][0]["deferred"] > 0
    assert by_rank[0][3] > 0


class Narrow(FullShard):
    """A transport that does not say where results lie."""

    outer_axes = False


def refused() -> list[str]:
    messages = []
    for mesh in (HSDP, TILES):
        with pytest.raises(ValueError, match="Narrow") as caught:
            build(Case(mesh, WEIGHTS, "NorMuon", {"transport": Narrow()}), mesh.make())
        messages.append(str(caught.value))
    return messages


def test_a_transport_for_one_axis_is_refused_by_name() -> None:
    for hsdp, tiles in pool(4).run(refused):
        told = "transport='Narrow' does not serve matrices that several axes of a mesh hold"
        assert hsdp.startswith(told)
        assert "replicated over 2" in hsdp
        assert "columns over 2" in tiles
        assert "it serves one axis, [" in tiles


def unlike_owners(odd: int) -> str:
    """What a rank raises where the odd one assigns the owners of its experts otherwise."""
    assign = buckets.assign_owners

    def reversed_owners(*arguments: Any) -> Any:
        owners, loads = assign(*arguments)
        return [1 - owner for owner in owners], loads

    mesh = Mesh((2, 2), ("0", "-2"))
    case = Case(mesh, (Weight((6, 8, 6)), Weight((2, 4, 6))), "NorMuon", {})
    with patch.object(buckets, "assign_owners", reversed_owners if dist.get_rank() == odd else assign):
        try:
            build(case, mesh.make())
        except TransportError as error:
            return str(error)
    return "nothing was raised"


def test_plans_for_other_experts_may_differ_and_those_for_the_same_must_not() -> None:
    assert pool(4).run(unlike_owners, -1) == ["nothing was raised"] * 4
    messages = pool(4).run(unlike_owners, 3)
    assert len(set(messages)) == 1
    assert "ranks [2] have '3 x 8x6 rows over 2 ranks" in messages[0]
    assert "ranks [3] have '3 x 8x6 rows over 2 ranks" in messages[0]
    assert "weight0 (slice 3)" in messages[0]


def on_parts(whole: bool) -> tuple[list[Tensor], list[str], list[str], dict[str, Any]]:
    """Plain tensors with copies on one axis beside a weight on both, or the reverse.

    Gives what they are after two steps, what `check_replicas` says before and after a bit of one copy was flipped, and
    the whole state.
    """
    mesh = TILES.make()
    torch.manual_seed(3)
    values = [torch.randn(6, 5), torch.randn(4, 7)]
    plain = nn.Parameter(values[0].clone())
    split = nn.Parameter(placed(values[1], mesh["b"] if whole else mesh, [Shard(0)] if whole else [Shard(0), Shard(1)]))
    optimizer = NorMuon([("plain", plain), ("split", split)], group=mesh if whole else mesh["b"])
    for step in range(2):
        plain.grad = values[0] + step
        split.grad = placed(values[1] - step, split.device_mesh, split.placements)
        optimizer.step()
    before = optimizer.check_replicas()
    flip(optimizer.state[plain]["momentum"], 2)
    after = optimizer.check_replicas()
    return [plain.detach(), split.full_tensor().detach()], before, after, optimizer.full_state_dict()["state"]


@pytest.mark.parametrize("whole", [True, False])
def test_plain_tensors_and_meshes_of_other_sizes(whole: bool) -> None:
    torch.manual_seed(3)
    values = [torch.randn(6, 5), torch.randn(4, 7)]
    wanted = [nn.Parameter(value.clone()) for value in values]
    alone = NorMuon(wanted)
    for step in range(2):
        wanted[0].grad, wanted[1].grad = values[0] + step, values[1] - step
        alone.step()
    for found, before, after, state in pool(4).run(on_parts, whole):
        torch.testing.assert_close(found, [each.detach() for each in wanted], rtol=0, atol=1e-6)
        torch.testing.assert_close(state[1]["momentum"], alone.state[wanted[1]]["momentum"], rtol=0, atol=1e-6)
        assert before == []
        others = "[0, 1, 3]" if whole else "[3]"
        expected = [f"ranks {others}", "ranks [2]"][:: 1 if whole else -1]
        assert after == [f"plain (momentum) differs: {' and '.join(expected)}"]


def shifting(step: int, part: int) -> Tensor:
    """A gradient whose largest rows lie elsewhere after some steps, sooner in one part than in the other."""
    generator = torch.Generator().manual_seed(100 * step + part)
    rows = torch.ones(64, 1)
    rows[32 * ((step // (5 + 6 * part)) % 2) :][:32] = 10.0
    return torch.randn(64, 6, generator=generator) * rows


def parts_that_learn_apart(steps: int) -> tuple[int, list[Tensor]]:
    """This rank's place beside the part, and its weights: what the ranks of other parts learn must not matter."""
    mesh = Mesh((2, 2), ("s0/2", "0")).make()
    whole = nn.Parameter(placed(shifting(0, 2), mesh, Mesh((2, 2), ("s0/2", "0")).placements(Weight((64, 6)))))
    part, place = nn.Parameter(placed(shifting(0, 3), mesh["a"], [Shard(0)])), mesh["b"].get_local_rank()
    options = {"fraction": 0.25, "transport": Capped(on_overflow="varlen", always_pack=True)}
    optimizer = Dion2([("whole", whole), ("part", part)], **options)
    for step in range(steps):
        whole.grad = placed(shifting(step, 2), mesh, whole.placements)
        part.grad = placed(shifting(step, place), mesh["a"], [Shard(0)])
        optimizer.step()
    return place, [whole.full_tensor().detach(), part.full_tensor().detach()]


def test_what_parts_learn_is_their_own() -> None:
    steps = 40
    for place, found in pool(4).run(parts_that_learn_apart, steps):
        wanted = [nn.Parameter(shifting(0, 2)), nn.Parameter(shifting(0, 3))]
        alone = Dion2(wanted, fraction=0.25)
        for step in range(steps):
            wanted[0].grad, wanted[1].grad = shifting(step, 2), shifting(step, place)
            alone.step()
        assert all(torch.equal(one, other.detach()) for one, other in zip(found, wanted, strict=True))
