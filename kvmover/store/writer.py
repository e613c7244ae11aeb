"""The Writer puts this process's objects into segments that it alone appends to, so processes share no lock."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from kvmover.store.catalog import Catalog
from kvmover.store.files import reason_of
from kvmover.store.index import StoredObject, padded
from kvmover.store.part import PartKey
from kvmover.store.record import FIXED_BYTES, Preamble, encode_object
from kvmover.store.segment import Segment


class FileOffset(msgspec.Struct, frozen=True, gc=False):
    """Where a payload goes."""

    segment: str
    offset: int


class Header(msgspec.Struct, frozen=True, gc=False):
    """What the header of an object says, whose payload is written."""

    page: bytes
    part: PartKey
    place: FileOffset
    nbytes: int
    digests: bytes


class Writer:
    """Deals out places in segments of about `segment_bytes` and announces what was written there."""

    def __init__(self, catalog: Catalog, segment_bytes: int) -> None:
        self._catalog = catalog
        self._segment_bytes = segment_bytes
        self._id = os.urandom(8).hex()
        self._made = 0
        self._current: Segment | None = None
        self._end = 0
        #: Segments with payload that is not synced, and its end.
        self._unsynced: dict[str, int] = {}

    def reserve(self, sizes: Sequence[int]) -> list[FileOffset]:
        """Places for payloads, neighbours as far as possible. Raises OSError where no segment can be made."""
        places: list[FileOffset] = []
        for size in sizes:
            segment = self._segment_for(padded(size))
            places.append(FileOffset(segment.name, self._end))
            self._end += padded(size)
            self._unsynced[segment.name] = self._end
        return places

    def _segment_for(self, nbytes: int) -> Segment:
        segment = self._current
        fits = not self._end or self._end + nbytes <= self._segment_bytes
        if segment and fits and segment.name in self._catalog.segments:
            return segment
        self.abandon()
        preamble = Preamble(self._catalog.namespace, self._catalog.machine.boot)
        while self._current is None:
            name = f"{self._id}-{self._made:08}"
            self._made += 1
            self._current = Segment.create(self._catalog.folder, name, preamble)
        self._catalog.segments[self._current.name] = self._current
        self._catalog.own.add(self._current.name)
        return self._current

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
        return answers

    def abandon(self) -> None:
        """Write to another segment from here on."""
        if self._current:
            self._current.full = True
        self._current, self._end = None, 0

    def sync(self) -> None:
        """Make all that was written safe from a power cut, and visible to other machines; seal what is full.

        Raises OSError: what was not synced stays as it was, readable here as long as the page cache has it.
        """
        for name, end in list(self._unsynced.items()):
            segment = self._catalog.segments.get(name)
            if segment and segment.synced < end:
                segment.sync(end)
            if segment is not self._current:
                del self._unsynced[name]
                if segment:
                    self._finish(segment)

    def _finish(self, segment: Segment) -> None:
        segment.seal()
        with self._catalog.lock:
            self._catalog.own.discard(segment.name)
            segment.release()
            self._catalog.reclaim(segment)

    def close(self) -> None:
        """Write no more: sync and seal what can be. A disk that fails is no error here: readers check every byte."""
        self.abandon()
        with suppress(OSError):
            self.sync()


def _headers(segment: Segment, headers: Sequence[Header], stamp: int) -> tuple[list[StoredObject], bytes]:
    """The objects that `headers` make, and their records from the end of the head file on."""
    objects: list[StoredObject] = []
    blobs: list[bytes] = []
    at = segment.parsed
    for header in headers:
        offset = header.place.offset
        blobs.append(encode_object(at, stamp, (offset, header.nbytes), header.page, header.part, header.digests))
        objects.append(
            StoredObject(segment.name, at, offset, header.nbytes, header.page, header.part, header.digests, stamp)
        )
        at += FIXED_BYTES + len(header.digests)
    return objects, b"".join(blobs)
