"""Memory of a GPU that another process maps: handles of what this process allocated, tensors over what others did.

A plain allocation (cudaMalloc, so torch's own unless segments expand) has a handle of CUDA IPC, which processes of its
host open. An allocation of virtual memory management has one of the fabric, where whoever made it asked for that; it
is opened as far as NVLink reaches. Other memory has none: torch's expandable segments are of that kind.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from . import cuda_driver
from .cuda_driver import CudaError, check

if TYPE_CHECKING:
    import torch

#: `CU_IPC_HANDLE_SIZE`, and the size of a `CUmemFabricHandle`.
HANDLE_BYTES = 64

#: `CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE`.
IS_IPC_CAPABLE = 10

#: `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, the only value there is.
ENABLE_PEER_ACCESS = 1

#: `CU_MEM_HANDLE_TYPE_FABRIC`.
FABRIC = 8

#: `CUmemAllocationProp`: type, handle types, location (2 words), a pointer, 8 bytes of flags.
PROPERTY_WORDS = 8

#: `CUmemAccessDesc`: a location of kind DEVICE with its number, and access; READ or READWRITE.
DEVICE, PROT_READWRITE = 1, 3

_Handle = ctypes.c_char * HANDLE_BYTES


class HandleKind(StrEnum):
    """Who opens a handle: processes of the host, or of every host on one NVLink fabric."""

    IPC = "ipc"
    FABRIC = "fabric"


@dataclass(frozen=True, slots=True)
class Export:
    """Where a memory lies for other processes: `offset` bytes into an allocation of `nbytes` that `handle` opens."""

    kind: HandleKind
    handle: bytes
    nbytes: int
    offset: int


class _IpcHandle(ctypes.Structure):
    """`CUipcMemHandle`, which the driver takes by value."""

    _fields_ = (("reserved", _Handle),)


def exported(address: int, device: torch.device) -> Export | None:
    """The handle of the allocation that device memory lies in; None where the driver gives none for memory of its kind.

    The allocation is the caller's, and stays until nobody maps it: what CUDA says of a handle whose memory was freed is
    that anything may happen.
    """
    with _on(device):
        base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
        found = cuda_driver.library().cuMemGetAddressRange_v2(
            ctypes.byref(base), ctypes.byref(nbytes), ctypes.c_uint64(address)
        )
        check(found, "cuMemGetAddressRange")
        kind = HandleKind.IPC if _is_plain(address) else HandleKind.FABRIC
        handle = _ipc_handle(base) if kind is HandleKind.IPC else _fabric_handle(base)
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


def _fabric_handle(base: ctypes.c_uint64) -> bytes | None:
    """None for memory that was not made to be exported to the fabric."""
    driver = cuda_driver.library()
    owner, properties, handle = ctypes.c_uint64(), (ctypes.c_int * PROPERTY_WORDS)(), _Handle()
    retained = driver.cuMemRetainAllocationHandle(ctypes.byref(owner), ctypes.c_void_p(base.value))
    check(retained, "cuMemRetainAllocationHandle")
    try:
        asked = driver.cuMemGetAllocationPropertiesFromHandle(ctypes.byref(properties), owner)
        check(asked, "cuMemGetAllocationPropertiesFromHandle")
        if not properties[1] & FABRIC:
            return None
        made = driver.cuMemExportToShareableHandle(handle, owner, ctypes.c_int(FABRIC), ctypes.c_uint64(0))
        check(made, "cuMemExportToShareableHandle")
        return bytes(handle)
    finally:
        check(driver.cuMemRelease(owner), "cuMemRelease")


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Import:
    """An allocation of another process, mapped for kernels of `device` as long as this or a tensor of it is alive."""

    address: int
    nbytes: int
    device: torch.device

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] from `offset` on. It keeps this; a view of it does not. Raises ValueError beyond the end."""
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ValueError(f"{nbytes} bytes from {offset} on of memory of {self.nbytes}")
        found = tensor_at(self.address + offset, nbytes, self.device)
        found.keeps = self  # pyright: ignore[reportAttributeAccessIssue]
        return found


#: What this process has mapped: an allocation is opened once, however many pools lie in it.
_IMPORTS: weakref.WeakValueDictionary[tuple[str, HandleKind, bytes], Import] = weakref.WeakValueDictionary()


