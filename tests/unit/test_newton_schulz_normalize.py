"""Normalization by kernels, in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from dion_core.newton_schulz_kernels import normalize as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def normalized(matrices: Tensor) -> Tensor:
    out = torch.full(matrices.shape, float("nan"), device=DEVICE)
    kernels.normalize(matrices.to(DEVICE), out=out)
    return out.cpu()


def expected(matrices: Tensor) -> Tensor:
    wide = matrices.double()
    return wide / torch.linalg.matrix_norm(wide, keepdim=True).clamp(min=1e-300)


@pytest.mark.parametrize("shape", [(2, 5, 200), (1, 1, 8), (3, 17, 64), (2, 600, 24)])
@pytest.mark.parametrize("block", [64, 8192])
@pytest.mark.parametrize("most_held", [0, 20])
def test_rows_of_one_block_and_of_several(
    shape: tuple[int, int, int], block: int, most_held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_BLOCK", block)
    monkeypatch.setattr(kernels, "_MOST_HELD", most_held)
    torch.manual_seed(0)
    matrices = torch.randn(*shape)
    torch.testing.assert_close(normalized(matrices).double(), expected(matrices), rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("scale", [1e-40, 1e-38, 1e-10, 1.0, 1e20, 1e38])
def test_no_scale_overflows_or_vanishes(scale: float) -> None:
    torch.manual_seed(1)
    matrices = torch.randn(2, 6, 40).clamp(-3, 3) * scale
    # Numbers below 1e-38 have fewer digits themselves.
    torch.testing.assert_close(normalized(matrices).double(), expected(matrices), rtol=1e-4, atol=1e-5)


def test_rows_of_very_different_scale_count_with_their_weight() -> None:
    torch.manual_seed(2)
    matrices = torch.randn(1, 4, 32) * torch.tensor([1e-30, 1e-3, 1.0, 1e10])[None, :, None]
    torch.testing.assert_close(normalized(matrices).double(), expected(matrices), rtol=2e-6, atol=1e-30)


def test_zero_matrices_and_rows_stay_zero() -> None:
    torch.manual_seed(3)
    matrices = torch.randn(3, 5, 16)
    matrices[1] = 0
    matrices[2, 3] = 0
    result = normalized(matrices)
    assert not result[1].any()
    assert not result[2, 3].any()
    torch.testing.assert_close(result[[0, 2]].double(), expected(matrices[[0, 2]]), rtol=2e-6, atol=1e-9)


def test_not_a_number_stays_in_its_matrix() -> None:
    matrices = torch.ones(2, 3, 8)
    matrices[0, 1, 2] = float("nan")
    result = normalized(matrices)
    assert result[0].isnan().all()
    assert result[1].isfinite().all()


def test_rows_are_read_where_they_lie() -> None:
    """In any order, some more than once; -1 is a row of zeros."""
    torch.manual_seed(2)
    rows = torch.randn(9, 24)
    place = torch.tensor([[8, 3, -1], [0, 0, 5], [-1, -1, -1]])
    out = torch.full((3, 3, 24), float("nan"), device=DEVICE)
    kernels.normalize_rows(rows.to(DEVICE), place.to(DEVICE), out=out)
    matrices = torch.where((place >= 0)[:, :, None], rows[place], 0.0)
    torch.testing.assert_close(out.cpu().double(), expected(matrices), rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("length", [1, 40, 64, 100])
def test_counters_are_cleared_and_nothing_behind_them(length: int) -> None:
    memory = torch.full((200,), 7, dtype=torch.int32, device=DEVICE)
    matrices = torch.randn(2, 3, 16, device=DEVICE)
    kernels.normalize(matrices, out=torch.empty_like(matrices), cleared=memory[:length])
    assert not memory[:length].any()
    assert (memory[length:] == 7).all()
