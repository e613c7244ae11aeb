"""MooncakeObjects stores the pages of a namespace in memory pooled by machines: each box of a page is one object.

A pool can't be listed, so a lookup asks its master for each page and each box in use, by one request. This process
keeps no index and evicts no page: the master does.

Namespaces and the boxes in use are short lists of numbered entries, each put once by the process that found its number
free. A reader asks for all numbers. An entry lives until its list is removed or its donors are gone; the process that
put it then puts it again.
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
from kvmover.store.deletion import DeletionDoor, DeletionOrder, Permit, TwoLooks
from kvmover.store.fetch import scatter
from kvmover.store.files import SHORT, HostMemory, reason_of
from kvmover.store.judgement import JudgedObjects
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
from kvmover.store.objects import DIGEST, Failure, Fault, ObjectDraft, ObjectRead, Verdict, Watcher
from kvmover.store.part import PageBox, PagePart, PartKey
from kvmover.store.record import holds, table
from kvmover.store.store_policy import Policy
from kvmover.store.store_results import Collected, Counters, Recovered, Stat, Verified
from kvmover.transport import Memory

log = logging.getLogger(__name__)

#: Numbers without a known entry that each lookup includes, to find a new box at the next lookup.
_AHEAD = 4

#: Seconds between reads of the whole list: a new entry may have replaced a known one that was lost with its donor.
_READ_S = 30.0


class BoxesInUse:
    """The boxes in use in one namespace. Known boxes are never forgotten: a disused box costs one key per page."""

    def __init__(self, pool: PoolClient, folder: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._list, self._pool, self._clock = ShortList(pool, f"{folder}/boxes"), pool, clock
        self._entries: dict[int, bytes] = {}
        self._parts: dict[bytes, PartKey] = {}
        self._read_s = float("-inf")
        self._lock = Lock()

    def parts_for(self, wanted: PartKey) -> tuple[PartKey, ...]:
        """Return the known parts that `wanted` may be made of."""
        return _overlapping(wanted, tuple(self._parts.values()))

    def ahead(self) -> tuple[str, ...]:
        """Return the keys of the next `_AHEAD` unknown entries; a lookup that finds one reads the list."""
        unknown = (number for number in range(len(self._list.keys)) if number not in self._entries)
        return tuple(self._list.keys[number] for number, _ in zip(unknown, range(_AHEAD), strict=False))

    @property
    def is_due(self) -> bool:
        """True if the whole list was last read `_READ_S` ago or earlier."""
        return self._clock() - self._read_s >= _READ_S

    def read(self, asker: Asker) -> None:
        """Read the whole list. Raises OSError."""
        self._learn(self._list.read(asker))
        self._read_s = self._clock()

    def announce(self, part: PartKey) -> None:
        """Enter `part` in the list unless it is there; call before putting objects of it. Raises OSError."""
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
    """Return the parts of the same component that share heads and layers: ranks of equal shape need one key a page."""
    return tuple(part for part in known if part.component == wanted.component and _meet(part.box, wanted.box))


def _meet(left: PageBox, right: PageBox) -> bool:
    return bool(left.heads & right.heads) and bool(left.layers & right.layers)


class ShortList:
    """A list of at most `ENTRIES` entries, with keys below `name`."""

    def __init__(self, pool: PoolClient, name: str) -> None:
        self._pool = pool
        self.keys = [entry_key(name, number) for number in range(ENTRIES)]

    def read(self, asker: Asker) -> dict[int, bytes]:
        """Return the existing entries by number. Raises OSError."""
        taken = [number for number, there in enumerate(self._pool.exists(self.keys, asker)) if there]
        found = self._pool.entries([self.keys[number] for number in taken], asker) if taken else []
        return dict(zip(taken, found, strict=True))

    def add(self, entry: bytes) -> dict[int, bytes]:
        """Put an entry unless it exists. Returns the whole list. Raises OSError, with ENOSPC if no number is free."""
        tried = set[int]()
        while True:
            entries = self.read(Asker.WORKER)
            if entry in entries.values():
                return entries
            taken = tried | entries.keys()
            free = next((number for number in range(ENTRIES) if number not in taken), None)
            if free is None:
                break
            # Another writer may have won the number, or died holding it: read again.
            self._pool.put_entry(self.keys[free], entry)
            tried.add(free)
        raise OSError(errno.ENOSPC, f"all {ENTRIES} entries of a list of the pool are taken")


Item = TypeVar("Item")

_HEADER = "damaged header"
#: Bad objects remembered by this process. Finding more means that its own memory is bad.
_SPARED = 1 << 16


class PoolObject(msgspec.Struct, frozen=True, gc=False):
    """An object of the pool, by the fields of its key."""

    page: bytes
    part: PartKey


class PoolPage(msgspec.Struct, frozen=True, gc=False):
    """A page that existed at the lookup: `objects` of it that may be read, and the part of each, in order."""

    objects: tuple[PoolObject, ...]
    parts: tuple[PartKey, ...]


PoolRead: TypeAlias = ObjectRead[PoolObject]
PoolFailure: TypeAlias = Failure[PoolObject]


class MooncakeObjects(JudgedObjects[PoolObject]):
    """The objects of one namespace, whose keys begin with `folder`.

    All members find a put at once. It lives until its donor leaves or the master evicts it.
    """

    def __init__(self, pool: PoolClient, folder: str, policy: Policy) -> None:
        """Take ownership of `pool`. Raises StoreError if the policy has a quota or TTL, which only the master sets."""
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

    # Lookups

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
        """Return each page's existing parts by one request, repeated if it reveals new boxes. Raises OSError."""
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
        """Count a failed lookup, which is a miss, and log each reason once."""
        reason = reason_of(error)
        if reason not in self.counters.lagged:
            log.warning("%s: %s", self._pool.location, reason)
        self.counters.lagged[reason] += 1

    # Writing

    def put(self, part: PagePart, key: PartKey, drafts: Sequence[ObjectDraft], keep: Collection[bytes]) -> list[str]:
        try:
            self._boxes.announce(key)  # lookups ask only for announced boxes
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
        """Return why a put object is absent, or "" if it was evicted already.

        Mooncake also reports success for a key whose put by another process is pending, and drops the object if that
        put never ends.
        """
        try:
            self._pool.size(key)
        except FileNotFoundError:
            return ""
        except OSError as error:
            return reason_of(error)
        return ""

    def owe(self, objects: Sequence[PoolObject]) -> None:
        """Return at once: objects in the pool get no safer."""

    def flush(self) -> None:
        """Return at once: a put is in the pool, visible to all members."""

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
        """Return the ranges of header and wanted runs, or one range if they are the whole object."""
        box = read.each.part.box
        size, cell = header_bytes(box.cells), part.component.kv * box.tokens.tokens * part.row_bytes
        nbytes = size + box.cells * cell
        runs = tuple((size + run.source_cell * cell, run.count * cell) for run in read.source.runs)
        ranges = ((0, nbytes),) if runs == ((size, nbytes - size),) else ((0, size), *runs)
        return ObjectRanges(object_key(self._folder, read.each.page, read.each.part), nbytes, ranges)

    def _place(self, part: PagePart, read: PoolRead, came: Sequence[memoryview]) -> str:
        """Copy a read's cells out of staging memory, then check them. Returns "" or the reason of failure.

        The copy is checked because an abandoned transfer may still write to staging memory.
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

    def look_again(self, each: PoolObject) -> tuple[Verdict, str]:
        reason = self._flaw(each)
        return {"": Verdict.WELL, NO_OBJECT: Verdict.GONE}.get(reason, Verdict.BAD), reason

    def permit(self, looks: TwoLooks) -> Permit | None:
        return self._door.ask(looks, 1, time.time())

    def drop(self, each: PoolObject, verdict: Verdict) -> None:
        """Hide a bad object from this process's lookups, without deleting it; the master has no other index."""
        if verdict is Verdict.SPARED:
            if len(self._spared) >= _SPARED:
                self._spared.clear()
            self._spared.add((each.page, each.part))

    def condemn(self, each: PoolObject, permit: Permit) -> None:
        self._pool.remove(object_key(self._folder, each.page, each.part), permit)

    def _flaw(self, each: PoolObject) -> str:
        """Read an object whole. Returns "" if sound, NO_OBJECT if absent, or its flaw. Raises OSError."""
        key = object_key(self._folder, each.page, each.part)
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
        """Return at once: the master counts uses itself."""

    def watch(self, watcher: Watcher) -> None:
        """Tell `watcher`, held weakly, of pages that a lookup finds absent: the master reports no losses."""
        with self._lock:
            self._watchers.add(watcher)

    # Upkeep, mostly left to the master

    def evict(self, nbytes: int) -> int:
        """Return 0: only the master evicts."""
        return 0

    def collect(self) -> Collected:
        """Read the list of boxes in use; all other upkeep is the master's."""
        try:
            self._boxes.read(Asker.WORKER)
        except OSError as error:
            self.lag(error)
        return Collected(0, 0, 0, 0)

    def clear(self) -> int:
        """Remove every object of this namespace, list entries included. Returns their number, not pages.

        Raises StoreError if the pool does not answer.
        """
        try:
            permit = self._door.order(DeletionOrder.CLEARED)
            return self._pool.remove_all(self._folder, permit)
        except OSError as error:
            raise StoreError(f"cannot clear {self._folder} of {self._pool.location}: {error.strerror}") from error

    def stat(self) -> Stat:
        """Return zeros, because a pool can't be listed."""
        return Stat(0, 0, 0, 0, 0, 0, 0, 0)

    def verify(self, progress: Callable[[int], None] | None = None) -> Verified:
        """Raise StoreError: a pool can't be listed, and every read is checked anyway."""
        raise StoreError(f"{self._pool.location} cannot be verified: a pool can't be listed; every read is checked")

    def close(self) -> None:
        self._pool.close()


