"""StorageEvents tell a router which pages come to storage, and which are gone from it, whoever deleted them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from kvmover.cache.prefix.events import BlockRemoved, BlockStored, KVEvent, Medium
from kvmover.cache.prefix.hashes import as_int64, as_int64s


class StorageEvents:
    """Events of one rank. The store calls `lost`, from any thread; all else is the controller's.

    Events of storage come without tokens: those of the device had them.
    """

    def __init__(self, sink: Callable[[KVEvent], None], exists: Callable[[Sequence[bytes]], Sequence[bool]]) -> None:
        self._sink, self._exists = sink, exists
        self._pages: set[bytes] = set()
        self._lost: deque[bytes] = deque()

    def stored(self, hashes: Sequence[bytes], parent: bytes | None, page_tokens: int) -> None:
        """Pages in order of position, each after the one before."""
        self._pages.update(hashes)
        above = None if parent is None else as_int64(parent)
        self._sink(BlockStored(as_int64s(hashes), above, (), page_tokens, None, Medium.DISK, None))

    def lost(self, page: bytes) -> None:
        """The store has lost an object of `page`. Others may still make up the page."""
        if page in self._pages:
            self._lost.append(page)

    def poll(self) -> None:
        """Report the pages that are gone since the last call."""
        pages = dict.fromkeys(self._lost.popleft() for _ in range(len(self._lost)))
        known = [page for page in pages if page in self._pages]
        if not known:
            return
        gone = [page for page, there in zip(known, self._exists(known), strict=True) if not there]
        self._pages.difference_update(gone)
        if gone:
            self._sink(BlockRemoved(as_int64s(gone), Medium.DISK))
