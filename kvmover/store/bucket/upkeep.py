"""The upkeep of a bucket: publishes deletions and uses, removes left-overs, compacts catalogs, evicts whole segments.

Any number of processes may run it concurrently. Races only cost work: two evictions of one segment carry its hot pages
twice, two compactions write two catalogs, and one of two concurrent `.dead` writes wins.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvmover.store.bucket.bucket_catalog import BucketCatalog, KeptSegment
from kvmover.store.bucket.bucket_reader import BucketReader
from kvmover.store.bucket.bucket_writer import BucketWriter, SentPayload
from kvmover.store.bucket.choice import Listing, left_overs
from kvmover.store.bucket.compaction import CATALOG, compaction, encode_catalog
from kvmover.store.bucket.sealed import DEAD, HEAD, USED, USES, Dead, SealedSegment, encode_uses, read_head
from kvmover.store.bucket.service import PutMode
from kvmover.store.deletion import EMPTY, DeletionOrder, Look, Permit, Seen, TwoLooks
from kvmover.store.eviction import EvictionCandidate, carried, victim
from kvmover.store.record import holds
from kvmover.store.stored import Page, StoredObject

#: Pages scanned under the lock to choose a segment: about 20 ms.
_COLD_PAGES = 8192


@dataclass(frozen=True, slots=True)
class EvictedSegment:
    """An evicted segment: bytes freed in the bucket, net of objects carried forward, and pages evicted with it."""

    freed_bytes: int
    pages: int


class BucketUpkeep:
    """The upkeep that one process does for a namespace. Call without the catalog's lock unless said otherwise."""

    def __init__(self, catalog: BucketCatalog, writer: BucketWriter, reader: BucketReader, stamp_s: int) -> None:
        self._catalog, self._writer, self._reader = catalog, writer, reader
        self._id = os.urandom(8).hex()
        self._stamp_s = stamp_s
        self._uses: dict[bytes, int] = {}
        self._told_s = float("-inf")

    def tidy(self) -> None:
        """Run every step except eviction. A step that raises OSError is counted and left to a later call."""
        for step in (self.tell_deaths, self.tell_uses, self._sweep, self._compact):
            try:
                step()
            except OSError as error:
                self._catalog.lag(error)

    def used(self, pages: Sequence[bytes], second: int) -> None:
        """Record that pages were read here at `second`. Under the lock."""
        self._uses.update(dict.fromkeys(pages, second))
        if len(self._uses) > 2 * USES:
            latest = sorted(self._uses.items(), key=lambda each: each[1])[-USES:]
            self._uses = dict(latest)

    def tell_deaths(self) -> None:
        """Publish new deletions in `.dead`, and remove segments without living objects. Raises OSError."""
        catalog = self._catalog
        with catalog.lock:
            behind = [each for each in catalog.segments.values() if not each.told >= each.dead]
        for segment in behind:
            path = catalog.path(segment.name + DEAD)
            try:
                told = Dead.decode(catalog.bucket.get(path)) or Dead()
            except FileNotFoundError:
                told = Dead()
            with catalog.lock:
                catalog.heard(segment, told)
                whole = Dead()
                whole.join(segment.dead)
                is_over = len(whole) >= segment.objects
            if is_over:
                looks = self._why_empty(segment, whole)
                if looks and (permit := catalog.door.ask(looks, 1, catalog.machine.now())):
                    self._remove(segment, permit)
                continue
            catalog.bucket.put(path, whole.encode(), PutMode.OVERWRITE)
            with catalog.lock:
                segment.told = whole

    def _why_empty(self, segment: KeptSegment, dead: Dead) -> TwoLooks | None:
        """Return grounds to remove a segment if every object of its head, read anew, is deleted; else None.

        Raises OSError.
        """
        catalog = self._catalog
        found = read_head(segment.name, catalog.bucket.get(catalog.path(segment.name + HEAD)), catalog.namespace)
        if isinstance(found, str) or not dead.among(found.table.offset).all():
            return None
        return TwoLooks(Look(Seen.READ, "all are deleted"), Look(Seen.ANEW, EMPTY), 0)

    def _remove(self, segment: KeptSegment, permit: Permit) -> None:
        """Remove a segment from index and bucket, head first, so that readers never index missing data."""
        with self._catalog.lock:
            self._catalog.forget(segment.name)
        self._catalog.bucket.delete(self._catalog.names_of(segment.name), permit)

    def tell_uses(self) -> None:
        """Publish the pages read here, at most once per `stamp_s` seconds. Raises OSError."""
        if time.monotonic() - self._told_s < self._stamp_s:
            return
        with self._catalog.lock:
            uses = dict(self._uses)
        if uses:
            name = self._catalog.path(f"00-{self._id}{USED}")
            self._catalog.bucket.put(name, encode_uses(uses), PutMode.OVERWRITE)
            self._told_s = time.monotonic()

    def _sweep(self) -> None:
        """Delete left-overs of the last survey whose other half is still absent. Raises OSError."""
        catalog = self._catalog
        listing, catalog.listing = catalog.listing, Listing.of(())
        for each in left_overs(listing, time.time()):
            if each.lacks and catalog.bucket.has(each.lacks):
                continue
            looks = TwoLooks(Look(Seen.LISTING, "left over"), Look(Seen.NAME, "left over"), each.blocks)
            if permit := catalog.door.ask(looks, 1, catalog.machine.now()):
                catalog.bucket.delete([each.name], permit)

    def _compact(self) -> None:
        """Write the catalog planned by `compaction`, if any, and delete the catalogs it replaces. Raises OSError."""
        catalog = self._catalog
        with catalog.lock:
            known = dict(catalog.segments)
            few = compaction({name: within or () for name, within in catalog.catalogs.items()}, known)
        if few is None:
            return
        catalog.read_contents()
        with catalog.lock:
            plan = compaction({name: within or () for name, within in catalog.catalogs.items()}, catalog.segments)
        if plan is None:
            return
        segments: list[SealedSegment] = []
        for name in plan.segments:
            with catalog.lock:
                kept, table = catalog.segments.get(name), catalog.index.table(name)
            if kept and len(table) + len(kept.dead) == kept.objects:  # else objects of it are unknown here
                segments.append(SealedSegment(name, kept.data_bytes, kept.head_bytes, kept.objects, table))
        fresh = f"00-{os.urandom(8).hex()}{CATALOG}"
        catalog.bucket.put(catalog.path(fresh), encode_catalog(catalog.namespace, segments), PutMode.CREATE)
        with catalog.lock:
            catalog.catalogs[fresh] = [each.name for each in segments]
            for name in plan.replaces:
                catalog.catalogs.pop(name, None)
        replaced = [catalog.path(name) for name in plan.replaces]
        permit = catalog.door.order(DeletionOrder.REPLACED, len(replaced))
        catalog.bucket.delete(replaced, permit)

    def evict(self, nbytes: int, keep: frozenset[bytes]) -> EvictedSegment | None:
        """Evict the segment with the smallest hot share, carrying hot objects forward.

        Cold pages are the least recently used, up to `nbytes` together, excluding `keep`. Returns None if no segment
        can go or the service fails.
        """
        catalog = self._catalog
        with catalog.lock:
            cold = self._cold(nbytes, keep)
            chosen = victim(self._candidates(cold))
            if chosen is None:
                return None
            segment, hot = catalog.segments[chosen.name], self._hottest(chosen, cold, keep)
        try:
            if not self._is_there(segment):
                return EvictedSegment(chosen.data_bytes, 0)
            sent = self._carry(hot)
            permit = catalog.door.order(DeletionOrder.EVICTED, 1)
            with catalog.lock:
                pages = self._drop(segment, sent, permit)
            self._remove(segment, permit)
        except OSError as error:
            catalog.lag(error)
            return None
        return EvictedSegment(chosen.data_bytes - sum(each.held_bytes for each in sent), pages)

    def _is_there(self, segment: KeptSegment) -> bool:
        """Return True if the segment's head exists in the bucket; forget the segment if not. Raises OSError."""
        if self._catalog.bucket.has(self._catalog.path(segment.name + HEAD)):
            return True
        with self._catalog.lock:
            self._catalog.forget(segment.name)
        return False

    def _cold(self, nbytes: int, keep: frozenset[bytes]) -> dict[bytes, Page]:
        """Return the least recently used pages, about `nbytes` together, up to a page of `keep`. Under the lock."""
        cold: dict[bytes, Page] = {}
        for page, entry in self._catalog.index.pages():
            if nbytes <= 0 or page in keep or len(cold) >= _COLD_PAGES:
                break
            cold[page] = entry
            nbytes -= entry.held_bytes
        return cold

    def _candidates(self, cold: dict[bytes, Page]) -> list[EvictionCandidate]:
        cold_bytes: dict[str, int] = {}
        for entry in cold.values():
            for each in entry.objects:
                cold_bytes[each.segment] = cold_bytes.get(each.segment, 0) + each.held_bytes
        live_bytes = self._catalog.index.live_bytes
        return [
            EvictionCandidate(name, kept.data_bytes, live_bytes(name) - cold_bytes.get(name, 0))
            for name, kept in sorted(self._catalog.segments.items())
        ]

    def _hottest(
        self, chosen: EvictionCandidate, cold: dict[bytes, Page], keep: frozenset[bytes]
    ) -> list[StoredObject]:
        """Choose the objects to carry forward: those of `keep`, then the most recently used up to CARRIED_SHARE."""
        hot = [each for each in self._catalog.index.objects(chosen.name) if each.page not in cold]
        stamps = self._catalog.index.stamps_of([each.page for each in hot])
        held, kept = [each.held_bytes for each in hot], [each.page in keep for each in hot]
        return [hot[at] for at in carried(chosen.data_bytes, held, stamps, kept)]

    def _carry(self, objects: Sequence[StoredObject]) -> list[StoredObject]:
        """Rewrite objects to a new segment and send it. Returns those rewritten. Raises OSError if sending fails.

        Objects that are unreadable or refused by the writer are skipped.
        """
        digests, payloads = self._reader.digests(objects), self._reader.payloads(objects)
        with self._catalog.lock:
            stamps = self._catalog.index.stamps_of([each.page for each in objects])
        sent: list[StoredObject] = []
        for each, table, payload, stamp in zip(objects, digests, payloads, stamps, strict=True):
            if isinstance(table, str) or isinstance(payload, str) or not holds(payload, each.cells, table, 0):
                continue
            answer = self._writer.add(SentPayload(payload, each.page, each.part, table, stamp))
            if not isinstance(answer, str):
                sent.append(each)
        if sent:
            self._writer.sync()
        return sent

    def _drop(self, segment: KeptSegment, sent: Sequence[StoredObject], permit: Permit) -> int:
        """Delete the other objects of pages evicted with `segment`. Returns the number of pages. Under the lock."""
        index = self._catalog.index
        going = [each for each in index.objects(segment.name) if each not in sent]
        pages: set[bytes] = set()
        for each in going:
            entry = index.get(each.page)
            others = [other for other in entry.objects if other.segment != segment.name] if entry else []
            if not any(other.part is each.part for other in others):  # no other process carried it forward
                pages.add(each.page)
                self._catalog.delete(others, permit)
        return len(pages)
