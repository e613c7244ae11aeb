"""Remembered: a table that forgets. What is asked of it at every poll costs what is forgotten, not what is kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


@dataclass(slots=True)
class Remembered(Generic[Key, Value]):
    """At most `most` entries, the latest ones. Times in seconds.

    They are kept in the order of their ends; one that ends before an earlier one did waits for it.
    """

    most: int
    _entries: OrderedDict[Key, tuple[Value, float]] = field(
        default_factory=OrderedDict["Key", "tuple[Value, float]"], init=False
    )

    def keep(self, key: Key, value: Value, until: float) -> None:
        """Remember an entry, instead of what was remembered by its key."""
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
        """Forget what has ended."""
        while self._entries:
            key, (_, until) = next(iter(self._entries.items()))
            if now < until:
                return
            del self._entries[key]

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)
