"""Retention decides which pages of a namespace go: over its quota, past its TTL, least recently used, or bad."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from threading import RLock

from kvmover.store.catalog import Catalog
from kvmover.store.files import Files
from kvmover.store.index import Page, StoredObject
from kvmover.store.policy import Policy
from kvmover.store.results import Counters
from kvmover.store.segment import Machine
from kvmover.store.writer import Writer

#: Eviction frees this share of the quota beyond what is needed, so that not every put evicts.
_SLACK = 1 / 64


class Retention:
    """A namespace as this process holds it: what it knows, what it writes, and what it may hold.

    `lock` is for a moment at a time, around everything here; `writing` is held for as long as one writes,
    and is taken first.
    """

    def __init__(self, folder: Path, namespace: bytes, policy: Policy, files: Files, machine: Machine) -> None:
        self.folder = folder
        self.policy = policy
        self.counters = Counters()
        self.files = files
        self.catalog = Catalog(folder, namespace, files, machine)
        self.lock, self.writing = self.catalog.lock, RLock()
        self.writer = Writer(self.catalog, policy.segment_bytes)
        self._read: set[bytes] = set()

    def used(self, pages: Collection[bytes]) -> None:
        """Pages were read, in this order: under the lock."""
        now, use = self.catalog.machine.now(), self.catalog.index.use
        for page in pages:
            use(page, now)
        self._read.update(pages)

    def make_room(self, nbytes: int) -> bool:
        """Evict until `nbytes` more fit the quota; False where they never do. Under the lock."""
        quota = self.policy.quota_bytes
        if quota is None:
            return True
        if nbytes > quota:
            return False
        if self.catalog.held_bytes + nbytes > quota:
            self.evict_to(quota - (max(nbytes, int(quota * _SLACK)) if nbytes else 0))
        return True

    def evict_to(self, held_bytes: int) -> int:
        """Evict the least recently read pages until at most so much is held; the bytes freed. Under the lock."""
        freed = 0
        index = self.catalog.index
        while self.catalog.held_bytes > held_bytes and (oldest := index.oldest()):
            page, entry = oldest
            if not self._used_elsewhere(page, entry):
                freed += self._delete(entry)
                self.counters.evicted_pages += 1
        self.counters.evicted_bytes += freed
        return freed

    def _used_elsewhere(self, page: bytes, entry: Page) -> bool:
        """Whether another process used the page since, which makes it the last to go, or has deleted it."""
        known, written = entry.stamp, self.catalog.last_use(entry)
        if page not in self.catalog.index:
            return True
        if written > known:
            self.catalog.index.use(page, written)
        return written > known

    def _delete(self, entry: Page) -> int:
        return self.catalog.delete(list(entry.objects))

    def expire(self) -> int:
        """Delete pages that nobody used for the policy's TTL: how many. Under the lock."""
        if self.policy.ttl_s is None:
            return 0
        before, expired = self.catalog.machine.now() - self.policy.ttl_s, 0
        while (oldest := self.catalog.index.oldest()) and oldest[1].stamp < before:
            if not self._used_elsewhere(*oldest):
                self._delete(oldest[1])
                expired += 1
        self.counters.expired_pages += expired
        return expired

    def write_stamps(self) -> None:
        """Tell other processes' eviction what was read here, in the headers, each at most once in `stamp_s` seconds."""
        for page in self._read:
            entry = self.catalog.index.get(page)
            for each in entry.objects if entry else ():
                if entry and entry.stamp >= each.stamp + self.policy.stamp_s:
                    each.stamp = entry.stamp
                    with suppress(OSError):
                        self.catalog.segments[each.segment].stamp(each.record, entry.stamp)
        self._read.clear()

    def poison(self, each: StoredObject, reason: str = "digest") -> bool:
        """Delete a bad object, so that the next write goes through; False where it is gone already. Under the lock."""
        if not self.catalog.alive(each):
            self.catalog.index.remove(each)
            return False
        self.catalog.delete([each])
        self.counters.poisoned[reason] += 1
        return True
