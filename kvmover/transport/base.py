"""A Transport registers memory, writes or reads strided descriptors, notifies, and is polled for events.

One caller at a time drives it; it has no thread of its own. A call blocks only for its call to the backend:
completions, failures and notes come from `poll`. `memory_of` turns tensors into addresses, without importing torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvmover.errors import DescriptorError
from kvmover.fields import settle

#: Columns of a descriptor table, in NIXL's order: `count` runs of `nbytes` bytes, the starts `stride` bytes apart.
ADDRESS, NBYTES, DEVICE, STRIDE, COUNT = range(5)


class MemoryKind(StrEnum):
    """A memory's kind, by NIXL's names of its segments."""

    HOST = "DRAM"
    DEVICE = "VRAM"


class Revocation(StrEnum):
    """A transport's guarantee that a peer's earlier operations never land after a deregistration: proven or not."""

    PROVEN = "proven"
    UNPROVEN = "unproven"


@dataclass(frozen=True, slots=True)
class Memory:
    """A contiguous byte range of one process. The owner keeps it allocated while it is registered.

    `device` is the CUDA ordinal for device memory and 0 for host memory.
    """

    kind: MemoryKind
    address: int
    nbytes: int
    device: int = 0

    def __post_init__(self) -> None:
        settle(self, "memory", DescriptorError, kind=MemoryKind)


@dataclass(frozen=True, slots=True, eq=False)
class Descriptors:
    """Strided byte runs in one kind of memory: the operands of a one-sided operation.

    `table` [n, 5] int64: address, nbytes, device, stride, count. `Descriptors.runs(HOST, [4096], [256])` is one dense
    run; a stride of 1024 and a count of 64 in one row are 64 rows of a head slice. Raises DescriptorError for an empty
    or malformed table.
    """

    kind: MemoryKind
    table: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        if self.table.ndim != 2 or self.table.shape[1] != 5 or self.table.dtype != np.int64:
            raise DescriptorError(
                f"descriptor table must be int64 [n, 5], got {self.table.dtype} {list(self.table.shape)}"
            )
        settle(self, "descriptors", DescriptorError, kind=MemoryKind)
        if not len(self.table):
            raise DescriptorError("descriptor table is empty")
        if len(self.table) == 1 and self.table[0, NBYTES] > 0 and self.table[0, COUNT] > 0:
            return
        if (self.table[:, [NBYTES, COUNT]] <= 0).any():
            bad = self.table[(self.table[:, [NBYTES, COUNT]] <= 0).any(axis=1)][0]
            raise DescriptorError(f"descriptor of {bad[NBYTES]} bytes x {bad[COUNT]} runs moves nothing")

    @classmethod
    def run(cls, kind: MemoryKind, address: int, nbytes: int, device: int = 0) -> Descriptors:
        """Returns one dense run, such as a packed chunk."""
        return cls(kind, np.array([[address, nbytes, device, nbytes, 1]], np.int64))

    @classmethod
    def runs(cls, kind: MemoryKind, address: npt.ArrayLike, nbytes: npt.ArrayLike, device: int = 0) -> Descriptors:
        """Returns dense runs, one a row: `address` [n] and `nbytes` [n] (or one number for all)."""
        start = np.asarray(address, np.int64).reshape(-1)
        length = np.broadcast_to(np.asarray(nbytes, np.int64), start.shape)
        ones = np.ones_like(start)
        return cls(kind, np.stack([start, length, ones * device, length, ones], axis=1))

    @property
    def count(self) -> int:
        """The number of byte runs, which decides the cost at a NIC or in a copy loop."""
        return int(self.table[0, COUNT] if len(self.table) == 1 else self.table[:, COUNT].sum())

    @property
    def nbytes(self) -> int:
        """The bytes of all runs together."""
        return int((self.table[:, NBYTES] * self.table[:, COUNT]).sum())


@dataclass(frozen=True, slots=True)
class Note:
    """A notification from `peer`. It arrives after the data of the write it was sent with."""

    peer: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Timing:
    """An operation's time in microseconds: in the call that posted it, and from before that call until `poll` saw its
    end.
    """

    post_us: float
    total_us: float


@dataclass(frozen=True, slots=True)
class Completed:
    """The operation `ticket` is done on this side: its local memory may be reused.

    The peer may be dead all the same: a copy into a stopped process completes too. `timing` is None from a transport
    without a wire.
    """

    ticket: int
    timing: Timing | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Failed:
    """The operation `ticket` failed; its target bytes are garbage.

    `quiescent` is False while the backend may still read the local or write the remote memory.
    """

    ticket: int
    peer: str
    error: Exception
    quiescent: bool


Event = Note | Completed | Failed


class Transport(Protocol):
    """A wire as the mover needs it. NIXL is the real one; loopback serves tests and one-process examples."""

    @property
    def name(self) -> str:
        """The transport's name, unique for ever: a restarted process gets another, so stale metadata is recognised."""
        ...

    @property
    def revocation(self) -> Revocation:
        """The guarantee of `deregister` against peers that still hold old metadata: the same for
        all memory, for ever.
        """
        ...

    def register(self, memory: Memory) -> None:
        """Make `memory` reachable by one-sided operations. Raises DescriptorError for a range that overlaps a
        registered one.

        A range that is registered again after `deregister` is new to peers: they need new metadata for it.
        """
        ...

    def deregister(self, memory: Memory) -> None:
        """End peers' access to `memory`; its owner may then free it.

        Raises DescriptorError for a range that is not registered, or one that an operation from here still uses.
        """
        ...

    def metadata(self) -> bytes:
        """Returns the bytes that a peer needs to connect; call it after all registrations."""
        ...

    def identify(self, metadata: bytes) -> str:
        """Returns the name of the peer behind `metadata`, without loading it. Raises PeerRefused as `connect` does."""
        ...

    def connect(self, metadata: bytes) -> str:
        """Load a peer's metadata and return the peer's name. Raises PeerRefused for damaged metadata."""
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

        `deadline_s`: seconds from now. `until`: time of the transport's clock (by default `time.monotonic`) from which
        posting is refused. It is checked last, so that a process that was suspended in between does no harm.

        Raises DescriptorError, PeerUnknown or LeaseOver before anything is posted. Later failures are `Failed` events.
        """
        ...

    def read(self, peer: str, local: Descriptors, remote: Descriptors, note: bytes, deadline_s: float) -> int:
        """Post a one-sided read, as `write` does; `note` reaches the peer after its bytes were read."""
        ...

    def notify(self, peer: str, note: bytes) -> None:
        """Send `note` without data. Raises PeerUnknown or PeerLost."""
        ...

    def poll(self) -> list[Event]:
        """Returns all events since the last call, in order for each peer. Never blocks."""
        ...

    def unsettled(self) -> frozenset[int]:
        """Returns tickets of failed operations that may still touch memory; a ticket leaves this set for good."""
        ...

    def close(self) -> None:
        """Release every handle, peer and registration. Safe to call twice."""
        ...


_KINDS = {"cpu": MemoryKind.HOST, "cuda": MemoryKind.DEVICE}


class DeviceLike(Protocol):
    """The part of `torch.device` that identifies its memory."""

    @property
    def type(self) -> str:
        """The device's type, `cpu` or `cuda`; other types cannot be registered."""
        ...

    @property
    def index(self) -> int | None:
        """The CUDA ordinal; None for a CPU."""
        ...


class TensorLike(Protocol):
    """The part of `torch.Tensor` that locates its bytes."""

    @property
    def device(self) -> DeviceLike:
        """The device of its memory."""
        ...

    def data_ptr(self) -> int:
        """Returns the address of the first element."""
        ...

    def numel(self) -> int:
        """Returns the number of elements."""
        ...

    def element_size(self) -> int:
        """Returns the bytes of an element."""
        ...

    def is_contiguous(self) -> bool:
        """Returns True if its elements are one dense range, in order."""
        ...


def memory_of(tensor: TensorLike) -> Memory:
    """Returns the bytes of a contiguous CPU or CUDA tensor, which must outlive their registration. Raises
    DescriptorError for any other tensor.
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

    Neighbours stay apart, since each CUDA allocation is registered by itself: of [0, 8) [4, 12) [12, 16) the first two
    are merged.
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
