"""A Catalog is a namespace's directory as this process sees it, brought up to date before every question.

One `stat` of the directory finds new and removed segments; one of each head file that is still written, its new
objects; one of the deletion log, objects that other processes deleted. So 128 look-ups cost no system call each. Where
the system fails to answer, the index stays as it was and the failure is counted: an index that lags costs a miss, never
bytes.

The deletion log is one small file that all processes append to. It only saves time: the truth is the state in each
header. Lost, torn or repeated rows do no harm, since any odd row sends the reader back to the headers.
"""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvmover.cache.prefix import PageOrder
from kvmover.store.absence import ByteRange, why_empty
from kvmover.store.boot import NO_BOOT, HostBoot
from kvmover.store.deletion import DeletionDoor, Grounds, Permit
from kvmover.store.files import Files, OpenFile, close_quietly, is_gone, open_shared, reason_of
from kvmover.store.guard_lock import GuardLock, off_lock, under_lock
from kvmover.store.index import Index
from kvmover.store.lent_files import LentFiles
from kvmover.store.record import LIVE, RecordTable
from kvmover.store.segment import Life, Segment, punch, segments_in
from kvmover.store.stored import Placed, Places, StoredObject

#: A row: a segment, the place of a record in its head, and a checksum of both.
_ROW = np.dtype({"names": ["segment", "record", "check"], "formats": ["S25", "<u8", "<u8"], "offsets": [0, 32, 40]})
_CHECKED_BYTES = 40
_ROW_BYTES = _ROW.itemsize

#: Bytes of the log that are read at a time: a few milliseconds.
_SOME_BYTES = _ROW_BYTES * 2048

#: A log longer than this many bytes is started anew by a cleaner.
_LONG_BYTES = 4 << 20

#: Segments, and the places of records in the head of each.
Deletions = list[tuple[str, Places]]


