"""The tombstones of ended attempts and requests, kept for a while and within a budget a peer.

A Want that its Abort overtook, or that is resent, must not reopen an attempt whose pages were returned. A destination
that missed the end of its attempt is told when it asks. A destination that asks late for a request that was served,
aborted or refused is told at once, and computes instead of waiting.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

#: Most bytes kept for one peer: its early Wants, the messages after them, and how its attempts ended. 1,000 early Wants
#: of 2,048 pages each, 8 KiB a page table, are 9.2 MB of it; 64 peers that fill theirs take 1 GiB.
PEER_BYTES = 16 << 20

#: Bytes of an entry beside its content: keys, objects, their places in tables, and a timer.
ENTRY_BYTES = 1024


@dataclass(slots=True)
class Budget:
    """The bytes kept by peer: they are taken before an entry is kept, and given back when it is dropped."""

    _kept: Counter[str] = field(default_factory=Counter[str])

    def take(self, peer: str, nbytes: int, leaving: int = 1) -> bool:
        """Reserve an entry of `nbytes` bytes for `peer`. Returns False if that exceeds the budget.

        `leaving`: divisor of the budget that this entry may fill it to.
        """
        if self._kept[peer] + nbytes + ENTRY_BYTES > PEER_BYTES // leaving:
            return False
        self._kept[peer] += nbytes + ENTRY_BYTES
        return True

    def give(self, peer: str, nbytes: int) -> None:
        """Return the bytes of a dropped entry."""
        self._kept[peer] -= nbytes + ENTRY_BYTES
        if self._kept[peer] <= 0:
            del self._kept[peer]

    def kept_bytes(self, peer: str) -> int:
        """Returns the bytes kept for a peer now, with ENTRY_BYTES an entry."""
        return self._kept.get(peer, 0)


Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


@dataclass(slots=True)
class TtlMap(Generic[Key, Value]):
    """A map of at most `most` entries, each with a time `until` in seconds at which it expires. `dropped` is called
    with each entry that goes.

    Entries expire in the order in which they were kept: one whose time comes before an earlier entry's waits for that.
    """

    most: int
    dropped: Callable[[Key, Value], None] = lambda key, value: None
    _entries: OrderedDict[Key, tuple[Value, float]] = field(
        default_factory=OrderedDict["Key", "tuple[Value, float]"], init=False
    )

    def keep(self, key: Key, value: Value, until: float) -> None:
        """Set the entry of `key`, which expires at `until`. The oldest entry goes if there are `most`."""
        if key in self._entries:
            self.forget(key)
        if len(self._entries) >= self.most:
            self.forget(next(iter(self._entries)))
        self._entries[key] = value, until

    def get(self, key: Key) -> Value | None:
        """Returns the value of a key, or None. An entry past its time stays until `expire`."""
        entry = self._entries.get(key)
        return entry[0] if entry is not None else None

    def forget(self, key: Key) -> None:
        """Drop a key before its time. An unknown one is ignored."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.dropped(key, entry[0])

    def expire(self, now: float) -> None:
        """Drop the entries whose time has come."""
        while self._entries:
            key, (_, until) = next(iter(self._entries.items()))
            if now < until:
                return
            self.forget(key)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)


#: Most attempts and most requests remembered, the latest: a minute of a thousand requests a second.
MAX_TOMBSTONES = 65536

#: Retention of ended requests, s. Must exceed a destination's queueing time.
MEMORY_S = 3600.0

#: Divisor of a peer's budget for ended attempts, so that early Wants have the other half: at 50 requests a second and a
#: deadline of 300 s ended ones alone would fill it, and each new Want would be refused.
HALF = 2

#: The ending of a request that succeeded.
SERVED = "it was served already"


class Outcome(msgspec.Struct, frozen=True):
    """The end of an attempt: `reason` None is success."""

    generation: int
    reason: str | None


@dataclass(slots=True)
class Tombstones:
    """The ended attempts by (request, peer), the newest of each, and ended requests by name.

    An attempt counts against half of its peer's `budget`: one that exceeds it is not remembered, and other peers are
    unaffected.
    """

    budget: Budget = field(default_factory=Budget)
    _attempts: TtlMap[tuple[str, str], Outcome] = field(init=False)
    _requests: TtlMap[str, str] = field(default_factory=lambda: TtlMap[str, str](MAX_TOMBSTONES))

    def __post_init__(self) -> None:
        self._attempts = TtlMap(MAX_TOMBSTONES, lambda key, how: self.budget.give(key[1], _bytes(key, how)))

    def close(self, key: tuple[str, str], generation: int, reason: str | None, until: float) -> None:
        """Record how an attempt ended, by (request, peer), until `until`. An older generation is ignored."""
        before = self._attempts.get(key)
        if before is not None:
            if before.generation > generation:
                return
            self._attempts.forget(key)
        outcome = Outcome(generation, reason)
        if self.budget.take(key[1], _bytes(key, outcome), HALF):
            self._attempts.keep(key, outcome, until)

    def of(self, request: str, peer: str, generation: int) -> Outcome | None:
        """Returns how an attempt of this or a later generation ended, or None."""
        outcome = self._attempts.get((request, peer))
        return outcome if outcome is not None and generation <= outcome.generation else None

    def end(self, request: str, how: str, until: float) -> None:
        """Record how a request ended, until it is reopened or `until` passes."""
        self._requests.keep(request, how, until)

    def ending(self, request: str) -> str | None:
        """Returns how a request ended, or None if that is unknown."""
        return self._requests.get(request)

    def go_on_from(self, before: Tombstones) -> None:
        """Take over the ended requests of `before`."""
        self._requests = before._requests

    def reopen(self, request: str) -> None:
        """Forget how a request ended: it will be sent again."""
        self._requests.forget(request)

    def expire(self, now: float) -> None:
        """Drop entries past their time. O(entries dropped)."""
        self._attempts.expire(now)
        self._requests.expire(now)


def _bytes(key: tuple[str, str], how: Outcome) -> int:
    """Returns the most bytes of an entry's texts: four a character."""
    return 4 * (len(key[0]) + len(how.reason or ""))
