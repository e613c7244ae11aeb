"""Retention decides which pages of a namespace go: over its quota, past its TTL, least recently used, or bad."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from kvmover.store.catalog import SLICE, Catalog
from kvmover.store.cleaning import SegmentCleaner
from kvmover.store.deletion import DeletionOrder, TwoLooks
from kvmover.store.files import Files
from kvmover.store.guard_lock import GuardLock, off_lock, under_lock
from kvmover.store.machine import Machine
from kvmover.store.policy import Policy
from kvmover.store.results import Counters
from kvmover.store.second_look import GIVEN_BACK
from kvmover.store.stored import Placed, Rows, StoredObject
from kvmover.store.takeover import SegmentTakeover
from kvmover.store.writer import Writer

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

    def __init__(self, folder: Path, namespace: bytes, policy: Policy, files: Files, machine: Machine) -> None:
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
