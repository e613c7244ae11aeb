"""A KeeperCatalog is a client's index of a namespace, read from the keeper's journal: lookups send no request.

The journal is a growing file in memory, whose size (`fstat`) shows new entries. Without a keeper the index is empty.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from pathlib import Path
from threading import RLock
from weakref import WeakSet

import numpy as np

from kvmover.store.files import OpenFile, PlainFiles, reason_of
from kvmover.store.guard_lock import GuardLock
from kvmover.store.index import Index
from kvmover.store.keeper.journal import (
    JournalChange,
    JournalEntry,
    decode_entries,
    page_and_digests,
    removed_places,
    runs_of,
    slab_name,
    slab_number,
    table_of,
)
from kvmover.store.keeper.link import FollowedJournal, KeeperLink, StoreFenced
from kvmover.store.keeper.messages import OPENED, OpenSlabs, SlabsToRead
from kvmover.store.keeper.sweep import Sweep
from kvmover.store.lent_files import LentFiles
from kvmover.store.objects import DIGEST, Plan, Verdict, Watcher
from kvmover.store.part import PagePart
from kvmover.store.record import holds
from kvmover.store.stored import StoredObject

#: Threads that copy out of slabs.
_COPIERS = 2


class KeeperFiles(PlainFiles):
    """The slabs of a keeper as open files, requested by number."""

    def __init__(self, link: KeeperLink) -> None:
        super().__init__()
        self._link = link
        self._ahead_fds: dict[str, int] = {}

    @property
    def name(self) -> str:
        return f"keeper {self._link.path}"

    def open(self, path: Path) -> OpenFile:
        fd = self._ahead_fds.pop(path.stem, -1)
        if fd < 0:
            said, fd = self._link.ask(OpenSlabs([slab_number(path.stem)]), SlabsToRead)
            if not said.slabs:
                raise FileNotFoundError(errno.ENOENT, "evicted")
        return OpenFile.of_descriptor(fd, path)

    def open_ahead(self, names: Sequence[str]) -> None:
        """Request descriptors of these slabs at once, for later calls of `open`. Raises OSError or StoreFenced."""
        for first in range(0, len(names), OPENED):
            numbers = [slab_number(name) for name in names[first : first + OPENED]]
            said, fds = self._link.ask_for_many(OpenSlabs(numbers), SlabsToRead)
            for number, fd in zip(said.slabs, fds, strict=True):
                if (before := self._ahead_fds.pop(slab_name(number), -1)) >= 0:
                    os.close(before)
                self._ahead_fds[slab_name(number)] = fd

    def close(self) -> None:
        for fd in self._ahead_fds.values():
            os.close(fd)
        self._ahead_fds.clear()
        super().close()

    @cached_property
    def pool(self) -> ThreadPoolExecutor:
        """Threads for reads out of slabs: the kernel copies without the GIL."""
        return ThreadPoolExecutor(_COPIERS, "kvmover-keeper")


class KeeperCatalog:
    """The index of a namespace, following its journal. `lock` is held briefly, never during a request."""

    def __init__(self, link: KeeperLink) -> None:
        self.link, self.files = link, KeeperFiles(link)
        self.lock = RLock()
        self.index = Index()
        #: Slabs with objects, and those that the keeper has proved: sealed, and compared with their digests since.
        self.slabs, self.proved = set[str](), set[str]()
        self.lagged: Counter[str] = Counter()
        self._lent = LentFiles(Path("/keeper"), self.files, GuardLock())
        self._journal: FollowedJournal | None = None
        self._at = 0
        self._has_ended = False
        self._watched: WeakSet[Watcher] = WeakSet()

    def refresh(self) -> None:
        """Apply new journal entries without a request; failures count in `lagged`. Under the lock."""
        journal = None if self.link.is_over() else self.link.journal
        if journal is not self._journal:
            self._begin(journal)
        if journal is None:
            return
        try:
            self._read_on(journal)
        except OSError as error:
            self.lag(error)
        except ValueError as error:
            self.lagged[str(error)] += 1
            self._has_ended = True

    def _read_on(self, journal: FollowedJournal) -> None:
        """Apply the entries from `_at` on. Raises OSError, or ValueError for a damaged journal."""
        ahead_bytes = os.fstat(journal.fd).st_size - (self._at - journal.base)
        if ahead_bytes <= 0:
            return
        added, end = list[JournalEntry](), self._at
        try:
            for entry in decode_entries(os.pread(journal.fd, ahead_bytes, self._at - journal.base), self._at):
                if entry.change is JournalChange.ADDED:
                    added.append(entry)
                elif entry.change is JournalChange.PROVED:
                    self.proved.add(slab_name(entry.slab))  # independent of pending ADDED entries
                else:
                    self._add(added)
                    added.clear()
                    self._apply(entry)
                end = entry.end
        finally:
            self._add(added)
            self._at = max(self._at, end)

    def _add(self, entries: Sequence[JournalEntry]) -> None:
        """Index the objects of many ADDED entries at once: an attach reads a whole journal."""
        if not entries:
            return
        runs = runs_of(entries)
        self.slabs.update(name for name, _ in runs)
        self.index.add_tables(runs, table_of(entries), max(entry.stamp for entry in entries))

    def sync(self) -> None:
        """Reconnect if needed, then `refresh`, switching to the new journal if this one has ended.

        Raises OSError if the keeper does not answer, StoreFenced if a newer generation owns the pages.
        """
        self.link.connect()
        with self.lock:
            self.refresh()
            has_ended = self._has_ended
        if has_ended:
            self.link.follow()
            with self.lock:
                self.refresh()

    def try_sync(self) -> None:
        """Call `sync`; count an OSError or StoreFenced in `lagged` instead of raising it."""
        try:
            self.sync()
        except (OSError, StoreFenced) as error:
            self.lag(error)

    def lag(self, error: OSError | StoreFenced) -> None:
        """Count a failed request by its reason."""
        self.lagged[reason_of(error) if isinstance(error, OSError) else str(error)] += 1

    def _begin(self, journal: FollowedJournal | None) -> None:
        """Rebuild the index from `journal` and tell watchers of pages that it lacks. Under the lock."""
        before = [page for page, _ in self.index.pages()]
        self._journal, self._has_ended = journal, False
        self._at = journal.base if journal else 0
        self.index = Index()
        self.slabs.clear()
        self.proved.clear()
        with suppress(OSError, ValueError):  # the next refresh reads on from there
            if journal:
                self._read_on(journal)
        self.index.sort()
        gone = [page for page, missing in zip(before, self.index.missing(before), strict=True) if missing]
        for watcher in self._watched:
            self.index.watch(watcher)
            for page in gone:
                watcher.lost(page)

    def _apply(self, entry: JournalEntry) -> None:
        name = slab_name(entry.slab)
        match entry.change:
            case JournalChange.ADDED | JournalChange.PROVED:
                raise AssertionError(f"{entry.change.name} is taken in with others")
            case JournalChange.REMOVED:
                self.index.remove_at(name, removed_places(entry))
            case JournalChange.DROPPED:
                self.slabs.discard(name)
                self.proved.discard(name)
                self.index.drop(name)
                self._lent.end(name)
            case JournalChange.USED:
                pages = [bytes(entry.payload[at : at + 32]) for at in range(0, len(entry.payload), 32)]
                self.index.stamp(pages, entry.stamp)
            case JournalChange.ENDED:
                self._has_ended = True

    def watch(self, watcher: Watcher) -> None:
        """Tell `watcher`, held weakly, of pages that lose an object. Under the lock."""
        self._watched.add(watcher)
        self.index.watch(watcher)

    @property
    def journal_bytes(self) -> int:
        """Bytes of the journal read so far. Under the lock."""
        return self._at - self._journal.base if self._journal else 0

    # Payloads

    def lend(self, names: Iterable[str]) -> AbstractContextManager[dict[str, OpenFile]]:
        """Lend open files of slabs until the end of a `with` block, skipping evicted slabs. Raises OSError."""
        return self._lent.lend(names)

    def sweep(self, part: PagePart, plan: Plan, pages: Sequence[bytes], addresses: Sequence[int]) -> list[int]:
        """Read the pages that lie in proved slabs, without digest checks. Raises OSError or StoreFenced.

        Returns the indices of the pages that are whole at their addresses.
        """
        swept, places = Sweep(part), np.array(addresses, np.int64)
        with self.lock:
            names = self.index.names
            proved = np.array([name in self.proved for name in names])
            for alike in self.index.alike(pages):
                swept.plan(alike, plan, places, proved)
            slabs = swept.sort(names)
        self.files.open_ahead([name for name in slabs if not self._lent.has(name)])
        with self.lend(slabs) as files:
            fds = np.array([files[name].fd if name in files else -1 for name in names], np.int64)
            return swept.read(fds, self.files.pool)

    def digests(self, objects: Sequence[StoredObject]) -> list[bytes]:
        """Return each object's digests from the journal, b"" if its row is gone. Raises OSError."""
        with self.lock:
            journal = self._journal
        if journal is None:
            return [b""] * len(objects)
        return [page_and_digests(journal.read, each.record)[1] for each in objects]

    def look_again(self, each: StoredObject) -> tuple[Verdict, str]:
        """Recheck an object by a fresh descriptor. Returns verdict and reason.

        Raises OSError if the keeper does not answer, StoreFenced if reopening the slab finds a newer generation.
        """
        with suppress(StoreFenced):
            self.sync()
        if (said := self._said(each)) is None:
            return Verdict.GONE, "evicted"
        page, digests = said
        if page != each.page:
            return Verdict.BAD, "damaged header"
        try:
            file = self.files.open(Path(each.segment))
        except FileNotFoundError:
            return Verdict.GONE, "evicted"
        payload = bytearray(each.nbytes)
        try:
            got = os.preadv(file.fd, [payload], each.offset)
        finally:
            file.close()
        if got < each.nbytes:
            with self.lock:
                self.refresh()
            return (Verdict.GONE, "evicted") if self._said(each) is None else (Verdict.BAD, "truncated")
        return (Verdict.WELL, "") if holds(memoryview(payload), each.cells, digests, 0) else (Verdict.BAD, DIGEST)

    def _said(self, each: StoredObject) -> tuple[bytes, bytes] | None:
        """Return page hash and digests of an object from its row; None if it is no longer indexed."""
        with self.lock:
            journal, found = self._journal, self.index.at(each.segment, each.record)
        return None if journal is None or found is None else page_and_digests(journal.read, each.record)

    def close(self) -> None:
        """Close the connection, the journal and all slabs."""
        self.link.close()
        with self.lock:
            self._journal = None
        self._lent.close()
        self.files.close()
