"""The pages of a namespace that are evicted, expired or deleted as bad: over the quota, past the TTL, least recently
used.

Where a file system frees whole files only, a segment is evicted: the one with the largest share of cold bytes. Its hot
pages are copied into the segment being written, as the cleaner of a log does. So a hot page keeps no cold neighbours,
and room for a few pages costs at most one segment.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvmover.cache.prefix import POLICIES, PageOrder
from kvmover.store.boot import HostBoot
from kvmover.store.deletion import DeletionOrder
from kvmover.store.eviction import EvictionCandidate, carried, victim
from kvmover.store.files import Files, close_quietly, open_shared
from kvmover.store.guard_lock import GuardLock, off_lock, under_lock
from kvmover.store.record import holds
from kvmover.store.segment import Segment
from kvmover.store.segment_catalog import SLICE, Catalog
from kvmover.store.segment_writer import FileOffset, Header, Writer
from kvmover.store.store_policy import PageEviction, Policy
from kvmover.store.store_results import Counters
from kvmover.store.stored import Placed, Rows, StoredObject
from kvmover.store.takeover import SegmentTakeover

#: Coldest pages that are looked at to choose a segment.
_COLD = 4096


Unused = Callable[[Rows], tuple[Rows, Placed, int]]


@dataclass(frozen=True, slots=True)
class Cleaned:
    """A segment that was emptied: the bytes freed less the bytes carried forward, 0 if its files could not be removed;
    and the number of pages evicted.
    """

    freed_bytes: int
    pages: int


@dataclass(frozen=True, slots=True)
class _Victim:
    """A segment to evict, and the rows of its cold pages; the rows are valid while the lock is held."""

    segment: Segment
    size_bytes: int
    cold: Rows


class SegmentCleaner:
    """A cleaner that frees whole segments of a catalog through the process's writer. Used while writing."""

    def __init__(self, catalog: Catalog, writer: Writer, unused: Unused) -> None:
        """`unused` is called under the lock. Of the pages given it returns those to evict next, which no other process
        has used; their objects; and the number of pages that could not be looked at.
        """
        self._catalog, self._writer, self._unused = catalog, writer, unused

    @property
    def lock(self) -> GuardLock:
        """Returns the catalog's lock."""
        return self._catalog.lock

    @off_lock
    def clean(self, nbytes: int, keep: Sequence[bytes]) -> Cleaned | None:
        """Remove one segment, carrying its hot pages forward. Returns None if no segment can be removed, or the copies
        cannot be made durable: pages that a flush has made so stay so.

        Cold pages are those that would be evicted for `nbytes`, the least recently read ones; pages in `keep` are never
        cold.
        """
        with self.lock:
            catalog = self._catalog
            kept = catalog.index.pages_at(keep).tolist()
            coldest = catalog.index.hashes(catalog.index.coldest(_COLD, nbytes, kept))
        cold = [page for first in range(0, len(coldest), SLICE) for page in self._cold(coldest[first : first + SLICE])]
        with self.lock:
            chosen = self._victim(cold)
            if chosen is None:
                return None
            hot = self._hottest(chosen)
        copied = [each for record in hot if (each := self._carry(chosen.segment.name, record))]
        try:
            if copied:
                self._writer.sync_own()
        except OSError as error:
            catalog.lag(error)
            return None
        return self._removed(chosen, copied)

    @off_lock
    def _cold(self, pages: Sequence[bytes]) -> list[bytes]:
        """Returns the pages that no other process has used."""
        with self.lock:
            cold, _, _ = self._unused(self._catalog.index.pages_at(pages))
            return self._catalog.index.hashes(cold)

    @under_lock
    def _victim(self, pages: Sequence[bytes]) -> _Victim | None:
        """Returns the segment with the smallest share of hot bytes, given cold `pages`."""
        catalog = self._catalog
        cold = catalog.index.pages_at(pages)
        placed = catalog.index.placed(cold)
        cold_bytes = Counter[str]()
        for name, some in placed.by_segment():
            cold_bytes[name] = int(placed.held[some].sum())
        best = victim(
            [
                EvictionCandidate(name, catalog.data_bytes(segment), catalog.index.live_bytes(name) - cold_bytes[name])
                for name, segment in catalog.segments.items()
                if segment.is_done
            ]
        )
        if best is None and self._writer.abandon():
            return self._victim(pages)
        return _Victim(catalog.segments[best.name], best.data_bytes, cold) if best else None

    @under_lock
    def _hottest(self, chosen: _Victim) -> list[int]:
        """Returns records of hot pages' objects, most recently read first, up to a fixed share of the segment."""
        index = self._catalog.index
        placed = index.placed_in(chosen.segment.name)
        hot = placed.where(~np.isin(placed.pages, chosen.cold))
        return hot.records[carried(chosen.size_bytes, hot.held, index.stamps_at(hot.pages))].tolist()

    @under_lock
    def _stamp(self, each: StoredObject) -> int:
        (stamp,) = self._catalog.index.stamps_of([each.page])
        return stamp

    @off_lock
    def _removed(self, chosen: _Victim, copied: list[StoredObject]) -> Cleaned:
        """Delete all that is left in a segment, with every object of its pages, and the segment."""
        catalog, name = self._catalog, chosen.segment.name
        kept, pages = {each.page for each in copied}, 0
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
                return Cleaned(0, pages)
        return Cleaned(chosen.size_bytes - sum(each.held_bytes for each in copied), pages)

    @off_lock
    def _carry(self, name: str, record: int) -> StoredObject | None:
        """Copy an object unchanged into the segment being written. Returns None if it could not be read or written."""
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


