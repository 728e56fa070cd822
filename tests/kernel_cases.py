"""Checks of kernels against the definitions and against loops, on the device where the kernels run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dion_core import choice, compaction
from dion_core.layout import Layout, RowTables
from dion_core.rows import RowSelection
from tests.unit.test_layout import Holders, layout_of, rows_of

CPU = torch.device("cpu")


def device() -> torch.device:
    """A GPU, else the CPU, where triton interprets the kernels."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def assert_same(got: Any, expected: Any) -> None:
    """Tensors, or all tensors of a dataclass, have equal dtypes, shapes and bits; one NaN is like another."""
    if is_dataclass(expected):
        for field in fields(expected):
            assert_same(getattr(got, field.name), getattr(expected, field.name))
        return
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    flat = [torch.empty(each.numel(), dtype=each.dtype).copy_(each.flatten()) for each in (got, expected)]
    bits = [torch.where(each.isnan(), torch.zeros_like(each), each).view(torch.uint8) for each in flat]
    assert torch.equal(*bits), (got, expected)
    assert torch.equal(flat[0].isnan(), flat[1].isnan())


def mixed_scores(seed: int, num_matrices: int, rows: int, dtype: torch.dtype) -> Tensor:
    """Scores by matrix in turn: few different ones, all kinds of floats, zeros with a few others, rows left out."""
    generator = torch.Generator().manual_seed(seed)
    few = torch.randint(-1, 4, (num_matrices, rows), generator=generator).to(dtype)
    exponents = torch.randint(-42, 37, (num_matrices, rows), generator=generator).double()
    floats = (torch.rand(num_matrices, rows, generator=generator, dtype=torch.float64) * 10.0**exponents).to(dtype)
    zeros = torch.where(torch.rand(num_matrices, rows, generator=generator) < 0.9, torch.zeros((), dtype=dtype), floats)
    kinds = torch.stack([few, floats, zeros, torch.full_like(few, -1.0)])
    return kinds[torch.arange(num_matrices) % 4, torch.arange(num_matrices)].contiguous()


def looped(scores: Tensor, holders: Holders, rank: int, total: int, active: Sequence[bool]) -> list[list[int]]:
    """The local rows of a rank by matrix: those chosen, ascending, then the others."""
    listed = []
    for matrix, of_matrix in enumerate(scores.tolist()):
        order = sorted(range(len(of_matrix)), key=lambda row: (-of_matrix[row], row))
        chosen = set(order[:total] if active[matrix] else ())
        held = rows_of(holders, rank, matrix)
        places = [place for place, row in enumerate(held) if row in chosen]
        listed.append(places + [place for place in range(len(held)) if place not in places])
    return listed


def check_choose(scores: Tensor, layout: Layout, active: Sequence[bool], total: int, offer: int) -> RowSelection:
    """The kernel's choice of whole matrices equals the definition's."""
    from dion_core.kernels import choice as kernels

    mask, where = torch.tensor(active), device()
    expected = choice.choose(scores, RowTables(layout, CPU), mask, total=total, offer=offer)
    with np.errstate(all="ignore"):  # the interpreter divides by zero where the result is not used
        got = kernels.choose(scores.to(where), RowTables(layout, where), mask.to(where), total=total, offer=offer)
    assert_same(got, expected)
    return got


def check_choose_local(scores: Tensor, layout: Layout, active: Sequence[bool], share: int) -> None:
    """The kernel's choice of this rank's rows equals the definition's."""
    from dion_core.kernels import choice as kernels

    mask, where = torch.tensor(active), device()
    expected = choice.choose_local(scores, RowTables(layout, CPU), mask, share=share)
    assert_same(kernels.choose_local(scores.to(where), RowTables(layout, where), mask.to(where), share=share), expected)


def check_scattered_choice(holders: Holders, size: int, fraction: float, dtype: torch.dtype) -> None:
    """Of rows scattered in any way every rank finds what a loop finds."""
    num_matrices, rows = len(holders), len(holders[0])
    total = max(1, int(fraction * rows))
    active = [matrix != 1 for matrix in range(num_matrices)]
    scores = mixed_scores(rows, num_matrices, rows, dtype)
    for rank in {0, size // 2, size - 1}:
        got = check_choose(scores, layout_of(holders, rank, size, 1), active, total, total)
        slots = got.index.shape[1]
        for matrix, listed in enumerate(looped(scores, holders, rank, total, active)):
            assert got.index[matrix].tolist()[: len(listed)] == listed[:slots]
        local = mixed_scores(rank, num_matrices, layout_of(holders, rank, size, 1).max_rows(rank), dtype)
        check_choose_local(local, layout_of(holders, rank, size, 1), active, -(-total // size))


def check_collect_and_spread(columns: int, dtype: torch.dtype, *, size: int, total: int, shift: int = 0) -> None:
    """Rows of several senders form the same matrices, and go back to their places, which alone are written."""
    from dion_core.kernels import compaction as kernels

    num_counted, owned, where = 5, torch.tensor([4, 0, 2]), device()
    generator = torch.Generator().manual_seed(columns * size)
    count = torch.randint(0, total // size + 1, (size, num_counted), generator=generator)
    count[:, 2] = 0
    slots = total // size
    start = torch.randperm(size * 3, generator=generator).view(size, 3) * slots
    wide = torch.randn(size * 3 * slots * columns + shift, generator=generator).to(dtype)
    rows = wide[shift:].view(-1, columns)
    on_device = [each.to(where) for each in (wide, count, start, owned)]
    there = on_device[0][shift:].view(-1, columns)
    expected = compaction.collect(rows, count, start, total, owned)
    assert_same(kernels.collect(there, *on_device[1:3], total, on_device[3]), expected)
    assert_same(
        kernels.collect(there, on_device[1].index_select(1, on_device[3]), on_device[2], total),
        expected,
    )
    source, valid = compaction.compact(count.index_select(1, owned), start, total)
    found = compaction.places(count, start, total, owned)
    assert torch.equal(found, torch.where(valid, source, -1))
    assert_same(kernels.places(*on_device[1:3], total, on_device[3]), found)
    used = source[valid]
    for matrices in (expected, expected.mT.contiguous().mT, torch.cat([expected, expected], dim=2)[:, :, :columns]):
        wanted, back = (torch.full_like(rows, -7).to(place) for place in ("cpu", where))
        compaction.spread_(wanted, matrices, count, start, owned)
        kernels.spread_(back, matrices.to(where), *on_device[1:3], on_device[3])
        assert_same(wanted[used], rows[used])
        assert_same(back, wanted)
