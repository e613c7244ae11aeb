"""Peers: who is connected, by transport name and by place in an engine's fleet."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from weakref import WeakValueDictionary

from msgspec.structs import replace

from kvmover.errors import PeerRefused, PeerReplaced, PeerUnknown
from kvmover.layout.fleet import Fleet
from kvmover.shared_memory import HostProcess
from kvmover.transfer.peers.processes import Obituary, PeerProcess
from kvmover.transfer.protocol.chunks import End
from kvmover.transfer.protocol.handshake import Place, Rank


@dataclass(frozen=True, eq=False)
class Peer:
    """A connected rank: its card, as read and as it came, and its transport name, which no later incarnation has."""

    name: str
    card: Rank
    encoded: bytes

    @cached_property
    def end(self) -> End:
        """Its side of a lane: fleet, rank and pools, as its card has them."""
        return End(self.card.place.fleet, self.card.place.rank, self.card.pools)


#: Engines whose newest incarnation is remembered, the latest ones: each costs some 300 bytes and 100 more a rank.
MAX_ENGINES = 65536


@dataclass(slots=True)
class Sitter:
    """The newest process that was seen at a rank of an engine. `left`: when it was lost, if it was not heard since; it
    may have its seat, and be dialled. `process`: where it runs on a machine that can say whether it has ended.
    """

    rank: int
    generation: int
    name: str
    process: HostProcess | None = None
    left: float | None = None

    def has_had_its_time(self, now: float, linger_s: float) -> bool:
        """Returns whether it was not heard for so long that its seat goes to whoever answers."""
        return self.left is not None and now >= self.left + linger_s


@dataclass(slots=True)
class _Incarnation:
    """An engine as it was seen: the fleet of its newest process, who was seen at its ranks, and the newest of those
    that stood in another fleet before, which no rank of this fleet is older than.
    """

    fleet: Fleet
    outdated: Sitter | None = None
    ranks: dict[int, Sitter] = field(default_factory=dict[int, Sitter])


@dataclass(slots=True)
class Peers:
    """The table of connected ranks. A process has one seat, which goes to a newer one at once, and to an older one when
    whoever had it was lost and not heard for `linger_s`, or is known to be dead (`vacate`).

    A fleet is a value of an engine's generation: a process of another fleet that gets a seat takes those of all that
    stand in the old one.
    """

    _by_name: dict[str, Peer] = field(default_factory=dict[str, Peer])
    _by_place: dict[tuple[str, int], str] = field(default_factory=dict[tuple[str, int], str])
    _seen: OrderedDict[str, _Incarnation] = field(default_factory=OrderedDict[str, _Incarnation])
    _obituaries: WeakValueDictionary[tuple[str, int], Obituary] = field(
        default_factory=WeakValueDictionary[tuple[str, int], Obituary]
    )

    def rivals(self, place: Place, name: str) -> tuple[Sitter, ...]:
        """Processes that `name` cannot take `place` from while they are there: newer ones, and as new ones of another
        name; of an engine that stood in another fleet, at any rank.
        """
        seen = self._seen.get(place.engine)
        if seen is None:
            return ()
        if place.fleet != seen.fleet:
            return tuple(each for each in seen.ranks.values() if each.generation >= place.generation)
        sitter = seen.ranks.get(place.rank, seen.outdated)
        if sitter is None or (place.generation, name) == (sitter.generation, sitter.name):
            return ()
        return (sitter,) if place.generation <= sitter.generation else ()

    def admit(self, card: Rank, name: str, now: float, linger_s: float) -> None:
        """Raise PeerRefused where `name` may not sit at the place of `card`, or has another card but for what it has
        registered since, and PeerReplaced where a newer process is there, or was less than `linger_s` ago.
        """
        place, known = card.place, self._by_name.get(name)
        if known is not None and known.card.place != place:
            raise PeerRefused(f"{name} is {known.card.place.text()} and cannot be {place.text()} as well")
        if known is not None and replace(known.card, transport=card.transport, registration=card.registration) != card:
            raise PeerRefused(f"{name}, {place.text()}, has another card than before; its memory cannot have moved")
        there = [each for each in self.rivals(place, name) if not each.has_had_its_time(now, linger_s)]
        if not there:
            return
        newest, seen = max(there, key=lambda each: each.generation), self._seen[place.engine]
        empty = "" if newest.left is None else f"; its seat is free in {newest.left + linger_s - now:.0f} s"
        if place.fleet != seen.fleet:
            came_back = f"the engine came back as {seen.fleet}, generation {newest.generation}"
            raise PeerReplaced(f"{place.text()}, of {place.fleet}: {came_back}{empty}")
        by = f"generation {newest.generation} {newest.name}".rstrip()
        raise PeerReplaced(f"{name}, {place.text()}, was replaced by {by}{empty}")

    def add(self, peer: Peer, now: float, process: HostProcess | None = None) -> tuple[str, ...]:
        """Seat a peer that was admitted, and return the names of those whose seats it took: processes that are over.
        `process`: that of the peer, where this host knows of it.
        """
        place = peer.card.place
        seen = self._seen.pop(place.engine, None)
        replaced = [self._by_place.get(place.seat)]
        if seen is None:
            seen = _Incarnation(place.fleet)
        elif seen.fleet != place.fleet:
            replaced += [name for (engine, _), name in self._by_place.items() if engine == place.engine]
            older = [each.generation for each in seen.ranks.values() if each.generation < place.generation]
            seen = _Incarnation(place.fleet, Sitter(place.rank, max(older), "", left=now) if older else None)
        before = seen.ranks.get(place.rank)
        left = before.left if before is not None and before.name == peer.name else None
        seen.ranks[place.rank] = Sitter(place.rank, place.generation, peer.name, process, left)
        self._seen[place.engine] = seen
        over = tuple(dict.fromkeys(name for name in replaced if name is not None and name != peer.name))
        for name in over:
            del self._by_place[self._by_name[name].card.place.seat]
        self._by_place[place.seat] = peer.name
        self._by_name[peer.name] = peer
        self._trim()
        return over

    def _trim(self) -> None:
        """Forget the engine that was seen longest ago, of those that nobody is connected of."""
        if len(self._seen) > MAX_ENGINES:
            connected = {engine for engine, _ in self._by_place}
            oldest = next((engine for engine in self._seen if engine not in connected), None)
            if oldest is not None:
                del self._seen[oldest]

    def check(self) -> None:
        """Raise AssertionError where somebody sits twice, or ranks of one engine stand in two fleets. O(peers)."""
        assert len({*self._by_place.values()}) == len(self._by_place), f"a peer has several seats: {self._by_place}"
        fleets = {(engine, self._by_name[name].card.place.fleet) for (engine, _), name in self._by_place.items()}
        assert len(fleets) == len({engine for engine, _ in fleets}), f"engines in several fleets: {fleets}"

    def remove(self, name: str, now: float) -> None:
        """Take a peer out, by name: it is lost. An unknown one is ignored."""
        peer = self._by_name.pop(name, None)
        if peer is None:
            return
        place = peer.card.place
        if self._by_place.get(place.seat) == name:
            del self._by_place[place.seat]
            sitter = self._sitter(place)
            if sitter is not None and sitter.left is None:
                sitter.left = now

    def is_back(self, name: str) -> None:
        """A peer that was lost has its seat again, and was heard."""
        sitter = self._sitter(self._by_name[name].card.place)
        if sitter is not None and sitter.name == name:
            sitter.left = None

    def _sitter(self, place: Place) -> Sitter | None:
        """Returns the process that was seen there; None where `vacate` was called since."""
        seen = self._seen.get(place.engine)
        return None if seen is None else seen.ranks.get(place.rank)

    def sits(self, peer: Peer) -> bool:
        """Whether nobody has taken the peer's seat."""
        return self._by_place.get(peer.card.place.seat) == peer.name

    def get(self, name: str) -> Peer | None:
        """The peer of this name, or None."""
        return self._by_name.get(name)

    def names(self) -> tuple[str, ...]:
        """Transport names of all connected peers."""
        return tuple(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def __getitem__(self, name: str) -> Peer:
        return self._by_name[name]

    def at(self, engine: str, rank: int) -> Peer:
        """The peer at a place. Raises PeerUnknown when nobody was connected there."""
        name = self._by_place.get((engine, rank))
        if name is None:
            raise PeerUnknown(f"rank {rank} of {engine} is not connected")
        return self._by_name[name]

    def vacate(self, engine: str, ranks: Iterable[int]) -> None:
        """Forget who was seen at some ranks of an engine: whoever comes may sit there, however old it is."""
        seen = self._seen.get(engine)
        if seen is None:
            return
        for rank in ranks:
            seen.ranks.pop(rank, None)
        if not seen.ranks:
            del self._seen[engine]

    def seen(self, engine: str) -> frozenset[int]:
        """Ranks of an engine at which somebody was seen, connected or not."""
        seen = self._seen.get(engine)
        return frozenset() if seen is None else frozenset(seen.ranks)

    def bury(self, engine: str, rank: int) -> None:
        """Whoever has sat there is dead, as this side was told."""
        obituary = self._obituaries.pop((engine, rank), None)
        if obituary is not None:
            obituary.is_told = True
        self.vacate(engine, (rank,))

    def processes(self, engine: str, machine: str) -> tuple[PeerProcess, ...]:
        """What sits at the ranks of an engine now, in their order, as a process on `machine` sees it."""
        found = list[PeerProcess]()
        for rank in sorted(self.ranks(engine)):
            obituary = self._obituaries.setdefault((engine, rank), Obituary())
            found.append(PeerProcess.behind(self.at(engine, rank).card, machine, obituary))
        return tuple(found)

    def seated(self, seat: tuple[str, int]) -> str | None:
        """Who sits at a place, by name."""
        return self._by_place.get(seat)

    def ranks(self, engine: str) -> frozenset[int]:
        """Numbers of the ranks of an engine that are connected."""
        return frozenset(rank for known, rank in self._by_place if known == engine)

    def fleet(self, engine: str) -> Fleet:
        """The fleet of an engine any of whose ranks is connected."""
        for (known, _), name in self._by_place.items():
            if known == engine:
                return self._by_name[name].card.place.fleet
        raise PeerUnknown(f"no rank of {engine} is connected")
