"""Every collective of a group on gloo, bit for bit, against what the parent computes; and on a group of one."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dion_core.collectives import Call, Group, Reduction, SoloGroup, num_bytes, observe, split
from dion_core.process_groups import TorchGroup
from dion_core.testing.ranks import pool

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
WORLD_SIZES = [1, 2, 3, 4]
REDUCTIONS: list[Reduction] = ["sum", "max"]
LENGTHS = {  # of the tensor that every rank gives, by rank
    "even": [3, 3, 3, 3],
    "one element": [1, 1, 1, 1],
    "empty": [0, 0, 0, 0],
    "uneven": [2, 5, 1, 4],
    "some empty": [0, 7, 0, 3],
    "all but one empty": [0, 0, 0, 5],
}
Case = tuple[object, ...]
Splits = Callable[[int, int], int]  # (sender, receiver) -> elements
SPLITS: dict[str, Splits] = {
    "equal": lambda sender, receiver: 4,
    "uneven": lambda sender, receiver: 1 + (3 * sender + 2 * receiver) % 5,
    "some empty": lambda sender, receiver: 3 * ((sender + receiver) % 2),
    "only to the last": lambda sender, receiver: 6 * (receiver == 3),
    "empty": lambda sender, receiver: 0,
}

on_every_world_size = pytest.mark.parametrize("world_size", WORLD_SIZES)


def message(rank: int, length: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Arbitrary bits, those of NaN among them."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    values = torch.randint(256, (length * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return values.view(dtype)


def addends(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    """Small whole numbers, whose sums are exact in every dtype; negative ones where the dtype has them."""
    numbers = torch.tensor([(7 * place + 5 * rank) % 11 for place in range(length)], dtype=torch.int64)
    return (numbers - (0 if dtype is torch.uint8 else 5)).to(dtype)


def world() -> Group:
    assert dist.group.WORLD is not None
    return TorchGroup(dist.group.WORLD)


def garbage(length: int, dtype: torch.dtype) -> Tensor:
    return torch.full((length * dtype.itemsize,), 77, dtype=torch.uint8).view(dtype)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


def gather(group: Group, lengths: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    outputs = [garbage(lengths[rank], dtype) for rank in range(group.size)]
    group.all_gather(outputs, message(group.rank, lengths[group.rank], dtype)).wait()
    return outputs


def reduce(group: Group, length: int, dtype: torch.dtype, reduction: Reduction) -> Tensor:
    tensor = addends(group.rank, length, dtype)
    group.all_reduce(tensor, reduction).wait()
    return tensor


def scatter(group: Group, length: int, dtype: torch.dtype, reduction: Reduction) -> Tensor:
    output = garbage(length, dtype)
    group.reduce_scatter(output, addends(group.rank, length * group.size, dtype), reduction).wait()
    return output


def spread(group: Group, length: int, dtype: torch.dtype, source: int) -> Tensor:
    tensor = message(group.rank, length, dtype)
    group.broadcast(tensor, source).wait()
    return tensor


def exchange(group: Group, splits: Sequence[Sequence[int]], dtype: torch.dtype) -> Tensor:
    """Every rank sends splits[rank][r] elements to rank r."""
    sent = splits[group.rank]
    received = [of_sender[group.rank] for of_sender in splits]
    output = garbage(sum(received), dtype)
    group.all_to_all(output, message(group.rank, sum(sent), dtype), received, sent).wait()
    return output


def on_this_rank(function: Callable[..., object], cases: Sequence[Case]) -> list[object]:
    return [function(world(), *case) for case in cases]


def on_ranks(world_size: int, function: Callable[..., object], cases: Sequence[Case]) -> list[list[Tensor]]:
    """By rank the results of all cases."""
    return pool(world_size).run(on_this_rank, function, cases)


def splits_of(world_size: int, rule: Splits) -> list[list[int]]:
    return [[rule(sender, receiver) for receiver in range(world_size)] for sender in range(world_size)]


@on_every_world_size
def test_ranks_know_their_place(world_size: int) -> None:
    places = pool(world_size).run(place_in_the_world)
    assert places == [(rank, world_size, tuple(range(world_size))) for rank in range(world_size)]


def place_in_the_world() -> tuple[int, int, tuple[int, ...]]:
    group = world()
    assert len({group, world()}) == 1
    return group.rank, group.size, group.ranks


@on_every_world_size
def test_all_gather(world_size: int) -> None:
    cases = [(lengths[:world_size], dtype) for lengths in LENGTHS.values() for dtype in DTYPES]
    for by_case in on_ranks(world_size, gather, cases):
        for outputs, (lengths, dtype) in zip(by_case, cases, strict=True):
            for rank, output in enumerate(outputs):
                assert_same_bits(output, message(rank, lengths[rank], dtype))


@on_every_world_size
@pytest.mark.parametrize("length", [0, 1, 9])
def test_all_reduce(world_size: int, length: int) -> None:
    cases = [(length, dtype, reduction) for dtype in DTYPES for reduction in REDUCTIONS]
    for by_case in on_ranks(world_size, reduce, cases):
        for output, (_, dtype, reduction) in zip(by_case, cases, strict=True):
            assert_same_bits(output, reduced(world_size, length, dtype, reduction))


@on_every_world_size
@pytest.mark.parametrize("length", [0, 1, 4])
def test_reduce_scatter(world_size: int, length: int) -> None:
    cases = [(length, dtype, reduction) for dtype in DTYPES for reduction in REDUCTIONS]
    for rank, by_case in enumerate(on_ranks(world_size, scatter, cases)):
        for output, (_, dtype, reduction) in zip(by_case, cases, strict=True):
            whole = reduced(world_size, length * world_size, dtype, reduction)
            assert_same_bits(output, whole[rank * length : (rank + 1) * length])


@on_every_world_size
def test_broadcast(world_size: int) -> None:
    cases = [(length, dtype, source) for length in (0, 5) for dtype in DTYPES for source in range(world_size)]
    for by_case in on_ranks(world_size, spread, cases):
        for output, (length, dtype, source) in zip(by_case, cases, strict=True):
            assert_same_bits(output, message(source, length, dtype))


@on_every_world_size
def test_all_to_all(world_size: int) -> None:
    cases = [(splits_of(world_size, rule), dtype) for rule in SPLITS.values() for dtype in DTYPES]
    for rank, by_case in enumerate(on_ranks(world_size, exchange, cases)):
        for output, (splits, dtype) in zip(by_case, cases, strict=True):
            pieces = []
            for sender, lengths in enumerate(splits):
                start = sum(lengths[:rank])
                pieces.append(message(sender, sum(lengths), dtype)[start : start + lengths[rank]])
            assert_same_bits(output, torch.cat(pieces))


def reduced(world_size: int, length: int, dtype: torch.dtype, reduction: Reduction) -> Tensor:
    values = torch.zeros(length, dtype=dtype)
    for place in range(length):
        numbers = [int(addends(rank, length, dtype)[place]) for rank in range(world_size)]
        values[place] = sum(numbers) if reduction == "sum" else max(numbers)
    return values


def several_in_flight() -> list[Tensor]:
    """Seven collectives under way at once, waited for in another order; the inputs are forgotten meanwhile."""
    group = world()
    size, rank = group.size, group.rank
    uneven = splits_of(size, SPLITS["uneven"])
    sent, received = uneven[rank], [of_sender[rank] for of_sender in uneven]
    exchanged = [garbage(sum(received), torch.float32) for _ in range(3)]
    gathered = [garbage(LENGTHS["uneven"][each], torch.bfloat16) for each in range(size)]
    summed, spread_out, own = addends(rank, 5, torch.float32), message(rank, 3, torch.float16), garbage(2, torch.int64)
    handles = [
        group.all_to_all(exchanged[0], message(rank, sum(sent), torch.float32, 1), received, sent),
        group.all_gather(gathered, message(rank, LENGTHS["uneven"][rank], torch.bfloat16)),
        group.all_to_all(exchanged[1], message(rank, sum(sent), torch.float32, 2), received, sent),
        group.all_reduce(summed, "sum"),
        group.broadcast(spread_out, size - 1),
        group.reduce_scatter(own, addends(rank, 2 * size, torch.int64), "max"),
        group.all_to_all(exchanged[2], message(rank, sum(sent), torch.float32, 3), received, sent),
    ]
    for place in (6, 0, 3, 1, 5, 4, 2):
        handles[place].wait()
    handles[0].wait()  # a second wait does nothing
    return [*exchanged, torch.cat(gathered), summed, spread_out, own]


@on_every_world_size
def test_several_in_flight(world_size: int) -> None:
    uneven = splits_of(world_size, SPLITS["uneven"])
    for rank, results in enumerate(pool(world_size).run(several_in_flight)):
        for seed, exchanged in enumerate(results[:3], start=1):
            sent = [message(sender, sum(uneven[sender]), torch.float32, seed) for sender in range(world_size)]
            pieces = [split(each, lengths)[rank] for each, lengths in zip(sent, uneven, strict=True)]
            assert_same_bits(exchanged, torch.cat(pieces))
        gathered = [message(each, LENGTHS["uneven"][each], torch.bfloat16) for each in range(world_size)]
        assert_same_bits(results[3], torch.cat(gathered))
        assert_same_bits(results[4], reduced(world_size, 5, torch.float32, "sum"))
        assert_same_bits(results[5], message(world_size - 1, 3, torch.float16))
        whole = reduced(world_size, 2 * world_size, torch.int64, "max")
        assert_same_bits(results[6], whole[2 * rank : 2 * rank + 2])


def one_of_each() -> tuple[list[Call], list[Call], list[Call]]:
    """What is observed: all, an inner part of it, and what an observer sees that has gone."""
    group = world()
    with observe() as gone:
        pass
    with observe() as calls:
        gather(group, LENGTHS["even"], torch.float64)
        with observe() as inner:
            gather(group, LENGTHS["uneven"], torch.bfloat16)
            reduce(group, 3, torch.float32, "sum")
        scatter(group, 3, torch.float16, "max")
        spread(group, 5, torch.int64, group.size - 1)
        exchange(group, splits_of(group.size, SPLITS["uneven"]), torch.bfloat16)
    return calls, inner, gone


@on_every_world_size
def test_observed_calls(world_size: int) -> None:
    for rank, (calls, inner, gone) in enumerate(pool(world_size).run(one_of_each)):
        everyone = range(world_size)
        assert [(call.name, call.sent) for call in calls] == [
            ("all_gather", (3 * 8,) * world_size),
            ("all_gather", (LENGTHS["uneven"][rank] * 2,) * world_size),
            ("all_reduce", (3 * 4,) * world_size),
            ("reduce_scatter", (3 * 2,) * world_size),
            ("broadcast", (5 * 8 * (rank == world_size - 1),) * world_size),
            ("all_to_all", tuple(2 * SPLITS["uneven"](rank, receiver) for receiver in everyone)),
        ]
        assert all(call.size == world_size for call in calls)
        assert inner == calls[1:3]
        assert gone == []


def in_a_smaller_group() -> list[Tensor] | None:
    """Ranks 1 and 3 of four among themselves; ranks of a group count from 0."""
    process_group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return None
    group = TorchGroup(process_group)
    assert (group.rank, group.size, group.ranks) == (dist.get_rank() // 2, 2, (1, 3))
    assert group != world()
    gathered = gather(group, [2, 5], torch.float32)
    return [*gathered, spread(group, 3, torch.float32, 1), reduce(group, 4, torch.float32, "sum")]


def test_a_smaller_group() -> None:
    results = pool(4).run(in_a_smaller_group)
    assert (results[0], results[2]) == (None, None)
    for result in (results[1], results[3]):
        assert result is not None
        assert_same_bits(result[0], message(0, 2, torch.float32))
        assert_same_bits(result[1], message(1, 5, torch.float32))
        assert_same_bits(result[2], message(1, 3, torch.float32))
        assert_same_bits(result[3], reduced(2, 4, torch.float32, "sum"))


SOLO_CASES: list[tuple[Callable[..., object], list[Case]]] = [
    (gather, [(lengths[:1], dtype) for lengths in LENGTHS.values() for dtype in DTYPES]),
    (reduce, [(5, dtype, reduction) for dtype in DTYPES for reduction in REDUCTIONS]),
    (scatter, [(5, dtype, reduction) for dtype in DTYPES for reduction in REDUCTIONS]),
    (spread, [(5, dtype, 0) for dtype in DTYPES]),
    (exchange, [([[length]], dtype) for length in (0, 4) for dtype in DTYPES]),
]


@pytest.mark.parametrize(("function", "cases"), SOLO_CASES, ids=[function.__name__ for function, _ in SOLO_CASES])
def test_a_group_of_one_needs_no_process_group(function: Callable[..., object], cases: list[Case]) -> None:
    (expected,) = on_ranks(1, function, cases)
    with observe() as calls:
        actual = [function(SoloGroup(), *case) for case in cases]
    assert calls == []  # nothing is sent
    for left, right in zip(actual, expected, strict=True):
        pairs = zip(left, right, strict=True) if isinstance(left, list) else [(left, right)]
        for one, other in pairs:
            assert_same_bits(one, other)


def test_bytes_and_pieces() -> None:
    assert [num_bytes(torch.empty(3, dtype=dtype)) for dtype in DTYPES] == [24, 12, 6, 6, 24, 3]
    tensor = torch.arange(6)
    split(tensor, [2, 0, 4])[2].zero_()
    assert tensor.tolist() == [0, 1, 0, 0, 0, 0]


def in_another_order(order: Sequence[int]) -> tuple[int, tuple[int, ...], list[object]]:
    """This rank's number in a group of that order, the global ranks by number, and results of every collective."""
    assert dist.group.WORLD is not None
    group = TorchGroup(dist.group.WORLD).in_order(order)
    lengths, splits = (
        list(range(1, group.size + 1)),
        splits_of(group.size, lambda sender, receiver: sender + 2 * receiver),
    )
    results = [
        gather(group, lengths, torch.bfloat16),
        gather(group, [3] * group.size, torch.float32),
        reduce(group, 5, torch.float32, "sum"),
        scatter(group, 3, torch.float32, "sum"),
        spread(group, 4, torch.float32, 1),
        exchange(group, splits, torch.float16),
    ]
    return group.rank, group.ranks, results


def test_ranks_in_another_order_are_numbered_so() -> None:
    """What rank r gets is what rank r of a group in the order of its processes gets, on another process."""
    order = (2, 0, 3, 1)
    plain = pool(4).run(in_another_order, range(4))
    moved = pool(4).run(in_another_order, order)
    assert [rank for rank, _, _ in moved] == [order.index(place) for place in range(4)]
    assert {ranks for _, ranks, _ in moved} == {order}
    for number, rank in enumerate(order):
        torch.testing.assert_close(moved[rank][2], plain[number][2], rtol=0, atol=0, equal_nan=True)
