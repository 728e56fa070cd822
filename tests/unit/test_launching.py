"""What was compiled is launched again exactly where Triton would have taken it, too, and with every value in its place.

Neither compiled nor launched is anything here: both Triton's compiler and the CUDA driver are replaced.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = """
import ctypes
import threading
import time
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from dion_core import cuda_driver
from dion_core.launching import Descriptors, cdiv, compiles_only, launch, power_of_two

compiled, launched = [], []
C_TYPES = {"*fp32": ctypes.c_uint64, "*bf16": ctypes.c_uint64, "*fp16": ctypes.c_uint64, "i32": ctypes.c_int32,
           "i64": ctypes.c_int64, "fp32": ctypes.c_float}
SCRATCH = [ctypes.c_uint64] * 2
unexpected = []  # C types of parameters that the driver reports in place of those expected
contexts = {}  # of the driver, by thread
special = {}  # what the metadata of kernels say besides


def c_types(kernel):
    types = []
    for kind in kernel.src.signature.values():
        if kind.startswith("tensordesc"):
            types += [ctypes.c_char * 128, *[ctypes.c_int32] * 2, *[ctypes.c_int64] * 2]
        elif kind != "constexpr":
            types.append(C_TYPES[kind])
    return [*types, *SCRATCH]


class LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_uint64), ("attributes", ctypes.c_void_p), ("num_attributes", ctypes.c_uint),
    ]


class Driver:
    def cuCtxGetCurrent(self, context):
        context._obj.value = contexts.get(threading.get_ident())
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = 5 + device
        return 0

    def cuCtxSetCurrent(self, context):
        contexts[threading.get_ident()] = context.value
        return 0

    def cuModuleLoadData(self, module, image):
        assert image == b"image" and contexts[threading.get_ident()] == 5
        module._obj.value = 1
        return 0

    def cuModuleGetFunction(self, function, module, name):
        assert name == compiled[-1].metadata.name.encode()
        function._obj.value = len(compiled)
        return 0

    def cuModuleUnload(self, module):
        return 0

    def cuFuncGetParamInfo(self, function, number, offset, size):
        types = unexpected or c_types(compiled[function.value - 1])
        if number >= len(types):
            return 1
        fields = [(f"field_{place}", kind) for place, kind in enumerate(types)]
        as_in_c = type("Parameters", (ctypes.Structure,), {"_fields_": fields})
        field = getattr(as_in_c, f"field_{number}")
        offset._obj.value, size._obj.value = field.offset, field.size
        return 0

    def cuTensorMapEncodeTiled(self, out, dtype, rank, address, shape, strides, box, steps, _, swizzle, l2, fill):
        assert out.value % 64 == 0
        text = f"{dtype} {rank} {address.value} {[*shape]} {strides[0]} {[*box]} {[*steps]} {swizzle}".encode()
        ctypes.memmove(out.value, text.ljust(128), 128)
        return 0

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        said = ctypes.cast(config, ctypes.POINTER(LaunchConfig)).contents
        x, y, z = said.grid
        threads, shared, stream = said.block[0], said.shared, said.stream
        assert [*said.block[1:]] == [1, 1] and not said.attributes and said.num_attributes == 0
        types = c_types(compiled[function - 1])
        assert len(parameters) == len(types) and z == 1 and stream == 77 and extra is None
        values = [ctypes.cast(place, ctypes.POINTER(kind)).contents for place, kind in zip(parameters, types)]
        assert [value.value for value in values[-2:]] == [0, 0]
        numbers = [value.value for value in values[:-2]]
        launched.append((function - 1, (x, y), threads, shared, numbers))
        return 0 if x < 1000 else 9

    def cuGetErrorString(self, error, text):
        text._obj.value = b"invalid argument"
        return 0


