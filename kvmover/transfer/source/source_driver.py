"""The driver of a rank's sending state machines: it offers produced chunks, and posts granted ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, starmap
from operator import methodcaller

from msgspec.structs import replace

from kvmover.errors import PlanError, ProtocolError, RefusedFor
from kvmover.transfer import nvtx_ranges as ranges
from kvmover.transfer.core import Core, TimerKind
from kvmover.transfer.events import Cancel, PeerGone, Tick
from kvmover.transfer.meter import Count, Gauge
from kvmover.transfer.peers.peer_table import Peer
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.chunk_sets import ChunkMap
from kvmover.transfer.protocol.content import Content
from kvmover.transfer.protocol.handshake import Place
from kvmover.transfer.protocol.wire import decoded
from kvmover.transfer.result import Cause, Gate, Passed, Service, Transfer
from kvmover.transfer.source import source_machine
from kvmover.transfer.source.source_attempts import (
    Request,
    SendAttempt,
    attempt_for,
    cause_of,
    check_aux,
    close,
    has_passed,
)
from kvmover.transfer.source.source_machine import Action, Attached, EndSend, Event, Post, Ready, Say, Unstage
from kvmover.transfer.source.writes import Job, OwnTables, Pages, Writes
from kvmover.transfer.tombstones import MEMORY_S, SERVED, Budget, Tombstones, TtlMap

#: Messages kept after one early Want; more are dropped, and the destination resends them.
MAX_MESSAGES = 16

#: Requests remembered for losing a waiting rank; the latest stay.
MAX_LOST = 65536


@dataclass(slots=True, eq=False)
class Early:
    """A destination's Want that came before its request was sent, with the messages after it, as bytes: decoded they
    take up to 20 times as much. `version`: (generation, pages named); the largest counts.
    """

    peer: Peer
    version: tuple[int, int]
    want: bytes
    deadline: float
    said: list[bytes] = field(default_factory=list[bytes])

    @property
    def generation(self) -> int:
        """The number of the destination's attempt."""
        return self.version[0]

    def messages(self) -> list[wire.AnyMessage]:
        """Returns the Want and the messages after it, decoded."""
        return [wire.decode(each) for each in (self.want, *self.said)]


