"""One kernel for a whole list of products of the Newton-Schulz iteration, for Hopper's tensor cores.

The list (`dion_core.kernels.listing`) names products of three kinds: the Gram matrix of X, products of symmetric
m x m matrices that commute, and Q X. The first two are symmetric, so that only the tiles on and below the diagonal
are computed and each is stored a second time, transposed. All tiles of all products of all matrices form one
sequence. Program p of P takes tiles p, p + P, p + 2 P, and starts a tile as soon as the products before it are
complete *for its matrix*: no product waits for the slowest tile of the one before, and there is one launch.

Warps of a program have fixed tasks, and pass shared memory to each other by barriers there:

    produce   loads slices of the operands, up to STAGES ahead, across tiles and products
    consume   multiplies: two groups of four warps, each 64 of the 128 rows of a tile
    transfer  loads what is added to a product, stores results, announces them: one warp for each group

Example: B = 2 matrices of m = 256, so count = 2 rows of tiles, and with WIDE = 1 tiles = 3 per symmetric product:
(0, 0), (1, 0), (1, 1). The sequence is product 0 matrix 0 tiles 0 1 2, product 0 matrix 1 tiles 3 4 5, product 1
matrix 0 tiles 6 7 8, and so on. Tile 7 starts when counter 0 is at least 6: three tiles, announced by two warps each.

Every program has to run at the same time, which the cooperative launch makes sure of. A result depends neither on the
number of programs nor on timing: each tile is summed by one program in one order.

Legend: B matrices, m order of the symmetric matrices, n the longer side of X, T = 128 the side of a block; a tile is
T rows of WIDE blocks; TK the depth of a slice.
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

T = gl.constexpr(128)
H = gl.constexpr(64)  # rows of a tile that one group of warps multiplies
FIELDS = gl.constexpr(8)  # of a row of the list: kind, a, b, c, d, alpha, beta, gamma
GRAM = gl.constexpr(0)
APPLY = gl.constexpr(2)


@gluon.jit
def _square_root(value):
    """The largest s with s (s + 1) / 2 <= value, up to one too many or too few."""
    return (gl.sqrt((8 * value + 1).to(gl.float32)) * 0.5 - 0.5).to(gl.int32)


@gluon.jit
def _triangle_row(index, WIDE: gl.constexpr):
    """The row s of WIDE x WIDE blocks that holds tile `index`, if rows are counted one after another."""
    s = _square_root(index // WIDE)
    s = gl.where(WIDE * s * (s + 1) // 2 > index, s - 1, s)
    return gl.where(WIDE * (s + 1) * (s + 2) // 2 <= index, s + 1, s)


@gluon.jit
def triangle_tile(index, count, WIDE: gl.constexpr, BAND: gl.constexpr):
    """(row, column) of tile `index` on or below the diagonal, in bands of BAND rows for the sake of the L2 cache.

    Example: WIDE = 1, BAND = 2, count = 4: (0, 0), (1, 0), (1, 1), then (2, 0), (3, 0), (2, 1), (3, 1), (2, 2),
    (3, 2), (3, 3).
    """
    first = _triangle_row(index, WIDE) // BAND * BAND
    offset = index - WIDE * first * (first + 1) // 2
    height = gl.minimum(BAND * WIDE, count - first * WIDE)
    rest = offset - first * height  # counts the tiles of the band's own triangle
    s = _triangle_row(gl.maximum(rest, 0), WIDE)
    in_row = gl.maximum(rest, 0) - WIDE * s * (s + 1) // 2
    row = gl.where(rest < 0, offset % height, s * WIDE + in_row // (s + 1))
    column = gl.where(rest < 0, offset // height, first + in_row % (s + 1))
    return first * WIDE + row, column


@gluon.jit
def _rectangle_tile(index, count, columns, BAND: gl.constexpr):
    """(row, column) of tile `index` of count x columns tiles, in bands of BAND rows, columns first."""
    first = index // (columns * BAND) * BAND
    offset = index - first * columns
    height = gl.minimum(BAND, count - first)
    return first + offset % height, offset // height


@gluon.jit
def _find(index, product, start, before, listing, batch, m, n, WIDE: gl.constexpr, BAND: gl.constexpr, TALL: gl.constexpr):
    """Where tile `index` of the sequence belongs, going on from the product of an earlier one.

    Returns its product, that product's first tile in the sequence, the number of tiles of one matrix before that
    product, its kind, the matrix, and the row and column of the tile.
    """
    count = gl.cdiv(m, T)
    squares = count // WIDE
    triangle = WIDE * squares * (squares + 1) // 2 + count % WIDE * (squares + 1)
    rows = gl.cdiv(n, T) if TALL else count
    columns = gl.cdiv(m, T * WIDE) if TALL else gl.cdiv(n, T * WIDE)
    kind = gl.load(listing + product * FIELDS)
    tiles = gl.where(kind == APPLY, rows * columns, triangle)
    while index >= start + batch * tiles:
        start += batch * tiles
        before += tiles
        product += 1
        kind = gl.load(listing + product * FIELDS)
        tiles = gl.where(kind == APPLY, rows * columns, triangle)
    matrix = (index - start) // tiles
    place = (index - start) % tiles
    if kind == APPLY:
        i, j = _rectangle_tile(place, rows, columns, BAND * 2)
    else:
        i, j = triangle_tile(place, count, WIDE, BAND)
    return product, start, before, kind, matrix, i, j


@gluon.jit
def _announced(counter):
    """The number of tiles announced, read so that what they stored is visible afterwards."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [counter], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _await(counter, target):
    """Returns when `target` tiles are announced; loads by the copy engine may follow."""
    done = _announced(counter)
    while done < target:
        done = _announced(counter)
    gl.inline_asm_elementwise(
        "fence.proxy.async; mov.u32 $0, $1;", "=r,r", [done], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _announce(counter):
    """Adds one to `counter` once all stores of this warp have reached memory (not only left shared memory)."""
    one = gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async; fence.acq_rel.gpu; bar.warp.sync 0xffffffff; mov.u32 $0, 1;",
        "=r,r",
        [0],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    gl.atomic_add(counter, one, sem="release", scope="gpu")


@gluon.jit
def _produce(x_rows, x_cols, x_apply, w_rows, w_cols, listing, counters, a_ring, b_ring, full, empty, total, batch, m, n,
             WIDE: gl.constexpr, TK: gl.constexpr, BAND: gl.constexpr, TALL: gl.constexpr, STAGES: gl.constexpr):
    """Fills the rings with the slices of all tiles of this program, in order."""
    at = 0
    product = 0
    start = 0
    before = 0
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        product, start, before, kind, matrix, i, j = _find(
            index, product, start, before, listing, batch, m, n, WIDE, BAND, TALL
        )
        row = i * T
        col = j * (T * WIDE)
        a = gl.load(listing + product * FIELDS + 1) * batch + matrix
        b = gl.load(listing + product * FIELDS + 2) * batch + matrix
        # The second block of a tile that sticks out above the diagonal is left out.
        narrow = (kind != APPLY) & (WIDE * j + WIDE - 1 > i)
        steps = gl.cdiv(gl.where(kind == GRAM, n, m), TK)
        _await(counters + matrix, 2 * before)
        for step in range(steps):
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
                    tma.async_copy_global_to_shared(x_rows, [a, k, row], ready, a_slot._reinterpret(gl.float16, [1, TK, T], x_rows.layout))
                    if narrow:
                        tma.async_copy_global_to_shared(x_rows, [a, k, col], ready, b_slot.slice(0, T)._reinterpret(gl.float16, [1, TK, T], x_rows.layout))
                    else:
                        tma.async_copy_global_to_shared(x_cols, [a, k, col], ready, b_slot._reinterpret(gl.float16, [1, TK, T * WIDE], x_cols.layout))
                else:
                    tma.async_copy_global_to_shared(x_rows, [a * m + row, k], ready, a_slot)
                    if narrow:
                        tma.async_copy_global_to_shared(x_rows, [a * m + col, k], ready, b_slot.slice(0, T))
                    else:
                        tma.async_copy_global_to_shared(x_cols, [a * m + col, k], ready, b_slot)
            elif kind == APPLY:
                if TALL:
                    tma.async_copy_global_to_shared(x_apply, [b * n + row, k], ready, a_slot)
                    tma.async_copy_global_to_shared(w_cols, [a * m + col, k], ready, b_slot)
                else:
                    tma.async_copy_global_to_shared(w_rows, [a * m + row, k], ready, a_slot)
                    tma.async_copy_global_to_shared(x_apply, [b, k, col], ready, b_slot._reinterpret(gl.float16, [1, TK, T * WIDE], x_apply.layout))
            else:
                tma.async_copy_global_to_shared(w_rows, [a * m + row, k], ready, a_slot)
                if narrow:
                    tma.async_copy_global_to_shared(w_rows, [b * m + col, k], ready, b_slot.slice(0, T))
                else:
                    tma.async_copy_global_to_shared(w_cols, [b * m + col, k], ready, b_slot)
            at += 1


@gluon.jit
def _multiply(a_ring, b_ring, full, empty, at, steps, HALF: gl.constexpr, BLOCKS: gl.constexpr, WIDE: gl.constexpr,
              TK: gl.constexpr, A_TURNED: gl.constexpr, B_TURNED: gl.constexpr, STAGES: gl.constexpr):
    """(64, T * BLOCKS) float32: `steps` slices from slot `at` on, multiplied and summed."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128 * BLOCKS, 16])
    A_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TK, T], gl.float16)
    B_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TK, T * WIDE], gl.float16)
    acc = gl.zeros((H, T * BLOCKS), gl.float32, LAYOUT)
    for step in range(steps):
        slot = at % STAGES
        mbarrier.wait(full.index(slot), at // STAGES & 1)
        a = a_ring.index(slot)
        b = b_ring.index(slot)
        if A_TURNED:
            a = a._reinterpret(gl.float16, [TK, T], A_LAYOUT).slice(HALF * H, H, dim=1).permute([1, 0])
        else:
            a = a.slice(HALF * H, H)
        if B_TURNED:
            b = b._reinterpret(gl.float16, [TK, T * WIDE], B_LAYOUT)
            if BLOCKS < WIDE:
                b = b.slice(0, T * BLOCKS, dim=1)
        else:
            if BLOCKS < WIDE:
                b = b.slice(0, T * BLOCKS)
            b = b.permute([1, 0])
        acc = warpgroup_mma(a, b, acc, is_async=True)
        # One product is still running; the slot of the one before is free.
        acc = warpgroup_mma_wait(1, deps=[acc])
        mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES), pred=step > 0)
        at += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(empty.index((at + STAGES - 1) % STAGES))
    return acc


@gluon.jit
def _blocks(acc, BLOCKS: gl.constexpr):
    """The two (64, T) blocks of an accumulator; a single one twice."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    if BLOCKS == 1:
        left = acc
        right = acc
    else:
        left, right = acc.reshape([H, 2, T]).permute([0, 2, 1]).split()
    return gl.convert_layout(left, LAYOUT), gl.convert_layout(right, LAYOUT)


@gluon.jit
def _multiply_kind(kind, a_ring, b_ring, full, empty, at, steps, HALF: gl.constexpr, BLOCKS: gl.constexpr,
                   WIDE: gl.constexpr, TK: gl.constexpr, TALL: gl.constexpr, STAGES: gl.constexpr):
    """The blocks of a tile of any kind: X itself lies the other way round as A and B of X^T X, or as B of Q X."""
    if TALL:
        if kind == GRAM:
            acc = _multiply(a_ring, b_ring, full, empty, at, steps, HALF, BLOCKS, WIDE, TK, True, True, STAGES)
        else:
            acc = _multiply(a_ring, b_ring, full, empty, at, steps, HALF, BLOCKS, WIDE, TK, False, False, STAGES)
    else:
        if kind == APPLY:
            acc = _multiply(a_ring, b_ring, full, empty, at, steps, HALF, BLOCKS, WIDE, TK, False, True, STAGES)
        else:
            acc = _multiply(a_ring, b_ring, full, empty, at, steps, HALF, BLOCKS, WIDE, TK, False, False, STAGES)
    left, right = _blocks(acc, BLOCKS)
    return left, right


@gluon.jit
def _emit(value, direct, mirror, out_full, out_empty, number, kind, d, out):
    """Hands a (64, T) block to the transferring warp."""
    mbarrier.wait(out_empty, number & 1 ^ 1)
    if (kind == APPLY) & (d < 0):
        direct._reinterpret(out.dtype, [1, H, T], out.layout).reshape([H, T]).store(value.to(out.dtype))
    else:
        narrow = value.to(gl.float16)
        direct.reshape([H, T]).store(narrow)
        if kind != APPLY:
            mirror.reshape([T, H]).permute([1, 0]).store(narrow)
    fence_async_shared()
    mbarrier.arrive(out_full)


@gluon.jit
def _add_diagonal(value, gamma, row, col):
    """`value` plus gamma where row and column of the whole matrix are the same."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    i = row + gl.arange(0, H, layout=gl.SliceLayout(1, LAYOUT))
    j = col + gl.arange(0, T, layout=gl.SliceLayout(0, LAYOUT))
    return gl.where(i[:, None] == j[None, :], value + gamma, value)


@gluon.jit
def _consume(w_add, out, listing, a_ring, b_ring, direct, mirror, full, empty, c_full, out_full, out_empty, total, batch, m, n,
             HALF: gl.constexpr, WIDE: gl.constexpr, TK: gl.constexpr, BAND: gl.constexpr, TALL: gl.constexpr, STAGES: gl.constexpr):
    """Multiplies rows HALF * 64 to HALF * 64 + 63 of every tile, and hands alpha A B + beta C + gamma I on."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    at = 0
    number = 0
    added = 0
    product = 0
    start = 0
    before = 0
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        product, start, before, kind, matrix, i, j = _find(
            index, product, start, before, listing, batch, m, n, WIDE, BAND, TALL
        )
        c = gl.load(listing + product * FIELDS + 3)
        d = gl.load(listing + product * FIELDS + 4)
        alpha = gl.load(listing + product * FIELDS + 5).to(gl.float32, bitcast=True)
        beta = gl.load(listing + product * FIELDS + 6).to(gl.float32, bitcast=True)
        gamma = gl.load(listing + product * FIELDS + 7).to(gl.float32, bitcast=True)
        narrow = (kind != APPLY) & (WIDE * j + WIDE - 1 > i)
        steps = gl.cdiv(gl.where(kind == GRAM, n, m), TK)
        if WIDE == 1:
            left, right = _multiply_kind(kind, a_ring, b_ring, full, empty, at, steps, HALF, 1, WIDE, TK, TALL, STAGES)
        else:
            if narrow:
                left, right = _multiply_kind(kind, a_ring, b_ring, full, empty, at, steps, HALF, 1, WIDE, TK, TALL, STAGES)
            else:
                left, right = _multiply_kind(kind, a_ring, b_ring, full, empty, at, steps, HALF, 2, WIDE, TK, TALL, STAGES)
        at += steps
        left *= alpha
        right *= alpha
        if c >= 0:
            mbarrier.wait(c_full, added)
            added ^= 1
            left += beta * direct.reshape([H, T]).load(LAYOUT).to(gl.float32)
            if WIDE == 2:
                right += beta * mirror._reinterpret(gl.float16, [H, T], w_add.layout).load(LAYOUT).to(gl.float32)
        if (kind != APPLY) & (i // WIDE == j):
            left = _add_diagonal(left, gamma, i * T + HALF * H, j * (T * WIDE))
            if WIDE == 2:
                right = _add_diagonal(right, gamma, i * T + HALF * H, j * (T * WIDE) + T)
        _emit(left, direct, mirror, out_full, out_empty, number, kind, d, out)
        number += 1
        if WIDE == 2:
            if not narrow:
                _emit(right, direct, mirror, out_full, out_empty, number, kind, d, out)
                number += 1


@gluon.jit
def _transfer(w_add, w_direct, w_mirror, x_direct, out, listing, counters, direct, mirror, c_full, out_full, out_empty,
              total, batch, m, n, HALF: gl.constexpr, WIDE: gl.constexpr, BAND: gl.constexpr, TALL: gl.constexpr):
    """Loads C for, stores and announces the blocks of one consuming group."""
    number = 0
    product = 0
    start = 0
    before = 0
    for index in range(gl.program_id(0), total, gl.num_programs(0)):
        product, start, before, kind, matrix, i, j = _find(
            index, product, start, before, listing, batch, m, n, WIDE, BAND, TALL
        )
        row = i * T + HALF * H
        c = gl.load(listing + product * FIELDS + 3)
        d = gl.load(listing + product * FIELDS + 4)
        target = d * batch + matrix
        if c >= 0:
            _await(counters + matrix, 2 * before)
            mbarrier.expect(c_full, H * T * 2 * WIDE)
            c_row = (c * batch + matrix) * m + row
            tma.async_copy_global_to_shared(w_add, [c_row, j * (T * WIDE)], c_full, direct.reshape([H, T]))
            if WIDE == 2:
                c_right = mirror._reinterpret(gl.float16, [H, T], w_add.layout)
                tma.async_copy_global_to_shared(w_add, [c_row, j * (T * WIDE) + T], c_full, c_right)
        for part in gl.static_range(WIDE):
            block = j * WIDE + part
            if (kind == APPLY) | (block <= i):
                mbarrier.wait(out_full, number & 1)
                if kind == APPLY:
                    if d < 0:
                        tma.async_copy_shared_to_global(out, [matrix, row, block * T], direct._reinterpret(out.dtype, [1, H, T], out.layout))
                    else:
                        tma.async_copy_shared_to_global(x_direct, [target, row, block * T], direct)
                else:
                    tma.async_copy_shared_to_global(w_direct, [target, row, block * T], direct)
                    if block < i:
                        tma.async_copy_shared_to_global(w_mirror, [target, block * T, row], mirror)
                tma.store_wait(0)
                mbarrier.arrive(out_empty)
                number += 1
        _announce(counters + matrix)


# Nothing is compiled anew for a size that happens to be 1 or a multiple of 16.
@gluon.jit(do_not_specialize=["total", "batch", "m", "n"])
def products_kernel(x_rows, x_cols, x_apply, x_direct, out, w_rows, w_cols, w_add, w_direct, w_mirror, listing, counters, total, batch, m, n,
                    WIDE: gl.constexpr, TK: gl.constexpr, BAND: gl.constexpr, TALL: gl.constexpr, STAGES: gl.constexpr):
    """Runs all tiles of the sequence; see the module."""
    a_ring = gl.allocate_shared_memory(gl.float16, [STAGES, T, TK], w_rows.layout)
    b_ring = gl.allocate_shared_memory(gl.float16, [STAGES, T * WIDE, TK], w_cols.layout)
    direct = gl.allocate_shared_memory(gl.float16, [2, 1, H, T], w_direct.layout)
    mirror = gl.allocate_shared_memory(gl.float16, [2, 1, T, H], w_mirror.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    c_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    out_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    out_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    for half in gl.static_range(2):
        mbarrier.init(c_full.index(half), count=1)
        mbarrier.init(out_full.index(half), count=1)
        mbarrier.init(out_empty.index(half), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (w_add, out, listing, a_ring, b_ring, direct.index(0), mirror.index(0), full, empty, c_full.index(0), out_full.index(0), out_empty.index(0), total, batch, m, n, 0, WIDE, TK, BAND, TALL, STAGES)),
            (_consume, (w_add, out, listing, a_ring, b_ring, direct.index(1), mirror.index(1), full, empty, c_full.index(1), out_full.index(1), out_empty.index(1), total, batch, m, n, 1, WIDE, TK, BAND, TALL, STAGES)),
            (_produce, (x_rows, x_cols, x_apply, w_rows, w_cols, listing, counters, a_ring, b_ring, full, empty, total, batch, m, n, WIDE, TK, BAND, TALL, STAGES)),
            (_transfer, (w_add, w_direct, w_mirror, x_direct, out, listing, counters, direct.index(0), mirror.index(0), c_full.index(0), out_full.index(0), out_empty.index(0), total, batch, m, n, 0, WIDE, BAND, TALL)),
            (_transfer, (w_add, w_direct, w_mirror, x_direct, out, listing, counters, direct.index(1), mirror.index(1), c_full.index(1), out_full.index(1), out_empty.index(1), total, batch, m, n, 1, WIDE, BAND, TALL)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )
