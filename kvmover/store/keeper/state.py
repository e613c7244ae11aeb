"""The state, events and actions of a keeper's state machine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from kvmover.store.index import Index
from kvmover.store.keeper.journal import slab_name
from kvmover.store.keeper.messages import Answer, Request
from kvmover.store.record import BLOCK_BYTES


class SessionOpened(msgspec.Struct, frozen=True):
    """A client has connected. Its number is never reused."""

    session: int


class SessionHeard(msgspec.Struct, frozen=True):
    """A client has sent a request; None if it was malformed."""

    session: int
    request: Request | None


class SessionOver(msgspec.Struct, frozen=True):
    """A connection has ended, by either side."""

    session: int


class SlabFailed(msgspec.Struct, frozen=True):
    """The memory of a slab could not be allocated, filled or sealed: the slab must be dropped."""

    slab: int


class SlabProved(msgspec.Struct, frozen=True):
    """A sealed slab was compared with its digests. `bad`: byte offsets of objects that differ."""

    slab: int
    bad: frozenset[int]


class KeeperTick(msgspec.Struct, frozen=True):
    """Time has passed."""


KeeperEvent: TypeAlias = SessionOpened | SessionHeard | SessionOver | SlabFailed | SlabProved | KeeperTick


class FillGrant(msgspec.Struct, frozen=True):
    """A grant of a writable descriptor of a slab."""

    slab: int


class ReadGrant(msgspec.Struct, frozen=True):
    """A grant of read-only descriptors of slabs."""

    slabs: list[int]


class JournalGrant(msgspec.Struct, frozen=True):
    """A grant of a read-only descriptor of a namespace's journal."""

    namespace: bytes


class MakeSlab(msgspec.Struct, frozen=True):
    """Allocate the memory of a slab."""

    slab: int
    nbytes: int


class CopyObjects(msgspec.Struct, frozen=True):
    """Copy objects to a slab that is not published yet. `moves`: source offset, target offset and bytes of each."""

    source: int
    slab: int
    moves: list[tuple[int, int, int]]


class SealSlab(msgspec.Struct, frozen=True):
    """Seal a slab against writes and release its memory beyond byte `end`."""

    slab: int
    end: int


class DropSlab(msgspec.Struct, frozen=True):
    """Release the memory of a slab, even under readers."""

    slab: int


class AppendEntry(msgspec.Struct, frozen=True):
    """Append an entry to the journal of a namespace."""

    namespace: bytes
    entry: bytes


class Reply(msgspec.Struct, frozen=True):
    """Answer a client, with descriptors if granted."""

    session: int
    answer: Answer
    grant: FillGrant | ReadGrant | JournalGrant | None = None


KeeperAction: TypeAlias = MakeSlab | CopyObjects | SealSlab | DropSlab | AppendEntry | Reply


@dataclass(slots=True, eq=False)
class Slab:
    """A slab, filled by one client, once and in order. `writer`: the client's number, None once sealed.

    `nbytes`: memory it takes; `end`: end of the committed bytes; `touched_s`: second of the last commit. `is_proved`:
    compared with its digests since it was sealed.
    """

    number: int
    namespace: bytes
    nbytes: int
    writer: int | None
    touched_s: int
    end: int = 0
    is_proved: bool = False

    @property
    def name(self) -> str:
        """Name of the slab in an index."""
        return slab_name(self.number)


@dataclass(slots=True, eq=False)
class KeptNamespace:
    """The objects of one namespace, and its journal, from place `base` to `end`.

    `added`, `added_bytes`: objects ever added to this journal, and the bytes of their entries.
    """

    manifest: bytes
    index: Index = field(default_factory=Index)
    base: int = 0
    end: int = 0
    added: int = 0
    added_bytes: int = 0


@dataclass(slots=True, eq=False)
class KeeperSession:
    """A connected client. `namespace`: set by Attach; `fenced_by`: the newer generation that took its place."""

    number: int
    namespace: bytes | None = None
    fleet: str = ""
    generation: int = 0
    slab: int | None = None
    fenced_by: int | None = None


@dataclass(slots=True, eq=False)
class KeeperState:
    """The state of a keeper. `generations`: the newest generation of each fleet that ever attached."""

    capacity_bytes: int
    slab_bytes: int
    slabs: dict[int, Slab] = field(default_factory=dict[int, Slab])
    namespaces: dict[bytes, KeptNamespace] = field(default_factory=dict[bytes, KeptNamespace])
    sessions: dict[int, KeeperSession] = field(default_factory=dict[int, KeeperSession])
    generations: dict[str, int] = field(default_factory=dict[str, int])
    next_slab: int = 1

    @property
    def held_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(slab.nbytes for slab in self.slabs.values())

    def held_of(self, namespace: bytes) -> int:
        """Return the bytes of one namespace's slabs."""
        return sum(slab.nbytes for slab in self.slabs.values() if slab.namespace == namespace)

    def check(self) -> None:
        """Check the invariants. Raises AssertionError if one is violated."""
        assert self.held_bytes <= self.capacity_bytes, "more memory than the keeper has"
        for slab in self.slabs.values():
            assert slab.number < self.next_slab, "a slab that is still to come"
            assert slab.namespace in self.namespaces, "a slab of nobody's"
            assert slab.end <= slab.nbytes, "objects beyond the end of a slab"
            assert slab.end % BLOCK_BYTES == 0, "a slab that ends within a block"
            assert slab.writer is None or not slab.is_proved, "a slab that may still change was proved"
            if slab.writer is None:
                assert slab.nbytes == slab.end, "a sealed slab that takes more than it holds"
                assert not self.namespaces[slab.namespace].index.empty(slab.name), "a sealed slab that holds nothing"
            else:
                writer = self.sessions[slab.writer]
                assert writer.slab == slab.number, "a slab that nobody fills"
                assert writer.fenced_by is None, "a slab that two generations fill"
            self._check_places(slab)
        for session in self.sessions.values():
            assert session.slab is None or self.slabs[session.slab].writer == session.number, "a slab that was lost"
            newest = self.generations.get(session.fleet, 0)
            assert session.generation == newest or session.fenced_by is not None, "two generations own one fleet"
        for namespace, kept in self.namespaces.items():
            held = sum(len(kept.index.objects(s.name)) for s in self.slabs.values() if s.namespace == namespace)
            assert held == kept.index.holdings.objects, "an object in no slab"

    def _check_places(self, slab: Slab) -> None:
        end = 0
        for each in sorted(self.namespaces[slab.namespace].index.objects(slab.name), key=lambda each: each.offset):
            assert each.offset >= end, "two objects in one place"
            end = each.offset + each.held_bytes
        assert end <= slab.end, "an object that was not committed"
