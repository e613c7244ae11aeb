"""Where a file system gives back whole files only, a segment is evicted: the one with most cold bytes in it.

Its hot pages are carried forward into the segment that is being written, as the cleaner of a log does. So one hot page
in each segment keeps no cold ones, and room for a few pages costs no more than a segment.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvmover.store.catalog import SLICE, Catalog
from kvmover.store.deletion import DeletionOrder
from kvmover.store.files import close_quietly, open_shared
from kvmover.store.guard_lock import GuardLock, off_lock, under_lock
from kvmover.store.record import holds
from kvmover.store.segment import Segment
from kvmover.store.stored import Placed, Rows, StoredObject
from kvmover.store.writer import FileOffset, Header, Writer

#: Pages that are looked at to choose a segment by.
_COLD = 4096

#: At most this share of a segment is carried forward: beyond it, carrying costs more than it frees.
_CARRIED_SHARE = 1 / 2


Unused = Callable[[Rows], tuple[Rows, Placed, int]]


@dataclass(frozen=True, slots=True)
class Cleaned:
    """A segment that was removed: what the file system has back, beside what was carried, and pages that went."""

    freed_bytes: int
    pages: int


@dataclass(frozen=True, slots=True)
class _Victim:
    """The segment that goes, and the rows of the pages that are cold, as long as the lock is held."""

    segment: Segment
    size_bytes: int
    cold: Rows


class SegmentCleaner:
    """Frees whole segments of a catalog, through the writer of the process. Used while writing."""

    def __init__(self, catalog: Catalog, writer: Writer, unused: Unused) -> None:
        """`unused`: which of some pages are the next to go, as nobody else has used them, their objects, and how many
        the system says nothing of.

        It is called under the lock.
        """
        self._catalog, self._writer, self._unused = catalog, writer, unused

    @property
    def lock(self) -> GuardLock:
        """The catalog's."""
        return self._catalog.lock

    @off_lock
    def clean(self, nbytes: int, keep: Sequence[bytes]) -> Cleaned | None:
        """Remove one segment, carrying forward what is hot in it. None where nothing can go.

        Cold are the pages that would have to go for `nbytes`, the least recently read ones; never those of `keep`.
        """
        with self.lock:
            catalog = self._catalog
            kept = catalog.index.pages_at(keep).tolist()
            coldest = catalog.index.hashes(catalog.index.coldest(_COLD, nbytes, kept))
        cold = [page for first in range(0, len(coldest), SLICE) for page in self._cold(coldest[first : first + SLICE])]
        with self.lock:
            victim = self._victim(cold)
            if victim is None:
                return None
            hot = self._hottest(victim)
        carried = [each for record in hot if (each := self._carry(victim.segment.name, record))]
        return self._removed(victim, carried)

    @off_lock
    def _cold(self, pages: Sequence[bytes]) -> list[bytes]:
        """Of a few pages those that nobody else has used."""
        with self.lock:
            cold, _, _ = self._unused(self._catalog.index.pages_at(pages))
            return self._catalog.index.hashes(cold)

    @under_lock
    def _victim(self, pages: Sequence[bytes]) -> _Victim | None:
        """The segment with the smallest share of hot bytes, where `pages` are cold."""
        catalog = self._catalog
        cold = catalog.index.pages_at(pages)
        placed = catalog.index.placed(cold)
        cold_bytes = Counter[str]()
        for name, some in placed.by_segment():
            cold_bytes[name] = int(placed.held[some].sum())
        best: tuple[float, Segment, int] | None = None
        for segment in catalog.segments.values():
            size = catalog.data_bytes(segment) if segment.is_done else 0
            hot = catalog.index.live_bytes(segment.name) - cold_bytes[segment.name]
            if size and hot < size and (best is None or hot / size < best[0]):
                best = hot / size, segment, size
        if best is None and self._writer.abandon():
            return self._victim(pages)
        return _Victim(best[1], best[2], cold) if best else None

    @under_lock
    def _hottest(self, victim: _Victim) -> list[int]:
        """Records of objects of hot pages, the most recently read first, of a share of the segment at most."""
        index = self._catalog.index
        placed = index.placed_in(victim.segment.name)
        hot = placed.where(~np.isin(placed.pages, victim.cold))
        hot = hot.where(np.argsort(-index.stamps_at(hot.pages), kind="stable"))
        return hot.records[np.cumsum(hot.held) <= victim.size_bytes * _CARRIED_SHARE].tolist()

    @under_lock
    def _stamp(self, each: StoredObject) -> int:
        (stamp,) = self._catalog.index.stamps_of([each.page])
        return stamp

    @off_lock
    def _removed(self, victim: _Victim, carried: list[StoredObject]) -> Cleaned | None:
        """Delete what is left in a segment, with all that belongs to its pages, and the segment."""
        catalog, name = self._catalog, victim.segment.name
        kept, pages = {each.page for each in carried}, 0
        while True:
            with self.lock:
                placed = catalog.index.placed_in(name, catalog.index.records(name)[:SLICE])
                rows = np.unique(placed.pages)
                left = rows[[page not in kept for page in catalog.index.hashes(rows)]]
                whole = catalog.index.placed(left)
                alone = placed.where(~np.isin(placed.pages, left))
                pages += len(left)
                catalog.kill(whole, DeletionOrder.EVICTED)
                catalog.kill(alone, DeletionOrder.EVICTED)
            if not len(placed):
                break
        with self.lock:
            catalog.discard(name)
        catalog.sweep()
        with self.lock:
            if name in catalog.segments:
                return None
        return Cleaned(victim.size_bytes - sum(each.held_bytes for each in carried), pages)

    @off_lock
    def _carry(self, name: str, record: int) -> StoredObject | None:
        """Write an object again, as it is, into the segment that is written now; None where it is not there."""
        catalog, writer = self._catalog, self._writer
        fd, places = -1, list[FileOffset]()
        with catalog.lock:
            each = catalog.index.at(name, record)
        if each is None:
            return None
        payload = bytearray(each.held_bytes)
        try:
            with catalog.lend([each.segment]) as files:
                if each.segment not in files:
                    return None
                got = os.preadv(files[each.segment].fd, [payload], each.offset)
            (digests,) = catalog.digests([each])
            if got < each.nbytes or not holds(memoryview(payload)[: each.nbytes], each.cells, digests, 0):
                return None
            with catalog.lock:
                places = writer.reserve([each.nbytes])
                target = catalog.segments[places[0].segment]
            fd = open_shared(target.data)
            if os.pwrite(fd, payload, places[0].offset) < each.nbytes:
                return None
            with catalog.lock:
                header = Header(each.page, each.part, places[0], each.nbytes, digests)
                (answer,) = writer.announce([header], self._stamp(each))
                if isinstance(answer, str):
                    return None
                catalog.index.add([answer])
                return each
        except OSError:
            return None
        finally:
            close_quietly(fd)
            with catalog.lock:
                writer.ended(places)
