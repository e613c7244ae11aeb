"""The state of a request that a source offers, and of each destination's attempt, from its Want to its end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvmover.errors import PlanError, ProtocolError
from kvmover.layout.pool import Pool
from kvmover.plan.cost import Route
from kvmover.shared_memory import MapMode
from kvmover.transfer.arguments import check_named
from kvmover.transfer.core import Core
from kvmover.transfer.events import Cancel, PeerGone, Tick
from kvmover.transfer.meter import Stage, summed
from kvmover.transfer.peers.peer_table import Peer
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.chunks import Cut, Lane, plans_between, related
from kvmover.transfer.protocol.content import Content, IdentityCheck, disagreement
from kvmover.transfer.protocol.wire import PAGE_ID_BYTES, Verb, decoded, encoded
from kvmover.transfer.result import ALL, Cause, Gate, Result, Service, Transfer
from kvmover.transfer.source.source_machine import Event, Faulted, Sending, WriteFailed
from kvmover.transfer.source.writes import Job, Pages
from kvmover.transfer.tombstones import SERVED

#: Prefixes of a growing request whose content is remembered: a router asks for one of the latest.
MAX_CONTENTS = 1024

#: The cause of failure by event; other events are protocol violations of the peer.
_CAUSES: dict[type[Event], Cause] = {
    Cancel: Cause.ABORTED,
    wire.Abort: Cause.PEER_ABORTED,
    PeerGone: Cause.PEER_LOST,
    Tick: Cause.DEADLINE,
    WriteFailed: Cause.TRANSPORT,
    Faulted: Cause.FAULT,
}


def cause_of(event: Event) -> Cause:
    """Returns why an attempt failed that `event` ended."""
    return _CAUSES.get(type(event), Cause.PROTOCOL)


@dataclass(frozen=True, slots=True)
class Needs:
    """The preconditions of sending a chunk: layers below `layers` of positions below `tokens` are produced, and so many
    `pages` of each page table are named.
    """

    layers: int
    tokens: int
    pages: tuple[int, ...]

    def met(self, passed: Iterable[Gate], named: Sequence[int]) -> bool:
        """Returns True if one of the `passed` gates covers the chunk, and tables of `named` pages do."""
        produced = any(self.layers <= gate.layers and self.tokens <= gate.tokens for gate in passed)
        return produced and _covers(named, self.pages)


def _covers(named: Sequence[int], needed: Sequence[int]) -> bool:
    return not [need for need, there in zip(needed, named, strict=True) if need > there]


@dataclass(slots=True, eq=False)
class SendAttempt:
    """The attempt of one destination rank. `waiting`: chunks not offered yet."""

    state: Sending
    job: Job
    waiting: tuple[int, ...]
    _needs: dict[int, Needs] = field(default_factory=dict[int, Needs])

    @property
    def engine(self) -> str:
        """The engine of the destination rank."""
        return self.job.peer.card.place.engine

    def needs(self, chunk: int) -> Needs:
        """Returns the preconditions of a chunk. Cached."""
        if chunk not in self._needs:
            lane = self.job.lane
            self._needs[chunk] = Needs(*lane.reach(chunk, self.job.want.stop), lane.source_pages(chunk))
        return self._needs[chunk]

    def forget(self, chunk: int) -> None:
        """Drop a chunk's cached preconditions once it is offered."""
        del self._needs[chunk]

    def placed(self) -> tuple[int, ...]:
        """Returns waiting chunks whose pages at the destination are named."""
        lane, named = self.job.lane, self.job.named
        if self.job.target is None or _covers(named, lane.target_reads):
            return self.waiting
        return tuple(chunk for chunk in self.waiting if _covers(named, lane.target_needs(chunk)))

    def tables(self) -> tuple[bytes, ...]:
        """Returns this side's page tables so far, as far as the destination reads from pages; else ()."""
        if not self.state.is_read_from_pages:
            return ()
        return encoded([table[:most] for table, most in zip(self.job.source, self.job.lane.source_reads, strict=True)])

    def unnamed(self) -> str:
        """Returns a text with the tokens of waiting chunks that have no page; empty if all have."""
        missing, lane = list[str](), self.job.lane
        named = tuple(map(len, self.job.source))
        for number, (held, there) in enumerate(zip(lane.src, named, strict=True)):
            if self.waiting and there < lane.source_reads[number]:
                tokens = lane.source_tokens(number, there)
                missing.append(f"{held.spec.component.name} {tokens.start} to {tokens.stop}")
        return f"no pages were named for tokens of {', '.join(missing)}" if missing else ""


