"""The CUDA driver is called here for what torch lacks: batched copies, and host memory pinned to the byte.

The driver works in the context of the calling thread, which torch makes when it first calls CUDA in that thread.
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

#: Copies of one call: 51,828 in one call crashed driver 580 (vllm#49276).
BATCH_COPIES = 4096

#: Batches of copies up to this size ask to overlap with kernels; longer ones are faster without (cudf#23675).
OVERLAP_BYTES = 128 << 10

#: `CUmemcpySrcAccessOrder`: sources are read in stream order. With ANY a copy to the host read pages before their
#: producer was done (vllm#39306, vllm#45704).
ORDER_STREAM = 1

#: `CUmemcpyAttributes`: the order, two locations of two words that only managed memory needs, and flags.
ATTRIBUTE_WORDS = 6

#: `CU_MEMHOSTALLOC_PORTABLE`: pinned for every context.
PORTABLE = 1


class CudaError(RuntimeError):
    """A call that the CUDA driver refused."""


@cache
def library() -> ctypes.CDLL:
    """libcuda, which torch has loaded already."""
    return ctypes.CDLL("libcuda.so.1")


def can_batch() -> bool:
    """Returns whether the driver has cuMemcpyBatchAsync, which came with CUDA 12.8."""
    return hasattr(library(), "cuMemcpyBatchAsync")


def copy_batch(src: Offsets, dst: Offsets, sizes: Offsets, stream: int) -> None:
    """Queue copies from addresses `src` to `dst` [copy], in any order among themselves, by the list.

    `stream` is not the legacy default stream, which the driver refuses (vllm#46379). Sizes are not 0.
    """
    driver = library()
    attribute = np.zeros(ATTRIBUTE_WORDS, np.int32)
    attribute[0], attribute[-1] = ORDER_STREAM, sizes.max(initial=0) <= OVERLAP_BYTES
    # One attribute, from copy 0 on. Zeros for all copies make it right too where an index is read for every copy, as
    # vllm#53860 understands the parameter.
    first = np.zeros(min(len(sizes), BATCH_COPIES), np.uintp)
    for begin in range(0, len(sizes), BATCH_COPIES):
        part = slice(begin, begin + BATCH_COPIES)
        lists = [np.ascontiguousarray(each[part], np.int64) for each in (dst, src, sizes)]
        pointers = (ctypes.c_void_p(each.ctypes.data) for each in lists)
        attributes = ctypes.c_void_p(attribute.ctypes.data), ctypes.c_void_p(first.ctypes.data), ctypes.c_size_t(1)
        arguments = *pointers, ctypes.c_size_t(len(lists[0])), *attributes
        if hasattr(driver, "cuMemcpyBatchAsync_v2"):
            result = driver.cuMemcpyBatchAsync_v2(*arguments, ctypes.c_void_p(stream))
        else:  # before CUDA 13 there is one more parameter, for the copy that failed; the wrong one is a segfault
            failed = ctypes.c_size_t()
            result = driver.cuMemcpyBatchAsync(*arguments, ctypes.byref(failed), ctypes.c_void_p(stream))
        check(result, "cuMemcpyBatchAsync")


def copy_each(src: Offsets, dst: Offsets, sizes: Offsets, stream: int) -> None:
    """Queue copies one call each, on any stream."""
    call, on = library().cuMemcpyAsync, ctypes.c_void_p(stream)
    address = ctypes.c_uint64
    for source, target, size in zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True):
        check(call(address(target), address(source), ctypes.c_size_t(size), on), "cuMemcpyAsync")


def pinned(nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] of host memory that every device reaches, from the start of a page; plain memory without a GPU.

    The memory goes with its last tensor: keep one until the moves that use it are done. Not torch's `pin_memory`, which
    takes the next power of two: 64 GiB for a pool of 33.
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
    """Raise CudaError for an answer of the driver that is not success."""
    if result:
        raise CudaError(f"{call} failed with CUDA error {result}")
