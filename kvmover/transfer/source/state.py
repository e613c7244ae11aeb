"""What the source's state machine is made of: one destination's state, what happens to it, and what it asks for."""

from __future__ import annotations

import msgspec

from kvmover.transfer.events import Cancel, Patience, PeerGone, Tick
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.wire import Verb


class Ready(msgspec.Struct, frozen=True):
    """The engine has produced some chunks. `pages`: our tables so far, where the destination reads from pages."""

    chunks: tuple[int, ...]
    pages: tuple[bytes, ...] = ()


class Posted(msgspec.Struct, frozen=True):
    """A chunk's write is on its way, or its gather is: either touches memory."""

    chunk: int
    digest: int | None = None


class Written(msgspec.Struct, frozen=True):
    """A chunk's write ended well on this side."""

    chunk: int


class Gathered(msgspec.Struct, frozen=True):
    """A chunk waits at `offset` of our arena (0: in its pages) to be read."""

    chunk: int
    offset: int
    digest: int | None = None


class WriteFailed(msgspec.Struct, frozen=True):
    """A chunk's write ended badly. `quiescent`: it cannot touch memory any more."""

    chunk: int
    reason: str
    quiescent: bool


class Faulted(WriteFailed, frozen=True):
    """As WriteFailed, for a fault of this side: nothing was wrong with the wire."""


class Settled(msgspec.Struct, frozen=True):
    """A write that failed without quiescence cannot touch memory any more."""

    chunk: int


class Lapsed(msgspec.Struct, frozen=True):
    """A chunk was not written, because the lease under which it was granted is over. Nothing touches memory."""

    chunk: int


class Attached(msgspec.Struct, frozen=True):
    """The engine hands over the payload that goes beside the cache."""

    payload: bytes


Message = wire.ToSource | wire.Abort
Own = Posted | Written | Gathered | Lapsed | WriteFailed | Settled
Event = Message | Own | Ready | Attached | PeerGone | Cancel | Tick


class Post(msgspec.Struct, frozen=True):
    """Gather a chunk and write it to `offset`, or write it straight, under a lease of `term`, to memory of a
    `registration`; in a pull, gather it. Then report how it went."""

    chunk: int
    offset: int
    round: int = 0
    term: int = 0
    registration: int = 0


class Unstage(msgspec.Struct, frozen=True):
    """Nobody reads the chunk's staging memory any more."""

    chunk: int


class Say(msgspec.Struct, frozen=True):
    """Send `message` to the destination."""

    message: wire.AnyMessage


class EndSend(msgspec.Struct, frozen=True):
    """This destination is served, or failed for `reason`. `held`: writes may still read the pages."""

    reason: str | None
    held: bool = False


Action = Post | Unstage | Say | EndSend


class Sending(msgspec.Struct, frozen=True):
    """One attempt of one destination rank.

    `spans` [chunk]: bytes that it takes in an arena. `room_bytes`: of the destination's arena, which grants name places
    of; 0 where they name none. `granted` [chunk]: (offset, round) that may be posted. `in_flight` chunks touch memory
    of ours; `staged` [chunk] wait to be read, at an offset; `written` ended well. `pages`: our page tables so far in a
    direct pull, of each of which the first `said_pages` were in an offer. `term`: of the latest grant; the pages of a
    direct push are granted as a whole. `eager`: the grant that came with the Want, of a chunk that may not be ready.
    `repeats`: how often an offer was repeated since anything new at `quiet_since`.
    """

    request: str
    generation: int
    spans: tuple[int, ...]
    patience: Patience
    deadline: float
    direct: bool = False
    verb: Verb = Verb.PUSH
    pages: tuple[bytes, ...] = ()
    said_pages: tuple[int, ...] = ()
    room_bytes: int = 0
    term: int = 0
    eager: wire.Grant | None = None
    quiet_since: float = 0.0
    repeats: int = 0
    ready: frozenset[int] = frozenset()
    granted: dict[int, tuple[int, int]] = {}
    digests: dict[int, int] = {}
    in_flight: frozenset[int] = frozenset()
    staged: dict[int, int] = {}
    written: frozenset[int] = frozenset()
    aux: bytes | None = None
    reason: str | None = None
    peer_waits: bool = False
    finished: bool = False

    @property
    def chunks(self) -> int:
        """How many there are."""
        return len(self.spans)

    def check(self) -> None:
        """Raise AssertionError where a rule of DESIGN section 6 is broken. O(chunks)."""
        known = frozenset(range(self.chunks))
        assert self.ready <= known, f"chunks {sorted(self.ready - known)} are ready, of {self.chunks}"
        assert self.granted.keys() <= self.ready, "a chunk was granted that is not ready"
        moving = (self.in_flight, frozenset(self.staged), self.written)
        assert all(chunks <= self.granted.keys() for chunks in moving), "a chunk moved that nobody granted"
        assert not self.staged.keys() & self.written, "a chunk waits to be read that was read"
        assert self.verb is Verb.PULL or not self.staged, "a chunk of a push waits to be read"
        assert self.reason is None or not self.staged, "a failed attempt keeps chunks to be read"
        assert not (self.finished and self.reason is None and self.in_flight), "it landed with a write in flight"
