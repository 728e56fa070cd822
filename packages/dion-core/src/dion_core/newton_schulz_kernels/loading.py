"""Loads of the operands of a tile by the copy engine, TK deep at a time.

A tile is at a matrix of the batch or a slot, a row, a column, and for one load a depth k. There is room for a slice of
A and of B, with a barrier that tells when both are there. Operands are pairs of descriptors, for the rows of A and for
those of B, which are up to WIDE blocks.

Legend: as in `products`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from dion_core.newton_schulz_kernels.schedule import T


@gluon.jit
def _load_turned(source, matrix, k, column, slot, ready, TK: gl.constexpr, LENGTH: gl.constexpr):
    """Loads rows k to k + TK of LENGTH columns."""
    target = slot._reinterpret(gl.float16, [1, TK, LENGTH], source.layout)
    tma.async_copy_global_to_shared(source, [matrix, k, column], ready, target)


@gluon.jit
def make_room(ring, at, narrow, WIDE: gl.constexpr, TK: gl.constexpr, STAGES: gl.constexpr):
    """Room for slice number `at`, once it is free; of a narrow tile B has one block.

    A wait for a slice also ends while the one before it in its slot is on its way, since barriers tell even from odd
    uses only. Where groups take tiles in turn, the one before may be the other group's, which this group has not waited
    for. So no slice is begun before that one is there which the next is to replace: of five slots, slice 9 not before
    slice 5, in whose place slice 10 will be.
    """
    a_ring, b_ring, full, empty = ring
    slot = at % STAGES
    ready = full.index(slot)
    mbarrier.wait(empty.index(slot), at // STAGES & 1 ^ 1)
    if WIDE == 1:
        mbarrier.wait(full.index((at + 1) % STAGES), (at + 1) // STAGES & 1 ^ 1)
    mbarrier.expect(ready, 2 * T * TK * 2, pred=narrow)
    mbarrier.expect(ready, (1 + WIDE) * T * TK * 2, pred=narrow == 0)
    return a_ring.index(slot), b_ring.index(slot), ready


@gluon.jit
def load_pair(rows, tile, a_matrix, b_matrix, k, m, room, narrow):
    """Loads columns of A and of B, which lie matrix after matrix; of a narrow tile by A's descriptor."""
    a_rows, b_rows = rows
    row, column = tile
    a_slot, b_slot, ready = room
    tma.async_copy_global_to_shared(a_rows, [a_matrix * m + row, k], ready, a_slot)
    if narrow:
        tma.async_copy_global_to_shared(a_rows, [b_matrix * m + column, k], ready, b_slot.slice(0, T))
    else:
        tma.async_copy_global_to_shared(b_rows, [b_matrix * m + column, k], ready, b_slot)


@gluon.jit
def load_gram(x, tile, matrix, k, m, room, narrow, WIDE: gl.constexpr, TK: gl.constexpr, TALL: gl.constexpr):
    """Loads columns of X for its Gram matrix, or rows if it is tall."""
    a_rows, b_rows, _ = x
    if TALL:
        row, column = tile
        a_slot, b_slot, ready = room
        _load_turned(a_rows, matrix, k, row, a_slot, ready, TK, T)
        _load_turned(b_rows, matrix, k, column, b_slot, ready, TK, T * WIDE)
    else:
        load_pair((a_rows, b_rows), tile, matrix, matrix, k, m, room, narrow)


@gluon.jit
def load_apply(x, w, tile, matrix, q, k, m, n, room, WIDE: gl.constexpr, TK: gl.constexpr, TALL: gl.constexpr):
    """Loads what Q X is made of, or X Q if X is tall."""
    _, _, x_apply = x
    w_rows, w_cols = w
    row, column = tile
    a_slot, b_slot, ready = room
    if TALL:  # rows of X times rows of Q, which is symmetric
        tma.async_copy_global_to_shared(x_apply, [matrix * n + row, k], ready, a_slot)
        tma.async_copy_global_to_shared(w_cols, [q * m + column, k], ready, b_slot)
    else:
        tma.async_copy_global_to_shared(w_rows, [q * m + row, k], ready, a_slot)
        _load_turned(x_apply, matrix, k, column, b_slot, ready, TK, T * WIDE)
