"""What the destination's state machine is made of: one request's state, what happens to it, and what it asks for."""

from __future__ import annotations

import msgspec

from kvmover.transfer.events import Cancel, Patience, PeerGone, Tick
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.wire import Verb

#: A writer is a source rank's transport name, unique for ever. A chunk of it is identified by both.
WriterChunk = tuple[str, int]


class Heard(msgspec.Struct, frozen=True):
    """A source said something."""

    peer: str
    message: wire.ToDestination | wire.Abort


class Leased(msgspec.Struct, frozen=True):
    """The arena has regions for some chunks of a source: `regions` [n] are (chunk, offset)."""

    peer: str
    regions: tuple[tuple[int, int], ...]


class ReadEnded(msgspec.Struct, frozen=True):
    """A read of ours ended: well, or for `reason`. `quiescent`: it cannot touch memory any more."""

    peer: str
    chunk: int
    reason: str | None = None
    quiescent: bool = True


class ReadSettled(msgspec.Struct, frozen=True):
    """A read that failed without quiescence cannot touch memory any more."""

    peer: str
    chunk: int


class Scattered(msgspec.Struct, frozen=True):
    """A chunk is in the pages, where its rows have `digest` (None: nobody asked)."""

    peer: str
    chunk: int
    digest: int | None = None


class OwnFault(msgspec.Struct, frozen=True):
    """Something of this attempt failed on this side. Of its copies and reads only `copying` and `reading` are under
    way; the others never began, or will never be heard of.
    """

    reason: str
    copying: frozenset[WriterChunk] = frozenset()
    reading: frozenset[WriterChunk] = frozenset()


class PeerDead(msgspec.Struct, frozen=True):
    """A peer is known to be dead: it writes no more."""

    peer: str
    reason: str


class Allocated(msgspec.Struct, frozen=True):
    """The engine has named the pages of some chunks that had none; sources that write into pages were told."""

    chunks: frozenset[WriterChunk]


class Greeted(msgspec.Struct, frozen=True):
    """A peer said Hello: it may have forgotten what it had noted, as one that lost us for a moment has."""

    peer: str


News = Heard | PeerGone | PeerDead | Greeted
Happened = News | OwnFault | Leased | ReadEnded | ReadSettled | Scattered | Allocated | Cancel
Event = Happened | Tick


class Send(msgspec.Struct, frozen=True):
    """Send `message` to `peer`."""

    peer: str
    message: wire.AnyMessage


class Ask(msgspec.Struct, frozen=True):
    """Send `peer` the Want again."""

    peer: str


class Lease(msgspec.Struct, frozen=True):
    """Get a region for a chunk when there is one, then report Leased, of several chunks at once where it can."""

    peer: str
    chunk: int


class Read(msgspec.Struct, frozen=True):
    """Read a chunk from `remote` of the source's arena to `offset` of ours (both 0: from pages to pages)."""

    peer: str
    chunk: int
    remote: int
    offset: int
    round: int


class Scatter(msgspec.Struct, frozen=True):
    """Move a landed chunk from its region into the pages, or find it there (None), then report Scattered."""

    peer: str
    chunk: int
    offset: int | None


class Free(msgspec.Struct, frozen=True):
    """The region is nobody's any more."""

    offset: int


class Isolate(msgspec.Struct, frozen=True):
    """A write of `peer`, or a read of ours from it, may still land in the region: keep it out of use."""

    peer: str
    offset: int


class Mismatch(msgspec.Struct, frozen=True):
    """A chunk did not have its source's digest."""

    peer: str
    chunk: int


class EndReceive(msgspec.Struct, frozen=True):
    """The request ended. `held`: peers whose writes, or our reads from whom, may still land in the pages."""

    reason: str | None
    held: frozenset[str] = frozenset()


Action = Send | Ask | Lease | Read | Scatter | Free | Isolate | Mismatch | EndReceive


class Source(msgspec.Struct, frozen=True):
    """One source rank's part: how many chunks, from pool to pool (`direct`) or through arenas, by which verb, and
    whether a payload is awaited from it.
    """

    chunks: int
    direct: bool = False
    verb: Verb = Verb.PUSH
    aux: bool = False

    @property
    def is_one_packed_push(self) -> bool:
        """Whether a region that goes out with the Want is all that it needs."""
        return self.chunks == 1 and not self.direct and self.verb is Verb.PUSH

    @property
    def writes_pages(self) -> bool:
        """It has our page tables, and writes into our pages by itself."""
        return self.direct and self.verb is Verb.PUSH