@dataclass(slots=True)
class EarlyWants:
    """The newest Want of each (request, peer), and for requests that lost a waiting rank the reason, by engine.

    All bytes kept count against the peer's `budget`.
    """

    budget: Budget = field(default_factory=Budget)
    _early: dict[str, dict[str, Early]] = field(default_factory=dict[str, dict[str, Early]])
    _waiting: Counter[str] = field(default_factory=Counter[str])
    _lost: TtlMap[str, dict[str, str]] = field(default_factory=lambda: TtlMap[str, dict[str, str]](MAX_LOST))
    _wants: int = 0

    def wait(self, peer: Peer, want: wire.Want, deadline: float) -> bool:
        """Keep a Want until its request is sent. Returns False if the peer's budget is spent."""
        before = self._early.get(want.request, {}).get(peer.name)
        version = want.generation, sum(wire.lengths(want.pages))
        if before is not None and before.version >= version:
            if before.generation == want.generation:
                before.deadline = deadline
            return True
        early = Early(peer, version, wire.encode(want), deadline)
        if before is not None:
            self._give(before)
        if not self.budget.take(peer.name, len(early.want)):
            if before is not None:
                self._forget(want.request, peer.name)
            return False
        if before is None:
            self._wants += 1
            self._waiting[peer.name] += 1
        (self._lost.get(want.request) or {}).pop(peer.card.place.engine, None)
        self._early.setdefault(want.request, {})[peer.name] = early
        return True

    def follow(self, peer: Peer, message: wire.ToSource) -> bool:
        """Keep a message that follows a waiting Want. Returns False without such a Want."""
        early = self._early.get(message.request, {}).get(peer.name)
        if early is None or early.generation != message.generation:
            return False
        if len(early.said) < MAX_MESSAGES:
            said = wire.encode(message)
            if self.budget.take(peer.name, len(said)):
                early.said.append(said)
        return True

    def withdraw(self, peer: Peer, message: wire.About) -> bool:
        """Drop the Want of a destination that gave up. Returns False without one."""
        early = self._early.get(message.request, {}).get(peer.name)
        if early is None or early.generation != message.generation:
            return False
        self._drop(message.request, peer.name)
        return True

    def waiting(self, request: str) -> list[tuple[Place, range, Content | None]]:
        """Returns (rank, positions, prompt) of each Want that waits for a request."""
        waits = self._early.get(request, {}).values()
        wants = ((early.peer.card.place, wire.decode(early.want)) for early in waits)
        of = ((place, want) for place, want in wants if isinstance(want, wire.Want))
        return [(place, range(want.start, want.stop), want.content) for place, want in of]

    def take(self, request: str) -> list[Early]:
        """Remove and return all Wants for a request."""
        taken = list(self._early.get(request, {}).values())
        for early in taken:
            self._drop(request, early.peer.name)
        return taken

    @property
    def peers(self) -> Collection[str]:
        """The names of peers with waiting Wants."""
        return self._waiting.keys()

    def lost(self, peer: str, reason: str) -> list[str]:
        """Drop a peer's Wants. Returns their requests, which are remembered as long as the Wants would have been."""
        if peer not in self._waiting:
            return []
        dropped = [request for request, waiting in self._early.items() if peer in waiting]
        for request in dropped:
            early = self._early[request][peer]
            known = self._lost.get(request) or {}
            self._lost.keep(request, {**known, early.peer.card.place.engine: reason}, early.deadline)
            self._drop(request, peer)
        return dropped

    def loss(self, request: str) -> dict[str, str]:
        """Remove and return the reasons, by engine, why a rank that waited for a request was lost, unless the engine
        asked again.
        """
        lost = self._lost.get(request)
        if lost is None:
            return {}
        self._lost.forget(request)
        return lost

    def due(self, request: str, peer: str) -> float:
        """Returns when a peer's Want expires; math.inf without one."""
        early = self._early.get(request, {}).get(peer)
        return math.inf if early is None else early.deadline

    def drop_late(self, request: str, peer: str, now: float) -> bool:
        """Drop a Want that has expired. Returns True if it did."""
        late = now >= self.due(request, peer)
        if late:
            self._drop(request, peer)
        return late

    def expire(self, now: float) -> None:
        """Forget losses past their time."""
        self._lost.expire(now)

    def _drop(self, request: str, peer: str) -> None:
        self._give(self._early[request][peer])
        self._forget(request, peer)

    def _give(self, early: Early) -> None:
        for each in (early.want, *early.said):
            self.budget.give(early.peer.name, len(each))

    def _forget(self, request: str, peer: str) -> None:
        del self._early[request][peer]
        self._wants -= 1
        self._waiting[peer] -= 1
        if not self._waiting[peer]:
            del self._waiting[peer]
        if not self._early[request]:
            del self._early[request]

    def __len__(self) -> int:
        return self._wants


_HAS_PASSED = methodcaller("query")

#: Gates queried in one poll, some 100 ns each and more on a GPU; polls take turns if there are more.
MAX_GATES = 400


