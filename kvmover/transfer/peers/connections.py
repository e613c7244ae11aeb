"""The connections of a mover: it greets peers, pings those it waits for, and dials lost ones again.

A Reconnector decides which lost peers to dial, and when, with exponential backoff. Memory that they may still write is
settled only by messages from them.
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
from kvmover.transfer.peers.peer_table import Peer
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.handshake import (
    Model,
    Rank,
    agreed_version,
    check_forms,
    check_generation,
    read_card,
    write_card,
)

log = logging.getLogger(__name__)

#: Refused peers connected at a time, to send them the reason.
MAX_TOLD = 64


@dataclass(frozen=True, slots=True)
class Idle:
    """The state without tries: the peer was never lost, or was given up."""

    name: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """The state between tries: the next is `due`. `failed` tries went before; the last failed for `reason`."""

    name: str
    failed: int
    due: float
    reason: str


@dataclass(frozen=True, slots=True)
class Dialling:
    """The state during a try, which the peer's answer or a failure ends."""

    name: str
    failed: int


State = Idle | Waiting | Dialling


@dataclass(frozen=True, slots=True)
class Lost:
    """An event: the peer died, was disconnected, or a try failed."""

    reason: str


Event = Lost | Tick


@dataclass(frozen=True, slots=True)
class Dial:
    """An action: try to connect the peer, and report Lost if that fails."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """An action: stop trying. `reason` goes to the log."""

    reason: str


Action = Dial | GiveUp


def step(policy: Backoff, state: State, event: Event, now: float) -> tuple[State, Action | None]:
    """Returns the next state, and an action or None."""
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
    """A lost peer: its card, its rank id, and the state of its tries. `since`: when the last try began."""

    card: bytes
    seat: tuple[str, int]
    state: State
    since: float = 0.0


@dataclass(slots=True, eq=False)
class Reconnector:
    """The lost peers by transport name, which is never reused. `answer_s`: timeout of a try. `_refused`: how often in a
    row a peer refused this side, and when last.
    """

    policy: Backoff
    answer_s: float
    _lost_peers: dict[str, _LostPeer] = field(default_factory=dict[str, _LostPeer])
    _refused: dict[str, tuple[int, float]] = field(default_factory=dict[str, "tuple[int, float]"])

    def lost(self, name: str, card: bytes, seat: tuple[str, int], reason: str, now: float) -> None:
        """Note that a peer was lost, or a try at it failed."""
        tries, at = self._refused.get(name, (0, -math.inf))
        since = Dialling(name, tries - 1) if at == now else Idle(name)
        line = self._lost_peers.setdefault(name, _LostPeer(card, seat, since))
        self._step(name, line, Lost(reason), now)

    def refused(self, name: str, now: float) -> None:
        """Count a refusal of a peer as a failed try. The caller then reports the peer as lost."""
        recent_s = 2 * self.policy.most_s
        self._refused = {each: (tries, at) for each, (tries, at) in self._refused.items() if now - at <= recent_s}
        self._refused[name] = self._refused.get(name, (0, now))[0] + 1, now

    def heard(self, name: str, now: float) -> bool:
        """Note any message of a peer. Returns True if it was being dialled, and so is back. A waiting peer is dialled
        at once, unless it refused this side: the message may be another refusal.
        """
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
        """Stop dialling the peer that had this rank id before `name`."""
        for other in [other for other, line in self._lost_peers.items() if line.seat == seat and other != name]:
            del self._lost_peers[other]

    def retired(self, name: str) -> None:
        """Stop dialling a peer that was replaced or has ended."""
        self._lost_peers.pop(name, None)

    def forget(self, engine: str, rank: int | None) -> None:
        """Stop dialling an engine's peers, or one rank's, until they are lost again."""
        for name in [
            n for n, lost in self._lost_peers.items() if lost.seat[0] == engine and rank in (None, lost.seat[1])
        ]:
            del self._lost_peers[name]

    def due(self, now: float) -> tuple[list[tuple[str, bytes]], list[str]]:
        """Returns (peers to dial with their cards, peers whose dial was not answered)."""
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
        """Returns the next time at which `due` has work. O(lost peers)."""
        return min(map(self.due_of, self._lost_peers), default=math.inf)

    def due_of(self, name: str) -> float:
        """Returns the next time at which `due` has work for a peer; math.inf for one that is not lost."""
        line = self._lost_peers.get(name)
        if line is None:
            return math.inf
        match line.state:
            case Waiting(due=due):
                return due
            case Dialling():
                return line.since + self.answer_s
            case Idle():
                return math.inf

    def names(self) -> Collection[str]:
        """Returns the lost peers that are dialled."""
        return self._lost_peers.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._lost_peers

    def __len__(self) -> int:
        return len(self._lost_peers)

    def _step(self, name: str, line: _LostPeer, event: Event, now: float) -> bool:
        """Advance a peer's tries. Returns True to dial now. A peer given up is dropped until it is lost again."""
        line.state, action = step(self.policy, line.state, event, now)
        if isinstance(action, GiveUp):
            del self._lost_peers[name]
            log.warning("%s; it is dialled no more", action.reason)
        return isinstance(action, Dial)


