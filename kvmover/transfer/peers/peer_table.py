"""The table of connected peers, by transport name and by rank id."""

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
    """A connected rank: its card, decoded and as received, and its transport name, which is never reused.

    `version`: of the protocol, the highest that both sides speak.
    """

    name: str
    card: Rank
    encoded: bytes
    version: int = 1

    @cached_property
    def end(self) -> End:
        """The peer's side of a lane: fleet, rank and pools of its card."""
        return End(self.card.place.fleet, self.card.place.rank, self.card.pools)


#: Engines whose newest incarnation is remembered, the latest: each takes some 300 bytes and 100 more a rank.
MAX_ENGINES = 65536


@dataclass(slots=True)
class Sitter:
    """The newest process seen at a rank of an engine. `left`: when it was lost, unless it was heard since; it may have
    kept its rank id meanwhile, and be dialled. `process`: on a host that can say whether it has ended.
    """

    rank: int
    generation: int
    name: str
    process: HostProcess | None = None
    left: float | None = None

    def has_had_its_time(self, now: float, linger_s: float) -> bool:
        """Returns True if it was silent for so long that an older process may take its rank id."""
        return self.left is not None and now >= self.left + linger_s


@dataclass(slots=True)
class _Incarnation:
    """The known state of an engine: the fleet of its newest process, the processes at its ranks, and the newest process
    of an earlier fleet, which no rank of this fleet is older than.
    """

    fleet: Fleet
    outdated: Sitter | None = None
    ranks: dict[int, Sitter] = field(default_factory=dict[int, Sitter])


