"""Asks: which pages of a prompt another engine holds, asked of each rank that a plan needs, answered by whoever knows.

An answer is a number of pages, and an offer: what is held may be received under the name that was asked by. Every rank
of a source answers for itself, so the least of them counts. Who is lost holds nothing. An offer that is not wanted is
given back to those that may have made it, not to those that hold nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from kvmover.errors import PlanError
from kvmover.layout.fleet import Fleet
from kvmover.transfer.core import Core, TimerKind
from kvmover.transfer.meter import Count
from kvmover.transfer.peers.table import Peer
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.chunks import related
from kvmover.transfer.protocol.handshake import Place

#: Answers a peer: how many of the prompt's first pages this rank holds and offers. Called in the thread that polls.
Holder = Callable[[Place, wire.Query], int]


class Asking(msgspec.Struct, frozen=True):
    """One question. `waits`: peers that have not answered; `pages`: what all others hold, None where that is nobody.

    `until`: when it is over. `again`: when it is said again to those. `offers`: who holds some of it.
    """

    waits: frozenset[str]
    until: float
    again: float
    pages: int | None = None
    offers: frozenset[str] = frozenset()

    @property
    def over(self) -> bool:
        """Whether nobody's answer matters any more."""
        return not self.waits or self.pages == 0

    @property
    def due(self) -> float:
        """Before this time there is nothing to do for it."""
        return min(self.until, self.again)


def heard(state: Asking, peer: str, pages: int) -> Asking:
    """A peer holds so many pages. What it says again, or who was not asked, changes nothing.

    >>> state = Asking(frozenset("ab"), until=1.0, again=0.5)
    >>> state = heard(heard(state, "a", 7), "b", 5)
    >>> state.pages, state.over
    (5, True)
    """
    if peer not in state.waits:
        return state
    least = pages if state.pages is None else min(state.pages, pages)
    offers = state.offers | {peer} if pages else state.offers
    return replace(state, waits=state.waits - {peer}, pages=least, offers=offers)


def ticked(state: Asking, now: float, resend_s: float) -> tuple[Asking, frozenset[str]]:
    """Time has passed: the state, and whom to ask again. Where somebody has not answered at the end, nobody counts."""
    if now >= state.until:
        return replace(state, waits=frozenset(), pages=None, offers=state.offers | state.waits), frozenset()
    if now >= state.again:
        return replace(state, again=now + resend_s), state.waits
    return state, frozenset()


@dataclass(slots=True, eq=False)
class _Question:
    """`ended` hears the number of pages, once."""

    ask: wire.Query
    state: Asking
    ended: Callable[[int | None], None]


@dataclass(slots=True, eq=False)
class Asks:
    """Of one mover. `holder` answers peers; without one this side holds nothing."""

    core: Core
    holder: Holder = lambda place, ask: 0
    _open: dict[str, _Question] = field(default_factory=dict[str, _Question])
    #: Who has offered, or may yet, by the name that was asked by: until it is given back or taken.
    _offers: dict[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])

    def fleet(self, engine: str) -> Fleet:
        """Of an engine any of whose ranks is connected. Raises PeerUnknown."""
        return self.core.peers.fleet(engine)

    def begin(
        self,
        request: str,
        engine: str,
        first: int,
        hashes: Sequence[bytes],
        within_s: float,
        ended: Callable[[int | None], None],
    ) -> None:
        """Ask every rank of `engine` that would send to this one. `ended` hears the least answer; None: too late.

        `hashes`: of the prompt's pages from number `first` on, of the page size of `engine`. Raises PeerUnknown where
        one of those ranks is not connected, and PlanError where `request` is being asked for.
        """
        core = self.core
        relation = related(core.components, self.fleet(engine), core.end.fleet, core.config.replicas)
        peers = frozenset(core.peers.at(engine, rank).name for rank in relation.sources_of(core.end.rank))
        if request in self._open:
            raise PlanError(f"{request} is being asked for already")
        now, most = core.clock(), wire.MAX_ASKED_BYTES // wire.PAGE_HASH_BYTES
        ask = wire.Query(request, b"".join(hashes[:most]), first)
        question = _Question(ask, Asking(peers, now + within_s, now + core.config.resend_s), ended)
        self._open[request] = question
        for name in peers:
            core.say(name, ask)
            core.awaits(name)
        self._settle(question)

    def decline(self, request: str) -> None:
        """What was offered as `request` is not wanted: it need not be kept. Who is gone has no offer."""
        for name in self._offers.pop(request, ()):
            if self.core.peers.get(name) is not None:
                self.core.say(name, wire.Query(request, b""))

    def take(self, request: str) -> None:
        """What was offered as `request` is received: that ends the offer."""
        self._offers.pop(request, None)

    def hear(self, peer: Peer, message: wire.Query | wire.Holding) -> None:
        """A question is answered at once, and an offer that is given back is not; an answer to none of ours is late."""
        if isinstance(message, wire.Query):
            pages = self.holder(peer.card.place, message)
            if message.hashes:
                self.core.say(peer.name, wire.Holding(message.request, pages))
            return
        question = self._open.get(message.request)
        if question is None or peer.name not in question.state.waits:
            self.core.meter.add(Count.LATE_MESSAGES)
            return
        # Nobody holds what was not asked for.
        most = question.ask.first + len(question.ask.hashes) // wire.PAGE_HASH_BYTES
        self._answered(question, peer.name, min(message.pages, most))

    def lost(self, name: str) -> None:
        """A peer is gone: it holds nothing."""
        for question in [each for each in self._open.values() if name in each.state.waits]:
            self._answered(question, name, 0)

    def tick(self, request: str) -> None:
        """A question's time has come."""
        question = self._open.get(request)
        if question is None:
            return
        before = question.state.waits
        question.state, again = ticked(question.state, self.core.clock(), self.core.config.resend_s)
        for name in again:
            self.core.meter.add(Count.RESENT_MESSAGES)
            self.core.say(name, question.ask)
        self._waits_no_more(before - question.state.waits)
        self._settle(question)

    def close(self) -> None:
        """Nothing is held by anybody."""
        for question in list(self._open.values()):
            self._waits_no_more(question.state.waits)
            self._end(question, None)
        self._offers.clear()

    def _answered(self, question: _Question, name: str, pages: int) -> None:
        question.state = heard(question.state, name, pages)
        self._waits_no_more(frozenset({name}))
        self._settle(question)

    def _waits_no_more(self, names: frozenset[str]) -> None:
        for name in names:
            self.core.awaits_no_more(name)

    def _settle(self, question: _Question) -> None:
        if question.state.over:
            self._waits_no_more(question.state.waits)
            self._end(question, question.state.pages)
        else:
            self.core.timers.set((TimerKind.ASK, question.ask.request), question.state.due)

    def _end(self, question: _Question, pages: int | None) -> None:
        self.core.timers.cancel((TimerKind.ASK, question.ask.request))
        del self._open[question.ask.request]
        offers = question.state.offers | question.state.waits
        if offers:
            self._offers[question.ask.request] = offers
        question.ended(pages)
