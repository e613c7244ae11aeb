"""What the destination's state machine is made of: one request's state, what happens to it, and what it asks for."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmover.transfer import wire
from kvmover.transfer.wire import Verb

#: A writer is a source rank's transport name, unique for ever. A chunk of it is identified by both.
WriterChunk = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Offered:
    """A source has the chunks in `ready` [first, stop) and will use what it is granted."""

    peer: str
    ready: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Leased:
    """The arena has a region for a chunk."""

    peer: str
    chunk: int
    offset: int


@dataclass(frozen=True, slots=True)
class Arrived:
    """A chunk's bytes are here: in its region, or in the pages where the route is direct."""

    peer: str
    chunk: int
    round: int = 0
    digest: int | None = None


@dataclass(frozen=True, slots=True)
class Staged:
    """A chunk may be read, at `offset` of the source's arena where the route is packed."""

    peer: str
    chunk: int
    offset: int
    round: int = 0
    digest: int | None = None


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """A read of ours ended: well, or for `reason`. `quiescent`: it cannot touch memory any more."""

    peer: str
    chunk: int
    reason: str | None = None
    quiescent: bool = True


@dataclass(frozen=True, slots=True)
class ReadSettled:
    """A read that failed without quiescence cannot touch memory any more."""

    peer: str
    chunk: int


@dataclass(frozen=True, slots=True)
class Scattered:
    """A chunk is in the pages, where its rows have `digest` (None: nobody asked)."""

    peer: str
    chunk: int
    digest: int | None = None


@dataclass(frozen=True, slots=True)
class AuxArrived:
    """A source's payload is here."""

    peer: str


@dataclass(frozen=True, slots=True)
class Kept:
    """A source that was read confirms that it reused nothing meanwhile."""

    peer: str


@dataclass(frozen=True, slots=True)
class PeerAborted:
    """A source says that it cannot go on."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeerDrained:
    """A source says that nothing of this attempt is in flight."""

    peer: str


@dataclass(frozen=True, slots=True)
class PeerGone:
    """The transport lost a source. Whether it can still write is unknown."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """The engine gives the request up."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Heard = Offered | Arrived | Staged | AuxArrived | Kept | PeerAborted | PeerDrained | PeerGone
Own = Leased | ReadEnded | ReadSettled | Scattered | Cancel | Tick
Event = Heard | Own


@dataclass(frozen=True, slots=True)
class Send:
    """Send `message` to `peer`."""

    peer: str
    message: wire.AnyMessage


@dataclass(frozen=True, slots=True)
class Ask:
    """Send `peer` the Want again."""

    peer: str


@dataclass(frozen=True, slots=True)
class Lease:
    """Get a region for a chunk when there is one, then report Leased."""

    peer: str
    chunk: int


@dataclass(frozen=True, slots=True)
class Read:
    """Read a chunk from `remote` of the source's arena to `offset` of ours (both 0: from pages to pages)."""

    peer: str
    chunk: int
    remote: int
    offset: int
    round: int


@dataclass(frozen=True, slots=True)
class Scatter:
    """Move a landed chunk from its region into the pages, or find it there (None), then report Scattered."""

    peer: str
    chunk: int
    offset: int | None


@dataclass(frozen=True, slots=True)
class Free:
    """The region is nobody's any more."""

    offset: int


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A write of `peer`, or a read of ours from it, may still land in the region: keep it out of use."""

    peer: str
    offset: int


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A chunk did not have its source's digest."""

    peer: str
    chunk: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The request ended. `held`: peers whose writes, or our reads from whom, may still land in the pages."""

    reason: str | None
    held: frozenset[str] = frozenset()


Action = Send | Ask | Lease | Read | Scatter | Free | Quarantine | Mismatch | Finish


@dataclass(frozen=True, slots=True)
class Source:
    """One source rank's part: how many chunks, by which route and verb, and whether a payload is awaited from it."""

    chunks: int
    direct: bool = False
    verb: Verb = Verb.PUSH
    aux: bool = False

    @property
    def idle(self) -> bool:
        """Nothing is wanted of it, so nothing that is needed tells whether it heard."""
        return not self.chunks and not self.aux


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait, in seconds: for the end, for sources to drain after a failure, and before asking again."""

    deadline_s: float
    drain_s: float
    resend_s: float


@dataclass(frozen=True, slots=True)
class Receiving:
    """One attempt at one request.

    `regions` [writer, chunk] are leased to chunks that have not been scattered. A chunk is `ready` at its source, then
    `reading` (a pull) or on its way, then `arrived`, then `landed`. `heard` [source]: when it last said something new,
    or was last asked again; none of those that matter has been silent since before `quiet_since`.
    """

    request: str
    generation: int
    sources: dict[str, Source]
    patience: Patience
    deadline: float
    quiet_since: float = 0.0
    heard: dict[str, float] = field(default_factory=dict[str, float])
    regions: dict[WriterChunk, int] = field(default_factory=dict[WriterChunk, int])
    rounds: dict[WriterChunk, int] = field(default_factory=dict[WriterChunk, int])
    digests: dict[WriterChunk, int] = field(default_factory=dict[WriterChunk, int])
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
        return sum(source.chunks for source in self.sources.values()) - len(self.landed)

    @property
    def awaited_aux(self) -> frozenset[str]:
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


#: What an event leads to: the state after it, and what is to be done, in order.
Stepped = tuple[Receiving, list[Action]]
