"""A CUDA driver whose device memory is shared memory of this host, so that two processes export and map it for real."""

# ruff: noqa: N802
from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvmover.kernels import cuda_driver, cuda_exports, cuda_virtual, releases
from kvmover.shared_memory import _ALLOCATED, MapMode, NotShared, SharedRange, allocate, map_file, shares_of

REFUSED = 201

#: What the driver makes memory in multiples of.
GRAIN = 2 << 20


def _text(share: SharedRange) -> bytes:
    return f"{share.pid}/{share.fd}/{share.token}".encode().ljust(cuda_virtual.HANDLE_BYTES, b"\0")


def _number(value: Any) -> int:
    return int(value.value or 0)


class FakeCuda:
    """`fabric`: allocations are made with a fabric handle, `hidden`: with none; else plain ones, with one of IPC.

    `calls` are the names of what was called, in order; `fails` is one that answers with an error. `attributes` are
    those that the device has; `properties` is what was asked of the last memory that was made.
    """

    def __init__(self, kind: str = "plain", fails: str = "", attributes: tuple[int, ...] = ()) -> None:
        self.kind, self.fails, self.attributes, self.calls = kind, fails, attributes, list[str]()
        self.properties = b""
        self._files: dict[int, memoryview] = {}

    def memory(self, nbytes: int) -> torch.Tensor:
        """Zeroed "device" memory."""
        return torch.frombuffer(allocate(nbytes), dtype=torch.uint8)

    def __getattr__(self, name: str) -> Callable[..., int]:
        does = getattr(type(self), f"_{name}", lambda *_: 0)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            return REFUSED if name == self.fails else does(self, *arguments) or 0

        return call

    def _cuMemGetAddressRange_v2(self, base: Any, nbytes: Any, address: Any) -> None:
        held = next(h for h in _ALLOCATED.values() if h.address <= _number(address) < h.address + h.nbytes)
        base._obj.value, nbytes._obj.value = held.address, held.nbytes

    def _cuPointerGetAttribute(self, answer: Any, which: Any, _address: Any) -> None:
        assert _number(which) == cuda_exports.IS_IPC_CAPABLE
        answer._obj.value = int(self.kind == "plain")

    def _cuIpcGetMemHandle(self, handle: Any, base: Any) -> None:
        ctypes.memmove(ctypes.addressof(handle._obj), self._share(_number(base)), cuda_virtual.HANDLE_BYTES)

    def _cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: Any) -> int:
        assert _number(flags) == cuda_exports.ENABLE_PEER_ACCESS
        return self._open(address._obj, bytes(handle))

    def _cuIpcCloseMemHandle(self, address: Any) -> None:
        del self._files[_number(address)]

    def _cuMemRetainAllocationHandle(self, owner: Any, base: Any) -> None:
        owner._obj.value = _number(base)

    def _cuMemGetAllocationPropertiesFromHandle(self, properties: Any, _owner: Any) -> None:
        types = ctypes.c_int.from_address(_number(properties) + 4)
        types.value = cuda_virtual.FABRIC if self.kind == "fabric" else 1

    def _cuMemExportToShareableHandle(self, handle: Any, owner: Any, kind: Any, _flags: Any) -> None:
        assert _number(kind) == cuda_virtual.FABRIC
        ctypes.memmove(ctypes.addressof(handle), self._share(_number(owner)), cuda_virtual.HANDLE_BYTES)

    def _cuMemImportFromShareableHandle(self, owner: Any, handle: Any, kind: Any) -> int:
        assert _number(kind) == cuda_virtual.FABRIC
        return self._open(owner._obj, bytes(handle))

    def _cuMemAddressReserve(self, address: Any, *_: Any) -> None:
        address._obj.value = next(reversed(self._files))  # mapped where it is opened

    def _cuMemRelease(self, owner: Any) -> None:
        self._files.pop(_number(owner), None)

    def _cuDeviceGetAttribute(self, answer: Any, attribute: Any, _device: Any) -> None:
        answer._obj.value = int(_number(attribute) in self.attributes)

    def _cuMemGetAllocationGranularity(self, grain: Any, _properties: Any, which: Any) -> None:
        assert _number(which) == cuda_virtual.RECOMMENDED
        grain._obj.value = GRAIN

    def _cuMemCreate(self, owner: Any, nbytes: Any, properties: Any, _flags: Any) -> None:
        assert _number(nbytes) % GRAIN == 0
        self.properties = bytes((ctypes.c_uint8 * 32).from_address(_number(properties)))
        self._take(owner._obj, _number(nbytes))

    def _cuMemAlloc_v2(self, address: Any, nbytes: Any) -> None:
        self._take(address._obj, _number(nbytes))

    def _cuMemFree_v2(self, address: Any) -> None:
        del self._files[_number(address)]

    def _take(self, address: ctypes.c_uint64, nbytes: int) -> None:
        memory = memoryview(allocate(nbytes))
        address.value = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._files[address.value] = memory

    def _share(self, base: int) -> bytes:
        share = shares_of([(base, 1)])[0]
        assert share is not None
        return _text(share)

    def _open(self, address: ctypes.c_uint64, handle: bytes) -> int:
        pid, fd, token = handle.rstrip(b"\0").decode().split("/")
        try:
            file = map_file(SharedRange(int(pid), int(fd), token, 0), MapMode.WRITE)
        except NotShared:
            return REFUSED
        address.value = ctypes.addressof(ctypes.c_char.from_buffer(file))
        self._files[address.value] = file
        return 0


def drive(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process use the driver, whose devices are idle at once. What others left goes to another."""
    left = FakeCuda("plain")
    monkeypatch.setattr(cuda_driver, "leave_captures_alone", lambda: None)
    monkeypatch.setattr(releases, "wait_for", lambda device: None)
    monkeypatch.setattr(cuda_driver, "library", lambda: left)
    collected()
    monkeypatch.setattr(cuda_driver, "library", lambda: fake)


def collected() -> None:
    """All memory that nobody holds has been given back."""
    gc.collect()
    done = threading.Event()
    releases.RELEASES.when_dead(set[int](), torch.device("cpu"), done.set)
    assert done.wait(10)
