"""One kernel for a whole list of products of the Newton-Schulz iteration, for Hopper's tensor cores.

The list (module `listing`) names products of three kinds: the Gram matrix of X, products of symmetric m x m matrices
that commute, and Q X. The first two are symmetric: only the tiles on and below the diagonal are computed, and what
lies below is stored a second time, transposed. Results are symmetric to the bit, also within the blocks on the
diagonal: an asymmetric rounding error would not stay harmless as it does in whole products.

Programs claim places of the sequence (`schedule`) one by one, and start a tile as soon as the products before it are
complete for its slot: no product waits for the last tile of the one before, and there is one launch. What a tile
waits for has been claimed before it, by programs that run. So no program has to wait for one that does not, be it
because a collective holds its multiprocessor. Warps have fixed tasks and hand shared memory to each other:

    produce   claims places, loads slices of the operands, up to STAGES ahead, across tiles and products
    consume   multiplies: two groups of four warps, each 64 of the 128 rows of a tile
    transfer  loads what is added, stores results, announces them: one warp for each group

Example: in the sequence of `schedule`, place 7 is tile 1 of product 1 of matrix 0. It starts when counter 0 has
reached 6: three tiles of product 0, each announced by two warps. For alpha = 2, the addition of 3 C and a store with
1 on the diagonal, entry (5, 5) of the tile becomes 2 * (row 5 of A . row 5 of B) + 3 * C[5, 5] + 1 in float32, and is
then rounded.

Results depend neither on which program works a tile out nor on when: each tile is summed up in one order.

Legend: as in `schedule`; H = 64 half the rows of a tile, TK the depth of a slice, A, B left and right factor, C what
is added. "Turned" operands lie in memory with the rows that are multiplied running down.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from dion_core.newton_schulz_kernels.counters import (
    announce_tile,
    await_tiles,
    claim_place,
    claimed_place,
    pass_place,
    receive_place,
)
from dion_core.newton_schulz_kernels.schedule import APPLY, FIELDS, GRAM, T, find, is_narrow
from dion_core.newton_schulz_kernels.storing import H, add_diagonal, hand_over, make_box, store_symmetric


@gluon.jit
def _load_turned(source, matrix, k, column, slot, ready, TK: gl.constexpr, LENGTH: gl.constexpr):
    """Loads rows k to k + TK of LENGTH columns."""
    target = slot._reinterpret(gl.float16, [1, TK, LENGTH], source.layout)
    tma.async_copy_global_to_shared(source, [matrix, k, column], ready, target)


@gluon.jit
def _load_pair(a_source, b_source, a_at, b_at, k, a_slot, b_slot, ready, narrow):
    """Loads TK columns from k on: rows of A, and as many of B, or if narrow one block of them by A's descriptor."""
    tma.async_copy_global_to_shared(a_source, [a_at, k], ready, a_slot)
    if narrow:
        tma.async_copy_global_to_shared(a_source, [b_at, k], ready, b_slot.slice(0, T))
    else:
        tma.async_copy_global_to_shared(b_source, [b_at, k], ready, b_slot)


