"""A Transport registers memory, writes or reads strided descriptors, notifies, and is polled for events.

One caller at a time drives it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from kvmover.c_core import NATIVE
from kvmover.errors import DescriptorError
from kvmover.fields import settle

#: Columns of a descriptor table, in NIXL's order: `count` runs of `nbytes` bytes, the starts `stride` bytes apart.
ADDRESS, NBYTES, DEVICE, STRIDE, COUNT = range(5)


class MemoryKind(StrEnum):
    """A memory's kind, by NIXL's names."""

    HOST = "DRAM"
    DEVICE = "VRAM"


class Revocation(StrEnum):
    """A guarantee that peers' operations never land after a deregistration: proven or not."""

    PROVEN = "proven"
    UNPROVEN = "unproven"


@dataclass(frozen=True, slots=True)
class Memory:
    """A contiguous byte range of one process, which its owner keeps allocated while registered.

    `device` is the CUDA ordinal, 0 for host memory.
    """

    kind: MemoryKind
    address: int
    nbytes: int
    device: int = 0

    def __post_init__(self) -> None:
        settle(self, "memory", DescriptorError, kind=MemoryKind)


def run_count_in_python(table: npt.NDArray[np.int64]) -> int:
    """Returns the runs of all rows, at most 2^63 - 1; 0 where a row moves nothing."""
    return 0 if (table[:, [NBYTES, COUNT]] <= 0).any() else min(sum(table[:, COUNT].tolist()), (1 << 63) - 1)


#: `run_count_in_python`, in C where it was built.
run_count: Callable[[npt.NDArray[np.int64]], int] = getattr(NATIVE, "run_count", run_count_in_python)


def short_strides_in_python(table: npt.NDArray[np.int64]) -> bool:
    """Returns True if the stride of a row is below its length, as the stride of a single run may be."""
    return bool((table[:, STRIDE] < table[:, NBYTES]).any())


#: `short_strides_in_python`, in C where it was built.
short_strides: Callable[[npt.NDArray[np.int64]], bool] = getattr(NATIVE, "short_strides", short_strides_in_python)


@dataclass(frozen=True, slots=True, eq=False)
class Descriptors:
    """Strided byte runs in one kind of memory: the operands of a one-sided operation.

    `table` [n, 5] int64: address, nbytes, device, stride, count. `count`: all of its byte runs. Raises DescriptorError
    for an empty or malformed table.
    """

    kind: MemoryKind
    table: npt.NDArray[np.int64]
    count: int = field(init=False)

    def __post_init__(self) -> None:
        if self.table.ndim != 2 or self.table.shape[1] != 5 or self.table.dtype != np.int64:
            raise DescriptorError(
                f"descriptor table must be int64 [n, 5], got {self.table.dtype} {list(self.table.shape)}"
            )
        settle(self, "descriptors", DescriptorError, kind=MemoryKind)
        if not len(self.table):
            raise DescriptorError("descriptor table is empty")
        count = run_count(np.ascontiguousarray(self.table))
        if not count:
            bad = self.table[(self.table[:, [NBYTES, COUNT]] <= 0).any(axis=1)][0]
            raise DescriptorError(f"descriptor of {bad[NBYTES]} bytes x {bad[COUNT]} runs moves nothing")
        object.__setattr__(self, "count", count)

    @classmethod
    def run(cls, kind: MemoryKind, address: int, nbytes: int, device: int = 0) -> Descriptors:
        """Returns one dense run."""
        return cls(kind, np.array([[address, nbytes, device, nbytes, 1]], np.int64))

    @classmethod
    def runs(
        cls, kind: MemoryKind, address: npt.ArrayLike, nbytes: npt.ArrayLike, device: npt.ArrayLike = 0
    ) -> Descriptors:
        """Returns dense runs, one a row: `address` [n], `nbytes` and `device` [n] or one for all."""
        start = np.asarray(address, np.int64).reshape(-1)
        length = np.broadcast_to(np.asarray(nbytes, np.int64), start.shape)
        devices = np.broadcast_to(np.asarray(device, np.int64), start.shape)
        return cls(kind, np.stack([start, length, devices, length, np.ones_like(start)], axis=1))

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all runs."""
        return int((self.table[:, NBYTES] * self.table[:, COUNT]).sum())

    def dense(self) -> Descriptors:
        """Returns the same runs in the same order, one a row."""
        if len(self.table) == self.count:
            return self
        repeats = self.table[:, COUNT]
        rows = np.repeat(self.table, repeats, axis=0)
        nth = np.arange(len(rows)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        return type(self).runs(self.kind, rows[:, ADDRESS] + nth * rows[:, STRIDE], rows[:, NBYTES], rows[:, DEVICE])


class Note(msgspec.Struct, frozen=True):
    """A notification from `peer`, after the data of its write."""

    peer: str
    payload: bytes


class Timing(msgspec.Struct, frozen=True):
    """An operation's time in the call that posted it, and from there until `poll` saw its end."""

    post_us: float
    total_us: float


@dataclass(frozen=True, slots=True)
class Completed:
    """The operation `ticket` is done on this side: its local memory may be reused.

    A copy into a stopped peer completes too. `timing` is None without a wire.
    """

    ticket: int
    timing: Timing | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Failed:
    """The operation `ticket` failed; its target bytes are garbage.

    `quiescent`: False while the backend may still read the local or write the remote memory.
    """

    ticket: int
    peer: str
    error: Exception
    quiescent: bool


