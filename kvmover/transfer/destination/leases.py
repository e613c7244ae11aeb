"""Write leases: until when each source may write into this rank, said in stamps of the source's clock. Pure.

Clocks of two hosts are never compared. A source stamps what it says; the newest stamp goes back with what it is
granted, and on its clock the permission ends `lease_s` after that stamp. The stamp was taken before it was heard here.
So on our clock nothing is posted from `lease_s` after it was heard, and nothing lands from `linger_s` after that:
however long the source is stopped, whether or not it is replaced, and without a word from it.

A stamp that was heard at 100.0 s and echoed at 100.4 s lets its source post until 105.0 s at the latest, and what it
posted then has landed by 145.0 s, with a `lease_s` of 5 and a `linger_s` of 40.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmover.transfer.protocol.wire import WriteLease

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