class DeletionLog:
    """A log of one namespace's deletions, read from its end at opening: earlier deletions are in the headers."""

    def __init__(self, path: Path) -> None:
        """Open the log. Never raises: a file that cannot be opened is tried again at each `poll`."""
        self._path = path
        self._fd, self._read = -1, 0
        with suppress(OSError):
            self._open()
            self._read = self._whole_bytes()

    def append(self, gone: Placed) -> None:
        """Append deleted objects. A failed write is ignored: the deletion stands in the headers."""
        if not len(gone):
            return
        rows = np.zeros(len(gone), _ROW)
        for name, some in gone.by_segment():
            rows["segment"][some] = name.encode()
        rows["record"] = gone.records
        rows["check"] = _checks(rows)
        with suppress(OSError):
            if self._fd < 0:
                self._open()
            if not os.fstat(self._fd).st_nlink:  # replaced, and not read to its end yet
                self._append_to_the_next(rows.tobytes())
                return
            os.write(self._fd, rows.tobytes())
            if os.fstat(self._fd).st_size == self._read + len(rows) * _ROW_BYTES:
                self._read += len(rows) * _ROW_BYTES  # no other process wrote meanwhile

    def _append_to_the_next(self, rows: bytes) -> None:
        fd = open_shared(self._path, os.O_CREAT | os.O_APPEND)
        try:
            os.write(fd, rows)
        finally:
            close_quietly(fd)

    def poll(self) -> Deletions | None:
        """Returns some of the deletions since the last call; [] at the end; None if the headers must be read again.

        Raises OSError. A file that was replaced is read to its end, then its successor from the beginning.
        """
        if self._fd < 0:
            try:
                self._open()
            except OSError as error:
                if is_gone(error) or error.errno == errno.EROFS:  # no process has deleted anything yet
                    return []
                raise
        try:
            found = os.fstat(self._fd)
        except OSError as error:
            if not is_gone(error):
                raise
            self._open()  # rows at the end of the lost file are lost
            return None
        if found.st_size < self._read:
            self._open()
            return None
        old = self._rows(found.st_size)
        if found.st_nlink or old is None or old:
            return old
        try:
            self._open()
        except OSError as error:
            if is_gone(error):  # a directory that is gone has no news, nor headers
                return old
            raise
        return self._rows(os.fstat(self._fd).st_size)

    def shorten(self) -> None:
        """Start a new file if the log is long. Every process reads the old one to its end first."""
        with suppress(OSError):
            if self._fd >= 0 and os.fstat(self._fd).st_size > _LONG_BYTES:
                fresh = self._path.with_name(f"{uuid.uuid4().hex}.tmp")
                fresh.touch()
                fresh.replace(self._path)

    def close(self) -> None:
        """Close the file, which stays on disk. Safe to call twice."""
        fd, self._fd = self._fd, -1
        close_quietly(fd)

    def _open(self) -> None:
        """Open the file that has the name now, at its beginning."""
        fresh = open_shared(self._path, os.O_CREAT | os.O_APPEND)
        self.close()
        self._fd, self._read = fresh, 0

    def _whole_bytes(self) -> int:
        size = os.fstat(self._fd).st_size
        return size - size % _ROW_BYTES

    def _rows(self, size: int) -> Deletions | None:
        if size - self._read < _ROW_BYTES:
            return []
        data = os.pread(self._fd, min(size - self._read, _SOME_BYTES), self._read)
        rows = np.frombuffer(data, _ROW, len(data) // _ROW_BYTES)
        self._read += len(rows) * _ROW_BYTES
        if (rows["check"] != _checks(rows)).any():
            return None
        names, which = np.unique(rows["segment"], return_inverse=True)
        return [
            (name.decode("ascii", "replace"), np.unique(rows["record"][which.reshape(-1) == number]).astype(np.int64))
            for number, name in enumerate(names.tolist())
        ]


def _checks(rows: npt.NDArray[np.void]) -> npt.NDArray[np.uint64]:
    data = memoryview(rows.tobytes())
    starts = range(0, len(data), _ROW_BYTES)
    return np.array([xxh3_64_intdigest(data[at : at + _CHECKED_BYTES]) for at in starts], np.uint64)


class FileSizes:
    """The sizes of files by name, in bytes, and their sum. A caller that misses a size asks the system and notes it
    here.

    >>> sizes = FileSizes()
    >>> sizes.note("a", 5), sizes.note("b", 7), sizes.note("a", 6)
    (5, 7, 6)
    >>> sizes.drop("b")
    >>> sizes.total, len(sizes), sizes.get("b")
    (6, 1, None)
    """

    __slots__ = ("_of", "total")

    def __init__(self) -> None:
        self._of: dict[str, int] = {}
        #: The sum of all known sizes.
        self.total = 0

    def __len__(self) -> int:
        return len(self._of)

    def get(self, name: str) -> int | None:
        """Returns the size noted last, or None."""
        return self._of.get(name)

    def note(self, name: str, nbytes: int) -> int:
        """Note a file's size. Returns it."""
        self.total += nbytes - self._of.get(name, 0)
        self._of[name] = nbytes
        return nbytes

    def drop(self, name: str) -> None:
        """Forget the size of a file that is gone or has changed."""
        self.total -= self._of.pop(name, 0)


#: A segment, and the offset and bytes of blocks in its data file.
BlockRange = tuple[str, int, int]


class Garbage:
    """Dead blocks to free, and segments that may be empty. `leaving` has the segments that are being removed."""

    def __init__(self) -> None:
        self._ranges: list[BlockRange] = []
        self._names: dict[str, None] = {}
        self.leaving: set[str] = set()

    def add(self, ranges: Sequence[BlockRange], names: Sequence[str]) -> None:
        """Add blocks to free, and segments that may be empty now."""
        self._ranges += ranges
        self._names.update(dict.fromkeys(names))

    def take(self) -> tuple[list[BlockRange], list[str]]:
        """Remove and return all blocks, neighbours joined, and all segments."""
        ranges, names = joined(self._ranges), list(self._names)
        self._ranges, self._names = [], {}
        return ranges, names


def joined(ranges: Sequence[BlockRange]) -> list[BlockRange]:
    """Returns ranges in order, neighbours joined.

    >>> joined([("a", 8, 4), ("a", 0, 8), ("b", 12, 4)])
    [('a', 0, 12), ('b', 12, 4)]
    """
    found: list[BlockRange] = []
    for name, offset, nbytes in sorted(ranges):
        last, start, size = found[-1] if found else ("", 0, 0)
        if last == name and start + size == offset:
            found[-1] = name, start, size + nbytes
        else:
            found.append((name, offset, nbytes))
    return found


#: Two changes of a directory within one tick of the file system's clock have one time: a scan this soon after the last
#: change is repeated. ext4 ticks every 4 ms.
_TICK_NS = 20_000_000

#: The most by which clocks of machines may differ. A stamp beyond it comes from a wrong clock and is ignored.
_SKEW_S = 300

#: Objects that are deleted under one hold of the lock: a few milliseconds.
SLICE = 512

#: Objects of a removed segment that are forgotten under one hold of the lock.
_FORGOTTEN = 2048

#: Headers that are compared under one hold of the lock after deletions were missed.
_REREAD = 2048


class Catalog:
    """The segments of a namespace, their index, and the deletion of objects. `lock` is held for milliseconds at most.

    A method marked `under_lock` needs the lock held, one marked `off_lock` needs it free.
    """

    def __init__(
        self, folder: Path, namespace: bytes, files: Files, machine: HostBoot, order: PageOrder | None = None
    ) -> None:
        """`order`: see Index."""
        self.folder, self.namespace, self.files, self.machine = folder, namespace, files, machine
        self.lock = GuardLock()
        self.index = Index(order)
        #: Every deletion that other processes see passes here.
        self.door = DeletionDoor(machine.now())
        self.segments: dict[str, Segment] = {}
        #: Objects and segments that were refused at takeover, by reason.
        self.dropped: Counter[str] = Counter()
        #: Times that the index stayed as it was, by the system's error.
        self.lagged: Counter[str] = Counter()
        #: False once the file system has refused to free a part of a file.
        self.punches = True
        #: False for a snapshot or a read-only export, which is never tidied.
        self.writable = os.access(folder, os.W_OK)
        self._deletions = DeletionLog(folder / "deleted.news")
        self._garbage = Garbage()
        self._folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._scanned_ns = -1
        #: Names of segments of other namespaces and formats.
        self.refused: set[str] = set()
        self._followed: list[Segment] = []
        #: Segments whose headers must be read again, since their deletions were missed.
        self._doubted: list[tuple[str, int]] = []
        self.sizes = FileSizes()
        self._data_files = LentFiles(folder, files, self.lock)

    @property
    def held_bytes(self) -> int:
        """Returns the disk space that the namespace's payloads take, in bytes."""
        if self.punches:
            return self.index.held_bytes
        if len(self.sizes) < len(self.segments):
            for segment in self.segments.values():
                self.data_bytes(segment)
        return self.sizes.total

    def data_bytes(self, segment: Segment) -> int:
        """Returns the last known size of a segment's data file, or 0 if the system fails to answer."""
        known = self.sizes.get(segment.name)
        if known is not None:
            return known
        try:
            return self.sizes.note(segment.name, segment.data_bytes())
        except OSError as error:
            self.lag(error)
            return 0

    def lag(self, error: OSError) -> None:
        """Count an error of the system. The question is asked again later."""
        self.lagged[reason_of(error)] += 1

    @off_lock
    def refresh(self) -> None:
        """Learn of other processes' changes: some new records of each head still written, and all deletions.

        Never raises; a change that cannot be read now is read later. The lock is released between parts.
        """
        self._look_at_folder()
        for segment in self._followed:
            with self.lock:
                self._try_tail(segment)
        while self._hear_some():
            pass
        with self.lock:
            self._followed = [each for each in self._followed if not each.is_sealed]
            self._reread_some()

    def _look_at_folder(self) -> None:
        try:
            with self.lock:
                changed_ns = os.fstat(self._folder_fd).st_mtime_ns
            if changed_ns != self._scanned_ns:
                settled = time.time_ns() - changed_ns > _TICK_NS
                complete = self._scan()
                self._scanned_ns = changed_ns if settled and complete else -1
        except OSError as error:
            self.lag(error)
            self._scanned_ns = -1
            with self.lock:
                self._reopen_folder(error)

    def _hear_some(self) -> bool:
        """Remove some objects that other processes deleted. Returns True if there may be more."""
        with self.lock:
            try:
                gone = self._deletions.poll()
            except OSError as error:
                self.lag(error)
                return False
            if gone is None:
                self._doubted = [(name, 0) for name in self.segments]
            for name, records in gone or ():
                self.index.remove_at(name, records)
            return bool(gone)

    def _reopen_folder(self, error: OSError) -> None:
        """Open a directory that was removed and made anew."""
        if not is_gone(error):
            return
        with suppress(OSError):
            fresh = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            close_quietly(self._folder_fd)
            self._folder_fd = fresh

    @off_lock
    def _scan(self) -> bool:
        """Find segments that came or went. Returns True if all of them could be looked at."""
        with self.lock:
            before = set(self.segments)
            known = before | self.refused | self._garbage.leaving
        names = segments_in(self.folder)
        for name in before - names:
            self.forget(name)
        complete = True
        for name in sorted(names - known):
            try:
                found = Segment.find(self.folder, name, self.namespace)
            except OSError as error:
                self.lag(error)
                found = None
            with self.lock:
                if isinstance(found, Segment):
                    self._met(found)
                elif found:
                    self.refused.add(name)
                    self.dropped[found] += 1
                else:
                    complete = False
        with self.lock:
            self._followed = [each for each in self.segments.values() if each.life is Life.FOLLOWED]
        return complete

    def _met(self, found: Segment) -> None:
        """Add a segment found in the directory, unless this process has added it meanwhile."""
        if found.name in self.segments:
            found.close()
        else:
            self.segments[found.name] = found

    @under_lock
    def _try_tail(self, segment: Segment) -> bool:
        """Run `_tail`; after an OSError the segment stays as it was."""
        try:
            return self._tail(segment)
        except OSError as error:
            self.lag(error)
            return False

    @under_lock
    def _tail(self, segment: Segment) -> bool:
        """Learn some new records of a segment. Returns True if there may be more. Raises OSError and then has learnt
        none.

        A record is believed once its payload lies within the data file's size (or, after a crash of its host, within
        the synced part). Until then it waits.
        """
        table = segment.tail() if self.segments.get(segment.name) is segment else None
        if table is None:
            return False
        size = segment.data_bytes()
        segment.take(table)
        self.sizes.note(segment.name, size)
        table = table.where(table.state == LIVE)
        safe = size if segment.boot == self.machine.boot else min(size, segment.synced)
        believed = table.offset + table.nbytes <= safe
        self.index.add_table(segment.name, table.where(believed), self.machine.now())
        if segment.waiting:
            self.index.add(each for each in segment.waiting if each.offset + each.nbytes <= safe)
            segment.waiting = [each for each in segment.waiting if each.offset + each.nbytes > safe]
        segment.waiting += self._objects_of(segment, table.where(~believed))
        return True

    def _objects_of(self, segment: Segment, table: RecordTable) -> list[StoredObject]:
        now = self.machine.now()
        columns = (table.at, table.offset, table.nbytes, table.part, table.stamp)
        rows: list[list[int]] = np.stack(columns).T.tolist()
        return [
            StoredObject(segment.name, at, offset, nbytes, page.tobytes(), table.parts[part], min(stamp, now))
            for (at, offset, nbytes, part, stamp), page in zip(rows, table.page, strict=True)
        ]

    @under_lock
    def _reread_some(self) -> bool:
        """Compare some objects with the state in their headers. Returns True if more can be compared now."""
        if not self._doubted:
            return False
        name, start = self._doubted.pop()
        segment = self.segments.get(name)
        records, following = self.index.next_records(name, start, _REREAD)
        if segment is None:
            return True
        try:
            alive, _ = segment.states(records)
        except OSError as error:
            self.lag(error)
            self._doubted.insert(0, (name, start))
            return False
        if following is not None:
            self._doubted.append((name, following))
        if not alive.all():
            self.index.remove_at(name, records[~alive])
        return True

    @under_lock
    def resume(self, index: Index, segments: Iterable[Segment]) -> None:
        """Begin with the index and segments of another process, before anything is read.

        `read_heads` then reads on, and compares every object with the state in its header.
        """
        self.index, self.segments = index, {each.name: each for each in segments}
        self._doubted = [(name, 0) for name in self.segments]

    @off_lock
    def read_heads(self) -> None:
        """Learn all records of all heads, where `refresh` learns some. Called after opening."""
        self.refresh()
        for segment in list(self.segments.values()):
            try:
                self.drain(segment)
            except OSError as error:
                self.lag(error)
        more = True
        while more:
            with self.lock:
                more = self._reread_some()

    @off_lock
    def drain(self, segment: Segment) -> None:
        """Learn all records of a head. Raises OSError; the rest is learnt later."""
        more = True
        while more:
            with self.lock:
                more = self._tail(segment)

    def digests(self, objects: Sequence[StoredObject]) -> list[bytes]:
        """Returns the digests in the headers of objects, b"" for a missing one. Raises OSError.

        The caller compares them with the bytes it read.
        """
        found = [b""] * len(objects)
        by_segment: dict[str, list[int]] = {}
        for number, each in enumerate(objects):
            by_segment.setdefault(each.segment, []).append(number)
        for name, numbers in by_segment.items():
            segment = Segment(self.folder, name, NO_BOOT, Life.SEALED)
            try:
                tables = segment.digests([(objects[number].record, objects[number].cells) for number in numbers])
            except OSError as error:
                if is_gone(error):
                    continue
                raise
            for number, table in zip(numbers, tables, strict=True):
                found[number] = table
        return found

    def lend(self, names: Iterable[str]) -> AbstractContextManager[dict[str, OpenFile]]:
        """Returns a context with the open data files of segments; removed segments are left out. Raises OSError."""
        return self._data_files.lend(name for name in names if name in self.segments)

    @off_lock
    def forget(self, name: str) -> None:
        """Forget a segment that has left the directory, a few objects under each hold of the lock.

        Reads under way in it still succeed: the file stays open until they end.
        """
        more, segment = True, None
        while more:
            with self.lock:
                more = self.index.drop_some(name, _FORGOTTEN)
                if not more:
                    segment = self._forget_empty(name)
        if segment:
            segment.close()
        self._data_files.close_ended()

    def _forget_empty(self, name: str) -> Segment | None:
        """Drop a segment without objects in the index. Returns it; the caller closes it off the lock."""
        self.sizes.drop(name)
        segment = self.segments.pop(name, None)
        if segment:
            self._followed = [each for each in self._followed if each is not segment]
        self._data_files.end(name)
        return segment

    @off_lock
    def delete(self, objects: Iterable[StoredObject], grounds: Grounds) -> int:
        """Delete objects for every process, a few under each hold of the lock. Returns the bytes freed.

        No object is deleted if the door refuses.
        """
        by_segment: dict[str, list[int]] = {}
        for each in objects:
            by_segment.setdefault(each.segment, []).append(each.record)
        found = by_segment.items()
        return sum(self.delete_at(name, np.array(records, np.int64), grounds) for name, records in found)

    @off_lock
    def delete_at(self, name: str, records: Places, grounds: Grounds) -> int:
        """Delete objects by segment and place of their headers, like `delete`."""
        freed, records = 0, np.unique(records)
        for first in range(0, len(records), SLICE):
            with self.lock:
                freed += self.kill(self.index.placed_in(name, records[first : first + SLICE]), grounds)
            self.sweep()
        return freed

    @under_lock
    def kill(self, placed: Placed, grounds: Grounds) -> int:
        """Delete a few objects for every process. Returns the bytes that the next `sweep` frees. No object is deleted
        if the door refuses.
        """
        permit = self.door.ask(grounds, len(placed), self.machine.now())
        return self._kill(placed, permit) if permit else 0

    @under_lock
    def _kill(self, placed: Placed, permit: Permit) -> int:
        """Delete objects in their headers, then in the log.

        An object whose header cannot be written is left to the next cleaner: this process forgets it, and its blocks
        stay.
        """
        killed = np.zeros(len(placed), np.bool_)
        for name, some in placed.by_segment():
            with suppress(OSError):
                if segment := self.segments.get(name):
                    segment.kill(placed.records[some].tolist(), permit)
                    killed[some] = True
        gone = placed.where(killed)
        self._deletions.append(gone)
        self._garbage.add(gone.ranges(), [name for name, _ in placed.by_segment()])
        return self.index.remove_placed(placed)

    @under_lock
    def delete_one(self, each: StoredObject, permit: Permit) -> None:
        """Delete an object for every process."""
        self._kill(self.index.placed_in(each.segment, np.array([each.record], np.int64)), permit)

    @under_lock
    def forget_unsynced(self, name: str) -> None:
        """Forget the objects of a segment that are not marked as synced, for this process alone."""
        if segment := self.segments.get(name):
            placed = self.index.placed_in(name)
            self.index.remove_at(name, placed.records[placed.offsets + placed.held > segment.synced])

    @under_lock
    def free(self, name: str, ranges: Iterable[ByteRange], permit: Permit) -> None:
        """Mark dead ranges of a segment, which the next `sweep` frees in whole blocks."""
        self._garbage.add([(name, offset, nbytes) for offset, nbytes in ranges], [])

    @under_lock
    def discard(self, name: str) -> None:
        """Mark a segment, which the next `sweep` removes if it is finished and empty."""
        self._garbage.add([], [name])

    @off_lock
    def sweep(self) -> None:
        """Free dead blocks, then remove empty segments. Never raises.

        It runs off the lock: dead blocks are unreachable already, so no request waits for them.
        """
        with self.lock:
            ranges, names = self._garbage.take()
        if not names and not ranges:
            return
        for name, some in groupby(ranges, itemgetter(0)):
            with suppress(OSError), self.lend([name]) as files:
                for _, offset, nbytes in some if name in files else ():
                    self.punches = punch(files[name].fd, offset, nbytes) and self.punches
        with self.lock:
            over = [each for name in names if (each := self.segments.get(name)) and self._is_over(each)]
        for each in over:
            try:
                self._remove_empty(each)
            except OSError as error:
                self.lag(error)
                self._scanned_ns = -1  # it is found again, and removed another time
        self._data_files.close_ended()

    @off_lock
    def _remove_empty(self, segment: Segment) -> None:
        """Remove a segment that is empty in the index, which may lag, if its files confirm it. Raises OSError."""
        grounds = why_empty(segment)
        permit = self.door.ask(grounds, 1, self.machine.now()) if grounds else None
        if permit is None:
            return
        with self.lock:
            if self.segments.get(segment.name) is not segment or not self._is_over(segment):
                return
            self._garbage.leaving.add(segment.name)
            self.index.drop(segment.name)
            self._forget_empty(segment.name)
        segment.close()
        try:
            segment.unlink(permit)
        finally:
            with self.lock:
                self._garbage.leaving.discard(segment.name)

    def _is_over(self, segment: Segment) -> bool:
        """Returns True if a segment is finished, empty and not being read."""
        return segment.is_done and self.index.empty(segment.name) and not self._data_files.busy(segment.name)

    @under_lock
    def last_uses(self, placed: Placed) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_], Places]:
        """Returns three arrays over objects: True if its header could be read, True if it lives, and the second of its
        last use by any process (by this process, if its header could not be read).
        """
        told, alive = np.ones(len(placed), np.bool_), np.ones(len(placed), np.bool_)
        stamps = placed.stamps.copy()
        latest = self.machine.now() + _SKEW_S
        for name, some in placed.by_segment():
            try:
                alive[some], written = self.segments[name].states(placed.records[some])
            except OSError as error:
                self.lag(error)
                told[some] = False
                continue
            stamps[some] = np.where(written <= latest, written, stamps[some])
        return told, alive, stamps

    @under_lock
    def shorten_deletions(self) -> None:
        """Start the deletion log anew once it is long: see `DeletionLog.shorten`."""
        self._deletions.shorten()

    @off_lock
    def close(self) -> None:
        """Remove empty segments and close every file. Safe to call twice, and never raises."""
        self.sweep()
        for name in list(self.segments):
            self.forget(name)
        with self.lock:
            self._deletions.close()
            fd, self._folder_fd = self._folder_fd, -1
            close_quietly(fd)
