"""Outbound: runs the sender's state machines of one rank, gathering chunks and writing them where they were granted."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from kvmover import ranges
from kvmover.errors import PlanError
from kvmover.plan.cost import Route
from kvmover.transfer import sender, wire
from kvmover.transfer.core import Core
from kvmover.transfer.lane import Lane, plans_between
from kvmover.transfer.peers import Peer
from kvmover.transfer.posts import Job, Pages, Poster
from kvmover.transfer.result import Result, Transfer

if TYPE_CHECKING:
    import torch

#: Wants that came before the engine called `send`, and messages that followed one of them. What comes on top is refused
#: or dropped, so that a peer cannot fill the memory.
MAX_EARLY_WANTS = 65536

#: Attempts that are remembered as over, the latest ones: a minute of a thousand requests a second.
MAX_CLOSED = 65536
MAX_EARLY_MESSAGES = 65536


@dataclass(slots=True, eq=False)
class _Attempt:
    """One destination's attempt at a request."""

    state: sender.Sending
    job: Job


@dataclass(slots=True, eq=False)
class _Request:
    """A request that this rank offers. `expected`: destination ranks that will ask, known from the first that does.

    `reason`: why it is failing; its transfer ends when no destination is being served any more.
    """

    transfer: Transfer
    pages: Pages
    after: torch.cuda.Event | None
    deadline: float
    expected: frozenset[int] | None = None
    attempts: dict[str, _Attempt] = field(default_factory=dict[str, _Attempt])
    reason: str | None = None
    held: bool = False

    @property
    def all_asked(self) -> bool:
        asked = {attempt.job.peer.card.place.rank for attempt in self.attempts.values()}
        return self.expected is not None and self.expected <= asked


@dataclass(slots=True, eq=False)
class _Early:
    """A destination that asked before the engine called `send`, and what it said about it since: grants, or Done."""

    peer: Peer
    want: wire.Want
    deadline: float
    said: list[wire.About] = field(default_factory=list[wire.About])


