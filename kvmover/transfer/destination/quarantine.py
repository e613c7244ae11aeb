"""Until when a peer may write into this rank: write leases, and the quarantine of what it may still write. Pure.

Clocks of two hosts are never compared. A source stamps what it says; the newest stamp goes back with what it is
granted, and on its clock the permission ends `lease_s` after that stamp. The stamp was taken before it was heard here.
So on our clock nothing is posted from `lease_s` after it was heard, and nothing lands from `linger_s` after that:
however long the source is stopped, whether or not it is replaced, and without a word from it.

A stamp that was heard at 100.0 s and echoed at 100.4 s lets its source post until 105.0 s at the latest, and what it
posted then has landed by 145.0 s, with a `lease_s` of 5 and a `linger_s` of 40.

A region or a page of an ended attempt is quarantined. It is given back when the very process that may write it says
that it has drained, or when its lease is over and nothing that it posted before can land. Regions also when the peer is
lost and their memory was registered anew (see `memory.registrations`). Pages that a process of this host copies into by
itself wait for no clock: a copy that was begun under a lease ends when its process gets the time to, or when it dies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from kvmover.transfer.protocol.wire import WriteLease
from kvmover.transfer.result import Transfer

#: How much faster than a source's clock ours may run. Clocks that NTP disciplines differ by at most 1.001.
CLOCK_DRIFT = 1.01


@dataclass(slots=True, eq=False)
class _Lent:
    """The newest stamp of a source, when it was heard, its term, and when all leases that it was given are over."""

    term: int
    stamp_us: int
    heard: float
    over: float = 0.0


@dataclass(slots=True, eq=False)
class WriteLeases:
    """Leases by source, the peer's name. Times in seconds of our clock. `term` is of the next source that is heard."""

    lease_s: float
    linger_s: float
    term: int = 1
    _lent: dict[str, _Lent] = field(default_factory=dict[str, _Lent])
    _next: float = 0.0

    def heard(self, peer: str, stamp_us: int, now: float) -> None:
        """A stamp of a source. One that is older than another changes nothing."""
        lent = self._lent.setdefault(peer, _Lent(self.term, 0, now))
        if stamp_us > lent.stamp_us:
            lent.stamp_us, lent.heard = stamp_us, now

    def renewed(self, peer: str) -> WriteLease:
        """What to tell a source with what it is granted, or with a ping."""
        lent = self._lent.get(peer)
        if lent is None:
            return WriteLease(self.term)
        lent.over = max(lent.over, lent.heard + self.lease_s * CLOCK_DRIFT)
        return WriteLease(lent.term, lent.stamp_us, int(self.lease_s * 1e6))

    def retire(self, peer: str) -> float:
        """Void all that a source was granted. Returns the time from which nothing of it can land any more."""
        self.term += 1
        lent = self._lent.get(peer)
        if lent is None:
            return 0.0
        lent.term = self.term
        return lent.over + self.linger_s

    def expire(self, now: float) -> None:
        """Forget sources whose leases ended so long ago that nothing of them can land. They get a later term."""
        if now < self._next:
            return
        self._next = now + self.lease_s
        past = [
            peer
            for peer, lent in self._lent.items()
            if now >= max(lent.heard + self.lease_s * CLOCK_DRIFT, lent.over) + self.linger_s
        ]
        for peer in past:
            del self._lent[peer]
        self.term += bool(past)

    def __len__(self) -> int:
        return len(self._lent)


#: Between two questions to a peer whether it has drained at last.
ASK_S = 1.0


#: A peer by its transport name, and an attempt.
Key = tuple[str, str, int]


@dataclass(slots=True, eq=False)
class Isolated:
    """What one peer's writes, or our own `reads` from it, may still touch: arena regions and a transfer's pages.

    `seat`: the engine and rank of the peer. `until`: when it ends by itself; a read does when the transport says so.
    `lives`: whether the process of this host still runs that copies into them by itself.
    """

    reason: str
    seat: tuple[str, int]
    until: float = math.inf
    offsets: list[int] = field(default_factory=list[int])
    reads: set[int] = field(default_factory=set[int])
    transfer: Transfer | None = None
    lives: Callable[[], bool] | None = None

    def is_over(self, now: float) -> bool:
        """Whether nothing can be written any more, though nobody said so."""
        return now >= self.until or (self.lives is not None and not self.lives())


