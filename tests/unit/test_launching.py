"""What was compiled is launched again exactly where Triton would have taken it, too. Compiled is nothing here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = """
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from dion_core.launching import cdiv, launch, power_of_two

compiled, launched = [], []


class Compiled:
    def __init__(self, number):
        self.number = number

    def __getitem__(self, grid):
        return lambda *arguments: launched.append((self.number, grid, arguments))


def compile_only(self, *arguments, grid, warmup, **options):
    compiled.append((self.__name__, arguments, options))
    return Compiled(len(compiled) - 1)


JITFunction.run = compile_only


@triton.jit(do_not_specialize=["length"])
def kernel(x, DTYPE: tl.constexpr, length, rate, SIZE: tl.constexpr):
    pass


@triton.jit
def careless(x, length, SIZE: tl.constexpr):
    pass


def start(x, dtype=tl.float32, length=5, rate=0.5, size=8, warps=4, programs=3):
    launch(kernel, programs, x.device, x, dtype, length, rate, SIZE=size, warps=warps)
    return len(compiled)


x = torch.zeros(64)
assert start(x) == 1 and not launched
assert compiled[0] == ("kernel", (x, tl.float32, 5, 0.5), {"SIZE": 8, "num_warps": 4, "enable_fp_fusion": False})
assert start(x, length=1, rate=2.0, programs=7) == 1
assert launched == [(0, (7, 1, 1), (x, tl.float32, 1, 2.0, 8))]
assert start(torch.ones(9)) == 1
assert [call[0] for call in launched] == [0, 0]
assert start(x, programs=0) == 1 and len(launched) == 2
assert start(x[1:]) == 2  # another alignment
assert start(x.bfloat16()) == 3
assert start(x, dtype=tl.bfloat16) == 4
assert start(x, length=2**31) == 5  # 64 bits
assert start(x, size=16) == 6
assert start(x, warps=8) == 7
assert start(x) == 7 and launched[-1][0] == 0
launch(kernel, 2, x.device, x, tl.float32, 5, 0.5, SIZE=8, warps=4, second=3)
assert len(compiled) == 7 and launched[-1][:2] == (0, (2, 3, 1))
for values, told in ((x, "one"), (x[1:].half(), "one"), (x, "another")):  # what the caller tells is believed
    launch(kernel, 1, x.device, values, tl.float32, 5, 0.5, SIZE=8, warps=4, contracted=True, told=told)
assert len(compiled) == 9 and launched[-1][0] == 7
assert compiled[7][2]["enable_fp_fusion"] and compiled[8][2]["enable_fp_fusion"]
try:
    launch(careless, 1, x.device, x, 5, SIZE=8, warps=4)
except AssertionError as error:
    assert "length of careless" in str(error)
else:
    raise SystemExit("an integer that Triton specializes went through")
for number in range(1, 70):
    assert cdiv(number, 8) == triton.cdiv(number, 8)
    assert power_of_two(number) == triton.next_power_of_2(number)
"""


def test_a_kernel_is_compiled_for_what_differs_and_for_nothing_else(tmp_path: Path) -> None:
    """In a process of its own, since here kernels may be the interpreter's."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    path = tmp_path / "launching.py"
    path.write_text(SCRIPT)  # Triton reads the source of kernels from a file
    subprocess.run([sys.executable, path], env=environment, check=True)
