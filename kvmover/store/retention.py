"""Retention decides which pages of a namespace go: over its quota, past its TTL, least recently used, or bad.

Where a file system gives back whole files only, a segment is evicted: the one with most cold bytes in it. Its hot pages
are carried forward into the segment that is being written, as the cleaner of a log does. So one hot page in each
segment keeps no cold ones, and room for a few pages costs no more than a segment.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvmover.store.boot import HostBoot
from kvmover.store.deletion import DeletionOrder, TwoLooks
from kvmover.store.eviction import EvictionCandidate, carried, victim
from kvmover.store.fetch import GIVEN_BACK
from kvmover.store.files import Files, close_quietly, open_shared
from kvmover.store.guard_lock import GuardLock, off_lock, under_lock
from kvmover.store.record import holds
from kvmover.store.segment import Segment
from kvmover.store.segment_catalog import SLICE, Catalog
from kvmover.store.segment_writer import FileOffset, Header, Writer
from kvmover.store.store_policy import Policy
from kvmover.store.store_results import Counters
from kvmover.store.stored import Placed, Rows, StoredObject
from kvmover.store.takeover import SegmentTakeover

#: Pages that are looked at to choose a segment by.
_COLD = 4096


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
            chosen = self._victim(cold)
            if chosen is None:
                return None
            hot = self._hottest(chosen)
        copied = [each for record in hot if (each := self._carry(chosen.segment.name, record))]
        return self._removed(chosen, copied)

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
        """Records of objects of hot pages, the most recently read first, of a share of the segment at most."""
        index = self._catalog.index
        placed = index.placed_in(chosen.segment.name)
        hot = placed.where(~np.isin(placed.pages, chosen.cold))
        return hot.records[carried(chosen.size_bytes, hot.held, index.stamps_at(hot.pages))].tolist()

    @under_lock
    def _stamp(self, each: StoredObject) -> int:
        (stamp,) = self._catalog.index.stamps_of([each.page])
        return stamp

    @off_lock
    def _removed(self, chosen: _Victim, copied: list[StoredObject]) -> Cleaned | None:
        """Delete what is left in a segment, with all that belongs to its pages, and the segment."""
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
                return None
        return Cleaned(chosen.size_bytes - sum(each.held_bytes for each in copied), pages)

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


#: Pages that are stamped under one hold of the lock: a few milliseconds.
_STAMPED = 64

#: Pages that a look-up deletes, which are too old.
_EXPIRED = 64


def _slack(held_bytes: int) -> int:
    """What eviction frees beyond what is needed, so that not every put evicts, and none of them long."""
    return min(held_bytes // 16, 16 << 20)


class Retention:
    """A namespace as this process holds it: what it knows, what it writes, and what it may hold.

    `lock` is for a moment at a time, around everything here. `writing` is held for as long as one writes, and `tidying`
    as long as one flushes or collects, which no put waits for. They are taken in the order tidying, writing, lock.
    """

    def __init__(self, folder: Path, namespace: bytes, policy: Policy, files: Files, machine: HostBoot) -> None:
        self.folder = folder
        self.policy = policy
        self.files = files
        self.catalog = Catalog(folder, namespace, files, machine)
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
        """Pages were read, in this order."""
        self.catalog.index.use(list(pages), self.catalog.machine.now())
        self._read.update(pages)

    @off_lock
    def make_room(self, nbytes: int, keep: Collection[bytes] = ()) -> bool:
        """Evict until `nbytes` more fit the quota, but no page of `keep`; False where they never do. While writing."""
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
        """The disk is full: evict what makes `nbytes` and a little more free, but no page of `keep`. While writing.

        Whether any was evicted.
        """
        with self.lock:
            held = self.catalog.held_bytes
        return self.evict_to(max(0, held - nbytes - _slack(held)), keep) > 0

    @off_lock
    def evict_to(self, held_bytes: int, keep: Collection[bytes] = ()) -> int:
        """Evict the least recently read pages until at most so much is held; the bytes freed. While writing.

        A slice at a time, between which others have the lock. Pages of `keep` stay.
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
        """Evict a few pages: the bytes freed, none where all that were looked at have been used. None where no page
        may go, or the system says nothing of any.
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
        """Evict a segment, where only whole files are freed; the bytes freed."""
        cleaned = None if self.catalog.punches else self._cleaner.clean(nbytes, keep)
        self.counters.evicted_pages += cleaned.pages if cleaned else 0
        return cleaned.freed_bytes if cleaned else 0

    @under_lock
    def unused(self, pages: Rows) -> tuple[Rows, Placed, int]:
        """Of pages those that no other process has used since, which makes them the last to go, nor deleted; and their
        objects. Then of how many pages the system says nothing: they stay, and others are asked for before them.
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
        """Delete pages that nobody used for the policy's TTL, a few: how many the system said anything of."""
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
        """Which of `pages` nobody has used for the TTL, though they were not deleted yet."""
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
        """Tell other processes' eviction what was read here, in the headers, each at most once in `stamp_s` seconds.

        A slice at a time, between which others have the lock.
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

    @off_lock
    def poison(self, each: StoredObject, looks: TwoLooks) -> bool:
        """Delete a bad object, so that the next write goes through.

        False where this process has deleted too many of late: it may be what is bad itself. Then it alone forgets the
        object, which it finds no more.
        """
        with self.lock:
            if not self.catalog.delete_one(each, looks):
                self.spare(each)
                return False
        self.catalog.sweep()
        if looks.reason not in GIVEN_BACK:
            self.counters.poisoned[looks.reason] += 1
        return True

    @under_lock
    def spare(self, each: StoredObject) -> None:
        """Forget an object that cannot be had here, and leave it to the others: it can be put again."""
        self.catalog.index.remove([each])
        self.counters.spared += 1
