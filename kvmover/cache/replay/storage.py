"""A simulated storage tier: the hashes of the pages that it holds, least recently read or written first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class Storage:
    """Up to `limit` pages. Nothing takes time, and no page is ever bad."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._pages = OrderedDict[bytes, None]()

    def __len__(self) -> int:
        return len(self._pages)

    def leading(self, hashes: Sequence[bytes]) -> int:
        """How many of `hashes` are here, up to the first that is not. They count as read."""
        count = 0
        for page in hashes:
            if page not in self._pages:
                break
            count += 1
        self._touch(hashes[:count])
        return count

    def put(self, hashes: Sequence[bytes]) -> None:
        self._touch(hashes)
        while len(self._pages) > self.limit:
            self._pages.popitem(last=False)

    def _touch(self, hashes: Sequence[bytes]) -> None:
        """Deepest first, so that a prefix always outlives what follows it."""
        for page in reversed(hashes):
            self._pages[page] = None
            self._pages.move_to_end(page)
