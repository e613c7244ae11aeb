"""The source's half of the protocol, for one request and one destination rank: a pure state machine.

Chunks are offered once the engine has produced them, and posted once granted. After an abort posting stops, and Drained
is sent when the last write in flight has ended on this side. In a pull the source only says where a chunk lies, and
answers Done with Kept if its memory was not reused meanwhile. A late reader therefore never takes other bytes for its
own, and the source needn't wait for it.
"""

from __future__ import annotations

import math

import msgspec
from msgspec.structs import replace

from kvmover.transfer.events import Cancel, Patience, PeerGone, Tick
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.chunk_sets import ChunkMap, Chunks
from kvmover.transfer.protocol.wire import PAGE_ID_BYTES, Verb, lengths


class Ready(msgspec.Struct, frozen=True):
    """An event: the engine has produced chunks. `pages`: this side's tables so far, if the destination reads from
    pages.
    """

    chunks: tuple[int, ...]
    pages: tuple[bytes, ...] = ()


class Posted(msgspec.Struct, frozen=True):
    """An event: a chunk's write or gather has begun, and touches memory."""

    chunk: int
    digest: int | None = None


class Written(msgspec.Struct, frozen=True):
    """An event: a chunk's write succeeded on this side."""

    chunk: int


class Gathered(msgspec.Struct, frozen=True):
    """An event: a chunk can be read at `offset` of this side's arena (0: from its pages)."""

    chunk: int
    offset: int
    digest: int | None = None


class WriteFailed(msgspec.Struct, frozen=True):
    """An event: a chunk's write failed. `quiescent`: it can't touch memory any more."""

    chunk: int
    reason: str
    quiescent: bool


class Faulted(WriteFailed, frozen=True):
    """A WriteFailed caused by an exception on this side, not by the transport."""


class Settled(msgspec.Struct, frozen=True):
    """An event: a write that failed without quiescence can't touch memory any more."""

    chunk: int


class Lapsed(msgspec.Struct, frozen=True):
    """An event: a chunk was not written, since the lease of its grant ended. It touches no memory."""

    chunk: int


class Attached(msgspec.Struct, frozen=True):
    """An event: the engine hands over the payload beside the cache."""

    payload: bytes


Message = wire.ToSource | wire.Abort
Own = Posted | Written | Gathered | Lapsed | WriteFailed | Settled
Event = Message | Own | Ready | Attached | PeerGone | Cancel | Tick


class Post(msgspec.Struct, frozen=True):
    """An action: gather a chunk and write it to `offset`, or write it from pool to pool, under a lease of `term`, to
    memory of a `registration`; in a pull, only gather it. The result comes back as an event.
    """

    chunk: int
    offset: int
    round: int = 0
    term: int = 0
    registration: int = 0


class Unstage(msgspec.Struct, frozen=True):
    """An action: free the chunk's staging memory."""

    chunk: int


class Say(msgspec.Struct, frozen=True):
    """An action: send `message` to the destination."""

    message: wire.AnyMessage


class EndSend(msgspec.Struct, frozen=True):
    """An action: end the attempt, served or failed for `reason`. `quarantined`: writes may still read the pages."""

    reason: str | None
    quarantined: bool = False


Action = Post | Unstage | Say | EndSend


