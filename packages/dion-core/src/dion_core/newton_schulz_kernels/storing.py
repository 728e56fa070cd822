"""How blocks of a result leave a program: made symmetric, rounded, and stored twice.

A consuming group and its transferring warp meet in a box: two buffers of shared memory, and barriers for "full" and
"empty" of what is added and of results.

Legend: as in `products`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from dion_core.newton_schulz_kernels.schedule import T

H = gl.constexpr(64)


@gluon.jit
def make_box(direct, mirror, barriers, HALF: gl.constexpr):
    """The box of consuming group HALF: its buffers, and "full" and "empty" of what is added and of results."""
    return (
        direct.index(HALF),
        mirror.index(HALF),
        barriers.index(4 * HALF),
        barriers.index(4 * HALF + 1),
        barriers.index(4 * HALF + 2),
        barriers.index(4 * HALF + 3),
    )


@gluon.jit
def _make_symmetric(direct, mirror, HALF: gl.constexpr):
    """Makes the H x H part on the diagonal symmetric: what is below it replaces what is above."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    own = direct.reshape([H, T]).slice(HALF * H, H, dim=1)
    turned = mirror.reshape([T, H]).slice(HALF * H, H).load(LAYOUT)
    i = gl.arange(0, H, layout=gl.SliceLayout(1, LAYOUT))
    j = gl.arange(0, H, layout=gl.SliceLayout(0, LAYOUT))
    own.store(gl.where(i[:, None] >= j[None, :], own.load(LAYOUT), turned))


@gluon.jit
def hand_over(value, box, number, on_diagonal, HALF: gl.constexpr):
    """Gives an (H, T) block to the transferring warp, as it is and transposed."""
    direct, mirror, _c_full, _c_empty, out_full, out_empty = box
    mbarrier.wait(out_empty, number & 1 ^ 1)
    rounded = value.to(gl.float16)
    direct.reshape([H, T]).store(rounded)
    mirror.reshape([T, H]).permute([1, 0]).store(rounded)
    if on_diagonal:
        _make_symmetric(direct, mirror, HALF)
    fence_async_shared()
    mbarrier.arrive(out_full)


@gluon.jit
def hand_over_both(left, right, out, box, number, target):
    """Gives two (H, T) blocks to the transferring warp, in the dtype of the result if the target is that."""
    direct, mirror, _c_full, _c_empty, out_full, out_empty = box
    mbarrier.wait(out_empty, number & 1 ^ 1)
    if target < 0:
        direct._reinterpret(out.dtype, [1, H, T], out.layout).reshape([H, T]).store(left.to(out.dtype))
        mirror._reinterpret(out.dtype, [1, H, T], out.layout).reshape([H, T]).store(right.to(out.dtype))
    else:
        direct.reshape([H, T]).store(left.to(gl.float16))
        mirror._reinterpret(gl.float16, [1, H, T], direct.layout).reshape([H, T]).store(right.to(gl.float16))
    fence_async_shared()
    mbarrier.arrive(out_full)


@gluon.jit
def add_diagonal(value, gamma, HALF: gl.constexpr):
    """`value`, half of a block on the diagonal, plus gamma on it."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    i = HALF * H + gl.arange(0, H, layout=gl.SliceLayout(1, LAYOUT))
    j = gl.arange(0, T, layout=gl.SliceLayout(0, LAYOUT))
    return gl.where(i[:, None] == j[None, :], value + gamma, value)


@gluon.jit
def store_symmetric(w_direct, w_mirror, w_corner, direct, mirror, matrix, i, block, HALF: gl.constexpr):
    """Stores H rows of a block and their transpose; of one on the diagonal, what lies below, and its transpose."""
    row = i * T + HALF * H
    if block < i:
        tma.async_copy_shared_to_global(w_direct, [matrix, row, block * T], direct)
        tma.async_copy_shared_to_global(w_mirror, [matrix, block * T, row], mirror)
    elif HALF == 0:
        corner = direct._reinterpret(gl.float16, [1, H, H], w_corner.layout)  # the left half
        tma.async_copy_shared_to_global(w_corner, [matrix, row, block * T], corner)
    else:
        tma.async_copy_shared_to_global(w_direct, [matrix, row, block * T], direct)
        corner = mirror._reinterpret(gl.float16, [1, H, H], w_corner.layout)  # the upper half
        tma.async_copy_shared_to_global(w_corner, [matrix, block * T, row], corner)


@gluon.jit
def store_both(target, direct, mirror, matrix, row, column, next_row, next_column):
    """Stores what `hand_over_both` gave: two (H, T) blocks, each at a row and a column of a matrix."""
    first = direct._reinterpret(target.dtype, [1, H, T], target.layout)
    tma.async_copy_shared_to_global(target, [matrix, row, column], first)
    second = mirror._reinterpret(target.dtype, [1, H, T], target.layout)
    tma.async_copy_shared_to_global(target, [matrix, next_row, next_column], second)
