"""The page ids of one simulated tier: which are free, and how many are out."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvmover.errors import KvmoverError

PageArray = npt.NDArray[np.int32]


class PagesExhausted(KvmoverError):
    """More pages were asked for than are free: the message has both numbers."""


class Pages:
    """Free page ids of a tier of `limit` pages, or of one without end. The last one given back is the next one out."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._stack = np.empty(1024, np.int32)
        self._top = 0
        self._fresh = 0

    @property
    def taken(self) -> int:
        return self._fresh - self._top

    def short(self, pages: int) -> int:
        """How many of `pages` are not free; never below 0."""
        return max(0, self.taken + pages - self.limit) if self.limit is not None else 0

    def take(self, pages: int) -> PageArray:
        """`pages` ids, which are the caller's until they are given back."""
        if self.short(pages):
            raise PagesExhausted(f"{pages} pages asked for, {self.taken} of {self.limit} are taken")
        again = min(pages, self._top)
        self._top -= again
        fresh, self._fresh = self._fresh, self._fresh + pages - again
        ids = self._stack[self._top : self._top + again]
        if again == pages:
            return ids.copy()
        return np.concatenate([ids, np.arange(fresh, self._fresh, dtype=np.int32)])

    def give(self, ids: PageArray) -> None:
        top = self._top + len(ids)
        if top > len(self._stack):
            self._stack = np.concatenate([self._stack, np.empty(top, np.int32)])
        self._stack[self._top : top] = ids
        self._top = top
