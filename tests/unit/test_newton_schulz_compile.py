"""The kernel of products compiles for Hopper without a GPU, and its tensor cores do not wait for each other.

The compiler of NVIDIA waits for every single product once accumulators take a way it does not understand, and says
nothing; the kernel is then slower by a fifth.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

PROGRAM = """
import re, subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from dion_core.newton_schulz_kernels.products import products_kernel

WIDE, STAGES, TALL = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "tall"
T, TK = 128, 64

def descriptor(block, name="fp16"):
    dtype = gl.bfloat16 if name == "bf16" else gl.float16
    return f"tensordesc<{name}{block},{gl.NVMMASharedLayout.get_default_for(block, dtype)!r}>"

rows, cols, apply = [T, TK], [T * WIDE, TK], [1, TK, T * WIDE]
if TALL:
    rows, cols, apply = [1, TK, T], [1, TK, T * WIDE], [T, TK]
signature = {
    "x_rows": descriptor(rows), "x_cols": descriptor(cols), "x_apply": descriptor(apply),
    "x_next": descriptor([1, 64, T]),
    "y_rows": descriptor(rows), "y_cols": descriptor(cols), "y_apply": descriptor(apply),
    "y_next": descriptor([1, 64, T]), "out": descriptor([1, 64, T], "bf16"),
    "w_rows": descriptor([T, TK]), "w_cols": descriptor([T * WIDE, TK]), "w_add": descriptor([64, T]),
    "w_direct": descriptor([1, 64, T]), "w_mirror": descriptor([1, T, 64]), "w_corner": descriptor([1, 64, 64]),
    "listing": "*i32", "counters": "*i32", "total": "i32", "slots": "i32", "m": "i32", "n": "i32", "band": "i32",
}
constants = dict(WIDE=WIDE, TK=TK, TALL=TALL, STAGES=STAGES)
signature |= dict.fromkeys(constants, "constexpr")
source = GluonASTSource(fn=products_kernel, signature=signature, constexprs=constants, attrs={})
options = dict(num_warps=4)
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
assert compiled.metadata.shared <= 227 * 1024, compiled.metadata.shared
with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
    file.write(compiled.asm["cubin"])
    file.flush()
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    code = subprocess.run([tool, "-sass", file.name], check=True, capture_output=True, text=True).stdout
steps = re.findall(r"HGMMA\\.64x\\d+x16|WARPGROUP\\.DEPBAR", code)
print(" ".join("H" if step.startswith("H") else "w" for step in steps))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("wide", "stages"), [(1, 5), (2, 3)])
@pytest.mark.parametrize("side", ["wide", "tall"])
def test_products_of_a_slice_follow_each_other_without_waiting(wide: int, stages: int, side: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PROGRAM, str(wide), str(stages), side]
    # Triton reads the sources of kernels only, so that a program from the command line will do.
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "H w H w" not in run.stdout
    assert "H H H H w" in run.stdout