@gluon.jit
def _produce(
    x_rows, x_cols, x_apply, w_rows, w_cols, ring, places, work,
    WIDE: gl.constexpr, TK: gl.constexpr, TALL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fills the ring with the slices of all tiles of this program, in order."""
    listing, counters, total, slots, m, n, _band = work
    a_ring, b_ring, full, empty = ring
    at = 0
    product = 0
    start = 0
    before = 0
    tile = 0
    place = claimed_place(claim_place(counters + slots))
    while place < total:
        pass_place(place, places, tile)
        ticket = claim_place(counters + slots)  # the answer is there when this tile is loaded
        product, start, before, kind, own, i, j = find(place, product, start, before, work, WIDE, TALL)
        row = i * T
        column = j * (T * WIDE)
        x = gl.load(listing + product * FIELDS + 6) + own
        a = gl.load(listing + product * FIELDS + 1) * slots + own
        b = gl.load(listing + product * FIELDS + 2) * slots + own
        narrow = is_narrow(kind, i, j, WIDE, TALL)
        await_tiles(counters + own, 2 * before)
        for step in range(gl.cdiv(gl.where(kind == GRAM, n, m), TK)):
            slot = at % STAGES
            k = step * TK
            ready = full.index(slot)
            a_slot = a_ring.index(slot)
            b_slot = b_ring.index(slot)
            mbarrier.wait(empty.index(slot), at // STAGES & 1 ^ 1)
            mbarrier.expect(ready, 2 * T * TK * 2, pred=narrow)
            mbarrier.expect(ready, (1 + WIDE) * T * TK * 2, pred=narrow == 0)
            if kind == GRAM:
                if TALL:
                    _load_turned(x_rows, x, k, row, a_slot, ready, TK, T)
                    _load_turned(x_cols, x, k, column, b_slot, ready, TK, T * WIDE)
                else:
                    _load_pair(x_rows, x_cols, x * m + row, x * m + column, k, a_slot, b_slot, ready, narrow)
            elif kind == APPLY:
                if TALL:  # rows of X times rows of Q, which is symmetric
                    tma.async_copy_global_to_shared(x_apply, [x * n + row, k], ready, a_slot)
                    tma.async_copy_global_to_shared(w_cols, [a * m + column, k], ready, b_slot)
                else:
                    tma.async_copy_global_to_shared(w_rows, [a * m + row, k], ready, a_slot)
                    _load_turned(x_apply, x, k, column, b_slot, ready, TK, T * WIDE)
            else:
                _load_pair(w_rows, w_cols, a * m + row, b * m + column, k, a_slot, b_slot, ready, narrow)
            at += 1
        place = claimed_place(ticket)
        tile += 1
    pass_place(place, places, tile)


@gluon.jit
def _multiply(
    ring, at, steps, HALF: gl.constexpr, BLOCKS: gl.constexpr, WIDE: gl.constexpr, TK: gl.constexpr,
    A_TURNED: gl.constexpr, B_TURNED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """(H, T * BLOCKS) float32: `steps` slices from number `at` on, multiplied and summed up."""
    a_ring, b_ring, full, empty = ring
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128 * BLOCKS, 16])
    A_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TK, T], gl.float16)
    B_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TK, T * WIDE], gl.float16)
    acc = gl.zeros((H, T * BLOCKS), gl.float32, LAYOUT)
    for step in range(steps):
        slot = at % STAGES
        mbarrier.wait(full.index(slot), at // STAGES & 1)
        if A_TURNED:
            a = a_ring.index(slot)._reinterpret(gl.float16, [TK, T], A_LAYOUT).slice(HALF * H, H, dim=1)
            a = a.permute([1, 0])
        else:
            a = a_ring.index(slot).slice(HALF * H, H)
        if B_TURNED:
            b = b_ring.index(slot)._reinterpret(gl.float16, [TK, T * WIDE], B_LAYOUT)
        else:
            b = b_ring.index(slot).slice(0, T * BLOCKS).permute([1, 0])
        acc = warpgroup_mma(a, b, acc, is_async=True)
        # This one is still running; the one before is not, and its slot is free.
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES), pred=step > 0)
        at += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES))
    return acc


@gluon.jit
def _add(value, factor, addend):
    """The sum value + factor * addend, rounded once, for an addend in float16.

    Written out, it is the same instructions, but LLVM searches the sums of a whole tile for vectors, which takes longer
    than all else that it does.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .f32 wide; cvt.f32.f16 wide, $3; fma.rn.f32 $0, $2, wide, $1; }", "=f,f,f,h", [value, factor, addend],
        dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _scale(value, factor):
    """The product value * factor; the compiler cannot move it to behind the place where the values of cases meet."""
    return gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [value, factor], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _work_out(
    ring, at, steps, alpha, HALF: gl.constexpr, BLOCKS: gl.constexpr, WIDE: gl.constexpr, TK: gl.constexpr,
    A_TURNED: gl.constexpr, B_TURNED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Left and right block of H rows of a tile of BLOCKS blocks, times alpha; of one block, that block twice."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    acc = _scale(_multiply(ring, at, steps, HALF, BLOCKS, WIDE, TK, A_TURNED, B_TURNED, STAGES), alpha)
    if BLOCKS == 1:
        left = gl.convert_layout(acc, LAYOUT)
        right = left
    else:
        left, right = acc.reshape([H, 2, T]).permute([0, 2, 1]).split()
        left = gl.convert_layout(left, LAYOUT)
        right = gl.convert_layout(right, LAYOUT)
    return left, right


@gluon.jit
def _consume(
    w_add, out, ring, box, places, work, HALF: gl.constexpr,
    WIDE: gl.constexpr, TK: gl.constexpr, TALL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Multiplies rows HALF * H to HALF * H + H - 1 of every tile of this program.

    It adds to them and hands them over as the product's operations say, in one piece of code for tiles of all kinds: to
    compile it takes long.
    """
    listing, _counters, total, _slots, m, n, _band = work
    direct, mirror, c_full, c_empty, _out_full, _out_empty = box
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    at = 0
    number = 0
    added = 0
    product = 0
    start = 0
    before = 0
    tile = 0
    place = receive_place(places, tile, 4)
    while place < total:
        product, start, before, kind, _, i, j = find(place, product, start, before, work, WIDE, TALL)
        steps = gl.cdiv(gl.where(kind == GRAM, n, m), TK)
        alpha = gl.load(listing + product * FIELDS + 3).to(gl.float32, bitcast=True)
        # Each case ends with `_scale`: where accumulators of two cases met, the compiler would make every product wait
        # for the one before. So it would if two cases were the same code, which it joins.
        if TALL and kind == GRAM:
            left, right = _work_out(ring, at, steps, alpha, HALF, WIDE, WIDE, TK, True, True, STAGES)
        elif not TALL and kind == APPLY:
            left, right = _work_out(ring, at, steps, alpha, HALF, WIDE, WIDE, TK, False, True, STAGES)
        elif WIDE == 2 and not TALL and is_narrow(kind, i, j, WIDE, TALL):
            left, right = _work_out(ring, at, steps, alpha, HALF, 1, WIDE, TK, False, False, STAGES)
        else:
            left, right = _work_out(ring, at, steps, alpha, HALF, WIDE, WIDE, TK, False, False, STAGES)
        at += steps
        first = gl.load(listing + product * FIELDS + 4)
        for operation in range(first, gl.load(listing + product * FIELDS + 5), 4):
            target = gl.load(listing + operation)
            factor = gl.load(listing + operation + 1).to(gl.float32, bitcast=True)
            if gl.load(listing + operation + 2) == 0:
                mbarrier.wait(c_full, added & 1)
                added += 1
                left = _add(left, factor, direct.reshape([H, T]).load(LAYOUT))
                if WIDE == 2:  # of a narrow tile, something that nobody asks for
                    right = _add(right, factor, mirror._reinterpret(gl.float16, [H, T], w_add.layout).load(LAYOUT))
                fence_async_shared()
                mbarrier.arrive(c_empty)
            else:
                if (kind != APPLY) & (i // WIDE == j):
                    left = add_diagonal(left, factor, i * T + HALF * H, j * (T * WIDE))
                    if WIDE == 2:
                        right = add_diagonal(right, factor, i * T + HALF * H, j * (T * WIDE) + T)
                for part in gl.static_range(WIDE):
                    block = j * WIDE + part
                    if (kind == APPLY) | (block <= i):
                        hand_over(right if part else left, out, box, number, kind, target, i == block, HALF)
                        number += 1
        tile += 1
        place = receive_place(places, tile, 4)


@gluon.jit
def _transfer(
    w_add, w_direct, w_mirror, w_corner, x_next, out, box, places, work,
    HALF: gl.constexpr, WIDE: gl.constexpr, TALL: gl.constexpr,
):  # fmt: skip
    """Loads C for, stores and announces the blocks of one consuming group."""
    listing, counters, total, slots, m, _n, _band = work
    direct, mirror, c_full, c_empty, out_full, out_empty = box
    number = 0
    added = 0
    product = 0
    start = 0
    before = 0
    tile = 0
    place = receive_place(places, tile, 1)
    while place < total:
        product, start, before, kind, own, i, j = find(place, product, start, before, work, WIDE, TALL)
        row = i * T + HALF * H
        x = gl.load(listing + product * FIELDS + 6) + own
        await_tiles(counters + own, 2 * before)  # what is added is there
        first = gl.load(listing + product * FIELDS + 4)
        for operation in range(first, gl.load(listing + product * FIELDS + 5), 4):
            target = gl.load(listing + operation)
            if gl.load(listing + operation + 2) == 0:
                mbarrier.wait(c_empty, added & 1 ^ 1)
                added += 1
                narrow = is_narrow(kind, i, j, WIDE, TALL)
                c_row = (target * slots + own) * m + row
                mbarrier.expect(c_full, H * T * 2, pred=narrow)
                mbarrier.expect(c_full, H * T * 2 * WIDE, pred=narrow == 0)
                tma.async_copy_global_to_shared(w_add, [c_row, j * (T * WIDE)], c_full, direct.reshape([H, T]))
                if WIDE == 2:
                    right = mirror._reinterpret(gl.float16, [H, T], w_add.layout)
                    tma.async_copy_global_to_shared(w_add, [c_row, j * (T * WIDE) + T], c_full, right, pred=narrow == 0)
            else:
                for part in gl.static_range(WIDE):
                    block = j * WIDE + part
                    if (kind == APPLY) | (block <= i):
                        mbarrier.wait(out_full, number & 1)
                        if kind != APPLY:
                            store_symmetric(
                                w_direct, w_mirror, w_corner, direct, mirror, target * slots + own, i, block, HALF
                            )
                        elif target < 0:
                            result = direct._reinterpret(out.dtype, [1, H, T], out.layout)
                            tma.async_copy_shared_to_global(out, [x, row, block * T], result)
                        else:
                            tma.async_copy_shared_to_global(x_next, [x, row, block * T], direct)
                        tma.store_wait(0)
                        mbarrier.arrive(out_empty)
                        number += 1
        announce_tile(counters + own)
        tile += 1
        place = receive_place(places, tile, 1)


# Nothing is compiled anew for a size that happens to be 1 or a multiple of 16.
@gluon.jit(do_not_specialize=["total", "slots", "m", "n", "band"])
def products_kernel(
    x_rows, x_cols, x_apply, x_next, out, w_rows, w_cols, w_add, w_direct, w_mirror, w_corner, listing, counters,
    total, slots, m, n, band,
    WIDE: gl.constexpr, TK: gl.constexpr, TALL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Runs all tiles of the sequence; see the module."""
    a_ring = gl.allocate_shared_memory(gl.float16, [STAGES, T, TK], w_rows.layout)
    b_ring = gl.allocate_shared_memory(gl.float16, [STAGES, T * WIDE, TK], w_cols.layout)
    direct = gl.allocate_shared_memory(gl.float16, [2, 1, H, T], w_direct.layout)
    mirror = gl.allocate_shared_memory(gl.float16, [2, 1, T, H], w_mirror.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    box_barriers = gl.allocate_shared_memory(gl.int64, [8, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    for number in gl.static_range(8):
        mbarrier.init(box_barriers.index(number), count=1)
    next_place = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    place_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    place_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(2):
        mbarrier.init(place_full.index(number), count=1)
        mbarrier.init(place_empty.index(number), count=4)
    fence_async_shared()
    places = (next_place, place_full, place_empty)
    ring = (a_ring, b_ring, full, empty)
    box_0 = make_box(direct, mirror, box_barriers, 0)
    box_1 = make_box(direct, mirror, box_barriers, 1)
    work = (listing, counters, total, slots, m, n, band)
    gl.warp_specialize(
        [
            (_consume, (w_add, out, ring, box_0, places, work, 0, WIDE, TK, TALL, STAGES)),
            (_consume, (w_add, out, ring, box_1, places, work, 1, WIDE, TK, TALL, STAGES)),
            (_produce, (x_rows, x_cols, x_apply, w_rows, w_cols, ring, places, work, WIDE, TK, TALL, STAGES)),
            (_transfer, (w_add, w_direct, w_mirror, w_corner, x_next, out, box_0, places, work, 0, WIDE, TALL)),
            (_transfer, (w_add, w_direct, w_mirror, w_corner, x_next, out, box_1, places, work, 1, WIDE, TALL)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )
