"""The Objects protocol is the storage engine of a namespace's objects: segments in files, or a service.

An object is the box of a page that one rank wrote, whole and with the digest of each of its cells. A PartView says
which objects cover the part of a rank; Objects puts objects whole, reads ranges of their cells, and lists those
present.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

import msgspec

from kvmover.store.part import ObjectShare, PagePart, PartKey
from kvmover.store.store_results import Collected, Counters, Recovered, Stat, Verified
from kvmover.transport import Memory

DIGEST, EIO = "digest", os.strerror(errno.EIO)

#: An engine's own name of an object.
Named = TypeVar("Named")
NamedOut = TypeVar("NamedOut", covariant=True)


class FoundPage(Protocol[NamedOut]):
    """A present page: its objects, and the part that each of them holds."""

    @property
    def objects(self) -> Sequence[NamedOut]:
        """Returns the engine's names of the objects."""
        ...

    @property
    def parts(self) -> tuple[PartKey, ...]:
        """Returns the part of each object, in the same order."""
        ...


Plan = Callable[[tuple[PartKey, ...]], tuple[ObjectShare, ...] | None]


class ObjectDraft(msgspec.Struct, frozen=True, gc=False):
    """An object to be put: its page, and the address of its bytes, packed `head layer kv token dim`."""

    page: bytes
    address: int


class ObjectRead(msgspec.Struct, Generic[Named], frozen=True, gc=False):
    """An object's share of page `item` of a batch, whose part begins at `address`."""

    item: int
    address: int
    each: Named
    source: ObjectShare


class Fault(Enum):
    """The cause of a failed read: SUSPECT, the object, which is examined again; HERE, this process or the system.

    A process out of descriptors, or a network that is down, is no evidence against the object.
    """

    SUSPECT = "suspect"
    HERE = "here"


@dataclass(frozen=True, slots=True)
class Failure(Generic[Named]):
    """A read that did not give the right bytes."""

    read: ObjectRead[Named]
    fault: Fault
    reason: str


class Verdict(Enum):
    """The verdict of a second look: WELL; GONE: deleted by a process; BAD for every process, and deleted.

    SPARED: unreadable, or bad beyond the deletion budget, and left to other processes; UNKNOWN: the system did not say.
    """

    WELL = "well"
    GONE = "gone"
    BAD = "bad"
    SPARED = "spared"
    UNKNOWN = "unknown"


class Watcher(Protocol):
    """A listener for losses, called under the store's lock in any thread: it must only take a note and return."""

    def lost(self, page: bytes) -> None:
        """Note that `page` has lost an object; its other objects may still cover it."""
        ...


class Objects(Protocol[Named]):
    """The objects of one namespace. Safe for one look-up thread, one reading and one writing thread.

    `parts_of` never waits long, since an engine's scheduler waits for it; a look-up that the system fails is a miss,
    counted in `counters.lagged`. Methods raise only as their docstrings say: failures of an object or a batch are
    returned.
    """

    #: Operation counts since opening, and the findings of opening.
    counters: Counters
    recovered: Recovered

    @property
    def name(self) -> str:
        """Returns the engine and its transfer path, for messages."""
        ...

    def register(self, memory: Memory) -> None:
        """Register `memory` for reads and puts; the caller keeps it alive. Raises DescriptorError if unreachable."""
        ...

    def deregister(self, memory: Memory) -> None:
        """Deregister `memory`. Raises DescriptorError unless it was registered."""
        ...

    def memory_at(self, address: int, nbytes: int) -> memoryview:
        """Returns a zero-copy view of registered memory. Raises DescriptorError outside it."""
        ...

    def parts_of(self, pages: Sequence[bytes], wanted: PartKey) -> list[tuple[PartKey, ...]]:
        """Returns the parts of each page's present objects; () if the page is absent or expired.

        Includes all parts that may cover `wanted`; an engine that cannot list asks only for these.
        """
        ...

    def find(self, pages: Sequence[bytes], wanted: PartKey) -> Sequence[FoundPage[Named] | None]:
        """Returns the pages of these hashes with the objects that may cover `wanted`; None if absent or expired."""
        ...

    def put(self, part: PagePart, key: PartKey, drafts: Sequence[ObjectDraft], keep: Collection[bytes]) -> list[str]:
        """Put objects whole, each of a different page. Returns each one's reason for failure, "" if now present.

        Evicts pages outside `keep` to make room. The first of two writers wins, be it another process.
        """
        ...

    def owe(self, objects: Sequence[Named]) -> None:
        """Include these existing objects in the next `flush`."""
        ...

    def sweep(self, part: PagePart, plan: Plan, pages: Sequence[bytes], addresses: Sequence[int]) -> Collection[int]:
        """Read pages that need no look-up. Returns positions of those now whole at their addresses.

        The caller looks up the rest. `plan`: maps parts to the shares that make up `part`, None if any is missing.
        """
        return ()

    def read(self, part: PagePart, reads: Sequence[ObjectRead[Named]]) -> list[Failure[Named]]:
        """Read cells to their places and check each. Returns the failures, whose memory holds garbage."""
        ...

    def judge(self, failure: Failure[Named]) -> tuple[Verdict, str]:
        """Re-examine the object of a failed read, past all caches, and delete it if bad.

        Returns the verdict and its reason.
        """
        ...

    def used(self, pages: Sequence[bytes]) -> None:
        """Mark pages as read, in this order: they are evicted last."""
        ...

    def watch(self, watcher: Watcher) -> None:
        """Tell `watcher` of each page that loses an object, once known here. The caller keeps it alive."""
        ...

    def evict(self, nbytes: int) -> int:
        """Evict the least recently read pages, whole, until `nbytes` bytes are free. Returns the bytes freed."""
        ...

    def collect(self) -> Collected:
        """Run upkeep: store last-use times, expire old pages, evict to the quota, clean up after dead writers."""
        ...

    def flush(self) -> None:
        """Make all objects put or owed here durable and visible to other processes. Raises StoreError."""
        ...

    def clear(self) -> int:
        """Delete every known page of this namespace. Returns their number. Raises StoreError."""
        ...

    def stat(self) -> Stat:
        """Returns the namespace's statistics, as far as known here."""
        ...

    def verify(self, progress: Callable[[int], None] | None = None) -> Verified:
        """Read every known object whole and delete bad ones. `progress` is called with the bytes of each."""
        ...

    def close(self) -> None:
        """Flush and release all resources. Idempotent."""
        ...