Event = Note | Completed | Failed


class Transport(Protocol):
    """A wire as the mover needs it."""

    @property
    def name(self) -> str:
        """Returns a name unique for ever, so that a restarted process's stale metadata is recognised."""
        ...

    @property
    def revocation(self) -> Revocation:
        """Returns the guarantee of `deregister`, always the same."""
        ...

    def register(self, memory: Memory) -> None:
        """Make `memory` reachable by one-sided operations. Raises DescriptorError for an overlap.

        A range registered again needs new metadata.
        """
        ...

    def deregister(self, memory: Memory) -> None:
        """End peers' access to `memory`; its owner may then free it.

        Raises DescriptorError if it is not registered, or an operation from here still uses it.
        """
        ...

    def metadata(self) -> bytes:
        """Returns the bytes for peers to connect, once all memory is registered."""
        ...

    def identify(self, metadata: bytes) -> str:
        """Returns the name of the peer behind `metadata`, without loading it. Raises as `connect`."""
        ...

    def connect(self, metadata: bytes) -> str:
        """Load a peer's metadata. Returns the peer's name. Raises PeerRefused for damaged metadata."""
        ...

    def disconnect(self, peer: str) -> None:
        """Forget a peer. Operations in flight to it fail; unknown peers are ignored."""
        ...

    def write(
        self,
        peer: str,
        local: Descriptors,
        remote: Descriptors,
        note: bytes,
        deadline_s: float,
        until: float = math.inf,
    ) -> int:
        """Post a one-sided write and return its ticket; `note` reaches the peer after the bytes.

        `deadline_s`: from now. `until`: time of the transport's clock (by default `time.monotonic`) from which posting
        is refused, checked last.

        Raises DescriptorError, PeerUnknown or LeaseOver before it posts. Later failures are `Failed` events.
        """
        ...

    def read(self, peer: str, local: Descriptors, remote: Descriptors, note: bytes, deadline_s: float) -> int:
        """Post a read as `write` does; `note` reaches the peer after its bytes were read."""
        ...

    def notify(self, peer: str, note: bytes) -> None:
        """Send `note` without data. Raises PeerUnknown or PeerLost."""
        ...

    def poll(self) -> list[Event]:
        """Returns all events since the last call, in order for each peer. Never blocks."""
        ...

    def unsettled(self) -> frozenset[int]:
        """Returns tickets of failed operations that may still touch memory; one leaves this set for good."""
        ...

    def close(self) -> None:
        """Release all handles, peers and registrations. May be repeated."""
        ...


_KINDS = {"cpu": MemoryKind.HOST, "cuda": MemoryKind.DEVICE}


class DeviceLike(Protocol):
    """The part of `torch.device` that identifies its memory."""

    @property
    def type(self) -> str:
        """Returns `cpu` or `cuda`; other types cannot be registered."""
        ...

    @property
    def index(self) -> int | None:
        """Returns the CUDA ordinal; None for a CPU."""
        ...


class TensorLike(Protocol):
    """The part of `torch.Tensor` that locates its bytes."""

    @property
    def device(self) -> DeviceLike:
        """Returns its memory's device."""
        ...

    def data_ptr(self) -> int:
        """Returns the first element's address."""
        ...

    def numel(self) -> int:
        """Returns the number of elements."""
        ...

    def element_size(self) -> int:
        """Returns the bytes of an element."""
        ...

    def is_contiguous(self) -> bool:
        """Returns True if its elements are dense and in order."""
        ...


def memory_of(tensor: TensorLike) -> Memory:
    """Returns a tensor's bytes, which must outlive their registration.

    Raises DescriptorError if it is not contiguous, empty, or neither on CPU nor CUDA.
    """
    device = tensor.device
    if device.type not in _KINDS:
        raise DescriptorError(f"memory of a tensor on {device} cannot be registered, only of one on cpu or cuda")
    if not tensor.is_contiguous():
        raise DescriptorError("a tensor that is not contiguous is no single range: register what it is a view of")
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        raise DescriptorError("an empty tensor has no memory")
    return Memory(_KINDS[device.type], tensor.data_ptr(), nbytes, device.index or 0)


def union(memories: Iterable[Memory]) -> list[Memory]:
    """Returns ranges to register for `memories`: overlapping ones, as views of one allocation are, are merged.

    Neighbours stay apart, as separate CUDA allocations: of [0, 8) [4, 12) [12, 16) two are merged.
    """
    found: list[Memory] = []
    for memory in sorted(set(memories), key=lambda one: (one.kind, one.device, one.address)):
        last = found[-1] if found else None
        if last is None or (last.kind, last.device) != (memory.kind, memory.device) or memory.address >= end(last):
            found.append(memory)
        else:
            found[-1] = replace(last, nbytes=max(end(last), end(memory)) - last.address)
    return found


def end(memory: Memory) -> int:
    """Returns the first address behind `memory`."""
    return memory.address + memory.nbytes


def whole(memory: Memory) -> Descriptors:
    """Returns all of `memory` as one run."""
    return Descriptors.runs(memory.kind, memory.address, memory.nbytes, memory.device)