@dataclass(slots=True, eq=False)
class GateWatch:
    """The poller of gates. `ask_one` queries a single gate, and fails its request if that raises.

    `requests`: those that are watched, by name. `_events`: the events of `_gates`, all that are watched; None: to be
    listed anew.
    """

    ask_one: Callable[[Request, Gate], bool]
    requests: dict[str, Request] = field(default_factory=dict[str, Request])
    _gates: list[tuple[Request, Gate]] = field(default_factory=list["tuple[Request, Gate]"])
    _events: list[Passed] | None = None
    _next: int = 0

    def watch(self, request: Request) -> None:
        """Query the request's gates in every poll, as long as it has gates and attempts."""
        name = request.transfer.request
        if request.gates and request.attempts and not request.transfer.ended:
            self.requests[name] = request
        elif self.requests.pop(name, None) is None:
            return
        self._events = None

    def clear(self) -> None:
        """Watch no requests any more."""
        self.requests.clear()

    def passed(self) -> list[Request]:
        """Returns the requests of which a gate passed since it was last queried."""
        if self._events is None:
            self._gates = [(request, gate) for request in self.requests.values() for gate in request.gates or ()]
            self._events = [gate.event for _, gate in self._gates if gate.event is not None]
            assert len(self._events) == len(self._gates), "a gate without an event has passed when it is named"
        first = self._next if self._next < len(self._events) else 0
        asked = slice(first, first + MAX_GATES)
        self._next = asked.stop
        try:
            passed = list(map(_HAS_PASSED, self._events[asked]))
        except Exception:  # query one by one to find the event that raised
            passed = [self.ask_one(request, gate) for request, gate in self._gates[asked]]
        behind = dict[str, Request]()
        for request, gate in compress(self._gates[asked], passed):
            request.let(gate)
            behind[request.transfer.request] = request
        return list(behind.values())


#: Gates of a request without attempts that are kept unqueried; beyond that, passed ones are removed as more is
#: produced.
MOST_WAITING = 4


