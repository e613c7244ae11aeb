"""A wire on virtual time: a NIC a rank that carries one thing after the other, and ranks that take time to listen."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from kvmover.transfer.mover import Mover
from kvmover.transfer.protocol import wire
from kvmover.transport.base import COUNT, NBYTES, Note
from kvmover.transport.loopback import LoopbackNetwork, LoopbackTransport, _Flight, _lost


@dataclass(frozen=True, slots=True)
class Speeds:
    """Rates in bytes a microsecond; times in microseconds. `note_us`: one way of a note or of a write's last byte.
    `event_us`: CPU of a rank for a note or a finished write.
    """

    wire_rate: float
    gather_rate: float
    scatter_rate: float
    note_us: float
    event_us: float


@dataclass(slots=True, eq=False)
class TimedWire(LoopbackNetwork):
    """Ranks on one clock, in seconds. Bytes wait for their source's NIC, then for their target's.

    `sent_bytes`: written, by sender. `said` [sender, kind]: messages.
    """

    speeds: Speeds
    now: float = 0.0
    movers: dict[str, Mover] = field(default_factory=dict[str, Mover])
    sent_bytes: Counter[str] = field(default_factory=Counter[str])
    said: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    _sends_until: dict[str, float] = field(default_factory=dict[str, float])
    _receives_until: dict[str, float] = field(default_factory=dict[str, float])
    _busy_until: dict[str, float] = field(default_factory=dict[str, float])
    _waking: set[str] = field(default_factory=set[str])
    _due: list[tuple[float, int, Callable[[], None]]] = field(
        default_factory=list["tuple[float, int, Callable[[], None]]"]
    )
    _numbers: count[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        LoopbackNetwork.__init__(self)

    def clock(self) -> float:
        """Returns the virtual time, in seconds."""
        return self.now

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Have `call` made at a time."""
        heapq.heappush(self._due, (when, next(self._numbers), call))

    def run(self, until: float = float("inf")) -> None:
        """Let everything happen that is due until then."""
        while self._due and self._due[0][0] <= until:
            when, _, call = heapq.heappop(self._due)
            self.now = max(self.now, when)
            call()

    def run_until(self, done: Callable[[], bool]) -> None:
        """Let everything happen until `done`, or until nothing is due."""
        while self._due and not done():
            when, _, call = heapq.heappop(self._due)
            self.now = max(self.now, when)
            call()

    def wake(self, name: str) -> None:
        """Have a rank poll as soon as its CPU is free."""
        if name in self.movers and name not in self._waking:
            self._waking.add(name)
            self.at(max(self.now, self._busy_until.get(name, 0.0)), lambda: self._poll(name))

    def end(self, name: str) -> None:
        """The process is gone: its peers are not told."""
        self.movers.pop(name).close()

    def carry(self, sender: LoopbackTransport, flight: _Flight) -> None:
        table, speeds = flight.local.table, self.speeds
        nbytes = int((table[:, NBYTES] * table[:, COUNT]).sum())
        source, target, ready = sender.name, flight.peer, self.now + nbytes / speeds.gather_rate / 1e6
        if flight.verb == "READ":  # the source hears of it first
            source, target, ready = flight.peer, sender.name, ready + speeds.note_us / 1e6
        begins = max(ready, self._sends_until.get(source, 0.0), self._receives_until.get(target, 0.0))
        ends = begins + nbytes / speeds.wire_rate / 1e6
        self._sends_until[source] = self._receives_until[target] = ends
        self.sent_bytes[source] += nbytes
        if flight.note:
            self._count(sender.name, flight.note)
        self.at(ends + (speeds.note_us + nbytes / speeds.scatter_rate) / 1e6, lambda: self._arrive(sender, flight))

    def tell(self, sender: str, peer: str, note: bytes) -> None:
        if peer not in self._members:
            raise _lost(peer)
        self._count(sender, note)
        self.at(self.now + self.speeds.note_us / 1e6, lambda: self._hear(sender, peer, note))

    def _count(self, sender: str, note: bytes) -> None:
        self.said.update((sender, type(wire.decode(message)).__name__) for message in wire.split(note))

    def _hear(self, sender: str, peer: str, note: bytes) -> None:
        if peer in self._members:
            self._members[peer].inbox.append(Note(sender, note))
            self.wake(peer)

    def _arrive(self, sender: LoopbackTransport, flight: _Flight) -> None:
        self._land(sender, flight)
        self.wake(flight.peer)
        self.wake(sender.name)

    def _poll(self, name: str) -> None:
        self._waking.discard(name)
        if name not in self.movers:
            return
        events = len(self._members[name].inbox)
        busy = self.movers[name].poll()
        self._busy_until[name] = self.now + max(1, events) * self.speeds.event_us / 1e6
        if busy:
            self.wake(name)
