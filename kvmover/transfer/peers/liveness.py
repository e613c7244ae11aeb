"""Liveness: which peers to ping, and which have been silent for too long. Pure: peers, times, and what to do.

Only peers that something is awaited from are watched, and those that were greeted and have not been heard since: a
Hello that is lost is said again. Silence is counted from the first ping that nothing answers, so that a side that was
itself not running for a while blames nobody.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass(slots=True)
class Liveness:
    """Times in seconds, of which the mover says `now`."""

    ping_s: float
    silence_s: float
    _next: dict[str, float] = field(default_factory=dict[str, float])
    _unanswered: dict[str, float] = field(default_factory=dict[str, float])
    _greeted: dict[str, tuple[float, float]] = field(default_factory=dict[str, "tuple[float, float]"])

    def heard(self, peer: str) -> None:
        """Anything at all, from a peer."""
        self._unanswered.pop(peer, None)
        self._greeted.pop(peer, None)

    def greeted(self, peer: str, now: float) -> None:
        """A peer was told of us, and drops whatever we say until it knows."""
        self._greeted[peer] = now, now + self.ping_s

    def forget(self, peer: str) -> None:
        """A peer is gone: it is not greeted any more."""
        self._greeted.pop(peer, None)

    def strangers(self, now: float) -> tuple[list[str], list[str]]:
        """(peers to greet again, peers that are lost), of those that have not been heard since they were greeted."""
        lost = [peer for peer, (since, _) in self._greeted.items() if now - since >= self.silence_s]
        for peer in lost:
            del self._greeted[peer]
        again = [peer for peer, (_, due) in self._greeted.items() if now >= due]
        for peer in again:
            self._greeted[peer] = self._greeted[peer][0], now + self.ping_s
        return again, lost

    def due(self, awaited: Collection[str], now: float) -> tuple[list[str], list[str]]:
        """(peers to ping, peers that are lost), of those that something is awaited from."""
        for table in (self._next, self._unanswered):
            for peer in table.keys() - set(awaited):
                del table[peer]
        lost = [peer for peer, since in self._unanswered.items() if now - since >= self.silence_s]
        ping = [peer for peer in awaited if self._next.get(peer, now) <= now and peer not in lost]
        for peer in ping:
            self._next[peer] = now + self.ping_s
            self._unanswered.setdefault(peer, now)
        for peer in lost:
            del self._unanswered[peer]
        return ping, lost