@dataclass(slots=True, eq=False)
class Outbound:
    """The sending half of a mover."""

    core: Core
    poster: Poster
    _requests: dict[str, _Request] = field(default_factory=dict[str, _Request])
    _early: dict[tuple[str, str], _Early] = field(default_factory=dict["tuple[str, str]", _Early])
    _closed: dict[tuple[str, str], tuple[int, float]] = field(
        default_factory=dict["tuple[str, str]", "tuple[int, float]"]
    )
    ignored: int = 0

    def send(self, transfer: Transfer, pages: Pages, after: torch.cuda.Event | None) -> None:
        """Offer a request. Destinations that asked already are served at once, the others when they ask."""
        if transfer.request in self._requests:
            raise PlanError(f"request {transfer.request} is already being sent")
        if len(pages) != len(self.core.pools):
            raise PlanError(f"{len(pages)} page tables for {len(self.core.pools)} components")
        deadline = self.core.clock() + self.core.config.deadline_s
        self._requests[transfer.request] = _Request(transfer, pages, after, deadline)
        for key in [key for key in self._early if key[0] == transfer.request]:
            early = self._early.pop(key)
            for message in (early.want, *early.said):
                self.hear(early.peer, message)

    def hear(self, peer: Peer, message: wire.About) -> None:
        """A message from a destination. Those of attempts that are over are answered as far as they need one."""
        if isinstance(message, wire.Want):
            self._want(peer, message)
            return
        request = self._requests.get(message.request)
        attempt = request.attempts.get(peer.name) if request else None
        if request is None or attempt is None or attempt.state.generation != message.generation:
            self._unknown(peer, message)
            return
        match message:
            case wire.Granted(grants=grants):
                for grant in grants:
                    self._granted(request, attempt, grant)
            case wire.Done():
                self._step(request, attempt, sender.PeerDone())
            case wire.Abort(reason=reason):
                self._step(request, attempt, sender.PeerAborted(reason))
            case _:
                self.ignored += 1

    def _unknown(self, peer: Peer, message: wire.About) -> None:
        """An unknown attempt has nothing in flight. One that waits for `send` is withdrawn, or hears it then."""
        early = self._early.get((message.request, peer.name))
        waits = early is not None and early.want.generation == message.generation
        if isinstance(message, wire.Abort):
            if waits:
                del self._early[message.request, peer.name]
            self._close(message.request, peer.name, message.generation)
            self.core.say(peer.name, wire.Drained(message.request, message.generation))
        elif early is not None and waits and len(early.said) < MAX_EARLY_MESSAGES:
            early.said.append(message)
        else:
            self.ignored += 1

    def _close(self, request: str, peer: str, generation: int) -> None:
        """Remember that a destination was told that nothing of an attempt will come any more.

        A Want that its Abort overtook, or that is repeated, must not open it again: its pages are given back.
        """
        config = self.core.config
        if len(self._closed) >= MAX_CLOSED:
            del self._closed[next(iter(self._closed))]
        self._closed[request, peer] = (generation, self.core.clock() + config.deadline_s + config.drain_s)

    def _want(self, peer: Peer, want: wire.Want) -> None:
        if want.generation <= self._closed.get((want.request, peer.name), (-1, 0.0))[0]:
            self.ignored += 1
            return
        request = self._requests.get(want.request)
        if request is not None and self._forget(request):
            request = None
        if request is None:
            if len(self._early) >= MAX_EARLY_WANTS:
                self.core.say(peer.name, wire.Abort(want.request, want.generation, "too many requests wait to be sent"))
                return
            deadline = self.core.clock() + self.core.config.deadline_s
            self._early[want.request, peer.name] = _Early(peer, want, deadline)
            return
        if request.reason is not None:
            self.core.say(peer.name, wire.Abort(want.request, want.generation, request.reason))
            return
        before = request.attempts.get(peer.name)
        if before is not None and want.generation <= before.state.generation:
            self.ignored += 1
            return
        if before is not None and (not before.state.finished or before.state.in_flight):
            self.core.say(peer.name, wire.Abort(want.request, want.generation, "an earlier attempt is still open"))
            return
        try:
            with ranges.span(ranges.PLAN, want.request):
                attempt = self._attempt(request, peer, want)
        except ValueError as error:  # PlanError, LayoutError, or page tables that are no int32
            self.core.say(peer.name, wire.Abort(want.request, want.generation, str(error)))
            return
        request.attempts[peer.name] = attempt
        if want.route is Route.PACKED:
            self.core.say(peer.name, wire.Offered(want.request, want.generation))
            return
        for chunk in range(attempt.state.chunks):
            self._step(request, attempt, sender.Granted(chunk, 0))

    def _attempt(self, request: _Request, peer: Peer, want: wire.Want) -> _Attempt:
        """Derive what the destination derived. Raises ValueError on a want that cannot be met."""
        core, now = self.core, self.core.clock()
        fleet = core.end.fleet
        limit = (min(len(table) for table in request.pages) + 1) * fleet.page_tokens * fleet.cp
        if want.stop > limit:  # before anything of that size is computed
            raise PlanError(f"page tables are too short for {want.stop} positions")
        span = range(want.start, want.stop) if want.start < want.stop else range(want.start, want.start + 1)
        plans = plans_between(core.end.pools, fleet, peer.card.place.fleet, span, want.replicas)
        if request.expected is None:
            ranks = {rank for plan in plans for rank in plan.destinations_of(core.end.rank)}
            request.expected = frozenset(ranks)
        lane = Lane.between(plans, core.end, peer.end, want.chunk_bytes)
        if want.start >= want.stop:
            lane = replace(lane, legs=(None,) * len(plans), chunks=())
        pages = tuple(np.frombuffer(table, "<i4").astype(np.int64) for table in want.pages)
        direct = want.route is Route.DIRECT
        job = Job(want.request, want.generation, peer, lane, request.pages, pages if direct else None, request.after)
        self.poster.check(job)
        state = sender.Sending(
            want.request, want.generation, len(lane.chunks), now + core.config.deadline_s, core.config.drain_s
        )
        return _Attempt(state, job)

    def _granted(self, request: _Request, attempt: _Attempt, grant: wire.Grant) -> None:
        """A region outside the peer's arena would be refused by the transport; say so before packing for it."""
        if 0 <= grant.chunk < len(attempt.job.lane.chunks):
            stop = grant.offset + attempt.job.lane.chunks[grant.chunk].span_bytes
            if grant.offset < 0 or stop > attempt.job.peer.card.arena.nbytes:
                reason = f"grant at {grant.offset} leaves the arena of {attempt.job.peer.card.arena.nbytes} bytes"
                self._step(request, attempt, sender.Cancel(reason))
                return
        self._step(request, attempt, sender.Granted(grant.chunk, grant.offset))

    def ended(self, job: Job, event: sender.Event) -> None:
        """What the poster says became of a chunk."""
        request = self._requests[job.request]
        self._step(request, request.attempts[job.peer.name], event)

    def lost(self, peer: str, reason: str) -> None:
        for key in [key for key in self._early if key[1] == peer]:
            del self._early[key]
        for request in list(self._requests.values()):
            attempt = request.attempts.get(peer)
            if attempt is not None:
                self._step(request, attempt, sender.PeerGone(reason))

    def abort(self, transfer: Transfer, reason: str) -> None:
        request = self._requests.get(transfer.request)
        if request is not None and request.transfer is transfer:
            self._fail(request, reason)

    def poll(self) -> None:
        """Deadlines of what is open, and of wants that nobody offers."""
        now = self.core.clock()
        for request in list(self._requests.values()):
            for attempt in list(request.attempts.values()):
                self._step(request, attempt, sender.Tick())
            if now >= request.deadline and not request.transfer.ended:
                missing = "was served" if request.all_asked else "asked"
                self._fail(request, f"deadline passed before every destination {missing}")
            self._forget(request)
        for key in [key for key, early in self._early.items() if now >= early.deadline]:
            del self._early[key]
        for key in [key for key, (_, until) in self._closed.items() if now >= until]:
            del self._closed[key]

    def close(self, reason: str) -> None:
        """Fail what is open and tell its destinations."""
        for request in list(self._requests.values()):
            self._fail(request, reason)

    def drop(self) -> None:
        """End what `close` could not: the transport is closed, so nothing reads the pages."""
        for request in self._requests.values():
            if not request.transfer.ended:
                self._end(request)
        self._requests.clear()

    def waits_on(self) -> set[str]:
        return {name for r in self._requests.values() for name, a in r.attempts.items() if not a.state.finished}

    def _step(self, request: _Request, attempt: _Attempt, event: sender.Event) -> None:
        attempt.state, actions = sender.step(attempt.state, event, self.core.clock())
        for action in actions:
            match action:
                case sender.Say(message):
                    self.core.say(attempt.job.peer.name, message)
                case sender.Post(chunk, offset):
                    self.poster.post(attempt.job, chunk, offset)
                case sender.Finish(_, held):
                    self.poster.forget(attempt.job)
                    request.held |= held
        if attempt.state.reason is not None:
            self._fail(request, attempt.state.reason)
        self._settle(request)

    def _fail(self, request: _Request, reason: str) -> None:
        """Serve nobody any more: the engine takes the pages back when the transfer ends. The first reason stays."""
        if request.reason is None and not request.transfer.ended:
            request.reason = reason
            for attempt in list(request.attempts.values()):
                self.poster.forget(attempt.job)
                self._step(request, attempt, sender.Cancel(reason))
            self._settle(request)

    def _settle(self, request: _Request) -> None:
        """End a request that nobody is being served of, if it fails or every destination was."""
        if request.transfer.ended or any(not a.state.finished for a in request.attempts.values()):
            return
        if request.reason is not None or request.all_asked:
            self._end(request)

    def _end(self, request: _Request) -> None:
        attempts = request.attempts.values()
        chunks = [chunk for a in attempts for chunk in a.job.lane.chunks]
        request.transfer.result = Result(
            request.reason,
            self.core.clock() - request.transfer.started,
            sum(chunk.nbytes for chunk in chunks),
            sum(a.job.lane.direct_runs() for a in attempts),
            len(chunks),
            tuple(Route.PACKED if a.job.target is None else Route.DIRECT for a in attempts if a.job.lane.chunks),
            sum(bool(a.job.lane.chunks) for a in attempts),
            request.held,
        )

    def _forget(self, request: _Request) -> bool:
        """An ended request stays until all its attempts ended: late aborts must find out what is in flight."""
        over = all(a.state.finished and not a.state.in_flight for a in request.attempts.values())
        if request.transfer.ended and over:
            for name, attempt in request.attempts.items():
                self._close(request.transfer.request, name, attempt.state.generation)
            del self._requests[request.transfer.request]
            return True
        return False
