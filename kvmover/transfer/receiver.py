"""The destination's half of the protocol for one request: a pure state machine, `step(state, event, now)`.

Push with credits. The destination asks every source rank that may write to it (Want). Those that have the request say
so (Offered) and get arena regions as there are some (Granted), so that no region waits for a prefill. Each chunk that
lands is scattered, and when the set of (writer, chunk) is whole the destination says Done. After a failure it tells
every source (Abort) and gives the pages back when each has answered that nothing is in flight (Drained).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvmover.transfer import wire

#: A writer is a source rank's transport name, unique for ever. A chunk of it is identified by both.
WriterChunk = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Offered:
    """A source has the request and will use what it is granted."""

    peer: str


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


@dataclass(frozen=True, slots=True)
class Scattered:
    """A chunk is in the pages; its region is free."""

    peer: str
    chunk: int


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


Event = Offered | Leased | Arrived | Scattered | PeerAborted | PeerDrained | PeerGone | Cancel | Tick


@dataclass(frozen=True, slots=True)
class Send:
    """Send `message` to `peer`."""

    peer: str
    message: wire.AnyMessage


@dataclass(frozen=True, slots=True)
class Lease:
    """Get a region for a chunk when there is one, then report Leased."""

    peer: str
    chunk: int


@dataclass(frozen=True, slots=True)
class Scatter:
    """Move a landed chunk from its region into the pages, then report Scattered."""

    peer: str
    chunk: int
    offset: int


@dataclass(frozen=True, slots=True)
class Free:
    """The region is nobody's any more."""

    offset: int


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A write may still land in the region: keep it out of use."""

    offset: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The request ended. `held`: peers whose writes may still land in the pages, which must not be reused yet."""

    reason: str | None
    held: frozenset[str] = frozenset()


Action = Send | Lease | Scatter | Free | Quarantine | Finish


@dataclass(frozen=True, slots=True)
class Source:
    """What is expected of one writer: how many chunks, and whether they are written straight into the pages."""

    chunks: int
    direct: bool = False


@dataclass(frozen=True, slots=True)
class Receiving:
    """One attempt at one request. `regions` [writer, chunk] are leased to chunks that have not been scattered."""

    request: str
    generation: int
    sources: dict[str, Source]
    deadline: float
    drain_s: float
    regions: dict[WriterChunk, int] = field(default_factory=dict[WriterChunk, int])
    arrived: frozenset[WriterChunk] = frozenset()
    landed: frozenset[WriterChunk] = frozenset()
    offered: frozenset[str] = frozenset()
    reason: str | None = None
    undrained: frozenset[str] = frozenset()
    gone: frozenset[str] = frozenset()
    finished: bool = False

    @property
    def missing(self) -> int:
        return sum(source.chunks for source in self.sources.values()) - len(self.landed)


def start(state: Receiving) -> tuple[Receiving, list[Action]]:
    """A request that needs nothing is done at once."""
    return _land(state, [])


def step(state: Receiving, event: Event, now: float) -> tuple[Receiving, list[Action]]:
    """Advance by one event. Events of an ended request, of strangers and of the past change nothing."""
    if state.finished:
        return state, [Free(event.offset)] if isinstance(event, Leased) else []
    match event:
        case Tick():
            return _tick(state, now)
        case Cancel(reason):
            return _fail(state, reason, now)
        case Scattered(peer, chunk):
            return _scattered(state, (peer, chunk))
        case Leased(peer, chunk, offset):
            return _leased(state, (peer, chunk), offset)
        case Offered() | Arrived() | PeerAborted() | PeerDrained() | PeerGone():
            return _heard(state, event, now) if event.peer in state.sources else (state, [])


def _heard(
    state: Receiving, event: Offered | Arrived | PeerAborted | PeerDrained | PeerGone, now: float
) -> tuple[Receiving, list[Action]]:
    match event:
        case Offered(peer):
            return _offered(state, peer)
        case Arrived(peer, chunk):
            return _arrived(state, (peer, chunk), now)
        case PeerAborted(peer, reason):
            return _fail(state, reason, now)
        case PeerDrained(peer):
            return _drained(state, peer)
        case PeerGone(peer, reason):
            return _gone(state, peer, reason, now)


def _offered(state: Receiving, peer: str) -> tuple[Receiving, list[Action]]:
    """Every chunk of a packed source needs a region, once."""
    source = state.sources[peer]
    if state.reason is not None or peer in state.offered or source.direct:
        return state, []
    return replace(state, offered=state.offered | {peer}), [Lease(peer, chunk) for chunk in range(source.chunks)]


