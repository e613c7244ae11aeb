"""The liveness of peers: which to ping, and which have been silent for too long. Pure: peers, times and duties.

Two kinds of peers are watched: those from which a reply is awaited, and those that were greeted and have been silent
since, whose Hello may be lost and is resent. Other peers are checked every `idle_s`. Silence is counted from the first
unanswered ping, or from the first Hello that is resent, so that a side that was suspended for a while blames no peer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum

#: Seconds between checks of a connected peer from which no reply is awaited. One that was silent for one to two times
#: as long is pinged, so that dead peers are found.
IDLE_S = 15.0


class Duty(StrEnum):
    """The action due for a peer."""

    GREET = "greet"
    PING = "ping"
    LOSE = "lose"


@dataclass(slots=True)
class Liveness:
    """The timers of peers, in seconds of the mover's clock. `_awaited`: replies awaited from each peer. `_next`: the
    earliest next ping of a peer, so that short requests cost no ping each. `_quiet`: the next idle check of a connected
    peer, which is pinged if it was silent since the last; `_spoke`: peers that were not.
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
        """The peers from which a reply is awaited."""
        return self._awaited.keys()

    def awaits(self, peer: str) -> bool:
        """Add one awaited reply. Returns True if it is the peer's first: set its timer to `due`."""
        awaited = self._awaited[peer] = self._awaited.get(peer, 0) + 1
        return awaited == 1

    def awaits_no_more(self, peer: str) -> None:
        """Remove one awaited reply. A peer without any may be silent."""
        self._awaited[peer] -= 1
        if self._awaited[peer] <= 0:
            for table in (self._awaited, self._unanswered):
                table.pop(peer, None)  # `_next` stays: a ping isn't sent sooner than it

    def heard(self, peer: str) -> None:
        """Note any message of a peer."""
        self._unanswered.pop(peer, None)
        self._greeted.pop(peer, None)
        if peer in self._quiet:
            self._spoke.add(peer)

    def seated(self, peer: str, now: float) -> None:
        """Start the idle checks of a connected peer."""
        self._quiet.setdefault(peer, now + self.idle_s)

    def is_greeted(self, peer: str) -> bool:
        """Returns True for a peer that was greeted and has been silent since."""
        return peer in self._greeted

    def greeted(self, peer: str, now: float) -> None:
        """Note that Hello was queued for a peer, which drops other messages until it has it.

        Its silence is counted only from the first resend: the Hello leaves with the next poll, which may be late.
        """
        self._greeted[peer] = math.inf, now + self.ping_s

    def forget(self, peer: str) -> None:
        """Stop greeting and checking a peer that is gone."""
        self._greeted.pop(peer, None)
        self._next.pop(peer, None)
        self._quiet.pop(peer, None)
        self._spoke.discard(peer)
        if peer not in self._awaited:
            self._unanswered.pop(peer, None)

    def due(self, peer: str) -> float:
        """Returns the next time at which `look` has work for a peer; math.inf: no work until another call."""
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
        """Returns a peer's duty now, or None. LOSE is returned once."""
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
