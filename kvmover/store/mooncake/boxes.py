"""Which boxes of pages are in use in a namespace: known here, told to others, and learnt while pages are asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from threading import Lock

from kvmover.store.mooncake.client import Asker, PoolClient
from kvmover.store.mooncake.format import decode_box, encode_box
from kvmover.store.mooncake.short_list import ShortList
from kvmover.store.part import PageBox, PartKey

#: Numbers without a known entry that each look-up asks for too, so that a new box is seen by the next of them.
_AHEAD = 4

#: How often the whole list is read: entries may have come where others are known that were lost with a donor.
_READ_S = 30.0


class BoxesInUse:
    """Of one namespace. What was learnt is not forgotten: a box that nobody writes any more costs a key a page."""

    def __init__(self, pool: PoolClient, folder: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._list, self._pool, self._clock = ShortList(pool, f"{folder}/boxes"), pool, clock
        self._entries: dict[int, bytes] = {}
        self._parts: dict[bytes, PartKey] = {}
        self._read_s = float("-inf")
        self._lock = Lock()

    def parts_for(self, wanted: PartKey) -> tuple[PartKey, ...]:
        """The parts that `wanted` may be made of, of those known."""
        return _overlapping(wanted, tuple(self._parts.values()))

    def ahead(self) -> tuple[str, ...]:
        """Keys of entries that would be news: a look-up that finds one reads the list."""
        unknown = (number for number in range(len(self._list.keys)) if number not in self._entries)
        return tuple(self._list.keys[number] for number, _ in zip(unknown, range(_AHEAD), strict=False))

    @property
    def is_due(self) -> bool:
        """Whether the whole list is to be read again."""
        return self._clock() - self._read_s >= _READ_S

    def read(self, asker: Asker) -> None:
        """Learn the whole list. Raises OSError."""
        self._learn(self._list.read(asker))
        self._read_s = self._clock()

    def announce(self, part: PartKey) -> None:
        """Let everybody know that there are objects of `part`, before there are. Raises OSError."""
        entry = encode_box(part)
        number = next((number for number, known in self._entries.items() if known == entry), None)
        if number is None or not self._pool.exists([self._list.keys[number]], Asker.WORKER)[0]:
            self._learn(self._list.add(entry))

    def _learn(self, entries: dict[int, bytes]) -> None:
        parts = {entry: part for entry in entries.values() if (part := decode_box(entry))}
        with self._lock:
            self._entries, self._parts = entries, self._parts | parts


@lru_cache(maxsize=1024)
def _overlapping(wanted: PartKey, known: tuple[PartKey, ...]) -> tuple[PartKey, ...]:
    """Of the same component, with heads and layers in common: ranks of one shape ask for one key a page."""
    return tuple(part for part in known if part.component == wanted.component and _meet(part.box, wanted.box))


def _meet(left: PageBox, right: PageBox) -> bool:
    return bool(left.heads & right.heads) and bool(left.layers & right.layers)