@dataclass(slots=True, eq=False)
class Request:
    """A request that this rank offers. `expected` [engine]: the ranks that will ask, known from the first rank that
    asks.

    `pages`: its tables so far, a list shared with its jobs. `gates`: gates that must pass before more can be read;
    None: all is in the pages. `passed`: gates that passed, and `promised`: all gates, both without those that another
    gate covers. `failed` [engine]: reason and cause why it is not served any more; other engines are unaffected.
    `reason`: why the request fails for all engines; its transfer ends when the last attempt has. `deadline_s`: seconds
    it has since it was sent or last grew. `given_bytes`, `released`: in a REPEATED service, bytes sent to engines that
    may ask again, and whether one released the request. `contents`: the prompts of its prefixes by their length in
    tokens; a request sent whole has one.
    """

    transfer: Transfer
    pages: list[npt.NDArray[np.int64]]
    gates: list[Gate] | None
    deadline: float
    aux: bytes | None = None
    deadline_s: float = math.inf
    service: Service = Service.ONCE
    given_bytes: int = 0
    released: bool = False
    contents: dict[int, Content] = field(default_factory=dict[int, Content])
    passed: list[Gate] = field(default_factory=list[Gate])
    promised: list[Gate] = field(default_factory=list[Gate])
    expected: dict[str, frozenset[int]] = field(default_factory=dict[str, frozenset[int]])
    failed: dict[str, tuple[str, Cause]] = field(default_factory=dict[str, "tuple[str, Cause]"])
    attempts: dict[str, SendAttempt] = field(default_factory=dict[str, SendAttempt])
    reason: str | None = None
    cause: Cause | None = None
    quarantined: bool = False

    @classmethod
    def sent(
        cls,
        transfer: Transfer,
        pages: Pages,
        gates: Sequence[Gate] | None,
        aux: bytes | None,
        deadline_s: float,
        service: Service,
        core: Core,
    ) -> Request:
        """Returns the request of a `send`, with the deadline counted from the transfer's start. Raises PlanError for a
        wrong number of page tables, and a payload over 64 KiB.
        """
        if len(pages) != len(core.pools):
            raise PlanError(f"{len(pages)} page tables for {len(core.pools)} components")
        check_aux(aux)
        deadline = transfer.started + deadline_s
        left = deadline - core.clock()
        request = cls(transfer, list(pages), None if gates is None else list(gates), deadline, aux, left, service)
        request.promised = _uncovered(gates or ())
        if transfer.content is not None:
            request.name_contents((transfer.content,))
        return request

    @property
    def all_asked(self) -> bool:
        """True if engines have asked, with every expected rank of those that have not failed."""
        if not self.expected:
            return False
        asked = {attempt.job.peer.card.place.seat for attempt in self.attempts.values()}
        waited = [(engine, rank) for engine, ranks in self.expected.items() for rank in ranks]
        return not [seat for seat in waited if seat not in asked and seat[0] not in self.failed]

    def part(self) -> dict[str, SendAttempt]:
        """Remove engines that are served or failed as a whole, so that they may ask again. Returns their attempts."""
        parted = dict[str, SendAttempt]()
        for engine, ranks in list(self.expected.items()):
            mine = {name: attempt for name, attempt in self.attempts.items() if attempt.engine == engine}
            asked = {attempt.job.peer.card.place.rank for attempt in mine.values()}
            if (engine in self.failed or ranks <= asked) and not any(a.state.in_flight for a in mine.values()):
                nothing = all(attempt.job.want.start == attempt.job.want.stop for attempt in mine.values())
                self.released |= engine not in self.failed and nothing
                self.failed.pop(engine, None)
                del self.expected[engine]
                parted |= mine
        for name, attempt in parted.items():
            self.given_bytes += sum(chunk.nbytes for chunk in attempt.job.lane.chunks if attempt.state.reason is None)
            del self.attempts[name]
        return parted

    def of(self, engine: str) -> list[SendAttempt]:
        """Returns the attempts of an engine's ranks."""
        return [attempt for attempt in self.attempts.values() if attempt.engine == engine]

    @property
    def is_over(self) -> bool:
        """True if the transfer has ended and its attempts have finished, without a write in flight."""
        if not self.transfer.ended:
            return False
        return not [a for a in self.attempts.values() if not a.state.finished or a.state.in_flight]

    def name_contents(self, contents: Iterable[Content]) -> None:
        """Record the prompts of longer prefixes; the longest 1,024 are kept."""
        self.contents.update((content.tokens, content) for content in contents)
        for tokens in sorted(self.contents)[:-MAX_CONTENTS]:
            del self.contents[tokens]

    def is_behind(self, wanted: Content | None) -> bool:
        """Returns True for a REPEATED request that is still shorter than the prompt of a Want."""
        growing = self.service is Service.REPEATED and self.reason is None and not self.transfer.ended
        return growing and wanted is not None and wanted.tokens > max(self.contents, default=wanted.tokens)

    def disagrees(self, want: wire.Want, identity: IdentityCheck, beyond: int) -> str | None:
        """Returns why the request's prompt is not that of a Want; None if it is. `beyond`: tokens past the prompt that
        the last page of the destination may count.
        """
        newest = self.contents[max(self.contents)] if self.contents else None
        held = self.contents.get(want.content.tokens, newest) if want.content else newest
        if held is not None and want.stop > held.tokens + beyond:
            return f"the KV is of {held}, and tokens below {want.stop} were asked for"
        return disagreement(held, want.content, identity)

    def asks_anew(self, before: SendAttempt, want: wire.Want) -> bool:
        """Returns True if a Want follows an attempt that is open only here, in a REPEATED service: the peer is served
        once that ends.
        """
        is_newer = want.generation > before.state.generation
        return self.service is Service.REPEATED and self.reason is None and is_newer and not before.state.finished

    def over_for(self, peer: Peer, want: wire.Want) -> str | None:
        """Returns why a peer's Want can't be served: how the request ended for it; None if it may be served."""
        if self.reason is not None:
            return self.reason
        if (known := self.failed.get(peer.card.place.engine)) is not None:
            return known[0]
        before = self.attempts.get(peer.name)
        if before is not None and want.generation <= before.state.generation:
            return None
        if self.transfer.ended:
            return SERVED
        if before is not None and (not before.state.finished or before.state.in_flight):
            return "an earlier attempt is still open"
        return None

    def told(self, reason: str) -> str:
        """Returns `reason`, extended by the wanted tokens that have no pages."""
        missing = next((unnamed for attempt in self.attempts.values() if (unnamed := attempt.unnamed())), "")
        return f"{reason}: {missing}" if missing else reason

    def too_late(self) -> str:
        """Returns the reason of a passed deadline: the missing step."""
        missing = "was served" if self.all_asked else "asked"
        return self.told(f"deadline passed before every destination {missing}")

    def look(self) -> None:
        """Query the gates that have not passed. Raises an event's exception."""
        for gate in [gate for gate in self.gates or () if has_passed(gate)]:
            self.let(gate)

    def check_gate(self, gate: Gate) -> None:
        """Raise PlanError for a gate of fewer tokens than an earlier one that covers its layers.

        A gate of no token or no layer may bring pages at any time.
        """
        before = next(
            (each for each in self.promised if each.tokens > gate.tokens and each.layers >= gate.layers), None
        )
        if before is not None and gate.tokens and gate.layers:
            raise PlanError(
                f"a gate of {_covered(gate)} of request {self.transfer.request} after one of {_covered(before)}:"
                " what was promised cannot be taken back"
            )

    def add(self, gate: Gate) -> None:
        """Add a gate that `check_gate` accepted."""
        assert self.gates is not None, "a request without gates is whole"
        self.gates.append(gate)
        self.promised = _uncovered([*self.promised, gate])

    def let(self, gate: Gate) -> None:
        """Move a gate to those that passed: it is not queried again."""
        if self.gates is not None:
            self.gates.remove(gate)
            self.passed = _uncovered([*self.passed, gate])

    def name(self, pages: Pages, pools: Sequence[Pool]) -> None:
        """Append pages to the page tables. Raises PlanError, and adds no page, for a wrong number of tables or a page
        outside its pool.
        """
        if len(pages) != len(self.pages):
            raise PlanError(f"{len(pages)} page tables for {len(self.pages)} components")
        longer = [np.concatenate(pair) for pair in zip(self.pages, pages, strict=True)]
        check_named(longer, pools)
        self.pages[:] = longer

    def take_ready(self, attempt: SendAttempt) -> tuple[int, ...]:
        """Remove and return the waiting chunks whose bytes are in named pages.

        Raises OwnTables for a page outside its pool. A request sent whole was checked at its Want.
        """
        ready = attempt.placed()
        if self.gates is not None:
            named = tuple(map(len, self.pages))
            ready = tuple(chunk for chunk in ready if attempt.needs(chunk).met(self.passed, named))
            for chunk in ready:
                attempt.job.check_source(chunk)
                attempt.forget(chunk)
        gone = frozenset(ready)
        left = () if len(gone) == len(attempt.waiting) else [each for each in attempt.waiting if each not in gone]
        attempt.waiting = tuple(left)
        return ready


