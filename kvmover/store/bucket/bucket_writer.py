"""A BucketWriter fills segments in memory and sends each to the bucket: data first, then the head that commits it.

This process finds a put page at once; other processes find it after its segment is sent: when full, at a flush, or on
close. A crash before that loses the page, and `.data` sent without its head becomes a left-over. A segment that cannot
be sent stays in memory, readable, and is resent later; once more than `_WAITING` are held, puts fail.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from dataclasses import dataclass
from threading import Lock

from kvmover.store.bucket.bucket_catalog import BucketCatalog, KeptSegment
from kvmover.store.bucket.sealed import DATA, HEAD, FillingSegment, segment_name
from kvmover.store.bucket.service import PutMode
from kvmover.store.part import PartKey
from kvmover.store.stored import StoredObject, padded

log = logging.getLogger(__name__)

#: Upper limit of the policy's segment size, because segments are filled in memory.
SEGMENT_BYTES = 64 << 20

#: Unsent segments in memory beside the one being filled; and seconds without sending by puts after a failure.
_WAITING, _AGAIN_S = 3, 5.0


@dataclass(frozen=True, slots=True)
class SentPayload:
    """A put object: its payload, 8 bytes of digest per cell, and the second of the put."""

    payload: memoryview
    page: bytes
    part: PartKey
    digests: bytes
    stamp: int


class BucketWriter:
    """The unsent segments of one process. "Under the lock" means that the caller holds the catalog's lock."""

    def __init__(self, catalog: BucketCatalog, segment_bytes: int) -> None:
        self._catalog = catalog
        self._segment_bytes = min(segment_bytes, SEGMENT_BYTES)
        self._id = os.urandom(4)
        self._made = 0
        self._current: FillingSegment | None = None
        #: All unsent segments by name, the current one included.
        self.held: dict[str, FillingSegment] = {}
        self._sending = Lock()
        self._fresh: list[StoredObject] = []
        self._failed_s = -_AGAIN_S

    @property
    def held_bytes(self) -> int:
        """Bytes of unsent payloads, padded to blocks. Under the lock."""
        return sum(segment.end for segment in self.held.values())

    def add(self, put: SentPayload) -> StoredObject | str:
        """Copy a payload into the current segment. Returns its object, for `publish` to index, or a refusal's reason.

        Call without the lock: full segments are sent here.
        """
        with self._catalog.lock:
            is_full = self._current is not None and not self._current.fits(len(put.payload))
            if is_full:
                self._current = None
        if is_full and time.monotonic() - self._failed_s > _AGAIN_S:
            self._send_full()
        with self._catalog.lock:
            if self._current is None:
                if len(self.held) > _WAITING:
                    return "too much waits to be sent to the object store"
                self._current = self._begin(len(put.payload))
            each = self._current.add(put.payload, put.page, put.part, put.digests, put.stamp)
            self._fresh.append(each)
            return each

    def publish(self) -> None:
        """Index the added objects, all at once: a tenth of the cost of one at a time. Under the lock."""
        fresh, self._fresh = self._fresh, []
        self._catalog.index.add(fresh)

    def _begin(self, nbytes: int) -> FillingSegment:
        name = segment_name(self._catalog.machine.now(), self._id, self._made)
        self._made += 1
        room = max(self._segment_bytes, padded(nbytes))
        self.held[name] = FillingSegment(name, self._catalog.namespace, room, time.monotonic())
        return self.held[name]

    def _send_full(self) -> None:
        """Send full segments; after a failure they stay here and are resent later."""
        try:
            self._send_all()
        except OSError as error:
            self._failed_s = time.monotonic()
            self._catalog.lag(error)

    def sync(self) -> None:
        """Send all segments, the current one included. Raises OSError at the first failure; unsent segments stay."""
        with self._catalog.lock:
            self._current = None
        self._send_all()

    def _send_all(self) -> None:
        failures: list[OSError] = []
        with self._sending:
            with self._catalog.lock:
                self.publish()
                full = [segment for segment in self.held.values() if segment is not self._current]
            for segment in full:
                try:
                    self._send(segment)
                except OSError as error:
                    failures.append(error)
                    break  # each further segment would wait for the same failing service
        for error in failures:
            raise error

    def _send(self, segment: FillingSegment) -> None:
        """Write a segment's data, then its head, which makes it durable and visible to others.

        A segment whose objects are all deleted is dropped unsent. Raises OSError if a request fails, or if another
        writer has taken the name: the segment is then lost.
        """
        catalog, bucket = self._catalog, self._catalog.bucket
        with catalog.lock:
            is_wanted = not catalog.index.empty(segment.name)
        head = segment.head()
        if is_wanted:
            bucket.put(catalog.path(segment.name + DATA), segment.data(), PutMode.OVERWRITE)
            try:
                bucket.put(catalog.path(segment.name + HEAD), head, PutMode.CREATE)
            except FileExistsError:
                # A retried request may have succeeded the first time; a different head belongs to another writer.
                if bucket.get(catalog.path(segment.name + HEAD)) != head:
                    self._lose(segment)
                    raise OSError(errno.EEXIST, f"segment {segment.name} is another writer's") from None
        with catalog.lock:
            if self.held.pop(segment.name, None) is None or not is_wanted:
                return  # cleared meanwhile, or empty
            kept = KeptSegment(segment.name, segment.end, len(head), len(segment.objects))
            living = set(catalog.index.records(segment.name).tolist())
            kept.dead.kill(each.offset for each in segment.objects.values() if each.record not in living)
            catalog.segments[segment.name] = kept

    def _lose(self, segment: FillingSegment) -> None:
        with self._catalog.lock:
            self.held.pop(segment.name, None)
            self._catalog.index.drop(segment.name)

    def drop(self) -> None:
        """Discard all unsent segments. Under the lock."""
        self._current = None
        self.publish()
        for segment in list(self.held.values()):
            self._lose(segment)
