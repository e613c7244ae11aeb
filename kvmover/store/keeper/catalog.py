"""A KeeperCatalog is what a client knows of a namespace, which it reads in the journal: a question asks nobody.

The journal is a file in memory that grows: `fstat` says whether there is more. Who has lost his keeper knows nothing.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from pathlib import Path
from threading import RLock
from weakref import WeakSet

from kvmover.store.files import FileRun, OpenFile, PlainFiles, ahead, reason_of
from kvmover.store.guard_lock import GuardLock
from kvmover.store.index import Index
from kvmover.store.keeper.journal import JournalChange, JournalEntry, decode_entries, slab_name, slab_number
from kvmover.store.keeper.link import FollowedJournal, KeeperLink, StoreFenced
from kvmover.store.keeper.messages import OpenSlab, SlabToRead
from kvmover.store.lent_files import LentFiles
from kvmover.store.objects import DIGEST, Verdict, Watcher
from kvmover.store.record import DIGEST_BYTES, FIXED_BYTES, decode, decode_all, decode_table, holds
from kvmover.store.second_look import MISSING
from kvmover.store.stored import StoredObject

#: Threads that copy out of slabs, beside the one that compares digests.
_COPIERS = 2


#: Records of fewer bytes are decoded one by one: columns pay for more of them.
_FEW_BYTES = 8 << 10


class KeeperFiles(PlainFiles):
    """Slabs as open files, which the keeper hands out by number."""

    def __init__(self, link: KeeperLink) -> None:
        super().__init__()
        self._link = link

    @property
    def name(self) -> str:
        return f"keeper {self._link.path}"

    def open(self, path: Path) -> OpenFile:
        _, fd = self._link.ask(OpenSlab(slab_number(path.stem)), SlabToRead)
        return OpenFile.of_descriptor(fd, path)

    @cached_property
    def pool(self) -> ThreadPoolExecutor:
        """What the kernel copies, it copies without Python's lock."""
        return ThreadPoolExecutor(_COPIERS, "kvmover-keeper")

    def read_ahead(self, groups: Iterable[Sequence[FileRun]]) -> Iterator[list[str]]:
        return ahead(groups, lambda runs: self.pool.submit(self.read, runs).result, _COPIERS)


class KeeperCatalog:
    """The index of a namespace as its journal says. `lock` is held for a moment, and never around a question."""

    def __init__(self, link: KeeperLink) -> None:
        self.link, self.files = link, KeeperFiles(link)
        self.lock = RLock()
        self.index = Index()
        #: Those that have objects.
        self.slabs: set[str] = set()
        self.lagged: Counter[str] = Counter()
        self._lent = LentFiles(Path("/keeper"), self.files, GuardLock())
        self._journal: FollowedJournal | None = None
        self._at = 0
        self._has_ended = False
        self._watched: WeakSet[Watcher] = WeakSet()

    def refresh(self) -> None:
        """Learn what the journal says by now. Asks nobody, and raises nothing. Under the lock."""
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
        """Raises OSError, or ValueError for what is no journal."""
        ahead_bytes = os.fstat(journal.fd).st_size - (self._at - journal.base)
        if ahead_bytes <= 0:
            return
        for entry in decode_entries(os.pread(journal.fd, ahead_bytes, self._at - journal.base), self._at):
            self._apply(entry)
            self._at = entry.at + len(entry.payload)

    def sync(self) -> None:
        """As `refresh`, of the journal that is written now, and of a keeper that is there now.

        Raises OSError, or StoreFenced.
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
        """As `sync`, and raises nothing: what cannot be learnt is counted."""
        try:
            self.sync()
        except (OSError, StoreFenced) as error:
            self.lag(error)

    def lag(self, error: OSError | StoreFenced) -> None:
        """What was asked for did not come."""
        self.lagged[reason_of(error) if isinstance(error, OSError) else str(error)] += 1

    def _begin(self, journal: FollowedJournal | None) -> None:
        """Another journal is the truth: pages that it does not have are lost."""
        before = [page for page, _ in self.index.pages()]
        self._journal, self._has_ended = journal, False
        self._at = journal.base if journal else 0
        self.index = Index()
        self.slabs.clear()
        with suppress(OSError, ValueError):  # what cannot be read now is read on from there
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
            case JournalChange.ADDED:
                self.slabs.add(name)
                if len(entry.payload) > _FEW_BYTES:
                    self.index.add_table(name, decode_table(entry.payload, entry.at), entry.stamp)
                else:
                    self.index.add(_objects(name, entry))
            case JournalChange.REMOVED:
                self.index.remove_at(name, memoryview(entry.payload).cast("Q").tolist())
            case JournalChange.DROPPED:
                self.slabs.discard(name)
                self.index.drop(name)
                self._lent.end(name)
            case JournalChange.USED:
                pages = [entry.payload[at : at + 32] for at in range(0, len(entry.payload), 32)]
                self.index.use(pages, entry.stamp)
            case JournalChange.ENDED:
                self._has_ended = True

    def watch(self, watcher: Watcher) -> None:
        """Tell `watcher` of losses, as long as it lives. Under the lock."""
        self._watched.add(watcher)
        self.index.watch(watcher)

    @property
    def journal_bytes(self) -> int:
        """What describes the objects. Under the lock."""
        return self._at - self._journal.base if self._journal else 0

    # Payloads

    def lend(self, names: Iterable[str]) -> AbstractContextManager[dict[str, OpenFile]]:
        """Slabs as open files, for the length of a block; evicted ones are left out. Raises OSError."""
        return self._lent.lend(names)

    def digests(self, objects: Sequence[StoredObject]) -> list[bytes]:
        """The digests that the journal has of objects, b"" of one that it has no more. Raises OSError."""
        with self.lock:
            journal = self._journal
        if journal is None:
            return [b""] * len(objects)
        places = ((each.record - journal.base + FIXED_BYTES, each.cells * DIGEST_BYTES) for each in objects)
        return [os.pread(journal.fd, nbytes, at) if at >= FIXED_BYTES else b"" for at, nbytes in places]

    def look_again(self, each: StoredObject) -> tuple[Verdict, str]:
        """A second opinion on an object, by a fresh descriptor. Raises OSError where the keeper does not say."""
        with suppress(StoreFenced):
            self.sync()
        if (raw := self._record(each)) is None:
            return Verdict.GONE, "evicted"
        header = decode(raw, each.record, each.record)
        if header is None or header.page != each.page:
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
            return (Verdict.GONE, "evicted") if self._record(each) is None else (Verdict.BAD, MISSING)
        return (
            (Verdict.WELL, "") if holds(memoryview(payload), each.cells, header.digests, 0) else (Verdict.BAD, DIGEST)
        )

    def _record(self, each: StoredObject) -> bytes | None:
        """The record of an object that is there."""
        with self.lock:
            journal, found = self._journal, self.index.at(each.segment, each.record)
        if journal is None or found is None:
            return None
        return os.pread(journal.fd, FIXED_BYTES + each.cells * DIGEST_BYTES, each.record - journal.base)

    def close(self) -> None:
        """Give everything back."""
        self.link.close()
        with self.lock:
            self._journal = None
        self._lent.close()
        self.files.close()


def _objects(slab: str, entry: JournalEntry) -> list[StoredObject]:
    """What a few records say."""
    return [
        StoredObject(slab, each.at, each.offset, each.nbytes, each.page, each.part, each.stamp)
        for each in decode_all(entry.payload, entry.at)
        if each.part is not None
    ]
