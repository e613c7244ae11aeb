"""The source's half of the protocol, for one request and one destination rank: a pure state machine.

Chunks are posted as they are granted. Nothing is posted after an abort, and Drained is said only when the last write in
flight has ended on this side.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvmover.transfer import wire


@dataclass(frozen=True, slots=True)
class Granted:
    """The destination has a region for a chunk. For the direct route every chunk is granted at once, at offset 0."""

    chunk: int
    offset: int


@dataclass(frozen=True, slots=True)
class Posted:
    """A chunk's write is on its way, or its gather is: either touches memory."""

    chunk: int


@dataclass(frozen=True, slots=True)
class Written:
    """A chunk's write ended well on this side."""

    chunk: int


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """A chunk's write ended badly. `quiescent`: it cannot touch memory any more."""

    chunk: int
    reason: str
    quiescent: bool


@dataclass(frozen=True, slots=True)
class Settled:
    """A write that failed without quiescence cannot touch memory any more."""

    chunk: int


@dataclass(frozen=True, slots=True)
class PeerDone:
    """The destination has everything."""


@dataclass(frozen=True, slots=True)
class PeerAborted:
    """The destination gives this attempt up and wants to hear when nothing is in flight."""

    reason: str


@dataclass(frozen=True, slots=True)
class PeerGone:
    """The transport lost the destination."""

    reason: str


@dataclass(frozen=True, slots=True)
class Cancel:
    """The engine gives the request up."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = Granted | Posted | Written | WriteFailed | Settled | PeerDone | PeerAborted | PeerGone | Cancel | Tick


@dataclass(frozen=True, slots=True)
class Post:
    """Gather a chunk and write it to `offset`, or write it straight; then report Posted and how it ended."""

    chunk: int
    offset: int


@dataclass(frozen=True, slots=True)
class Say:
    """Send `message` to the destination."""

    message: wire.AnyMessage


@dataclass(frozen=True, slots=True)
class Finish:
    """This destination is served, or failed for `reason`. `held`: writes may still read the pages."""

    reason: str | None
    held: bool = False


Action = Post | Say | Finish


@dataclass(frozen=True, slots=True)
class Sending:
    """One attempt of one destination rank. `in_flight` chunks touch memory; `granted` holds what may be posted."""

    request: str
    generation: int
    chunks: int
    deadline: float
    drain_s: float
    granted: dict[int, int] = field(default_factory=dict[int, int])
    in_flight: frozenset[int] = frozenset()
    written: frozenset[int] = frozenset()
    reason: str | None = None
    peer_waits: bool = False
    finished: bool = False


def step(state: Sending, event: Event, now: float) -> tuple[Sending, list[Action]]:
    """Advance by one event. An ended attempt still hears of its writes, so that it can say Drained."""
    match event:
        case Granted(chunk, offset):
            return _granted(state, chunk, offset, now)
        case Posted(chunk):
            return replace(state, in_flight=state.in_flight | {chunk}), []
        case Written(chunk):
            state = replace(state, in_flight=state.in_flight - {chunk}, written=state.written | {chunk})
            return _settle(state, [])
        case WriteFailed(chunk, reason, quiescent):
            left = state.in_flight - {chunk} if quiescent else state.in_flight
            return _fail(replace(state, in_flight=left), reason, now)
        case Settled(chunk):
            return _settle(replace(state, in_flight=state.in_flight - {chunk}), [])
        case PeerDone():
            return _done(state, now)
        case PeerAborted(reason):
            return _aborted(state, reason, now)
        case PeerGone(reason):
            return _gone(state, reason, now)
        case Cancel(reason):
            return _fail(state, reason, now)
        case Tick():
            return _tick(state, now)


def _granted(state: Sending, chunk: int, offset: int, now: float) -> tuple[Sending, list[Action]]:
    """A grant is used once: a repeated one finds its chunk granted already."""
    if state.reason is not None or state.finished or chunk in state.granted:
        return state, []
    if not 0 <= chunk < state.chunks:
        return _fail(state, f"granted chunk {chunk} of {state.chunks}", now)
    return replace(state, granted={**state.granted, chunk: offset}), [Post(chunk, offset)]


def _done(state: Sending, now: float) -> tuple[Sending, list[Action]]:
    """Everything landed; our own completions may come after the news and still hold the pages."""
    if state.reason is not None or state.finished:
        return state, []
    if len(state.granted) < state.chunks:
        return _fail(state, f"done after {len(state.granted)} of {state.chunks} chunks", now)
    return _settle(replace(state, peer_waits=True), [])


def _aborted(state: Sending, reason: str, now: float) -> tuple[Sending, list[Action]]:
    if state.finished and not state.in_flight:
        return state, [Say(wire.Drained(state.request, state.generation))]
    if state.reason is None:
        state = replace(state, reason=reason, deadline=now + state.drain_s)
    return _settle(replace(state, peer_waits=True), [])


def _fail(state: Sending, reason: str, now: float) -> tuple[Sending, list[Action]]:
    """Tell the destination why; it answers with its own Abort, which asks for Drained."""
    if state.reason is not None or state.finished:
        return _settle(state, [])
    state = replace(state, reason=reason, deadline=now + state.drain_s)
    return _settle(state, [Say(wire.Abort(state.request, state.generation, reason))])


def _gone(state: Sending, reason: str, now: float) -> tuple[Sending, list[Action]]:
    """Nobody is left to ask for Drained."""
    if state.finished:
        return state, []
    # Pings go on failing: only the first news of the loss may set the deadline.
    deadline = now + state.drain_s if state.reason is None else state.deadline
    state = replace(state, reason=state.reason or reason, peer_waits=False, deadline=deadline)
    return (state, []) if state.in_flight else (replace(state, finished=True), [Finish(state.reason)])


def _settle(state: Sending, actions: list[Action]) -> tuple[Sending, list[Action]]:
    """With nothing in flight: a failed attempt says Drained when asked and ends, a landed one just ends."""
    if state.in_flight:
        return state, actions
    if state.reason is not None and state.peer_waits:
        actions = [*actions, Say(wire.Drained(state.request, state.generation))]
        state = replace(state, peer_waits=False)
    elif not state.peer_waits or state.finished:
        return state, actions
    if not state.finished:
        actions = [*actions, Finish(state.reason)]
    return replace(state, finished=True), actions


def _tick(state: Sending, now: float) -> tuple[Sending, list[Action]]:
    if state.finished or now < state.deadline:
        return state, []
    if state.reason is None:
        missing = state.chunks - len(state.written)
        return _fail(state, f"deadline passed with {missing} of {state.chunks} chunks unwritten", now)
    return replace(state, finished=True), [Finish(state.reason, bool(state.in_flight))]
