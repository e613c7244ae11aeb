"""Liveness: which peers to ping, and which have been silent for too long. Pure: peers, times, and what to do.

Peers that something is awaited from are watched, and those that were greeted and have not been heard since: a Hello
that is lost is said again. The others are looked at once in a while. Silence is counted from the first ping that
nothing answers, or from the first Hello that is said again, so that a side that was itself not running for a while
blames nobody.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum

#: How often a seated peer is looked at though nothing is awaited from it. One that was silent for one to two times as
#: long is pinged: so it is found out who is dead.
IDLE_S = 15.0


class Duty(StrEnum):
    """What a peer's turn is for."""

    GREET = "greet"
    PING = "ping"
    LOSE = "lose"


@dataclass(slots=True)
class Liveness:
    """Times in seconds, of which the mover says `now`. `_awaited`: how many things are awaited from each peer. `_next`:
    when one that something is or was awaited from may be pinged, so that short requests cost no ping each. `_quiet`:
    when a seated peer is looked at though nothing is awaited from it, every `idle_s`; it is pinged if it did not speak
    since. `_spoke`: seated peers that have.
    """

    ping_s: float
    silence_s: float
    idle_s: float = IDLE_S
    _awaited: Counter[str] = field(default_factory=Counter[str])
    _next: dict[str, float] = field(default_factory=dict[str, float])
    _unanswered: dict[str, float] = field(default_factory=dict[str, float])
    _greeted: dict[str, tuple[float, float]] = field(default_factory=dict[str, "tuple[float, float]"])
    _quiet: dict[str, float] = field(default_factory=dict[str, float])
    _spoke: set[str] = field(default_factory=set[str])

    @property
    def awaited(self) -> Collection[str]:
        """Peers that something is awaited from."""
        return self._awaited.keys()

    def awaits(self, peer: str) -> bool:
        """Something more is awaited from a peer; whether nothing was before, so that it is due when `due` says."""
        self._awaited[peer] += 1
        return self._awaited[peer] == 1

    def awaits_no_more(self, peer: str) -> None:
        """One thing less is awaited from a peer. From whom nothing is awaited may be silent."""
        self._awaited[peer] -= 1
        if self._awaited[peer] <= 0:
            for table in (self._awaited, self._unanswered):
                table.pop(peer, None)  # and is pinged no sooner when something is awaited again

    def heard(self, peer: str) -> None:
        """Anything at all, from a peer."""
        self._unanswered.pop(peer, None)
        self._greeted.pop(peer, None)
        if peer in self._quiet:
            self._spoke.add(peer)

    def seated(self, peer: str, now: float) -> None:
        """A peer has a seat: it is looked at from now on."""
        self._quiet.setdefault(peer, now + self.idle_s)

    def is_greeted(self, peer: str) -> bool:
        """Returns whether a peer was greeted and has said nothing since."""
        return peer in self._greeted

    def greeted(self, peer: str, now: float) -> None:
        """A peer was told of us, and drops whatever we say until it knows.

        Its silence is not counted yet: what was said leaves with the next poll, and that may be long in coming.
        """
        self._greeted[peer] = math.inf, now + self.ping_s

    def forget(self, peer: str) -> None:
        """A peer is gone: it is not greeted any more, nor looked at."""
        self._greeted.pop(peer, None)
        self._next.pop(peer, None)
        self._quiet.pop(peer, None)
        self._spoke.discard(peer)
        if peer not in self._awaited:
            self._unanswered.pop(peer, None)

    def due(self, peer: str) -> float:
        """Before this time `look` has nothing to do for a peer; math.inf: not before something else happens."""
        due = self._quiet.get(peer, math.inf)
        if peer in self._greeted:
            since, again = self._greeted[peer]
            due = min(due, again, since + self.silence_s)
        if peer in self._awaited or peer in self._unanswered:
            due = min(due, self._next.get(peer, -math.inf))
        if peer in self._unanswered:
            due = min(due, self._unanswered[peer] + self.silence_s)
        return due

    def look(self, peer: str, now: float) -> Duty | None:
        """What to do for a peer now. One that is to be lost is blamed once."""
        for since in (self._greeted.get(peer, (math.inf, now))[0], self._unanswered.get(peer, math.inf)):
            if now >= since + self.silence_s:
                self._greeted.pop(peer, None)
                self._unanswered.pop(peer, None)
                if peer in self._awaited:
                    self._next[peer] = now + self.ping_s
                return Duty.LOSE
        if peer in self._greeted and now >= self._greeted[peer][1]:
            self._greeted[peer] = min(now, self._greeted[peer][0]), now + self.ping_s
            return Duty.GREET
        is_waited_for = peer in self._awaited or peer in self._unanswered
        if now >= self._quiet.get(peer, math.inf):
            self._quiet[peer] = now + self.idle_s
            is_waited_for |= peer not in self._spoke
            self._spoke.discard(peer)
        if is_waited_for and now >= self._next.get(peer, now):
            self._next[peer] = now + self.ping_s
            self._unanswered.setdefault(peer, now)
            return Duty.PING
        return None
