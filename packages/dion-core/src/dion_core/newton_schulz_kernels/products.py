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
    consume   multiplies: two groups of four warps
    transfer  loads what is added, stores results, announces them: one warp for each group

Of tiles of two blocks (WIDE = 2) each group has 64 of the 128 rows. Tiles of one block the groups take in turn, so that
one multiplies while the other adds and hands over. Either way a group has two parts of 64 x 128, beside each other or
one below the other.

Example: in the sequence of `schedule`, place 7 is tile 1 of product 1 of matrix 0. It starts when counter 0 has
reached 3, by the three tiles of product 0; tiles of two blocks are announced by two warps and count twice. For
alpha = 2, the addition of 3 C and a store with 1 on the diagonal, entry (5, 5) of the tile becomes
2 * (row 5 of A . row 5 of B) + 3 * C[5, 5] + 1 in float32, and is then rounded.

Results depend neither on which program works a tile out nor on when: each tile is summed up in one order.

Legend: as in `schedule`; H = 64 half the rows of a tile, TK the depth of a slice, A, B left and right factor, C what
is added, x and y the two copies of X. "Turned" operands lie in memory with the rows that are multiplied running down.
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
from dion_core.newton_schulz_kernels.loading import load_apply, load_gram, load_pair, make_room
from dion_core.newton_schulz_kernels.schedule import APPLY, FIELDS, GRAM, T, find, is_narrow
from dion_core.newton_schulz_kernels.storing import (
    H,
    add_diagonal,
    hand_over,
    hand_over_both,
    make_box,
    store_both,
    store_symmetric,
)


