"""PageStore: one namespace of pages in a directory, opened; and its upkeep."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from threading import RLock
from types import TracebackType

from kvmover.errors import StoreError
from kvmover.store.catalog import Catalog
from kvmover.store.files import Files, PlainFiles
from kvmover.store.index import Page, StoredObject, Watcher
from kvmover.store.machine import Machine, this_machine
from kvmover.store.manifest import write_manifest
from kvmover.store.namespace import Namespace
from kvmover.store.part import Part
from kvmover.store.policy import Policy
from kvmover.store.results import Collected, Counters, Recovered, Stat, Verified
from kvmover.store.view import PartView
from kvmover.store.writer import Writer
from kvmover.transport.base import Memory

#: Eviction frees this share of the quota beyond what is needed, so that not every put evicts.
_SLACK = 1 / 64

Election = Callable[[bytes], bool]


class PageStore:
    """Safe for one thread that asks, one that reads and one that writes; any number of processes share a root.

    Nothing here owns a thread: `collect` every few seconds keeps quota and TTL, and writes down what was read; `flush`
    makes pages safe from a power cut and shows them to other machines. Without either nothing is ever wrong.
    """

    def __init__(self, folder: Path, namespace: bytes, policy: Policy, files: Files, machine: Machine) -> None:
        """A namespace by its directory: for tools that know no model. `open` is for everybody else."""
        self.folder = folder
        self.policy = policy
        self.counters = Counters()
        self.files = files
        self.catalog = Catalog(folder, namespace, files, machine)
        self.lock, self.writing = self.catalog.lock, RLock()
        self.writer = Writer(self.catalog, policy.segment_bytes)
        self._read: set[bytes] = set()
        self.catalog.recover()
        self.catalog.index.sort()
        self.recovered = self._recovered()

    @classmethod
    def open(
        cls,
        root: Path,
        namespace: Namespace,
        policy: Policy | None = None,
        files: Files | None = None,
        machine: Machine | None = None,
    ) -> PageStore:
        """The pages of `namespace` under `root`, a directory that exists. The store closes `files`.

        Raises StoreError. By default bytes go through the page cache; `files_for` chooses NIXL where it is there.
        """
        if not root.is_dir():
            raise StoreError(f"{root} is not a directory")
        folder = root / namespace.folder
        if folder.is_symlink():
            raise StoreError(f"{folder} is a link, which may lead anywhere")
        try:
            folder.mkdir(exist_ok=True)
            write_manifest(folder, namespace)
            return cls(folder, namespace.digest, policy or Policy(), files or PlainFiles(), machine or this_machine())
        except OSError as error:
            raise StoreError(f"cannot open the page store in {folder}: {error.strerror}") from error

    def _recovered(self) -> Recovered:
        stat = self.stat()
        return Recovered(stat.segments, stat.objects, dict(self.catalog.dropped))

    def register(self, memory: Memory) -> None:
        """Pages may be read into and written from `memory`, which the caller keeps. Raises DescriptorError."""
        self.files.register(memory)

    def deregister(self, memory: Memory) -> None:
        self.files.deregister(memory)

    def view(self, namespace: Namespace, part: Part, writes: Election | None = None) -> PartView:
        """One rank's door: pages as the `part` of them that it holds. `writes` says which of them it is elected for."""
        if namespace.folder != self.folder.name:
            raise StoreError(f"{namespace} is not what is stored in {self.folder.name}")
        return PartView(self, part, part.key(namespace), writes)

    def watch(self, watcher: Watcher) -> None:
        """Tell `watcher` of every page that loses an object, by whoever's hand, as soon as this process knows of it.

        The caller keeps it; the store lets go of it with the caller.
        """
        with self.lock:
            self.catalog.index.watch(watcher)

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
            self._evict_to(quota - (max(nbytes, int(quota * _SLACK)) if nbytes else 0))
        return True

    def evict(self, nbytes: int) -> int:
        """Evict the least recently read pages, whole, until `nbytes` bytes are free; the bytes freed."""
        with self.lock:
            self.catalog.refresh()
            return self._evict_to(max(0, self.catalog.held_bytes - nbytes))

    def _evict_to(self, held_bytes: int) -> int:
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

    def collect(self) -> Collected:
        """Upkeep: write down what was read, take over dead writers, delete what is too old or too much."""
        with self.writing, self.lock:
            index, counters = self.catalog.index, self.counters
            held, evicted = index.held_bytes, counters.evicted_pages
            self._write_stamps()
            adopted = self.catalog.recover()
            expired = self.expire()
            self.make_room(0)
            self.catalog.shorten_news()
            freed = max(0, held - index.held_bytes)
            return Collected(expired, counters.evicted_pages - evicted, freed, adopted)

    def _write_stamps(self) -> None:
        """Tell other processes' cleaners what was read here, in the headers, each at most once in `stamp_s` seconds."""
        for page in self._read:
            entry = self.catalog.index.get(page)
            for each in entry.objects if entry else ():
                if entry and entry.stamp >= each.stamp + self.policy.stamp_s:
                    each.stamp = entry.stamp
                    with suppress(OSError):
                        self.catalog.segments[each.segment].stamp(each.record, entry.stamp)
        self._read.clear()

    def flush(self) -> None:
        """Make all pages written here safe from a power cut, and visible to other machines. Raises StoreError."""
        with self.writing:
            with self.lock:
                self._write_stamps()
            try:
                self.writer.sync()
            except OSError as error:
                raise StoreError(f"cannot flush {self.folder}: {error.strerror}") from error

    def clear(self) -> int:
        """Delete every page of this namespace, and nothing else; how many."""
        with self.writing, self.lock:
            self.catalog.refresh()
            pages = len(self.catalog.index)
            self.writer.abandon()
            for segment in list(self.catalog.segments.values()):
                segment.unlink()
                self.catalog.forget(segment.name)
            return pages

    def stat(self) -> Stat:
        with self.lock:
            self.catalog.refresh()
            index = self.catalog.index
            pages = [page for _, page in index.pages()]
            stamps = [page.stamp for page in pages] or [0]
            return Stat(
                pages=len(pages),
                objects=sum(len(page.objects) for page in pages),
                segments=len(self.catalog.segments),
                payload_bytes=sum(page.nbytes for page in pages),
                held_bytes=self.catalog.held_bytes,
                head_bytes=sum(segment.parsed for segment in self.catalog.segments.values()),
                oldest_use_s=min(stamps),
                newest_use_s=max(stamps),
            )

    def verify(self, progress: Callable[[StoredObject], None] | None = None) -> Verified:
        """Read every object whole and delete those that are bad. `progress` is called after each.

        Raises OSError where a file is there and cannot be opened: nothing is deleted for that.
        """
        with self.lock:
            self.catalog.refresh()
            objects = [each for _, page in self.catalog.index.pages() for each in page.objects]
        nbytes, bad = 0, dict[str, int]()
        for each in objects:
            reason = self.catalog.check(each)
            with self.lock:
                if reason and self.poison(each, reason):
                    bad[reason] = bad.get(reason, 0) + 1
            nbytes += each.nbytes
            if progress:
                progress(each)
        return Verified(len(objects), nbytes, bad)

    def poison(self, each: StoredObject, reason: str = "digest") -> bool:
        """Delete a bad object, so that the next write goes through; False where it is gone already. Under the lock."""
        if not self.catalog.alive(each):
            self.catalog.index.remove(each)
            return False
        self.catalog.delete([each])
        self.counters.poisoned[reason] += 1
        return True

    def close(self) -> None:
        """Flush, and give everything back. Safe to call twice."""
        with self.writing, self.lock:
            if self.catalog.segments:
                with suppress(OSError):
                    self._write_stamps()
            self.writer.close()
            self.catalog.close()
            self.files.close()

    def __enter__(self) -> PageStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
