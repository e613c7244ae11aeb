"""PagesInUse tracks the page ids of one component on one tier that a tree and its operations hold, each once.

This class is the definition; `core/` has it in C, with one bit a page.
"""

from __future__ import annotations

import numpy as np

_MOST_IDS = 1 << 31


class PagesInUse:
    """A set of page ids, claimed on entry and released on exit, so that each has one holder."""

    __slots__ = ("_ids",)

    def __init__(self) -> None:
        self._ids = set[int]()

    def claim(self, ids: bytes) -> int:
        """Claim ids (32-bit words) and return -1; or change no id and return the first that cannot be claimed.

        That is an id in use, repeated in `ids`, or of 2**31 or more.
        """
        row = np.frombuffer(ids, "<u4").tolist()
        new = set(row)
        if len(new) == len(row) and self._ids.isdisjoint(new) and max(row, default=0) < _MOST_IDS:
            self._ids |= new
            return -1
        seen = set[int]()
        for page in row:
            if page in self._ids or page in seen or page >= _MOST_IDS:
                return page
            seen.add(page)
        raise AssertionError("one of them was found before")

    def release(self, ids: bytes) -> None:
        """Release ids. Raises ValueError, and releases none, at the first that is not in use or repeated."""
        row = np.frombuffer(ids, "<u4").tolist()
        released = set(row)
        if len(released) == len(row) and self._ids >= released:
            self._ids -= released
            return
        seen = set[int]()
        for page in row:
            if page not in self._ids or page in seen:
                raise ValueError(f"page {page} is not in use")
            seen.add(page)

    def __contains__(self, page: int) -> bool:
        return page in self._ids

    def __len__(self) -> int:
        return len(self._ids)
