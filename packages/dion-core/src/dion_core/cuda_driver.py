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
from weakref import finalize

import torch

_MAX_SHARED, _MAX_DYNAMIC_SHARED = 97, 8  # attributes of a device and of a function
_SHARED = 1
_FREE_SHARED = 48 * 1024
"""Bytes of shared memory that a program may have without being asked for."""
_MAP_SIZE, _MAP_ALIGNMENT = 128, 64
_FORMATS = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u32": "I", "u64": "Q", "fp32": "f", "fp64": "d"}
_MAP_DTYPES = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9}
_CONFIG = struct.Struct("<7I4xQ16x")
"""CUlaunchConfig: grid, block and shared memory, the stream, no attributes."""
_NO_GRAPH = "launches cannot be put into a graph"
_RELAXED = 2  # a mode of capturing in which nothing that its thread does disturbs it
_PROMOTE_128 = 2  # of what a copy touches in the L2 cache, 128 bytes are fetched


class DriverError(RuntimeError):
    """The CUDA driver did not do what it was asked for."""


class _Room:
    """Memory where the driver finds the parameters of one launch.

    Attributes:
        places: the addresses of all parameters, as the driver takes them.
    """

    def __init__(self, layout: struct.Struct, offsets: Sequence[int]) -> None:
        self._pack, self._memory = layout.pack_into, ctypes.create_string_buffer(layout.size)
        start = ctypes.addressof(self._memory)
        self.places = (ctypes.c_void_p * len(offsets))(*[start + offset for offset in offsets])

    def fill(self, values: Sequence[Any]) -> None:
        """Writes the parameters, in order."""
        self._pack(self._memory, 0, *values)


class DriverKernel:
    """A kernel with room for its parameters; launches of several threads follow each other."""

    def __init__(self, function: int, threads: int, shared: int, fields: Sequence[str], offsets: Sequence[int]) -> None:
        size, layout = 0, "<"
        for field, offset in zip(fields, offsets, strict=True):
            layout += f"{offset - size}x{field}"
            size = offset + struct.calcsize("<" + field)
        # Last come two addresses of memory that these kernels do not use.
        self._layout, self._offsets = struct.Struct(layout + "16x"), (*offsets, size, size + 8)
        self._function, self._threads, self._shared = function, threads, shared
        self._config, self._room, self._lock = ctypes.create_string_buffer(_CONFIG.size), self.room(), threading.Lock()

    def launch(self, programs: int, second: int, stream: int, values: Sequence[Any]) -> None:
        """Starts programs x second programs on a stream.

        Args:
            programs: along the first axis of the grid.
            second: along the second axis.
            stream: its address.
            values: of all parameters in order: addresses, numbers, and for a descriptor what `described` returns.
        """
        with self._lock:
            _CONFIG.pack_into(self._config, 0, programs, second, 1, self._threads, 1, 1, self._shared, stream)
            self._room.fill(values)
            error = _driver().cuLaunchKernelEx(self._config, self._function, self._room.places, None)
        _check(error, "a kernel cannot be launched")

    def room(self) -> _Room:
        """Room for the parameters of one launch."""
        return _Room(self._layout, self._offsets)

    def node(self, programs: int, second: int, room: _Room) -> _Node:
        """A launch as `launch` starts it, for a graph."""
        return _Node(self._function, programs, second, 1, self._threads, 1, 1, self._shared, room.places)


class _Node(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS of the driver's second version; what is not said is 0."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        *((name, ctypes.c_uint) for name in ("x", "y", "z", "threads", "threads_y", "threads_z", "shared")),
        ("parameters", ctypes.POINTER(ctypes.c_void_p)),
        *((name, ctypes.c_void_p) for name in ("extra", "kernel", "context")),
    )


class LaunchGraph:
    """Launches that follow each other, started at once, which takes the host as long as one of them.

    Args:
        launches: kernels, and how many programs of each along the first and the second axis.
    """

    def __init__(self, launches: Sequence[tuple[DriverKernel, tuple[int, int]]]) -> None:
        driver, self._graph, self._ready = _driver(), ctypes.c_void_p(), ctypes.c_void_p()
        # At exit the driver frees all itself, and in a process that was forked it is not there.
        finalize(self, _destroy, driver, self._graph, self._ready).atexit = False
        _check(driver.cuGraphCreate(ctypes.byref(self._graph), 0), _NO_GRAPH)
        add = driver.cuGraphAddKernelNode_v2
        self._rooms = [kernel.room() for kernel, _ in launches]
        self._given = [kernel.node(*grid, room) for (kernel, grid), room in zip(launches, self._rooms, strict=True)]
        self._nodes = [ctypes.c_void_p() for _ in launches]
        for number, (node, given) in enumerate(zip(self._nodes, self._given, strict=True)):
            after = ctypes.byref(self._nodes[number - 1])  # the first one comes after none
            _check(add(ctypes.byref(node), self._graph, after, min(number, 1), ctypes.byref(given)), _NO_GRAPH)
        _check(driver.cuGraphInstantiateWithFlags(ctypes.byref(self._ready), self._graph, 0), _NO_GRAPH)

    def fill(self, number: int, values: Sequence[Any]) -> None:
        """From now on the launch of this number is given these parameters, as `DriverKernel.launch` takes them."""
        self._rooms[number].fill(values)
        given = ctypes.byref(self._given[number])
        _check(_driver().cuGraphExecKernelNodeSetParams_v2(self._ready, self._nodes[number], given), _NO_GRAPH)

    def start(self, stream: int) -> None:
        """Starts all on a stream, by its address; they have to be filled."""
        _check(_driver().cuGraphLaunch(self._ready, stream), "kernels cannot be launched")


def _destroy(driver: Any, graph: ctypes.c_void_p, ready: ctypes.c_void_p) -> None:
    # Garbage is collected at any time, also while this thread captures a stream, which this must not end.
    mode = ctypes.c_int(_RELAXED)
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    if ready:
        driver.cuGraphExecDestroy(ready)
    if graph:
        driver.cuGraphDestroy(graph)
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


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
    _check(error, f"a tensor of shape {shape} and strides {strides} cannot be described to the copy engine")
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
    driver.cuGraphLaunch.argtypes = [ctypes.c_void_p] * 2
    return driver


def _check(error: int, what: str = "a kernel cannot be loaded") -> None:
    if error:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(error, ctypes.byref(text))
        raise DriverError(f"{what}: CUDA error {error} ({(text.value or b'unknown').decode()})")
