"""DeviceMemory makes tensors over GPU memory that torch did not allocate, and releases it with the last of them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .releases import RELEASES

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class DeviceMemory:
    """A range of `nbytes` that kernels of `device` reach at `address`, while this object or a tensor of it is alive."""

    address: int
    nbytes: int
    device: torch.device

    @classmethod
    def of(cls, device: torch.device, nbytes: int, take: Callable[[], tuple[int, Callable[[], None]]]) -> DeviceMemory:
        """Call `take` in the context of `device` for an address and the function that releases it.

        See `Releases` for when it is called. Raises any exception of `take`.
        """
        with driver_context(device):
            address, give_back = take()
        found = cls(address, nbytes, device)
        RELEASES.when_dead(found, device, give_back)
        return found

    def tensor(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return uint8 [nbytes] from `offset` on. It keeps the memory; views do not. Raises ValueError past the end."""
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ValueError(f"{nbytes} bytes from {offset} on of memory of {self.nbytes}")
        found = tensor_at(self.address + offset, nbytes, self.device)
        found.keeps = self  # pyright: ignore[reportAttributeAccessIssue]
        return found


def driver_context(device: torch.device) -> AbstractContextManager[Any]:
    """Enter the device's context, which torch makes and the driver works in; for the CPU, a null context."""
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
    """A `DLManagedTensor` of DLPack 0.8, with room for the shape behind it."""

    _fields_ = (
        ("array", _Array),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("length", ctypes.c_int64),
    )


#: `kDLCPU`, `kDLCUDA`; and `kDLUInt`.
_DLPACK_DEVICES, _UNSIGNED = {"cpu": 1, "cuda": 2}, 1


def tensor_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Return uint8 [nbytes] over memory that torch did not allocate, which the caller keeps as long as the tensor.

    DLPack believes the device it is told: with `__cuda_array_interface__` torch asks the driver, which may answer with
    the GPU that owns the memory instead of the one that maps it. free(3) frees the header: a Python function would run
    wherever a tensor ends, also while an exception propagates, and lose the exception.
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
