"""The write permissions of peers: their write leases, and the quarantine of memory that they may still write. Pure.

Clocks of two hosts are never compared. A source stamps its messages; the newest stamp is echoed with each grant, and on
the source's clock the permission ends `lease_s` after that stamp. The stamp was taken before it was heard here. So on
this clock no write is posted from `lease_s` after it was heard, and none lands from `linger_s` after that: however long
the source is stopped, whether or not it is replaced, and without a message from it.

A stamp heard at 100.0 s and echoed at 100.4 s lets its source post until 105.0 s at the latest, and those writes have
landed by 145.0 s, with a `lease_s` of 5 and a `linger_s` of 40.

A region or page of an ended attempt is quarantined until the process that may write it says that it has drained, or its
lease is over and its earlier writes can't land any more. Regions are also freed when the peer is lost and their memory
was registered anew (see `memory.registrations`). Pages that a process of this host copies into itself wait for no
clock: such a copy ends when its process gets to run, or dies.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from kvmover.transfer.protocol.wire import WriteLease
from kvmover.transfer.result import Transfer

#: How much faster than a source's clock this one may run. Clocks disciplined by NTP differ by at most 1.001.
CLOCK_DRIFT = 1.01


@dataclass(slots=True, eq=False)
class _Lent:
    """The newest stamp of a source, when it was heard, its term, and when all leases given to it are over."""

    term: int
    stamp_us: int
    heard: float
    over: float = 0.0


@dataclass(slots=True, eq=False)
class WriteLeases:
    """The write leases by source, the peer's name. Times in seconds of this side's clock. `term`: for the next new
    source.
    """

    lease_s: float
    linger_s: float
    term: int = 1
    _lent: dict[str, _Lent] = field(default_factory=dict[str, _Lent])
    _next: float = 0.0

    def heard(self, peer: str, stamp_us: int, now: float) -> None:
        """Record a source's stamp, heard at `now`. Older stamps are ignored."""
        lent = self._lent.setdefault(peer, _Lent(self.term, 0, now))
        if stamp_us > lent.stamp_us:
            lent.stamp_us, lent.heard = stamp_us, now
        assert lent.stamp_us >= stamp_us, f"an older stamp of {peer} replaced {stamp_us}"

    def renewed(self, peer: str) -> WriteLease:
        """Returns the lease to send to a source, with a grant or a ping."""
        lent = self._lent.get(peer)
        if lent is None:
            return WriteLease(self.term)
        before, lent.over = lent.over, max(lent.over, lent.heard + self.lease_s * CLOCK_DRIFT)
        assert lent.over >= max(before, lent.heard + self.lease_s), f"the lease of {peer} ends before {before}"
        return WriteLease(lent.term, lent.stamp_us, int(self.lease_s * 1e6))

    def retire(self, peer: str) -> float:
        """Void all grants of a source by a new term. Returns the time from which none of its writes can land."""
        self.term += 1
        lent = self._lent.get(peer)
        if lent is None:
            return 0.0
        assert lent.term < self.term, f"{peer} keeps term {lent.term}, in which it may write"
        lent.term = self.term
        return lent.over + self.linger_s

    def expire(self, now: float) -> None:
        """Forget sources whose writes can't land any more. If they return they get a later term."""
        if now < self._next:
            return
        self._next = now + self.lease_s
        past = [
            peer
            for peer, lent in self._lent.items()
            if now >= max(lent.heard + self.lease_s * CLOCK_DRIFT, lent.over) + self.linger_s
        ]
        for peer in past:
            over = self._lent.pop(peer).over
            assert now >= over + self.linger_s, f"{peer} is forgotten at {now} s, and its lease was over at {over} s"
        self.term += bool(past)

    def __len__(self) -> int:
        return len(self._lent)


#: Seconds between Aborts resent to a peer that has not drained.
ASK_S = 1.0

#: (peer's transport name, request, generation).
Key = tuple[str, str, int]


@dataclass(slots=True, eq=False)
class Isolated:
    """The memory that one peer's writes, or this side's `reads` from it, may still touch: arena regions and a
    transfer's pages.

    `seat`: engine and rank of the peer. `until`: when its writes have ended by the clock; reads end by an event.
    `lives`: returns True while the process of this host runs that copies into the pages itself.
    """

    reason: str
    seat: tuple[str, int]
    until: float = math.inf
    offsets: list[int] = field(default_factory=list[int])
    reads: set[int] = field(default_factory=set[int])
    lives: Callable[[], bool] | None = None
    transfer: Transfer | None = field(default=None, init=False)

    def is_over(self, now: float) -> bool:
        """Returns True if the memory can't be written any more, by clock or by the death of its writer."""
        return now >= self.until or (self.lives is not None and not self.lives())

    def due(self, now: float) -> float:
        """Returns when to look at memory again that is not over `now`."""
        return min(self.until, now + ASK_S)