def _covered(gate: Gate) -> str:
    """Returns the tokens and layers of a gate in words."""
    tokens = "all tokens" if gate.tokens >= ALL else f"{gate.tokens} tokens"
    return tokens if gate.layers >= ALL else f"{tokens} of {gate.layers} layers"


def _uncovered(gates: Sequence[Gate]) -> list[Gate]:
    """Returns the gates that no other gate covers, the first of equal ones: a prefill in 1,000 chunks leaves one."""
    left = list[Gate]()
    for gate in sorted(gates, key=lambda gate: (-gate.layers, -gate.tokens)):
        if not left or gate.tokens > left[-1].tokens:
            left.append(gate)
    return left


def close(request: Request, core: Core) -> None:
    """Set the transfer's result, and count it."""
    attempts, transfer = request.attempts.values(), request.transfer
    chunks = [chunk for attempt in attempts for chunk in attempt.job.lane.chunks]
    routes = tuple([attempt.job.want.route for attempt in attempts if attempt.job.lane.chunks])
    seconds = core.clock() - transfer.started
    core.meter.ended["send", request.cause.value if request.cause else "landed"] += 1
    core.meter.took(Stage.SEND, seconds)
    result = Result(
        request.reason,
        seconds,
        request.given_bytes + sum([chunk.nbytes for chunk in chunks]),
        sum([attempt.job.lane.direct_runs for attempt in attempts]),
        len(chunks),
        routes,
        len(routes),
        request.quarantined,
        request.cause,
        spent_s=summed([attempt.job.spent_s for attempt in attempts]),
    )
    transfer.end(result)
    core.ended("send", transfer.request, result)