def imported(export: Export, device: torch.device) -> Import:
    """The allocation that `export` lies in; its offset does not matter.

    Raises CudaError where the driver does not open it: another host or fabric, no peer access, a dead owner.
    """
    key = str(device), export.kind, export.handle
    found = _IMPORTS.get(key)
    if found is None:
        with _on(device):
            address, close = _OPENERS[export.kind](export, device)
        found = _IMPORTS[key] = Import(address, export.nbytes, device)
        weakref.finalize(found, _close, device, close).atexit = False
    return found


def _close(device: torch.device, close: Callable[[], None]) -> None:
    with _on(device):
        close()


def _open_ipc(export: Export, device: torch.device) -> tuple[int, Callable[[], None]]:
    """Opened in the context of `device`, which need not see the GPU that the memory is of."""
    address, handle = ctypes.c_uint64(), _IpcHandle.from_buffer_copy(export.handle)
    driver = cuda_driver.library()
    opened = driver.cuIpcOpenMemHandle_v2(ctypes.byref(address), handle, ctypes.c_uint(ENABLE_PEER_ACCESS))
    check(opened, "cuIpcOpenMemHandle")
    return address.value, lambda: check(driver.cuIpcCloseMemHandle(address), "cuIpcCloseMemHandle")


def _open_fabric(export: Export, device: torch.device) -> tuple[int, Callable[[], None]]:
    address, owner, handle = ctypes.c_uint64(), ctypes.c_uint64(), _Handle.from_buffer_copy(export.handle)
    size, none = ctypes.c_size_t(export.nbytes), ctypes.c_uint64(0)
    undo: list[Callable[[], None]] = []

    def close() -> None:
        for step in reversed(undo):
            step()

    def done(call: str, result: int, back: Callable[[], None] | None = None) -> None:
        check(result, call)
        if back is not None:
            undo.append(back)

    driver = cuda_driver.library()
    try:
        imported = driver.cuMemImportFromShareableHandle(ctypes.byref(owner), handle, ctypes.c_int(FABRIC))
        done("cuMemImport", imported, lambda: check(driver.cuMemRelease(owner), "cuMemRelease"))
        reserved = driver.cuMemAddressReserve(ctypes.byref(address), size, ctypes.c_size_t(0), none, none)
        done("cuMemAddressReserve", reserved, lambda: check(driver.cuMemAddressFree(address, size), "cuMemAddressFree"))
        mapped = driver.cuMemMap(address, size, ctypes.c_size_t(0), owner, none)
        done("cuMemMap", mapped, lambda: check(driver.cuMemUnmap(address, size), "cuMemUnmap"))
        access = (ctypes.c_int * 3)(DEVICE, device.index or 0, PROT_READWRITE)
        done("cuMemSetAccess", driver.cuMemSetAccess(address, size, access, ctypes.c_size_t(1)))
    except CudaError:
        close()
        raise
    assert address.value is not None
    return address.value, close


_OPENERS: dict[HandleKind, Callable[[Export, torch.device], tuple[int, Callable[[], None]]]] = {
    HandleKind.IPC: _open_ipc,
    HandleKind.FABRIC: _open_fabric,
}


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """The driver works in the device's context, which torch makes."""
    if device.type != "cuda":
        return nullcontext()
    import torch

    torch.cuda.current_stream(device).query()
    return torch.cuda.device(device)


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Array(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """`DLManagedTensor` of DLPack 0.8, with room for the shape behind it."""

    _fields_ = (
        ("array", _Array),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("length", ctypes.c_int64),
    )


#: `kDLCPU`, `kDLCUDA`; and `kDLUInt`.
_DLPACK_DEVICES, _UNSIGNED = {"cpu": 1, "cuda": 2}, 1


def tensor_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [nbytes] over memory that torch did not allocate, and that the caller keeps as long as the tensor.

    By DLPack, which believes the device that it is told: `__cuda_array_interface__` has torch ask the driver, which
    may answer with the GPU that the memory is of instead of the one that maps it. The header is freed by free(3): a
    function in Python would run wherever a tensor ends, also while an exception is on its way, and lose that.
    """
    import torch

    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    header = libc.malloc(ctypes.sizeof(_Managed))
    managed = _Managed.from_address(header)
    where = _Device(_DLPACK_DEVICES[device.type], device.index or 0)
    shape = header + _Managed.length.offset
    managed.array = _Array(address, where, 1, _Type(_UNSIGNED, 8, 1), shape, None, 0)
    managed.context, managed.length = None, nbytes
    managed.deleter = ctypes.cast(libc.free, ctypes.c_void_p)
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return torch.from_dlpack(make(header, b"dltensor", None))
