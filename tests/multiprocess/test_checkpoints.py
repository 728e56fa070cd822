"""Checkpoints of torch go from every layout and number of ranks to every other one, in every way of saving."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.pages import DOCS
from dion_core import Muon, TransportError, import_state_dict
from dion_core.testing.ranks import pool
from tests.checkpoint_cases import (
    ELEMENTWISE,
    MATRICES,
    PLACES,
    SAVED_AT,
    WAYS,
    Place,
    load,
    resume,
    save,
    train_and_save,
)
from tests.checkpoint_table import CLOSE, SAME, bits, column, saved_in
from tests.mesh_cases import ROUNDINGS
from tests.small_model import make_batches, make_model, make_optimizer, train_model
from tests.training import OPTIMIZERS, Snapshot, assert_equal_bits, place, whole_mesh


def check_contents(optimizer: str, at_save: Snapshot) -> None:
    """All state is there, also of what was never used, and none of what never required gradients."""
    of_matrix = {"momentum"} | ({"second_moment"} if "Nor" in optimizer else set())
    of_matrix |= {"waited"} if "Dion" in optimizer else set()
    expected = {f"{name}.{key}" for name in MATRICES for key in of_matrix}
    expected |= {f"vector.{key}" for key in ("exp_avg", "exp_avg_sq", "step")} | {"table.exp_avg"}
    weights = {f"{name}.weight" for name in (*MATRICES, *ELEMENTWISE, "frozen")}
    assert set(at_save) == expected | weights
    moved = {name for name in expected if at_save[name].any()}
    assert moved == {name for name in expected if not name.startswith("unused") and not name.endswith("waited")}
    assert at_save["vector.step"] == SAVED_AT
    assert (at_save["blocks.weight"].dtype, at_save["blocks.momentum"].dtype) == (torch.bfloat16, torch.float32)
    rounded = at_save["blocks.momentum"].bfloat16().float()
    assert not torch.equal(rounded, at_save["blocks.momentum"]), "a bf16 momentum would do"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Place], tuple[str, list[Snapshot]]]:
    """The checkpoint of a layout, made once."""
    directory = tmp_path_factory.mktemp("layouts")
    return cache(lambda place: saved_in(place, directory))


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_checkpoint_of_every_layout_is_complete(
    place: Place, saved: Callable[[Place], tuple[str, list[Snapshot]]]
) -> None:
    _, (at_save, _) = saved(place)
    check_contents("NorDion2", at_save)


@pytest.mark.parametrize("loaded_at", PLACES, ids=str)
def test_every_layout_goes_on_from_every_other_one(
    loaded_at: Place, saved: Callable[[Place], tuple[str, list[Snapshot]]]
) -> None:
    """The state is what was saved, and the run goes on like the unbroken one: to the bit where steps are exact."""
    cells = column(loaded_at, {place: saved(place) for place in PLACES})
    for saved_at, cell in zip(PLACES, cells, strict=True):
        exact = loaded_at == saved_at or (loaded_at.exact and saved_at.exact)
        assert cell in ((SAME,) if exact else (SAME, CLOSE)), (saved_at, loaded_at)
    page = (DOCS / "checkpoints.md").read_text(encoding="utf-8")
    begin, end = "<!-- resume: begin -->\n", "<!-- resume: end -->"
    shown = [
        [cell.strip() for cell in line.split("|")[2:-1]] for line in page.split(begin)[1].split(end)[0].splitlines()
    ]
    number = PLACES.index(loaded_at)
    assert [row[number] for row in shown] == [str(loaded_at), "---", *cells], "see tests.checkpoint_table"


@pytest.mark.parametrize("page", ["checkpoints.md", "meshes.md"])
def test_the_pages_state_the_tolerance(page: str) -> None:
    """Of what is only equal to a rounding."""
    stated = [
        float(number) for number in re.findall(r"less\s+than (\S+e-\d+)", (DOCS / page).read_text(encoding="utf-8"))
    ]
    assert stated == [ROUNDINGS]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_way_of_saving(optimizer: str, way: str, tmp_path: Path) -> None:
    """From two ranks to two ranks, and to replicated weights, which FSDP and DDP have."""
    place, other = Place("shard0", 2), Place("ddp", 2)
    (at_save, unbroken), *_ = pool(2).run(train_and_save, place, optimizer, way, str(tmp_path))
    check_contents(optimizer, at_save)
    for loaded_at in (place, other):
        for ((at_load, resumed),) in pool(2).run(resume, loaded_at, optimizer, way, [str(tmp_path)]):
            assert_equal_bits(at_load, at_save, f"{way}, loaded")
            assert_equal_bits(resumed, unbroken, f"{way}, resumed")
            assert bits(resumed) != bits(at_load)


@pytest.mark.parametrize("optimizer", ["Muon", "NorMuon", "Dion2"])
def test_every_optimizer_goes_on_at_other_numbers_of_ranks(optimizer: str, tmp_path: Path) -> None:
    """The table of all layouts is that of NorDion2."""
    (at_save, unbroken), *_ = pool(4).run(train_and_save, Place("shard0", 4), optimizer, "sharded", str(tmp_path))
    for loaded_at in PLACES:
        if loaded_at.exact and loaded_at.world_size != 4:
            by_rank = pool(loaded_at.world_size).run(resume, loaded_at, optimizer, "sharded", [str(tmp_path)])
            for ((at_load, resumed),) in by_rank:
                assert_equal_bits(at_load, at_save, f"{loaded_at}, loaded")
                assert_equal_bits(resumed, unbroken, f"{loaded_at}, resumed")


def sharded(model: nn.Module) -> nn.Module:
    for layer in (model[0], model[3]):
        fully_shard(layer)
    return fully_shard(model)


WRAPPERS = {
    "FSDP2": sharded,
    "DDP": DistributedDataParallel,
    "compiled DDP": lambda model: torch.compile(DistributedDataParallel(model), backend="eager"),
}


def wrapped(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model as it is trained, and its optimizer."""
    model = make_model()
    trained = WRAPPERS[kind](model)
    return trained, make_optimizer(model, "NorDion2", group=None if kind == "FSDP2" else dist.group.WORLD)


