"""MooncakeObjects keeps the pages of a namespace in memory that machines pool: each box of a page is one object.

A pool can't be listed, so a look-up asks its master for each page and each box in use, all in one question. Nothing is
known here of what the pool holds, and nothing evicted: its master does that.

Namespaces and the boxes in use are short lists: numbered entries, each put once by the process that found its number
free. Reading asks for all numbers. Entries stay until the list is removed, or the donors that hold them are gone; the
process that put one puts it again then.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache
from threading import Lock
from typing import TypeAlias, TypeVar
from weakref import WeakSet

import msgspec

from kvmover.errors import StoreError
from kvmover.store.deletion import DeletionDoor, DeletionOrder, Look, Seen, TwoLooks
from kvmover.store.fetch import scatter
from kvmover.store.files import SHORT, HostMemory, reason_of
from kvmover.store.manifest import Found, decode_manifest, encode_manifest, in_order
from kvmover.store.mooncake.client import NO_OBJECT, STAGING_BYTES, Asker, ObjectRanges, PoolClient
from kvmover.store.mooncake.format import (
    ENTRIES,
    PoolAddress,
    decode_box,
    decode_header,
    encode_box,
    encode_header,
    entry_key,
    header_bytes,
    object_key,
)
from kvmover.store.namespace import Namespace
from kvmover.store.objects import DIGEST, Failure, Fault, ObjectDraft, ObjectRead, Objects, Verdict, Watcher
from kvmover.store.part import PageBox, PagePart, PartKey
from kvmover.store.record import holds, table
from kvmover.store.store_policy import Policy
from kvmover.store.store_results import Collected, Counters, Recovered, Stat, Verified
from kvmover.transport import Memory

log = logging.getLogger(__name__)

#: Numbers without a known entry that each look-up asks for too, so that a new box is seen by the next of them.
_AHEAD = 4

#: How often the whole list is read: entries may have come where others are known that were lost with a donor.
_READ_S = 30.0


class BoxesInUse:
    """Of one namespace. What was learnt is not forgotten: a box that nobody writes any more costs a key a page."""

    def __init__(self, pool: PoolClient, folder: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._list, self._pool, self._clock = ShortList(pool, f"{folder}/boxes"), pool, clock
        self._entries: dict[int, bytes] = {}
        self._parts: dict[bytes, PartKey] = {}
        self._read_s = float("-inf")
        self._lock = Lock()

    def parts_for(self, wanted: PartKey) -> tuple[PartKey, ...]:
        """The parts that `wanted` may be made of, of those known."""
        return _overlapping(wanted, tuple(self._parts.values()))

    def ahead(self) -> tuple[str, ...]:
        """Keys of entries that would be news: a look-up that finds one reads the list."""
        unknown = (number for number in range(len(self._list.keys)) if number not in self._entries)
        return tuple(self._list.keys[number] for number, _ in zip(unknown, range(_AHEAD), strict=False))

    @property
    def is_due(self) -> bool:
        """Whether the whole list is to be read again."""
        return self._clock() - self._read_s >= _READ_S

    def read(self, asker: Asker) -> None:
        """Learn the whole list. Raises OSError."""
        self._learn(self._list.read(asker))
        self._read_s = self._clock()

    def announce(self, part: PartKey) -> None:
        """Let everybody know that there are objects of `part`, before there are. Raises OSError."""
        entry = encode_box(part)
        number = next((number for number, known in self._entries.items() if known == entry), None)
        if number is None or not self._pool.exists([self._list.keys[number]], Asker.WORKER)[0]:
            self._learn(self._list.add(entry))

    def _learn(self, entries: dict[int, bytes]) -> None:
        parts = {entry: part for entry in entries.values() if (part := decode_box(entry))}
        with self._lock:
            self._entries, self._parts = entries, self._parts | parts


@lru_cache(maxsize=1024)
def _overlapping(wanted: PartKey, known: tuple[PartKey, ...]) -> tuple[PartKey, ...]:
    """Of the same component, with heads and layers in common: ranks of one shape ask for one key a page."""
    return tuple(part for part in known if part.component == wanted.component and _meet(part.box, wanted.box))


def _meet(left: PageBox, right: PageBox) -> bool:
    return bool(left.heads & right.heads) and bool(left.layers & right.layers)


class ShortList:
    """At most `ENTRIES` entries below `name`."""

    def __init__(self, pool: PoolClient, name: str) -> None:
        self._pool = pool
        self.keys = [entry_key(name, number) for number in range(ENTRIES)]

    def read(self, asker: Asker) -> dict[int, bytes]:
        """What each number has, of those that are taken. Raises OSError."""
        taken = [number for number, there in enumerate(self._pool.exists(self.keys, asker)) if there]
        found = self._pool.entries([self.keys[number] for number in taken], asker) if taken else []
        return dict(zip(taken, found, strict=True))

    def add(self, entry: bytes) -> dict[int, bytes]:
        """Put an entry that is not there yet; the whole list. Raises OSError, ENOSPC where no number is free."""
        tried = set[int]()
        while True:
            entries = self.read(Asker.WORKER)
            if entry in entries.values():
                return entries
            taken = tried | entries.keys()
            free = next((number for number in range(ENTRIES) if number not in taken), None)
            if free is None:
                break
            # Of two writers the first wins, and one that died at it keeps the number for a while: look again.
            self._pool.put_entry(self.keys[free], entry)
            tried.add(free)
        raise OSError(errno.ENOSPC, f"all {ENTRIES} entries of a list of the pool are taken")


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


#: Characters of a namespace's folder, which an entry begins with.
_FOLDER = 32


def open_pool(location: str, namespace: Namespace, policy: Policy) -> MooncakeObjects:
    """The pages of `namespace` in the pool at a location. Raises StoreError."""
    address = PoolAddress.parse(location)
    pool = PoolClient.open(address)
    objects = _objects_of(pool, address, namespace.folder, policy)
    try:
        _manifests(pool, address).add(namespace.folder.encode() + encode_manifest(namespace))
    except OSError as error:
        objects.lag(error)  # for people and tools: pages do without
    return objects


def pool_of_namespace(found: Found, policy: Policy) -> MooncakeObjects:
    """A namespace that was found, for tools that know no model. Raises StoreError."""
    address = PoolAddress.parse(str(found.folder).removesuffix("/" + found.name))
    return _objects_of(PoolClient.open(address), address, found.name, policy)


def pool_namespaces(location: str) -> list[Found]:
    """Every namespace that was opened in a pool, by model. Raises StoreError."""
    address = PoolAddress.parse(location)
    pool = PoolClient.open(address.without_gift())
    try:
        entries = _manifests(pool, address).read(Asker.WORKER).values()
    except OSError as error:
        raise StoreError(f"cannot read {address.location}: {error.strerror}") from error
    finally:
        pool.close()
    known = [(name, decode_manifest(entry[_FOLDER:], name)) for entry in entries if (name := _name_in(entry))]
    return in_order([Found(f"{address.location}/{name}", manifest) for name, manifest in known if manifest])


def _objects_of(pool: PoolClient, address: PoolAddress, folder: str, policy: Policy) -> MooncakeObjects:
    try:
        return MooncakeObjects(pool, f"{address.prefix}/{folder}", policy)
    except StoreError:
        pool.close()
        raise


def _manifests(pool: PoolClient, address: PoolAddress) -> ShortList:
    return ShortList(pool, f"{address.prefix}/namespaces")


def _name_in(entry: bytes) -> str:
    return entry[:_FOLDER].decode("ascii", "replace")
