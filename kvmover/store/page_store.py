"""A PageStore is one namespace of pages in a directory, opened, with its upkeep."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from kvmover.errors import StoreError
from kvmover.store.catalog import Verdict
from kvmover.store.files import Files, PlainFiles
from kvmover.store.index import StoredObject, Watcher
from kvmover.store.machine import Machine, this_machine
from kvmover.store.manifest import write_manifest
from kvmover.store.namespace import Namespace
from kvmover.store.part import PagePart
from kvmover.store.part_view import PartView
from kvmover.store.policy import Policy
from kvmover.store.results import Collected, Recovered, Stat, Verified
from kvmover.store.retention import Retention
from kvmover.store.verify import suspects
from kvmover.transport import Memory

Election = Callable[[bytes], bool]


class PageStore(Retention):
    """Pages of one namespace as checked objects in files, which any number of processes share.

    Safe for one thread that asks, one that reads and one that writes.

    Nothing here owns a thread: `collect` every few seconds keeps quota and TTL, and writes down what was read; `flush`
    makes pages safe from a power cut and shows them to other machines. Without either nothing is ever wrong.
    """

    def __init__(self, folder: Path, namespace: bytes, policy: Policy, files: Files, machine: Machine) -> None:
        """A namespace by its directory: for tools that know no model. `open` is for everybody else."""
        super().__init__(folder, namespace, policy, files, machine)
        self.catalog.read_heads()
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
            if os.access(folder, os.W_OK):
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
        """No page goes to or comes from `memory` any more. Raises DescriptorError for what is not registered."""
        self.files.deregister(memory)

    def view(self, namespace: Namespace, part: PagePart, writes: Election | None = None) -> PartView:
        """One rank's access: the `part` that it holds of each page. `writes` says which pages it is elected for."""
        if namespace.folder != self.folder.name:
            raise StoreError(f"{namespace} is not what is stored in {self.folder.name}")
        return PartView(self, part, part.key(namespace), writes)

    def watch(self, watcher: Watcher) -> None:
        """Tell `watcher` of every page that loses an object, by whoever's hand, as soon as this process knows of it.

        The caller keeps it; the store lets go of it with the caller.
        """
        with self.lock:
            self.catalog.index.watch(watcher)

    def evict(self, nbytes: int) -> int:
        """Evict the least recently read pages, whole, until `nbytes` bytes are free; the bytes freed."""
        with self.writing:
            with self.lock:
                self.catalog.refresh()
                goal = max(0, self.catalog.held_bytes - nbytes)
            return self.evict_to(goal)

    def collect(self) -> Collected:
        """Upkeep: write down what was read, take over dead writers, delete what is too old or too much.

        Raises nothing for what the system refuses: it is done another time.
        """
        with self.tidying:
            index, counters = self.catalog.index, self.counters
            held, evicted = index.held_bytes, counters.evicted_pages
            self.write_stamps()
            adopted, expired = self.catalog.recover(), 0
            while step := self._expire_some():
                expired += step
            with self.writing:
                self.make_room(0)
            with self.lock:
                self.catalog.shorten_deletions()
                freed = max(0, held - index.held_bytes)
            return Collected(expired, counters.evicted_pages - evicted, freed, adopted)

    def _expire_some(self) -> int:
        with self.lock:
            return self.expire()

    def flush(self) -> None:
        """Make all pages safe from a power cut that were written here, or were there already when they were put.

        What was written here is then visible to other machines; what others wrote, once they flush. Raises StoreError:
        pages that the disk did not take are deleted, and the next put writes them again.
        """
        with self.tidying:
            self.write_stamps()
            try:
                self.writer.sync()
            except OSError as error:
                raise StoreError(f"cannot flush {self.folder}: {error.strerror}") from error

    def clear(self) -> int:
        """Delete every page of this namespace, and nothing else; how many. Raises StoreError."""
        with self.writing, self.lock:
            self.catalog.refresh()
            pages = len(self.catalog.index)
            self.writer.abandon()
            try:
                for segment in list(self.catalog.segments.values()):
                    segment.unlink()
                    self.catalog.forget(segment.name)
            except OSError as error:
                raise StoreError(f"cannot clear {self.folder}: {error.strerror}") from error
            return pages

    def stat(self) -> Stat:
        """What the namespace holds now, objects of other processes included."""
        with self.lock:
            self.catalog.refresh()
            index = self.catalog.index
            oldest_s, newest_s = index.span_s
            return Stat(
                pages=len(index),
                objects=index.holdings.objects,
                segments=len(self.catalog.segments),
                payload_bytes=index.holdings.payload_bytes,
                held_bytes=self.catalog.held_bytes,
                head_bytes=sum(segment.parsed for segment in self.catalog.segments.values()),
                oldest_use_s=oldest_s,
                newest_use_s=newest_s,
            )

    def verify(self, progress: Callable[[StoredObject], None] | None = None) -> Verified:
        """Read every object whole and delete those that are bad. `progress` is called after each.

        Raises OSError where a file is there and cannot be opened: nothing is deleted for that.
        """
        with self.lock:
            self.catalog.refresh()
            names = list(self.catalog.segments)
        count, nbytes, bad = 0, 0, Counter[str]()
        for name in names:
            with self.lock:
                objects = self.catalog.index.objects(name)
            for each, is_suspect in suspects(self.catalog, name, objects):
                if is_suspect and (reason := self._condemned(each)):
                    bad[reason] += 1
                count += 1
                nbytes += each.nbytes
                if progress:
                    progress(each)
        return Verified(count, nbytes, dict(bad))

    def _condemned(self, each: StoredObject) -> str:
        """Look at an object again, and delete it where it is bad: the reason, or ""."""
        verdict, reason = self.catalog.look_again(each)
        if verdict is not Verdict.BAD:
            return ""
        self.counters.poisoned[reason] += 1
        with self.lock:
            self.catalog.delete([each])
        return reason

    def close(self) -> None:
        """Flush, and give everything back. Safe to call twice."""
        with self.tidying, self.writing:
            if self.catalog.segments:
                self.write_stamps()
            self.writer.close()
            with self.lock:
                self.catalog.close()
            self.files.close()

    def __enter__(self) -> PageStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