class Sending(msgspec.Struct, frozen=True):
    """The state of one destination rank's attempt.

    `spans` [chunk]: its bytes in an arena. `room_bytes`: size of the destination's arena, which bounds a grant's
    offset; 0: grants carry no offset. `granted` chunks may be posted; `rounds` [chunk]: of its latest grant, if not the
    first. Chunks `in_flight` touch memory of this side; `staged` [chunk]: the offset where it waits to be read;
    `written` succeeded. `pages`: this side's tables so far, in a direct pull; the first `said_pages` of each were
    sent. `term`: of the latest grant; in a direct push it covers all pages. `eager`: the grant sent with the Want,
    perhaps for a chunk that is not ready. `repeats`: offers resent since the last news, at `quiet_since`.
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
    ready: Chunks = Chunks()
    granted: Chunks = Chunks()
    rounds: ChunkMap[int] = ChunkMap()
    digests: ChunkMap[int] = ChunkMap()
    in_flight: Chunks = Chunks()
    staged: ChunkMap[int] = ChunkMap()
    written: Chunks = Chunks()
    aux: bytes | None = None
    reason: str | None = None
    peer_waits: bool = False
    finished: bool = False

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return len(self.spans)

    @property
    def is_read_from_pages(self) -> bool:
        """True if the destination reads chunks from this side's pages."""
        return self.direct and self.verb is Verb.PULL

    def check(self) -> None:
        """Check the rules of DESIGN section 6, in O(chunks). Raises AssertionError."""
        assert self.ready.within(self.chunks), f"chunks {[*self.ready]} are ready, of {self.chunks}"
        assert self.granted <= self.ready, "a chunk was granted that is not ready"
        assert self.in_flight | self.written <= self.granted, "a chunk moved that nobody granted"
        if self.staged:
            assert self.staged.keys() <= self.granted, "a chunk waits to be read that nobody granted"
            assert not any(chunk in self.written for chunk in self.staged), "a chunk waits to be read that was read"
            assert self.verb is Verb.PULL, "a chunk of a push waits to be read"
            assert self.reason is None, "a failed attempt keeps chunks to be read"
        assert not (self.finished and self.reason is None and self.in_flight), "it landed with a write in flight"


Stepped = tuple[Sending, list[Action]]


def step(state: Sending, event: Event, now: float) -> Stepped:
    """Advance by one event. Returns the new state and actions. An ended attempt still takes events of its writes, to
    send Drained.
    """
    match event:
        case Posted() | Written() | Gathered() | Lapsed() | WriteFailed() | Settled():
            return _own(state, event, now)
        case Tick():
            return _tick(state, now)
        case Cancel(reason):
            return _fail(state, reason, now)
        case Ready(chunks, pages):
            ready = replace(state, ready=state.ready | chunks, pages=pages, quiet_since=now, repeats=0)
            if state.eager is not None and state.eager.chunk in chunks and not _ended(state):
                return _eagerly(ready, state.eager, tuple(c for c in chunks if c != state.eager.chunk), now)
            return _offer(ready, chunks)
        case Attached(payload):
            return replace(state, aux=payload), [Say(wire.Aux(state.request, state.generation, payload))]
        case _:
            after, actions = _heard(state, event, now)
            return after if after is state else replace(after, quiet_since=now, repeats=0), actions


def due(state: Sending) -> float:
    """Returns the next time at which a Tick changes the state; math.inf: never."""
    return math.inf if state.finished else min(state.deadline, _again_at(state))


def _again_at(state: Sending) -> float:
    """Returns when to resend to a silent destination: at growing intervals until a chunk is ready."""
    repeats = 0 if state.ready or state.reason is not None else state.repeats
    return state.quiet_since + state.patience.again_s(repeats, state.request, state.generation)


def _own(state: Sending, event: Own, now: float) -> Stepped:
    """Apply an event of one of this side's chunks."""
    match event:
        case Posted(chunk, digest):
            if digest is not None:
                state = replace(state, digests=state.digests.having(chunk, digest))
            return replace(state, in_flight=state.in_flight.having(chunk)), []
        case Written(chunk):
            state = replace(state, in_flight=state.in_flight.without(chunk), written=state.written.having(chunk))
            return _settle(state, [])
        case Gathered(chunk, offset, digest):
            return _staged(state, chunk, offset, digest)
        case Lapsed(chunk):
            return _lapsed(state, chunk)
        case WriteFailed(chunk, reason, quiescent):
            left = state.in_flight.without(chunk) if quiescent else state.in_flight
            return _fail(replace(state, in_flight=left), reason, now)
        case Settled(chunk):
            return _settle(replace(state, in_flight=state.in_flight.without(chunk)), [])


