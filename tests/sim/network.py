"""A simulated wire with a virtual clock: seeded delay, loss, duplication and reordering, and writes that land late.

The rules at either end are those of the loopback transport. What happens between post and landing is decided here, by
streams of random numbers of their own for every pair of processes, so that a seed replays in any process.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import numpy.typing as npt

from kvmover.errors import PeerLost, ProtocolError
from kvmover.transfer import wire
from kvmover.transport.base import ADDRESS, COUNT, NBYTES, STRIDE, Descriptors, Note
from kvmover.transport.loopback import LoopbackNetwork, LoopbackTransport, _Flight


@dataclass(frozen=True, slots=True)
class Profile:
    """What the wire does to what it carries. Probabilities are for each note and each write."""

    name: str
    ordered: bool = True
    loss: float = 0.0
    duplicates: float = 0.0
    late_writes: float = 0.08
    delay_s: tuple[float, float] = (0.001, 0.02)
    late_s: tuple[float, float] = (0.2, 2.5)
    wants_first: bool = False


#: What NIXL does: notes of one peer stay in order and none is lost while the peer lives; a write may take for ever.
DEFAULT = Profile("default")
#: What nobody promises, and nothing may be corrupted by.
REORDERED = Profile("reordered", ordered=False, loss=0.03, duplicates=0.15, late_writes=0.1, delay_s=(0.001, 0.15))
#: As before, but that no message overtakes the Want that it follows, and no Want comes twice.
HOSTILE = replace(REORDERED, name="hostile", wants_first=True)
PROFILES = {profile.name: profile for profile in (DEFAULT, HOSTILE, REORDERED)}


class SimTransport(LoopbackTransport):
    """One process's end of a SimNetwork. `alias` is its name in the schedule, the same in every run of a seed."""

    def __init__(self, network: SimNetwork, place: str) -> None:
        self.alias = network.alias(place)
        super().__init__(network, place, network.clock)


@dataclass(slots=True, eq=False)
class Posted:
    """A write under way. `before` is what it was to carry when it was posted."""

    sender: SimTransport
    flight: _Flight
    before: bytes

    @property
    def message(self) -> wire.Chunk | None:
        message = wire.decode(self.flight.note)
        return message if isinstance(message, wire.Chunk) else None


