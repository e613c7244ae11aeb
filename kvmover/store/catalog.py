"""A Catalog is a namespace's directory as this process sees it, brought up to date before every question.

One `stat` of the directory finds new and removed segments, one of each head file that is still written its new objects,
one of the deletion log what others deleted: 128 lookups then cost no system call each. What the system does not say is
as it was, and is counted: an index that lags costs a miss, never bytes.
"""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from threading import RLock

import numpy as np

from kvmover.store.deletion_log import DeletionLog
from kvmover.store.files import Files, OpenFile, close_quietly, is_gone, is_shared, open_shared, reason_of
from kvmover.store.index import BLOCK_BYTES, Index, Page, StoredObject
from kvmover.store.lent_files import LentFiles
from kvmover.store.machine import NO_BOOT, Machine
from kvmover.store.objects import Verdict
from kvmover.store.record import DIGEST_BYTES, FIXED_BYTES, LIVE, RecordTable, decode, holds
from kvmover.store.segment import DATA, HEAD, Life, Segment, punch, segments_in

#: Two changes of a directory within one tick of the file system's clock have one time: a scan this soon after the last
#: change is repeated. ext4 ticks every 4 ms.
_TICK_NS = 20_000_000


#: Reasons against an object without a file, or with a hole in it: its blocks were given back by whom this process has
#: not heard, or never came to the disk before a power cut. Nothing says that the disk is bad.
MISSING, BLANK = "data file is missing", "blank"
GIVEN_BACK = (MISSING, BLANK)


#: How far the clocks of machines may differ. A stamp beyond it was written by a clock that was wrong, and says nothing.
_SKEW_S = 300


#: A head that another machine wrote is taken over once it has been silent for so long, on a network file system: its
#: end may not be seen here before, and would be cut off.
_SILENCE_S = 10


