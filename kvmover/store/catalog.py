"""A Catalog is a namespace's directory as this process sees it, brought up to date before every question.

One `stat` of the directory finds new and removed segments, one of each head file that is still written its new objects,
one of the deletion log what others deleted: 128 lookups then cost no system call each.
"""

from __future__ import annotations

import os
import struct
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import RLock

from xxhash import xxh3_64_intdigest

from kvmover.store.files import Files, OpenFile, reason_of
from kvmover.store.index import Index, Page, StoredObject
from kvmover.store.record import LIVE, Kind, Record, holds
from kvmover.store.segment import DATA, Machine, Segment, punch, segments_in

#: Two changes of a directory within one tick of the file system's clock have one time: a scan this soon after the last
#: change is repeated. ext4 ticks every 4 ms.
_TICK_NS = 20_000_000

#: Files kept open for the next read; more are open while more are in use.
_OPEN_FILES = 128

#: A row of the deletion log: a segment, the place of a record in its head, and a check.
_DELETED = struct.Struct("<25s7xQ")
_DELETED_BYTES = _DELETED.size + 8

#: Beyond this many bytes a cleaner starts the file anew.
_LONG_BYTES = 4 << 20


class Catalog:
    """Segments, their index, and the deletion of objects. The caller holds `lock` around every call but `lend`."""

    def __init__(self, folder: Path, namespace: bytes, files: Files, machine: Machine) -> None:
        self.folder, self.namespace, self.files, self.machine = folder, namespace, files, machine
        self.lock = RLock()
        self.index = Index()
        self.segments: dict[str, Segment] = {}
        #: Segments that this process appends to: it knows what is in them.
        self.own: set[str] = set()
        #: Objects and segments that were not taken over, by reason.
        self.dropped: Counter[str] = Counter()
        #: False once the file system has refused to free a part of a file.
        self.punches = True
        self._deletions = DeletionLog(folder / "deleted.news")
        self._folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._scanned_ns = -1
        self._refused: set[str] = set()
        #: Segments that others still write.
        self._growing: list[Segment] = []
        self._data_files = FdCache(folder, files, self.lock)

    @property
    def held_bytes(self) -> int:
        """What the namespace's payloads take of the disk."""
        if self.punches:
            return self.index.held_bytes
        return sum(segment.data_bytes() for segment in self.segments.values())

    def refresh(self) -> None:
        """Learn what other processes did."""
        changed_ns = os.fstat(self._folder_fd).st_mtime_ns
        if changed_ns != self._scanned_ns:
            settled = time.time_ns() - changed_ns > _TICK_NS
            complete = self._scan()
            self._scanned_ns = changed_ns if settled and complete else -1
        for segment in self._growing:
            self._tail(segment)
            if segment.sealed:
                self._growing = [each for each in self._growing if not each.sealed]
        gone = self._deletions.poll()
        if gone is None:
            self._reread()
            return
        for name, record in gone:
            if each := self.index.at(name, record):
                self.index.remove(each)

    def _scan(self) -> bool:
        """Look for segments that came or went; whether all could be looked at."""
        names = segments_in(self.folder)
        for name in self.segments.keys() - names:
            self.forget(name)
        complete = True
        for name in sorted(names - self.segments.keys() - self._refused):
            found = Segment.find(self.folder, name, self.namespace)
            if isinstance(found, Segment):
                self.segments[name] = found
                self._tail(found)
            elif found:
                self._refused.add(name)
                self.dropped[found] += 1
            else:
                complete = False
        self._growing = [each for name, each in self.segments.items() if not each.sealed and name not in self.own]
        return complete

    def _tail(self, segment: Segment) -> None:
        fresh = segment.tail()
        if not fresh:
            return
        segment.waiting += [record for record in fresh if record.kind is Kind.OBJECT and record.state == LIVE]
        size = segment.data_bytes()
        safe = size if segment.boot == self.machine.boot else min(size, segment.synced)
        waiting, segment.waiting = segment.waiting, []
        for record in waiting:
            if record.offset + record.nbytes <= safe:
                self.index.add(_stored(segment, record))
            else:
                segment.waiting.append(record)

    def _reread(self) -> None:
        """Compare every object with the state in its header."""
        for segment in self.segments.values():
            mine = self.index.objects(segment.name)
            states = segment.states() if mine else {}
            for each in mine:
                if states.get(each.record, (0, 0))[0] != LIVE:
                    self.index.remove(each)

    def recover(self) -> int:
        """Take over the segments of writers that are no more: keep what is whole, drop the rest with its reason.

        How many there were. Raises OSError.
        """
        self.refresh()
        adopted = 0
        for segment in list(self.segments.values()):
            if segment.name in self.own or (segment.sealed and not segment.waiting) or not segment.adopt():
                continue
            try:
                self._take_over(segment)
            finally:
                segment.release()
            adopted += 1
        self._remove_left_overs()
        if adopted:
            self.index.sort()
        return adopted

    def _remove_left_overs(self) -> None:
        """Heads whose writer died before their first line, and data whose head is gone.

        Data is listed first, since a head is made before its data: what is made meanwhile is no left-over.
        """
        data = list(self.folder.glob(f"*{DATA}"))
        heads = segments_in(self.folder)
        for name in heads - self.segments.keys() - self._refused:
            Segment.remove_stillborn(self.folder, name)
        for path in data:
            if path.stem not in heads:
                path.unlink(missing_ok=True)

    def _take_over(self, segment: Segment) -> None:
        self._tail(segment)
        while not segment.sealed and segment.skip_damage():
            self.dropped["damaged header"] += 1
            self._tail(segment)
        if segment.head.exists() and segment.head.stat().st_size > segment.parsed:
            self.dropped["torn header"] += 1
        waiting, segment.waiting = segment.waiting, []
        size = segment.data_bytes()
        for record in waiting:
            each = _stored(segment, record)
            reason = "truncated" if record.offset + record.nbytes > size else self.check(each)
            if reason:
                self.dropped[reason] += 1
                segment.kill(record.at)
            else:
                self.index.add(each)
        if not segment.sealed:
            os.ftruncate(segment.head_fd, segment.parsed)
            with suppress(OSError):  # what is not synced is checked again after the next crash
                segment.sync(size)
            with suppress(OSError):
                segment.seal()
        self.reclaim(segment)

    def check(self, each: StoredObject) -> str:
        """Read an object whole; the reason why it is bad, or "". Raises OSError as `lend` does."""
        payload = bytearray(each.nbytes)
        with self.lend([each.segment]) as files:
            if each.segment not in files:
                return "data file is missing"
            try:
                got = os.preadv(files[each.segment].fd, [payload], each.offset)
            except OSError as error:
                return reason_of(error)
        if got < each.nbytes:
            return "truncated"
        return "" if holds(memoryview(payload), each.cells, each.digests, 0) else "digest"

    def lend(self, names: Iterable[str]) -> AbstractContextManager[dict[str, OpenFile]]:
        """Open data files of segments, for the length of a block; removed ones are left out. Raises OSError."""
        return self._data_files.lend(name for name in names if name in self.segments)

    def forget(self, name: str) -> None:
        """A segment that is gone from the directory. Reads that go on in it end well: its blocks stay until they do."""
        self.index.drop(name)
        self.own.discard(name)
        segment = self.segments.pop(name, None)
        if segment:
            self._growing = [each for each in self._growing if each is not segment]
            segment.close()
        self._data_files.end(name)

    def delete(self, objects: Sequence[StoredObject]) -> int:
        """Delete objects for every process; the bytes freed. In this order: headers, log, blocks.

        An object whose header cannot be changed is deleted by the next cleaner; here it is forgotten.
        """
        for each in objects:
            with suppress(OSError):
                self.segments[each.segment].kill(each.record)
        self._deletions.append((each.segment, each.record) for each in objects)
        freed = 0
        for each in objects:
            freed += each.held_bytes if self.index.remove(each) else 0
            self.free(each.segment, each.offset, each.held_bytes)
        for name in {each.segment for each in objects}:
            self.reclaim(self.segments[name])
        return freed

    def free(self, name: str, offset: int, nbytes: int) -> None:
        """Give blocks back that nothing lives in: whole ones."""
        with suppress(OSError), self.lend([name]) as files:
            if name in files:
                self.punches = punch(files[name].fd, offset, nbytes) and self.punches

    def reclaim(self, segment: Segment) -> None:
        """Remove a finished segment in which nothing lives and nobody is at work."""
        done = (segment.sealed or segment.full) and not segment.waiting and not self._data_files.busy(segment.name)
        if done and not self.index.objects(segment.name):
            segment.unlink()
            self.forget(segment.name)

    def alive(self, each: StoredObject) -> bool:
        """What the header says now."""
        segment = self.segments.get(each.segment)
        return segment is not None and segment.state(each.record)[0]

    def last_use(self, page: Page) -> int:
        """Second of the last use that any process has written down; objects that died meanwhile are forgotten."""
        stamp = 0
        for each in list(page.objects):
            alive, written = self.segments[each.segment].state(each.record)
            if alive:
                stamp = max(stamp, written)
            else:
                self.index.remove(each)
        return stamp

    def shorten_deletions(self) -> None:
        """Start the deletion log anew once it is long: see `DeletionLog.shorten`."""
        self._deletions.shorten()

    def close(self) -> None:
        """Close every file, remove none. Safe to call twice."""
        for name in list(self.segments):
            self.forget(name)
        self._deletions.close()
        if self._folder_fd >= 0:
            os.close(self._folder_fd)
        self._folder_fd = -1


