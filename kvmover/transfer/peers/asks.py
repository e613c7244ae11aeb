"""The remote lookup of pages: each source rank of an engine is asked how many leading pages of a prompt it holds.

An answer is a number of pages and an offer: these pages may be received under the lookup's name. Each source rank
answers for itself, and the least answer counts. A lost peer holds no pages. An offer that isn't used is returned to all
peers that may have made it.
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
from kvmover.transfer.peers.peer_table import Peer
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.chunks import related
from kvmover.transfer.protocol.handshake import Place

#: Returns how many of the prompt's first pages this rank holds and offers to a peer. Called in the polling thread.
Holder = Callable[[Place, wire.Query], int]


class Asking(msgspec.Struct, frozen=True):
    """The state of one lookup. `waits`: peers that have not answered; `pages`: the least answer so far, None before the
    first.

    `until`: its end. `again`: when it is resent to `waits`. `offers`: peers that hold some of the pages.
    """

    waits: frozenset[str]
    until: float
    again: float
    pages: int | None = None
    offers: frozenset[str] = frozenset()

    @property
    def over(self) -> bool:
        """True if no answer can change the result any more."""
        return not self.waits or self.pages == 0

    @property
    def due(self) -> float:
        """The next time at which it has to be advanced."""
        return min(self.until, self.again)


def heard(state: Asking, peer: str, pages: int) -> Asking:
    """Returns the state after a peer's answer. Repeated answers, and those of other peers, are ignored.

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
    """Returns the state at `now`, and the peers to ask again. The result is None if one has not answered in time."""
    if now >= state.until:
        return replace(state, waits=frozenset(), pages=None, offers=state.offers | state.waits), frozenset()
    if now >= state.again:
        return replace(state, again=now + resend_s), state.waits
    return state, frozenset()


@dataclass(slots=True, eq=False)
class _Question:
    """A lookup under way. `ended` is called once with the number of pages."""

    ask: wire.Query
    state: Asking
    ended: Callable[[int | None], None]


@dataclass(slots=True, eq=False)
class Asks:
    """The lookups of one mover. `holder` answers peers; by default this side holds no pages."""

    core: Core
    holder: Holder = lambda place, ask: 0
    _open: dict[str, _Question] = field(default_factory=dict[str, _Question])
    #: Peers that have offered or still may, by lookup name, until the offer is returned or taken.
    _offers: dict[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])

    def fleet(self, engine: str) -> Fleet:
        """Returns the fleet of an engine with a connected rank. Raises PeerUnknown."""
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
        """Ask each rank of `engine` that would send to this one. `ended` is called with the least answer; None: too
        late.

        `hashes`: of the prompt's pages from number `first` on, of the page size of `engine`. Raises PeerUnknown if one
        of these ranks is not connected, and PlanError while `request` is being asked for.
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
        """Return the offer of `request` to the connected peers that made it: they may release the pages."""
        for name in self._offers.pop(request, ()):
            if self.core.peers.get(name) is not None:
                self.core.say(name, wire.Query(request, b""))

    def take(self, request: str) -> None:
        """Forget the offer of `request`, which is being received."""
        self._offers.pop(request, None)

    def hear(self, peer: Peer, message: wire.Query | wire.Holding) -> None:
        """Answer a Query, unless it returns an offer, or count a Holding. A Holding of another lookup is late."""
        if isinstance(message, wire.Query):
            pages = self.holder(peer.card.place, message)
            if message.hashes:
                self.core.say(peer.name, wire.Holding(message.request, pages))
            return
        question = self._open.get(message.request)
        if question is None or peer.name not in question.state.waits:
            self.core.meter.add(Count.LATE_MESSAGES)
            return
        # An answer counts only up to the pages asked for.
        most = question.ask.first + len(question.ask.hashes) // wire.PAGE_HASH_BYTES
        self._answered(question, peer.name, min(message.pages, most))

    def lost(self, name: str) -> None:
        """Take a lost peer's answer as 0 pages."""
        for question in [each for each in self._open.values() if name in each.state.waits]:
            self._answered(question, name, 0)

    def tick(self, request: str) -> None:
        """Run a lookup's timer."""
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
        """End all lookups with None."""
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