def check_aux(payload: bytes | None) -> None:
    """Raise PlanError for a payload of more than 64 KiB."""
    if payload is not None and len(payload) > wire.MAX_AUX_BYTES:
        raise PlanError(f"a payload of {len(payload)} bytes is over the limit of {wire.MAX_AUX_BYTES}")


def has_passed(gate: Gate) -> bool:
    """Returns True for a gate without an event, or with an event that has passed. Raises the event's exception."""
    return gate.event is None or gate.event.query()


def attempt_for(core: Core, request: Request, peer: Peer, want: wire.Want) -> SendAttempt:
    """Returns an attempt that serves `want`. Raises ValueError or ProtocolError for a Want that can't be met."""
    fleet, place = core.end.fleet, peer.card.place
    theirs = place.fleet
    most = _most_tokens(core, request)
    if most is not None and want.stop > most:  # checked before the plan is computed
        raise PlanError(f"page tables are too short for {want.stop} positions")
    if place.engine not in request.expected:
        relation = related(core.components, fleet, theirs, want.replicas)
        everyone = frozenset(range(theirs.size)) if core.end.rank in want.aux else frozenset[int]()
        request.expected[place.engine] = relation.destinations_of(core.end.rank) | everyone
    plans = plans_between(core.components, fleet, theirs, range(want.start, want.stop), want.replicas)
    lane = Lane.between(plans, core.end, peer.end, Cut(want.chunk_bytes, want.chunk_layers))
    lane.check_route(want.route)
    if want.digests:
        core.compiler.digested(peer.name)
    direct = want.route is not Route.PACKED
    target = None
    mapped = None
    if direct and want.verb is Verb.PUSH:
        target = list(decoded(want.pages))
        if want.route is Route.MAPPED:
            mapped = core.mappings.pools(peer, MapMode.WRITE)
            if mapped is None:
                raise PlanError(f"{core.transport.name} cannot map the pools of {peer.name}")
    chunks, now = len(lane.chunks), core.clock()
    if want.grant is not None and want.grant.chunk >= chunks:
        raise ProtocolError(f"granted chunk {want.grant.chunk} of {chunks}")
    state = Sending(
        want.request,
        want.generation,
        tuple([chunk.span_bytes for chunk in lane.chunks]),
        core.patience,
        now + request.deadline_s,
        direct,
        want.verb,
        room_bytes=0 if direct or want.verb is Verb.PULL else peer.card.arena.nbytes,
        term=want.lease.term,
        eager=None if direct else want.grant,
        quiet_since=now,
    )
    if state.is_read_from_pages:
        _check_staged(want, lane)
    return SendAttempt(state, Job(want, peer, lane, request.pages, target, mapped), tuple(range(chunks)))


def _most_tokens(core: Core, request: Request) -> int | None:
    """Returns a bound on the request's tokens: one page more than are named, or than the pool has while it grows.

    None without a bound: state components have no tokens, and pages before a growing window are not kept.
    """
    fleet, most = core.end.fleet, list[int]()
    for table, pool in zip(request.pages, core.end.pools, strict=True):
        component, grows = pool.component, request.gates is not None
        if not component.states and not (grows and component.window is not None):
            pages = pool.pages if grows else len(table)
            most.append((pages + 1) * fleet.page_rows(component) * component.row_tokens * fleet.cp)
    return min(most, default=None)


def _check_staged(want: wire.Want, lane: Lane) -> None:
    """Raise ProtocolError if this side's page tables can't fit one message, for a destination that reads from pages."""
    table_bytes = PAGE_ID_BYTES * sum(lane.source_reads)
    if table_bytes > wire.MAX_TABLE_BYTES:
        raise ProtocolError(f"page tables of {table_bytes} bytes are over the limit of {wire.MAX_TABLE_BYTES}")