def _stored(segment: Segment, record: Record) -> StoredObject:
    assert record.part is not None
    return StoredObject(
        segment.name, record.at, record.offset, record.nbytes, record.page, record.part, record.digests, record.stamp
    )


@dataclass(slots=True, eq=False)
class _Lent:
    """`doomed`: to be closed when the last user is done."""

    file: OpenFile
    users: int = 0
    doomed: bool = False


class FdCache:
    """Open data files of a folder by the name of their segment, the least recently used closed first.

    They are lent to reads and writes: a descriptor is never closed under one of them, since its number is soon that of
    another file, which the read would then go on in.
    """

    def __init__(self, folder: Path, files: Files, lock: RLock) -> None:
        self._folder, self._files, self._lock = folder, files, lock
        self._open: OrderedDict[str, _Lent] = OrderedDict()

    @contextmanager
    def lend(self, names: Iterable[str]) -> Generator[dict[str, OpenFile]]:
        """Files that stay open until the end of the block; those that are not there are left out.

        The lock is held only to open and to close: reads go on without it. Raises OSError where this process cannot
        open a file that is there, which says nothing about its objects.
        """
        lent: dict[str, OpenFile] = {}
        try:
            with self._lock:
                for name in names:
                    if file := self._borrow(name):
                        lent[name] = file
            yield lent
        finally:
            with self._lock:
                for name in lent:
                    self._give_back(name)

    def busy(self, name: str) -> bool:
        """Whether somebody is at work in the file. Under the lock."""
        return name in self._open and self._open[name].users > 0

    def end(self, name: str) -> None:
        """The file is gone from its folder: close it as soon as nobody uses it. Under the lock."""
        if name in self._open:
            self._open[name].doomed = True
            if not self._open[name].users:
                self._close(name)

    def _borrow(self, name: str) -> OpenFile | None:
        one = self._open.get(name)
        if one is None:
            try:
                one = self._open[name] = _Lent(self._files.open(self._folder / (name + DATA)))
            except FileNotFoundError:
                return None
        one.users += 1
        self._open.move_to_end(name)
        for other in list(self._open)[: max(0, len(self._open) - _OPEN_FILES)]:
            if not self._open[other].users:
                self._close(other)
        return one.file

    def _give_back(self, name: str) -> None:
        one = self._open[name]
        one.users -= 1
        if one.doomed and not one.users:
            self._close(name)

    def _close(self, name: str) -> None:
        self._files.close_file(self._open.pop(name).file)


