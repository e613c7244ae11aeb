"""Objects is what keeps the objects of a namespace, whatever engine is under it: segments in files, or others.

An object is the box of a page that one rank wrote, whole and with the digest of each of its cells. A PartView says
which objects make up what a rank wants; what is here puts them whole, reads ranges of their cells, and says which are
there.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

import msgspec

from kvmover.store.cover import ObjectShare
from kvmover.store.part import PagePart, PartKey
from kvmover.store.store_results import Collected, Counters, Recovered, Stat, Verified
from kvmover.transport import Memory

DIGEST, EIO = "digest", os.strerror(errno.EIO)

#: How an engine names an object of its own.
Named = TypeVar("Named")
NamedOut = TypeVar("NamedOut", covariant=True)


class FoundPage(Protocol[NamedOut]):
    """A page that is there: its objects, and the part that each of them holds."""

    @property
    def objects(self) -> Sequence[NamedOut]:
        """As the engine names them."""
        ...

    @property
    def parts(self) -> tuple[PartKey, ...]:
        """Of each object, in the same order."""
        ...


Plan = Callable[[tuple[PartKey, ...]], tuple[ObjectShare, ...] | None]


class ObjectDraft(msgspec.Struct, frozen=True, gc=False):
    """An object to be put: of which page, and where its bytes lie, packed `head layer kv token dim`."""

    page: bytes
    address: int


class ObjectRead(msgspec.Struct, Generic[Named], frozen=True, gc=False):
    """One object's share of page `item` of a batch, whose part begins at `address`."""

    item: int
    address: int
    each: Named
    source: ObjectShare


class Fault(Enum):
    """What a failed read says: SUSPECT of the object, which is looked at again; HERE of this process or the system.

    A process that has no descriptor left, or a network that is down, knows nothing against the object.
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
    """The word of a second look: WELL; GONE by somebody's hand; BAD for everybody, and deleted; SPARED: bad after too
    many others, or on a disk that does not give it, and left to others; UNKNOWN: the system did not say.
    """

    WELL = "well"
    GONE = "gone"
    BAD = "bad"
    SPARED = "spared"
    UNKNOWN = "unknown"


class Watcher(Protocol):
    """Hears of losses, under the store's lock and in whichever thread learnt of them: it takes a note and returns."""

    def lost(self, page: bytes) -> None:
        """`page` has lost an object. Others may still cover for it."""
        ...


class Objects(Protocol[Named]):
    """The objects of one namespace. Safe for one thread that asks, one that reads and one that writes.

    `parts_of` asks nobody whose answer may take long: an engine's scheduler waits for it. What the system does not say
    is a miss, counted in `counters.lagged`. But for what is said below nothing raises: one object's trouble, or one
    batch's, is an answer.
    """

    #: What was done here since it was opened, and what opening found.
    counters: Counters
    recovered: Recovered

    @property
    def name(self) -> str:
        """The way that bytes go, for people."""
        ...

    def register(self, memory: Memory) -> None:
        """Objects may be read into and written from `memory`, which the caller keeps. Raises DescriptorError."""
        ...

    def deregister(self, memory: Memory) -> None:
        """Nothing goes to or comes from `memory` any more. Raises DescriptorError for what is not registered."""
        ...

    def memory_at(self, address: int, nbytes: int) -> memoryview:
        """Registered memory as it is, no copy. Raises DescriptorError outside of all."""
        ...

    def parts_of(self, pages: Sequence[bytes], wanted: PartKey) -> list[tuple[PartKey, ...]]:
        """Of each page the parts whose objects are there; () of one that is absent or too old.

        All that `wanted` may be made of are among them: what can't list asks for no others.
        """
        ...

    def find(self, pages: Sequence[bytes], wanted: PartKey) -> Sequence[FoundPage[Named] | None]:
        """The pages of these hashes, None where one is absent or too old, with what `wanted` may be made of."""
        ...

    def put(self, part: PagePart, key: PartKey, drafts: Sequence[ObjectDraft], keep: Collection[bytes]) -> list[str]:
        """Put objects whole, each of another page: for each the reason why it is not there now, "" for one that is.

        Room is made by evicting others, but no page of `keep`. The first of two writers wins, who may be another.
        """
        ...

    def owe(self, objects: Sequence[Named]) -> None:
        """A put was answered by these objects: the next `flush` makes them as safe as what was put here."""
        ...

    def sweep(self, part: PagePart, plan: Plan, pages: Sequence[bytes], addresses: Sequence[int]) -> Collection[int]:
        """Read what needs no check: which of the pages are whole at their addresses now. Others are looked for.

        `plan`: how the part is made of objects of some parts, None where one is missing.
        """
        return ()

    def read(self, part: PagePart, reads: Sequence[ObjectRead[Named]]) -> list[Failure[Named]]:
        """Read cells to their places and check each of them; what failed. Where a read failed there is garbage."""
        ...

    def judge(self, failure: Failure[Named]) -> tuple[Verdict, str]:
        """Look again at an object that a read failed of, past all caches, and delete it where it is bad. With the
        verdict the reason.
        """
        ...

    def used(self, pages: Sequence[bytes]) -> None:
        """Pages were read, in this order: they are the last to be evicted."""
        ...

    def watch(self, watcher: Watcher) -> None:
        """Tell `watcher`, which the caller keeps, of every page that loses an object, as soon as it is known here."""
        ...

    def evict(self, nbytes: int) -> int:
        """Evict the least recently read pages, whole, until `nbytes` bytes are free; the bytes freed."""
        ...

    def collect(self) -> Collected:
        """Upkeep: write down what was read, delete what is too old or too much, tidy up after others."""
        ...

    def flush(self) -> None:
        """Make all that was put here, or owed, as safe as it can be, and visible to others. Raises StoreError."""
        ...

    def clear(self) -> int:
        """Delete every page of this namespace that is known, and nothing else; how many. Raises StoreError."""
        ...

    def stat(self) -> Stat:
        """What the namespace holds, as far as is known here."""
        ...

    def verify(self, progress: Callable[[int], None] | None = None) -> Verified:
        """Read every known object whole and delete those that are bad. `progress` gets the bytes of each."""
        ...

    def close(self) -> None:
        """Flush, and give everything back. Safe to call twice."""
        ...
