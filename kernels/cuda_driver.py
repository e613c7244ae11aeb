"""Calls of the CUDA driver add batched copies, and host memory pinned to the byte, which torch lacks.

The driver works in the calling thread's context, which torch makes on the thread's first CUDA call.
"""

from __future__ import annotations

import ctypes
import weakref
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from .region import Offsets

if TYPE_CHECKING:
    import torch

#: Most copies of a call: 51,828 in one call crashed driver 580 (vllm#49276).
BATCH_COPIES = 4096

#: Batches of copies up to this size ask to overlap with kernels; longer copies are faster without (cudf#23675).
OVERLAP_BYTES = 128 << 10

#: `CUmemcpySrcAccessOrder`: sources are read in stream order. With ANY a copy to the host read pages before their
#: producer was done (vllm#39306, vllm#45704).
ORDER_STREAM = 1

#: 32-bit words of `CUmemcpyAttributes`: the order, two locations of two words for managed memory only, and flags.
ATTRIBUTE_WORDS = 6

#: `CU_MEMHOSTALLOC_PORTABLE`: pinned for every context.
PORTABLE = 1


class CudaError(RuntimeError):
    """A call that the CUDA driver refused."""


@cache
def library() -> ctypes.CDLL:
    """Return libcuda, which torch has loaded already."""
    return ctypes.CDLL("libcuda.so.1")


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


def pinned(nbytes: int) -> torch.Tensor:
    """Return uint8 [nbytes] of pinned, page-aligned host memory for every device; plain memory without a GPU.

    The memory is freed with its last tensor: keep one until all moves that use it are done. torch's `pin_memory` would
    take the next power of two: 64 GiB for a pool of 33. Raises CudaError if the driver refuses.
    """
    import torch

    if nbytes == 0 or not torch.cuda.is_available():
        return torch.empty(nbytes, dtype=torch.uint8)
    torch.cuda.mem_get_info()
    driver, address = library(), ctypes.c_void_p()
    result = driver.cuMemHostAlloc(ctypes.byref(address), ctypes.c_size_t(nbytes), ctypes.c_uint(PORTABLE))
    check(result, f"cuMemHostAlloc of {nbytes} bytes")
    assert address.value is not None
    array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address.value))
    weakref.finalize(array, driver.cuMemFreeHost, address).atexit = False
    return torch.from_numpy(array)


def check(result: int, call: str) -> None:
    """Raise CudaError unless the driver's `result` is success."""
    if result:
        raise CudaError(f"{call} failed with CUDA error {result}")
