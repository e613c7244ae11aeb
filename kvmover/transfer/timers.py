"""Timers: the one heap of a mover's due times, so that a poll looks at what is due and at nothing else. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

#: A heap is rebuilt when it has so many entries more than twice its keys.
SLACK = 64


@dataclass(slots=True)
class Timers(Generic[Key]):
    """Keys, each with the time in seconds at which it is due. A key has one time; one that was taken has none.

    An entry that was put off or cancelled stays in the heap until its old time comes (lazy deletion): a timer that is
    put off a thousand times costs one entry.
    """

    _due: dict[Key, float] = field(default_factory=dict["Key", float], init=False)
    _heap: list[tuple[float, int, Key]] = field(default_factory=list["tuple[float, int, Key]"], init=False)
    _entry: dict[Key, float] = field(default_factory=dict["Key", float], init=False)
    _serial: int = field(default=0, init=False)

    def set(self, key: Key, due: float) -> None:
        """Let `key` be due then, and not when it was before. math.inf: never."""
        if due == math.inf:
            self._due.pop(key, None)
            return
        self._due[key] = due
        if due < self._entry.get(key, math.inf):
            self._push(key, due)

    def sooner(self, key: Key, due: float) -> None:
        """Let `key` be due then, unless it is due before."""
        if due < self._due.get(key, math.inf):
            self.set(key, due)

    def cancel(self, key: Key) -> None:
        """Let `key` never be due."""
        self._due.pop(key, None)

    def take(self, now: float, most: int) -> list[Key]:
        """The keys that are due, the longest due first and at most so many: they are due no more until set again."""
        taken: list[Key] = []
        while self._heap and self._heap[0][0] <= now and len(taken) < most:
            at, _, key = heapq.heappop(self._heap)
            if self._entry.get(key) != at:
                continue  # a later entry that an earlier one has replaced
            del self._entry[key]
            due = self._due.get(key)
            if due is None:
                continue
            if due > at:  # it was put off: it comes after what is due before it
                self._push(key, due)
                continue
            del self._due[key]
            taken.append(key)
        return taken

    def __len__(self) -> int:
        return len(self._due)

    def __contains__(self, key: Key) -> bool:
        return key in self._due

    def _push(self, key: Key, at: float) -> None:
        self._entry[key] = at
        self._serial += 1  # keys need no order, and equal times keep theirs
        heapq.heappush(self._heap, (at, self._serial, key))
        if len(self._heap) > 2 * len(self._due) + SLACK:
            self._rebuild()

    def _rebuild(self) -> None:
        """Drop what is stale. O(keys), and at least so many entries were pushed since the last time."""
        self._entry = dict(self._due)
        self._heap = [(due, number, key) for number, (key, due) in enumerate(self._due.items())]
        self._serial = len(self._heap)
        heapq.heapify(self._heap)
