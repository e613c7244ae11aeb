"""Quarantine: memory of ended attempts that a peer may still write, until it is known that none does. Pure.

A region or a page is given back when the very process that may write it says that it has drained, or when its lease is
over and nothing that it posted before can land (see `leases`). Regions also when the peer is lost and their memory was
registered anew (see `renewals`). Pages that a process of this host copies into by itself wait for no clock: a copy that
was begun under a lease ends when its process gets the time to, or when it dies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from kvmover.transfer.result import Transfer

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
        return self._held[key].reason

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
