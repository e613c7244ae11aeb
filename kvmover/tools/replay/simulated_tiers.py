"""The tiers below and beside a replayed tree: pages of the device and of the host that are counted, and a storage.

SimulatedStorage and `multiples` stand in C in `core/simulated.c` too, where it was built.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvmover.c_core import NATIVE
from kvmover.errors import KvmoverError

#: A page's number is equal to another's where all tokens up to their ends are.
PageNumbers: TypeAlias = npt.NDArray[np.int32] | npt.NDArray[np.uint32] | npt.NDArray[np.int64]


class PagesExhausted(KvmoverError):
    """More pages were asked for than are free: the message has both numbers."""


class SimulatedPages:
    """Pages of a tier of `limit`, or of one without end. They are counted: what tells them apart is the caller's."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        #: Pages that are out.
        self.taken = 0

    def short(self, pages: int) -> int:
        """How many of `pages` are not free; never below 0."""
        return max(0, self.taken + pages - self.limit) if self.limit is not None else 0

    def take(self, pages: int) -> None:
        """`pages` pages are the caller's until they are given back."""
        if self.limit is not None and self.taken + pages > self.limit:
            raise PagesExhausted(f"{pages} pages asked for, {self.taken} of {self.limit} are taken")
        self.taken += pages

    def give(self, pages: int) -> None:
        """Pages come back. Raises PagesExhausted for more than are out."""
        if pages > self.taken:
            raise PagesExhausted(f"{pages} pages come back, {self.taken} are taken")
        self.taken -= pages


class PageIdSeries:
    """Ids for pages of which none needs to be found again by its id: no two of 2**31 in a row are equal."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, pages: int) -> npt.NDArray[np.int32]:
        """The next `pages` ids."""
        first = self._next if self._next + pages <= 2**31 else 0
        self._next = first + pages
        return np.arange(first, first + pages, dtype=np.int32)


class SimulatedStorage:
    """Up to `limit` pages, by number. Nothing takes time, and no page is ever bad.

    Uses are written down one after the other, and of each page where its last use stands: a page is here while that is
    in the log, and what stands first there is what was used least recently.
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
        """How many of `pages` are here, up to the first that is not. They count as read."""
        missing = np.flatnonzero(self._places(pages) < 0)
        count = int(missing[0]) if len(missing) else len(pages)
        if count:
            self._touch(pages[:count])
        return count

    def put(self, pages: PageNumbers) -> None:
        """Keep `pages`; the least recently used go when there is no room."""
        self._pages += int(np.count_nonzero(self._places(pages) < 0))
        self._touch(pages)
        while self._pages > self.limit:
            self._drop(self._pages - self.limit)

    def _places(self, pages: PageNumbers) -> npt.NDArray[np.int64]:
        """Where the last use of each stands in the log; -1 for one that is not here."""
        try:
            return self._used[pages]
        except IndexError:
            self._used = np.concatenate([self._used, np.full(int(pages.max()) + 1, -1)])
            return self._used[pages]

    def _touch(self, pages: PageNumbers) -> None:
        """Deepest first, so that a prefix always outlives what follows it."""
        if self._tail + len(pages) > len(self._log):
            self._shorten(len(pages))
        before, self._tail = self._tail, self._tail + len(pages)
        self._log[before : self._tail] = pages[::-1]
        self._used[pages] = np.arange(self._tail - 1, before - 1, -1)

    def _drop(self, most: int) -> None:
        """Up to `most` pages, the least recently used of those whose uses stand first."""
        places = np.arange(self._head, min(self._head + 2 * most, self._tail))
        pages = self._log[places]
        last = np.flatnonzero(self._used[pages] == places)[:most]
        self._used[pages[last]] = -1
        self._pages -= len(last)
        self._head = int(places[last[-1]] if len(last) == most else places[-1]) + 1

    def _shorten(self, room: int) -> None:
        """Leave last uses alone in the log, and as many places again."""
        places = np.arange(self._head, self._tail)
        pages = self._log[places]
        pages = pages[self._used[pages] == places]
        self._log = np.empty(max(len(self._log), 2 * (len(pages) + room)), np.int64)
        self._log[: len(pages)] = pages
        self._used[pages] = np.arange(len(pages))
        self._head, self._tail = 0, len(pages)


def new_storage(limit: int) -> SimulatedStorage:
    """An empty storage, in C where that was built."""
    return SimulatedStorage(limit) if NATIVE is None else NATIVE.SimulatedStorage(limit)


def multiples(pages: PageNumbers, of: int) -> list[int]:
    """Those of `pages` that `of` divides."""
    return pages[pages % of == 0].tolist() if NATIVE is None else NATIVE.multiples(pages, of)
