"""Runs the source's state machines of one rank: offers what is produced, and gives out what is granted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmover import ranges
from kvmover.errors import PlanError, ProtocolError
from kvmover.transfer.core import Core
from kvmover.transfer.events import Cancel, PeerGone, Tick
from kvmover.transfer.meter import Count, Gauge
from kvmover.transfer.peers.table import Peer
from kvmover.transfer.protocol import wire
from kvmover.transfer.result import Cause, Gate, Transfer
from kvmover.transfer.source import machine
from kvmover.transfer.source.attempts import Request, SendAttempt, attempt_for, cause_of, check_aux, close
from kvmover.transfer.source.early import EarlyWants
from kvmover.transfer.source.state import Attached, EndSend, Event, Post, Ready, Say, Unstage
from kvmover.transfer.source.writes import Job, OwnTables, Pages, Writes
from kvmover.transfer.tombstones import MEMORY_S, SERVED, Tombstones


@dataclass(slots=True, eq=False)
class SourceDriver:
    """The sending half of a mover."""

    core: Core
    writes: Writes
    _requests: dict[str, Request] = field(default_factory=dict[str, Request])
    _early: EarlyWants = field(default_factory=EarlyWants)
    _closed: Tombstones = field(default_factory=Tombstones)

    def send(self, transfer: Transfer, pages: Pages, gates: Sequence[Gate] | None, aux: bytes | None) -> None:
        """Offer a request. Destinations that asked already are served at once, the others when they ask.

        One that asked and was lost since ends the request, as it would have a moment later: nobody else asks for it.
        """
        if transfer.request in self._requests:
            raise PlanError(f"request {transfer.request} is already being sent")
        if len(pages) != len(self.core.pools):
            raise PlanError(f"{len(pages)} page tables for {len(self.core.pools)} components")
        check_aux(aux)
        deadline = self.core.clock() + self.core.config.deadline_s
        waiting = None if gates is None else list(gates)
        request = self._requests[transfer.request] = Request(transfer, list(pages), waiting, deadline, aux)
        loss = self._early.loss(transfer.request)
        self.reopen(transfer.request)
        if loss is not None:
            self._fail(request, loss, Cause.PEER_LOST)
        for early in self._early.take(transfer.request):
            for message in (early.want, *early.said):
                self.hear(early.peer, message)

    def produced(self, transfer: Transfer, gate: Gate, pages: Pages | None) -> None:
        """One more event to wait for, and more pages, of a request that was sent before all of it was computed."""
        request = self._open(transfer)
        if request is None or transfer.ended:
            return
        if request.gates is None:
            raise PlanError(f"request {transfer.request} was sent as if all of it were in its pages")
        if pages is not None:
            request.name(pages, self.core.pools)
        request.gates.append(gate)
        request.deadline = self.core.clock() + self.core.config.deadline_s
        for attempt in list(request.attempts.values()) if pages is not None else ():
            self._offer(request, attempt)  # of what a gate covers that had passed before

    def attach(self, transfer: Transfer, payload: bytes) -> None:
        """Hand over what goes beside the cache, once."""
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
        """A request that this rank will not send: who asks is told at once, and who has asked."""
        self._over_for_all(name, reason)
        for early in self._early.take(name):
            self.core.say(early.peer.name, wire.Abort(name, early.want.generation, reason))

    def reopen(self, name: str) -> None:
        """A request of this name is still to come, whatever became of one before: who asks for it waits."""
        self._closed.reopen(name)
        self._early.loss(name)

    def hear(self, peer: Peer, message: wire.About) -> None:
        """A message from a destination. Those of attempts that are over are answered with how they ended."""
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
        """An unknown attempt has nothing in flight. One that waits for `send` is withdrawn, or hears it then."""
        id_ = message.request, message.generation
        if isinstance(message, wire.Abort):
            self._early.withdraw(peer, message)
            self._close(message.request, peer.name, message.generation, message.reason)
            self.core.say(peer.name, wire.Drained(*id_))
            return
        if self._early.follow(peer, message):
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

    def _want(self, peer: Peer, want: wire.Want) -> None:
        if self._over(peer, want):
            return
        request = self._requests.get(want.request)
        if request is not None and self._forget(request):
            request = None
        if request is None:
            self._ask_early(peer, want)
            return
        if request.reason is not None:
            self.core.say(peer.name, wire.Abort(want.request, want.generation, request.reason))
            return
        before = request.attempts.get(peer.name)
        if before is not None and want.generation <= before.state.generation:
            if want.generation == before.state.generation:
                self._step(request, before, want)
            return
        if before is not None and (not before.state.finished or before.state.in_flight):
            self.core.say(peer.name, wire.Abort(want.request, want.generation, "an earlier attempt is still open"))
            return
        try:
            with ranges.span(ranges.PLAN, want.request):
                attempt = attempt_for(self.core, request, peer, want)
                self.writes.check(attempt.job)
                if request.gates is None:
                    attempt.job.check_source()
        except (ValueError, ProtocolError) as error:  # PlanError, LayoutError, or page tables that are none
            self.core.say(peer.name, wire.Abort(want.request, want.generation, str(error)))
            if isinstance(error, OwnTables):
                self._fail(request, str(error), Cause.PROTOCOL)
            return
        request.attempts[peer.name] = attempt
        self._offer(request, attempt)
        self._attach(request, attempt)

    def _over(self, peer: Peer, want: wire.Want) -> bool:
        """Whether a Want is of the past: its Abort overtook it, or it asks again for what has ended."""
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
        if not self._early.wait(peer, want, self.core.clock() + self.core.config.deadline_s):
            self.core.say(peer.name, wire.Abort(*id_, "too many requests wait to be sent"))

    def _offer(self, request: Request, attempt: SendAttempt) -> None:
        """Say which more chunks are in the pages."""
        try:
            ready = request.take_ready(attempt)
        except OwnTables as error:
            self._fail(request, str(error), Cause.PROTOCOL)
            return
        if ready:
            self._step(request, attempt, Ready(ready, attempt.tables()))

    def ended(self, job: Job, event: Event) -> None:
        """What the poster says becomes of a chunk."""
        request = self._requests[job.want.request]
        self._step(request, request.attempts[job.peer.name], event)

    def lost(self, peer: str, reason: str) -> None:
        """A destination is gone, with a read under way perhaps. The pages are free all the same: what a dead process
        reads is nobody's, and one that only seemed dead is never told Kept.
        """
        self._early.lost(peer, reason)
        for request in list(self._requests.values()):
            attempt = request.attempts.get(peer)
            if attempt is not None:
                self._step(request, attempt, PeerGone(peer, reason))

    def abort(self, transfer: Transfer, reason: str) -> None:
        request = self._open(transfer)
        if request is not None:
            self._fail(request, request.told(reason), Cause.ABORTED)

    def poll(self) -> None:
        """Gates that have passed, deadlines of what is open, and of wants that nobody offers."""
        now = self.core.clock()
        for request in list(self._requests.values()):
            produced = request.look()
            for attempt in list(request.attempts.values()):
                if produced:
                    self._offer(request, attempt)
                if now >= attempt.state.deadline and attempt.unnamed():
                    self._fail(request, request.told("deadline passed"), Cause.DEADLINE)
                self._step(request, attempt, Tick())
            if now >= request.deadline and not request.transfer.ended:
                missing = "was served" if request.all_asked else "asked"
                reason = request.told(f"deadline passed before every destination {missing}")
                self._fail(request, reason, Cause.DEADLINE)
            self._forget(request)
        self._early.expire(now)
        self._closed.expire(now)

    def close(self, reason: str) -> None:
        """Fail what is open and tell its destinations."""
        for request in list(self._requests.values()):
            self._fail(request, reason, Cause.ABORTED)

    def drop(self) -> None:
        """End what `close` could not: the transport is closed, so nothing reads the pages."""
        for request in self._requests.values():
            if not request.transfer.ended:
                self._end(request)
            request.transfer.held = False
        self._requests.clear()

    def gauges(self) -> dict[Gauge, int]:
        open_ = sum(not request.transfer.ended for request in self._requests.values())
        return {Gauge.OPEN_SENDS: open_, Gauge.EARLY_WANTS: len(self._early), **self.writes.gauges()}

    def waits_on(self) -> set[str]:
        """Peers that owe an answer, or are owed a request: page tables are kept for these, and soon pages."""
        return {*self._early.peers} | {
            name for r in self._requests.values() for name, a in r.attempts.items() if not a.state.finished
        }

    def _step(self, request: Request, attempt: SendAttempt, event: Event) -> None:
        attempt.state, actions = machine.step(attempt.state, event, self.core.clock())
        if __debug__ and attempt.state.finished:
            attempt.state.check()
        for action in actions:
            match action:
                case Say(message):
                    self.core.say(attempt.job.peer.name, message)
                case Post():
                    self.writes.post(attempt.job, action)
                case Unstage(chunk):
                    self.writes.unstage(attempt.job, chunk)
                case EndSend(_, held):
                    self.writes.forget(attempt.job)
                    request.held |= held
        if attempt.state.reason is not None:
            self._fail(request, attempt.state.reason, cause_of(event))
        self._settle(request)

    def _fail(self, request: Request, reason: str, cause: Cause) -> None:
        """Serve nobody any more: the engine takes the pages back when the transfer ends. The first reason stays."""
        if request.reason is None and not request.transfer.ended:
            request.reason, request.cause = reason, cause
            for attempt in list(request.attempts.values()):
                self.writes.forget(attempt.job)
                self._step(request, attempt, Cancel(reason))
            self._settle(request)

    def _settle(self, request: Request) -> None:
        """End a request that nobody is being served of, if it fails or every destination was."""
        if request.transfer.ended or any(not a.state.finished for a in request.attempts.values()):
            return
        if request.reason is not None or request.all_asked:
            self._end(request)

    def _end(self, request: Request) -> None:
        close(request, self.core)
        self._over_for_all(request.transfer.request, request.reason or SERVED)

    def _over_for_all(self, name: str, how: str) -> None:
        self._closed.end(name, how, max(self.core.clock() + MEMORY_S, self.core.remembered_until()))

    def _forget(self, request: Request) -> bool:
        """An ended request stays until all its attempts ended: late aborts must find out what is in flight."""
        over = all(a.state.finished and not a.state.in_flight for a in request.attempts.values())
        if request.transfer.ended and over:
            request.transfer.held = False
            for name, attempt in request.attempts.items():
                state = attempt.state
                self._close(state.request, name, state.generation, state.reason)
            del self._requests[request.transfer.request]
            return True
        return False
