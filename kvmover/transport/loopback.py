"""A LoopbackTransport has no wire: for one process, with NIXL's rules and failures on request."""

from __future__ import annotations

import ctypes
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from kvmover.errors import DeadlineExceeded, DescriptorError, PeerLost, PeerRefused, PeerUnknown, TransportError
from kvmover.transport.base import (
    ADDRESS,
    NBYTES,
    Completed,
    Descriptors,
    Event,
    Failed,
    Memory,
    MemoryKind,
    Note,
    Revocation,
    Transport,
)
from kvmover.transport.checks import Operation, Ranges, check_note, touches
from kvmover.transport.envelope import TransportCard, seal, unseal


@dataclass(slots=True)
class _Flight:
    """A posted operation. `landed`: its bytes are copied or never will be. `told`: its event is out.

    `registrations`: the target ranges' serial numbers, as this side knows them.
    """

    ticket: int
    verb: Literal["WRITE", "READ"]
    peer: str
    local: Descriptors
    remote: Descriptors
    registrations: frozenset[int]
    note: bytes
    deadline: float
    error: TransportError | None = None
    landed: bool = False
    told: bool = False


class LoopbackNetwork:
    """A network of loopback transports. It delivers at once, unless on `hold` or `cut`."""

    def __init__(self) -> None:
        self._members: dict[str, LoopbackTransport] = {}
        self._cut: set[str] = set()
        self._held: list[tuple[LoopbackTransport, _Flight]] | None = None

    def hold(self) -> None:
        """Keep operations from now on in flight until `deliver`."""
        if self._held is None:
            self._held = []

    def deliver(self) -> None:
        """Land the held operations in order, even past deadlines."""
        held, self._held = self._held or [], None
        for sender, flight in held:
            self._land(sender, flight)

    def cut(self, name: str) -> None:
        """Isolate `name` for ever. Operations that it posted before still land."""
        self._cut.add(name)

    def join(self, transport: LoopbackTransport) -> None:
        """Make `transport` reachable by its name."""
        self._members[transport.name] = transport

    def leave(self, name: str) -> None:
        """Remove a transport, which peers then lose."""
        self._members.pop(name, None)

    def carry(self, sender: LoopbackTransport, flight: _Flight) -> None:
        """Land an operation or hold it back; a cut-off sender's fails."""
        if sender.name in self._cut:
            flight.landed, flight.error = True, _lost(flight.peer)
        elif self._held is None:
            self._land(sender, flight)
        else:
            self._held.append((sender, flight))

    def tell(self, sender: str, peer: str, note: bytes) -> None:
        """Deliver a note at once. Raises PeerLost if an end is cut off, or the peer closed."""
        if peer not in self._members or {sender, peer} & self._cut:
            raise _lost(peer)
        self._members[peer].inbox.append(Note(sender, note))

    def refusal(self, flight: _Flight) -> DescriptorError | None:
        """Returns an error if the peer deregistered or reregistered the memory."""
        peer = self._members[flight.peer]
        try:
            peer.ranges.check(flight.remote, flight.peer)
        except DescriptorError as error:
            return error
        if flight.registrations != peer.ranges.serials(flight.remote):
            return DescriptorError(f"{flight.peer} has registered that memory anew")
        return None

    def _land(self, sender: LoopbackTransport, flight: _Flight) -> None:
        flight.landed = True
        peer = self._members.get(flight.peer)
        if sender.name not in self._members or peer is None or flight.peer in self._cut:
            flight.error = _lost(flight.peer)
            return
        flight.error = self.refusal(flight)
        if flight.error is not None:
            return
        ours, theirs = flight.local.dense().table, flight.remote.dense().table
        source, target = (ours, theirs) if flight.verb == "WRITE" else (theirs, ours)
        starts = zip(target[:, ADDRESS].tolist(), source[:, ADDRESS].tolist(), ours[:, NBYTES].tolist(), strict=True)
        for run in starts:
            ctypes.memmove(*run)
        if flight.note:
            peer.inbox.append(Note(sender.name, flight.note))
        if sender.name in self._cut:
            flight.error = _lost(flight.peer)


