"""FreePages: the ids of a pool that nobody uses, lowest first, so that equal ranks take equal ids."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

from kvmover.cache.tiers.errors import TierError


class FreePages:
    """Of `pages` ids from 0."""

    def __init__(self, name: str, pages: int) -> None:
        self._name, self.pages = name, pages
        self._heap = list(range(pages))
        self._ids = set(self._heap)
        heapify(self._heap)

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, page: int) -> bool:
        return page in self._ids

    def take(self, count: int) -> list[int]:
        """Raises TierError where there are fewer, and takes none."""
        if count > len(self._ids):
            raise TierError(f"{count} pages of {self._name}, of which {len(self._ids)} are free")
        taken = [heappop(self._heap) for _ in range(count)]
        self._ids.difference_update(taken)
        return taken

    def claim(self, ids: Iterable[int]) -> None:
        """Take these, which are free."""
        self._ids.difference_update(ids)
        self._heap = sorted(self._ids)

    def give(self, ids: Iterable[int]) -> None:
        """Raises TierError for an id that is free already, or no page."""
        for page in ids:
            if page in self._ids or not 0 <= page < self.pages:
                raise TierError(f"page {page} of {self._name} comes back, and is free already or outside {self.pages}")
            self._ids.add(page)
            heappush(self._heap, page)
