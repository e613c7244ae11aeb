"""A bounded map with expiry. `expire(now)` is O(entries expired); at `most` entries the oldest goes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


@dataclass(slots=True)
class Remembered(Generic[Key, Value]):
    """A map of at most `most` entries, each with a time `until` in seconds at which it expires.

    Entries expire in the order in which they were kept: one whose time comes before an earlier entry's waits for that.
    """

    most: int
    _entries: OrderedDict[Key, tuple[Value, float]] = field(
        default_factory=OrderedDict["Key", "tuple[Value, float]"], init=False
    )

    def keep(self, key: Key, value: Value, until: float) -> None:
        """Set the entry of `key`, which expires at `until`."""
        self._entries.pop(key, None)
        if len(self._entries) >= self.most:
            self._entries.popitem(last=False)
        self._entries[key] = value, until

    def get(self, key: Key) -> Value | None:
        entry = self._entries.get(key)
        return entry[0] if entry is not None else None

    def forget(self, key: Key) -> None:
        self._entries.pop(key, None)

    def expire(self, now: float) -> None:
        """Delete the entries whose time has come."""
        while self._entries:
            key, (_, until) = next(iter(self._entries.items()))
            if now < until:
                return
            del self._entries[key]

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)