@gluon.jit
def _produce(
    x, y, w, ring, places, work,
    WIDE: gl.constexpr, TK: gl.constexpr, TALL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fills the ring with the slices of all tiles of this program, in order."""
    listing, counters, total, slots, m, n, _band = work
    at = 0
    product = 0
    start = 0
    before = 0
    number = 0
    place = claimed_place(claim_place(counters + slots))
    while place < total:
        pass_place(place, at, places, number)
        ticket = claim_place(counters + slots)  # the answer is there when this tile is loaded
        product, start, before, kind, own, i, j = find(place, product, start, before, work, WIDE, TALL)
        tile = (i * T, j * (T * WIDE))
        matrix = gl.load(listing + product * FIELDS + 6) + own
        left = gl.load(listing + product * FIELDS + 1) * slots + own
        right = gl.load(listing + product * FIELDS + 2)
        narrow = is_narrow(kind, i, j, WIDE, TALL)
        await_tiles(counters + own, WIDE * before)
        for step in range(gl.cdiv(gl.where(kind == GRAM, n, m), TK)):
            k = step * TK
            room = make_room(ring, at, narrow, WIDE, TK, STAGES)
            if kind == GRAM:
                if right == 0:
                    load_gram(x, tile, matrix, k, m, room, narrow, WIDE, TK, TALL)
                else:
                    load_gram(y, tile, matrix, k, m, room, narrow, WIDE, TK, TALL)
            elif kind == APPLY:
                if right == 0:
                    load_apply(x, w, tile, matrix, left, k, m, n, room, WIDE, TK, TALL)
                else:
                    load_apply(y, w, tile, matrix, left, k, m, n, room, WIDE, TK, TALL)
            else:
                load_pair(w, tile, left, right * slots + own, k, m, room, narrow)
            at += 1
        place = claimed_place(ticket)
        number += 1
    pass_place(place, at, places, number)
    if WIDE == 1:  # the other group waits for a place too
        pass_place(place, at, places, number + 1)


@gluon.jit
def _multiply(
    ring, at, steps, HALF: gl.constexpr, BLOCKS: gl.constexpr, WIDE: gl.constexpr, TK: gl.constexpr,
    A_TURNED: gl.constexpr, B_TURNED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """(ROWS, T * BLOCKS) float32: `steps` slices from number `at` on, multiplied and summed up.

    Of one block at a time this is the whole tile, of two the half with rows HALF * H to HALF * H + H - 1.
    """
    a_ring, b_ring, full, empty = ring
    ROWS: gl.constexpr = T // WIDE
    FIRST: gl.constexpr = HALF * H if WIDE == 2 else 0
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128 * BLOCKS, 16])
    A_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TK, T], gl.float16)
    B_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TK, T * WIDE], gl.float16)
    acc = gl.zeros((ROWS, T * BLOCKS), gl.float32, LAYOUT)
    for step in range(steps):
        slot = at % STAGES
        mbarrier.wait(full.index(slot), at // STAGES & 1)
        if A_TURNED:
            a = a_ring.index(slot)._reinterpret(gl.float16, [TK, T], A_LAYOUT).slice(FIRST, ROWS, dim=1)
            a = a.permute([1, 0])
        else:
            a = a_ring.index(slot).slice(FIRST, ROWS)
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
    """Both (H, T) parts of what a group has of a tile, times alpha; of a tile with one part, that part twice."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    acc = _scale(_multiply(ring, at, steps, HALF, BLOCKS, WIDE, TK, A_TURNED, B_TURNED, STAGES), alpha)
    if WIDE == 1:
        first, second = acc.reshape([2, H, T]).permute([1, 2, 0]).split()
    elif BLOCKS == 1:
        first = acc
        second = acc
    else:
        first, second = acc.reshape([H, 2, T]).permute([0, 2, 1]).split()
    return gl.convert_layout(first, LAYOUT), gl.convert_layout(second, LAYOUT)


@gluon.jit
def _consume(
    w_add, out, ring, box, places, work, HALF: gl.constexpr,
    WIDE: gl.constexpr, TK: gl.constexpr, TALL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Works out group HALF's part of every tile of this program, or every other tile.

    It adds to them and hands them over as the product's operations say, in one piece of code for tiles of all kinds: to
    compile it takes long.
    """
    listing, _counters, total, _slots, m, n, _band = work
    direct, mirror, c_full, c_empty, _out_full, _out_empty = box
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    number = 0
    added = 0
    product = 0
    start = 0
    before = 0
    tile = HALF * (2 - WIDE)
    place, at = receive_place(places, tile, 4)
    while place < total:
        product, start, before, kind, _, i, j = find(place, product, start, before, work, WIDE, TALL)
        steps = gl.cdiv(gl.where(kind == GRAM, n, m), TK)
        alpha = gl.load(listing + product * FIELDS + 3).to(gl.float32, bitcast=True)
        first = gl.load(listing + product * FIELDS + 4)
        last = gl.load(listing + product * FIELDS + 5)
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
        for operation in range(first, last, 4):
            target = gl.load(listing + operation)
            factor = gl.load(listing + operation + 1).to(gl.float32, bitcast=True)
            if gl.load(listing + operation + 2) == 0:
                mbarrier.wait(c_full, added & 1)
                added += 1
                left = _add(left, factor, direct.reshape([H, T]).load(LAYOUT))
                # Of a narrow tile, something that nobody asks for.
                right = _add(right, factor, mirror._reinterpret(gl.float16, [H, T], w_add.layout).load(LAYOUT))
                fence_async_shared()
                mbarrier.arrive(c_empty)
            elif kind == APPLY:
                hand_over_both(left, right, out, box, number, target)
                number += 1
            else:
                for part in gl.static_range(2):
                    block = j * WIDE + part * (WIDE - 1)
                    if block == i:
                        if part:
                            right = add_diagonal(right, factor, HALF if WIDE == 2 else part)
                        else:
                            left = add_diagonal(left, factor, HALF if WIDE == 2 else part)
                    if block <= i:
                        hand_over(right if part else left, box, number, block == i, HALF if WIDE == 2 else part)
                        number += 1
        tile += 3 - WIDE
        place, at = receive_place(places, tile, 4)


@gluon.jit
def _transfer(
    w_add, w_direct, w_mirror, w_corner, x_next, y_next, out, box, places, work,
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
    tile = HALF * (2 - WIDE)
    place, _ = receive_place(places, tile, 1)
    while place < total:
        product, start, before, kind, own, i, j = find(place, product, start, before, work, WIDE, TALL)
        in_batch = gl.load(listing + product * FIELDS + 6) + own
        await_tiles(counters + own, WIDE * before)  # what is added is there
        row = i * T + (HALF * H if WIDE == 2 else 0)
        column = j * (T * WIDE)
        next_row = row + H * (2 - WIDE)
        next_column = column + T * (WIDE - 1)
        first = gl.load(listing + product * FIELDS + 4)
        for operation in range(first, gl.load(listing + product * FIELDS + 5), 4):
            target = gl.load(listing + operation)
            matrix = target * slots + own
            if gl.load(listing + operation + 2) == 0:
                mbarrier.wait(c_empty, added & 1 ^ 1)
                added += 1
                narrow = is_narrow(kind, i, j, WIDE, TALL)
                mbarrier.expect(c_full, H * T * 2, pred=narrow)
                mbarrier.expect(c_full, 2 * H * T * 2, pred=narrow == 0)
                tma.async_copy_global_to_shared(w_add, [matrix * m + row, column], c_full, direct.reshape([H, T]))
                second = mirror._reinterpret(gl.float16, [H, T], w_add.layout)
                tma.async_copy_global_to_shared(
                    w_add, [matrix * m + next_row, next_column], c_full, second, pred=narrow == 0
                )
            elif kind == APPLY:
                mbarrier.wait(out_full, number & 1)
                if target < 0:
                    store_both(out, direct, mirror, in_batch, row, column, next_row, next_column)
                elif target == 0:
                    store_both(x_next, direct, mirror, in_batch, row, column, next_row, next_column)
                else:
                    store_both(y_next, direct, mirror, in_batch, row, column, next_row, next_column)
                tma.store_wait(0)
                mbarrier.arrive(out_empty)
                number += 1
            else:
                for part in gl.static_range(2):
                    block = j * WIDE + part * (WIDE - 1)
                    if block <= i:
                        mbarrier.wait(out_full, number & 1)
                        store_symmetric(
                            w_direct, w_mirror, w_corner, direct, mirror, matrix, i, block, HALF if WIDE == 2 else part
                        )
                        tma.store_wait(0)
                        mbarrier.arrive(out_empty)
                        number += 1
        announce_tile(counters + own)
        tile += 3 - WIDE
        place, _ = receive_place(places, tile, 1)


# Nothing is compiled anew for a size that happens to be 1 or a multiple of 16.
@gluon.jit(do_not_specialize=["total", "slots", "m", "n", "band"])
def products_kernel(
    x_rows, x_cols, x_apply, x_next, y_rows, y_cols, y_apply, y_next, out,
    w_rows, w_cols, w_add, w_direct, w_mirror, w_corner, listing, counters,
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
        mbarrier.init(empty.index(slot), count=WIDE)
    for number in gl.static_range(8):
        mbarrier.init(box_barriers.index(number), count=1)
    next_place = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    next_slice = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    place_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    place_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(2):
        mbarrier.init(place_full.index(number), count=1)
        mbarrier.init(place_empty.index(number), count=2 * WIDE)
    fence_async_shared()
    places = (next_place, next_slice, place_full, place_empty)
    ring = (a_ring, b_ring, full, empty)
    box_0 = make_box(direct, mirror, box_barriers, 0)
    box_1 = make_box(direct, mirror, box_barriers, 1)
    x = (x_rows, x_cols, x_apply)
    y = (y_rows, y_cols, y_apply)
    work = (listing, counters, total, slots, m, n, band)
    gl.warp_specialize(
        [
            (_consume, (w_add, out, ring, box_0, places, work, 0, WIDE, TK, TALL, STAGES)),
            (_consume, (w_add, out, ring, box_1, places, work, 1, WIDE, TK, TALL, STAGES)),
            (_produce, (x, y, (w_rows, w_cols), ring, places, work, WIDE, TK, TALL, STAGES)),
            (_transfer, (w_add, w_direct, w_mirror, w_corner, x_next, y_next, out, box_0, places, work, 0, WIDE, TALL)),
            (_transfer, (w_add, w_direct, w_mirror, w_corner, x_next, y_next, out, box_1, places, work, 1, WIDE, TALL)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )
