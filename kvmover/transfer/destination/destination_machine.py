"""The destination's half of the protocol for one request: a pure state machine, `step(state, event, now)`.

Credits. The destination asks each source rank that may serve it (Want). A source that has the request says which chunks
may be moved (Offered) and gets arena regions as they become free (Granted), so that no region waits for a prefill, nor
for pages: a chunk is granted once its pages are named (Allocated). A few regions go out with Wants of one chunk, and
chunks between pages need none. In a push the source writes and reports (Chunk); in a pull it names the place (Staged)
and the destination reads, which tells the source (Taken). Each arrived chunk is scattered, and compared with its
source's digest if digests are wanted. Once all (writer, chunk) have landed the destination says Done, with the read
that is the last to land if there is one; sources that were read confirm that their memory was kept until then (Kept).

After a failure it tells each source (Abort) and returns the pages when each has answered that no write is in flight
(Drained) and its own reads have ended. Unanswered messages are resent: a lost message costs time, never a request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set

import msgspec
from msgspec.structs import replace

from kvmover.transfer.events import Cancel, Patience, PeerGone, Tick
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.chunk_sets import WriterChunk, WriterChunks
from kvmover.transfer.protocol.wire import Verb


class Heard(msgspec.Struct, frozen=True):
    """An event: a message of a source."""

    peer: str
    message: wire.ToDestination | wire.Abort


class Reserved(msgspec.Struct, frozen=True):
    """An event: the arena has regions for a source's chunks: `regions` [n] are (chunk, offset)."""

    peer: str
    regions: tuple[tuple[int, int], ...]


class ReadEnded(msgspec.Struct, frozen=True):
    """An event: a read ended, with success or for `reason`. `quiescent`: it can't touch memory any more."""

    peer: str
    chunk: int
    reason: str | None = None
    quiescent: bool = True


class ReadSettled(msgspec.Struct, frozen=True):
    """An event: a read that failed without quiescence can't touch memory any more."""

    peer: str
    chunk: int


class Scattered(msgspec.Struct, frozen=True):
    """An event: a chunk is in the pages. `digest`: of its rows there; None: not computed."""

    peer: str
    chunk: int
    digest: int | None = None


class OwnFault(msgspec.Struct, frozen=True):
    """An event: an exception on this side. Only the copies `copying` and reads `reading` are under way; for all others
    no event will come.
    """

    reason: str
    copying: Set[WriterChunk] = frozenset()
    reading: Set[WriterChunk] = frozenset()


class PeerDead(msgspec.Struct, frozen=True):
    """An event: a peer is known to be dead, and writes no more."""

    peer: str
    reason: str


class Allocated(msgspec.Struct, frozen=True):
    """An event: the engine has named the pages of chunks without pages, and sources that write into pages were told."""

    chunks: Set[WriterChunk]


class Greeted(msgspec.Struct, frozen=True):
    """An event: a peer's Hello. It may have forgotten Wants that it had noted."""

    peer: str


News = Heard | PeerGone | PeerDead | Greeted
Happened = News | OwnFault | Reserved | ReadEnded | ReadSettled | Scattered | Allocated | Cancel
Event = Happened | Tick


class Send(msgspec.Struct, frozen=True):
    """An action: send `message` to `peer`."""

    peer: str
    message: wire.AnyMessage


class Ask(msgspec.Struct, frozen=True):
    """An action: resend the Want to `peer`."""

    peer: str


class Reserve(msgspec.Struct, frozen=True):
    """An action: reserve a region for a chunk when one is free, then report Reserved, for several chunks at once if
    possible.
    """

    peer: str
    chunk: int


class Read(msgspec.Struct, frozen=True):
    """An action: read a chunk from `remote` of the source's arena to `offset` of this side's (both 0: from pages to
    pages). `after` follows the bytes as the read's note.
    """

    peer: str
    chunk: int
    remote: int
    offset: int
    round: int
    after: wire.Taken | wire.Done