class Catalog:
    """Segments, their index, and the deletion of objects. Callers hold `lock`, but around `lend` and `look_again`."""

    def __init__(self, folder: Path, namespace: bytes, files: Files, machine: Machine) -> None:
        self.folder, self.namespace, self.files, self.machine = folder, namespace, files, machine
        self.lock = RLock()
        self.index = Index()
        self.segments: dict[str, Segment] = {}
        #: Objects and segments that were not taken over, by reason.
        self.dropped: Counter[str] = Counter()
        #: Times that the index stayed as it was, by what the system said.
        self.lagged: Counter[str] = Counter()
        #: False once the file system has refused to free a part of a file.
        self.punches = True
        #: Whether anything may be changed here; a snapshot, or an export to read, is not tidied up.
        self.writable = os.access(folder, os.W_OK)
        self._deletions = DeletionLog(folder / "deleted.news")
        self._is_shared = is_shared(folder)
        self._folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._scanned_ns = -1
        self._refused: set[str] = set()
        self._followed: list[Segment] = []
        #: Segments whose headers are to be read again, since nobody said what was deleted in them.
        self._doubted: list[str] = []
        self._data_files = LentFiles(folder, files, self.lock)

    @property
    def held_bytes(self) -> int:
        """What the namespace's payloads take of the disk."""
        if self.punches:
            return self.index.held_bytes
        return sum(self.data_bytes(segment) for segment in self.segments.values())

    def data_bytes(self, segment: Segment) -> int:
        """Size of a segment's data file; 0 where the system does not say."""
        try:
            return segment.data_bytes()
        except OSError as error:
            self._lag(error)
            return 0

    def _lag(self, error: OSError) -> None:
        self.lagged[reason_of(error)] += 1

    def refresh(self) -> None:
        """Learn what other processes did. Raises nothing: what cannot be learnt now is learnt later."""
        try:
            changed_ns = os.fstat(self._folder_fd).st_mtime_ns
            if changed_ns != self._scanned_ns:
                settled = time.time_ns() - changed_ns > _TICK_NS
                complete = self._scan()
                self._scanned_ns = changed_ns if settled and complete else -1
        except OSError as error:
            self._lag(error)
            self._scanned_ns = -1
            self._reopen_folder(error)
        for segment in self._followed:
            self._tail(segment)
        if any(segment.is_sealed for segment in self._followed):
            self._followed = [each for each in self._followed if not each.is_sealed]
        try:
            gone = self._deletions.poll()
        except OSError as error:
            self._lag(error)
            return
        if gone is None:
            self._doubted = list(self.segments)
        for name, records in groupby(sorted(gone or ()), itemgetter(0)):
            self.index.remove_at(name, [record for _, record in records])
        self._reread_some()

    def _reopen_folder(self, error: OSError) -> None:
        """A directory that was removed and made anew is another one."""
        if not is_gone(error):
            return
        with suppress(OSError):
            fresh = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            close_quietly(self._folder_fd)
            self._folder_fd = fresh

    def _scan(self) -> bool:
        """Look for segments that came or went; whether all could be looked at."""
        names = segments_in(self.folder)
        for name in self.segments.keys() - names:
            self.forget(name)
        complete = True
        for name in sorted(names - self.segments.keys() - self._refused):
            try:
                found = Segment.find(self.folder, name, self.namespace)
            except OSError as error:
                self._lag(error)
                found = None
            if isinstance(found, Segment):
                self.segments[name] = found
            elif found:
                self._refused.add(name)
                self.dropped[found] += 1
            else:
                complete = False
        self._followed = [each for each in self.segments.values() if each.life is Life.FOLLOWED]
        return complete

    def _tail(self, segment: Segment) -> bool:
        """Learn some of what was added to a segment; whether there may be more. As it was where nobody says."""
        try:
            table = segment.tail()
            if table is None:
                return False
            size = segment.data_bytes()
        except OSError as error:
            self._lag(error)
            return False
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

    def _reread_some(self) -> None:
        """Compare objects with the state in their headers, a segment at a time."""
        if not self._doubted:
            return
        name = self._doubted.pop()
        segment, records = self.segments.get(name), self.index.records(name)
        if segment is None or not len(records):
            return
        try:
            dead = segment.dead(records)
        except OSError as error:
            self._lag(error)
            self._doubted.insert(0, name)
            return
        self.index.remove_at(name, dead.tolist())

    def recover(self) -> int:
        """Take over the segments of writers that are no more: keep what is whole, drop the rest with its reason.

        How many there were. Not under the lock, since whole segments are read. Raises nothing: what cannot be done now
        is done later.
        """
        with self.lock:
            self.refresh()
            orphans = [s for s in self.segments.values() if s.life is Life.FOLLOWED or (s.is_sealed and s.waiting)]
        if not self.writable:
            return 0
        adopted = 0
        for segment in orphans:
            try:
                adopted += self._take_over(segment)
            except OSError as error:
                self._lag(error)
        with suppress(OSError), self.lock:
            self._remove_left_overs()
            for segment in [each for each in self.segments.values() if each.is_sealed]:
                self.reclaim(segment)
        return adopted

    def _remove_left_overs(self) -> None:
        """Heads whose writer died before their first line, and data whose head is gone.

        Data is listed first, since a head is made before its data: what is made meanwhile is no left-over.
        """
        data = list(self.folder.glob(f"*{DATA}"))
        heads = segments_in(self.folder)
        for name in heads - self.segments.keys() - self._refused:
            if self._is_silent(self.folder / (name + HEAD)):
                Segment.remove_stillborn(self.folder, name)
        for path in data:
            if path.stem not in heads and self._is_silent(path):
                path.unlink(missing_ok=True)

    def _take_over(self, segment: Segment) -> bool:
        """Judge what a dead writer left, and seal it; False where the writer lives.

        What waits goes on waiting until all of it is judged: an error half way loses nothing. Raises OSError.
        """
        with self.lock:
            theirs = segment.boot != self.machine.boot
            if segment.name not in self.segments or (theirs and not self._is_silent(segment.head)):
                return False
            if not segment.adopt():
                return False
        try:
            with self.lock:
                waiting = self._all_of(segment)
                size = segment.data_bytes()
            bad = {each.record: self._flaw(each, size) for each in waiting}
            if not segment.is_sealed:
                with suppress(OSError):  # what is not synced is checked again after the next crash
                    segment.settle()
            with self.lock:
                self._judged(segment, waiting, bad, size)
                self._free_gaps(segment, size)
                self.reclaim(segment)
        finally:
            with self.lock:
                segment.release()
        return True

    def read_heads(self) -> None:
        """Learn all that is in the heads, where `refresh` learns some: for who has just opened them."""
        with self.lock:
            self.refresh()
            for segment in list(self.segments.values()):
                self._drain(segment)

    def _drain(self, segment: Segment) -> None:
        while self._tail(segment):
            pass

    def _is_silent(self, path: Path) -> bool:
        """Whether all that was written to a file is seen here: for a while nobody has, where machines share it."""
        return not self._is_shared or time.time() - path.stat().st_mtime > _SILENCE_S

    def _all_of(self, segment: Segment) -> list[StoredObject]:
        """Everything that waits in a segment without a writer, behind damaged records too."""
        self._drain(segment)
        while not segment.is_sealed and segment.skip_damage():
            self.dropped["damaged header"] += 1
            self._drain(segment)
        if not segment.is_sealed and segment.torn_bytes():
            self.dropped["torn header"] += 1
        return list(segment.waiting)

    def _flaw(self, each: StoredObject, size: int) -> str:
        """Why an object is not believed, or "". Raises OSError where the system does not say."""
        if each.offset + each.nbytes > size:
            return "truncated"
        verdict, reason = self.look_again(each)
        return "" if verdict is Verdict.WELL else reason

    def _judged(self, segment: Segment, waiting: Sequence[StoredObject], bad: dict[int, str], size: int) -> None:
        """Believe what is well, kill what is bad, and add nothing to the segment from here on. Raises OSError."""
        segment.kill(record for record, reason in bad.items() if reason)
        self.dropped.update(reason for reason in bad.values() if reason)
        self.index.add(each for each in waiting if not bad[each.record])
        segment.waiting = []
        if not segment.is_sealed:
            os.ftruncate(segment.head_fd, segment.parsed)
            with suppress(OSError):
                segment.mark_synced(size)
                segment.seal()

    def _free_gaps(self, segment: Segment, size: int) -> None:
        """Give back what lies between the objects of a dead writer: payloads whose headers it did not live to write."""
        end = 0
        for each in sorted(self.index.objects(segment.name), key=attrgetter("offset")):
            if each.offset > end:
                self.free(segment.name, end, each.offset - end)
            end = max(end, each.offset + each.held_bytes)
        if end and size > end:
            self.free(segment.name, end, size - end)

    def look_again(self, each: StoredObject) -> tuple[Verdict, str]:
        """A second opinion on an object, by files opened for it, past this process's and the backend's memory.

        Raises OSError where the system refuses for a reason that says nothing against the object: all but EIO.
        """
        segment = Segment(self.folder, each.segment, NO_BOOT, Life.SEALED)
        try:
            fd = open_shared(segment.head)
        except OSError as error:
            if is_gone(error):
                return Verdict.GONE, "evicted"
            raise
        try:
            raw = os.pread(fd, FIXED_BYTES + each.cells * DIGEST_BYTES, each.record)
        finally:
            close_quietly(fd)
        header = decode(raw, each.record, each.record)
        if not segment.state_anew(each.record)[0]:
            return Verdict.GONE, "evicted"
        if header is None or header.page != each.page:
            return Verdict.BAD, "damaged header"
        return self._look_at_payload(segment, each, header.digests)

    def _look_at_payload(self, segment: Segment, each: StoredObject, digests: bytes) -> tuple[Verdict, str]:
        payload, fd = bytearray(each.nbytes), -1
        try:
            fd = open_shared(segment.data)
            got = os.preadv(fd, [payload], each.offset)
        except OSError as error:
            if is_gone(error):
                gone = not segment.state_anew(each.record)[0]
                return (Verdict.GONE, "evicted") if gone else (Verdict.BAD, MISSING)
            if error.errno == errno.EIO:
                return Verdict.BAD, reason_of(error)
            raise
        finally:
            close_quietly(fd)
        if got < each.nbytes:
            return Verdict.BAD, "truncated"
        if holds(memoryview(payload), each.cells, digests, 0):
            return Verdict.WELL, ""
        if not segment.state_anew(each.record)[0]:
            return Verdict.GONE, "evicted"
        return Verdict.BAD, BLANK if _has_blank(payload) else "digest"

    def digests(self, objects: Sequence[StoredObject]) -> list[bytes]:
        """The digests that the headers of objects have, b"" of one that is not there. Raises OSError.

        They are compared with what was read: nobody asks here whether they are those that were written.
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
        """Open data files of segments, for the length of a block; removed ones are left out. Raises OSError."""
        return self._data_files.lend(name for name in names if name in self.segments)

    def forget(self, name: str) -> None:
        """A segment that is gone from the directory. Reads that go on in it end well: its blocks stay until they do."""
        self.index.drop(name)
        segment = self.segments.pop(name, None)
        if segment:
            self._followed = [each for each in self._followed if each is not segment]
            segment.close()
        self._data_files.end(name)

    def delete(self, objects: Sequence[StoredObject]) -> int:
        """Delete objects for every process; the bytes freed. In this order: headers, log, blocks.

        An object whose header cannot be changed is deleted by the next cleaner; here it is forgotten, and keeps its
        blocks.
        """
        by_place = sorted(objects, key=attrgetter("segment", "offset"))
        killed: list[StoredObject] = []
        for name, group in groupby(by_place, attrgetter("segment")):
            mine = list(group)
            with suppress(OSError):
                self.segments[name].kill(each.record for each in mine)
                killed += mine
        self._deletions.append((each.segment, each.record) for each in killed)
        freed = self.index.remove(objects)
        for name, offset, nbytes in _joined(killed):
            self.free(name, offset, nbytes)
        for name in {each.segment for each in objects}:
            with suppress(OSError):
                self.reclaim(self.segments[name])
        return freed

    def free(self, name: str, offset: int, nbytes: int) -> None:
        """Give blocks back that nothing lives in: whole ones."""
        with suppress(OSError), self.lend([name]) as files:
            if name in files:
                self.punches = punch(files[name].fd, offset, nbytes) and self.punches

    def reclaim(self, segment: Segment) -> None:
        """Remove a finished segment in which nothing lives and nobody is at work. Raises OSError."""
        if segment.is_done and self.index.empty(segment.name) and not self._data_files.busy(segment.name):
            segment.unlink()
            self.forget(segment.name)

    def last_uses(self, pages: Sequence[Page]) -> list[int]:
        """Of each page the second of the last use that any process has written down; objects that died are forgotten.

        Of what the system does not say, what is known here.
        """
        stamps: dict[StoredObject, int] = {}
        by_segment: dict[str, list[StoredObject]] = {}
        for each in (each for page in pages for each in page.objects):
            by_segment.setdefault(each.segment, []).append(each)
        latest = self.machine.now() + _SKEW_S
        for name, objects in by_segment.items():
            try:
                states = self.segments[name].states([each.record for each in objects])
            except OSError as error:
                self._lag(error)
                states = [(True, each.stamp) for each in objects]
            for each, (_, written) in zip(objects, states, strict=True):
                stamps[each] = written if written <= latest else each.stamp
            self.index.remove(each for each, (alive, _) in zip(objects, states, strict=True) if not alive)
        return [max((stamps[each] for each in page.objects), default=0) for page in pages]

    def shorten_deletions(self) -> None:
        """Start the deletion log anew once it is long: see `DeletionLog.shorten`."""
        self._deletions.shorten()

    def close(self) -> None:
        """Close every file, remove none. Safe to call twice, and raises nothing."""
        for name in list(self.segments):
            self.forget(name)
        self._deletions.close()
        fd, self._folder_fd = self._folder_fd, -1
        close_quietly(fd)


def _has_blank(payload: bytearray) -> bool:
    """Whether a whole block of a payload that is not what was written is zeros: it is a hole in the file."""
    blocks = range(0, len(payload), BLOCK_BYTES)
    return any(payload.count(0, at, at + BLOCK_BYTES) == len(payload[at : at + BLOCK_BYTES]) for at in blocks)


def _joined(objects: Iterable[StoredObject]) -> list[tuple[str, int, int]]:
    """Segment, offset and bytes of the blocks of objects that are sorted by place: neighbours together."""
    ranges: list[tuple[str, int, int]] = []
    for each in objects:
        name, offset, nbytes = ranges[-1] if ranges else ("", 0, 0)
        if name == each.segment and offset + nbytes == each.offset:
            ranges[-1] = name, offset, nbytes + each.held_bytes
        else:
            ranges.append((each.segment, each.offset, each.held_bytes))
    return ranges
