"""MooncakeObjects keeps the pages of a namespace in memory that machines pool: each box of a page is one object.

A pool can't be listed, so a look-up asks its master for each page and each box in use, all in one question. Nothing is
known here of what the pool holds, and nothing evicted: its master does that.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from threading import Lock
from typing import TypeAlias, TypeVar
from weakref import WeakSet

import msgspec

from kvmover.errors import StoreError
from kvmover.store.deletion import DeletionDoor, DeletionOrder, Look, Seen, TwoLooks
from kvmover.store.fetch import scatter
from kvmover.store.files import SHORT, HostMemory, reason_of
from kvmover.store.mooncake.boxes import BoxesInUse
from kvmover.store.mooncake.client import NO_OBJECT, STAGING_BYTES, Asker, ObjectRanges, PoolClient
from kvmover.store.mooncake.format import decode_header, encode_header, header_bytes, object_key
from kvmover.store.objects import DIGEST, Failure, Fault, ObjectDraft, ObjectRead, Objects, Verdict, Watcher
from kvmover.store.part import PagePart, PartKey
from kvmover.store.policy import Policy
from kvmover.store.record import holds, table
from kvmover.store.results import Collected, Counters, Recovered, Stat, Verified
from kvmover.transport import Memory

log = logging.getLogger(__name__)

Item = TypeVar("Item")

_HEADER = "damaged header"
#: Bad objects that are remembered. Who finds more of them is what is bad.
_SPARED = 1 << 16


class PoolObject(msgspec.Struct, frozen=True, gc=False):
    """An object of the pool: all that its key is made of."""

    page: bytes
    part: PartKey


class PoolPage(msgspec.Struct, frozen=True, gc=False):
    """A page that was there when the master was asked."""

    objects: tuple[PoolObject, ...]
    parts: tuple[PartKey, ...]


PoolRead: TypeAlias = ObjectRead[PoolObject]
PoolFailure: TypeAlias = Failure[PoolObject]


class MooncakeObjects(Objects[PoolObject]):
    """Objects of one namespace, whose keys begin with `folder`.

    A put is found by everybody at once, and lives as long as its donor, or until the master evicts it.
    """

    def __init__(self, pool: PoolClient, folder: str, policy: Policy) -> None:
        """The caller gives up `pool`. Raises StoreError for a policy that a pool can't keep."""
        for name in ("quota_bytes", "ttl_s"):
            if getattr(policy, name) is not None:
                raise StoreError(f"{pool.location} keeps no {name}: the master of a pool evicts, as it was started")
        self._door = DeletionDoor(time.time())
        self.counters, self.recovered = Counters(deleted=self._door.deleted), Recovered(0, 0, {})
        self._pool, self._folder = pool, folder
        self._boxes = BoxesInUse(pool, folder)
        self._memory = HostMemory()
        self._spared: set[tuple[bytes, PartKey]] = set()
        self._watchers: WeakSet[Watcher] = WeakSet()
        self._lock = Lock()

    @property
    def name(self) -> str:
        return self._pool.location

    def register(self, memory: Memory) -> None:
        self._memory.add(memory)

    def deregister(self, memory: Memory) -> None:
        self._memory.remove(memory)

    def memory_at(self, address: int, nbytes: int) -> memoryview:
        return self._memory.view(address, nbytes)

    # Questions

    def parts_of(self, pages: Sequence[bytes], wanted: PartKey) -> list[tuple[PartKey, ...]]:
        return self._parts_of(pages, wanted, Asker.SCHEDULER)

    def _parts_of(self, pages: Sequence[bytes], wanted: PartKey, asker: Asker) -> list[tuple[PartKey, ...]]:
        try:
            there = self._look(pages, wanted, asker)
        except OSError as error:
            self.lag(error)
            return [()] * len(pages)
        with self._lock:
            for watcher in self._watchers:
                for page, parts in zip(pages, there, strict=True):
                    if not parts:
                        watcher.lost(page)
        return there

    def find(self, pages: Sequence[bytes], wanted: PartKey) -> Sequence[PoolPage | None]:
        return [
            PoolPage(tuple(PoolObject(page, part) for part in parts), parts) if parts else None
            for page, parts in zip(pages, self._parts_of(pages, wanted, Asker.WORKER), strict=True)
        ]

    def _look(self, pages: Sequence[bytes], wanted: PartKey, asker: Asker) -> list[tuple[PartKey, ...]]:
        """One question, and one more where it told of boxes that were not known. Raises OSError."""
        if self._boxes.is_due:
            self._boxes.read(asker)
        parts, news = self._boxes.parts_for(wanted), self._boxes.ahead()
        keys = [object_key(self._folder, page, part) for page in pages for part in parts]
        answers = self._pool.exists([*keys, *news], asker)
        if any(answers[len(keys) :]):
            self._boxes.read(asker)
            if self._boxes.parts_for(wanted) != parts:
                return self._look(pages, wanted, asker)
        each = len(parts)
        rows = [answers[item * each : (item + 1) * each] for item in range(len(pages))]
        found = [tuple(part for part, there in zip(parts, row, strict=True) if there) for row in rows]
        if not self._spared:
            return found
        spared = self._spared
        return [
            tuple(part for part in parts if (page, part) not in spared)
            for page, parts in zip(pages, found, strict=True)
        ]

    def lag(self, error: OSError) -> None:
        """The pool did not say: a miss."""
        reason = reason_of(error)
        if reason not in self.counters.lagged:
            log.warning("%s: %s", self._pool.location, reason)
        self.counters.lagged[reason] += 1

    # Writing

    def put(self, part: PagePart, key: PartKey, drafts: Sequence[ObjectDraft], keep: Collection[bytes]) -> list[str]:
        try:
            self._boxes.announce(key)  # an object of a box that nobody knows of would never be found
        except OSError as error:
            return [reason_of(error)] * len(drafts)
        answers: list[str] = []
        for few in _some(drafts, header_bytes(part.box.cells) + part.nbytes):
            try:
                answers += self._put_some(part, key, few)
            except OSError as error:
                answers += [reason_of(error)] * len(few)
        return answers

    def _put_some(self, part: PagePart, key: PartKey, drafts: Sequence[ObjectDraft]) -> list[str]:
        stamp, objects = int(time.time()), list[tuple[bytes, memoryview]]()
        for draft in drafts:
            payload = self.memory_at(draft.address, part.nbytes)
            digests = table(payload, part.box.cells)
            objects.append((encode_header(draft.page, key, part.nbytes, stamp, digests), payload))
        keys = [object_key(self._folder, draft.page, key) for draft in drafts]
        reasons = self._pool.put(keys, objects)
        there = self._pool.exists(keys, Asker.WORKER)
        return [
            reason or ("" if is_there else self._why_absent(key))
            for key, reason, is_there in zip(keys, reasons, there, strict=True)
        ]

    def _why_absent(self, key: str) -> str:
        """Mooncake said that an object was put, and it is not there: "" where it is evicted already.

        It says so, too, of a key that somebody else has begun to put, and forgets the object if that never ends.
        """
        try:
            self._pool.size(key)
        except FileNotFoundError:
            return ""
        except OSError as error:
            return reason_of(error)
        return ""

    def owe(self, objects: Sequence[PoolObject]) -> None:
        """What is there is as safe as it will be."""

    def flush(self) -> None:
        """What was put is in the pool, where everybody finds it; nothing makes it safer."""

    # Reading

    def read(self, part: PagePart, reads: Sequence[PoolRead]) -> list[PoolFailure]:
        failures: list[PoolFailure] = []
        for few in _some(reads, header_bytes(part.component.heads * part.component.layers) + part.nbytes):
            try:
                with self._pool.reading([self._ranges(part, read) for read in few]) as answers:
                    for read, came in zip(few, answers, strict=True):
                        reason = came if isinstance(came, str) else self._place(part, read, came)
                        if reason:
                            failures.append(Failure(read, _fault(reason), reason))
            except OSError as error:
                failures += [Failure(read, Fault.HERE, reason_of(error)) for read in few]
        return failures

    def _ranges(self, part: PagePart, read: PoolRead) -> ObjectRanges:
        """The header, and the runs of cells that are wanted; all at once where that is the whole object."""
        box = read.each.part.box
        size, cell = header_bytes(box.cells), part.component.kv * box.tokens.tokens * part.row_bytes
        nbytes = size + box.cells * cell
        runs = tuple((size + run.source_cell * cell, run.count * cell) for run in read.source.runs)
        ranges = ((0, nbytes),) if runs == ((size, nbytes - size),) else ((0, size), *runs)
        return ObjectRanges(object_key(self._folder, read.each.page, read.each.part), nbytes, ranges)

    def _place(self, part: PagePart, read: PoolRead, came: Sequence[memoryview]) -> str:
        """Copy the cells of a read to their places, and check them there: why not, or "".

        The memory that they came by may still be written to by a transfer that was given up.
        """
        size, cell = header_bytes(read.each.part.box.cells), part.cell_bytes
        record = decode_header(bytes(came[0][:size]), read.each.page, read.each.part)
        if record is None:
            return _HEADER
        for run, payload in zip(read.source.runs, came[1:] or [came[0][size:]], strict=True):
            if read.source.piece.tokens:
                cells = memoryview(bytes(payload))
                if not holds(cells, run.count, record.digests, run.source_cell):
                    return DIGEST
                scatter(read, run, cells, part, self.memory_at(read.address, part.nbytes))
                continue
            place = self.memory_at(read.address + run.part_cell * cell, len(payload))
            place[:] = payload
            if not holds(place, run.count, record.digests, run.source_cell):
                return DIGEST
        return ""

    def judge(self, failure: PoolFailure) -> tuple[Verdict, str]:
        each = failure.read.each
        key = object_key(self._folder, each.page, each.part)
        try:
            reason = self._flaw(key, each)
            if not reason:
                return Verdict.WELL, ""
            if reason == NO_OBJECT:
                return Verdict.GONE, reason
            looks = TwoLooks(Look(Seen.READ, failure.reason), Look(Seen.ANEW, reason), 1)
            if permit := self._door.ask(looks, 1, time.time()):
                self._pool.remove(key, permit)
        except OSError as error:
            return Verdict.UNKNOWN, reason_of(error)
        if permit is None:
            self._spare(each)
            return Verdict.SPARED, reason
        self.counters.poisoned[reason] += 1
        return Verdict.BAD, reason

    def _spare(self, each: PoolObject) -> None:
        """Leave a bad object to others: this process does not see it any more."""
        self.counters.spared += 1
        if len(self._spared) >= _SPARED:
            self._spared.clear()
        self._spared.add((each.page, each.part))

    def _flaw(self, key: str, each: PoolObject) -> str:
        """Read an object whole: why it is bad, or not there, or "". Raises OSError where the pool does not say."""
        try:
            nbytes = self._pool.size(key)
        except FileNotFoundError:
            return NO_OBJECT
        with self._pool.reading([ObjectRanges(key, nbytes, ((0, nbytes),))]) as [came]:
            if isinstance(came, str):
                if came == NO_OBJECT:
                    return came
                raise OSError(errno.EREMOTEIO, came)
            raw, cells = bytes(came[0]), each.part.box.cells
        record, size = decode_header(raw, each.page, each.part), header_bytes(cells)
        if record is None:
            return _HEADER
        if record.nbytes != nbytes - size:
            return f"{SHORT} {nbytes - size} of {record.nbytes} bytes"
        return "" if holds(memoryview(raw)[size:], cells, record.digests, 0) else DIGEST

    def used(self, pages: Sequence[bytes]) -> None:
        """The master counts uses itself."""

    def watch(self, watcher: Watcher) -> None:
        """A page that is gone is told of when somebody asks for it: nobody says so before."""
        with self._lock:
            self._watchers.add(watcher)

    # Upkeep, most of which is the master's

    def evict(self, nbytes: int) -> int:
        """Nothing: the master evicts where it needs room."""
        return 0

    def collect(self) -> Collected:
        """Look for boxes that others use. The rest is the master's."""
        try:
            self._boxes.read(Asker.WORKER)
        except OSError as error:
            self.lag(error)
        return Collected(0, 0, 0, 0)

    def clear(self) -> int:
        """Remove everything of this namespace; how many objects, each box of a page and of the list being one."""
        try:
            permit = self._door.order(DeletionOrder.CLEARED)
            return self._pool.remove_all(self._folder, permit)
        except OSError as error:
            raise StoreError(f"cannot clear {self._folder} of {self._pool.location}: {error.strerror}") from error

    def stat(self) -> Stat:
        """Nothing, which is what can be known of a pool that can't be listed."""
        return Stat(0, 0, 0, 0, 0, 0, 0, 0)

    def verify(self, progress: Callable[[int], None] | None = None) -> Verified:
        """Raises StoreError: a pool can't be listed. Every read is checked."""
        raise StoreError(f"{self._pool.location} cannot be verified: a pool can't be listed; every read is checked")

    def close(self) -> None:
        self._pool.close()


def _fault(reason: str) -> Fault:
    suspect = reason in (DIGEST, NO_OBJECT, _HEADER) or reason.startswith(SHORT)
    return Fault.SUSPECT if suspect else Fault.HERE


def _some(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    """As many at a time as staging memory holds, of so many bytes each."""
    count = max(1, STAGING_BYTES // size)
    return (items[first : first + count] for first in range(0, len(items), count))