def _heard(state: Sending, event: Message | PeerGone, now: float) -> Stepped:
    """Apply an event of the destination. A message without news counts as silence: its answer may be lost."""
    match event:
        case wire.Want():
            return _asked(state, now)
        case wire.Granted():
            return _granted(state, event, now)
        case wire.Taken(chunk=chunk, round=round_):
            return _taken(state, chunk, round_)
        case wire.Done():
            return _done(state, now)
        case wire.Abort(reason=reason):
            return _aborted(state, reason, now)
        case PeerGone(_, reason):
            return _gone(state, reason, now)


def _ended(state: Sending) -> bool:
    return state.reason is not None or state.finished


def _offer(state: Sending, chunks: tuple[int, ...]) -> Stepped:
    """Offer chunks. From pool to pool they need no regions: they are posted at once, each once."""
    if _ended(state) or not chunks:
        return state, []
    if not state.direct:
        return state, [Say(wire.Offered(state.request, state.generation, _ranges(chunks)))]
    fresh = [chunk for chunk in chunks if chunk not in state.granted]
    return replace(state, granted=state.granted | fresh), [Post(chunk, 0, 0, state.term) for chunk in fresh]


def _eagerly(state: Sending, grant: wire.Grant, others: tuple[int, ...], now: float) -> Stepped:
    """Post the chunk whose region came with the Want, and offer the other chunks."""
    state, actions = _granted(state, wire.Granted(state.request, state.generation, (grant,)), now)
    state, more = _offer(state, others)
    return state, [*actions, *more]


def _unsaid(state: Sending) -> tuple[tuple[bytes, ...], tuple[int, ...]]:
    """Returns the part of this side's page tables that no Staged has carried, and where it begins: each page id is sent
    once unless a message is lost.
    """
    first = state.said_pages
    if not any(first):
        return state.pages, ()
    return tuple(table[said * PAGE_ID_BYTES :] for table, said in zip(state.pages, first, strict=True)), first


