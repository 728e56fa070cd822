"""How programs of one launch tell each other that tiles are in memory.

A counter per matrix says how many tiles of its products so far have been stored. Example: two warps store the two
halves of a tile; each waits until its own stores are in memory and adds one. A program that needs the tile waits
until it reads a count that includes both, and its copy engine then sees what was stored.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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
        "cp.async.bulk.wait_group 0; fence.proxy.async; fence.acq_rel.gpu; bar.warp.sync 0xffffffff; mov.u32 $0, $1;",
        "=r,r",
        [1],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    gl.atomic_add(counter, one, sem="release", scope="gpu")
