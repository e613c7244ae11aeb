"""Peers: who is connected, by transport name and by place in an engine's fleet."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from functools import cached_property

from msgspec.structs import replace

from kvmover.errors import PeerRefused, PeerReplaced, PeerUnknown
from kvmover.layout.fleet import Fleet
from kvmover.transfer.peers.processes import PeerProcess
from kvmover.transfer.protocol.chunks import End
from kvmover.transfer.protocol.handshake import Rank


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
class _Incarnation:
    """What was seen of an engine: the fleet of its newest process, the newest generation of that fleet and of any
    fleet before it, and by rank the newest (generation, transport name). `dead` [rank]: the newest generation there
    that this side was told is dead.
    """

    fleet: Fleet
    newest: int
    outdated: int = -1
    ranks: dict[int, tuple[int, str]] = field(default_factory=dict[int, "tuple[int, str]"])
    dead: dict[int, int] = field(default_factory=dict[int, int])


@dataclass(slots=True)
class Peers:
    """The table of connected ranks. A process has one seat, and an older one never gets what a newer one has had.

    A fleet is a value of an engine's generation: a newer process of another fleet takes the seats of all that stand in
    the old one.
    """

    _by_name: dict[str, Peer] = field(default_factory=dict[str, Peer])
    _by_place: dict[tuple[str, int], str] = field(default_factory=dict[tuple[str, int], str])
    _seen: OrderedDict[str, _Incarnation] = field(default_factory=OrderedDict[str, _Incarnation])

    def admit(self, card: Rank, name: str) -> None:
        """Raise PeerRefused where `name` may not sit at the place of `card`, or has another card but for what it has
        registered since, and PeerReplaced where a newer process has been there.
        """
        place, known = card.place, self._by_name.get(name)
        if known is not None and known.card.place != place:
            raise PeerRefused(f"{name} is {known.card.place.text()} and cannot be {place.text()} as well")
        if known is not None and replace(known.card, transport=card.transport, registration=card.registration) != card:
            raise PeerRefused(f"{name}, {place.text()}, has another card than before; its memory cannot have moved")
        seen = self._seen.get(place.engine)
        if seen is None:
            return
        if place.fleet != seen.fleet and place.generation <= seen.newest:
            raise PeerReplaced(
                f"{place.text()}, of {place.fleet}: the engine came back as {seen.fleet}, generation {seen.newest}"
            )
        newest, holder = seen.ranks.get(place.rank, (seen.outdated, ""))
        if place.generation < newest or (place.generation == newest and name != holder):
            raise PeerReplaced(f"{name}, {place.text()}, was replaced by generation {newest} {holder}".rstrip())

    def add(self, peer: Peer) -> tuple[str, ...]:
        """Seat a peer that was admitted, and return the names of those whose seats it took: processes that are over."""
        place = peer.card.place
        seen = self._seen.pop(place.engine, None)
        replaced = [self._by_place.get(place.seat)]
        if seen is None:
            seen = _Incarnation(place.fleet, place.generation)
        elif seen.fleet != place.fleet:
            replaced += [name for (engine, _), name in self._by_place.items() if engine == place.engine]
            seen = _Incarnation(place.fleet, place.generation, seen.newest, dead=seen.dead)
        seen.newest = max(seen.newest, place.generation)
        seen.ranks[place.rank] = place.generation, peer.name
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

    def remove(self, name: str) -> None:
        """Take a peer out, by name. An unknown one is ignored."""
        peer = self._by_name.pop(name, None)
        if peer is None:
            return
        place = peer.card.place.seat
        if self._by_place.get(place) == name:
            del self._by_place[place]

    def sits(self, peer: Peer) -> bool:
        """Whether nobody has taken the peer's seat."""
        return self._by_place.get(peer.card.place.seat) == peer.name

    def get(self, name: str) -> Peer | None:
        """The peer of this name, or None."""
        return self._by_name.get(name)

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

    def bury(self, engine: str, rank: int) -> None:
        """Whoever has sat there is dead, as this side was told."""
        seen = self._seen.get(engine)
        if seen is not None:
            seen.dead[rank] = seen.ranks.get(rank, (seen.outdated, ""))[0]

    def processes(self, engine: str, machine: str) -> tuple[PeerProcess, ...]:
        """What sits at the ranks of an engine now, in their order, as a process on `machine` sees it."""
        cards = [self._by_name[self._by_place[engine, rank]].card for rank in sorted(self.ranks(engine))]
        return tuple(PeerProcess.behind(card, machine, self._seen[engine].dead) for card in cards)

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
