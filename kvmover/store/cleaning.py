"""Where a file system gives back whole files only, a segment is evicted: the one with most cold bytes in it.

Its hot pages are carried forward into the segment that is being written, as the cleaner of a log does. So one hot page
in each segment keeps no cold ones, and room for a few pages costs no more than a segment.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from kvmover.store.catalog import Catalog
from kvmover.store.files import close_quietly, open_shared
from kvmover.store.index import Page, StoredObject
from kvmover.store.record import holds
from kvmover.store.segment import Segment
from kvmover.store.writer import FileOffset, Header, Writer

#: At most this share of a segment is carried forward: beyond it, carrying costs more than it frees.
_CARRIED_SHARE = 1 / 2


@dataclass(frozen=True, slots=True)
class Cleaned:
    """A segment that was removed: what the file system has back, beside what was carried, and pages that went."""

    freed_bytes: int
    pages: int


@dataclass(frozen=True, slots=True)
class _Victim:
    """The segment that goes, and the pages that are cold."""

    segment: Segment
    size_bytes: int
    cold: set[bytes]


class SegmentCleaner:
    """Frees whole segments of a catalog, through the writer of the process. Used while writing."""

    def __init__(self, catalog: Catalog, writer: Writer, used_elsewhere: Callable[[bytes, Page], bool]) -> None:
        """`used_elsewhere`: whether a page is not the next to go after all. It is called under the lock."""
        self._catalog, self._writer, self._used_elsewhere = catalog, writer, used_elsewhere

    def clean(self, nbytes: int, keep: frozenset[bytes]) -> Cleaned | None:
        """Remove one segment, carrying forward what is hot in it. None where nothing can go.

        Cold are the pages that would have to go for `nbytes`, the least recently read ones; never those of `keep`.
        """
        with self._catalog.lock:
            victim = self._victim(nbytes, keep)
            if victim is None:
                return None
            hot = self._hottest(victim)
        carried = [each for each in hot if self._carry(each)]
        with self._catalog.lock:
            return self._removed(victim, carried)

    def _victim(self, nbytes: int, keep: frozenset[bytes]) -> _Victim | None:
        """The segment with the smallest share of hot bytes."""
        catalog, cold = self._catalog, self._cold(nbytes, keep)
        cold_bytes = Counter[str]()
        for page in cold:
            if entry := catalog.index.get(page):
                for each in entry.objects:
                    cold_bytes[each.segment] += each.held_bytes
        best: tuple[float, _Victim] | None = None
        for segment in catalog.segments.values():
            size = catalog.data_bytes(segment) if segment.is_done else 0
            hot = catalog.index.live_bytes(segment.name) - cold_bytes[segment.name]
            if size and hot < size and (best is None or hot / size < best[0]):
                best = hot / size, _Victim(segment, size, cold)
        if best is None and self._writer.abandon():
            return self._victim(nbytes, keep)
        return best[1] if best else None

    def _cold(self, nbytes: int, keep: frozenset[bytes]) -> set[bytes]:
        """The least recently read pages, of so many bytes together."""
        cold, found = set[bytes](), 0
        for page, entry in self._catalog.index.pages():
            if found >= nbytes or page in keep:
                break
            if not self._used_elsewhere(page, entry):
                cold.add(page)
                found += entry.held_bytes
        return cold

    def _hottest(self, victim: _Victim) -> list[StoredObject]:
        """Objects of hot pages, the most recently read first, of a share of the segment at most."""
        room = int(victim.size_bytes * _CARRIED_SHARE)
        hot = [each for each in self._catalog.index.objects(victim.segment.name) if each.page not in victim.cold]
        taken: list[StoredObject] = []
        for each in sorted(hot, key=self._stamp, reverse=True):
            room -= each.held_bytes
            if room < 0:
                break
            taken.append(each)
        return taken

    def _stamp(self, each: StoredObject) -> int:
        entry = self._catalog.index.get(each.page)
        return entry.stamp if entry else 0

    def _removed(self, victim: _Victim, carried: list[StoredObject]) -> Cleaned | None:
        """Delete what is left in a segment, with all that belongs to its pages, and the segment."""
        catalog, name = self._catalog, victim.segment.name
        left = {each.page for each in catalog.index.objects(name)} - {each.page for each in carried}
        gone = list(catalog.index.objects(name))
        for page in left:
            if entry := catalog.index.get(page):
                gone += [each for each in entry.objects if each.segment != name]
        catalog.delete(gone)
        if name in catalog.segments:  # nothing lived in it
            with suppress(OSError):
                catalog.reclaim(victim.segment)
        if name in catalog.segments:
            return None
        return Cleaned(victim.size_bytes - sum(each.held_bytes for each in carried), len(left))

    def _carry(self, each: StoredObject) -> bool:
        """Write an object again, as it is, into the segment that is written now; whether it is there."""
        catalog, writer, payload = self._catalog, self._writer, bytearray(each.held_bytes)
        fd, places = -1, list[FileOffset]()
        try:
            with catalog.lend([each.segment]) as files:
                if each.segment not in files:
                    return False
                got = os.preadv(files[each.segment].fd, [payload], each.offset)
            (digests,) = catalog.digests([each])
            if got < each.nbytes or not holds(memoryview(payload)[: each.nbytes], each.cells, digests, 0):
                return False
            with catalog.lock:
                places = writer.reserve([each.nbytes])
                target = catalog.segments[places[0].segment]
            fd = open_shared(target.data)
            if os.pwrite(fd, payload, places[0].offset) < each.nbytes:
                return False
            with catalog.lock:
                header = Header(each.page, each.part, places[0], each.nbytes, digests)
                (answer,) = writer.announce([header], self._stamp(each))
                if isinstance(answer, str):
                    return False
                catalog.index.add([answer])
                return True
        except OSError:
            return False
        finally:
            close_quietly(fd)
            with catalog.lock:
                writer.ended(places)