#: Pages that are stamped under one hold of the lock: a few milliseconds.
_STAMPED = 64

#: Expired pages that one look-up deletes.
_EXPIRED = 64


def _slack(held_bytes: int) -> int:
    """Returns the bytes that eviction frees beyond the need, so that few puts evict and each eviction is short."""
    return min(held_bytes // 16, 16 << 20)


class Retention:
    """A namespace as this process holds it: its catalog, its writer, and its limits.

    `lock` is held for moments, around every access. `writing` is held for one write, `tidying` for one flush or
    collection, which no put waits for. They are taken in the order tidying, writing, lock.
    """

    def __init__(self, folder: Path, namespace: bytes, policy: Policy, files: Files, machine: HostBoot) -> None:
        self.folder = folder
        self.policy = policy
        self.files = files
        order = None if policy.eviction is PageEviction.LRU else PageOrder(POLICIES[policy.eviction])
        self.catalog = Catalog(folder, namespace, files, machine, order)
        self.counters = Counters(lagged=self.catalog.lagged, deleted=self.catalog.door.deleted)
        self.lock = self.catalog.lock
        self.writing = GuardLock(self.lock)
        self.tidying = GuardLock(self.writing, self.lock)
        self.writer = Writer(self.catalog, policy.segment_bytes)
        self._cleaner = SegmentCleaner(self.catalog, self.writer, self.unused)
        self.takeover = SegmentTakeover(self.catalog)
        self._read: set[bytes] = set()

    @under_lock
    def note_use(self, pages: Collection[bytes]) -> None:
        """Record that pages were read, in this order."""
        self.catalog.index.use(list(pages), self.catalog.machine.now())
        self._read.update(pages)

    @off_lock
    def make_room(self, nbytes: int, keep: Collection[bytes] = ()) -> bool:
        """Evict pages outside `keep` until `nbytes` more fit the quota. Returns False if they never do. Used while
        writing.
        """
        quota = self.policy.quota_bytes
        if quota is None:
            return True
        if nbytes > quota:
            return False
        with self.lock:
            held = self.catalog.held_bytes
        if held + nbytes > quota:
            self.evict_to(quota - (max(nbytes, _slack(quota)) if nbytes else 0), keep)
        return True

    @off_lock
    def give_way(self, nbytes: int, keep: Collection[bytes]) -> bool:
        """Evict pages outside `keep` on a full disk, until `nbytes` and a little more are free. Used while writing.

        Returns True if any page was evicted.
        """
        with self.lock:
            held = self.catalog.held_bytes
        return self.evict_to(max(0, held - nbytes - _slack(held)), keep) > 0

    @off_lock
    def evict_to(self, held_bytes: int, keep: Collection[bytes] = ()) -> int:
        """Evict the least recently read pages until at most `held_bytes` are held. Returns the bytes freed. Used while
        writing.

        The lock is released between slices. Pages of `keep` stay.
        """
        pages = list(keep)
        freed = 0
        while True:
            with self.lock:
                goal, step = self.catalog.held_bytes - held_bytes, None
                if goal > 0 and self.catalog.punches:
                    step = self._evict_some(goal, self.catalog.index.use(pages, 0))
            self.catalog.sweep()
            if goal > 0 and step is None:
                step = self._clean(goal, pages) or None
            if step is None:
                return freed
            self.counters.evicted_bytes += step
            freed += step

    @under_lock
    def _evict_some(self, nbytes: int, kept: Collection[int]) -> int | None:
        """Evict a few pages. Returns the bytes freed: 0 if all of them were used since; None if no page may be evicted,
        or none could be looked at.
        """
        pages = self.catalog.index.coldest(SLICE, nbytes, kept)
        if not len(pages):
            return None
        cold, placed, silent = self.unused(pages)
        if silent == len(pages):
            return None
        self.counters.evicted_pages += len(cold)
        return self.catalog.kill(placed, DeletionOrder.EVICTED)

    @off_lock
    def _clean(self, nbytes: int, keep: Sequence[bytes]) -> int:
        """Evict a segment where only whole files are freed. Returns the bytes freed."""
        cleaned = None if self.catalog.punches else self._cleaner.clean(nbytes, keep)
        self.counters.evicted_pages += cleaned.pages if cleaned else 0
        return cleaned.freed_bytes if cleaned else 0

    @under_lock
    def unused(self, pages: Rows) -> tuple[Rows, Placed, int]:
        """Returns the pages that are alive and that no other process has used since; their objects; and the number of
        pages that could not be looked at.

        A page used elsewhere becomes the most recently used here. A page that could not be looked at stays, after pages
        that can be.
        """
        index = self.catalog.index
        placed = index.placed(pages)
        told, alive, written = self.catalog.last_uses(placed)
        if told.all() and alive.all() and (written <= index.stamps_at(placed.pages)).all():
            return pages, placed, 0
        order = np.argsort(pages)
        owners = order[np.searchsorted(pages[order], placed.pages)]
        last = np.zeros(len(pages), np.int64)
        np.maximum.at(last, owners[alive], written[alive])
        living = np.zeros(len(pages), np.bool_)
        living[owners[alive]] = True
        used = living & (last > index.stamps_at(pages))
        for page, stamp in zip(index.hashes(pages[used]), last[used].tolist(), strict=True):
            index.use([page], stamp)
        silent = np.zeros(len(pages), np.bool_)
        silent[owners[~told]] = True
        index.use(index.hashes(pages[silent]), 0)
        cold = living & ~used & ~silent
        if not alive.all():
            index.remove_placed(placed.where(~alive))
        unused = placed if cold.all() and alive.all() else placed.where(alive & cold[owners])
        return pages[cold], unused, int(silent.sum())

    @under_lock
    def expire(self) -> int:
        """Delete a few pages unused for the policy's TTL. Returns the number of pages that could be looked at."""
        if self.policy.ttl_s is None:
            return 0
        index, before = self.catalog.index, self.catalog.machine.now() - self.policy.ttl_s
        pages = index.coldest(_EXPIRED, 1 << 62, (), before)
        if not len(pages):
            return 0
        old, placed, silent = self.unused(pages)
        self.catalog.kill(placed, DeletionOrder.EXPIRED)
        self.counters.expired_pages += len(old)
        return len(pages) - silent

    @under_lock
    def stale(self, pages: Sequence[bytes]) -> set[bytes]:
        """Returns the pages among `pages` that are past the TTL and not deleted yet."""
        index, ttl_s = self.catalog.index, self.policy.ttl_s
        if ttl_s is None:
            return set()
        before = self.catalog.machine.now() - ttl_s
        old = [page for page, stamp in zip(pages, index.stamps_of(pages), strict=True) if stamp < before]
        if old:
            self.unused(np.unique(index.pages_at(old)))
        return {page for page, stamp in zip(old, index.stamps_of(old), strict=True) if stamp < before}

    @off_lock
    def write_stamps(self) -> None:
        """Write the last uses of pages read here into their headers, where other processes' eviction sees them.

        A header is written at most once in `stamp_s` seconds. The lock is released between slices.
        """
        with self.lock:
            pages, self._read = list(self._read), set()
        for first in range(0, len(pages), _STAMPED):
            with self.lock:
                for page in pages[first : first + _STAMPED]:
                    self._write_stamps(page)

    @under_lock
    def _write_stamps(self, page: bytes) -> None:
        entry = self.catalog.index.get(page)
        for each in entry.objects if entry else ():
            if entry and entry.stamp >= each.stamp + self.policy.stamp_s:
                self.catalog.index.stamped(each, entry.stamp)
                with suppress(OSError):
                    self.catalog.segments[each.segment].stamp(each.record, entry.stamp)
