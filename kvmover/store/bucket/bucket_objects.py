"""BucketObjects stores the pages of a namespace in an object store, as sealed segments shared by many machines.

A put returns once its bytes are copied into this process's memory, where lookups find them. Only after `flush`, or
after a full segment was sent, do they outlive the process and become visible to others. Lookups read memory only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from threading import RLock

from kvmover.errors import StoreError
from kvmover.store.boot import NO_BOOT, HostBoot
from kvmover.store.bucket.bucket_catalog import BucketCatalog
from kvmover.store.bucket.bucket_reader import BucketReader
from kvmover.store.bucket.bucket_writer import SEGMENT_BYTES, BucketWriter, SentPayload
from kvmover.store.bucket.service import ObjectBucket
from kvmover.store.bucket.upkeep import BucketUpkeep
from kvmover.store.deletion import DeletionOrder, Permit, TwoLooks
from kvmover.store.files import HostMemory
from kvmover.store.judgement import JudgedObjects, judged, verified
from kvmover.store.objects import Failure, ObjectDraft, ObjectRead, Verdict, Watcher
from kvmover.store.part import PagePart, PartKey
from kvmover.store.record import holds, table
from kvmover.store.store_policy import Policy
from kvmover.store.store_results import Collected, Counters, Recovered, Stat, Verified
from kvmover.store.stored import Page, StoredObject, padded
from kvmover.transport import Memory

log = logging.getLogger(__name__)

#: Eviction frees at least this share of the quota at once; a segment takes at most the second share of the quota.
_SLACK, _SHARE = 1 / 64, 1 / 8

#: Payload bytes that `verify` reads at a time.
_VERIFIED_BYTES = 64 << 20


class BucketObjects(JudgedObjects[StoredObject]):
    """The objects of one namespace, in the bucket folder named by its digest.

    Locks, acquired in this order: `tidying` during flush and collect (puts do not wait for it), `writing` during a put
    or an eviction, `lock` briefly and never during a request.
    """

    def __init__(self, bucket: ObjectBucket, folder: str, namespace: bytes, policy: Policy) -> None:
        """Take ownership of `bucket` and index its segments. Raises StoreError if the folder cannot be listed."""
        self.policy = policy
        self._bucket = bucket
        self._memory = HostMemory()
        self.catalog = BucketCatalog(bucket, folder, namespace, HostBoot(NO_BOOT))
        self._writer = BucketWriter(self.catalog, _segment_bytes(policy))
        self._reader = BucketReader(self.catalog, self._writer, self.memory_at)
        self._upkeep = BucketUpkeep(self.catalog, self._writer, self._reader, policy.stamp_s)
        self.lock, self.writing, self.tidying = self.catalog.lock, RLock(), RLock()
        self.counters = Counters(lagged=self.catalog.lagged, deleted=self.catalog.door.deleted)
        if not self.catalog.survey():
            bucket.close()
            reasons = ", ".join(self.catalog.lagged)
            raise StoreError(f"cannot open the page store in {bucket.location}/{folder}: {reasons}")
        with self.lock:
            self.catalog.index.sort()
        stat = self.stat()
        self.recovered = Recovered(stat.segments, stat.objects, dict(self.catalog.dropped))

    @property
    def name(self) -> str:
        return self._bucket.location

    def register(self, memory: Memory) -> None:
        self._memory.add(memory)

    def deregister(self, memory: Memory) -> None:
        self._memory.remove(memory)

    def memory_at(self, address: int, nbytes: int) -> memoryview:
        return self._memory.view(address, nbytes)

    def parts_of(self, pages: Sequence[bytes], wanted: PartKey) -> list[tuple[PartKey, ...]]:
        self.catalog.refresh()
        with self.lock:
            there, stale = self.catalog.index.parts_of(pages), self._stale(pages)
        return [() if page in stale else parts for page, parts in zip(pages, there, strict=True)]

    def find(self, pages: Sequence[bytes], wanted: PartKey) -> Sequence[Page | None]:
        self.catalog.refresh()
        with self.lock:
            entries, stale = self.catalog.index.get_many(pages), self._stale(pages)
        return [None if page in stale else entry for page, entry in zip(pages, entries, strict=True)]

    def _stale(self, pages: Sequence[bytes]) -> set[bytes]:
        """Return those of `pages` whose last known use is older than the TTL. Under the lock."""
        if self.policy.ttl_s is None:
            return set()
        before = self.catalog.machine.now() - self.policy.ttl_s
        stamps = self.catalog.index.stamps_of(pages)
        return {page for page, stamp in zip(pages, stamps, strict=True) if stamp < before}

    def put(self, part: PagePart, key: PartKey, drafts: Sequence[ObjectDraft], keep: Collection[bytes]) -> list[str]:
        size = part.nbytes
        with self.writing:
            if not self._make_room(len(drafts) * padded(size), keep):
                quota = self.policy.quota_bytes
                return [f"{len(drafts)} pages of {size} bytes are more than the quota of {quota}"] * len(drafts)
            answers: list[str] = []
            for draft in drafts:
                payload, stamp = self.memory_at(draft.address, size), self.catalog.machine.now()
                sent = SentPayload(payload, draft.page, key, table(payload, part.box.cells), stamp)
                answer = self._writer.add(sent)
                answers.append(answer if isinstance(answer, str) else "")
            with self.lock:
                self._writer.publish()
                fresh = [draft.page for draft, reason in zip(drafts, answers, strict=True) if not reason]
                self.catalog.index.use(fresh, self.catalog.machine.now())
            return answers

    def lag(self, error: OSError) -> None:
        """Count a failed request whose result is optional."""
        self.catalog.lag(error)

    def owe(self, objects: Sequence[StoredObject]) -> None:
        """Return at once: objects in the bucket are durable, and `flush` sends all that are in memory."""

    def read(self, part: PagePart, reads: Sequence[ObjectRead[StoredObject]]) -> list[Failure[StoredObject]]:
        return self._reader.fetch(part, reads)

    def look_again(self, each: StoredObject) -> tuple[Verdict, str]:
        return self._reader.look_again(each)

    def permit(self, looks: TwoLooks) -> Permit | None:
        return self.catalog.door.ask(looks, 1, self.catalog.machine.now())

    def drop(self, each: StoredObject, verdict: Verdict) -> None:
        with self.lock:
            self.catalog.index.remove([each])

    def condemn(self, each: StoredObject, permit: Permit) -> None:
        with self.lock:
            self.catalog.delete([each], permit)

    def used(self, pages: Sequence[bytes]) -> None:
        now = self.catalog.machine.now()
        with self.lock:
            self.catalog.index.use(pages, now)
            self._upkeep.used(pages, now)

    def watch(self, watcher: Watcher) -> None:
        with self.lock:
            self.catalog.index.watch(watcher)

    # Upkeep

    @property
    def _held_bytes(self) -> int:
        with self.lock:
            return self.catalog.held_bytes + self._writer.held_bytes

    def _make_room(self, nbytes: int, keep: Collection[bytes]) -> bool:
        """Evict until `nbytes` more fit the quota or the service fails. Returns False if they exceed the quota."""
        quota = self.policy.quota_bytes
        if quota is None:
            return True
        if nbytes > quota:
            return False
        if self._held_bytes + nbytes > quota:
            self._evict_to(quota - (max(nbytes, int(quota * _SLACK)) if nbytes else 0), keep)
        return True

    def _evict_to(self, held_bytes: int, keep: Collection[bytes]) -> int:
        """Evict whole segments until at most `held_bytes` are held. Returns the bytes freed. Requires `writing`."""
        freed, kept = 0, frozenset(keep)
        with self.lock:
            self.catalog.index.use(list(keep), 0)
        while (goal := self._held_bytes - held_bytes) > 0:
            evicted = self._upkeep.evict(goal, kept)
            if evicted is None:
                break
            freed += evicted.freed_bytes
            self.counters.evicted_pages += evicted.pages
            self.counters.evicted_bytes += evicted.freed_bytes
        return freed

    def evict(self, nbytes: int) -> int:
        """Evict whole segments, coldest first, until `nbytes` are freed. Returns the bytes freed."""
        self.catalog.look()
        with self.writing:
            return self._evict_to(max(0, self._held_bytes - nbytes), ())

    def collect(self) -> Collected:
        """Run upkeep: refresh the index, expire, evict, publish uses and deletions, remove left-overs, compact.

        A failed request counts in `counters.lagged` and is left to a later call.
        """
        with self.tidying:
            evicted, freed = self.counters.evicted_pages, self.counters.evicted_bytes
            self.catalog.look()
            expired = self._expire()
            with self.writing:
                self._make_room(0, ())
            self._upkeep.tidy()
            counters = self.counters
            return Collected(expired, counters.evicted_pages - evicted, counters.evicted_bytes - freed, 0)

    def _expire(self) -> int:
        """Delete pages unused for the policy's TTL. Returns the number of pages."""
        if self.policy.ttl_s is None:
            return 0
        before = self.catalog.machine.now() - self.policy.ttl_s
        with self.lock:
            old: list[Page] = []
            for _, entry in self.catalog.index.pages():
                if entry.stamp >= before:
                    break
                old.append(entry)
            gone = [each for entry in old for each in entry.objects]
            self.catalog.delete(gone, self.catalog.door.order(DeletionOrder.EXPIRED, len(gone)))
        self.counters.expired_pages += len(old)
        return len(old)

    def flush(self) -> None:
        """Send all pages put here: they then outlive this process, and other processes find them within seconds.

        Raises StoreError if a request fails: unsent pages stay readable here, and the next flush sends them.
        """
        with self.tidying:
            try:
                self._writer.sync()
                self._upkeep.tell_deaths()
                self._upkeep.tell_uses()
            except OSError as error:
                raise StoreError(f"cannot flush {self._where}: {error.strerror}") from error

    def clear(self) -> int:
        """Delete every page of this namespace. Returns the number of pages. Raises StoreError if a request fails."""
        with self.tidying, self.writing:
            if not self.catalog.survey():
                raise StoreError(f"cannot clear {self._where}: {', '.join(self.catalog.lagged)}")
            with self.lock:
                pages = len(self.catalog.index)
                self._writer.drop()
                listing = self.catalog.listing
                for name in list(self.catalog.segments):
                    self.catalog.forget(name)
            try:
                permit = self.catalog.door.order(DeletionOrder.CLEARED, pages)
                for entries in listing.all:
                    self._bucket.delete_all([entry.name for entry in entries.values()], permit)
            except OSError as error:
                raise StoreError(f"cannot clear {self._where}: {error.strerror}") from error
            return pages

    @property
    def _where(self) -> str:
        return f"{self._bucket.location}/{self.catalog.folder}"

    def stat(self) -> Stat:
        """Return the totals of this process's index, unsent segments included."""
        with self.lock:
            segments, head_bytes = (
                len(self.catalog.segments) + len(self._writer.held),
                sum(segment.head_bytes for segment in self.catalog.segments.values()),
            )
            return self.catalog.index.stat(segments, self._held_bytes, head_bytes)

    def verify(self, progress: Callable[[int], None] | None = None) -> Verified:
        """Read and check every object, and delete bad ones within the deletion budget.

        `progress` is called with the bytes of each object. Raises StoreError if the service does not answer, which
        deletes no object.
        """
        with self.lock:
            names = [*self.catalog.segments, *self._writer.held]
        try:
            report = verified(judged(self, self._suspects(names)), progress)
        except OSError as error:
            raise StoreError(f"cannot verify {self._where}: {error.strerror}") from error
        with suppress(OSError):
            self._upkeep.tell_deaths()
        return report

    def _suspects(self, names: Sequence[str]) -> Iterator[tuple[StoredObject, bool]]:
        """Yield each object of segments, and True if its bytes differ from its digests."""
        for name in names:
            with self.lock:
                objects = self.catalog.index.objects(name)
            for few in _some(objects):
                digests, payloads = self._reader.digests(few), self._reader.payloads(few)
                for each, digest, payload in zip(few, digests, payloads, strict=True):
                    if isinstance(digest, str) or isinstance(payload, str):
                        yield each, True
                    else:
                        yield each, not holds(payload, each.cells, digest, 0)

    def close(self) -> None:
        """Flush, log the bytes that could not be sent, and close the bucket. Idempotent; never raises StoreError."""
        with self.tidying, self.writing:
            try:
                self.flush()
            except StoreError as error:
                with self.lock:
                    log.error("%s; %d bytes of pages are lost", error, self._writer.held_bytes)
            self._bucket.close()


def _segment_bytes(policy: Policy) -> int:
    """Return the segment size: small against the quota, because eviction removes whole segments."""
    most = min(policy.segment_bytes, SEGMENT_BYTES)
    return most if policy.quota_bytes is None else max(1, min(most, int(policy.quota_bytes * _SHARE)))


def _some(objects: Sequence[StoredObject]) -> Iterator[Sequence[StoredObject]]:
    """Yield runs of objects of up to `_VERIFIED_BYTES` together, at least one object each."""
    first, nbytes = 0, 0
    for number, each in enumerate(objects):
        if number > first and nbytes + each.nbytes > _VERIFIED_BYTES:
            yield objects[first:number]
            first, nbytes = number, 0
        nbytes += each.nbytes
    if first < len(objects):
        yield objects[first:]
