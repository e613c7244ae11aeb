"""Handles let other processes map GPU memory of this process; imports map memory of other processes here.

A plain allocation (cudaMalloc, so torch's own unless segments expand) has a CUDA IPC handle, which processes of its
host open. An allocation of virtual memory management has a fabric handle if it was made with one, which opens as far as
NVLink reaches. Other memory, such as torch's expandable segments, has no handle.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from . import cuda_driver, cuda_virtual
from .cuda_driver import check
from .cuda_virtual import Handle, Taken
from .device_tensor import DeviceMemory, driver_context

if TYPE_CHECKING:
    import torch

#: `CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE`.
IS_IPC_CAPABLE = 10

#: `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, the only value there is.
ENABLE_PEER_ACCESS = 1


class HandleKind(StrEnum):
    """The reach of a handle: processes of its host, or of every host on one NVLink fabric."""

    IPC = "ipc"
    FABRIC = "fabric"


@dataclass(frozen=True, slots=True)
class Export:
    """The place of memory for other processes: `offset` bytes into an allocation of `nbytes` that `handle` opens."""

    kind: HandleKind
    handle: bytes
    nbytes: int
    offset: int


class _IpcHandle(ctypes.Structure):
    """A `CUipcMemHandle`, which the driver takes by value."""

    _fields_ = (("reserved", Handle),)


def exported(address: int, device: torch.device) -> Export | None:
    """Return the handle of the allocation that holds `address`, or None if the driver has no handle for such memory.

    The caller must keep the allocation until no process maps it: CUDA defines no behaviour for a handle of freed
    memory. Raises CudaError if the driver refuses.
    """
    with driver_context(device):
        base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
        found = cuda_driver.library().cuMemGetAddressRange_v2(
            ctypes.byref(base), ctypes.byref(nbytes), ctypes.c_uint64(address)
        )
        check(found, "cuMemGetAddressRange")
        kind = HandleKind.IPC if _is_plain(address) else HandleKind.FABRIC
        handle = _ipc_handle(base) if kind is HandleKind.IPC else cuda_virtual.handle_of(base.value or 0)
        return Export(kind, handle, nbytes.value, address - base.value) if handle is not None else None


def _is_plain(address: int) -> bool:
    answer = ctypes.c_int()
    asked = cuda_driver.library().cuPointerGetAttribute(
        ctypes.byref(answer), ctypes.c_int(IS_IPC_CAPABLE), ctypes.c_uint64(address)
    )
    check(asked, "cuPointerGetAttribute")
    return bool(answer.value)


def _ipc_handle(base: ctypes.c_uint64) -> bytes:
    handle = _IpcHandle()
    check(cuda_driver.library().cuIpcGetMemHandle(ctypes.byref(handle), base), "cuIpcGetMemHandle")
    return bytes(handle)


#: Allocations mapped by this process: a device opens an allocation once, however many pools lie in it.
_IMPORTS: weakref.WeakValueDictionary[tuple[str, HandleKind, bytes], DeviceMemory] = weakref.WeakValueDictionary()


def imported(export: Export, device: torch.device) -> DeviceMemory:
    """Return the whole allocation that `export` lies in, mapped for `device`.

    Raises CudaError if the driver does not open it: another host or fabric, no peer access, a dead owner.
    """
    key = str(device), export.kind, export.handle
    found = _IMPORTS.get(key)
    if found is None:

        def take() -> Taken:
            if export.kind is HandleKind.IPC:
                return _opened(export.handle)
            return cuda_virtual.imported(export.handle, export.nbytes, device)

        found = _IMPORTS[key] = DeviceMemory.of(device, export.nbytes, take)
    return found


def _opened(handle: bytes) -> Taken:
    """Open an IPC handle in the current context, the importing device's, which need not see the owning GPU."""
    address, driver = ctypes.c_uint64(), cuda_driver.library()
    given = _IpcHandle.from_buffer_copy(handle), ctypes.c_uint(ENABLE_PEER_ACCESS)
    check(driver.cuIpcOpenMemHandle_v2(ctypes.byref(address), *given), "cuIpcOpenMemHandle")
    return address.value, lambda: check(driver.cuIpcCloseMemHandle(address), "cuIpcCloseMemHandle")
