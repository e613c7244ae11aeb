"""The driver's virtual memory management makes or imports GPU memory, maps it, and releases it in reverse.

Only memory made this way can have a handle of the NVLink fabric, by which other hosts map it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from . import cuda_driver
from .cuda_driver import CudaError, check

if TYPE_CHECKING:
    import torch

#: `CU_IPC_HANDLE_SIZE`, and the size of a `CUmemFabricHandle`.
HANDLE_BYTES = 64

#: `CU_MEM_HANDLE_TYPE_FABRIC`.
FABRIC = 8

#: `CUmemAllocationProp`: type, handle types, location (2 words), a pointer, and flags, of which byte 1 is for RDMA.
PROPERTY_WORDS, RDMA_BYTE = 8, 25

#: `CU_MEM_ALLOCATION_TYPE_PINNED`; `CU_MEM_LOCATION_TYPE_DEVICE`; `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
PINNED, DEVICE, PROT_READWRITE = 1, 1, 3

#: `CU_MEM_ALLOC_GRANULARITY_RECOMMENDED`.
RECOMMENDED = 1

#: `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED`, `CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED`.
RDMA_SUPPORTED, FABRIC_SUPPORTED = 110, 128

Handle = ctypes.c_char * HANDLE_BYTES

#: An address, and the function that releases its memory.
Taken = tuple[int, Callable[[], None]]


class _Steps:
    """The driver calls made so far, each with the call that undoes it."""

    def __init__(self) -> None:
        self._undo: list[tuple[str, tuple[object, ...]]] = []

    def take(self, call: str, *arguments: object, undo: tuple[str, *tuple[object, ...]] | None = None) -> None:
        """Make a driver call. Raises CudaError if it fails, once the calls before it are undone."""
        try:
            check(getattr(cuda_driver.library(), call)(*arguments), call)
        except CudaError as error:
            try:
                self.back()
            except CudaError as refused:
                error.add_note(f"and then {refused}")
            raise
        if undo is not None:
            self._undo.append((undo[0], undo[1:]))

    def back(self) -> None:
        """Undo all calls, the last first. Raises the first CudaError of a refused undo, once all were tried."""
        driver, refused = cuda_driver.library(), list[CudaError]()
        while self._undo:
            call, arguments = self._undo.pop()
            try:
                check(getattr(driver, call)(*arguments), call)
            except CudaError as error:
                refused.append(error)
        if refused:
            raise refused[0]


def supports(attribute: int, device: torch.device) -> bool:
    """Return True if a device has an attribute of the driver."""
    answer = ctypes.c_int()
    ordinal = ctypes.c_int(device.index or 0)
    asked = cuda_driver.library().cuDeviceGetAttribute(ctypes.byref(answer), ctypes.c_int(attribute), ordinal)
    check(asked, "cuDeviceGetAttribute")
    return bool(answer.value)


def made(nbytes: int, device: torch.device) -> Taken:
    """Allocate at least `nbytes` of `device` with a fabric handle, for NICs (RDMA) too if the device supports that.

    Raises CudaError if the driver refuses, as on a capable device if the fabric's channels are not set up.
    """
    properties = np.zeros(PROPERTY_WORDS, np.int32)
    properties[:4] = PINNED, FABRIC, DEVICE, device.index or 0
    properties.view(np.uint8)[RDMA_BYTE] = supports(RDMA_SUPPORTED, device)
    wanted = ctypes.c_void_p(properties.ctypes.data)
    grain, owner, steps = ctypes.c_size_t(), ctypes.c_uint64(), _Steps()
    steps.take("cuMemGetAllocationGranularity", ctypes.byref(grain), wanted, ctypes.c_int(RECOMMENDED))
    size = ctypes.c_size_t(-(-nbytes // grain.value) * grain.value)
    created = ctypes.byref(owner), size, wanted, ctypes.c_uint64(0)
    steps.take("cuMemCreate", *created, undo=("cuMemRelease", owner))
    return _mapped(steps, owner, size, device)


def imported(handle: bytes, nbytes: int, device: torch.device) -> Taken:
    """Import an allocation of `nbytes` that another process made. Raises CudaError if `device` cannot map it."""
    owner, steps = ctypes.c_uint64(), _Steps()
    given = ctypes.byref(owner), Handle.from_buffer_copy(handle), ctypes.c_int(FABRIC)
    steps.take("cuMemImportFromShareableHandle", *given, undo=("cuMemRelease", owner))
    return _mapped(steps, owner, ctypes.c_size_t(nbytes), device)


def _mapped(steps: _Steps, owner: ctypes.c_uint64, size: ctypes.c_size_t, device: torch.device) -> Taken:
    address, none = ctypes.c_uint64(), ctypes.c_uint64(0)
    at_all = ctypes.byref(address), size, ctypes.c_size_t(0), none, none
    steps.take("cuMemAddressReserve", *at_all, undo=("cuMemAddressFree", address, size))
    steps.take("cuMemMap", address, size, ctypes.c_size_t(0), owner, none, undo=("cuMemUnmap", address, size))
    access = (ctypes.c_int * 3)(DEVICE, device.index or 0, PROT_READWRITE)
    steps.take("cuMemSetAccess", address, size, access, ctypes.c_size_t(1))
    return address.value, steps.back


def handle_of(address: int) -> bytes | None:
    """Return the fabric handle of the allocation that begins at `address`, or None if it was made without one."""
    owner, properties, handle, steps = ctypes.c_uint64(), np.zeros(PROPERTY_WORDS, np.int32), Handle(), _Steps()
    retained = ctypes.byref(owner), ctypes.c_void_p(address)
    steps.take("cuMemRetainAllocationHandle", *retained, undo=("cuMemRelease", owner))
    steps.take("cuMemGetAllocationPropertiesFromHandle", ctypes.c_void_p(properties.ctypes.data), owner)
    if properties[1] & FABRIC:
        steps.take("cuMemExportToShareableHandle", handle, owner, ctypes.c_int(FABRIC), ctypes.c_uint64(0))
    steps.back()
    return bytes(handle) if properties[1] & FABRIC else None


def plain(nbytes: int) -> Taken:
    """Allocate `nbytes` on the current device by cudaMalloc: one allocation, whatever torch's allocator is set to."""
    address, steps = ctypes.c_uint64(), _Steps()
    steps.take("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes), undo=("cuMemFree_v2", address))
    return address.value, steps.back
