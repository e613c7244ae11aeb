"""Connections: whom a mover greets and seats, pings while it waits for them, and dials again when they are lost.

A Reconnector knows which lost peers to dial, and when, with exponential backoff. What they may still write is only
settled by talking to them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from kvmover.errors import LayoutError, PeerRefused, PeerReplaced, RefusedFor, TransportError
from kvmover.transfer.config import Backoff
from kvmover.transfer.core import Core, TimerKind
from kvmover.transfer.destination.quarantine import WriteLeases
from kvmover.transfer.events import Tick
from kvmover.transfer.meter import Count
from kvmover.transfer.peers.listeners import TcpProbe
from kvmover.transfer.peers.liveness import Duty
from kvmover.transfer.peers.table import Peer
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.handshake import Model, Rank, check_forms, check_generation, read_card, write_card

log = logging.getLogger(__name__)

#: Peers without a seat that are told why at a time: each costs a connection until then.
MAX_TOLD = 64


@dataclass(frozen=True, slots=True)
class Idle:
    """No tries are under way: the peer was never lost, or was given up."""

    name: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """The peer is lost, and the next try is `due`. `failed` tries went before; the last said `reason`."""

    name: str
    failed: int
    due: float
    reason: str


@dataclass(frozen=True, slots=True)
class Dialling:
    """A try is under way: the peer's answer, or its failure, decides."""

    name: str
    failed: int


State = Idle | Waiting | Dialling


@dataclass(frozen=True, slots=True)
class Lost:
    """The peer died, was cut off, or a try to reach it failed."""

    reason: str


Event = Lost | Tick


@dataclass(frozen=True, slots=True)
class Dial:
    """Try to connect the peer, and say Lost if that fails."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No more tries; `reason` is for whoever reads the log."""

    reason: str


Action = Dial | GiveUp


def step(policy: Backoff, state: State, event: Event, now: float) -> tuple[State, Action | None]:
    """The next state, and what to do."""
    if isinstance(event, Tick):
        if isinstance(state, Waiting) and now >= state.due:
            return Dialling(state.name, state.failed), Dial()
        return state, None
    if isinstance(state, Waiting):
        return replace(state, reason=event.reason), None
    failed = state.failed + 1 if isinstance(state, Dialling) else 0
    if failed >= policy.attempts:
        return Idle(state.name), GiveUp(f"{state.name} was not reached in {failed} tries: {event.reason}")
    return Waiting(state.name, failed, now + policy.wait_s(state.name, failed), event.reason), None


@dataclass(slots=True, eq=False)
class _LostPeer:
    """A lost peer: its card, the seat it had, and how far trying has got. `since`: when the last try began."""

    card: bytes
    seat: tuple[str, int]
    state: State
    since: float = 0.0