def _leased(state: Receiving, key: WriterChunk, offset: int) -> tuple[Receiving, list[Action]]:
    if state.reason is not None:
        return state, [Free(offset)]
    grant = wire.Granted(state.request, state.generation, (wire.Grant(key[1], offset),))
    return replace(state, regions={**state.regions, key: offset}), [Send(key[0], grant)]


def _arrived(state: Receiving, key: WriterChunk, now: float) -> tuple[Receiving, list[Action]]:
    """Each chunk counts once, however often it is told of; a chunk nobody granted fails the attempt."""
    peer, chunk = key
    source = state.sources[peer]
    if key in state.arrived or state.reason is not None:
        return state, []
    if not 0 <= chunk < source.chunks:
        return _fail(state, f"{peer} sent chunk {chunk} of {source.chunks}", now)
    if source.direct:
        return _land(replace(state, arrived=state.arrived | {key}, landed=state.landed | {key}), [])
    if key not in state.regions:
        return _fail(state, f"{peer} sent chunk {chunk} without a grant", now)
    return replace(state, arrived=state.arrived | {key}), [Scatter(peer, chunk, state.regions[key])]


def _scattered(state: Receiving, key: WriterChunk) -> tuple[Receiving, list[Action]]:
    """Our own copy is over: the region is free whatever became of the attempt."""
    if key not in state.regions:
        return state, []
    regions = {other: offset for other, offset in state.regions.items() if other != key}
    actions: list[Action] = [Free(state.regions[key])]
    state = replace(state, regions=regions, landed=state.landed | {key})
    return _settle(state, actions) if state.reason is not None else _land(state, actions)


def _land(state: Receiving, actions: list[Action]) -> tuple[Receiving, list[Action]]:
    if state.missing:
        return state, actions
    done = wire.Done(state.request, state.generation)
    return replace(state, finished=True), [*actions, *(Send(peer, done) for peer in state.sources), Finish(None)]


def _fail(state: Receiving, reason: str, now: float) -> tuple[Receiving, list[Action]]:
    """Tell every source, and wait until none of them can write any more, but not for ever."""
    if state.reason is not None:
        return state, []
    abort = wire.Abort(state.request, state.generation, reason)
    state = replace(state, reason=reason, undrained=frozenset(state.sources), deadline=now + state.drain_s)
    return _settle(state, [Send(peer, abort) for peer in state.sources if peer not in state.gone])


def _drained(state: Receiving, peer: str) -> tuple[Receiving, list[Action]]:
    """A drained source's regions are free, but for those that we are reading ourselves."""
    if state.reason is None:
        return state, []
    free = [key for key in state.regions if key[0] == peer and key not in state.arrived]
    regions = {key: offset for key, offset in state.regions.items() if key not in free}
    actions: list[Action] = [Free(state.regions[key]) for key in free]
    return _settle(replace(state, regions=regions, undrained=state.undrained - {peer}), actions)


def _gone(state: Receiving, peer: str, reason: str, now: float) -> tuple[Receiving, list[Action]]:
    """A source that has sent everything may go; nobody waits for the answer of one that has not."""
    state = replace(state, gone=state.gone | {peer})
    if state.reason is not None:
        return _settle(state, [])
    return (state, []) if _complete(state, peer) else _fail(state, reason, now)


def _complete(state: Receiving, peer: str) -> bool:
    return sum(key[0] == peer for key in state.arrived) == state.sources[peer].chunks


def _tick(state: Receiving, now: float) -> tuple[Receiving, list[Action]]:
    if now < state.deadline:
        return state, []
    if state.reason is None:
        late = sorted(peer for peer in state.sources if not _complete(state, peer))
        return _fail(state, f"deadline passed with {state.missing} chunks missing from {', '.join(late)}", now)
    return _finish(state, [])


def _settle(state: Receiving, actions: list[Action]) -> tuple[Receiving, list[Action]]:
    """Finish a failed attempt once every source that can has drained and every copy of our own is over."""
    copying = [key for key in state.regions if key in state.arrived]
    return (state, actions) if state.undrained - state.gone or copying else _finish(state, actions)


def _finish(state: Receiving, actions: list[Action]) -> tuple[Receiving, list[Action]]:
    """What is still leased belongs to sources that never answered."""
    held = frozenset(peer for peer in state.undrained if state.sources[peer].direct)
    actions = [*actions, *(Quarantine(offset) for offset in state.regions.values()), Finish(state.reason, held)]
    return replace(state, finished=True), actions
