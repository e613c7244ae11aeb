"""What a keeper's state machine is made of: slabs, namespaces and sessions, what happens to them, what it asks for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from kvmover.store.index import Index
from kvmover.store.keeper.journal import slab_name
from kvmover.store.keeper.messages import Answer, Request
from kvmover.store.record import BLOCK_BYTES


class SessionOpened(msgspec.Struct, frozen=True):
    """Somebody has connected. Sessions are numbered, and no number comes twice."""

    session: int


class SessionHeard(msgspec.Struct, frozen=True):
    """A session has said something; None: nothing that can be understood."""

    session: int
    request: Request | None


class SessionOver(msgspec.Struct, frozen=True):
    """A connection has ended, by whatever hand."""

    session: int


class SlabFailed(msgspec.Struct, frozen=True):
    """The memory of a slab cannot be had, or cannot be sealed: nothing is to be read from it."""

    slab: int


class SlabProved(msgspec.Struct, frozen=True):
    """A sealed slab was read whole: `bad` are offsets of objects that are not what their digests say."""

    slab: int
    bad: frozenset[int]


class KeeperTick(msgspec.Struct, frozen=True):
    """Time has passed."""


KeeperEvent: TypeAlias = SessionOpened | SessionHeard | SessionOver | SlabFailed | SlabProved | KeeperTick


class FillGrant(msgspec.Struct, frozen=True):
    """A descriptor of a slab, to write."""

    slab: int


class ReadGrant(msgspec.Struct, frozen=True):
    """Descriptors of slabs, to read."""

    slabs: list[int]


class JournalGrant(msgspec.Struct, frozen=True):
    """A descriptor of a namespace's journal, to read."""

    namespace: bytes


class MakeSlab(msgspec.Struct, frozen=True):
    """Get memory for a slab."""

    slab: int
    nbytes: int


class CopyObjects(msgspec.Struct, frozen=True):
    """Copy objects from one slab to another that nobody has seen: offsets there and here, and bytes, of each."""

    source: int
    slab: int
    moves: list[tuple[int, int, int]]


class SealSlab(msgspec.Struct, frozen=True):
    """Nobody may write to a slab from now on; what lies beyond byte `end` is given back."""

    slab: int
    end: int


class DropSlab(msgspec.Struct, frozen=True):
    """Give the memory of a slab back, whoever reads it."""

    slab: int


class AppendEntry(msgspec.Struct, frozen=True):
    """Add an entry to the journal of a namespace."""

    namespace: bytes
    entry: bytes


class Reply(msgspec.Struct, frozen=True):
    """Answer a session, with a descriptor where one is granted."""

    session: int
    answer: Answer
    grant: FillGrant | ReadGrant | JournalGrant | None = None


KeeperAction: TypeAlias = MakeSlab | CopyObjects | SealSlab | DropSlab | AppendEntry | Reply


@dataclass(slots=True, eq=False)
class Slab:
    """Memory that one session fills, once and in order. `writer`: None once it is sealed.

    `nbytes`: what it takes of the keeper; `end`: where what was committed ends; `touched_s`: second of the last commit.
    `is_proved`: it is sealed, and all that it has was compared with its digests since.
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
        """What an index calls it."""
        return slab_name(self.number)


@dataclass(slots=True, eq=False)
class KeptNamespace:
    """Objects of one namespace, and its journal: the place of its first byte, and of what comes next.

    `added`: objects that were ever added to this journal, and the bytes of their records.
    """

    manifest: bytes
    index: Index = field(default_factory=Index)
    base: int = 0
    end: int = 0
    added: int = 0
    added_bytes: int = 0


@dataclass(slots=True, eq=False)
class KeeperSession:
    """Who is connected. `namespace`: once it has attached; `fenced_by`: the generation that took its place."""

    number: int
    namespace: bytes | None = None
    fleet: str = ""
    generation: int = 0
    slab: int | None = None
    fenced_by: int | None = None


@dataclass(slots=True, eq=False)
class KeeperState:
    """All that a keeper knows. `generations`: the newest of each fleet that has ever attached."""

    capacity_bytes: int
    slab_bytes: int
    slabs: dict[int, Slab] = field(default_factory=dict[int, Slab])
    namespaces: dict[bytes, KeptNamespace] = field(default_factory=dict[bytes, KeptNamespace])
    sessions: dict[int, KeeperSession] = field(default_factory=dict[int, KeeperSession])
    generations: dict[str, int] = field(default_factory=dict[str, int])
    next_slab: int = 1

    @property
    def held_bytes(self) -> int:
        """What all slabs take."""
        return sum(slab.nbytes for slab in self.slabs.values())

    def held_of(self, namespace: bytes) -> int:
        """What the slabs of one namespace take."""
        return sum(slab.nbytes for slab in self.slabs.values() if slab.namespace == namespace)

    def check(self) -> None:
        """Raise AssertionError unless all that must hold does."""
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