def _ranges(chunks: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Returns `((0, 3), (5, 6))` for `(0, 1, 2, 5)`."""
    ordered = sorted(chunks)
    firsts = [c for i, c in enumerate(ordered) if not i or ordered[i - 1] != c - 1]
    stops = [c + 1 for i, c in enumerate(ordered) if i + 1 == len(ordered) or ordered[i + 1] != c + 1]
    return tuple(zip(firsts, stops, strict=True))


def _asked(state: Sending, now: float) -> Stepped:
    """Answer a resent Want: repeat all that the destination should know, or Noted while no chunk is ready."""
    if _ended(state):
        return state, _failed(state)
    if not state.ready:
        keeps_ms = max(0, int((state.deadline - now) * 1e3))
        return state, [Say(wire.Noted(state.request, state.generation, keeps_ms)), *_aux(state)]
    if state.eager is not None and [*state.ready] == [*state.granted] == [state.eager.chunk]:
        state, actions = _eagerly(state, state.eager, (), now)
        return state, [*actions, *_aux(state)]
    if state.direct and state.verb is Verb.PUSH:
        state, actions = _offer(state, tuple(state.ready))
        return state, [*actions, *_aux(state)]
    again = _staged_again(state) if state.direct else []
    return state, [_whole_offer(state), *again, *_aux(state)]


def _aux(state: Sending) -> list[Action]:
    return [] if state.aux is None else [Say(wire.Aux(state.request, state.generation, state.aux))]


def _whole_offer(state: Sending) -> Say:
    """Returns an offer of all ready chunks, of none if they are read from pages: earlier offers may be lost."""
    ready = () if state.is_read_from_pages else _ranges(tuple(state.ready))
    return Say(wire.Offered(state.request, state.generation, ready))


def _staged_again(state: Sending) -> list[Action]:
    """Returns Staged of all staged chunks, the first with all pages: earlier ones may be lost."""
    whole, known = replace(state, said_pages=()), replace(state, said_pages=lengths(state.pages))
    return [_place(known if number else whole, chunk) for number, chunk in enumerate(state.staged)]


def _failed(state: Sending) -> list[Action]:
    """Returns the Abort for a destination that still asks after the end. Before the end, ticks resend it."""
    told = state.finished and state.reason is not None
    return [Say(wire.Abort(state.request, state.generation, state.reason or ""))] if told else []


def _told(state: Sending, chunk: int) -> Say:
    round_ = state.rounds.get(chunk, 0)
    return Say(wire.Chunk(state.request, state.generation, chunk, round_, state.digests.get(chunk)))


def _lapsed(state: Sending, chunk: int) -> Stepped:
    """Offer the chunk again, so that it is granted under a new lease."""
    state = replace(
        state,
        in_flight=state.in_flight.without(chunk),
        granted=state.granted.without(chunk),
        rounds=state.rounds.without(chunk),
    )
    if _ended(state):
        return _settle(state, [])
    return state, [Say(wire.Offered(state.request, state.generation, _ranges((chunk,))))]


def _granted(state: Sending, granted: wire.Granted, now: float) -> Stepped:
    """Post the granted chunks. The first impossible grant fails the attempt. Of several grants of a chunk in one
    message only the first counts, so a message has at most one answer a chunk.
    """
    if _ended(state):
        return state, _failed(state)
    if granted.lease.term > state.term:
        state = replace(state, term=granted.lease.term)
    actions: list[Action] = []
    fresh: dict[int, wire.Grant] = {}
    seen: set[int] = set()
    for grant in granted.grants:
        if grant.chunk in seen:
            continue
        seen.add(grant.chunk)
        if wrong := _wrong(state, grant):
            state, more = _fail(_accept(state, fresh), wrong, now)
            return state, [*actions, *more]
        if _is_fresh(state, grant):
            fresh[grant.chunk] = grant
            actions += [Unstage(grant.chunk)] if grant.chunk in state.staged else []
            actions.append(Post(grant.chunk, grant.offset, grant.round, state.term, granted.registration))
        elif grant.chunk in state.staged:
            actions.append(_place(state, grant.chunk))
        elif state.verb is Verb.PUSH and grant.chunk in state.written:
            actions.append(_told(state, grant.chunk))
    return _accept(state, fresh), actions


def _wrong(state: Sending, grant: wire.Grant) -> str | None:
    """Returns why a grant is impossible, or None."""
    if not 0 <= grant.chunk < state.chunks:
        return f"granted chunk {grant.chunk} of {state.chunks}"
    if state.room_bytes and not 0 <= grant.offset <= state.room_bytes - state.spans[grant.chunk]:
        return f"grant at {grant.offset} leaves the arena of {state.room_bytes} bytes"
    return None


def _is_fresh(state: Sending, grant: wire.Grant) -> bool:
    """Returns True for a grant not used yet. Each round is used once; a resent grant asks for the chunk's state. The
    destination may begin the next round while the last is in flight here: it has to resend that grant.
    """
    chunk = grant.chunk
    if chunk not in state.ready:  # only a push from pool to pool may be asked for before it was offered
        return False
    moved = chunk in state.written or chunk in state.staged
    return chunk not in state.granted or (moved and grant.round > state.rounds.get(chunk, 0))


def _accept(state: Sending, fresh: dict[int, wire.Grant]) -> Sending:
    if not fresh:
        return state
    rounds, staged = state.rounds, state.staged
    for chunk, grant in fresh.items():
        staged = staged.without(chunk)
        if grant.round:
            rounds = rounds.having(chunk, grant.round)
    return replace(
        state, granted=state.granted | fresh, rounds=rounds, written=state.written - fresh.keys(), staged=staged
    )


def _staged(state: Sending, chunk: int, offset: int, digest: int | None) -> Stepped:
    state = replace(state, in_flight=state.in_flight.without(chunk))
    if _ended(state):
        return _settle(state, [Unstage(chunk)])
    if digest is not None:
        state = replace(state, digests=state.digests.having(chunk, digest))
    state = replace(state, staged=state.staged.having(chunk, offset))
    return replace(state, said_pages=lengths(state.pages)), [_place(state, chunk)]


def _place(state: Sending, chunk: int) -> Say:
    round_, digest = state.rounds.get(chunk, 0), state.digests.get(chunk)
    place = state.staged[chunk], round_, digest, *_unsaid(state)
    return Say(wire.Staged(state.request, state.generation, chunk, *place))


def _taken(state: Sending, chunk: int, round_: int) -> Stepped:
    if chunk not in state.staged or state.rounds.get(chunk, 0) != round_:
        return state, []
    return replace(state, staged=state.staged.without(chunk), written=state.written.having(chunk)), [Unstage(chunk)]


def _done(state: Sending, now: float) -> Stepped:
    """End the attempt. This side's completions may arrive later than Done, and hold the pages until then."""
    answered = state.verb is Verb.PULL or not state.chunks  # a push with chunks needs no reply
    if _ended(state):
        if not answered:
            return state, []
        return state, _failed(state) if state.reason else [Say(wire.Kept(state.request, state.generation))]
    if len(state.granted) < state.chunks:
        return _fail(state, f"done after {len(state.granted)} of {state.chunks} chunks", now)
    freed: list[Action] = [Unstage(chunk) for chunk in state.staged]
    if answered:
        freed.append(Say(wire.Kept(state.request, state.generation)))
    return _settle(replace(state, peer_waits=True, staged=ChunkMap[int]()), freed)


def _aborted(state: Sending, reason: str, now: float) -> Stepped:
    if state.finished and not state.in_flight:
        return state, [Say(wire.Drained(state.request, state.generation))]
    state, actions = _unstaged(state)
    if state.reason is None:
        state = replace(state, reason=reason, deadline=now + state.patience.drain_s)
    return _settle(replace(state, peer_waits=True), actions)


def _unstaged(state: Sending) -> Stepped:
    """Free all staged chunks: a reader of a failed attempt gets no Kept, so they can be reused at once."""
    return replace(state, staged=ChunkMap[int]()), [Unstage(chunk) for chunk in state.staged]


def _fail(state: Sending, reason: str, now: float) -> Stepped:
    """Fail the attempt, and send Abort. The destination answers with Abort, which asks for Drained."""
    if _ended(state):
        return _settle(state, [])
    state, actions = _unstaged(state)
    state = replace(state, reason=reason, deadline=now + state.patience.drain_s, quiet_since=now)
    return _settle(state, [*actions, Say(wire.Abort(state.request, state.generation, reason))])


def _gone(state: Sending, reason: str, now: float) -> Stepped:
    """Fail the attempt without waiting for the destination, which can't ask for Drained any more."""
    if state.finished:
        return state, []
    state, actions = _unstaged(state)
    # Pings keep failing: only the first loss sets the deadline.
    deadline = now + state.patience.drain_s if state.reason is None else state.deadline
    state = replace(state, reason=state.reason or reason, peer_waits=False, deadline=deadline)
    if state.in_flight:
        return state, actions
    return replace(state, finished=True), [*actions, EndSend(state.reason)]


def _settle(state: Sending, actions: list[Action]) -> Stepped:
    """End the attempt if no write is in flight. A failed one sends Drained first, if it was asked to."""
    if state.in_flight:
        return state, actions
    if state.reason is not None and state.peer_waits:
        actions = [*actions, Say(wire.Drained(state.request, state.generation))]
        state = replace(state, peer_waits=False)
    elif not state.peer_waits or state.finished:
        return state, actions
    if not state.finished:
        actions = [*actions, EndSend(state.reason)]
    return replace(state, finished=True), actions


def _tick(state: Sending, now: float) -> Stepped:
    if state.finished:
        return state, []
    if now >= state.deadline:
        if state.reason is None:
            missing = state.chunks - len(state.written)
            return _fail(state, f"deadline passed with {missing} of {state.chunks} chunks unwritten", now)
        return replace(state, finished=True), [EndSend(state.reason, bool(state.in_flight))]
    if now < _again_at(state):
        return state, []
    return _again(replace(state, quiet_since=now, repeats=state.repeats + 1))


def _again(state: Sending) -> Stepped:
    """Resend the offer or Abort to a silent destination: it may have missed it, or its Done or Abort was lost. It
    answers any message.
    """
    if state.reason is not None:
        return state, [Say(wire.Abort(state.request, state.generation, state.reason))]
    return state, [_whole_offer(state), *_staged_again(state)]
