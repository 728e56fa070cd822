"""Kernels that Triton compiled, loaded and launched through the CUDA driver itself.

Triton's own launchers are C modules, one for every signature: they take a C compiler and seconds to build, and longer
than this at every launch. What is passed must lie where the kernel looks for it, so the driver is asked
for the place and size of every parameter, and a kernel that has others than expected is left to Triton.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

_MAX_SHARED, _MAX_DYNAMIC_SHARED = 97, 8  # attributes of a device and of a function
_SHARED = 1
_FREE_SHARED = 48 * 1024
"""Bytes of shared memory that a program may have without being asked for."""
_MAP_SIZE, _MAP_ALIGNMENT = 128, 64
_FORMATS = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u32": "I", "u64": "Q", "fp32": "f", "fp64": "d"}
_MAP_DTYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_CONFIG = "<7I4xQ24x"
"""CUlaunchConfig: grid, block and shared memory, the stream, no attributes; and bytes up to a multiple of 64."""
_CONFIG_SIZE = struct.calcsize(_CONFIG)
_PROMOTE_128 = 2  # of what a copy touches in the L2 cache, 128 bytes are fetched


class LaunchRoom:
    """Memory where the driver finds what one launch is given.

    Attributes:
        call: what the driver is called with.
    """

    def __init__(self, function: int, pack: struct.Struct, places: Sequence[int]) -> None:
        self._pack, self._room = pack.pack_into, ctypes.create_string_buffer(pack.size)
        start = ctypes.addressof(self._room)
        parameters = (ctypes.c_void_p * len(places))(*[start + place for place in places])
        self.call = (start, function, parameters, None)

    def fill(self, *values: Any) -> None:
        """Writes grid, block, shared memory and stream, and then the parameters."""
        self._pack(self._room, 0, *values)


class DriverKernel:
    """A kernel with room for its parameters; launches of several threads follow each other."""

    def __init__(self, function: int, threads: int, shared: int, fields: Sequence[str], offsets: Sequence[int]) -> None:
        size, layout = 0, _CONFIG
        for field, offset in zip(fields, offsets, strict=True):
            layout += f"{offset - size}x{field}"
            size = offset + struct.calcsize("<" + field)
        # Last come two addresses of memory that these kernels do not use.
        self._layout = struct.Struct(layout + "16x")
        self._places = [_CONFIG_SIZE + offset for offset in (*offsets, size, size + 8)]
        self._function, self._threads, self._shared = function, threads, shared
        self._room = self.room()
        self._lock = threading.Lock()

    def launch(self, programs: int, second: int, stream: int, values: Sequence[Any]) -> None:
        """Starts programs x second programs on a stream.

        Args:
            programs: along the first axis of the grid.
            second: along the second axis.
            stream: its address.
            values: of all parameters in order: addresses, numbers, and for a descriptor what `described` returns.
        """
        with self._lock:
            self.fill(self._room, programs, second, stream, values)
            launch_all((self._room.call,))

    def room(self) -> LaunchRoom:
        """Room for one launch, which stays as it is filled."""
        return LaunchRoom(self._function, self._layout, self._places)

    def fill(self, room: LaunchRoom, programs: int, second: int, stream: int, values: Sequence[Any]) -> None:
        """Writes down a launch as `launch` starts it."""
        room.fill(programs, second, 1, self._threads, 1, 1, self._shared, stream, *values)


def launch_all(calls: Sequence[tuple[Any, ...]]) -> None:
    """Starts launches one after the other, each by the `call` of a room that was filled."""
    start = _driver().cuLaunchKernelEx
    for call in calls:
        error = start(*call)
        if error:
            _fail("a kernel cannot be launched", error)


def load(compiled: Any) -> DriverKernel | None:
    """A kernel ready to be launched on the current device; None where its parameters are not as expected.

    Args:
        compiled: what Triton compiled: its machine code, signature and metadata.
    """
    metadata, fields = compiled.metadata, _fields(compiled)
    if fields is None or "cubin" not in compiled.asm or not _is_plain(metadata):
        return None
    driver = _driver()
    if not hasattr(driver, "cuFuncGetParamInfo"):  # since CUDA 12.4
        return None
    _have_context()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver.cuModuleLoadData(ctypes.byref(module), compiled.asm["cubin"]))
    _check(driver.cuModuleGetFunction(ctypes.byref(function), module, metadata.name.encode()))
    offsets = _offsets(function, [*fields, "Q", "Q"])
    if offsets is None:
        _check(driver.cuModuleUnload(module))
        return None
    _allow_shared(function, metadata.shared)
    assert function.value is not None
    return DriverKernel(function.value, 32 * metadata.num_warps, metadata.shared, fields, offsets[:-2])


def described(descriptor: Any, compiled: Any, number: int, address: int) -> tuple[Any, ...]:
    """What is passed for a tensor descriptor: the map for the copy engine, then shape and strides.

    Args:
        descriptor: a `TensorDescriptor` of Triton: dtype, shape and strides.
        compiled: the kernel, whose metadata says in what boxes it copies.
        number: of the descriptor among those that the kernel takes.
        address: where the tensor starts.
    """
    meta = compiled.metadata.tensordesc_meta[number]
    shape, strides, rank = descriptor.shape, descriptor.strides, len(descriptor.shape)
    room = ctypes.create_string_buffer(_MAP_SIZE + _MAP_ALIGNMENT)
    start = -(-ctypes.addressof(room) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
    outer = [stride * meta["elem_size"] for stride in strides[:-1]]  # the last dimension is adjacent
    error = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(start),
        _MAP_DTYPES[descriptor.base.dtype],
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*reversed(shape)),
        (ctypes.c_uint64 * rank)(*reversed(outer)),
        (ctypes.c_uint32 * rank)(*reversed(meta["block_size"])),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,
        meta["swizzle"],
        _PROMOTE_128,
        0,
    )
    if error:
        _fail(f"a tensor of shape {shape} and strides {strides} cannot be described to the copy engine", error)
    return (ctypes.string_at(start, _MAP_SIZE), *shape, *strides)


def _have_context() -> None:
    """Makes this thread use the device's own context, as torch does, unless something has done so already."""
    driver, context = _driver(), ctypes.c_void_p()
    _check(driver.cuCtxGetCurrent(ctypes.byref(context)))
    if not context:
        _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), torch.cuda.current_device()))
        _check(driver.cuCtxSetCurrent(context))