def _fault(reason: str) -> Fault:
    suspect = reason in (DIGEST, NO_OBJECT, _HEADER) or reason.startswith(SHORT)
    return Fault.SUSPECT if suspect else Fault.HERE


def _some(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    """Yield runs of items, of `size` bytes each, that fit the staging memory, at least one item each."""
    count = max(1, STAGING_BYTES // size)
    return (items[first : first + count] for first in range(0, len(items), count))


#: Characters of the folder at the beginning of a namespace's entry.
_FOLDER = 32


def open_pool(location: str, namespace: Namespace, policy: Policy) -> MooncakeObjects:
    """Join the pool at a location, open `namespace`, and enter it in the pool's list. Raises StoreError."""
    address = PoolAddress.parse(location)
    pool = PoolClient.open(address)
    objects = _objects_of(pool, address, namespace.folder, policy)
    try:
        _manifests(pool, address).add(namespace.folder.encode() + encode_manifest(namespace))
    except OSError as error:
        objects.lag(error)  # the list serves people and tools only
    return objects


def pool_of_namespace(found: Found, policy: Policy) -> MooncakeObjects:
    """Open a found namespace without knowing its model, for tools; donates no memory. Raises StoreError."""
    address = PoolAddress.parse(str(found.folder).removesuffix("/" + found.name))
    return _objects_of(PoolClient.open(address), address, found.name, policy)


def pool_namespaces(location: str) -> list[Found]:
    """Return every namespace in a pool's list, sorted by model. Raises StoreError if the pool does not answer."""
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