@dataclass(slots=True)
class Peers:
    """The table of connected ranks. A rank id is held by one process. A newer process takes it at once, an older one
    when the holder was lost and silent for `linger_s`, or is known to be dead (`vacate`).

    A fleet belongs to an engine's generation: an admitted process of another fleet takes the rank ids of all processes
    in the old one.
    """

    _by_name: dict[str, Peer] = field(default_factory=dict[str, Peer])
    _ranks: dict[str, dict[int, str]] = field(default_factory=dict[str, "dict[int, str]"])
    _seen: OrderedDict[str, _Incarnation] = field(default_factory=OrderedDict[str, _Incarnation])
    _obituaries: WeakValueDictionary[tuple[str, int], Obituary] = field(
        default_factory=WeakValueDictionary[tuple[str, int], Obituary]
    )

    def rivals(self, place: Place, name: str) -> tuple[Sitter, ...]:
        """Returns processes from which `name` can't take `place`: newer ones, and those of equal generation under
        another name; if the engine's fleet changes, at any rank.
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
        """Raise PeerRefused if `name` has another rank id, or another card except for later registrations, and
        PeerReplaced if a newer process holds the place, or did less than `linger_s` ago.
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
        """Add a peer that was admitted. Returns the names of peers whose rank ids it took, whose processes are over.
        `process`: the peer's, if this host knows it.
        """
        place = peer.card.place
        seen = self._seen.pop(place.engine, None)
        replaced = [self.seated(place.seat)]
        if seen is None:
            seen = _Incarnation(place.fleet)
        elif seen.fleet != place.fleet:
            replaced += self._ranks.get(place.engine, {}).values()
            older = [each.generation for each in seen.ranks.values() if each.generation < place.generation]
            seen = _Incarnation(place.fleet, Sitter(place.rank, max(older), "", left=now) if older else None)
        before = seen.ranks.get(place.rank)
        left = before.left if before is not None and before.name == peer.name else None
        seen.ranks[place.rank] = Sitter(place.rank, place.generation, peer.name, process, left)
        self._seen[place.engine] = seen
        over = tuple(dict.fromkeys(name for name in replaced if name is not None and name != peer.name))
        for name in over:
            self._leave(self._by_name[name].card.place)
        self._ranks.setdefault(place.engine, {})[place.rank] = peer.name
        self._by_name[peer.name] = peer
        self._trim()
        return over

    def _trim(self) -> None:
        """Forget the engine without connected ranks that was seen longest ago."""
        if len(self._seen) > MAX_ENGINES:
            oldest = next((engine for engine in self._seen if engine not in self._ranks), None)
            if oldest is not None:
                del self._seen[oldest]

    def check(self) -> None:
        """Check that each peer has one rank id, and each engine one fleet, in O(peers). Raises AssertionError."""
        names = [(engine, name) for engine, ranks in self._ranks.items() for name in ranks.values()]
        assert len({name for _, name in names}) == len(names), f"a peer has several seats: {self._ranks}"
        assert all(self._ranks.values()), f"an engine without ranks is kept: {self._ranks}"
        fleets = {(engine, self._by_name[name].card.place.fleet) for engine, name in names}
        assert len(fleets) == len({engine for engine, _ in fleets}), f"engines in several fleets: {fleets}"

    def remove(self, name: str, now: float) -> None:
        """Remove a lost peer. An unknown name is ignored."""
        peer = self._by_name.pop(name, None)
        if peer is None:
            return
        place = peer.card.place
        if self.seated(place.seat) == name:
            self._leave(place)
            sitter = self._sitter(place)
            if sitter is not None and sitter.left is None:
                sitter.left = now

    def _leave(self, place: Place) -> None:
        """Free a rank id that is held."""
        ranks = self._ranks[place.engine]
        del ranks[place.rank]
        if not ranks:
            del self._ranks[place.engine]

    def is_back(self, name: str) -> None:
        """Note that a lost peer holds its rank id again, and was heard."""
        sitter = self._sitter(self._by_name[name].card.place)
        if sitter is not None and sitter.name == name:
            sitter.left = None

    def _sitter(self, place: Place) -> Sitter | None:
        """Returns the process seen at a place; None after `vacate`."""
        seen = self._seen.get(place.engine)
        return None if seen is None else seen.ranks.get(place.rank)

    def sits(self, peer: Peer) -> bool:
        """Returns True if the peer still holds its rank id."""
        return self.seated(peer.card.place.seat) == peer.name

    def get(self, name: str) -> Peer | None:
        """Returns the peer of this name, or None."""
        return self._by_name.get(name)

    def names(self) -> tuple[str, ...]:
        """Returns the transport names of all connected peers."""
        return tuple(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def __getitem__(self, name: str) -> Peer:
        return self._by_name[name]

    def at(self, engine: str, rank: int) -> Peer:
        """Returns the peer at a rank id. Raises PeerUnknown if no peer is connected there."""
        name = self.seated((engine, rank))
        if name is None:
            raise PeerUnknown(f"rank {rank} of {engine} is not connected")
        return self._by_name[name]

    def vacate(self, engine: str, ranks: Iterable[int]) -> None:
        """Forget the processes seen at some ranks of an engine: a process of any generation may take them."""
        seen = self._seen.get(engine)
        if seen is None:
            return
        for rank in ranks:
            seen.ranks.pop(rank, None)
        if not seen.ranks:
            del self._seen[engine]

    def seen(self, engine: str) -> frozenset[int]:
        """Returns the ranks of an engine at which a process was seen, connected or not."""
        seen = self._seen.get(engine)
        return frozenset() if seen is None else frozenset(seen.ranks)

    def bury(self, engine: str, rank: int) -> None:
        """Declare all processes that held a rank id dead."""
        obituary = self._obituaries.pop((engine, rank), None)
        if obituary is not None:
            obituary.is_told = True
        self.vacate(engine, (rank,))

    def processes(self, engine: str, machine: str) -> tuple[PeerProcess, ...]:
        """Returns the processes at the connected ranks of an engine, by rank, as seen from `machine`."""
        found = list[PeerProcess]()
        for rank in sorted(self.ranks(engine)):
            obituary = self._obituaries.setdefault((engine, rank), Obituary())
            found.append(PeerProcess.behind(self.at(engine, rank).card, machine, obituary))
        return tuple(found)

    def seated(self, seat: tuple[str, int]) -> str | None:
        """Returns the name of the peer at a rank id, or None."""
        engine, rank = seat
        return self._ranks.get(engine, {}).get(rank)

    def ranks(self, engine: str) -> frozenset[int]:
        """Returns the connected ranks of an engine."""
        return frozenset(self._ranks.get(engine, ()))

    def fleet(self, engine: str) -> Fleet:
        """Returns the fleet of an engine with a connected rank. Raises PeerUnknown."""
        for name in self._ranks.get(engine, {}).values():
            return self._by_name[name].card.place.fleet
        raise PeerUnknown(f"no rank of {engine} is connected")
