"""Connections: whom a mover greets and seats, pings while it waits for them, and dials again when they are lost."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from kvmover.errors import PeerRefused, PeerReplaced, TransportError
from kvmover.transfer.core import Core, TimerKind
from kvmover.transfer.destination.leases import WriteLeases
from kvmover.transfer.meter import Count
from kvmover.transfer.peers.liveness import Duty
from kvmover.transfer.peers.reconnect import Reconnector
from kvmover.transfer.peers.table import Peer
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.handshake import Model, Rank, read_card, write_card

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Connections:
    """The peers of one mover. `leases`: what peers may write here, which pings renew. `lost` is told who is gone, and
    why; `welcomed` who has said Hello.
    """

    core: Core
    model: Model
    leases: WriteLeases
    reconnector: Reconnector
    lost: Callable[[str, str], None]
    welcomed: Callable[[str], None]

    @property
    def card(self) -> bytes:
        """What peers are greeted with, as it is now: memory may have been registered anew."""
        return write_card(self.model, self.core.card)

    def connect(self, card: bytes) -> str:
        """Seat the peer behind a verified `card` and tell it of us."""
        name = self._seat(card)
        self.core.liveness.greeted(name, self.core.clock())
        self.core.timers.sooner((TimerKind.PEER, name), self.core.liveness.due(name))
        self._greet(name)
        return name

    def _greet(self, name: str) -> None:
        self.core.say(name, wire.Hello(self.card, self.core.stamp_us()))

    def _seat(self, card: bytes, sender: str | None = None) -> str:
        """Give the peer behind `card` its seat. Raises, before anything is loaded or anybody loses a seat, for a card
        that is not of its `sender`, and for one of a process that a newer one has replaced.
        """
        core = self.core
        rank = read_card(self.model, card)
        name = core.transport.identify(rank.transport)
        if sender is not None and sender != name:
            raise PeerRefused(f"{sender} sent the card of {name}")
        if sender is None and self._has_ended(rank):  # to load it would cost a socket for good
            raise PeerRefused(f"{name} has ended")
        core.peers.admit(rank, name)
        core.transport.connect(rank.transport)
        self.reconnector.seated(rank.place.seat, name)
        peer = Peer(name, rank, card)
        over = core.peers.add(peer)
        core.links.connected(peer, core.clock())
        for before in over:
            self.lost(before, f"rank {rank.place.rank} of {rank.place.engine} restarted as {name}")
        return name

    def _has_ended(self, rank: Rank) -> bool:
        """Whether the process behind a card is of this machine, and over: nobody answers there any more."""
        here = self.core.mappings.machine
        return bool(here) and rank.machine == here and rank.process is not None and rank.process.has_ended()

    def welcome(self, name: str, hello: wire.Hello) -> None:
        """A peer has introduced itself: seat it and answer, or drop what it said."""
        core = self.core
        try:
            self._seat(hello.card, name)
            self.leases.heard(name, hello.stamp_us, core.clock())
            self.welcomed(name)
            core.say(name, wire.Pong(core.stamp_us()))
        except (PeerRefused, TransportError) as error:
            core.meter.add(Count.REFUSED_PEERS)
            log.warning("refused %s: %s", name, error)

    def heard(self, name: str) -> None:
        """Anything at all, from a peer."""
        self.core.liveness.heard(name)
        if name in self.reconnector:  # it was lost, and speaks
            if self.reconnector.heard(name, self.core.clock()):
                self.core.meter.add(Count.RECONNECTS)
            self.core.timers.sooner((TimerKind.DIAL, None), self.core.clock())

    def check_on(self, name: str) -> None:
        """A peer that died while it owes us something is noticed by a ping that cannot be sent, or is not answered."""
        core = self.core
        match core.liveness.look(name, core.clock()):
            case Duty.GREET:
                self._greet(name)
            case Duty.PING:
                core.say(name, wire.Ping(self.leases.renewed(name)))
            case Duty.LOSE:
                core.lost.append((name, f"{name} has answered nothing for {core.config.silence_s} s"))
            case None:
                pass
        core.timers.set((TimerKind.PEER, name), core.liveness.due(name))

    def dial(self, _: None) -> None:
        """Reach for lost peers again; what they say, or that they say nothing, decides."""
        core, now = self.core, self.core.clock()
        dial, silent = self.reconnector.due(now)
        for name in silent:
            core.lost.append((name, f"{name} does not answer"))
        for name, card in dial:
            if self._has_ended(read_card(self.model, card)):
                self.reconnector.retired(name)
                log.warning("%s has ended; it is dialled no more", name)
                continue
            try:
                self._greet(self._seat(card))
                core.say(name, wire.Ping(self.leases.renewed(name)))
            except PeerReplaced as error:
                self.reconnector.retired(name)
                log.warning("%s; it is dialled no more", error)
            except (PeerRefused, TransportError) as error:
                self.reconnector.lost(name, card, read_card(self.model, card).place.seat, str(error), now)
        core.timers.set((TimerKind.DIAL, None), self.reconnector.next_due())

    def part(self, name: str, reason: str) -> None:
        """A peer is gone: nothing is said to it, and it is dialled if nobody has its seat."""
        core, peer = self.core, self.core.peers.get(name)
        if peer is not None:
            core.meter.add(Count.LOST_PEERS)
            log.warning("lost %s: %s", name, reason)
            if core.peers.sits(peer):
                self.reconnector.lost(name, peer.encoded, peer.card.place.seat, reason, core.clock())
                core.timers.set((TimerKind.DIAL, None), self.reconnector.next_due())
        core.peers.remove(name)
        core.mappings.forget(name)
        core.outbox.pop(name, None)
        core.liveness.forget(name)
        core.transport.disconnect(name)
