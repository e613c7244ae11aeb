"""Retention decides which pages of a namespace go: over its quota, past its TTL, least recently used, or bad."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import RLock

from kvmover.store.budget import DeletionBudget
from kvmover.store.catalog import GIVEN_BACK, Catalog
from kvmover.store.cleaning import SegmentCleaner
from kvmover.store.files import Files
from kvmover.store.index import Page, StoredObject
from kvmover.store.machine import Machine
from kvmover.store.policy import Policy
from kvmover.store.results import Counters
from kvmover.store.writer import Writer

#: Pages that are deleted, or stamped, under one hold of the lock: a few milliseconds.
_SLICE = 64

#: Eviction frees this share of the quota beyond what is needed, so that not every put evicts.
_SLACK = 1 / 64


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
        self.counters = Counters(lagged=self.catalog.lagged)
        self.lock, self.writing, self.tidying = self.catalog.lock, RLock(), RLock()
        self.writer = Writer(self.catalog, policy.segment_bytes)
        self._cleaner = SegmentCleaner(self.catalog, self.writer, self.used_elsewhere)
        self._read: set[bytes] = set()
        self._budget = DeletionBudget(machine.now())

    def note_use(self, pages: Collection[bytes]) -> None:
        """Pages were read, in this order: under the lock."""
        self.catalog.index.use(list(pages), self.catalog.machine.now())
        self._read.update(pages)

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
            self.evict_to(quota - (max(nbytes, int(quota * _SLACK)) if nbytes else 0), keep)
        return True

    def give_way(self, nbytes: int, keep: Collection[bytes]) -> bool:
        """The disk is full: evict what makes `nbytes` and a little more free, but no page of `keep`. While writing.

        Whether any was evicted.
        """
        with self.lock:
            held = self.catalog.held_bytes
        return self.evict_to(max(0, held - nbytes - int(held * _SLACK)), keep) > 0

    def evict_to(self, held_bytes: int, keep: Collection[bytes] = ()) -> int:
        """Evict the least recently read pages until at most so much is held; the bytes freed. While writing.

        A slice at a time, between which others have the lock. Pages of `keep` stay.
        """
        with self.lock:
            self.catalog.index.use(list(keep), 0)
        freed = 0
        kept = frozenset(keep)
        while True:
            with self.lock:
                goal = self.catalog.held_bytes - held_bytes
                step = self._evict_some(goal, kept) if goal > 0 and self.catalog.punches else 0
            if goal > 0 and not step:
                step = self._clean(goal, kept)
            self.counters.evicted_bytes += step
            if not step:
                return freed
            freed += step

    def _evict_some(self, nbytes: int, keep: frozenset[bytes]) -> int:
        """Evict a few pages; the bytes freed."""
        pages = self._coldest(nbytes, keep, None)
        self.counters.evicted_pages += len(pages)
        return self.catalog.delete([each for entry in pages for each in entry.objects])

    def _coldest(self, nbytes: int, keep: frozenset[bytes], before: float | None) -> list[Page]:
        """A few of the pages that go next: of so many bytes together, not of `keep`, not used since `before`.

        Those that another process used since are the last to go now, and others take their place.
        """
        while True:
            pages: dict[bytes, Page] = {}
            for page, entry in self.catalog.index.pages():
                late = before is not None and entry.stamp >= before
                if len(pages) >= _SLICE or nbytes <= 0 or page in keep or late:
                    break
                pages[page] = entry
                nbytes -= entry.held_bytes
            spared = self.used_elsewhere(pages)
            left = [entry for page, entry in pages.items() if page not in spared]
            if left or not spared:
                return left
            nbytes += sum(pages[page].held_bytes for page in spared)

    def _clean(self, nbytes: int, keep: frozenset[bytes]) -> int:
        """Evict a segment, where only whole files are freed; the bytes freed."""
        cleaned = None if self.catalog.punches else self._cleaner.clean(nbytes, keep)
        self.counters.evicted_pages += cleaned.pages if cleaned else 0
        return cleaned.freed_bytes if cleaned else 0

    def used_elsewhere(self, pages: Mapping[bytes, Page]) -> set[bytes]:
        """Pages that another process used since, which makes them the last to go, or has deleted. Under the lock."""
        index, spared = self.catalog.index, set[bytes]()
        uses = self.catalog.last_uses(list(pages.values()))
        missing = index.missing(list(pages))
        for (page, entry), written, is_gone in zip(pages.items(), uses, missing, strict=True):
            if is_gone:
                spared.add(page)
            elif written > entry.stamp:
                index.use([page], written)
                spared.add(page)
        return spared

    def expire(self) -> int:
        """Delete pages that nobody used for the policy's TTL, a few: how many. Under the lock."""
        if self.policy.ttl_s is None:
            return 0
        pages = self._coldest(1 << 62, frozenset(), self.catalog.machine.now() - self.policy.ttl_s)
        self.catalog.delete([each for entry in pages for each in entry.objects])
        self.counters.expired_pages += len(pages)
        return len(pages)

    def stale(self, pages: Sequence[bytes]) -> set[bytes]:
        """Which of `pages` nobody has used for the TTL, though they were not deleted yet. Under the lock."""
        index, ttl_s = self.catalog.index, self.policy.ttl_s
        if ttl_s is None:
            return set()
        before = self.catalog.machine.now() - ttl_s
        old = [page for page, stamp in zip(pages, index.stamps_of(pages), strict=True) if stamp < before]
        entries = {page: entry for page in old if (entry := index.get(page))}
        return entries.keys() - self.used_elsewhere(entries)

    def write_stamps(self) -> None:
        """Tell other processes' eviction what was read here, in the headers, each at most once in `stamp_s` seconds.

        A slice at a time, between which others have the lock.
        """
        with self.lock:
            pages, self._read = list(self._read), set()
        for first in range(0, len(pages), _SLICE):
            with self.lock:
                for page in pages[first : first + _SLICE]:
                    self._write_stamps(page)

    def _write_stamps(self, page: bytes) -> None:
        entry = self.catalog.index.get(page)
        for each in entry.objects if entry else ():
            if entry and entry.stamp >= each.stamp + self.policy.stamp_s:
                self.catalog.index.stamped(each, entry.stamp)
                with suppress(OSError):
                    self.catalog.segments[each.segment].stamp(each.record, entry.stamp)

    def poison(self, each: StoredObject, reason: str = "digest") -> bool:
        """Delete a bad object, so that the next write goes through. Under the lock.

        False where this process has deleted too many of late: it may be what is bad itself. Then it alone forgets the
        object, which it finds no more.
        """
        if not self._budget.spend(self.catalog.machine.now()):
            self.catalog.index.remove([each])
            self.counters.spared += 1
            return False
        self.catalog.delete([each])
        if reason not in GIVEN_BACK:
            self.counters.poisoned[reason] += 1
        return True
