"""A simulated wire with a virtual clock: seeded delay, loss, duplication and reordering, and operations that land late.

The rules at either end are those of the loopback transport. What happens between post and landing is decided here, by
streams of random numbers of their own for every pair of processes, so that a seed replays in any process.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import numpy as np

from kvmover.errors import PeerLost, ProtocolError
from kvmover.transfer.protocol import wire
from kvmover.transport.base import ADDRESS, COUNT, NBYTES, STRIDE, Descriptors, Note
from kvmover.transport.loopback import LoopbackNetwork, LoopbackTransport, _Flight
from tests.sim.scenario import DEFAULT, Profile


class SimTransport(LoopbackTransport):
    """One process's end of a SimNetwork, named for its place: p0.1, then p0.2 after its first restart."""

    def __init__(self, network: SimNetwork, place: str) -> None:
        super().__init__(network, place, network.clock)


@dataclass(slots=True, eq=False)
class Posted:
    """A write or a read under way. `before` is what a write was to carry when it was posted. `revoked`: as of a
    revision of its target's ranges, whether its memory is registered no more.
    """

    sender: SimTransport
    flight: _Flight
    ours: list[int] = field(init=False)
    theirs: list[int] = field(init=False)
    lengths: list[int] = field(init=False)
    before: bytes = field(init=False)
    revoked: tuple[int, bool] = (-1, False)

    def __post_init__(self) -> None:
        flight = self.flight
        self.ours, self.theirs, self.lengths = _starts(flight.local), _starts(flight.remote), _lengths(flight.local)
        self.before = self.contents() if self.writes else b""

    @property
    def writes(self) -> bool:
        return self.flight.verb == "WRITE"

    @property
    def message(self) -> wire.Chunk | None:
        message = wire.decode(self.flight.note) if self.writes else None
        return message if isinstance(message, wire.Chunk) else None

    @property
    def targets(self) -> list[int]:
        """Where it puts bytes: addresses of its runs."""
        return self.theirs if self.writes else self.ours

    def contents(self) -> bytes:
        """What lies at its sender's end."""
        return b"".join(map(ctypes.string_at, self.ours, self.lengths))

    def copy(self) -> None:
        for target, source, nbytes in zip(
            self.targets, self.ours if self.writes else self.theirs, self.lengths, strict=True
        ):
            ctypes.memmove(target, source, nbytes)

    def spoil(self) -> None:
        """Change one bit of what landed."""
        ctypes.c_ubyte.from_address(self.targets[-1]).value ^= 1

    def __str__(self) -> str:
        if self.writes:
            return f"{self.sender.name} => {self.flight.peer} write of {text_of(self.flight.note)}"
        return f"{self.sender.name} <= {self.flight.peer} read {self.flight.ticket}"


class SimNetwork(LoopbackNetwork):
    """Where simulated transports meet, and the clock that they share. `step` lets the next thing happen.

    `on_say`: called with each note. `on_post`, `on_landing`, `on_end`: with each operation when it is posted, before it
    touches memory, and when it touches it no longer. `lost`: notes that vanished, by kind. `heard_at` [sender, peer]:
    when a note arrived last. `spoils`: whether an operation may land with a wrong bit.
    """

    def __init__(self, seed: int, profile: Profile = DEFAULT) -> None:
        super().__init__()
        self.profile = profile
        self.now = 1000.0
        self.in_flight: dict[Posted, None] = {}
        self.wake: Callable[[str], None] = lambda name: None
        self.on_say: Callable[[str, str, bytes], None] = lambda sender, peer, note: None
        self.on_post: Callable[[Posted], None] = lambda posted: None
        self.on_landing: Callable[[Posted], None] = lambda posted: None
        self.on_end: Callable[[Posted, bool], None] = lambda posted, spoilt: None
        self.spoils = False
        self.heard_at: dict[tuple[str, str], float] = {}
        self.lost: Counter[str] = Counter()
        self.trace: list[str] | None = None
        self._seed = seed
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._streams: dict[tuple[str, str], Random] = {}
        self._last: dict[tuple[str, str], float] = {}
        self._born: Counter[str] = Counter()
        #: Processes that are gone and links that are cut: since when, and whether who tries to reach them is told.
        self._dead: dict[str, tuple[float, bool]] = {}
        self._apart: dict[frozenset[str], tuple[float, bool]] = {}

    def clock(self) -> float:
        return self.now

    @property
    def apart(self) -> list[frozenset[str]]:
        """Pairs that are cut off from each other."""
        return list(self._apart)

    @property
    def pending(self) -> int:
        return len(self._agenda)

    def log(self, text: Callable[[], str]) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now - 1000:8.4f}  {text()}")

    def at(self, time: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time, next(self._serial), call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self.at(self.now + seconds, call)

    def step(self) -> None:
        """The next thing that happens, at its time."""
        time, _, call = heapq.heappop(self._agenda)
        self.now = max(self.now, time)
        call()

    def join(self, transport: LoopbackTransport) -> None:
        """Under a name that is the same in every run of a seed."""
        place = transport.name.rpartition(".")[0]
        self._born[place] += 1
        transport._name = f"{place}.{self._born[place]}"
        super().join(transport)

    # Faults.

    def crash(self, name: str, told: bool) -> None:
        """The process is gone: what it said vanishes, what it wrote may land or not. To its peers it is lost, or, where
        nobody is `told`, it is silent."""
        self._dead[name] = self.now, told
        self.leave(name)

    def cut(self, one: str, other: str, told: bool) -> None:
        """Two live processes lose each other; what was posted before may still land."""
        self._apart[frozenset((one, other))] = self.now, told

    def heal(self, one: str, other: str) -> None:
        self._apart.pop(frozenset((one, other)), None)

    def births(self, place: str) -> int:
        """How many processes have stood at a place."""
        return self._born[place]

    def is_dead(self, name: str) -> bool:
        return name in self._dead

    def unreachable_since(self, one: str, other: str) -> float | None:
        """When `one` lost `other`, if it has."""
        found = self._unreachable(one, other)
        return found[0] if found else None

    def _unreachable(self, one: str, other: str) -> tuple[float, bool] | None:
        if not self._dead and not self._apart:
            return None
        return self._dead.get(other) or self._apart.get(frozenset((one, other)))

    def is_revoked(self, posted: Posted) -> bool:
        """Whether an operation is for memory that was deregistered, or registered anew, since: it cannot land."""
        peer = self._members.get(posted.flight.peer)
        if peer is None:
            return False
        revision, revoked = posted.revoked
        if revision != peer.ranges.revision:
            revoked = self.refusal(posted.flight) is not None
            posted.revoked = peer.ranges.revision, revoked
        return revoked

    # What is carried.

    def carry(self, sender: LoopbackTransport, flight: _Flight) -> None:
        posted = self._taken(sender, flight)
        if posted is None:
            return
        stream, profile = self._stream(sender.name, flight.peer), self.profile
        late = stream.random() < (profile.late if posted.writes else profile.late_reads)
        lands = stream.uniform(*(profile.late_s if late else profile.delay_s))
        told, survives = stream.uniform(*profile.delay_s), stream.random() < 0.5
        spoilt = stream.random() < profile.corrupt and self.spoils
        self.log(lambda: f"{posted} posted{', will be late' if late else ''}")
        self.on_post(posted)
        self.after(lands, lambda: self._arrive(posted, told, survives, spoilt))

    def _taken(self, sender: LoopbackTransport, flight: _Flight) -> Posted | None:
        """An operation that is under way from now on; None if its sender is told at once that the peer is lost."""
        assert isinstance(sender, SimTransport)
        gone = self._unreachable(sender.name, flight.peer)
        if gone is not None and gone[1]:
            flight.landed, flight.error = True, PeerLost(f"{flight.peer} is lost")
            self.wake(sender.name)
            return None
        posted = Posted(sender, flight)
        self.in_flight[posted] = None
        return posted

    def tell(self, sender: str, peer: str, note: bytes) -> None:
        self.on_say(sender, peer, note)
        gone = self._unreachable(sender, peer)
        if gone is None:
            self._say(sender, peer, note)
        elif gone[1]:
            raise PeerLost(f"{peer} is lost: it is closed or cut off")

    def _say(self, sender: str, peer: str, note: bytes) -> None:
        """Draws the same numbers from the stream whatever becomes of the note."""
        stream, channel = self._stream(sender, peer), (sender, peer)
        lost = stream.random() < self.profile.loss
        twice = stream.random() < self.profile.duplicates
        low, high = self.profile.delay_s
        late = 0.4 * stream.random() if stream.random() < self.profile.late_notes else 0.0
        times = [self.now + low + late + (high - low) * stream.random(), self.now + low + stream.random() ** 2]
        if self.profile.ordered:
            times[0] = self._last[channel] = max(times[0], self._last.get(channel, 0.0) + 1e-6)
        elif self.profile.wants_first and any(isinstance(message, wire.Want) for message in messages_of(note)):
            times[0], twice = self.now + self.profile.delay_s[0], False
        if lost:
            self.lost.update(type(message).__name__ for message in messages_of(note))
            self.log(lambda: f"{sender} -> {peer} LOST {text_of(note)}")
        else:
            for time in times[: 1 + twice]:
                self.at(time, lambda: self._hear(sender, peer, note))

    def _hear(self, sender: str, peer: str, note: bytes) -> None:
        receiver = self._members.get(peer)
        if receiver is None or sender in self._dead or self._unreachable(sender, peer):
            return
        self.log(lambda: f"{sender} -> {peer} {text_of(note)}")
        self.heard_at[sender, peer] = self.now
        receiver.inbox.append(Note(sender, note))
        self.wake(peer)

    def _arrive(self, posted: Posted, told: float, survives: bool, spoilt: bool) -> None:
        """Copy the bytes as they are now, tell the target, and some time later the sender."""
        sender, flight = posted.sender, posted.flight
        del self.in_flight[posted]
        dead = sender.name in self._dead
        whole = not dead and self._unreachable(sender.name, flight.peer) is None
        if flight.peer in self._dead or not (whole or survives) or (dead and not posted.writes):
            self.log(lambda: f"{posted} came to nothing")
            flight.error = PeerLost(f"{flight.peer} is lost")
            self.on_end(posted, False)
        elif self.is_revoked(posted):
            self.log(lambda: f"{posted} was refused: its registration is over")
            flight.error = self.refusal(flight)
            self.on_end(posted, False)
        else:
            self.log(lambda: f"{posted} landed{', spoilt' if spoilt else ''}{', its writer dead' if dead else ''}")
            self.on_landing(posted)
            posted.copy()
            if spoilt:
                posted.spoil()
            self.on_end(posted, spoilt)
            if whole and flight.note:
                self._say(sender.name, flight.peer, flight.note)
            elif not whole:
                flight.error = PeerLost(f"{flight.peer} is lost")
        if not dead:
            self.after(told, lambda: self._complete(posted))

    def _complete(self, posted: Posted) -> None:
        posted.flight.landed = True
        self.wake(posted.sender.name)

    def _stream(self, sender: str, peer: str) -> Random:
        key = (sender, peer)
        if key not in self._streams:
            self._streams[key] = Random(f"{self._seed} {sender} {peer}")
        return self._streams[key]


def messages_of(note: bytes) -> list[wire.AnyMessage]:
    return [wire.decode(message) for message in wire.split(note)]


def text_of(note: bytes) -> str:
    try:
        return ", ".join(map(_text, messages_of(note)))
    except ProtocolError as error:
        return str(error)


def _text(message: wire.AnyMessage) -> str:
    if isinstance(message, wire.Hello):
        return "Hello"
    if isinstance(message, wire.Want):
        shown = (message.request, message.generation, message.start, message.stop, message.route.value)
        return f"Want{shown}"
    return str(message)


def _starts(descriptors: Descriptors) -> list[int]:
    table = descriptors.table
    return [
        first + i * stride for first, stride, count in table[:, [ADDRESS, STRIDE, COUNT]].tolist() for i in range(count)
    ]


def _lengths(descriptors: Descriptors) -> list[int]:
    return np.repeat(descriptors.table[:, NBYTES], descriptors.table[:, COUNT]).tolist()
