"""A BucketWriter fills segments in memory and sends them, data first and then the head that commits it.

What was put is found by this process at once, and by others once its segment was sent: when it is full, at a flush, or
when the writer is closed. A process that dies before loses it; what it had sent of a segment without a head is a
left-over. What cannot be sent stays in memory, found as before, and is tried again; beyond a few segments puts fail.
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

#: Segments are no longer, whatever the policy says: they are filled in memory.
SEGMENT_BYTES = 64 << 20

#: Segments in memory beside the one that is filled; and how long puts leave a service alone that did not take one.
_WAITING, _AGAIN_S = 3, 5.0


@dataclass(frozen=True, slots=True)
class SentPayload:
    """What a put is of: the payload, 8 bytes of digest a cell, and the second that it was put."""

    payload: memoryview
    page: bytes
    part: PartKey
    digests: bytes
    stamp: int


class BucketWriter:
    """The segments of one process. Methods say which of them the caller holds the catalog's lock for."""

    def __init__(self, catalog: BucketCatalog, segment_bytes: int) -> None:
        self._catalog = catalog
        self._segment_bytes = min(segment_bytes, SEGMENT_BYTES)
        self._id = os.urandom(4)
        self._made = 0
        self._current: FillingSegment | None = None
        #: All that are in memory, the current one too.
        self.held: dict[str, FillingSegment] = {}
        self._sending = Lock()
        self._fresh: list[StoredObject] = []
        self._failed_s = -_AGAIN_S

    @property
    def held_bytes(self) -> int:
        """Payload that is in memory alone. Under the lock."""
        return sum(segment.end for segment in self.held.values())

    def add(self, put: SentPayload) -> StoredObject | str:
        """Keep a copy of a payload; the object, which `publish` lets be found, or why there is none.

        Not under the lock: a full segment is sent.
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
        """Find what was added: many at once, which costs a tenth of one at a time. Under the lock."""
        fresh, self._fresh = self._fresh, []
        self._catalog.index.add(fresh)

    def _begin(self, nbytes: int) -> FillingSegment:
        name = segment_name(self._catalog.machine.now(), self._id, self._made)
        self._made += 1
        room = max(self._segment_bytes, padded(nbytes))
        self.held[name] = FillingSegment(name, self._catalog.namespace, room, time.monotonic())
        return self.held[name]

    def _send_full(self) -> None:
        """Send what can be, and try it again later where the service does not take it."""
        try:
            self._send_all()
        except OSError as error:
            self._failed_s = time.monotonic()
            self._catalog.lag(error)

    def sync(self) -> None:
        """Send all that was put before. Raises OSError for the first segment that could not be; it stays here."""
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
                    break  # a service that does not answer is not asked for each of them
        for error in failures:
            raise error

    def _send(self, segment: FillingSegment) -> None:
        """Make a segment the bucket's: from the moment of its head on it is safe, and others find it."""
        catalog, bucket = self._catalog, self._catalog.bucket
        with catalog.lock:
            is_wanted = not catalog.index.empty(segment.name)
        head = segment.head()
        if is_wanted:
            bucket.put(catalog.path(segment.name + DATA), segment.data(), PutMode.OVERWRITE)
            try:
                bucket.put(catalog.path(segment.name + HEAD), head, PutMode.CREATE)
            except FileExistsError:
                # An attempt that seemed to fail may have come through; somebody else's head is somebody else's segment.
                if bucket.get(catalog.path(segment.name + HEAD)) != head:
                    self._lose(segment)
                    raise OSError(errno.EEXIST, f"segment {segment.name} is another writer's") from None
        with catalog.lock:
            if self.held.pop(segment.name, None) is None or not is_wanted:
                return  # it was cleared meanwhile
            kept = KeptSegment(segment.name, segment.end, len(head), len(segment.objects))
            living = set(catalog.index.records(segment.name).tolist())
            kept.dead.kill(each.offset for each in segment.objects.values() if each.record not in living)
            catalog.segments[segment.name] = kept

    def _lose(self, segment: FillingSegment) -> None:
        with self._catalog.lock:
            self.held.pop(segment.name, None)
            self._catalog.index.drop(segment.name)

    def drop(self) -> None:
        """Forget all that was not sent. Under the lock."""
        self._current = None
        self.publish()
        for segment in list(self.held.values()):
            self._lose(segment)
