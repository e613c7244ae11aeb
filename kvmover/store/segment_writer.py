"""The Writer puts this process's objects into segments that it alone appends to, so processes share no lock."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

import msgspec

from kvmover.store.deletion import DeletionOrder
from kvmover.store.files import close_quietly, reason_of
from kvmover.store.part import PartKey
from kvmover.store.record import FIXED_BYTES, Preamble, encode_object
from kvmover.store.segment import Life, Segment, WritesLost, settle, sync_names
from kvmover.store.segment_catalog import Catalog
from kvmover.store.stored import StoredObject, padded

#: Names that are tried for a new segment: one may be taken, or its empty head be a cleaner's left-over.
_TRIES = 4


class FileOffset(msgspec.Struct, frozen=True, gc=False):
    """A payload's segment and byte offset in its data file."""

    segment: str
    offset: int


class Header(msgspec.Struct, frozen=True, gc=False):
    """The header fields of an object with a written payload."""

    page: bytes
    part: PartKey
    place: FileOffset
    nbytes: int
    digests: bytes


class Writer:
    """A writer that allocates places in segments of about `segment_bytes` and publishes the written objects."""

    def __init__(self, catalog: Catalog, segment_bytes: int) -> None:
        self._catalog = catalog
        self._segment_bytes = segment_bytes
        self._id = os.urandom(8).hex()
        self._made = 0
        self._current: Segment | None = None
        self._end = 0
        #: Segments with payload that is not synced, and its end: our own, and those of others that answered our puts.
        self._unsynced: dict[str, int] = {}
        self._owed: dict[str, int] = {}
        #: Segments whose names are on stable storage.
        self._named: set[str] = set()

    def reserve(self, sizes: Sequence[int]) -> list[FileOffset]:
        """Allocate places for payloads, contiguous if possible. Raises OSError if no segment can be made."""
        places: list[FileOffset] = []
        for size in sizes:
            segment = self._segment_for(padded(size))
            places.append(FileOffset(segment.name, self._end))
            self._end += padded(size)
            self._catalog.sizes.note(segment.name, self._end)
            segment.awaited += 1
        return places

    def _segment_for(self, nbytes: int) -> Segment:
        segment = self._current
        fits = not self._end or self._end + nbytes <= self._segment_bytes
        if segment and fits and segment.name in self._catalog.segments:
            return segment
        self.abandon()
        preamble = Preamble(self._catalog.namespace, self._catalog.machine.boot)
        for _ in range(_TRIES):
            name = f"{self._id}-{self._made:08}"
            self._made += 1
            if segment := Segment.create(self._catalog.folder, name, preamble):
                self._current = self._catalog.segments[name] = segment
                return segment
        raise OSError(errno.ENOLCK, f"none of {_TRIES} new segments could be made and locked")

    def announce(self, headers: Sequence[Header], stamp: int) -> list[StoredObject | str]:
        """Write the headers: from here on the objects exist. For each the object, or the reason why it does not."""
        answers: list[StoredObject | str] = []
        for name in dict.fromkeys(header.place.segment for header in headers):
            mine = [header for header in headers if header.place.segment == name]
            segment = self._catalog.segments.get(name)
            if segment is None:
                answers += ["cleared meanwhile"] * len(mine)
                continue
            objects, blob = _headers(segment, mine, stamp)
            try:
                segment.append(blob)
            except OSError as error:
                self.abandon()
                answers += [reason_of(error)] * len(mine)
            else:
                answers += objects
                end = max(each.offset + each.held_bytes for each in objects)
                self._unsynced[name] = max(end, self._unsynced.get(name, 0))
        return answers

    def ended(self, places: Iterable[FileOffset]) -> None:
        """Payloads whose writes are over, well or not. Under the lock."""
        for place in places:
            if segment := self._catalog.segments.get(place.segment):
                segment.awaited -= 1

    def abandon(self) -> bool:
        """Write to another segment from here on; whether there was one."""
        current, self._current, self._end = self._current, None, 0
        if current and current.life is Life.WRITTEN:
            current.become(Life.FULL)
        return current is not None

    def owe(self, objects: Iterable[StoredObject]) -> None:
        """A put was answered by these objects: the next sync makes them as safe as its own. Under the lock."""
        for each in objects:
            segment = self._catalog.segments[each.segment]
            end = each.offset + each.nbytes
            if not segment.is_ours and segment.synced < end:
                self._owed[each.segment] = max(end, self._owed.get(each.segment, 0))

    def sync(self) -> None:
        """Make all written objects durable and visible to other machines; seal full segments.

        Existing objects of other writers included by puts are made durable too. Tries every segment, then raises the
        first OSError. Unsynced objects of a segment with lost writes are deleted for every process; other failures are
        retried by the next call.
        """
        with self._catalog.lock:
            owed = dict(self._owed)
        failures: list[OSError] = []
        self._try(self.sync_own, failures)
        for name, end in owed.items():
            self._try(lambda name=name, end=end: self._settle(name, end), failures)
        for segment in list(self._catalog.segments.values()):
            if segment.life is Life.FULL:
                self._try(lambda segment=segment: self._finish(segment), failures)
        for error in failures:
            raise error

    def sync_own(self) -> None:
        """Make all objects durable that were written here. Raises the first OSError, as `sync` does."""
        with self._catalog.lock:
            unsynced = dict(self._unsynced)
        failures: list[OSError] = []
        for name, end in unsynced.items():
            self._try(lambda name=name, end=end: self._sync(name, end), failures)
        for error in failures:
            raise error

    @staticmethod
    def _try(step: Callable[[], None], failures: list[OSError]) -> None:
        try:
            step()
        except OSError as error:
            failures.append(error)

    def _settle(self, name: str, end: int) -> None:
        """Sync another process's segment up to byte `end`, for its objects included by puts here. Raises OSError.

        Objects that may be lost are forgotten here and left to others, and the next put writes them again: a segment
        without a writer that was sealed and not marked as synced is one whose sync has failed before.
        """
        segment = self._catalog.segments.get(name)
        try:
            if segment and segment.synced < end:
                if segment.is_sealed:
                    raise WritesLost(errno.EIO, os.strerror(errno.EIO))
                segment.settle()
                self._make_named(name)
        except WritesLost:
            with self._catalog.lock:
                self._catalog.forget_unsynced(name)
                self._owed.pop(name, None)
            raise
        with self._catalog.lock:
            if self._owed.get(name) == end:
                del self._owed[name]

    def _make_named(self, name: str) -> None:
        """Make a segment's name durable, once. Raises OSError."""
        if name not in self._named:
            sync_names(self._catalog.folder)
            self._named.add(name)

    def _sync(self, name: str, end: int) -> None:
        """Sync a segment through duplicated descriptors, since it may be closed meanwhile. Raises OSError."""
        with self._catalog.lock:
            segment = self._catalog.segments.get(name)
            if segment is None or segment.synced >= end:
                self._unsynced.pop(name, None)
                return
            data, head, before = os.dup(segment.data_fd), os.dup(segment.head_fd), segment.synced
        try:
            settle(data)
            self._make_named(name)
            with self._catalog.lock:
                if name in self._catalog.segments:
                    segment.mark_synced(end)
            settle(head)
        except WritesLost:
            segment.synced = before
            self._lose(segment)
            raise
        finally:
            close_quietly(data, head)
        with self._catalog.lock:
            if self._unsynced.get(name) == end:
                del self._unsynced[name]

    def _lose(self, segment: Segment) -> None:
        """Delete the unsynced objects of a segment with lost writes, and stop writing to it."""
        with self._catalog.lock:
            if segment is self._current:
                self.abandon()
            placed = self._catalog.index.placed_in(segment.name)
            self._unsynced.pop(segment.name, None)
        lost = placed.offsets + placed.held > segment.synced
        self._catalog.delete_at(segment.name, placed.records[lost], DeletionOrder.LOST)

    def _finish(self, segment: Segment) -> None:
        """Seal a segment that is full, once all of it is written and synced."""
        with self._catalog.lock:
            if segment.awaited or segment.name in self._unsynced or segment.name not in self._catalog.segments:
                return
            if segment.life is not Life.FULL:  # sealed meanwhile
                return
            segment.seal()
            self._catalog.sizes.drop(segment.name)
            self._catalog.discard(segment.name)
            self._named.discard(segment.name)
        self._catalog.sweep()

    def close(self) -> None:
        """Stop writing; sync and seal. Ignores disk errors, since readers check every byte."""
        self.abandon()
        with suppress(OSError):
            self.sync()


def _headers(segment: Segment, headers: Sequence[Header], stamp: int) -> tuple[list[StoredObject], bytes]:
    """Returns the objects of `headers`, and their encoded records for the end of the head file."""
    objects: list[StoredObject] = []
    blobs: list[bytes] = []
    at = segment.parsed
    for header in headers:
        offset = header.place.offset
        blobs.append(encode_object(at, stamp, (offset, header.nbytes), header.page, header.part, header.digests))
        objects.append(StoredObject(segment.name, at, offset, header.nbytes, header.page, header.part, stamp))
        at += FIXED_BYTES + len(header.digests)
    return objects, b"".join(blobs)