class DeletionLog:
    """Which objects were deleted, between processes: one small file of a namespace, that all append to.

    It only saves time. The truth is the state in each header, so lost, torn or repeated rows do no harm: whatever looks
    odd sends the reader back to the headers. The file is kept open: one `fstat` says that there is nothing new.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._path = path
        self._fd, self._read = -1, 0
        self._open()

    def _open(self) -> None:
        """The file that has the name now, from its end on: what it says so far is in the headers."""
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        fresh = os.open(self._path, flags, 0o666)
        self.close()
        self._fd = fresh
        size = os.fstat(self._fd).st_size
        self._read = size - size % _DELETED_BYTES

    def append(self, gone: Iterable[tuple[str, int]]) -> None:
        """Objects, by segment and record, that were deleted. Failure to tell is no failure to delete."""
        rows = [_DELETED.pack(segment.encode(), record) for segment, record in gone]
        with suppress(OSError):
            if not os.fstat(self._fd).st_nlink:
                self._open()
            os.write(self._fd, b"".join(row + _check_of(row) for row in rows))

    def poll(self) -> list[tuple[str, int]] | None:
        """What was deleted since the last call. None where only the headers can say: a new file, or a damaged one."""
        found = os.fstat(self._fd)
        if not found.st_nlink or found.st_size < self._read:
            with suppress(OSError):  # a directory that is gone has no news, nor headers
                self._open()
            return None
        if found.st_size - self._read < _DELETED_BYTES:
            return []
        data = os.pread(self._fd, found.st_size - self._read, self._read)
        rows = [data[at : at + _DELETED_BYTES] for at in range(0, len(data) - _DELETED_BYTES + 1, _DELETED_BYTES)]
        self._read += len(rows) * _DELETED_BYTES
        if any(_check_of(row[: _DELETED.size]) != row[_DELETED.size :] for row in rows):
            return None
        return [
            (name.rstrip(b"\0").decode("ascii", "replace"), at) for name, at in (_DELETED.unpack_from(r) for r in rows)
        ]

    def shorten(self) -> None:
        """Start the file anew once it is long: every process then looks at the headers, once."""
        with suppress(OSError):
            if os.fstat(self._fd).st_size > _LONG_BYTES:
                fresh = self._path.with_name(f"{uuid.uuid4().hex}.tmp")
                fresh.touch()
                fresh.replace(self._path)

    def close(self) -> None:
        """Close the file, which stays. Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def _check_of(row: bytes) -> bytes:
    return xxh3_64_intdigest(row).to_bytes(8, "little")
