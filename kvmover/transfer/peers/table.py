"""Peers: who is connected, by transport name and by place in an engine's fleet."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmover.errors import PeerUnknown
from kvmover.layout.fleet import Fleet
from kvmover.transfer.protocol.handshake import Rank
from kvmover.transfer.protocol.lane import End


@dataclass(frozen=True, slots=True, eq=False)
class Peer:
    """A connected rank: its card, as read and as it came, and its transport name, which no later incarnation has."""

    name: str
    card: Rank
    encoded: bytes

    @property
    def end(self) -> End:
        return End(self.card.place.fleet, self.card.place.rank, self.card.pools)


@dataclass(slots=True)
class Peers:
    """The table of connected ranks."""

    _by_name: dict[str, Peer] = field(default_factory=dict[str, Peer])
    _by_place: dict[tuple[str, int], str] = field(default_factory=dict[tuple[str, int], str])

    def add(self, peer: Peer) -> str | None:
        """Seat a peer, and return the name of the one that sat there: an incarnation that is over."""
        place = peer.card.place.seat
        before = self._by_place.get(place)
        self._by_place[place] = peer.name
        self._by_name[peer.name] = peer
        return before if before != peer.name else None

    def remove(self, name: str) -> None:
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

    def seated(self, seat: tuple[str, int]) -> str | None:
        """Who sits at a place, by name."""
        return self._by_place.get(seat)

    def ranks(self, engine: str) -> frozenset[int]:
        return frozenset(rank for known, rank in self._by_place if known == engine)

    def fleet(self, engine: str) -> Fleet:
        """The fleet of an engine any of whose ranks is connected."""
        for (known, _), name in self._by_place.items():
            if known == engine:
                return self._by_name[name].card.place.fleet
        raise PeerUnknown(f"no rank of {engine} is connected")
