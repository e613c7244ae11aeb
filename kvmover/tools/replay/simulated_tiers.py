"""The tiers of a replayed tree: counts of device and host pages, and a storage.

`core/simulated.c` has SimulatedStorage and `multiples` in C too.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvmover.c_core import NATIVE
from kvmover.errors import KvmoverError

#: Numbers of pages: two are equal if all tokens up to the pages' ends are.
PageNumbers: TypeAlias = npt.NDArray[np.int32] | npt.NDArray[np.uint32] | npt.NDArray[np.int64]


class PagesExhausted(KvmoverError):
    """More pages requested or returned than possible: the message has both numbers."""


class SimulatedPages:
    """A count of a tier's pages, at most `limit` (None: unlimited). The caller identifies pages."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        #: Pages in use.
        self.taken = 0

    def short(self, pages: int) -> int:
        """Returns the pages missing for a `take` of `pages`; at least 0."""
        return max(0, self.taken + pages - self.limit) if self.limit is not None else 0

    def take(self, pages: int) -> None:
        """Take `pages` pages until `give`. Raises PagesExhausted above the limit."""
        if self.limit is not None and self.taken + pages > self.limit:
            raise PagesExhausted(f"{pages} pages asked for, {self.taken} of {self.limit} are taken")
        self.taken += pages

    def give(self, pages: int) -> None:
        """Return pages. Raises PagesExhausted for more than are taken."""
        if pages > self.taken:
            raise PagesExhausted(f"{pages} pages come back, {self.taken} are taken")
        self.taken -= pages


class PageIdSeries:
    """Ids for pages that are never looked up by id: unique among 2**31 in a row."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, pages: int) -> npt.NDArray[np.int32]:
        """Returns the next `pages` ids."""
        first = self._next if self._next + pages <= 2**31 else 0
        self._next = first + pages
        return np.arange(first, first + pages, dtype=np.int32)


class SimulatedStorage:
    """A storage of up to `limit` pages, by number. Operations take no time and never fail.

    An append-only log holds uses, and `_used` the last position of each page: a page is stored while that is in the
    log, and the first such position is the least recently used page.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._log = np.empty(1 << 16, np.int64)
        self._head = self._tail = 0
        self._used = np.full(1 << 16, -1)
        self._pages = 0

    def __len__(self) -> int:
        return self._pages

    def leading(self, pages: PageNumbers) -> int:
        """Returns how many leading `pages` are stored, and marks them used."""
        missing = np.flatnonzero(self._places(pages) < 0)
        count = int(missing[0]) if len(missing) else len(pages)
        if count:
            self._touch(pages[:count])
        return count

    def put(self, pages: PageNumbers) -> None:
        """Store `pages`, evicting the least recently used beyond the limit."""
        self._pages += int(np.count_nonzero(self._places(pages) < 0))
        self._touch(pages)
        while self._pages > self.limit:
            self._drop(self._pages - self.limit)

    def _places(self, pages: PageNumbers) -> npt.NDArray[np.int64]:
        """Returns each page's last position in the log; -1 if it is not stored."""
        try:
            return self._used[pages]
        except IndexError:
            self._used = np.concatenate([self._used, np.full(int(pages.max()) + 1, -1)])
            return self._used[pages]

    def _touch(self, pages: PageNumbers) -> None:
        """Append uses, deepest page first, so that a prefix outlives its successors."""
        if self._tail + len(pages) > len(self._log):
            self._shorten(len(pages))
        before, self._tail = self._tail, self._tail + len(pages)
        self._log[before : self._tail] = pages[::-1]
        self._used[pages] = np.arange(self._tail - 1, before - 1, -1)

    def _drop(self, most: int) -> None:
        """Evict up to `most` of the least recently used pages."""
        places = np.arange(self._head, min(self._head + 2 * most, self._tail))
        pages = self._log[places]
        last = np.flatnonzero(self._used[pages] == places)[:most]
        self._used[pages[last]] = -1
        self._pages -= len(last)
        self._head = int(places[last[-1]] if len(last) == most else places[-1]) + 1

    def _shorten(self, room: int) -> None:
        """Compact the log to last uses, with room for `room` more and as much again."""
        places = np.arange(self._head, self._tail)
        pages = self._log[places]
        pages = pages[self._used[pages] == places]
        self._log = np.empty(max(len(self._log), 2 * (len(pages) + room)), np.int64)
        self._log[: len(pages)] = pages
        self._used[pages] = np.arange(len(pages))
        self._head, self._tail = 0, len(pages)


def new_storage(limit: int) -> SimulatedStorage:
    """Returns an empty storage, in C if built."""
    return SimulatedStorage(limit) if NATIVE is None else NATIVE.SimulatedStorage(limit)


def multiples(pages: PageNumbers, of: int) -> list[int]:
    """Returns the pages whose numbers are multiples of `of`."""
    return pages[pages % of == 0].tolist() if NATIVE is None else NATIVE.multiples(pages, of)