@dataclass(slots=True, eq=False)
class SourceDriver:
    """The sending half of a mover.

    `_gated` polls the gates of requests with attempts. `_over`: requests that ended since the last poll. `_asked`: the
    requests of which a destination has an attempt, by its name, with the attempt's generation.
    """

    core: Core
    writes: Writes
    _requests: dict[str, Request] = field(default_factory=dict[str, Request])
    early: EarlyWants = field(init=False)
    _closed: Tombstones = field(init=False)
    _gated: GateWatch = field(init=False)
    _over: dict[str, Request] = field(default_factory=dict[str, Request])
    _asked: dict[str, dict[str, int]] = field(default_factory=dict[str, "dict[str, int]"])

    def __post_init__(self) -> None:
        budget = Budget()
        self.early, self._closed = EarlyWants(budget), Tombstones(budget)
        self._gated = GateWatch(self._has_passed)

    def send(
        self,
        transfer: Transfer,
        pages: Pages,
        gates: Sequence[Gate] | None,
        aux: bytes | None,
        deadline_s: float,
        service: Service = Service.ONCE,
    ) -> None:
        """Offer a request. Early Wants are served at once, later ones as they come. Raises PlanError for a name being
        sent.

        An engine that lost a rank with an early Want is not served; the request ends if no other engine has asked.
        """
        if transfer.request in self._requests:
            raise PlanError(f"request {transfer.request} is already being sent")
        request = Request.sent(transfer, pages, gates, aux, deadline_s, service, self.core)
        self._requests[transfer.request] = request
        self.core.timers.set((TimerKind.REQUEST, transfer.request), request.deadline)
        self._closed.reopen(transfer.request)
        for engine, reason in self.early.loss(transfer.request).items():
            request.failed[engine], request.expected[engine] = (reason, Cause.PEER_LOST), frozenset()
        self._hear_early(transfer.request)
        self._settle(request)

    def _hear_early(self, name: str) -> None:
        """Handle all early Wants, then the messages that followed them, which may end the request."""
        taken = self._take_early(name)
        if not taken:
            return
        said = [(early.peer, message) for early in taken for message in early.messages()]
        for peer, message in sorted(said, key=lambda each: not isinstance(each[1], wire.Want)):
            assert isinstance(message, wire.About)
            self.hear(peer, message)

    def produced(self, transfer: Transfer, gate: Gate, pages: Pages | None, contents: Sequence[Content] = ()) -> None:
        """Add a gate, pages and contents to a request sent with gates. Ignored once the transfer has ended. Raises
        PlanError.
        """
        request = self._open(transfer)
        if request is None or transfer.ended:
            return
        if request.gates is None:
            raise PlanError(f"request {transfer.request} was sent as if all of it were in its pages")
        request.check_gate(gate)
        if pages is not None:
            request.name(pages, self.core.pools)
        request.name_contents(contents)
        request.add(gate)
        if gate.event is None:
            request.let(gate)
        elif len(request.gates) > MOST_WAITING and not request.attempts:
            self.core.contain(transfer.request, request.look)
        request.deadline = self.core.clock() + request.deadline_s
        self.core.timers.set((TimerKind.REQUEST, transfer.request), request.deadline)
        self._gated.watch(request)
        for attempt in list(request.attempts.values()) if pages is not None or gate.event is None else ():
            self._offer(request, attempt)  # offers chunks that a passed gate covers
        if contents:
            self._hear_early(transfer.request)

    def attach(self, transfer: Transfer, payload: bytes) -> None:
        """Set the payload beside the cache. Raises PlanError if it is set already, or too long."""
        check_aux(payload)
        request = self._open(transfer)
        if request is None:
            return
        if request.aux is not None:
            raise PlanError(f"request {transfer.request} has a payload of {len(request.aux)} bytes already")
        request.aux = payload
        for attempt in list(request.attempts.values()):
            self._attach(request, attempt)

    def _open(self, transfer: Transfer) -> Request | None:
        request = self._requests.get(transfer.request)
        return request if request is not None and request.transfer is transfer else None

    def _attach(self, request: Request, attempt: SendAttempt) -> None:
        if request.aux is not None and self.core.end.rank in attempt.job.want.aux:
            self._step(request, attempt, Attached(request.aux))

    def refuse(self, name: str, reason: str) -> None:
        """Refuse a request: early Wants and later ones are answered with Abort."""
        self._over_for_all(name, reason)
        for early in self._take_early(name):
            self.core.say(early.peer.name, wire.Abort(name, early.generation, reason))

    def reopen(self, name: str) -> None:
        """Let Wants of this name wait again, after an earlier request of this name ended or was refused."""
        self._closed.reopen(name)
        self.early.loss(name)

    def hear(self, peer: Peer, message: wire.About) -> None:
        """Handle a message of a destination. An ended attempt is answered with how it ended."""
        if isinstance(message, wire.Want):
            self._want(peer, message)
            return
        request = self._requests.get(message.request)
        attempt = request.attempts.get(peer.name) if request else None
        if request is None or attempt is None or attempt.state.generation != message.generation:
            self._unknown(peer, message)
            return
        if isinstance(message, wire.Granted | wire.Taken | wire.Done | wire.Abort):
            self._step(request, attempt, message)
        else:
            self.core.meter.add(Count.LATE_MESSAGES)

    def _unknown(self, peer: Peer, message: wire.About) -> None:
        """Handle a message about an unknown attempt, which has no write in flight. An early Want is withdrawn, or keeps
        the message.
        """
        id_ = message.request, message.generation
        if isinstance(message, wire.Abort):
            if self.early.withdraw(peer, message):
                self.core.awaits_no_more(peer.name)
            self._close(message.request, peer.name, message.generation, message.reason)
            self.core.say(peer.name, wire.Drained(*id_))
            return
        if isinstance(message, wire.ToSource) and self.early.follow(peer, message):
            return
        self.core.meter.add(Count.LATE_MESSAGES)
        outcome = self._closed.of(message.request, peer.name, message.generation)
        if outcome is None:
            return
        if outcome.reason is not None:
            self.core.say(peer.name, wire.Abort(*id_, outcome.reason))
        elif isinstance(message, wire.Done):
            self.core.say(peer.name, wire.Kept(*id_))

    def _close(self, request: str, peer: str, generation: int, reason: str | None) -> None:
        self._closed.close((request, peer), generation, reason, self.core.remembered_until())

    def _close_all(self, attempts: Mapping[str, SendAttempt]) -> None:
        for name, attempt in attempts.items():
            requests = self._asked[name]
            del requests[attempt.state.request]
            if not requests:
                del self._asked[name]
            self._close(attempt.state.request, name, attempt.state.generation, attempt.state.reason)

    def _want(self, peer: Peer, want: wire.Want) -> None:
        if self._past(peer, want):
            return
        if len(want.aux) > self.core.end.fleet.size:
            reason = f"payloads of {len(want.aux)} ranks of a fleet of {self.core.end.fleet.size}"
            self.core.say(peer.name, wire.Abort(want.request, want.generation, reason))
            return
        request = self._requests.get(want.request)
        if request is not None and request.transfer.ended and self._forget(request):
            request = None
        if request is None or request.is_behind(want.content):
            self._ask_early(peer, want)
            return
        fleet = peer.card.place.fleet
        beyond = fleet.page_tokens * fleet.cp - 1 if self.core.in_pages else 0
        unlike = request.disagrees(want, self.core.config.identity, beyond)
        if unlike is not None:  # the request goes on for other peers
            self.core.refused(peer.name, RefusedFor.IDENTITY, f"{want.request}: {unlike}")
            self.core.say(peer.name, wire.Abort(want.request, want.generation, unlike))
            return
        before = request.attempts.get(peer.name)
        if before is not None and request.asks_anew(before, want):
            self._step(request, before, before.job.want)  # its end was lost: told again, the peer resends it
            return
        over = request.over_for(peer, want)
        if over is not None:
            self.core.say(peer.name, wire.Abort(want.request, want.generation, over))
            return
        if before is not None and want.generation <= before.state.generation:
            if want.generation == before.state.generation:
                self._asked_again(request, before, want)
            return
        try:
            with ranges.span(ranges.PLAN, want.request):
                attempt = attempt_for(self.core, request, peer, want)
                self.writes.check(attempt.job)
                if request.gates is None:
                    attempt.job.check_source()
        except (ValueError, ProtocolError) as error:  # PlanError, LayoutError, or malformed page tables
            self.core.say(peer.name, wire.Abort(want.request, want.generation, str(error)))
            self._turn_away(request, peer.card.place.engine, error)
            return
        unasked = request.gates and not request.attempts
        wrong = self.core.contain(want.request, request.look) if unasked else None
        if wrong is not None:
            self._fail(request, wrong, Cause.FAULT)
            self.core.say(peer.name, wire.Abort(want.request, want.generation, wrong))
            return
        request.attempts[peer.name] = attempt
        self._asked.setdefault(peer.name, {})[want.request] = want.generation
        self.core.awaits(peer.name)
        self._gated.watch(request)
        if not self._offer(request, attempt):
            self._step(request, attempt, want)  # sends Noted
        self._attach(request, attempt)

    def _turn_away(self, request: Request, engine: str, error: Exception) -> None:
        """Fail an engine whose Want can't be met; other engines go on. An engine whose first Want fails may ask again,
        unless this side's page tables are at fault.
        """
        if isinstance(error, OwnTables) or request.of(engine):
            self._part(request, engine, str(error), Cause.PROTOCOL)
            self.core.later.append(lambda: self._settle(request))  # once all Wants so far are handled
        else:
            request.expected.pop(engine, None)

    def _asked_again(self, request: Request, attempt: SendAttempt, want: wire.Want) -> None:
        """Handle a resent Want: it names more pages, or asks to repeat the last answer."""
        if attempt.job.target is not None and attempt.state.reason is None:
            try:
                attempt.job.name_target(decoded(want.pages))
            except ValueError as error:
                self._step(request, attempt, Cancel(f"page tables of {attempt.job.peer.name}: {error}"))
                return
            if self._offer(request, attempt):
                return
        self._step(request, attempt, want)

    def _past(self, peer: Peer, want: wire.Want) -> bool:
        """Answer a Want of an attempt that has ended, perhaps by an Abort that overtook it. Returns True if it had."""
        outcome = self._closed.of(want.request, peer.name, want.generation)
        if outcome is not None and outcome.reason is not None:
            self.core.say(peer.name, wire.Abort(want.request, want.generation, outcome.reason))
        return outcome is not None

    def _ask_early(self, peer: Peer, want: wire.Want) -> None:
        id_ = want.request, want.generation
        ending = self._closed.ending(want.request)
        if ending is not None:
            self.core.say(peer.name, wire.Abort(*id_, ending))
            return
        key, keeps_s, known = (want.request, peer.name), self.core.config.deadline_s, len(self.early)
        if not self.early.wait(peer, want, self.core.clock() + keeps_s):
            full = "too many requests wait to be sent"
            self.core.refused(peer.name, RefusedFor.CAPACITY, f"{want.request}: {full}")
            self.core.say(peer.name, wire.Abort(*id_, full))
            return
        if len(self.early) > known:
            self.core.awaits(peer.name)
        self.core.timers.set((TimerKind.EARLY, key), self.early.due(*key))
        self.core.say(peer.name, wire.Noted(*id_, int(keeps_s * 1e3), wire.lengths(want.pages)))

    def _take_early(self, request: str) -> list[Early]:
        taken = self.early.take(request)
        for early in taken:
            self.core.timers.cancel((TimerKind.EARLY, (request, early.peer.name)))
            self.core.awaits_no_more(early.peer.name)
        return taken

    def drop_early(self, key: tuple[str, str]) -> None:
        """Drop an early Want whose request was not sent in time."""
        if self.early.drop_late(*key, self.core.clock()):
            self.core.awaits_no_more(key[1])

    def _has_passed(self, request: Request, gate: Gate) -> bool:
        """Query one gate. An exception fails its request only."""
        found: list[bool] = []
        wrong = self.core.contain(request.transfer.request, lambda: found.append(has_passed(gate)))
        if wrong is not None:
            self._fail(request, wrong, Cause.FAULT)
        return any(found)

    def _offer(self, request: Request, attempt: SendAttempt) -> bool:
        """Offer chunks that are newly in the pages. Returns False without such chunks."""
        try:
            ready = request.take_ready(attempt)
        except OwnTables as error:
            self._part(request, attempt.engine, str(error), Cause.PROTOCOL)
            self._settle(request)
            return False
        if ready:
            if not attempt.waiting:
                self.core.expect(attempt.job.peer.card.host, attempt.job.want.route, attempt.job.lane)
            self._step(request, attempt, Ready(ready, attempt.tables()))
        return bool(ready)

    def _look(self) -> None:
        """Offer chunks of gates that passed since the last poll."""
        for request in self._gated.passed():
            for attempt in list(request.attempts.values()):
                self._offer(request, attempt)
            self._gated.watch(request)

    def ended(self, job: Job, event: Event) -> None:
        """Apply an event of `Writes` to the attempt of `job`."""
        request = self._requests[job.want.request]
        self._step(request, request.attempts[job.peer.name], event)

    def lost(self, peer: str, reason: str) -> None:
        """Fail a lost destination's attempts. Pages it may be reading are freed: if it lives after all, it gets no
        Kept.
        """
        for request in self.early.lost(peer, reason):
            self.core.timers.cancel((TimerKind.EARLY, (request, peer)))
            self.core.awaits_no_more(peer)
        self.writes.lost(peer)
        asked = tuple(self._asked.get(peer, {}).items())
        self.core.losses.append(starmap(partial(self._tell_loss, PeerGone(peer, reason)), asked))

    def _tell_loss(self, loss: PeerGone, name: str, generation: int) -> None:
        request = self._requests.get(name)
        attempt = request.attempts.get(loss.peer) if request is not None else None
        if request is not None and attempt is not None and attempt.state.generation == generation:
            self._step(request, attempt, loss)

    def abort(self, transfer: Transfer, reason: str) -> None:
        """End a transfer for `reason`, and send it to each destination."""
        request = self._open(transfer)
        if request is not None:
            self._fail(request, request.told(reason), Cause.ABORTED)

    def poll(self) -> None:
        """Offer chunks of passed gates, and forget ended requests."""
        if self._gated.requests:
            self._look()
        while self._over:
            self._forget(self._over.popitem()[1])

    def tick(self, key: tuple[str, str]) -> None:
        """Run an attempt's timer: its deadline, or a resend."""
        name, peer = key
        request = self._requests.get(name)
        attempt = request.attempts.get(peer) if request is not None else None
        if request is not None and attempt is not None:
            if self.core.clock() >= attempt.state.deadline and attempt.unnamed():
                self._fail(request, request.told("deadline passed"), Cause.DEADLINE)
            self._step(request, attempt, Tick())

    def end_of_time(self, name: str) -> None:
        """Fail a request whose deadline has passed."""
        request = self._requests.get(name)
        if request is not None and not request.transfer.ended:
            self._fail(request, request.too_late(), Cause.DEADLINE)

    def expire(self, now: float) -> None:
        """Forget losses and tombstones past their time."""
        self.early.expire(now)
        self._closed.expire(now)

    def close(self, reason: str) -> None:
        """Fail all open requests for `reason`, and tell their destinations."""
        for request in list(self._requests.values()):
            self._fail(request, reason, Cause.ABORTED)

    def go_on_from(self, before: SourceDriver) -> None:
        """Take over the tombstones of the driver `before`, so that later Wants still learn how its requests ended."""
        self._closed.go_on_from(before._closed)

    def drop(self) -> None:
        """Forget all requests after `close`, once the transport is closed: no page can be read any more, so none is
        quarantined. Requests still open end with the reason that `close` gave.
        """
        for request in self._requests.values():
            if not request.transfer.ended:
                self._end(request)
            request.transfer.quarantined = False
            for attempt in request.attempts.values():
                if not attempt.state.finished:
                    self.core.awaits_no_more(attempt.job.peer.name)
        self._requests.clear()
        self._asked.clear()
        self._gated.clear()

    def gauges(self) -> dict[Gauge, int]:
        """Returns current counts, for exporters."""
        open_ = sum(not request.transfer.ended for request in self._requests.values())
        return {Gauge.OPEN_SENDS: open_, Gauge.EARLY_WANTS: len(self.early), **self.writes.gauges()}

    def _step(self, request: Request, attempt: SendAttempt, event: Event) -> None:
        """Advance an attempt. An exception ends this attempt only."""
        try:
            self._advance(request, attempt, event)
        except Exception as error:
            self._fault(request, attempt, self.core.fault(attempt.state.request, error))

    def _advance(self, request: Request, attempt: SendAttempt, event: Event) -> None:
        finished = attempt.state.finished
        attempt.state, actions = source_machine.step(attempt.state, event, self.core.clock())
        self._schedule(request, attempt)
        if attempt.state.finished and not finished:
            self.core.awaits_no_more(attempt.job.peer.name)
        if __debug__ and attempt.state.finished:
            attempt.state.check()
        for action in actions:  # each action runs, even if another fails
            try:
                self._act(request, attempt, action)
            except Exception as error:
                self._fault(request, attempt, self.core.fault(attempt.state.request, error))
        if attempt.state.reason is not None:
            self._part(request, attempt.engine, attempt.state.reason, cause_of(event))
        if attempt.state.finished:  # a request ends and is forgotten after all its attempts
            self._settle(request)

    def _act(self, request: Request, attempt: SendAttempt, action: Action) -> None:
        match action:
            case Say(wire.Offered() as offer):
                self.core.say(attempt.job.peer.name, self.writes.registrations.stamped(attempt.job.peer.name, offer))
            case Say(wire.Noted() as noted):
                self.core.say(attempt.job.peer.name, replace(noted, named=attempt.job.named))
            case Say(message):
                self.core.say(attempt.job.peer.name, message)
            case Post():
                self.writes.post(attempt.job, action)
            case Unstage(chunk):
                self.writes.unstage(attempt.job, chunk)
            case EndSend(_, quarantined):
                self.writes.forget(attempt.job)
                request.quarantined |= quarantined

    def _fault(self, request: Request, attempt: SendAttempt, reason: str) -> None:
        """End an attempt after an exception. Its writes in flight are followed to their end."""
        state = attempt.state
        attempt.state = replace(
            state, reason=state.reason or reason, staged=ChunkMap[int](), peer_waits=False, finished=True
        )
        self._schedule(request, attempt)
        if not state.finished:
            self.core.awaits_no_more(attempt.job.peer.name)
        self.writes.drop(attempt.job)
        request.quarantined |= bool(state.in_flight)
        self.core.say(attempt.job.peer.name, wire.Abort(state.request, state.generation, reason))
        self._part(request, attempt.engine, reason, Cause.FAULT)
        self._settle(request)

    def _schedule(self, request: Request, attempt: SendAttempt) -> None:
        key = request.transfer.request, attempt.job.peer.name
        self.core.timers.set((TimerKind.SEND, key), source_machine.due(attempt.state))

    def _fail(self, request: Request, reason: str, cause: Cause) -> None:
        """Fail a request for all engines; its transfer ends when its attempts have. The first reason stays."""
        if request.reason is None and not request.transfer.ended:
            request.reason, request.cause = reason, cause
            for attempt in list(request.attempts.values()):
                self.writes.forget(attempt.job)
                self._step(request, attempt, Cancel(reason))
            self._settle(request)

    def _part(self, request: Request, engine: str, reason: str, cause: Cause) -> None:
        """Fail all ranks of an engine, and no other engine. The first reason stays."""
        if request.reason is None and engine not in request.failed and not request.transfer.ended:
            request.failed[engine] = reason, cause
            for each in request.of(engine):
                self.writes.forget(each.job)
                self._step(request, each, Cancel(reason))

    def _settle(self, request: Request) -> None:
        """End a request whose attempts have finished, if it failed or each engine that asked was served or failed.

        It has landed if one of them was served.
        """
        if request.transfer.ended:
            self._over[request.transfer.request] = request
            return
        if [a for a in request.attempts.values() if not a.state.finished]:
            return
        if request.service is Service.REPEATED and request.reason is None:
            self._part_from_served(request)
            return
        all_asked = request.all_asked
        if request.reason is None and all_asked and request.expected.keys() <= request.failed.keys():
            request.reason, request.cause = next(iter(request.failed.values()))
        if request.reason is not None or all_asked:
            self._end(request)

    def _part_from_served(self, request: Request) -> None:
        """Remove served engines, so that they may ask again."""
        self._close_all(request.part())
        self._gated.watch(request)
        if request.released:
            self._end(request)

    def _end(self, request: Request) -> None:
        close(request, self.core)
        self._over[request.transfer.request] = request
        self._gated.watch(request)
        self.core.timers.cancel((TimerKind.REQUEST, request.transfer.request))
        self._over_for_all(request.transfer.request, request.reason or SERVED)
        self._hear_early(request.transfer.request)  # Wants that wait for it to grow

    def _over_for_all(self, name: str, how: str) -> None:
        self._closed.end(name, how, max(self.core.clock() + MEMORY_S, self.core.remembered_until()))

    def _forget(self, request: Request) -> bool:
        """Forget an ended request once all its attempts ended: a late Abort needs to know the writes in flight."""
        if request.is_over and self._requests.get(request.transfer.request) is request:
            request.transfer.quarantined = False
            self._close_all(request.attempts)
            del self._requests[request.transfer.request]
            return True
        return False
