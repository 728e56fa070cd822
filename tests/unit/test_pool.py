"""The header of a pool: counts as bytes, whatever they would mean as floating numbers."""

import pytest
import torch
from torch import Tensor

from dion_comm_capped import Capped
from dion_comm_capped.capped import PooledExchange
from dion_comm_capped.places import read_headers, write_headers_
from dion_core.collectives import SoloGroup
from dion_core.layout import Axis, split_layout
from dion_core.rows import RowSelection
from dion_core.transport import Bucket

ROWS = 70_000


def exchange(dtype: torch.dtype, columns: int) -> PooledExchange:
    layout = split_layout(SoloGroup(), Axis.ROWS, (ROWS, columns)).stack(2)
    bucket = Bucket(layout, (0, 0), ROWS, ROWS, dtype, torch.device("cpu"), "bucket")
    return PooledExchange(bucket, Capped(always_pack=True))


def selection(counts: list[int]) -> RowSelection:
    index = torch.arange(ROWS).expand(2, ROWS)
    count = torch.tensor(counts)
    return RowSelection.unranked(index, count, count[None])


def read(packed: PooledExchange, chosen: RowSelection, known: Tensor) -> tuple[Tensor, Tensor]:
    """What the only rank reads of the headers that it wrote for a choice: counts, and where rows start."""
    arrived = packed.reserve(chosen).values
    to_owner, chunks = packed.plan.chunks()
    write_headers_(arrived, chosen.count, packed.tables, to_owner)
    count, start, _ = read_headers(arrived.flatten(), known, packed.tables, chunks, max_rows=ROWS, total_rows=ROWS)
    return count, start


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
# Infinities and NaNs of bf16 and fp16 in the low half of a count: 0x7F80, 0x7FC0, 0xFF81, 0x7C00, 0xFE00.
@pytest.mark.parametrize("counts", [[0x7F80, 0x7FC0], [0xFF81, 0x7C01], [0xFE00, 0], [1, ROWS]])
def test_counts_come_back_bit_for_bit(dtype: torch.dtype, columns: int, counts: list[int]) -> None:
    packed = exchange(dtype, columns)
    chosen = selection(counts)
    # The choice that the owner knows of is another one: only the header can tell.
    told, start = read(packed, chosen, torch.zeros(1, 2, dtype=torch.int64))
    header = packed.plan.header_rows(0)
    assert told.tolist() == [counts]
    assert start.tolist() == [[header, header + counts[0]]]


def test_a_wrong_header_is_clipped_to_the_chunk() -> None:
    packed = exchange(torch.float32, 3)
    packed.use([[100]])
    for wrong in ([-5, 7], [2**31 - 1, 2**31 - 1], [90, 90]):
        told, _ = read(packed, selection(wrong), torch.zeros(1, 2, dtype=torch.int64))
        [[first, second]] = told.tolist()
        assert first >= 0
        assert second >= 0
        assert first + second <= 100