class Receiving(msgspec.Struct, frozen=True):
    """One attempt at one request.

    `regions` [writer, chunk] are leased to chunks that have not been scattered, some with the Want. `unnamed` chunks
    have no pages here yet: they may be ready, and are not granted. A chunk is `ready` at its source, then `reading` (a
    pull) or on its way, then `arrived`, then `landed`. `heard` [source]: when it last said something new, or was last
    asked again, for the `repeats`-th time since. `noted` [source]: until when it keeps our Want. Nobody is to be asked
    again before `look_at`.
    """

    request: str
    generation: int
    sources: dict[str, Source]
    patience: Patience
    deadline: float
    begun: float = 0.0
    look_at: float = 0.0
    heard: dict[str, float] = {}
    repeats: dict[str, int] = {}
    noted: dict[str, float] = {}
    regions: dict[WriterChunk, int] = {}
    rounds: dict[WriterChunk, int] = {}
    digests: dict[WriterChunk, int] = {}
    unnamed: frozenset[WriterChunk] = frozenset()
    ready: frozenset[WriterChunk] = frozenset()
    reading: frozenset[WriterChunk] = frozenset()
    arrived: frozenset[WriterChunk] = frozenset()
    landed: frozenset[WriterChunk] = frozenset()
    aux: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    reason: str | None = None
    undrained: frozenset[str] = frozenset()
    gone: frozenset[str] = frozenset()
    finished: bool = False

    @property
    def missing(self) -> int:
        """How many chunks of all sources have not landed."""
        return sum(source.chunks for source in self.sources.values()) - len(self.landed)

    @property
    def awaited_aux(self) -> frozenset[str]:
        """Sources whose payload is wanted and has not come."""
        return frozenset(peer for peer, source in self.sources.items() if source.aux) - self.aux

    @property
    def unconfirmed(self) -> frozenset[str]:
        """Sources that we read from and that have not said since that what we read was theirs."""
        read = (peer for peer, source in self.sources.items() if source.verb is Verb.PULL and source.chunks)
        return frozenset(read) - self.kept

    def owed(self, peer: str) -> list[WriterChunk]:
        """Chunks of a source whose bytes are not here."""
        keys = ((peer, chunk) for chunk in range(self.sources[peer].chunks))
        return [key for key in keys if key not in self.arrived]

    def served(self, peer: str) -> bool:
        """Whether nothing more is needed of a source."""
        source = self.sources[peer]
        here = sum(key[0] == peer for key in self.arrived) == source.chunks
        return here and peer not in self.awaited_aux and peer not in self.unconfirmed

    def check(self) -> None:
        """Raise AssertionError where a rule of DESIGN section 6 is broken. O(chunks)."""
        chunks = {peer: source.chunks for peer, source in self.sources.items()}
        for keys in (self.unnamed, self.ready, self.reading, self.arrived, self.regions, self.rounds):
            assert all(0 <= chunk < chunks[peer] for peer, chunk in keys), "a chunk of no source, or no chunk of it"
        moving = (self.reading, self.arrived, self.regions.keys(), self.rounds.keys())
        assert not any(self.unnamed & keys for keys in moving), "a chunk moves that has no pages here"
        assert self.landed <= self.arrived, "a chunk landed that has not arrived"
        assert not self.reading & self.landed, "a chunk is read that landed"
        assert not self.landed & self.regions.keys(), "a landed chunk keeps its region"
        packed = {key for key in self.arrived - self.landed if not self.sources[key[0]].direct}
        assert packed <= self.regions.keys(), "a chunk is scattered out of no region"
        assert len({*self.regions.values()}) == len(self.regions), "a region is leased twice"
        assert self.undrained | self.gone | self.kept | self.aux <= chunks.keys(), (
            "a stranger drained, confirmed or left"
        )
        assert self.reason is not None or not self.undrained, "an attempt that goes on waits for Drained"
        landed = self.finished and self.reason is None
        assert not landed or not (self.missing or self.awaited_aux or self.unconfirmed or self.regions), (
            "not all landed"
        )


#: What an event leads to: the state after it, and what is to be done, in order.
Stepped = tuple[Receiving, list[Action]]
