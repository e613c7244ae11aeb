"""Calls of the CUDA driver load and launch kernels, and copy in batches.

The driver works in the calling thread's context, which torch makes on the thread's first CUDA call.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from .region import Offsets

#: Most copies of a call: 51,828 in one call crashed driver 580 (vllm#49276).
BATCH_COPIES = 4096

#: Batches of copies up to this size ask to overlap with kernels; longer copies are faster without (cudf#23675).
OVERLAP_BYTES = 128 << 10

#: `CUmemcpySrcAccessOrder`: sources are read in stream order. With ANY a copy to the host read pages before their
#: producer was done (vllm#39306, vllm#45704).
ORDER_STREAM = 1

#: 32-bit words of `CUmemcpyAttributes`: the order, two locations of two words for managed memory only, and flags.
ATTRIBUTE_WORDS = 6

#: The most dynamic shared memory of a block without `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
PLAIN_SHARED_BYTES, MOST_SHARED = 48 << 10, 8

#: `CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES`.
LOCAL_BYTES = 3

#: `CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`: captures of other threads are ignored.
CAPTURE_THREAD_LOCAL = 1


class CudaError(RuntimeError):
    """A call that the CUDA driver refused."""


@cache
def library() -> ctypes.CDLL:
    """Return libcuda, which torch has loaded already."""
    found = ctypes.CDLL("libcuda.so.1")
    # Types that are told once halve the 3 us of a launch.
    pointer, sizes = ctypes.c_void_p, [ctypes.c_uint] * 7
    found.cuLaunchKernel.argtypes = [pointer, *sizes, pointer, pointer, pointer]
    return found


@dataclass(frozen=True, slots=True)
class Function:
    """A kernel in the context that loaded it, in blocks of `threads` with `shared_bytes` of dynamic shared memory."""

    handle: int
    threads: int
    shared_bytes: int


@dataclass(slots=True, eq=False)
class Arguments:
    """The arguments of a launch, ctypes numbers, packed for the driver once. A launch reads them before it returns."""

    values: tuple[Any, ...]
    pointers: Any = field(init=False)

    def __post_init__(self) -> None:
        self.pointers = (ctypes.c_void_p * len(self.values))(*map(ctypes.addressof, self.values))


def load(cubin: bytes, name: str, threads: int, shared_bytes: int) -> Function:
    """Load a kernel into the current context, which keeps it. Raises CudaError if the driver refuses.

    It may wait for running kernels: CUDA may synchronise the context to load code.
    """
    driver, module, handle = library(), ctypes.c_void_p(), ctypes.c_void_p()
    check(driver.cuModuleLoadData(ctypes.byref(module), cubin), f"cuModuleLoadData of {name}")
    check(driver.cuModuleGetFunction(ctypes.byref(handle), module, name.encode()), f"cuModuleGetFunction of {name}")
    assert handle.value is not None
    if hasattr(driver, "cuFuncLoad"):  # from CUDA 12.4 on functions are loaded lazily
        check(driver.cuFuncLoad(handle), f"cuFuncLoad of {name}")
    if shared_bytes > PLAIN_SHARED_BYTES:
        check(driver.cuFuncSetAttribute(handle, MOST_SHARED, shared_bytes), f"{shared_bytes} bytes shared by {name}")
    return Function(handle.value, threads, shared_bytes)


def local_bytes(function: Function) -> int:
    """Returns the bytes of a thread that did not fit into registers. Raises CudaError if the driver refuses."""
    found = ctypes.c_int()
    call = library().cuFuncGetAttribute
    check(call(ctypes.byref(found), LOCAL_BYTES, ctypes.c_void_p(function.handle)), "cuFuncGetAttribute")
    return found.value


def launch(function: Function, blocks: int, stream: int, arguments: Arguments) -> None:
    """Queue a kernel. Raises CudaError if the driver refuses."""
    shape = blocks, 1, 1, function.threads, 1, 1, function.shared_bytes
    check(library().cuLaunchKernel(function.handle, *shape, stream, arguments.pointers, None), "cuLaunchKernel")


def leave_captures_alone() -> None:
    """Let this thread's calls pass while another captures a graph in CUDA's default mode: they would void it.

    Such are queries of events, pinning, registrations, synchronisation. Raises CudaError if the driver refuses.
    """
    mode = ctypes.c_int(CAPTURE_THREAD_LOCAL)
    call = library().cuThreadExchangeStreamCaptureMode
    check(call(ctypes.byref(mode)), "cuThreadExchangeStreamCaptureMode")


def can_batch() -> bool:
    """Returns True if the driver has cuMemcpyBatchAsync, which came with CUDA 12.8."""
    return hasattr(library(), "cuMemcpyBatchAsync")


def copy_batch(src: Offsets, dst: Offsets, sizes: Offsets, stream: int) -> None:
    """Queue copies from addresses `src` to `dst` [copy] in batches, in any order among themselves.

    `sizes` [copy] are bytes, at least 1. `stream` must not be the legacy default stream, which the driver refuses
    (vllm#46379). Raises CudaError if the driver refuses a batch.
    """
    driver = library()
    attribute = np.zeros(ATTRIBUTE_WORDS, np.int32)
    attribute[0], attribute[-1] = ORDER_STREAM, sizes.max(initial=0) <= OVERLAP_BYTES
    # One attribute, from copy 0 on. A zero for each copy is right too if an index is read for every copy, as vllm#53860
    # understands the parameter.
    first = np.zeros(min(len(sizes), BATCH_COPIES), np.uintp)
    for begin in range(0, len(sizes), BATCH_COPIES):
        part = slice(begin, begin + BATCH_COPIES)
        lists = [np.ascontiguousarray(each[part], np.int64) for each in (dst, src, sizes)]
        pointers = (ctypes.c_void_p(each.ctypes.data) for each in lists)
        attributes = ctypes.c_void_p(attribute.ctypes.data), ctypes.c_void_p(first.ctypes.data), ctypes.c_size_t(1)
        arguments = *pointers, ctypes.c_size_t(len(lists[0])), *attributes
        if hasattr(driver, "cuMemcpyBatchAsync_v2"):
            result = driver.cuMemcpyBatchAsync_v2(*arguments, ctypes.c_void_p(stream))
        else:  # before CUDA 13 one more parameter returns the copy that failed; the wrong call is a segfault
            failed = ctypes.c_size_t()
            result = driver.cuMemcpyBatchAsync(*arguments, ctypes.byref(failed), ctypes.c_void_p(stream))
        check(result, "cuMemcpyBatchAsync")


def copy_each(src: Offsets, dst: Offsets, sizes: Offsets, stream: int) -> None:
    """Queue copies from addresses `src` to `dst` [copy], one call each, on any stream. Raises CudaError if refused."""
    call, on = library().cuMemcpyAsync, ctypes.c_void_p(stream)
    address = ctypes.c_uint64
    for source, target, size in zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True):
        check(call(address(target), address(source), ctypes.c_size_t(size), on), "cuMemcpyAsync")


def check(result: int, call: str) -> None:
    """Raise CudaError unless the driver's `result` is success."""
    if result:
        raise CudaError(f"{call} failed with CUDA error {result}")