def whole_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    tensors = [each for one in model.parameters() for each in (one, *optimizer.state[one].values())]
    return [(each.full_tensor() if isinstance(each, DTensor) else each).detach().clone() for each in tensors]


def move_models(directory: str) -> None:
    """Every kind of wrapped model goes on from the checkpoint of every kind, all ranks having the same batch."""
    inputs, targets = make_batches(4, num_steps=3)
    first, last = (inputs[:2], targets[:2]), (inputs[2:], targets[2:])
    unbroken = {}
    for kind in WRAPPERS:
        model, optimizer = wrapped(kind)
        train_model(model, optimizer, first)
        save(model, optimizer, "sharded", f"{directory}/{kind}")
        at_save = whole_tensors(model, optimizer)
        train_model(model, optimizer, last)
        unbroken[kind] = (at_save, whole_tensors(model, optimizer))
    for kind in WRAPPERS:
        for saved_by, (at_save, wanted) in unbroken.items():
            model, optimizer = wrapped(kind)
            load(model, optimizer, "sharded", f"{directory}/{saved_by}")
            found = whole_tensors(model, optimizer)
            assert all(map(torch.equal, found, at_save)), (saved_by, kind)
            train_model(model, optimizer, last)
            found = whole_tensors(model, optimizer)
            assert all(torch.allclose(*pair, rtol=1e-12, atol=1e-14) for pair in zip(found, wanted, strict=True))


def test_real_models_under_fsdp_and_ddp_go_on_from_each_other(tmp_path: Path) -> None:
    pool(2).run(move_models, str(tmp_path))


def import_sharded(failing_rank: int | None) -> None:
    """State of torch's Muon in DTensors becomes ours; what one rank cannot import, no rank does."""
    mesh = whole_mesh()
    weight, buffer = (torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    parameter = nn.Parameter(place(weight, Shard(0), mesh))
    theirs = torch.optim.Muon([parameter], lr=0.25)
    theirs.state[parameter]["momentum_buffer"] = place(buffer, Shard(0), mesh)
    saved = theirs.state_dict()
    ours = Muon([parameter])
    if failing_rank is None:
        told = import_state_dict(ours, saved)
        assert told[0] == "group 0: state of 1 of 1 parameters from torch.optim.Muon"
        momentum = ours.state[parameter]["momentum"]
        assert torch.equal(momentum.full_tensor(), buffer * (0.95 / (1 - 0.95)))
        assert momentum.placements == (Shard(0),)
        return
    if dist.get_rank() == failing_rank:
        saved["param_groups"][0].pop("ns_coefficients")
    with pytest.raises((ValueError, TransportError), match="cannot be imported"):
        import_state_dict(ours, saved)
    assert not ours.state[parameter]["momentum"].full_tensor().any()
    assert ours.param_groups[0]["lr"] == 0.02


@pytest.mark.parametrize("failing_rank", [None, 0, 1])
def test_sharded_state_of_torchs_muon_is_imported_on_all_ranks_or_on_none(failing_rank: int | None) -> None:
    pool(2).run(import_sharded, failing_rank)
