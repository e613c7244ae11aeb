"""Host memory is pinned to the byte, which torch lacks."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from . import cuda_driver
from .cuda_driver import check
from .releases import RELEASES

if TYPE_CHECKING:
    import torch

#: `CU_MEMHOSTALLOC_PORTABLE`: pinned for every context.
PORTABLE = 1


def pinned(nbytes: int) -> torch.Tensor:
    """Return uint8 [nbytes] of pinned, page-aligned host memory for every device; plain memory without a GPU.

    The memory is freed after its last tensor died and the current device has done what was queued. torch's `pin_memory`
    would take the next power of two: 64 GiB for a pool of 33. Raises CudaError if the driver refuses.
    """
    import torch

    if nbytes == 0 or not torch.cuda.is_available():
        return torch.empty(nbytes, dtype=torch.uint8)
    torch.cuda.mem_get_info()  # makes the context
    device = torch.device("cuda", torch.cuda.current_device())
    driver, address = cuda_driver.library(), ctypes.c_void_p()
    result = driver.cuMemHostAlloc(ctypes.byref(address), ctypes.c_size_t(nbytes), ctypes.c_uint(PORTABLE))
    check(result, f"cuMemHostAlloc of {nbytes} bytes")
    assert address.value is not None
    array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address.value))
    RELEASES.when_dead(array, device, lambda: check(driver.cuMemFreeHost(address), f"cuMemFreeHost of {nbytes} bytes"))
    return torch.from_numpy(array)