class LoopbackTransport(Transport):
    """A NixlTransport's double for host memory of this process."""

    def __init__(self, network: LoopbackNetwork, name_hint: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._network = network
        self._name = f"{name_hint}.{next(_generations)}"
        self._clock = clock
        self._peers: dict[str, tuple[int, Ranges]] = {}
        self._lost: dict[str, str] = {}
        self._flights: dict[int, _Flight] = {}
        self._events: list[Event] = []
        self._tickets = itertools.count(1)
        self._closed = False
        self.ranges = Ranges()
        self.inbox: list[Note] = []
        network.join(self)

    @property
    def name(self) -> str:
        return self._name

    @property
    def revocation(self) -> Revocation:
        """Returns PROVEN: registrations are compared on landing."""
        return Revocation.PROVEN

    def unsettled(self) -> frozenset[int]:
        return frozenset(flight.ticket for flight in self._flights.values() if flight.told)

    def register(self, memory: Memory) -> None:
        self._ready()
        if memory.kind is not MemoryKind.HOST:
            raise DescriptorError(f"loopback copies host memory only, got {memory}")
        self.ranges.add(memory)

    def deregister(self, memory: Memory) -> None:
        self._ready()
        busy = [flight.ticket for flight in self._flights.values() if touches(flight.local, memory)]
        if busy and memory in self.ranges:
            raise DescriptorError(f"{memory} is in use by the operations {busy}")
        self.ranges.remove(memory)

    def metadata(self) -> bytes:
        self._ready()
        return seal(TransportCard.of("loopback", self._name, self.ranges, b""))

    def identify(self, metadata: bytes) -> str:
        return unseal(metadata, "loopback").name

    def connect(self, metadata: bytes) -> str:
        self._ready()
        card = unseal(metadata, "loopback")
        if card.name == self._name:
            raise PeerRefused(f"{card.name} is this side's own name")
        if card.name in self._lost:
            raise PeerLost(self._lost[card.name])
        known = self._peers.get(card.name)
        if known is None or known[0] < card.revision:
            self._peers[card.name] = (card.revision, card.ranges())
        return card.name

    def disconnect(self, peer: str) -> None:
        self._ready()
        self._peers.pop(peer, None)
        self._lost.pop(peer, None)
        for flight in self._flights.values():
            if flight.peer == peer:
                self._fail(flight, PeerUnknown(f"disconnected from {peer}"))

    def write(
        self,
        peer: str,
        local: Descriptors,
        remote: Descriptors,
        note: bytes,
        deadline_s: float,
        until: float = math.inf,
    ) -> int:
        return self._post(Operation("WRITE", peer, local, remote, note, deadline_s, until))

    def read(self, peer: str, local: Descriptors, remote: Descriptors, note: bytes, deadline_s: float) -> int:
        return self._post(Operation("READ", peer, local, remote, note, deadline_s))

    def _post(self, post: Operation) -> int:
        ranges = self._reachable(post.peer)
        post.check(self.ranges, ranges)
        post.check_until(self._clock())
        ticket, serials, deadline = next(self._tickets), ranges.serials(post.remote), self._clock() + post.deadline_s
        flight = _Flight(ticket, post.verb, post.peer, post.local, post.remote, serials, post.note, deadline)
        self._flights[flight.ticket] = flight
        self._network.carry(self, flight)
        return flight.ticket

    def notify(self, peer: str, note: bytes) -> None:
        self._reachable(peer)
        check_note(note)
        try:
            self._network.tell(self._name, peer, note)
        except PeerLost as error:
            self._lose(peer, error)
            raise

    def poll(self) -> list[Event]:
        self._ready()
        for flight in list(self._flights.values()):
            if flight.landed:
                self._settle(flight)
            elif self._clock() >= flight.deadline:
                self._fail(flight, DeadlineExceeded(f"no answer from {flight.peer} by the deadline"))
        for flight in self._flights.values():
            if flight.peer in self._lost:
                self._fail(flight, PeerLost(self._lost[flight.peer]))
        events, self._events = [*self._events, *self.inbox], []
        self.inbox.clear()
        return events

    def close(self) -> None:
        self._closed = True
        self._network.leave(self._name)
        for table in (self._flights, self._peers, self._events, self.inbox):
            table.clear()

    def _ready(self) -> None:
        if self._closed:
            raise TransportError(f"{self._name} is closed")

    def _reachable(self, peer: str) -> Ranges:
        self._ready()
        if peer in self._lost:
            raise PeerLost(self._lost[peer])
        if peer not in self._peers:
            raise PeerUnknown(f"{peer} is not connected")
        return self._peers[peer][1]

    def _lose(self, peer: str, error: TransportError) -> None:
        if self._peers.pop(peer, None) is not None:
            self._lost[peer] = str(error)

    def _settle(self, flight: _Flight) -> None:
        del self._flights[flight.ticket]
        if isinstance(flight.error, PeerLost):
            self._lose(flight.peer, flight.error)
        if flight.told:
            return
        if flight.error is None:
            self._events.append(Completed(flight.ticket))
        else:
            self._events.append(Failed(flight.ticket, flight.peer, flight.error, quiescent=True))

    def _fail(self, flight: _Flight, error: TransportError) -> None:
        if not flight.told:
            flight.told = True
            self._events.append(Failed(flight.ticket, flight.peer, error, quiescent=False))


_generations = itertools.count(1)


def _lost(peer: str) -> PeerLost:
    return PeerLost(f"{peer} is lost: it is closed or cut off")
