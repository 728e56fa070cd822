"""Checkpoints of torch go from every layout and number of ranks to every other one, in every way of saving."""

from pathlib import Path

import pytest
import torch

from benchmarks.pages import DOCS
from dion_core.testing.ranks import pool
from tests.checkpoint_cases import ELEMENTWISE, MATRICES, SAVED_AT, WAYS, Place, resume, train_and_save
from tests.checkpoint_table import CLOSE, SAME, bits, resume_table, table
from tests.training import OPTIMIZERS, Snapshot, assert_equal_bits


def test_every_layout_goes_on_from_every_other_one(tmp_path: Path) -> None:
    """The state is what was saved, and the run goes on like the unbroken one: to the bit where steps are exact."""
    cells = resume_table(tmp_path)
    for (saved_at, loaded_at), cell in cells.items():
        exact = loaded_at == saved_at or (loaded_at.exact and saved_at.exact)
        assert cell in ((SAME,) if exact else (SAME, CLOSE)), (saved_at, loaded_at)
    page = (DOCS / "checkpoints.md").read_text(encoding="utf-8")
    assert f"<!-- resume: begin -->\n{table(cells)}<!-- resume: end -->" in page, "see tests.checkpoint_table"


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