@dataclass(slots=True, eq=False)
class Quarantine:
    """What is isolated, by (peer, request, generation)."""

    _held: dict[Key, Isolated] = field(default_factory=dict[Key, Isolated])
    _next: float = 0.0

    def hold(self, key: Key, isolated: Isolated) -> None:
        """Keep what a peer may still write, or what is read from it."""
        self._held[key] = isolated

    def get(self, key: Key) -> Isolated | None:
        """What is held for an attempt, or None."""
        return self._held.get(key)

    def drained(self, key: Key) -> list[int]:
        """The peer has answered at last: offsets to release."""
        isolated = self._held.get(key)
        if isolated is None or isolated.reads:
            return []
        return self._release(key)

    def settled(self, key: Key, chunk: int) -> list[int]:
        """A read of ours has ended: offsets to release."""
        isolated = self._held.get(key)
        if isolated is None or chunk not in isolated.reads:
            return []
        isolated.reads.discard(chunk)
        return [] if isolated.reads else self._release(key)

    def forget(self, seat: tuple[str, int]) -> list[int]:
        """Whoever sat there is dead: offsets to release. Reads of ours end when the transport says so."""
        keys = [key for key, isolated in self._held.items() if isolated.seat == seat and not isolated.reads]
        return [offset for key in keys for offset in self._release(key)]

    def offsets(self, lost: Callable[[str], bool]) -> frozenset[int]:
        """Regions that nobody but peers who are `lost` may touch."""
        held = (isolated for key, isolated in self._held.items() if not isolated.reads and lost(key[0]))
        return frozenset(offset for isolated in held for offset in isolated.offsets)

    def revoked(self, offsets: Collection[int]) -> None:
        """Nothing reaches these regions any more, which are released. Pages stay held."""
        for key, isolated in list(self._held.items()):
            isolated.offsets = [offset for offset in isolated.offsets if offset not in offsets]
            if not isolated.offsets and not isolated.reads and isolated.transfer is None:
                del self._held[key]

    def poll(self, now: float) -> tuple[list[Key], list[int]]:
        """(attempts to ask about again, offsets to release)."""
        over = [key for key, isolated in self._held.items() if isolated.is_over(now)]
        freed = [offset for key in over for offset in self._release(key)]
        if now < self._next:
            return [], freed
        self._next = now + ASK_S
        return [key for key, isolated in self._held.items() if not isolated.reads], freed

    def next_due(self) -> float:
        """Before this time `poll` has nothing to say. O(attempts that are held)."""
        due = math.inf
        for isolated in self._held.values():
            due = min(due, isolated.until, math.inf if isolated.reads else self._next)
        return due

    def reason(self, key: Key) -> str:
        """Why the attempt failed whose memory is held. Raises KeyError for one that holds nothing."""
        return self._held[key].reason

    def outlive(self) -> list[int]:
        """The transport is closed, and with it every read of ours: offsets to release. What peers may write stays."""
        over = [key for key, isolated in self._held.items() if isolated.reads]
        return [offset for key in over for offset in self._release(key)]

    def clear(self) -> None:
        """Nothing touches memory any more: the transport is closed."""
        for key in list(self._held):
            self._release(key)

    def _release(self, key: Key) -> list[int]:
        isolated = self._held.pop(key)
        if isolated.transfer is not None and all(
            other.transfer is not isolated.transfer for other in self._held.values()
        ):
            isolated.transfer.held = False
        return isolated.offsets

    def __len__(self) -> int:
        return len(self._held)


@dataclass(slots=True, eq=False)
class _Retransmission:
    """`want`: the encoded Want. It is resent at `due`, and no more after `until`."""

    want: bytes
    due: float
    until: float


@dataclass(slots=True, eq=False)
class Retransmissions:
    """Sources that had no chunk and have not replied, by (peer, request, generation). Times in seconds."""

    _open: dict[Key, _Retransmission] = field(default_factory=dict[Key, _Retransmission])

    def said(self, key: Key, want: bytes, due: float, until: float) -> None:
        """A Want was sent to a source: resend it at `due`, until `until` or an answer."""
        self._open[key] = _Retransmission(want, due, until)

    def heard(self, key: Key) -> None:
        """The source has replied, so it knows the attempt. From now on it asks again itself if it has to."""
        self._open.pop(key, None)

    def lost(self, peer: str) -> None:
        """The peer is gone: nothing is resent to it."""
        for key in [key for key in self._open if key[0] == peer]:
            del self._open[key]

    def due(self, key: Key) -> float:
        """When `again` has something to do for a source; math.inf: never."""
        farewell = self._open.get(key)
        return math.inf if farewell is None else min(farewell.due, farewell.until)

    def again(self, key: Key, now: float, resend_s: float) -> bytes | None:
        """The Want to resend now; it is due again `resend_s` later. One past `until` is dropped."""
        farewell = self._open.get(key)
        if farewell is not None and now >= farewell.until:
            del self._open[key]
        if farewell is None or now >= farewell.until or now < farewell.due:
            return None
        farewell.due = now + resend_s
        return farewell.want

    def __len__(self) -> int:
        return len(self._open)