@dataclass(slots=True, eq=False)
class Quarantine:
    """The isolated memory, by (peer, request, generation). `_pages`: entries a transfer whose pages are isolated."""

    _isolated: dict[Key, Isolated] = field(default_factory=dict[Key, Isolated])
    _pages: Counter[Transfer] = field(default_factory=Counter[Transfer])

    def hold(self, key: Key, isolated: Isolated) -> None:
        """Quarantine memory that a peer may still write, or that a read may."""
        assert key not in self._isolated, f"{key} is isolated already: its regions would never be free"
        self._isolated[key] = isolated

    def keep(self, isolated: Isolated, transfer: Transfer) -> None:
        """Isolate the pages of a transfer too: it is `quarantined` until all entries with its pages are released."""
        assert isolated.transfer is None, f"pages of {transfer.request} are isolated already"
        isolated.transfer = transfer
        self._pages[transfer] += 1

    def get(self, key: Key) -> Isolated | None:
        """Returns the memory isolated for an attempt, or None."""
        return self._isolated.get(key)

    def drained(self, key: Key) -> list[int]:
        """Release a drained peer's memory, unless reads are under way. Returns arena offsets to release."""
        isolated = self._isolated.get(key)
        if isolated is None or isolated.reads:
            return []
        return self._release(key)

    def expired(self, key: Key, now: float) -> list[int]:
        """Release memory that can't be written any more, unless reads are under way. Returns arena offsets to
        release.
        """
        isolated = self._isolated.get(key)
        return self.drained(key) if isolated is not None and isolated.is_over(now) else []

    def settled(self, key: Key, chunk: int) -> list[int]:
        """Note the end of a read. Returns arena offsets to release."""
        isolated = self._isolated.get(key)
        if isolated is None or chunk not in isolated.reads:
            return []
        isolated.reads.discard(chunk)
        return [] if isolated.reads else self._release(key)

    def forget(self, seat: tuple[str, int]) -> list[int]:
        """Release the memory of a dead rank, unless reads are under way. Returns arena offsets to release."""
        keys = [key for key, isolated in self._isolated.items() if isolated.seat == seat and not isolated.reads]
        return [offset for key in keys for offset in self._release(key)]

    def offsets(self, lost: Callable[[str], bool]) -> frozenset[int]:
        """Returns the offsets of regions that only `lost` peers may write."""
        lost_ones = (isolated for key, isolated in self._isolated.items() if not isolated.reads and lost(key[0]))
        return frozenset(offset for isolated in lost_ones for offset in isolated.offsets)

    def revoked(self, offsets: Collection[int]) -> None:
        """Drop regions that a new registration made unreachable: the caller releases them. Pages stay isolated."""
        for key, isolated in list(self._isolated.items()):
            isolated.offsets = [offset for offset in isolated.offsets if offset not in offsets]
            if not isolated.offsets and not isolated.reads and isolated.transfer is None:
                del self._isolated[key]
        assert not self.offsets(lambda _: True) & set(offsets), f"regions of {sorted(offsets)} would be freed twice"

    def outlive(self) -> list[int]:
        """Release memory under reads, which end with the closed transport. Returns arena offsets to release. Memory
        that peers may write stays.
        """
        over = [key for key, isolated in self._isolated.items() if isolated.reads]
        for key in over:
            self._isolated[key].reads.clear()
        return [offset for key in over for offset in self._release(key)]

    def clear(self) -> None:
        """Release all memory: the transport is closed for good."""
        for key, isolated in list(self._isolated.items()):
            isolated.reads.clear()
            self._release(key)

    def _release(self, key: Key) -> list[int]:
        isolated = self._isolated.pop(key)
        assert not isolated.reads, f"reads of chunks {sorted(isolated.reads)} may still land in the memory of {key}"
        if (transfer := isolated.transfer) is not None:
            self._pages[transfer] -= 1
            if not self._pages[transfer]:
                del self._pages[transfer]
                transfer.quarantined = False
        return isolated.offsets

    def __iter__(self) -> Iterator[Key]:
        return iter(self._isolated)

    def __len__(self) -> int:
        return len(self._isolated)


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
        """Schedule a Want that was sent to a source: it is resent at `due`, until `until` or a reply."""
        self._open[key] = _Retransmission(want, due, until)

    def heard(self, key: Key) -> None:
        """Stop resending to a source that has replied: it knows the attempt, and asks again itself if it needs to."""
        self._open.pop(key, None)

    def lost(self, peer: str) -> None:
        """Stop resending to a lost peer."""
        for key in [key for key in self._open if key[0] == peer]:
            del self._open[key]

    def due(self, key: Key) -> float:
        """Returns when `again` has work for a source; math.inf: never."""
        farewell = self._open.get(key)
        return math.inf if farewell is None else min(farewell.due, farewell.until)

    def again(self, key: Key, now: float, resend_s: float) -> bytes | None:
        """Returns the Want to resend now, or None; it is due again `resend_s` later. A Want past `until` is dropped."""
        farewell = self._open.get(key)
        if farewell is not None and now >= farewell.until:
            del self._open[key]
        if farewell is None or now >= farewell.until or now < farewell.due:
            return None
        farewell.due = now + resend_s
        return farewell.want

    def __len__(self) -> int:
        return len(self._open)
