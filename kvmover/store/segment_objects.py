"""SegmentObjects keeps objects in segments: files of a directory, on a local disk or on one that machines share.

It is the first storage engine under a store, and the reference for the behaviour of the other engines.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec

from kvmover.errors import StoreError
from kvmover.store.boot import HostBoot
from kvmover.store.deletion import DeletionOrder, Permit, TwoLooks
from kvmover.store.fetch import MISSING, SegmentFailure, SegmentRead, fetch, look_again, suspects
from kvmover.store.files import FileRun, Files, reason_of
from kvmover.store.judgement import JudgedObjects, judged, verified
from kvmover.store.objects import ObjectDraft, Verdict, Watcher
from kvmover.store.part import PagePart, PartKey
from kvmover.store.record import tables
from kvmover.store.retention import Retention
from kvmover.store.segment_writer import FileOffset, Header
from kvmover.store.shared_index import SharedIndex
from kvmover.store.store_policy import Policy
from kvmover.store.store_results import Collected, Recovered, Stat, Verified
from kvmover.store.stored import Page, StoredObject, padded
from kvmover.transport import Memory

#: Errors of a full disk, or of a user's exhausted disk quota.
_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))

#: Bytes of payload after which headers are written: a few headers cost a millisecond, as much as 2 MiB of payload.
_PUBLISHED_BYTES = 64 << 20

#: Objects that are looked up under one hold of the lock, to be read and compared.
_VERIFIED = 1024


class _Draft(msgspec.Struct, frozen=True, gc=False):
    """A draft to be written, by its number in the batch and its place in a file."""

    item: int
    page: bytes
    address: int
    place: FileOffset


class _Written(msgspec.Struct, frozen=True, gc=False):
    """A draft whose write has ended, its digests, and the reason for failure or ""."""

    draft: _Draft
    digests: bytes
    reason: str


class _Batch(msgspec.Struct, frozen=True, gc=False):
    """Objects of one part that are put together; `reasons` has "" or an error by number, once known."""

    part: PagePart
    key: PartKey
    drafts: Sequence[ObjectDraft]
    reasons: dict[int, str]

    @property
    def size(self) -> int:
        return self.part.nbytes


class SegmentObjects(Retention, JudgedObjects[StoredObject]):
    """The objects of one namespace as ranges of files, shared by any number of processes."""

    def __init__(self, folder: Path, namespace: bytes, policy: Policy, files: Files, machine: HostBoot) -> None:
        """Open the namespace and take over dead writers' segments. Owns `files` from now on. Raises OSError."""
        super().__init__(folder, namespace, policy, files, machine)
        self._shared = SharedIndex(self.catalog)
        with self._shared.opening() as is_resumed:
            self.catalog.read_heads()
            self.takeover.recover()
            if not is_resumed:  # a page learnt since counts as used most recently
                with self.lock:
                    self.catalog.index.sort()
        stat = self.stat()
        self.recovered = Recovered(stat.segments, stat.objects, dict(self.catalog.dropped))

    @property
    def name(self) -> str:
        return self.files.name

    def register(self, memory: Memory) -> None:
        self.files.register(memory)

    def deregister(self, memory: Memory) -> None:
        self.files.deregister(memory)

    def memory_at(self, address: int, nbytes: int) -> memoryview:
        return self.files.view(address, nbytes)

    def parts_of(self, pages: Sequence[bytes], wanted: PartKey) -> list[tuple[PartKey, ...]]:
        self.catalog.refresh()
        with self.lock:
            self.expire()
            there, stale = self.catalog.index.parts_of(pages), self.stale(pages)
            self.catalog.index.asked(pages)
        if not stale:
            return there
        return [() if page in stale else parts for page, parts in zip(pages, there, strict=True)]

    def find(self, pages: Sequence[bytes], wanted: PartKey) -> Sequence[Page | None]:
        self.catalog.refresh()
        with self.lock:
            self.expire()
            entries, stale = self.catalog.index.get_many(pages), self.stale(pages)
        if not stale:
            return entries
        return [None if page in stale else entry for page, entry in zip(pages, entries, strict=True)]

    # Writing

    def put(self, part: PagePart, key: PartKey, drafts: Sequence[ObjectDraft], keep: Collection[bytes]) -> list[str]:
        batch = _Batch(part, key, drafts, {})
        with self.writing:
            self._store(batch, range(len(drafts)), keep)
            full = [item for item, reason in batch.reasons.items() if reason in _FULL]
            if full and self.give_way(len(full) * padded(batch.size), keep):
                self._store(batch, full, keep)
        return [batch.reasons[item] for item in range(len(drafts))]

    def owe(self, objects: Sequence[StoredObject]) -> None:
        with self.lock:
            self.writer.owe(each for each in objects if each.segment in self.catalog.segments)

    def _store(self, batch: _Batch, items: Sequence[int], keep: Collection[bytes]) -> None:
        """Write the objects numbered `items` of a batch, and note the outcome of each."""
        places = self._reserve(batch, items, keep)
        if places:
            drafts = [
                _Draft(item, batch.drafts[item].page, batch.drafts[item].address, place)
                for item, place in zip(items, places, strict=True)
            ]
            self._write(batch, drafts)

    def _reserve(self, batch: _Batch, items: Sequence[int], keep: Collection[bytes]) -> list[FileOffset]:
        """Returns places for the objects, or [] after noting the reason for each."""
        size, reason = batch.size, ""
        if not self.make_room(len(items) * padded(size), keep):
            reason = f"{len(items)} pages of {size} bytes are more than the quota of {self.policy.quota_bytes}"
        try:
            if not reason:
                with self.lock:
                    return self.writer.reserve([size] * len(items))
        except OSError as error:
            reason = reason_of(error)
        batch.reasons.update((item, reason) for item in items)
        return []

    def _write(self, batch: _Batch, todo: Sequence[_Draft]) -> None:
        """Write payloads by groups, and every now and then the headers that publish those written by then."""
        written = list[_Written]()
        with ExitStack() as loan:
            try:
                files = loan.enter_context(self.catalog.lend({draft.place.segment for draft in todo}))
            except OSError as error:
                self._announce(batch, [_Written(draft, b"", reason_of(error)) for draft in todo])
                return
            written += [_Written(draft, b"", MISSING) for draft in todo if draft.place.segment not in files]
            there = [draft for draft in todo if draft.place.segment in files]
            count = max(1, self.files.group_bytes // batch.size)
            groups = [there[first : first + count] for first in range(0, len(there), count)]
            digests: dict[int, list[bytes]] = {}

            def make(number: int) -> list[FileRun]:
                runs = [
                    FileRun(files[draft.place.segment], draft.place.offset, draft.address, batch.size)
                    for draft in groups[number]
                ]
                digests[number] = tables(self.files.views(runs), batch.part.box.cells)
                return runs

            def look(number: int, reasons: list[str]) -> None:
                with self.lock:
                    written.extend(map(_Written, groups[number], digests.pop(number), reasons))
                    some = list(written) if len(written) * batch.size >= _PUBLISHED_BYTES else []
                    del written[: len(some)]
                if some:
                    self._announce(batch, some)

            self.files.write_each([partial(make, number) for number in range(len(groups))], look)
        self._announce(batch, written)
        with self.lock:  # groups end in any order
            self.catalog.index.use([draft.page for draft in todo], self.catalog.machine.now())

    def _announce(self, batch: _Batch, written: Sequence[_Written]) -> None:
        """Write headers for the payloads that were written, and free the space of those that failed."""
        size = batch.size
        whole = [each for each in written if not each.reason]
        failed = {each.draft.item: (each.draft, each.reason) for each in written if each.reason}
        headers = [Header(each.draft.page, batch.key, each.draft.place, size, each.digests) for each in whole]
        with self.lock:
            stamp = self.catalog.machine.now()
            self.writer.ended(each.draft.place for each in written)
            fresh: list[StoredObject] = []
            for each, answer in zip(whole, self.writer.announce(headers, stamp), strict=True):
                if isinstance(answer, str):
                    failed[each.draft.item] = (each.draft, answer)
                    continue
                fresh.append(answer)
                batch.reasons[each.draft.item] = ""
            self.catalog.index.add(fresh)
            for item, (draft, reason) in failed.items():
                batch.reasons[item] = reason
                place = draft.place.offset, padded(size)
                self.catalog.free(draft.place.segment, [place], self.catalog.door.order(DeletionOrder.LOST))
        if failed:
            self.catalog.sweep()

    # Reading

    def read(self, part: PagePart, reads: Sequence[SegmentRead]) -> list[SegmentFailure]:
        return fetch(self.catalog, part, reads)

    def look_again(self, each: StoredObject) -> tuple[Verdict, str]:
        try:
            return look_again(self.folder, each)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return Verdict.SPARED, reason_of(error)

    def permit(self, looks: TwoLooks) -> Permit | None:
        return self.catalog.door.ask(looks, 1, self.catalog.machine.now())

    def drop(self, each: StoredObject, verdict: Verdict) -> None:
        with self.lock:
            self.catalog.index.remove([each])

    def condemn(self, each: StoredObject, permit: Permit) -> None:
        with self.lock:
            self.catalog.delete_one(each, permit)
        self.catalog.sweep()

    def used(self, pages: Sequence[bytes]) -> None:
        with self.lock:
            self.note_use(pages)

    # Upkeep

    def watch(self, watcher: Watcher) -> None:
        with self.lock:
            self.catalog.index.watch(watcher)

    def evict(self, nbytes: int) -> int:
        """Evict the least recently read pages, whole, until `nbytes` bytes are free. Returns the bytes freed."""
        with self.writing:
            self.catalog.refresh()
            with self.lock:
                goal = max(0, self.catalog.held_bytes - nbytes)
            return self.evict_to(goal)

    def collect(self) -> Collected:
        """Do upkeep: write last uses down, take over dead writers, expire pages, and evict down to the quota.

        Never raises: a step that the system refuses is done next time.
        """
        with self.tidying:
            index, counters = self.catalog.index, self.counters
            held, evicted = index.held_bytes, counters.evicted_pages
            self.write_stamps()
            adopted = self.takeover.recover()
            before = counters.expired_pages
            while self._expire_some():
                pass
            expired = counters.expired_pages - before
            with self.writing:
                self.make_room(0)
            with self.lock:
                self.catalog.shorten_deletions()
                freed = max(0, held - index.held_bytes)
            return Collected(expired, counters.evicted_pages - evicted, freed, adopted)

    def _expire_some(self) -> int:
        with self.lock:
            looked = self.expire()
        self.catalog.sweep()
        return looked

    def flush(self) -> None:
        """Make pages safe from a power cut: those written here, and those that a put found there already.

        Pages written here are then visible to other machines. Raises StoreError: pages that the disk refused are
        deleted, and the next put writes them again.
        """
        with self.tidying:
            self.write_stamps()
            try:
                self.writer.sync()
            except OSError as error:
                raise StoreError(f"cannot flush {self.folder}: {error.strerror}") from error

    def clear(self) -> int:
        """Delete every page of this namespace. Returns their number. Raises StoreError."""
        with self.writing:
            self.catalog.refresh()
            with self.lock:
                pages = len(self.catalog.index)
                self.writer.abandon()
                segments = list(self.catalog.segments.values())
            try:
                permit = self.catalog.door.order(DeletionOrder.CLEARED, pages)
                for segment in segments:
                    segment.unlink(permit)
                    self.catalog.forget(segment.name)
            except OSError as error:
                raise StoreError(f"cannot clear {self.folder}: {error.strerror}") from error
            return pages

    def stat(self) -> Stat:
        """Returns the sizes of the namespace, objects of other processes included."""
        self.catalog.refresh()
        with self.lock:
            segments, head_bytes = (
                len(self.catalog.segments),
                sum(segment.parsed for segment in self.catalog.segments.values()),
            )
            return self.catalog.index.stat(segments, self.catalog.held_bytes, head_bytes)

    def verify(self, progress: Callable[[int], None] | None = None) -> Verified:
        """Read every object whole and delete the bad ones, within the deletion budget. `progress` is called with bytes
        read.

        Raises OSError if a file exists and cannot be opened; nothing is deleted for that.
        """
        self.catalog.refresh()
        with self.lock:
            names = list(self.catalog.segments)
        found = (one for name in names for one in self._suspects(name))
        return verified(judged(self, found), progress)

    def _suspects(self, name: str) -> Iterator[tuple[StoredObject, bool]]:
        """Yield each object of a segment, and True if its bytes differ from its digests. Raises OSError."""
        index = self.catalog.index
        with self.lock:
            records = index.records(name).tolist()
        for first in range(0, len(records), _VERIFIED):
            with self.lock:
                found = [index.at(name, record) for record in records[first : first + _VERIFIED]]
            yield from suspects(self.catalog, name, [each for each in found if each])

    def close(self) -> None:
        """Flush, and close every file. Safe to call twice."""
        with self.tidying, self.writing:
            if self.catalog.segments:
                self.write_stamps()
            self.writer.close()
            self.catalog.close()
            self._shared.close()
            self.files.close()
