"""What lies where while the products run: results and copies of X, with the kernels' tables worked through in torch."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor

from dion_core.newton_schulz import POLAR_EXPRESS, NewtonSchulz

iteration = pytest.importorskip("dion_core.newton_schulz_kernels.iteration")
listing = pytest.importorskip("dion_core.newton_schulz_kernels.listing")
choices = pytest.importorskip("dion_core.newton_schulz_kernels.choices")

SHAPES = ((2, 24, 24), (2, 16, 40), (2, 40, 16))
ITERATIONS = [
    NewtonSchulz(),
    *(NewtonSchulz(POLAR_EXPRESS[:count]) for count in (1, 2, 4)),
    NewtonSchulz(restart_after=None),
    NewtonSchulz(restart_after=2),
]


def number(bits: int) -> float:
    value: float = struct.unpack("f", struct.pack("i", bits))[0]
    return value


def run(plan: object, copies: tuple[Tensor, Tensor], out: Tensor, work: Tensor, *_: object) -> None:
    """What the kernel does with a table, in float32 and rounded where it stores."""
    table = plan.table.tolist()  # type: ignore[attr-defined]
    tall = out.shape[1] > out.shape[2]
    for start in range(0, table[4], listing.FIELDS):
        kind, left, right, alpha, first, last, matrix, size = table[start : start + listing.FIELDS]
        part, slots = slice(matrix, matrix + size), work[:, :size]
        wide = copies[right][part].float() if kind != listing.Kind.SYMMETRIC else None
        if kind == listing.Kind.GRAM:
            value = wide.mT @ wide if tall else wide @ wide.mT
        elif kind == listing.Kind.SYMMETRIC:
            value = slots[left].float() @ slots[right].float()
        else:
            value = wide @ slots[left].float() if tall else slots[left].float() @ wide
        value = number(alpha) * value
        for operation in range(first, last, 4):
            buffer, bits, store = table[operation : operation + 3]
            if not store:
                value = value + number(bits) * slots[buffer].float()
            elif kind == listing.Kind.APPLY:
                target = out if buffer == listing.RESULT else copies[buffer]
                assert target.data_ptr() not in (copies[right].data_ptr(), work[left].data_ptr())
                target[part] = value.to(target.dtype)
            else:
                value = value + number(bits) * torch.eye(value.shape[-1])
                slots[buffer] = (value.tril() + value.tril(-1).mT).to(slots.dtype)


def normalize_rows(rows: Tensor, place: Tensor, *, out: Tensor, cleared: Tensor) -> Tensor:
    assert out.untyped_storage().data_ptr() != rows.untyped_storage().data_ptr()
    cleared.zero_()
    matrices = torch.nn.functional.pad(rows.float(), (0, 0, 0, 1))[place]
    return out.copy_(matrices / torch.linalg.matrix_norm(matrices, keepdim=True))


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(iteration, "_run", run)
    monkeypatch.setattr(iteration, "normalize_rows", normalize_rows)
    monkeypatch.setattr(iteration, "choice_for", lambda *_: choices.DEFAULT)
    yield
    iteration._plan.cache_clear()  # a test may have changed what they are made of


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("orthogonalize", ITERATIONS, ids=str)
def test_buffers_of_rows_change_no_bit(
    orthogonalize: NewtonSchulz, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    batch, height, width = shape
    segments = orthogonalize.kernel_segments(height, width)
    generator = torch.Generator().manual_seed(0)
    several = batch * height
    order = torch.randperm(several + 5, generator=generator)[:several].view(batch, height)
    order[0, 3] = -1
    every = torch.randn(several + 5, width, generator=generator).to(dtype)
    few = every[: several // 4]
    for rows, spare_rows in product((every, few), (None, 2, several + 1)):
        place = order.where(order < len(rows), -1)
        expected = iteration.orthogonalize_rows(rows.clone(), place, segments, None)
        spare = None if spare_rows is None else torch.full((spare_rows, width), float("nan"), dtype=dtype)
        given = rows.clone()
        result = iteration.orthogonalize_rows(given, place, segments, spare)
        assert torch.equal(result, expected)
        assert result.dtype == dtype
        assert result.is_contiguous()
        assert result.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()
        if rows is few:
            continue  # of low rank, which float16 makes less of
        matrices = torch.nn.functional.pad(rows, (0, 0, 0, 1))[place]
        assert (result.float() - orthogonalize(matrices.float())).norm() < 0.02 * result.float().norm()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_spare", [False, True])
def test_parts_of_many_matrices_change_no_bit(
    shape: tuple[int, int, int], with_spare: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, height, width = shape
    segments = NewtonSchulz().kernel_segments(height, width)
    rows = torch.randn(5 * height, width, generator=torch.Generator().manual_seed(0)).bfloat16()
    place = torch.arange(5 * height).view(5, height)

    def orthogonalized() -> Tensor:
        spare = torch.full_like(rows, float("nan")) if with_spare else None
        result: Tensor = iteration.orthogonalize_rows(rows.clone(), place, segments, spare).clone()
        return result

    expected = orthogonalized()
    monkeypatch.setattr(listing, "BLOCKS_AT_ONCE", 1)
    assert listing.parts_of(5, *sorted((height, width))) == [3, 2]
    iteration._plan.cache_clear()
    assert torch.equal(orthogonalized(), expected)


def test_tables_stay_for_graphs_that_read_them() -> None:
    segments, device = NewtonSchulz().kernel_segments(8, 16), torch.device("cpu")
    table = iteration._plan(segments, (1, 8, 16), choices.DEFAULT, device).table
    for more in range(300):
        iteration._plan(segments, (2 + more, 8, 16), choices.DEFAULT, device)
    assert iteration._plan(segments, (1, 8, 16), choices.DEFAULT, device).table is table