class Scatter(msgspec.Struct, frozen=True):
    """An action: copy a landed chunk from its region into the pages (None: it is there), then report Scattered."""

    peer: str
    chunk: int
    offset: int | None


class Free(msgspec.Struct, frozen=True):
    """An action: release the region."""

    offset: int


class Isolate(msgspec.Struct, frozen=True):
    """An action: quarantine the region: a write of `peer`, or a read from it, may still land there."""

    peer: str
    offset: int


class Mismatch(msgspec.Struct, frozen=True):
    """An action: count a chunk whose digest differs from its source's."""

    peer: str
    chunk: int


class EndReceive(msgspec.Struct, frozen=True):
    """An action: end the request. `quarantined`: peers whose writes, or reads from them, may still land here."""

    reason: str | None
    quarantined: frozenset[str] = frozenset()


Action = Send | Ask | Reserve | Read | Scatter | Free | Isolate | Mismatch | EndReceive


class Source(msgspec.Struct, frozen=True):
    """One source rank's part: number of chunks, from pool to pool (`direct`) or through arenas, by which verb, and
    `aux` if a payload is awaited from it.
    """

    chunks: int
    direct: bool = False
    verb: Verb = Verb.PUSH
    aux: bool = False

    @property
    def is_one_packed(self) -> bool:
        """True if one region, sent with the Want, is all that the source needs."""
        return self.chunks == 1 and not self.direct

    @property
    def writes_pages(self) -> bool:
        """True if the source has this side's page tables and writes into the pages itself."""
        return self.direct and self.verb is Verb.PUSH

    @property
    def is_read_from_pages(self) -> bool:
        """True if this side has the source's page tables and reads from its pages."""
        return self.direct and self.verb is Verb.PULL


class Receiving(msgspec.Struct, frozen=True):
    """The state of one attempt at one request.

    `regions` [writer, chunk]: reserved for chunks that are not scattered yet, some with the Want. `unnamed` chunks have
    no pages here yet, and are not granted. A chunk is `ready` at its source, then `reading` (in a pull) or on its way,
    then `arrived`, then `landed`. `heard` [source]: time of its last news or last resend; `repeats`: resends since its
    news. `noted` [source]: until when it keeps the Want. `told`: sources that hear Done from their last read. No
    message is resent before `look_at`.
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
    unnamed: WriterChunks = WriterChunks()
    ready: WriterChunks = WriterChunks()
    reading: WriterChunks = WriterChunks()
    arrived: WriterChunks = WriterChunks()
    landed: WriterChunks = WriterChunks()
    aux: frozenset[str] = frozenset()
    told: frozenset[str] = frozenset()
    kept: frozenset[str] = frozenset()
    reason: str | None = None
    undrained: frozenset[str] = frozenset()
    gone: frozenset[str] = frozenset()
    finished: bool = False

    @property
    def missing(self) -> int:
        """The number of chunks that have not landed."""
        return sum([source.chunks for source in self.sources.values()]) - len(self.landed)

    @property
    def awaited_aux(self) -> frozenset[str]:
        """The sources whose payload is wanted and has not come."""
        return frozenset([peer for peer, source in self.sources.items() if source.aux]) - self.aux

    @property
    def unconfirmed(self) -> frozenset[str]:
        """The sources that are read and have not sent Kept."""
        read = [peer for peer, source in self.sources.items() if source.verb is Verb.PULL and source.chunks]
        return frozenset(read) - self.kept

    def owed(self, peer: str) -> list[WriterChunk]:
        """Returns the chunks of a source that have not arrived."""
        keys = ((peer, chunk) for chunk in range(self.sources[peer].chunks))
        return [key for key in keys if key not in self.arrived]

    def served(self, peer: str) -> bool:
        """Returns True if a source has sent everything: chunks, payload and Kept."""
        source = self.sources[peer]
        here = self.arrived.count(peer) == source.chunks
        return here and peer not in self.awaited_aux and peer not in self.unconfirmed

    def check(self) -> None:
        """Check the rules of DESIGN section 6, in O(chunks). Raises AssertionError."""
        chunks = {peer: source.chunks for peer, source in self.sources.items()}
        for keys in (self.unnamed, self.ready, self.reading, self.arrived):
            assert keys.within(chunks), "a chunk of no source, or no chunk of it"
        for peer, chunk in (*self.regions, *self.rounds):
            assert 0 <= chunk < chunks[peer], "a chunk of no source, or no chunk of it"
        moving = (self.reading, self.arrived, self.regions.keys(), self.rounds.keys()) if self.unnamed else ()
        for keys in moving:
            assert not self.unnamed & keys, "a chunk moves that has no pages here"
        assert self.landed <= self.arrived, "a chunk landed that has not arrived"
        assert not self.reading or not self.reading & self.landed, "a chunk is read that landed"
        for key in self.regions:
            assert key not in self.landed, "a landed chunk keeps its region"
        if not self.arrived <= self.landed:
            unscattered = self.arrived - self.landed
            assert all(key in self.regions or self.sources[key[0]].direct for key in unscattered), (
                "a chunk is scattered out of no region"
            )
        assert len({*self.regions.values()}) == len(self.regions), "a region is reserved twice"
        assert self.undrained | self.gone | self.kept | self.told | self.aux <= chunks.keys(), (
            "a stranger drained, confirmed or left"
        )
        assert self.reason is not None or not self.told or self.missing <= 1, "Done goes out with chunks missing"
        assert self.reason is not None or not self.undrained, "an attempt that goes on waits for Drained"
        landed = self.finished and self.reason is None
        assert not landed or not (self.missing or self.awaited_aux or self.unconfirmed or self.regions), (
            "not all landed"
        )


#: The state after an event, and the actions to do, in order.
Stepped = tuple[Receiving, list[Action]]


#: Most times that a chunk is asked for: once, and again after a digest mismatch.
MAX_ROUNDS = 2


def start(state: Receiving) -> Stepped:
    """Begin an attempt. One that needs no chunk and no payload is done at once."""
    return _progress(state, [])


def due(state: Receiving) -> float:
    """Returns the next time at which a Tick changes the state; math.inf: never. O(chunks that have arrived) after a
    failure.
    """
    if state.finished:
        return math.inf
    if state.reason is not None and state.arrived - state.landed:  # our own copies end by themselves
        return state.look_at if state.look_at < state.deadline else math.inf
    return min(state.deadline, state.look_at)


def step(state: Receiving, event: Event, now: float) -> Stepped:
    """Advance by one event. Returns the new state and actions. Events of an ended attempt, of unknown peers and of the
    past are ignored.
    """
    if state.finished:
        return state, _unused(event) if isinstance(event, Reserved) else []
    if isinstance(event, Tick):
        return _tick(state, now)
    after, actions = _happened(state, event, now)
    if after is state or after.finished or state.reason is not after.reason:
        return after, actions
    news = {action.peer for action in actions if isinstance(action, Send)}
    return _wait_anew(
        after, news | {event.peer} if isinstance(event, Heard | PeerGone | Greeted) else news, now
    ), actions


def _happened(state: Receiving, event: Happened, now: float) -> Stepped:
    match event:
        case Cancel(reason):
            return _fail(state, reason, now)
        case Scattered(peer, chunk, digest):
            return _scattered(state, (peer, chunk), digest, now)
        case Reserved():
            return _reserved(state, event)
        case ReadEnded(peer, chunk):
            return _read(state, event, (peer, chunk), now)
        case ReadSettled(peer, chunk):
            return _quiet(state, (peer, chunk))
        case OwnFault():
            return _faulted(state, event, now)
        case Allocated(chunks):
            return _allocated(state, chunks, now)
        case Heard() | PeerGone() | PeerDead() | Greeted() if event.peer not in state.sources:
            return state, []
        case Heard(peer, message):
            return _told(state, peer, message, now)
        case PeerGone(peer, reason):
            return _gone(state, peer, reason, now)
        case PeerDead(peer, reason):
            return _dead(state, peer, reason, now)
        case Greeted(peer):
            return replace(state, noted={other: at for other, at in state.noted.items() if other != peer}), []


def _wait_anew(state: Receiving, peers: set[str], now: float) -> Receiving:
    """Restart the reply timer of peers with news, or that were sent news. A message without news counts as silence: the
    answer it waits for may be lost.
    """
    if not peers:
        return state
    heard = {**state.heard, **dict.fromkeys(peers, now)}
    repeats = {peer: times for peer, times in state.repeats.items() if peer not in peers}
    return replace(state, heard=heard, repeats=repeats, look_at=min(state.look_at, now + state.patience.resend_s))


def _told(state: Receiving, peer: str, message: wire.ToDestination | wire.Abort, now: float) -> Stepped:
    match message:
        case wire.Noted(keeps_ms=keeps_ms):
            return _noted(state, peer, now + keeps_ms / 1e3)
        case wire.Offered():
            return _offered(state, peer, message.ready, now)
        case wire.Chunk():
            return _arrived(state, message, (peer, message.chunk), now)
        case wire.Staged():
            return _staged(state, message, (peer, message.chunk), now)
        case wire.Aux():
            known = peer in state.aux
            return (state, []) if known else _progress(replace(state, aux=state.aux | {peer}), [])
        case wire.Kept():
            return _kept(state, peer)
        case wire.Abort():
            return _fail(state, message.reason, now)
        case wire.Drained():
            return _drained(state, peer)


def _noted(state: Receiving, peer: str, until: float) -> Stepped:
    """Stop resending to a source that has the Want, for as long as it keeps it."""
    if state.reason is not None or state.noted.get(peer, 0.0) >= until:
        return state, []
    return replace(state, noted={**state.noted, peer: until}), []


def _offered(state: Receiving, peer: str, ready: tuple[tuple[int, int], ...], now: float) -> Stepped:
    """Reserve a region for each offered chunk of a packed source, once. Chunks to be read from pages are not offered.

    A push offers a chunk again if its lease ended before the write: it is granted again, in the same region or pages,
    under a new lease.
    """
    source = state.sources[peer]
    if state.reason is not None:
        return state, []
    before = 0
    for first, stop in ready:  # in order: each chunk at most once in a message
        if not before <= first <= stop <= source.chunks:
            return _fail(state, f"{peer} offers chunks {first} to {stop} of {source.chunks}", now)
        before = stop
    if before and source.is_read_from_pages:
        return _fail(state, f"{peer} offers chunks that it has to stage", now)
    offered = [chunk for first, stop in ready for chunk in range(first, stop)]
    chunks = [chunk for chunk in offered if (peer, chunk) not in state.ready]
    known = [(chunk, state.regions.get((peer, chunk), 0)) for chunk in offered if _granted(state, (peer, chunk))]
    again: list[Action] = _grant(state, peer, known) if known else []
    if not chunks:
        return state, again
    state = replace(state, ready=state.ready | {(peer, chunk) for chunk in chunks})
    named = (chunk for chunk in chunks if (peer, chunk) not in state.unnamed)
    return _then(_use(state, peer, named), again)


def _use(state: Receiving, peer: str, chunks: Iterable[int]) -> Stepped:
    """Reserve regions for chunks that are ready and have pages here, or read them from the source's pages."""
    source, actions = state.sources[peer], list[Action]()
    for chunk in chunks:
        key = peer, chunk
        if source.is_read_from_pages:
            state, more = _begin_read(state, key, 0)
            actions += more
        elif not source.direct and key not in state.regions and key not in state.arrived:  # else granted by the Want
            actions.append(Reserve(peer, chunk))
    return state, actions


def _begin_read(state: Receiving, key: WriterChunk, remote: int) -> Stepped:
    """Read a chunk. If no step follows but its landing, it tells the source Done, else Taken."""
    peer, chunk = key
    id_, round_ = (state.request, state.generation), state.rounds.get(key, 0)
    after: wire.Taken | wire.Done = wire.Taken(*id_, chunk, round_)
    lands = state.sources[peer].direct and key not in state.digests
    if lands and state.missing == 1 and not state.awaited_aux:
        after, state = wire.Done(*id_), replace(state, told=state.told | {peer})
    state = replace(state, reading=state.reading.having(key))
    return state, [Read(peer, chunk, remote, state.regions.get(key, 0), round_, after)]


def _allocated(state: Receiving, chunks: Set[WriterChunk], now: float) -> Stepped:
    """Grant chunks offered meanwhile. Sources that write into pages were sent the longer tables, which they have not
    noted yet.
    """
    if state.reason is not None:
        return state, []
    told = {peer for peer, source in state.sources.items() if source.writes_pages}
    noted = {peer: until for peer, until in state.noted.items() if peer not in told}
    state = _wait_anew(replace(state, unnamed=state.unnamed - chunks, noted=noted), told, now)
    actions: list[Action] = []
    for peer in state.sources:
        ready = sorted(chunk for other, chunk in chunks & state.ready if other == peer)
        state, more = _use(state, peer, ready)
        actions += more
    return state, actions


def _granted(state: Receiving, key: WriterChunk) -> bool:
    """Returns True if a source may write a chunk that has not arrived."""
    source = state.sources[key[0]]
    waits = key not in state.arrived and key not in state.unnamed
    return source.verb is Verb.PUSH and waits and (source.direct or key in state.regions)


def _grant(state: Receiving, peer: str, regions: Sequence[tuple[int, int]]) -> list[Action]:
    """Returns Granted messages for the regions, as many as they need."""
    grants = tuple(wire.Grant(chunk, offset, state.rounds.get((peer, chunk), 0)) for chunk, offset in regions)
    parts = (grants[first : first + wire.MAX_GRANTS] for first in range(0, len(grants), wire.MAX_GRANTS))
    return [Send(peer, wire.Granted(state.request, state.generation, part)) for part in parts]


def _reserved(state: Receiving, reserved: Reserved) -> Stepped:
    if state.reason is not None:
        return state, _unused(reserved)
    regions = {(reserved.peer, chunk): offset for chunk, offset in reserved.regions}
    return replace(state, regions=state.regions | regions), _grant(state, reserved.peer, reserved.regions)


def _unused(reserved: Reserved) -> list[Action]:
    """Free regions that were reserved too late."""
    return [Free(offset) for _, offset in reserved.regions]


def _unexpected(state: Receiving, key: WriterChunk) -> str | None:
    """Returns why a source must not announce this chunk, or None."""
    peer, chunk = key
    source = state.sources[peer]
    if not 0 <= chunk < source.chunks:
        return f"{peer} sent chunk {chunk} of {source.chunks}"
    if key in state.unnamed and not source.is_read_from_pages:
        return f"{peer} sent chunk {chunk}, which has no pages here"
    if not source.direct and key not in state.regions:
        return f"{peer} sent chunk {chunk} without a grant"
    return None


def _arrived(state: Receiving, message: wire.Chunk, key: WriterChunk, now: float) -> Stepped:
    """Count a pushed chunk once, however often it is announced. A chunk without a grant fails the attempt."""
    past = key in state.arrived or message.round < state.rounds.get(key, 0)
    if past or state.reason is not None:
        return state, []
    if wrong := _unexpected(state, key):
        return _fail(state, wrong, now)
    if state.sources[key[0]].verb is Verb.PULL:
        return _fail(state, f"{key[0]} pushed chunk {key[1]}, which is to be read", now)
    return _here(state, key, message.digest)


def _here(state: Receiving, key: WriterChunk, digest: int | None) -> Stepped:
    """Note that a chunk's bytes arrived. It has landed if it is in the pages and has no digest to compare."""
    direct, arrived = state.sources[key[0]].direct, state.arrived.having(key)
    if direct and digest is None:
        return _progress(replace(state, arrived=arrived, landed=state.landed.having(key)), [])
    digests = state.digests if digest is None else {**state.digests, key: digest}
    return replace(state, arrived=arrived, digests=digests), [Scatter(*key, None if direct else state.regions[key])]


def _staged(state: Receiving, message: wire.Staged, key: WriterChunk, now: float) -> Stepped:
    """Read a staged chunk once a round, as soon as it has pages here. A repeated Staged of a read chunk means that
    Taken was lost: resend it.
    """
    past = key in state.reading or message.round < state.rounds.get(key, 0)
    if past or state.reason is not None:
        return state, []
    if key in state.arrived:
        return state, [_taken(state, key)]
    if wrong := _unexpected(state, key):
        return _fail(state, wrong, now)
    if state.sources[key[0]].verb is Verb.PUSH:
        return _fail(state, f"{key[0]} wants chunk {key[1]} to be read, which is pushed", now)
    state = replace(state, ready=state.ready.having(key))
    if message.digest is not None:
        state = replace(state, digests={**state.digests, key: message.digest})
    return (state, []) if key in state.unnamed else _begin_read(state, key, message.offset)


def _read(state: Receiving, event: ReadEnded, key: WriterChunk, now: float) -> Stepped:
    if key not in state.reading:
        return state, []
    if event.quiescent:
        state = replace(state, reading=state.reading.without(key))
    if state.reason is not None:
        return _quiet(state, key) if event.quiescent else (state, [])
    if event.reason is not None:
        return _fail(state, event.reason, now)
    return _here(state, key, state.digests.get(key))


def _taken(state: Receiving, key: WriterChunk) -> Send:
    return Send(key[0], wire.Taken(state.request, state.generation, key[1], state.rounds.get(key, 0)))


def _without(of: dict[WriterChunk, int], key: WriterChunk) -> dict[WriterChunk, int]:
    """Returns a map without one chunk. Copying and deleting takes an eighth of the time of a test of each key."""
    left = of.copy()
    left.pop(key, None)
    return left


def _quiet(state: Receiving, key: WriterChunk) -> Stepped:
    """End a read of a failed attempt, and free its region."""
    state = replace(state, reading=state.reading.without(key))
    if state.reason is None or key not in state.regions or key in state.arrived:
        return _settle(state, []) if state.reason is not None else (state, [])
    return _settle(replace(state, regions=_without(state.regions, key)), [Free(state.regions[key])])


def _scattered(state: Receiving, key: WriterChunk, digest: int | None, now: float) -> Stepped:
    """End a copy: a chunk with its source's digest has landed, another is asked for once more."""
    if key not in state.arrived or key in state.landed:
        return state, []
    wanted = state.digests.get(key)
    spoilt = wanted is not None and wanted != digest
    if spoilt and state.reason is None:
        return _mismatch(state, key, now)
    actions: list[Action] = [Free(state.regions[key])] if key in state.regions else []
    regions = _without(state.regions, key)
    if spoilt:  # the attempt has failed: the chunk is not asked for again
        return _settle(replace(state, regions=regions, arrived=state.arrived.without(key)), actions)
    state = replace(state, regions=regions, digests=_without(state.digests, key), landed=state.landed.having(key))
    return _settle(state, actions) if state.reason is not None else _progress(state, actions)


def _mismatch(state: Receiving, key: WriterChunk, now: float) -> Stepped:
    peer, chunk = key
    round_ = state.rounds.get(key, 0) + 1
    state = replace(state, arrived=state.arrived.without(key))
    if round_ >= MAX_ROUNDS:
        state, actions = _fail(state, f"chunk {chunk} of {peer} did not match its digest {round_} times", now)
        return state, [Mismatch(peer, chunk), *actions]
    state = replace(state, rounds={**state.rounds, key: round_})
    return state, [Mismatch(peer, chunk), *_grant(state, peer, [(chunk, state.regions.get(key, 0))])]


def _progress(state: Receiving, actions: list[Action]) -> Stepped:
    """End the attempt with Done once all has landed. Sources that were read have to send Kept first."""
    if state.missing or state.awaited_aux or state.reason is not None:
        return state, actions
    done = wire.Done(state.request, state.generation)
    if state.unconfirmed:
        return state, [*actions, *(Send(peer, done) for peer in sorted(state.unconfirmed - state.told))]
    pushed = [Send(peer, done) for peer in state.sources if peer not in state.kept]
    return replace(state, finished=True), [*actions, *pushed, EndReceive(None)]


def _kept(state: Receiving, peer: str) -> Stepped:
    """Take a source's answer to Done: all chunks read from it are confirmed."""
    if state.missing or state.awaited_aux or state.reason is not None or peer in state.kept:
        return state, []
    state = replace(state, kept=state.kept | {peer})
    return (state, []) if state.unconfirmed else _progress(state, [])


def _gone(state: Receiving, peer: str, reason: str, now: float) -> Stepped:
    """Handle the loss of a source: the attempt fails unless the source was served."""
    state = replace(state, gone=state.gone | {peer})
    if state.reason is not None:
        return _settle(state, [])
    return (state, []) if state.served(peer) else _fail(state, reason, now)


def _dead(state: Receiving, peer: str, reason: str, now: float) -> Stepped:
    """Handle the death of a source: as a loss, but it counts as drained, since its writes have ended."""
    actions = list[Action]()
    if state.reason is None and not state.served(peer):
        state, actions = _fail(state, reason, now)
    state = replace(state, gone=state.gone | {peer})
    if state.finished:
        return state, actions
    after, more = _drained(state, peer)
    return (after, [*actions, *more]) if after is not state else _then(_gone(state, peer, reason, now), actions)


def _then(stepped: Stepped, before: list[Action]) -> Stepped:
    return stepped[0], [*before, *stepped[1]]


def _tick(state: Receiving, now: float) -> Stepped:
    if now >= state.deadline:
        if state.reason is not None:  # own copies write the pages until they end
            return (state, []) if state.arrived - state.landed else _finish(state, [])
        late = sorted(peer for peer in state.sources if not state.served(peer))
        here = f", {len(state.unnamed)} of them without pages here" if state.unnamed else ""
        reason = f"deadline passed with {state.missing} chunks missing{here}, waiting for {', '.join(late)}"
        return _fail(state, reason, now)
    return _look(state, now) if now >= state.look_at else (state, [])


def _look(state: Receiving, now: float) -> Stepped:
    """Resend to each silent source from which a reply is awaited."""
    failed = state.reason is not None
    awaited = [p for p in state.sources if (p in state.undrained - state.gone if failed else not state.served(p))]
    silent = [peer for peer in awaited if now >= _again_at(state, peer)]
    heard = {**state.heard, **dict.fromkeys(silent, now)}
    repeats = {**state.repeats, **{peer: state.repeats.get(peer, 0) + 1 for peer in silent}}
    asked = (
        [action for peer in silent for action in _again(state, peer, now)]
        if not failed
        else _aborts(state, set(silent))
    )
    state = replace(state, heard=heard, repeats=repeats)
    look_at = min((_again_at(state, peer) for peer in awaited), default=now + state.patience.resend_s)
    return replace(state, look_at=look_at), asked


def _again_at(state: Receiving, peer: str) -> float:
    """Returns when to resend to a silent source: at growing intervals if it owes no answer yet, and not before its
    Noted expires.
    """
    since, patience = state.heard.get(peer, state.begun), state.patience
    if state.reason is not None or _pending(state, peer):
        return since + patience.resend_s
    at = since + patience.again_s(state.repeats.get(peer, 0), state.request, state.generation, peer)
    return max(at, state.noted.get(peer, at))


def _pending(state: Receiving, peer: str) -> bool:
    """Returns True if a source owes an answer: for chunks that it has offered, a payload that comes after them, or
    Done.
    """
    owed = state.owed(peer)
    return not owed or any(key in state.ready and key not in state.unnamed for key in owed)


def _again(state: Receiving, peer: str, now: float) -> list[Action]:
    """Returns the messages to resend to a silent source: its answer may be lost, or the message that it answers."""
    source, owed = state.sources[peer], state.owed(peer)
    if not owed and peer not in state.awaited_aux:
        return [] if state.missing or state.awaited_aux else [Send(peer, wire.Done(state.request, state.generation))]
    noted = now < state.noted.get(peer, 0.0)  # the source reports by itself when more is ready
    posted = source.writes_pages and not noted  # without being asked for each chunk
    idle = state.reading | state.unnamed
    waiting = [key for key in owed if (key in state.ready or posted) and key not in idle]
    granted = [(key[1], state.regions.get(key, 0)) for key in waiting if source.direct or key in state.regions]
    unoffered = any(key not in state.ready for key in owed) and not noted
    asked = unoffered or (peer in state.awaited_aux and not (owed and noted))
    again: list[Action] = [Ask(peer)] if asked else []
    return [*again, *_grant(state, peer, granted)]


def _fail(state: Receiving, reason: str, now: float) -> Stepped:
    """Fail the attempt: send Abort to all sources, and wait up to `drain_s` until their writes have ended."""
    if state.reason is not None:
        return state, []
    pushing = frozenset(peer for peer, source in state.sources.items() if source.verb is Verb.PUSH)
    free = [k for k in state.regions if k[0] not in pushing and k not in state.reading and k not in state.arrived]
    regions = {key: offset for key, offset in state.regions.items() if key not in free}
    actions: list[Action] = [Free(state.regions[key]) for key in free]
    deadline = now + state.patience.drain_s
    state = replace(state, reason=reason, undrained=pushing, regions=regions, deadline=deadline)
    state = replace(state, begun=now, look_at=now + state.patience.resend_s, heard={})
    return _settle(state, [*actions, *_aborts(state, set(state.sources) - state.gone)])


def _faulted(state: Receiving, event: OwnFault, now: float) -> Stepped:
    """Fail after an exception, and wait only for copies and reads under way. Other arrived chunks are dropped."""
    over = state.arrived - state.landed - event.copying
    regions = {key: offset for key, offset in state.regions.items() if key not in over}
    freed: list[Action] = [Free(offset) for key, offset in state.regions.items() if key in over]
    reading = state.reading & event.reading
    state = replace(state, arrived=state.arrived - over, reading=reading, regions=regions)
    after, actions = _fail(state, event.reason, now) if state.reason is None else _settle(state, [])
    return after, [*freed, *actions]


def _aborts(state: Receiving, peers: set[str]) -> list[Action]:
    assert state.reason is not None, "an attempt that goes on is not aborted"
    abort = wire.Abort(state.request, state.generation, state.reason)
    return [Send(peer, abort) for peer in state.sources if peer in peers]


def _drained(state: Receiving, peer: str) -> Stepped:
    """Free the regions of a drained source, except those that this side is reading into or copying from."""
    if state.reason is None or peer not in state.undrained:
        return state, []
    free = [k for k in state.regions if k[0] == peer and k not in state.arrived and k not in state.reading]
    regions = {key: offset for key, offset in state.regions.items() if key not in free}
    actions: list[Action] = [Free(state.regions[key]) for key in free]
    return _settle(replace(state, regions=regions, undrained=state.undrained - {peer}), actions)


def _settle(state: Receiving, actions: list[Action]) -> Stepped:
    """Finish a failed attempt once all reachable sources have drained and all copies and reads here have ended."""
    copying = state.arrived - state.landed
    return (state, actions) if state.undrained - state.gone or copying or state.reading else _finish(state, actions)


def _finish(state: Receiving, actions: list[Action]) -> Stepped:
    """End the attempt. Regions still reserved are quarantined: their source never answered, or a read never ended."""
    reading = {peer for peer, _ in state.reading}
    quarantined = frozenset(peer for peer in state.undrained | reading if state.sources[peer].direct)
    kept = [Isolate(key[0], offset) for key, offset in state.regions.items()]
    return replace(state, finished=True), [*actions, *kept, EndReceive(state.reason, quarantined)]