def kind_of(argument):
    if isinstance(argument, torch.Tensor):
        return "*" + {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[argument.dtype]
    if isinstance(argument, SimpleNamespace):
        return "tensordesc<fp16[64, 64]>"
    return "fp32" if isinstance(argument, float) else "i32" if abs(argument) < 2**31 else "i64"


class Compiled:
    def __init__(self, kernel, arguments, options):
        given = {**dict(zip(kernel.arg_names, arguments)), **options}
        self.src = SimpleNamespace(signature={
            parameter.name: "constexpr" if parameter.is_constexpr else kind_of(given[parameter.name])
            for parameter in kernel.params
        })
        meta = [{"block_size": [64, 32], "elem_size": 2, "swizzle": 3}] * 2
        known = {"num_ctas": 1, "num_warps": options["num_warps"], "shared": 1024, "tensordesc_meta": meta}
        self.metadata = SimpleNamespace(name=kernel.__name__, **{**known, **special})
        code = "hsaco" if special.get("name_of_code") else "cubin"
        self.asm, self.options, self.arguments = {code: b"image"}, options, arguments

    def __getitem__(self, grid):
        return lambda *arguments: launched.append(("by Triton", grid, arguments))


def compile_only(self, *arguments, grid, warmup, **options):
    assert warmup
    time.sleep(0.01)  # so that threads meet
    compiled.append(Compiled(self, arguments, options))
    return compiled[-1]


JITFunction.run = compile_only
cuda_driver._driver = Driver
torch.cuda.current_device = lambda: 0
torch._C._cuda_getCurrentRawStream = lambda device: 77


@triton.jit(do_not_specialize=["length"])
def kernel(x, DTYPE: tl.constexpr, length, rate, SIZE: tl.constexpr):
    pass


@triton.jit
def careless(x, length, SIZE: tl.constexpr):
    pass


@triton.jit(do_not_specialize=["length"])
def copier(first, second, length, SIZE: tl.constexpr):
    pass


def start(x, dtype=tl.float32, length=5, rate=0.5, size=8, warps=4, programs=3):
    launch(kernel, programs, x.device, x, dtype, length, rate, SIZE=size, warps=warps)
    return len(compiled)


x = torch.zeros(64)
assert start(x) == 1
assert compiled[0].arguments == (x, tl.float32, 5, 0.5)
assert compiled[0].options == {"SIZE": 8, "num_warps": 4, "enable_fp_fusion": False}
assert launched == [(0, (3, 1), 128, 1024, [x.data_ptr(), 5, 0.5])]
assert start(x, length=1, rate=2.0, programs=7) == 1
assert launched[1:] == [(0, (7, 1), 128, 1024, [x.data_ptr(), 1, 2.0])]
assert start(torch.ones(9)) == 1
assert [call[0] for call in launched] == [0, 0, 0]
assert start(x, programs=0) == 1 and len(launched) == 3
assert start(x[1:]) == 2  # another alignment
assert start(x.bfloat16()) == 3
assert start(x, dtype=tl.bfloat16) == 4
assert start(x, length=2**31) == 5  # 64 bits
assert launched[-1][-1] == [x.data_ptr(), 2**31, 0.5]
assert start(x, size=16) == 6
assert start(x, warps=8) == 7 and launched[-1][2] == 256
assert start(x) == 7 and launched[-1][0] == 0
launch(kernel, 2, x.device, x, tl.float32, 5, 0.5, SIZE=8, warps=4, second=3)
assert len(compiled) == 7 and launched[-1][:2] == (0, (2, 3))
try:
    start(x, programs=1000)
except RuntimeError as error:
    assert "cannot be launched: CUDA error 9 (invalid argument)" in str(error)
else:
    raise SystemExit("a launch that failed went through")

half = torch.zeros(6, 64, dtype=torch.float16)
pair = [SimpleNamespace(base=half, shape=[6, 64], strides=[64, 1]), SimpleNamespace(base=half, shape=[3, 128],
                                                                                 strides=[128, 1])]
for form in ("one", "one", "another"):
    descriptors = Descriptors(pair, form=form)
    for length in (5, 6):
        launch(copier, 1, x.device, length, descriptors=descriptors, SIZE=8, warps=4, contracted=True)
        first, second = (
            f"6 2 {half.data_ptr()} {shape} {stride} [32, 64] [1, 1] 3".encode().ljust(128)
            for shape, stride in (([64, 6], 128), ([128, 3], 256))
        )
        assert launched[-1][-1] == [first, 6, 64, 64, 1, second, 3, 128, 128, 1, length]
assert len(compiled) == 9 and compiled[7].options["enable_fp_fusion"]

for others in ([ctypes.c_uint64, ctypes.c_int64, ctypes.c_float, *SCRATCH], SCRATCH,
               [ctypes.c_uint64, ctypes.c_int32, ctypes.c_float, *SCRATCH, ctypes.c_uint64]):
    unexpected[:] = others
    number = start(x, size=32 + len(others) + others.count(ctypes.c_int64))
    assert launched[-1][:2] == ("by Triton", (3, 1, 1)) and launched[-1][2][:4] == (x, tl.float32, 5, 0.5)
unexpected.clear()
for number, other in enumerate(("num_ctas", "launch_pdl", "launch_cooperative_grid", "global_scratch_size",
                                "profile_scratch_size", "name_of_code")):
    special[other] = 2
    start(x, size=100 + number)
    assert launched[-1][:2] == ("by Triton", (3, 1, 1)), other
    special.clear()
start(x, size=200)
assert launched[-1][1] == (3, 1)

before, number = len(launched), len(compiled)
with compiles_only():
    assert start(x, size=300) == number + 1 and start(x, size=300) == number + 1
assert len(launched) == before
assert start(x, size=300) == number + 1 and len(launched) == before + 1
threads = [threading.Thread(target=start, args=(x,), kwargs={"size": 301}) for _ in range(4)]
for step in (threading.Thread.start, threading.Thread.join):
    for thread in threads:
        step(thread)
assert len(compiled) == number + 2 and len(launched) == before + 5

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


def test_a_kernel_is_compiled_for_what_differs_and_launched_with_every_value_in_its_place(tmp_path: Path) -> None:
    """In a process of its own, since here kernels may be the interpreter's."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    path = tmp_path / "launching.py"
    path.write_text(SCRIPT)  # Triton reads the source of kernels from a file
    subprocess.run([sys.executable, path], env=environment, check=True)
