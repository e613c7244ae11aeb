"""What a source knows of a request that it gives out and of each destination that asked, from its Want to its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvmover.errors import PlanError
from kvmover.plan.cost import Route
from kvmover.sharing import MapMode
from kvmover.transfer.core import Core
from kvmover.transfer.events import Cancel, PeerGone, Tick
from kvmover.transfer.meter import Stage
from kvmover.transfer.peers.table import Peer
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.lane import Cut, Lane, plans_between, related
from kvmover.transfer.protocol.wire import Verb, decoded, encoded
from kvmover.transfer.result import Cause, Gate, Result, Transfer
from kvmover.transfer.source.state import Event, Sending, WriteFailed
from kvmover.transfer.source.writes import Job, Pages

#: Which event makes an attempt fail for which cause; any other is a peer that breaks the protocol.
_CAUSES: dict[type[Event], Cause] = {
    Cancel: Cause.ABORTED,
    wire.Abort: Cause.PEER_ABORTED,
    PeerGone: Cause.PEER_LOST,
    Tick: Cause.DEADLINE,
    WriteFailed: Cause.TRANSPORT,
}


def cause_of(event: Event) -> Cause:
    """Why an attempt failed that `event` ended."""
    return _CAUSES.get(type(event), Cause.PROTOCOL)


@dataclass(slots=True, eq=False)
class SendAttempt:
    """One destination's attempt at a request. `waiting`: chunks that the engine has not produced."""

    state: Sending
    job: Job
    waiting: tuple[int, ...]

    def behind(self, passed: list[Gate]) -> Callable[[int], bool]:
        """Whether all that a chunk reaches into was produced before one of the gates that passed."""

        def produced(chunk: int) -> bool:
            layer, token = self.job.lane.reach(chunk, self.job.want.stop)
            return any(layer <= gate.layers and token <= gate.tokens for gate in passed)

        return produced


@dataclass(slots=True, eq=False)
class Request:
    """A request that this rank offers. `expected`: destination ranks that will ask, known from the first that does.

    `gates`: what has to pass before more is in the pages; None where everything is. `reason`: why it is failing; its
    transfer ends when no destination is being served any more.
    """

    transfer: Transfer
    pages: Pages
    gates: list[Gate] | None
    deadline: float
    aux: bytes | None = None
    passed: list[Gate] = field(default_factory=list[Gate])
    expected: frozenset[int] | None = None
    attempts: dict[str, SendAttempt] = field(default_factory=dict[str, SendAttempt])
    reason: str | None = None
    cause: Cause | None = None
    held: bool = False

    @property
    def all_asked(self) -> bool:
        asked = {attempt.job.peer.card.place.rank for attempt in self.attempts.values()}
        return self.expected is not None and self.expected <= asked

    def look(self) -> bool:
        """Ask the gates that have not passed; whether one has now."""
        passed = [gate for gate in self.gates or () if gate.event.query()]
        if passed and self.gates is not None:
            self.gates = [gate for gate in self.gates if gate not in passed]
            self.passed += passed
        return bool(passed)

    def take_ready(self, attempt: SendAttempt) -> tuple[int, ...]:
        """Chunks that wait no more: what they hold is in the pages."""
        ready = attempt.waiting if self.gates is None else tuple(filter(attempt.behind(self.passed), attempt.waiting))
        gone = frozenset(ready)
        attempt.waiting = tuple(chunk for chunk in attempt.waiting if chunk not in gone)
        return ready


def close(request: Request, core: Core) -> None:
    """Tell the engine how it ended, and count it."""
    attempts, transfer = request.attempts.values(), request.transfer
    chunks = [chunk for attempt in attempts for chunk in attempt.job.lane.chunks]
    seconds = core.clock() - transfer.started
    core.meter.ended["send", request.cause.value if request.cause else "landed"] += 1
    core.meter.took(Stage.SEND, seconds)
    transfer.held = request.held
    transfer.result = Result(
        request.reason,
        seconds,
        sum(chunk.nbytes for chunk in chunks),
        sum(attempt.job.lane.direct_runs for attempt in attempts),
        len(chunks),
        tuple(attempt.job.want.route for attempt in attempts if attempt.job.lane.chunks),
        sum(bool(attempt.job.lane.chunks) for attempt in attempts),
        request.held,
        request.cause,
    )
    core.ended("send", transfer.request, transfer.result)


def check_aux(payload: bytes | None) -> None:
    if payload is not None and len(payload) > wire.MAX_AUX_BYTES:
        raise PlanError(f"a payload of {len(payload)} bytes is over the limit of {wire.MAX_AUX_BYTES}")


def attempt_for(core: Core, request: Request, peer: Peer, want: wire.Want) -> SendAttempt:
    """The attempt that serves `want`. Raises ValueError or ProtocolError on one that cannot be met."""
    config, fleet, theirs = core.config, core.end.fleet, peer.card.place.fleet
    tables = [len(t) for t, p in zip(request.pages, core.end.pools, strict=True) if not p.component.states]
    if tables and want.stop > (min(tables) + 1) * fleet.page_tokens * fleet.cp:  # before so much is computed
        raise PlanError(f"page tables are too short for {want.stop} positions")
    if request.expected is None:
        relation = related(core.components, fleet, theirs, want.replicas)
        everyone = frozenset(range(theirs.size)) if core.end.rank in want.aux else frozenset[int]()
        request.expected = relation.destinations_of(core.end.rank) | everyone
    plans = plans_between(core.components, fleet, theirs, range(want.start, want.stop), want.replicas)
    lane = Lane.between(plans, core.end, peer.end, Cut(want.chunk_bytes, want.chunk_layers))
    direct = want.route is not Route.PACKED
    target = None
    mapped = None
    if direct and want.verb is Verb.PUSH:
        target = decoded(want.pages)
        if want.route is Route.MAPPED:
            mapped = core.mappings.pools(peer, MapMode.WRITE)
            if mapped is None:
                raise PlanError(f"{core.transport.name} cannot map the pools of {peer.name}")
    chunks, now = len(lane.chunks), core.clock()
    state = Sending(
        want.request,
        want.generation,
        tuple(chunk.span_bytes for chunk in lane.chunks),
        core.patience,
        now + config.deadline_s,
        direct,
        want.verb,
        _tables(request, want, chunks) if direct and want.verb is Verb.PULL else (),
        0 if direct or want.verb is Verb.PULL else peer.card.arena.nbytes,
        now,
    )
    return SendAttempt(state, Job(want, peer, lane, request.pages, target, mapped), tuple(range(chunks)))


def _tables(request: Request, want: wire.Want, chunks: int) -> tuple[bytes, ...]:
    """Our page tables for who reads from our pages. Raises ProtocolError where no message holds them."""
    pages = encoded(request.pages)
    every = tuple((chunk, chunk + 1) for chunk in range(chunks))
    wire.encode(wire.Offered(want.request, want.generation, every, pages))
    return pages