@dataclass(slots=True, eq=False)
class Connections:
    """The peers of one mover. `leases`: the peers' write leases, which pings renew. `lost` is called with each lost
    peer and the reason, `welcomed` with each peer that said Hello.
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
        """The card for greetings, up to date with registrations."""
        return write_card(self.model, self.core.card, self.core.dialect)

    def connect(self, card: bytes) -> str:
        """Connect the peer behind a `card`, once it is verified, and send Hello. Returns its name."""
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
        """Connect the peer behind `card`. Raises PeerRefused or PeerReplaced, before any change, for a process that has
        ended, or whose rank id another one holds.
        """
        rank = read_card(self.model, card, self.core.dialect)
        name = self.core.transport.identify(rank.transport)
        if self._has_ended(rank):  # loading it would leak a socket
            raise PeerRefused(f"{name} has ended")
        self._admit(rank, name)
        return self._sit(rank, name, card)

    def _admit(self, rank: Rank, name: str) -> None:
        """Raise PeerRefused if a peer can't be connected. Holders of its rank id that are known to have ended are
        removed first; silent ones are greeted.
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
        """Greet a connected peer until it answers; it is lost if it doesn't."""
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
        peer = Peer(name, rank, card, agreed_version(card, core.dialect))
        over = core.seat(peer)
        core.links.connected(peer, core.clock())
        for before in over:
            self.lost(before, f"rank {rank.place.rank} of {rank.place.engine} restarted as {name}")
        return name

    def _has_ended(self, rank: Rank) -> bool:
        """Returns True if the process of a card ran on this machine and has ended."""
        here = self.core.mappings.machine
        return bool(here) and rank.machine == here and rank.process is not None and rank.process.has_ended()

    def welcome(self, name: str, hello: wire.Hello) -> None:
        """Handle a peer's Hello: connect it and answer, or send the refusal."""
        core = self.core
        try:
            rank = read_card(self.model, hello.card, core.dialect)
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
        """Send a refused peer the reason, over a connection that ends once it has left. A connected peer keeps its
        connection.
        """
        core = self.core
        if core.peers.get(name) is not None or (len(self._told) >= MAX_TOLD and name not in self._told):
            return
        core.transport.connect(rank.transport)
        self._told.add(name)
        core.timers.set((TimerKind.REFUSED, name), core.clock() + core.config.silence_s)
        core.say(name, wire.NoSeat(reason))

    def refused(self, peer: Peer, reason: str) -> None:
        """Handle a refusal by a peer: it is lost, and dialled again like one that was not reached."""
        self.reconnector.refused(peer.name, self.core.clock())
        self.lost(peer.name, f"{peer.card.place.text()} refused this side: {reason}")

    def let_go(self, name: str) -> None:
        """End the connection to a refused peer: the reason has left, or never will."""
        self._told.discard(name)
        if self.core.peers.get(name) is None:
            self.core.transport.disconnect(name)

    def heard(self, name: str) -> None:
        """Note any message of a peer."""
        self.core.liveness.heard(name)
        if name in self.reconnector:  # a lost peer speaks again
            if self.reconnector.heard(name, self.core.clock()):
                self.core.meter.add(Count.RECONNECTS)
                if self.core.peers.get(name) is not None:
                    self.core.peers.is_back(name)
                self._end_probes()
            self.core.timers.sooner((TimerKind.DIAL, None), self.core.clock())

    def living(self) -> int:
        """Returns the number of connected peers, without those being dialled."""
        peers = self.core.peers
        return len(peers) - sum(peers.get(name) is not None for name in self.reconnector.names())

    def check_on(self, name: str) -> None:
        """Run a peer's timer: greet it, ping it, or report it lost."""
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
        """Dial the lost peers that are due, and report those that did not answer as lost."""
        core, now = self.core, self.core.clock()
        dial, silent = self.reconnector.due(now)
        for name in silent:
            core.lost.append((name, f"{name} does not answer"))
        for name, card in dial:
            rank = read_card(self.model, card, self.core.dialect)
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
        """Schedule another try at a lost peer, and probe its listeners meanwhile."""
        self.reconnector.lost(name, card, rank.place.seat, reason, self.core.clock())
        if name in self.reconnector and rank.listeners and name not in self._probes:
            self._probes[name] = TcpProbe(rank.listeners)

    def _end_probes(self) -> None:
        """End the probes of peers that are not dialled any more."""
        for name in [name for name in self._probes if name not in self.reconnector]:
            self._probes.pop(name).close()

    def forget(self, engine: str, rank: int | None) -> None:
        """Stop dialling an engine's peers, or one rank's, until they are lost again."""
        self.reconnector.forget(engine, rank)
        self._end_probes()

    def close(self) -> None:
        """Close probes, compiler and transport."""
        while self._probes:
            self._probes.popitem()[1].close()
        self.core.compiler.close()
        self.core.transport.close()

    def part(self, name: str, reason: str, level: int = logging.WARNING) -> None:
        """Disconnect a peer, and dial it unless its rank id was taken. `level`: of the log."""
        core, peer = self.core, self.core.peers.get(name)
        if peer is not None:
            core.meter.add(Count.LOST_PEERS)
            log.log(level, "lost %s: %s", name, reason)
            if core.peers.sits(peer):
                self._try_later(name, peer.encoded, peer.card, reason)
                core.timers.sooner((TimerKind.DIAL, None), self.reconnector.due_of(name))
        core.peers.remove(name, core.clock())
        core.mappings.forget(name)
        core.compiler.parted(name)
        core.outbox.pop(name, None)
        core.liveness.forget(name)
        core.transport.disconnect(name)


def check_own_card(model: Model, core: Core) -> None:
    """Raise LayoutError for a model or card that peers would refuse."""
    try:
        read_card(model, write_card(model, core.card, core.dialect), core.dialect)
    except PeerRefused as error:
        raise LayoutError(str(error)) from error
