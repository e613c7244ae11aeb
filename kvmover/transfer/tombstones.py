"""Tombstones: what is remembered of attempts and requests that are over, for a while and within a budget a peer.

A Want that its Abort overtook, or that is repeated, must not open an attempt again: its pages are given back. A
destination that missed how its attempt ended is told when it asks. And a request that was served, given up or refused
is not one that is still to come: whoever asks for it late computes at once instead of waiting for it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

#: Bytes that are kept for one peer at most: what it asked for before it was offered, what it said about that since, and
#: how its attempts ended. 1,000 early Wants of 2,048 pages each, 8 KiB a page table, are 9.2 MB of it; 64 peers that
#: fill theirs take 1 GiB.
PEER_BYTES = 16 << 20

#: What an entry takes beside its bytes: keys, objects, their places in tables, and a timer.
ENTRY_BYTES = 1024


@dataclass(slots=True)
class Budget:
    """Bytes kept by peer. Who keeps something takes its bytes here first, and gives them back when it is dropped."""

    _kept: Counter[str] = field(default_factory=Counter[str])

    def take(self, peer: str, nbytes: int, leaving: int = 1) -> bool:
        """Whether an entry of `nbytes` bytes may be kept for `peer`; if so, they are its own until given back.

        `leaving`: the entry is kept only if no more than one part in so many of the budget is kept with it.
        """
        if self._kept[peer] + nbytes + ENTRY_BYTES > PEER_BYTES // leaving:
            return False
        self._kept[peer] += nbytes + ENTRY_BYTES
        return True

    def give(self, peer: str, nbytes: int) -> None:
        """An entry of `nbytes` bytes is dropped."""
        self._kept[peer] -= nbytes + ENTRY_BYTES
        if self._kept[peer] <= 0:
            del self._kept[peer]

    def kept_bytes(self, peer: str) -> int:
        """What is kept for a peer now."""
        return self._kept.get(peer, 0)


Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


@dataclass(slots=True)
class TtlMap(Generic[Key, Value]):
    """A map of at most `most` entries, each with a time `until` in seconds at which it expires. `dropped` hears of each
    that goes.

    Entries expire in the order in which they were kept: one whose time comes before an earlier entry's waits for that.
    """

    most: int
    dropped: Callable[[Key, Value], None] = lambda key, value: None
    _entries: OrderedDict[Key, tuple[Value, float]] = field(
        default_factory=OrderedDict["Key", "tuple[Value, float]"], init=False
    )

    def keep(self, key: Key, value: Value, until: float) -> None:
        """Set the entry of `key`, which expires at `until`."""
        self.forget(key)
        if len(self._entries) >= self.most:
            self.forget(next(iter(self._entries)))
        self._entries[key] = value, until

    def get(self, key: Key) -> Value | None:
        """The value of a key, or None. What is past its time stays until `expire`."""
        entry = self._entries.get(key)
        return entry[0] if entry is not None else None

    def forget(self, key: Key) -> None:
        """Drop a key before its time. An unknown one is ignored."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.dropped(key, entry[0])

    def expire(self, now: float) -> None:
        """Delete the entries whose time has come."""
        while self._entries:
            key, (_, until) = next(iter(self._entries.items()))
            if now < until:
                return
            self.forget(key)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)


#: Attempts and requests that are remembered, the latest ones: a minute of a thousand requests a second.
MAX_TOMBSTONES = 65536

#: How long requests that are over are remembered, in seconds: longer than a destination's queue may be.
MEMORY_S = 3600.0

#: Of a peer's budget, what is remembered of the past leaves the other half to what the peer still asks for: at 50
#: requests a second and a deadline of 300 s the past alone would fill it, and each new Want would be refused.
HALF = 2

#: How a request ended that nothing was wrong with.
SERVED = "it was served already"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended: None is well."""

    generation: int
    reason: str | None


@dataclass(slots=True)
class Tombstones:
    """Attempts by (request, peer), of which the newest counts, and requests by name.

    An attempt is kept of its peer's `budget`, of half of it at most: of one that says too much nothing more is
    remembered, which harms no other.
    """

    budget: Budget = field(default_factory=Budget)
    _attempts: TtlMap[tuple[str, str], Outcome] = field(init=False)
    _requests: TtlMap[str, str] = field(default_factory=lambda: TtlMap[str, str](MAX_TOMBSTONES))

    def __post_init__(self) -> None:
        self._attempts = TtlMap(MAX_TOMBSTONES, lambda key, how: self.budget.give(key[1], _bytes(key, how)))

    def close(self, key: tuple[str, str], generation: int, reason: str | None, until: float) -> None:
        """Note how an attempt ended, by (request, peer), until `until`. An older generation changes nothing."""
        before = self._attempts.get(key)
        if before is not None and before.generation > generation:
            return
        self._attempts.forget(key)
        outcome = Outcome(generation, reason)
        if self.budget.take(key[1], _bytes(key, outcome), HALF):
            self._attempts.keep(key, outcome, until)

    def of(self, request: str, peer: str, generation: int) -> Outcome | None:
        """How an attempt of this generation or of an earlier one ended, if it has."""
        outcome = self._attempts.get((request, peer))
        return outcome if outcome is not None and generation <= outcome.generation else None

    def end(self, request: str, how: str, until: float) -> None:
        """Whoever asks for this request from now on is told how it ended, until it is reopened."""
        self._requests.keep(request, how, until)

    def ending(self, request: str) -> str | None:
        """Why a request ended, or None for one that is not known to have."""
        return self._requests.get(request)

    def go_on_from(self, before: Tombstones) -> None:
        """Know how requests ended that ended `before`."""
        self._requests = before._requests

    def reopen(self, request: str) -> None:
        """Forget how a request ended: it comes again."""
        self._requests.forget(request)

    def expire(self, now: float) -> None:
        """Drop what is past its time. O(entries that go)."""
        self._attempts.expire(now)
        self._requests.expire(now)


def _bytes(key: tuple[str, str], how: Outcome) -> int:
    """What its texts take, four bytes a character at most."""
    return 4 * (len(key[0]) + len(how.reason or ""))
