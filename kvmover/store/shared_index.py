"""A SharedIndex lets the ranks of one host open a store with one index in memory, which one reads and the others map.

A snapshot is what a process knew that has followed the store since: a rank that maps it reads on in every head, finds
segments that came and went, and compares each object with the state in its header. It writes to a copy of the pages it
changes. A snapshot that is damaged, or far from the store, is not taken, and the heads are read.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress

import msgspec

from kvmover.prepared import prepared
from kvmover.store.index import SavedIndex
from kvmover.store.record import decode_part, encode_part
from kvmover.store.segment import HEAD, Life, Segment
from kvmover.store.segment_catalog import Catalog
from kvmover.store.snapshot_file import MEMORY, MappedSnapshot, SnapshotFile, SnapshotTurn, SnapshotUse
from kvmover.store.stored import StoredObject

#: Bytes of heads from which an index is shared: fewer are read in some milliseconds into a few MB.
WORTH_BYTES = 4 << 20


class _Waiting(msgspec.Struct, frozen=True, array_like=True):
    """An object that waits: its header's place, payload, page, encoded part and stamp."""

    record: int
    offset: int
    nbytes: int
    page: bytes
    part: bytes
    stamp: int


class _SavedSegment(msgspec.Struct, frozen=True, array_like=True):
    """A segment as its reader left it."""

    name: str
    boot: bytes
    is_sealed: bool
    parsed: int
    synced: int
    waiting: list[_Waiting]


@prepared
class _Contents(msgspec.Struct, frozen=True):
    index: SavedIndex
    segments: list[_SavedSegment]


class SharedIndex:
    """A catalog's index in memory that the ranks of this host share."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._use: SnapshotUse | None = None

    @contextmanager
    def opening(self) -> Generator[bool]:
        """Surround the reading of the heads. Yields True if the catalog begins with another rank's index.

        Otherwise this process's index is published afterwards, if it has the turn.
        """
        found = None
        with suppress(OSError):  # the heads are read
            heads = self._heads()
            if sum(heads.values()) >= WORTH_BYTES:
                found = self._file().wait(lambda each: self._resume(each, heads))
        turn = found if isinstance(found, SnapshotTurn) else None
        try:
            yield self._use is not None
            if turn:
                publisher, turn = turn, None
                self._publish(publisher)
        except BaseException:
            self.close()
            raise
        finally:
            if turn:
                turn.end()

    def close(self) -> None:
        """Release the snapshot. Safe to call twice."""
        use, self._use = self._use, None
        if use:
            use.end()

    def _heads(self) -> dict[str, int]:
        """Returns the bytes of each head in the folder. Raises OSError."""
        found = dict[str, int]()
        with os.scandir(self._catalog.folder) as entries:
            for entry in entries:
                if entry.name.endswith(HEAD):
                    found[entry.name.removesuffix(HEAD)] = entry.stat(follow_symlinks=False).st_size
        return found

    def _file(self) -> SnapshotFile:
        """Returns the place of this namespace's index in this boot of the host. Raises OSError."""
        catalog = self._catalog
        place = catalog.folder.stat()
        identity = (catalog.namespace, catalog.machine.boot, place.st_dev, place.st_ino)
        return SnapshotFile(msgspec.msgpack.encode(identity), MEMORY)

    def _resume(self, snapshot: MappedSnapshot, heads: Mapping[str, int]) -> bool:
        """Begin with a snapshot; False, and nothing is changed, if it is far from the store."""
        catalog, segments = self._catalog, list[Segment]()
        try:
            contents = msgspec.msgpack.decode(snapshot.contents, type=_Contents)
            if not _is_near(contents.segments, heads):
                return False
            index = catalog.index.load(contents.index, snapshot.columns)
            segments.extend(_segment(catalog, each) for each in contents.segments)
        except (OSError, ValueError, KeyError):  # a file vanished, or the columns are another build's
            for each in segments:
                each.close()
            return False
        with catalog.lock:
            catalog.resume(index, segments)
        self._use = snapshot.use
        return True

    def _publish(self, turn: SnapshotTurn) -> None:
        """Publish the catalog's index, and use the published one.

        It is written off the lock: nobody else has the catalog yet, so that nothing changes meanwhile.
        """
        catalog = self._catalog
        with catalog.lock:
            value, columns = catalog.index.saved()
            contents = _Contents(value, [_saved(each) for each in catalog.segments.values()])
        published = turn.publish(msgspec.msgpack.encode(contents), columns)
        if published:
            self._use = published.use
            with catalog.lock:
                catalog.index = catalog.index.load(value, published.columns)


def _is_near(segments: Sequence[_SavedSegment], heads: Mapping[str, int]) -> bool:
    """Returns True if at least four fifths of what a snapshot knows of heads is there, and of the heads is known."""
    known = sum(min(each.parsed, heads.get(each.name, 0)) for each in segments)
    return known * 5 >= 4 * max(sum(each.parsed for each in segments), sum(heads.values()))


def _saved(segment: Segment) -> _SavedSegment:
    waiting = [
        _Waiting(each.record, each.offset, each.nbytes, each.page, encode_part(each.part), each.stamp)
        for each in segment.waiting
    ]
    return _SavedSegment(segment.name, segment.boot, segment.is_sealed, segment.parsed, segment.synced, waiting)


def _segment(catalog: Catalog, saved: _SavedSegment) -> Segment:
    """Returns a segment as it was saved. Raises ValueError or OSError if it is not the same any more."""
    if saved.is_sealed:
        found = Segment(catalog.folder, saved.name, saved.boot, Life.SEALED)
    else:
        found = Segment.find(catalog.folder, saved.name, catalog.namespace)
        if not isinstance(found, Segment):
            raise ValueError(f"{saved.name} is gone")
        if found.boot != saved.boot or os.fstat(found.head_fd).st_size < saved.parsed:
            found.close()
            raise ValueError(f"{saved.name} is shorter than it was")
    found.parsed, found.synced, found.waiting = saved.parsed, saved.synced, _waiting(saved)
    return found


def _waiting(saved: _SavedSegment) -> list[StoredObject]:
    found = list[StoredObject]()
    for each in saved.waiting:
        part = decode_part(each.part)
        if part is None:
            raise ValueError(f"no part is encoded as {each.part.hex()}")
        found.append(StoredObject(saved.name, each.record, each.offset, each.nbytes, each.page, part, each.stamp))
    return found
