"""How programs of one launch share out tiles and tell each other that tiles are in memory.

A counter per slot says how many tiles of the products of its matrices have been stored so far. Example: two warps store
the two halves of a tile of two blocks; each waits until its own stores are in memory and adds one. A program that needs
the tile waits until it reads a count that includes both, and its copy engine then sees what was stored.

One more counter says which places of the sequence are taken. Within a program one warp claims the next place and
passes it to the others through two slots of shared memory, with a barrier each for "full" and "empty". Where the two
consuming groups take tiles in turn, each has one of these slots.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def _announced(counter):
    """How many tiles have been announced, read so that what they stored can be seen afterwards."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [counter], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def await_tiles(counter, target):
    """Returns when `target` tiles have been announced; loads by the copy engine may follow."""
    done = _announced(counter)
    while done < target:
        done = _announced(counter)
    gl.inline_asm_elementwise(
        "fence.proxy.async; mov.u32 $0, $1;", "=r,r", [done], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def announce_tile(counter):
    """Adds one to `counter` once all stores of this warp are in memory, not only read from shared memory."""
    one = gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async; bar.warp.sync 0xffffffff; mov.u32 $0, $1;",
        "=r,r",
        [1],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    gl.atomic_add(counter, one, sem="release", scope="gpu")


@gluon.jit
def claim_place(counter):
    """A ticket for the first place that no program has claimed; only `claimed_place` waits for the answer.

    One thread of the single warp that calls this asks, and gets the answer.
    """
    return gl.inline_asm_elementwise(
        """{
            .reg .pred first;
            .reg .u32 lane;
            mov.u32 lane, %laneid;
            setp.eq.u32 first, lane, 0;
            mov.u32 $0, 0;
            @first atom.relaxed.gpu.global.add.u32 $0, [$1], 1;
        }""",
        "=&r,l",
        [counter],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def claimed_place(ticket):
    """The place that a ticket is for."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [ticket], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def pass_place(place, at, places, tile):
    """Passes the place of this program's tile number `tile`, and its first slice, on; called by a single warp."""
    slots, slices, full, empty = places
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.wait(empty.index(tile % 2), tile // 2 & 1 ^ 1)
    slots.index(tile % 2).store(gl.full([1], place, gl.int32, LAYOUT))
    slices.index(tile % 2).store(gl.full([1], at, gl.int32, LAYOUT))
    mbarrier.arrive(full.index(tile % 2))


@gluon.jit
def receive_place(places, tile, WARPS: gl.constexpr):
    """The place of this program's tile number `tile` and its first slice, once known; called by groups of warps."""
    slots, slices, full, empty = places
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    mbarrier.wait(full.index(tile % 2), tile // 2 & 1)
    place = gl.max(slots.index(tile % 2).load(LAYOUT), axis=0)
    at = gl.max(slices.index(tile % 2).load(LAYOUT), axis=0)
    mbarrier.arrive(empty.index(tile % 2))
    return place, at