@dataclass(slots=True, eq=False)
class Reconnector:
    """Lost peers by transport name, of which no later incarnation has one. `answer_s`: how long a try may take.
    `_refused`: how often in a row peers have refused this side, and when last.
    """

    policy: Backoff
    answer_s: float
    _lost_peers: dict[str, _LostPeer] = field(default_factory=dict[str, _LostPeer])
    _refused: dict[str, tuple[int, float]] = field(default_factory=dict[str, "tuple[int, float]"])

    def lost(self, name: str, card: bytes, seat: tuple[str, int], reason: str, now: float) -> None:
        """A peer was lost, or a try at it failed."""
        tries, at = self._refused.get(name, (0, -math.inf))
        since = Dialling(name, tries - 1) if at == now else Idle(name)
        line = self._lost_peers.setdefault(name, _LostPeer(card, seat, since))
        self._step(name, line, Lost(reason), now)

    def refused(self, name: str, now: float) -> None:
        """A peer that is about to be lost has answered, but by a refusal: that is one more try that failed."""
        recent_s = 2 * self.policy.most_s
        self._refused = {each: (tries, at) for each, (tries, at) in self._refused.items() if now - at <= recent_s}
        self._refused[name] = self._refused.get(name, (0, now))[0] + 1, now

    def heard(self, name: str, now: float) -> bool:
        """Anything from a peer: whether it was being dialled, and so is back. One that speaks is dialled at once, but
        for one that has refused this side: what comes from it may be that once more."""
        line = self._lost_peers.get(name)
        if line is None:
            return False
        if isinstance(line.state, Waiting):
            if name in self._refused:
                return False
            line.state = replace(line.state, due=min(line.state.due, now))
            return False
        del self._lost_peers[name]
        return True

    def seated(self, seat: tuple[str, int], name: str) -> None:
        """`name` sits there: the one that did before is dialled no more."""
        for other in [other for other, line in self._lost_peers.items() if line.seat == seat and other != name]:
            del self._lost_peers[other]

    def retired(self, name: str) -> None:
        """Another process has taken the place of `name`, which is dialled no more."""
        self._lost_peers.pop(name, None)

    def forget(self, engine: str, rank: int | None) -> None:
        """Dial nobody of an engine, or nobody at one rank of it, until they are lost again."""
        for name in [
            n for n, lost in self._lost_peers.items() if lost.seat[0] == engine and rank in (None, lost.seat[1])
        ]:
            del self._lost_peers[name]

    def due(self, now: float) -> tuple[list[tuple[str, bytes]], list[str]]:
        """(peers to dial with their cards, peers whose dial was not answered)."""
        dial = list[tuple[str, bytes]]()
        silent = list[str]()
        for name, line in list(self._lost_peers.items()):
            if isinstance(line.state, Dialling) and now - line.since >= self.answer_s:
                silent.append(name)
            elif self._step(name, line, Tick(), now):
                line.since = now
                dial.append((name, line.card))
        return dial, silent

    def next_due(self) -> float:
        """Before this time `due` has nothing to say. O(lost peers)."""
        return min(map(self._due_of, self._lost_peers.values()), default=math.inf)

    def _due_of(self, line: _LostPeer) -> float:
        match line.state:
            case Waiting(due=due):
                return due
            case Dialling():
                return line.since + self.answer_s
            case Idle():
                return math.inf

    def names(self) -> Collection[str]:
        """Lost peers that are dialled."""
        return self._lost_peers.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._lost_peers

    def __len__(self) -> int:
        return len(self._lost_peers)

    def _step(self, name: str, line: _LostPeer, event: Event, now: float) -> bool:
        """Whether to dial. A peer that is given up is dialled no more until it is lost again."""
        line.state, action = step(self.policy, line.state, event, now)
        if isinstance(action, GiveUp):
            del self._lost_peers[name]
            log.warning("%s; it is dialled no more", action.reason)
        return isinstance(action, Dial)


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
    _probes: dict[str, TcpProbe] = field(default_factory=dict[str, "TcpProbe"])
    _told: set[str] = field(default_factory=set[str])

    @property
    def card(self) -> bytes:
        """What peers are greeted with, as it is now: memory may have been registered anew."""
        return write_card(self.model, self.core.card)

    def connect(self, card: bytes) -> str:
        """Seat the peer behind a `card`, once it is verified, and tell it of us."""
        try:
            name = self._seat(self.core.auth.verify_card(card))
        except PeerRefused as error:
            self.core.meter.turned_away(error.refused_for)
            raise
        self.core.liveness.greeted(name, self.core.clock())
        self.core.timers.sooner((TimerKind.PEER, name), self.core.liveness.due(name))
        self._greet(name)
        return name

    def _greet(self, name: str) -> None:
        self.core.say(name, wire.Hello(self.card, self.core.stamp_us()))

    def _seat(self, card: bytes) -> str:
        """Give the peer behind `card` its seat. Raises, before anything is loaded or anybody loses a seat, for a card
        of a process that has ended, or whose seat another one has.
        """
        rank = read_card(self.model, card)
        name = self.core.transport.identify(rank.transport)
        if self._has_ended(rank):  # to load it would cost a socket for good
            raise PeerRefused(f"{name} has ended")
        self._admit(rank, name)
        return self._sit(rank, name, card)

    def _admit(self, rank: Rank, name: str) -> None:
        """Raise PeerRefused where a peer gets no seat. Who is in its way and is known to have ended makes room; who is
        silent is asked whether it is there.
        """
        core, place = self.core, rank.place
        check_forms(core.card, rank, core.config.lossy)
        check_generation(place, core.wall_ns())
        for rival in core.peers.rivals(place, name):
            if rival.process is not None and rival.process.has_ended():
                core.peers.vacate(place.engine, (rival.rank,))
                if rival.left is None:
                    self.lost(rival.name, f"{rival.name} has ended")
        try:
            core.peers.admit(rank, name, core.clock(), core.config.linger_s)
        except PeerReplaced:
            for rival in core.peers.rivals(place, name):
                if rival.left is None:
                    self._watch(rival.name)
            raise

    def _watch(self, name: str) -> None:
        """Greet a seated peer until it says anything: one that does not is lost."""
        if not self.core.liveness.is_greeted(name):
            self.core.liveness.greeted(name, self.core.clock())
            self.core.timers.sooner((TimerKind.PEER, name), self.core.liveness.due(name))

    def _sit(self, rank: Rank, name: str, card: bytes) -> str:
        core = self.core
        core.transport.connect(rank.transport)
        core.timers.cancel((TimerKind.REFUSED, name))
        self._told.discard(name)
        self.reconnector.seated(rank.place.seat, name)
        self._end_probes()
        peer = Peer(name, rank, card)
        over = core.seat(peer)
        core.links.connected(peer, core.clock())
        for before in over:
            self.lost(before, f"rank {rank.place.rank} of {rank.place.engine} restarted as {name}")
        return name

    def _has_ended(self, rank: Rank) -> bool:
        """Whether the process behind a card is of this machine, and over: nobody answers there any more."""
        here = self.core.mappings.machine
        return bool(here) and rank.machine == here and rank.process is not None and rank.process.has_ended()

    def welcome(self, name: str, hello: wire.Hello) -> None:
        """A peer has introduced itself: seat it and answer, or tell it why not."""
        core = self.core
        try:
            rank = read_card(self.model, hello.card)
            if (of := core.transport.identify(rank.transport)) != name:
                raise PeerRefused(f"{name} sent the card of {of}")
            try:
                self._admit(rank, name)
            except PeerRefused as error:
                self._tell(name, rank, str(error))
                raise
            self._sit(rank, name, hello.card)
            core.peers.is_back(name)
            self.leases.heard(name, hello.stamp_us, core.clock())
            self.welcomed(name)
            core.say(name, wire.Pong(core.stamp_us()))
        except PeerRefused as error:
            core.refused(name, error.refused_for, str(error))
        except TransportError as error:
            core.refused(name, RefusedFor.HANDSHAKE, str(error))

    def _tell(self, name: str, rank: Rank, reason: str) -> None:
        """Say to a peer that gets no seat why, by a connection that ends once that has left. Who has a seat keeps it,
        whatever it says of itself now.
        """
        core = self.core
        if core.peers.get(name) is not None or (len(self._told) >= MAX_TOLD and name not in self._told):
            return
        core.transport.connect(rank.transport)
        self._told.add(name)
        core.timers.set((TimerKind.REFUSED, name), core.clock() + core.config.silence_s)
        core.say(name, wire.NoSeat(reason))

    def refused(self, peer: Peer, reason: str) -> None:
        """A peer has no seat for this side: it is lost, and dialled again as one that was not reached."""
        self.reconnector.refused(peer.name, self.core.clock())
        self.lost(peer.name, f"{peer.card.place.text()} refused this side: {reason}")

    def let_go(self, name: str) -> None:
        """End the connection to a peer without a seat: the refusal has left, or never will."""
        self._told.discard(name)
        if self.core.peers.get(name) is None:
            self.core.transport.disconnect(name)

    def heard(self, name: str) -> None:
        """Anything at all, from a peer."""
        self.core.liveness.heard(name)
        if name in self.reconnector:  # it was lost, and speaks
            if self.reconnector.heard(name, self.core.clock()):
                self.core.meter.add(Count.RECONNECTS)
                self._is_back(name)
                self._end_probes()
            self.core.timers.sooner((TimerKind.DIAL, None), self.core.clock())

    def _is_back(self, name: str) -> None:
        if self.core.peers.get(name) is not None:
            self.core.peers.is_back(name)

    def living(self) -> int:
        """Connected peers, without those that are dialled: they have their seats again when they answer."""
        peers = self.core.peers
        return len(peers) - sum(peers.get(name) is not None for name in self.reconnector.names())

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
            rank = read_card(self.model, card)
            if self._has_ended(rank):
                self.reconnector.retired(name)
                log.warning("%s has ended; it is dialled no more", name)
                continue
            probe = self._probes.pop(name, None)
            if probe is not None and probe.is_refused():
                self._try_later(name, card, rank, "nobody listens where it did")
                continue
            try:
                self._greet(self._seat(card))
                core.say(name, wire.Ping(self.leases.renewed(name)))
            except PeerReplaced as error:
                self.reconnector.retired(name)
                log.warning("%s; it is dialled no more", error)
            except (PeerRefused, TransportError) as error:
                self._try_later(name, card, rank, str(error))
        self._end_probes()
        core.timers.set((TimerKind.DIAL, None), self.reconnector.next_due())

    def _try_later(self, name: str, card: bytes, rank: Rank, reason: str) -> None:
        """A peer is lost, or a try at it failed. Whether anybody is there is known by when the next one is due."""
        self.reconnector.lost(name, card, rank.place.seat, reason, self.core.clock())
        if name in self.reconnector and rank.listeners and name not in self._probes:
            self._probes[name] = TcpProbe(rank.listeners)

    def _end_probes(self) -> None:
        """Of peers that are dialled no more."""
        for name in [name for name in self._probes if name not in self.reconnector]:
            self._probes.pop(name).close()

    def forget(self, engine: str, rank: int | None) -> None:
        """Dial nobody of an engine, or nobody at one rank of it, until they are lost again."""
        self.reconnector.forget(engine, rank)
        self._end_probes()

    def close(self) -> None:
        """Close the transport, and ask after nobody any more."""
        while self._probes:
            self._probes.popitem()[1].close()
        self.core.compiler.close()
        self.core.transport.close()

    def part(self, name: str, reason: str, level: int = logging.WARNING) -> None:
        """A peer is gone: nothing is said to it, and it is dialled if nobody has its seat. `level`: of the log."""
        core, peer = self.core, self.core.peers.get(name)
        if peer is not None:
            core.meter.add(Count.LOST_PEERS)
            log.log(level, "lost %s: %s", name, reason)
            if core.peers.sits(peer):
                self._try_later(name, peer.encoded, peer.card, reason)
                core.timers.set((TimerKind.DIAL, None), self.reconnector.next_due())
        core.peers.remove(name, core.clock())
        core.mappings.forget(name)
        core.compiler.parted(name)
        core.outbox.pop(name, None)
        core.liveness.forget(name)
        core.transport.disconnect(name)


def check_own_card(model: Model, core: Core) -> None:
    """Raise LayoutError for what peers would refuse us for."""
    try:
        read_card(model, write_card(model, core.card))
    except PeerRefused as error:
        raise LayoutError(str(error)) from error
