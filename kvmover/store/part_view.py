"""A PartView is one rank's access to a store: it puts, gets and looks up the part of pages that the rank holds."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from itertools import takewhile

import msgspec

from kvmover.errors import DescriptorError, StoreError
from kvmover.store.catalog import GIVEN_BACK, MISSING, Verdict
from kvmover.store.fetch import EIO, Failure, Fault, ObjectRead, ObjectShare, cell_runs, cover, fetch
from kvmover.store.files import FileRun, OpenFile, reason_of
from kvmover.store.index import Page, StoredObject, padded
from kvmover.store.namespace import check_page
from kvmover.store.part import PagePart, PartKey
from kvmover.store.record import table
from kvmover.store.results import Got, GotResult, Put, PutResult
from kvmover.store.retention import Retention
from kvmover.store.writer import FileOffset, Header

#: What a disk says that is full, or a user who may have no more of it.
_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))

_WRITTEN, _PRESENT, _ELSEWHERE = (PutResult(put) for put in (Put.WRITTEN, Put.PRESENT, Put.ELSEWHERE))
_READ, _ABSENT = GotResult(Got.READ), GotResult(Got.ABSENT)


class _Draft(msgspec.Struct, frozen=True, gc=False):
    """Page number `item` of a batch, to be written."""

    item: int
    page: bytes
    address: int
    place: FileOffset


class PartView:
    """Pages go to and come from packed memory, `head layer kv token dim` of the part, `part.nbytes` at each address.

    Every batch has as many answers as pages, whatever fails: ranks that must agree can count on it.
    """

    def __init__(
        self, store: Retention, part: PagePart, key: PartKey, writes: Callable[[bytes], bool] | None = None
    ) -> None:
        self.part = part
        self._size = part.nbytes
        self._store, self._key, self._writes = store, key, writes
        self._plans: dict[tuple[PartKey, ...], tuple[ObjectShare, ...] | None] = {}

    def exists(self, pages: Sequence[bytes]) -> list[bool]:
        """Whether every object that this part needs of a page is complete. Raises StoreError for what is no hash."""
        for page in pages:
            check_page(page)
        with self._store.lock:
            self._refresh()
            there = [self._plan(parts) is not None for parts in self._store.catalog.index.parts_of(pages)]
            stale = self._store.stale(pages)
            if not stale:
                return there
            return [is_there and page not in stale for is_there, page in zip(there, pages, strict=True)]

    def leading(self, pages: Sequence[bytes]) -> int:
        """How many pages exist before the first that does not."""
        return sum(1 for _ in takewhile(bool, self.exists(pages)))

    def put(self, pages: Sequence[bytes], addresses: Sequence[int]) -> list[PutResult]:
        """Write pages that are not there yet. Raises StoreError or DescriptorError before anything is written."""
        self._check(pages, addresses)
        store = self._store
        with store.writing:
            results: dict[int, PutResult] = {}
            with store.lock:
                self._refresh()
                todo = self._missing(pages, results)
            self._store_pages(todo, pages, addresses, results)
            full = [item for item in todo if results[item].reason in _FULL]
            if full and store.give_way(len(full) * padded(self._size), pages):
                self._store_pages(full, pages, addresses, results)
        first = {page: results[item] for item, page in reversed(list(enumerate(pages))) if item in results}
        answers = [results.get(item, _PRESENT if first[page].ok else first[page]) for item, page in enumerate(pages)]
        store.counters.puts.update(answer.outcome for answer in answers)
        store.counters.failed.update(answer.reason for answer in answers if not answer.ok)
        return answers

    def _store_pages(
        self, todo: Sequence[int], pages: Sequence[bytes], addresses: Sequence[int], results: dict[int, PutResult]
    ) -> None:
        """Write pages number `todo` of a batch, and say of each how that ended."""
        places = self._reserve(todo, pages, results)
        if places:
            drafts = [_Draft(item, pages[item], addresses[item], at) for item, at in zip(todo, places, strict=True)]
            self._write(drafts, results)

    def get(self, pages: Sequence[bytes], addresses: Sequence[int]) -> list[GotResult]:
        """Read pages. Where an object turns out bad and others cover for it, those are read instead."""
        self._check(pages, addresses)
        store = self._store
        results: dict[int, GotResult] = {}
        again: set[int] = set()
        pending: Sequence[int] = range(len(pages))
        while pending:
            with store.lock:
                self._refresh()
                reads = self._reads(pending, pages, addresses)
            failures = fetch(store.catalog, self.part, reads)
            failed = {failure.read.item: self._judge(failure, again) for failure in failures}
            with store.lock:
                done = [item for item in dict.fromkeys(read.item for read in reads) if item not in failed]
                store.used([pages[item] for item in done])
            for item in pending:
                results.setdefault(item, _ABSENT)
            results.update(dict.fromkeys(done, _READ))
            results.update({item: answer for item, (answer, _) in failed.items()})
            # What was bad is gone, and what is well is read once more, so that this ends.
            pending = sorted(item for item, (_, retry) in failed.items() if retry)
        store.counters.gots.update(results[item].outcome for item in range(len(pages)))
        store.counters.read_bytes += self._size * sum(result.ok for result in results.values())
        return [results[item] for item in range(len(pages))]

    def _check(self, pages: Sequence[bytes], addresses: Sequence[int]) -> None:
        if len(pages) != len(addresses):
            raise StoreError(f"{len(pages)} pages at {len(addresses)} addresses")
        for page in pages:
            check_page(page)
        if addresses:
            view, low, high = self._store.files.view, min(addresses), max(addresses)
            try:
                view(low, high - low + self._size)  # most batches lie in one pool
            except DescriptorError:
                for address in addresses:
                    view(address, self._size)

    def _refresh(self) -> None:
        self._store.catalog.refresh()
        self._store.expire()

    def _entries(self, pages: Sequence[bytes]) -> list[Page | None]:
        """The pages of these hashes, None where one is absent or too old."""
        entries, stale = self._store.catalog.index.get_many(pages), self._store.stale(pages)
        if not stale:
            return entries
        return [None if page in stale else entry for page, entry in zip(pages, entries, strict=True)]

    def _plan(self, parts: tuple[PartKey, ...]) -> tuple[ObjectShare, ...] | None:
        """How the part is made of objects of `parts`; None where some are missing. The same for most pages."""
        if parts not in self._plans:
            numbers = [n for n, key in enumerate(parts) if key.component == self._key.component]
            boxes = tuple(parts[n].box for n in numbers)
            cover_pieces = cover(self._key.box, boxes)
            sources = [
                ObjectShare(numbers[piece.source], piece, cell_runs(piece, boxes[piece.source], self._key.box))
                for piece in cover_pieces or ()
            ]
            self._plans[parts] = tuple(sources) or None
        return self._plans[parts]

    def _missing(self, pages: Sequence[bytes], results: dict[int, PutResult]) -> list[int]:
        """Which of `pages` are to be written here; the others have their answer, or are twins of one that is."""
        todo: dict[bytes, int] = {}
        for item, (page, entry) in enumerate(zip(pages, self._entries(pages), strict=True)):
            if entry and (plan := self._plan(entry.parts)):
                results[item] = _PRESENT
                self._store.writer.owe(entry.objects[share.number] for share in plan)
            elif self._writes and not self._writes(page):
                results[item] = _ELSEWHERE
            else:
                todo.setdefault(page, item)
        return list(todo.values())

    def _reserve(self, todo: Sequence[int], pages: Sequence[bytes], results: dict[int, PutResult]) -> list[FileOffset]:
        """Places for the pages to write, or none and the reason."""
        store, size = self._store, self._size
        reason = ""
        if not store.make_room(len(todo) * padded(size), pages):
            reason = f"{len(todo)} pages of {size} bytes are more than the quota of {store.policy.quota_bytes}"
        try:
            if not reason:
                with store.lock:
                    return store.writer.reserve([size] * len(todo))
        except OSError as error:
            reason = reason_of(error)
        results.update((item, PutResult(Put.FAILED, reason)) for item in todo)
        return []

    def _write(self, todo: Sequence[_Draft], results: dict[int, PutResult]) -> None:
        """Payloads, and after each group of them the headers that make objects of it."""
        store = self._store
        count = max(1, store.files.group_bytes // self._size)
        groups = [todo[first : first + count] for first in range(0, len(todo), count)]
        tables: list[list[bytes]] = []
        done = 0
        try:
            with store.catalog.lend({draft.place.segment for draft in todo}) as files:
                runs = (self._runs(group, files, tables) for group in groups)
                moved = store.files.write_ahead(runs) if len(groups) > 1 else (store.files.write(r) for r in runs)
                for group, reasons in zip(groups, moved, strict=True):
                    answers = iter(reasons)
                    whole = [next(answers) if draft.place.segment in files else MISSING for draft in group]
                    self._announce(group, tables[done], whole, results)
                    done += 1
        except OSError as error:
            for group in groups[done:]:
                self._announce(group, [b""] * len(group), [reason_of(error)] * len(group), results)

    def _runs(self, group: Sequence[_Draft], files: dict[str, OpenFile], tables: list[list[bytes]]) -> list[FileRun]:
        """What is written of a group, whose digests are taken now: while the group before is on its way."""
        size, view, cells = self._size, self._store.files.view, self.part.box.cells
        tables.append([table(view(draft.address, size), cells) for draft in group])
        return [
            FileRun(files[draft.place.segment], draft.place.offset, draft.address, size)
            for draft in group
            if draft.place.segment in files
        ]

    def _announce(
        self, group: Sequence[_Draft], tables: Sequence[bytes], reasons: Sequence[str], results: dict[int, PutResult]
    ) -> None:
        """Headers for the payloads that were written; the space of the others goes back."""
        store, size = self._store, self._size
        written = [
            (draft, Header(draft.page, self._key, draft.place, size, digests))
            for draft, digests, reason in zip(group, tables, reasons, strict=True)
            if not reason
        ]
        failed = {draft.item: (draft, reason) for draft, reason in zip(group, reasons, strict=True) if reason}
        with store.lock:
            stamp = store.catalog.machine.now()
            store.writer.ended(draft.place for draft in group)
            answers = store.writer.announce([header for _, header in written], stamp)
            fresh: list[StoredObject] = []
            for (draft, _), answer in zip(written, answers, strict=True):
                if isinstance(answer, str):
                    failed[draft.item] = (draft, answer)
                    continue
                fresh.append(answer)
                results[draft.item] = _WRITTEN
            store.catalog.index.add(fresh)
            store.catalog.index.use([each.page for each in fresh], stamp)
            store.counters.written_bytes += size * (len(group) - len(failed))
            for item, (draft, reason) in failed.items():
                results[item] = PutResult(Put.FAILED, reason)
                store.catalog.free(draft.place.segment, draft.place.offset, padded(size))

    def _reads(self, pending: Sequence[int], pages: Sequence[bytes], addresses: Sequence[int]) -> list[ObjectRead]:
        reads: list[ObjectRead] = []
        entries = self._entries([pages[item] for item in pending])
        for item, entry in zip(pending, entries, strict=True):
            plan = self._plan(entry.parts) if entry else None
            if entry and plan:
                for each in plan:
                    reads.append(ObjectRead(item, addresses[item], entry.objects[each.number], each))
        return reads

    def _judge(self, failure: Failure, again: set[int]) -> tuple[GotResult, bool]:
        """What a failed read means, and whether the page is to be read again.

        The object was deleted meanwhile; or it is bad, when it is looked at again, and goes; or it is well, and is read
        once more. What the system refuses says nothing against it.
        """
        if failure.fault is Fault.HERE:
            return GotResult(Got.FAILED, failure.reason), False
        store, each, item = self._store, failure.read.each, failure.read.item
        try:
            verdict, reason = store.catalog.look_again(each)
        except OSError as error:
            return GotResult(Got.FAILED, reason_of(error)), False
        if verdict is Verdict.WELL:
            retry = item not in again
            again.add(item)
            return GotResult(Got.FAILED, f"{failure.reason}, and well when it was looked at again"), retry
        with store.lock:
            if verdict is Verdict.GONE:
                store.catalog.index.remove(each)
                return GotResult(Got.EVICTED, reason), True
            if not store.poison(each, reason):
                return GotResult(Got.FAILED, f"{reason}, and left to others after too many like it"), True
        if reason in GIVEN_BACK:
            return GotResult(Got.EVICTED, reason), True
        return GotResult(Got.FAILED if reason == EIO else Got.POISONED, reason), True