class SimNetwork(LoopbackNetwork):
    """Where simulated transports meet, and the clock that they share. `step` lets the next thing happen."""

    def __init__(self, seed: int, profile: Profile = DEFAULT) -> None:
        super().__init__()
        self.profile = profile
        self.now = 1000.0
        self.in_flight: list[Posted] = []
        self.wake: Callable[[str], None] = lambda name: None
        self.before_landing: Callable[[Posted], None] = lambda posted: None
        self.trace: list[str] | None = None
        self._seed = seed
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._streams: dict[tuple[str, str], Random] = {}
        self._last: dict[tuple[str, str], float] = {}
        self._born: dict[str, int] = {}
        self._aliases: dict[str, str] = {}
        self._dead: set[str] = set()
        self._links_cut: set[frozenset[str]] = set()

    def clock(self) -> float:
        return self.now

    def alias(self, place: str) -> str:
        """p0, then p0'2 after its first restart."""
        self._born[place] = born = self._born.get(place, 0) + 1
        return place if born == 1 else f"{place}'{born}"

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
        assert isinstance(transport, SimTransport)
        super().join(transport)
        self._aliases[transport.name] = transport.alias

    def crash(self, name: str) -> None:
        """The process is gone: what it said vanishes, what it wrote may land or not, and to its peers it is lost."""
        self._dead.add(name)
        self.leave(name)

    def cut_link(self, one: str, other: str) -> None:
        """Two live processes lose each other for ever; what was posted before may still land."""
        self._links_cut.add(frozenset((one, other)))

    def carry(self, sender: LoopbackTransport, flight: _Flight) -> None:
        assert isinstance(sender, SimTransport)
        if flight.peer not in self._members or self._apart(sender.name, flight.peer):
            flight.landed, flight.error = True, PeerLost(f"{flight.peer} is lost")
            self.wake(sender.name)
            return
        stream = self._stream(sender.name, flight.peer)
        posted = Posted(sender, flight, contents(flight.local))
        self.in_flight.append(posted)
        late = stream.random() < self.profile.late_writes
        lands = stream.uniform(*(self.profile.late_s if late else self.profile.delay_s))
        told, survives = stream.uniform(*self.profile.delay_s), stream.random() < 0.5
        self.log(lambda: f"{self._who(posted)} posted{', will be late' if late else ''}")
        self.after(lands, lambda: self._arrive(posted, told, survives))

    def tell(self, sender: str, peer: str, note: bytes) -> None:
        if peer not in self._members or self._apart(sender, peer):
            raise PeerLost(f"{peer} is lost: it is closed or cut off")
        self._say(sender, peer, note)

    def _say(self, sender: str, peer: str, note: bytes) -> None:
        """Draws the same numbers from the stream whatever becomes of the note."""
        stream, channel = self._stream(sender, peer), (sender, peer)
        lost = stream.random() < self.profile.loss
        twice = stream.random() < self.profile.duplicates
        times = [self.now + stream.uniform(*self.profile.delay_s) for _ in range(2)]
        times[1] += stream.uniform(0, 0.5)
        if self.profile.ordered:
            times[0] = self._last[channel] = max(times[0], self._last.get(channel, 0.0) + 1e-6)
        elif self.profile.wants_first and isinstance(wire.decode(note), wire.Want):
            times[0], twice = self.now + self.profile.delay_s[0], False
        if lost:
            self.log(lambda: f"{self._aliases[sender]} -> {self._aliases[peer]} LOST {text_of(note)}")
        else:
            for time in times[: 1 + twice]:
                self.at(time, lambda: self._hear(sender, peer, note))

    def _hear(self, sender: str, peer: str, note: bytes) -> None:
        receiver = self._members.get(peer)
        if receiver is None or sender in self._dead or self._apart(sender, peer):
            return
        self.log(lambda: f"{self._aliases[sender]} -> {self._aliases[peer]} {text_of(note)}")
        receiver.inbox.append(Note(sender, note))
        self.wake(peer)

    def _arrive(self, posted: Posted, told: float, survives: bool) -> None:
        """Copy the bytes as they are now, tell the target, and some time later the sender."""
        sender, flight = posted.sender, posted.flight
        self.in_flight.remove(posted)
        dead, target = sender.name in self._dead, self._members.get(flight.peer)
        if target is None or (dead and not survives):
            self.log(lambda: f"{self._who(posted)} came to nothing")
            flight.error = PeerLost(f"{flight.peer} is lost")
        else:
            self.log(lambda: f"{self._who(posted)} landed{', its writer dead' if dead else ''}")
            self.before_landing(posted)
            for to, source, nbytes in zip(
                starts(flight.remote), starts(flight.local), lengths(flight.local), strict=True
            ):
                ctypes.memmove(to, source, nbytes)
            if not dead and not self._apart(sender.name, flight.peer):
                self._say(sender.name, flight.peer, flight.note)
        self.after(told, lambda: self._complete(posted))

    def _complete(self, posted: Posted) -> None:
        posted.flight.landed = True
        self.wake(posted.sender.name)

    def _apart(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self._links_cut

    def _stream(self, sender: str, peer: str) -> Random:
        key = (self._aliases[sender], self._aliases[peer])
        if key not in self._streams:
            self._streams[key] = Random(f"{self._seed} {key[0]} {key[1]}")
        return self._streams[key]

    def _who(self, posted: Posted) -> str:
        peer = self._aliases[posted.flight.peer]
        return f"{posted.sender.alias} => {peer} write of {text_of(posted.flight.note)}"


def text_of(note: bytes) -> str:
    try:
        message = wire.decode(note)
    except ProtocolError as error:
        return str(error)
    if isinstance(message, wire.Hello):
        return "Hello"
    if isinstance(message, wire.Want):
        shown = (message.request, message.generation % 10**6, message.start, message.stop, message.route.value)
        return f"Want{shown}"
    return str(message)


def starts(descriptors: Descriptors) -> list[int]:
    table = descriptors.table
    return [
        first + i * stride for first, stride, count in table[:, [ADDRESS, STRIDE, COUNT]].tolist() for i in range(count)
    ]


def lengths(descriptors: Descriptors) -> list[int]:
    return np.repeat(descriptors.table[:, NBYTES], descriptors.table[:, COUNT]).tolist()


def contents(descriptors: Descriptors) -> bytes:
    pairs = zip(starts(descriptors), lengths(descriptors), strict=True)
    return b"".join(ctypes.string_at(start, nbytes) for start, nbytes in pairs)


def bytes_of(descriptors: Descriptors) -> npt.NDArray[np.int64]:
    """Every address that a list of runs covers."""
    pairs = zip(starts(descriptors), lengths(descriptors), strict=True)
    return np.concatenate([np.arange(start, start + nbytes) for start, nbytes in pairs])