def _is_plain(metadata: Any) -> bool:
    """Whether a launch takes nothing but a grid and parameters."""
    special = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")
    return metadata.num_ctas == 1 and not any(getattr(metadata, name, 0) for name in special)


def _fields(compiled: Any) -> list[str] | None:
    """What the kernel takes, in order, in the letters of `struct`; None for a type that is not known here."""
    fields: list[str] = []
    descriptors = iter(getattr(compiled.metadata, "tensordesc_meta", None) or [])
    for kind in compiled.src.signature.values():
        if kind == "constexpr":
            continue
        if not isinstance(kind, str):
            return None
        if kind.startswith("tensordesc"):
            meta = next(descriptors, None)
            if meta is None:
                return None
            rank = len(meta["block_size"])
            fields += [f"{_MAP_SIZE}s", *["i"] * rank, *["q"] * rank]
        elif kind.startswith("*"):
            fields.append("Q")
        elif kind in _FORMATS:
            fields.append(_FORMATS[kind])
        else:
            return None
    return fields


def _offsets(function: ctypes.c_void_p, fields: Sequence[str]) -> list[int] | None:
    """Where the function has its parameters, in bytes; None if they are not exactly these."""
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    offsets = []
    for number, field in enumerate(fields):
        if _driver().cuFuncGetParamInfo(function, number, ctypes.byref(offset), ctypes.byref(size)):
            return None
        if size.value != struct.calcsize("<" + field):
            return None
        offsets.append(offset.value)
    more = _driver().cuFuncGetParamInfo(function, len(fields), ctypes.byref(offset), ctypes.byref(size)) == 0
    return None if more else offsets


def _allow_shared(function: ctypes.c_void_p, shared: int) -> None:
    """Lets the function have so many bytes of shared memory."""
    if shared <= _FREE_SHARED:
        return
    driver, most, static = _driver(), ctypes.c_int(), ctypes.c_int()
    _check(driver.cuDeviceGetAttribute(ctypes.byref(most), _MAX_SHARED, torch.cuda.current_device()))
    _check(driver.cuFuncGetAttribute(ctypes.byref(static), _SHARED, function))
    _check(driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, most.value - static.value))


@lru_cache(maxsize=1)
def _driver() -> Any:
    """The driver's library, with the types of what is called in every step."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuLaunchKernelEx.argtypes = [ctypes.c_void_p] * 4
    return driver


def _check(error: int) -> None:
    if error:
        _fail("a kernel cannot be loaded", error)


def _fail(what: str, error: int) -> None:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(error, ctypes.byref(text))
    raise RuntimeError(f"{what}: CUDA error {error} ({(text.value or b'unknown').decode()})")
