"""A Segment is a data file of payloads and the head file that says what is in it. One process writes both, appending.

An object exists from the moment its header is whole in the head file, which is written after the payload. Places in a
data file are never used twice: what a header once described is either still there or, if the object was evicted, zeros.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvmover.store.boot import NO_BOOT
from kvmover.store.deletion import Permit
from kvmover.store.files import close_quietly, is_absent, is_gone, open_shared
from kvmover.store.head import SOME_BYTES, next_record, some_records
from kvmover.store.record import (
    DEAD,
    DIGEST_BYTES,
    FIXED_BYTES,
    LIVE,
    PREAMBLE_BYTES,
    STAMP_AT,
    STATE_AT,
    Kind,
    Preamble,
    RecordTable,
    encode_mark,
)
from kvmover.store.stored import Places, StoredObject

HEAD, DATA = ".head", ".data"
_HEADS = re.compile(r"([0-9a-f]{16}-[0-9]{8})\.head")

#: Records with less between them are read at once.
_NEAR_BYTES = 4096

#: State and stamp of a record, which follow each other.
_STATE_BYTES = 8
_DEAD = DEAD.to_bytes(4, "little")

_PUNCH, _KEEP_SIZE = 2, 1
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class WritesLost(OSError):
    """The disk did not take what was written. Asking again says that all is well."""


def segments_in(folder: Path) -> set[str]:
    """Names of the segments that have a head in `folder`; none where somebody removed it. Raises OSError."""
    try:
        with os.scandir(folder) as entries:
            return {found[1] for entry in entries if (found := _HEADS.fullmatch(entry.name))}
    except OSError as error:
        if is_gone(error) and not folder.exists():
            return set()
        raise


class Life(Enum):
    """Where a segment is in its life, as this process sees it.

    WRITTEN: this process appends to it. FULL: it has gone on to another, and owes this one a sync and a seal.
    FOLLOWED: somebody else may append, so its head is looked at. SEALED: nothing is added for ever.
    """

    WRITTEN = "written"
    FULL = "full"
    FOLLOWED = "followed"
    SEALED = "sealed"


#: What may follow what.
_NEXT = {
    Life.WRITTEN: (Life.FULL,),
    Life.FULL: (Life.SEALED,),
    Life.FOLLOWED: (Life.SEALED,),
    Life.SEALED: (),
}


@dataclass(slots=True, eq=False)
class Segment:
    """One pair of files as this process sees it. `parsed` bytes of the head file were understood.

    `head_fd` is open until the segment is sealed, `data_fd` in the process that writes it: a descriptor that was opened
    before the writes hears of every one that failed.
    """

    folder: Path
    name: str
    boot: bytes
    life: Life
    head_fd: int = -1
    data_fd: int = -1
    parsed: int = PREAMBLE_BYTES
    synced: int = 0
    #: Places that were dealt out here and have neither a header yet nor failed.
    awaited: int = 0
    #: Objects that were announced and may not have reached the disk before a crash of their machine.
    waiting: list[StoredObject] = field(default_factory=list[StoredObject])

    @property
    def head(self) -> Path:
        """The file of headers."""
        return self.folder / (self.name + HEAD)

    @property
    def data(self) -> Path:
        """The file of payloads."""
        return self.folder / (self.name + DATA)

    @property
    def is_ours(self) -> bool:
        """Whether this process appends to it, or owes it a seal: it knows what is in it."""
        return self.life in (Life.WRITTEN, Life.FULL)

    @property
    def is_done(self) -> bool:
        """Whether this process may remove it once it is empty: nobody writes to it any more."""
        return self.life in (Life.FULL, Life.SEALED) and not self.awaited and not self.waiting

    @property
    def is_sealed(self) -> bool:
        """Whether nothing is added for ever."""
        return self.life is Life.SEALED

    def become(self, life: Life) -> None:
        """Go on to the next part of its life; a sealed segment holds no descriptor, whoever wrote it."""
        assert life in _NEXT[self.life], f"{self.name} is {self.life} and cannot be {life}"
        self.life = life
        if life is Life.SEALED:
            self.close()

    @classmethod
    def create(cls, folder: Path, name: str, preamble: Preamble) -> Segment | None:
        """A new pair of empty files, locked as long as this process lives. None where the name is taken.

        Raises OSError. The head comes first and locked: data without a head is a left-over that anybody may remove.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(folder / (name + HEAD), flags, 0o666)
        except FileExistsError:
            return None
        data_fd = -1
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            data_fd = os.open(folder / (name + DATA), flags, 0o666)
            _whole(fd, preamble.encode(), 0)
            if os.fstat(fd).st_nlink:
                return cls(folder, name, preamble.boot, Life.WRITTEN, fd, data_fd)
        except OSError as error:
            close_quietly(fd, data_fd)
            for suffix in (DATA, HEAD):
                with suppress(OSError):
                    (folder / (name + suffix)).unlink()
            if isinstance(error, BlockingIOError):  # a cleaner took the empty head for a left-over, before the lock
                return None
            raise
        close_quietly(fd, data_fd)
        return None

    @classmethod
    def find(cls, folder: Path, name: str, namespace: bytes) -> Segment | str | None:
        """A segment of some process. None while it is being made, or gone; the reason where it is none of this
        namespace. Raises OSError where the system does not say.

        One whose first line is damaged is taken for another machine's: the folder says whose objects they are, and
        every one is checked before it is believed.
        """
        fd = -1
        try:
            fd = open_shared(folder / (name + HEAD))
            start = os.pread(fd, PREAMBLE_BYTES, 0)
            found = Preamble.decode(start)
            if len(start) < PREAMBLE_BYTES:
                reason = None
            elif found is None:
                reason = "" if _was_ours(start, fd) else "another format"
            else:
                reason = "" if found.namespace == namespace else "foreign namespace"
        except OSError as error:
            close_quietly(fd)
            if is_gone(error):
                return None
            raise
        if reason == "":
            return cls(folder, name, found.boot if found else NO_BOOT, Life.FOLLOWED, fd)
        close_quietly(fd)
        return reason

    def is_removed(self, error: OSError) -> bool:
        """Returns whether the segment is gone: a file of it was not found, nor is its head by name. Raises OSError."""
        if not is_absent(error):
            return False
        try:
            os.lstat(self.head)
        except OSError as again:
            if is_absent(again):
                return True
            raise
        return False

    @contextmanager
    def opened(self) -> Generator[int]:
        """A descriptor of the head for the length of a block. Raises OSError."""
        if self.head_fd >= 0:
            yield self.head_fd
            return
        fd = open_shared(self.head)
        try:
            yield fd
        finally:
            close_quietly(fd)

    def tail(self) -> RecordTable | None:
        """Some records behind `parsed`, as far as they are whole; None without. Raises OSError.

        They come again until they are taken with `take`.
        """
        if self.is_sealed:
            return None
        return some_records(self.head_fd, self.parsed, os.fstat(self.head_fd).st_size)

    def take(self, table: RecordTable) -> None:
        """Take the rows that `tail` gave as understood: they come no more."""
        self.parsed, self.synced = table.end, max(self.synced, table.synced)
        if table.sealed:
            self.become(Life.SEALED)

    def skip_damage(self) -> bool:
        """Go on behind a damaged record; False where nothing whole follows. Only for segments without a writer.

        Raises OSError.
        """
        found = next_record(self.head_fd, self.parsed, os.fstat(self.head_fd).st_size)
        self.parsed = found or self.parsed
        return found is not None

    def torn_bytes(self) -> int:
        """Bytes at the end of the head that are no whole record. Raises OSError."""
        with self.opened() as fd:
            return max(0, os.fstat(fd).st_size - self.parsed)

    def data_bytes(self) -> int:
        """Size of the data file; 0 where no name is. Raises OSError where the system does not say."""
        try:
            return self.data.stat().st_size
        except OSError as error:
            if is_absent(error):
                return 0
            raise

    def digests(self, wanted: Sequence[tuple[int, int]]) -> list[bytes]:
        """Digests of `cells` cells of the object of each record, of (record, cells) pairs, as they are in the file.

        Raises OSError.
        """
        with self.opened() as fd:
            return self._near(fd, [(record + FIXED_BYTES, cells * DIGEST_BYTES) for record, cells in wanted])

    @staticmethod
    def _near(fd: int, wanted: Sequence[tuple[int, int]]) -> list[bytes]:
        """What the file has at each (offset, bytes), neighbours in one call; less beyond its end. Raises OSError."""
        found = [b""] * len(wanted)
        order = sorted(range(len(wanted)), key=lambda number: wanted[number])
        first = 0
        while first < len(order):
            (start, nbytes), stop = wanted[order[first]], first + 1
            end = start + nbytes
            while stop < len(order) and wanted[order[stop]][0] - end <= _NEAR_BYTES and end - start < SOME_BYTES:
                end = max(end, sum(wanted[order[stop]]))
                stop += 1
            data = os.pread(fd, end - start, start)
            for number in order[first:stop]:
                at, nbytes = wanted[number]
                found[number] = data[at - start : at - start + nbytes]
            first = stop
        return found

    def states(self, records: Places) -> tuple[npt.NDArray[np.bool_], Places]:
        """Whether the object of each record is alive, and its stamp; records rise. Nothing lives in a segment that was
        removed. Raises OSError where the system does not say.
        """
        words = np.zeros((len(records), 2), np.uint32)
        try:
            with self.opened() as fd:
                linked = os.fstat(fd).st_nlink > 0
                far = (np.diff(records) > _NEAR_BYTES) | (np.diff(records // SOME_BYTES) != 0)
                edges = [0, *(np.flatnonzero(far) + 1).tolist(), len(records)] if len(records) else []
                for first, stop in pairwise(edges):
                    start = int(records[first]) + STATE_AT
                    data = os.pread(fd, int(records[stop - 1]) + STATE_AT + _STATE_BYTES - start, start)
                    found = np.frombuffer(data, "<u4", len(data) // 4)
                    places = (records[first:stop] + STATE_AT - start) // 4
                    whole = places[places + 1 < len(found)]
                    words[first : first + len(whole), 0], words[first : first + len(whole), 1] = (
                        found[whole],
                        found[whole + 1],
                    )
        except OSError as error:
            if not self.is_removed(error):
                raise
            words[:] = DEAD
            linked = False
        return (words[:, 0] == LIVE) & linked, words[:, 1].astype(np.int64)

    def state_anew(self, record: int) -> tuple[bool, int]:
        """As `state`, by a descriptor that is opened for it: a network file system then asks who has the file."""
        try:
            fd = open_shared(self.head)
        except OSError as error:
            if self.is_removed(error):
                return False, 0
            raise
        try:
            return _state(fd, record)
        finally:
            close_quietly(fd)

    def kill(self, records: Iterable[int], permit: Permit) -> None:
        """Nobody finds these objects from here on; processes that know them are told by the caller. Raises OSError."""
        write = os.pwrite
        with self.opened() as fd:
            for record in records:
                if write(fd, _DEAD, record + STATE_AT) < len(_DEAD):
                    _whole(fd, _DEAD, record + STATE_AT)

    def stamp(self, record: int, second: int) -> None:
        """Write second `second` of a use into an object's header, in place. Raises OSError."""
        with self.opened() as fd:
            _whole(fd, second.to_bytes(4, "little"), record + STAMP_AT)

    def append(self, blob: bytes) -> None:
        """Add whole records at `parsed`. On OSError the head is as it was, to every reader."""
        try:
            _whole(self.head_fd, blob, self.parsed)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self.head_fd, self.parsed)
            raise
        self.parsed += len(blob)

    def mark_synced(self, offset: int) -> None:
        """Say that the payload below `offset` is safe from a power cut. Raises OSError."""
        self.append(encode_mark(self.parsed, Kind.SYNCED, offset))
        self.synced = offset

    def settle(self) -> None:
        """Make what another process wrote safe from a power cut, without a word: only its writer marks it.

        Raises WritesLost, and OSError where the disk cannot be asked. What it removed meanwhile needs nothing.
        """
        for path in (self.data, self.head):
            try:
                fd = open_shared(path)
            except OSError as error:
                if self.is_removed(error):
                    return
                raise
            try:
                settle(fd)
            finally:
                close_quietly(fd)

    def seal(self) -> None:
        """Nothing is added from here on, and others may have it. Raises OSError."""
        self.append(encode_mark(self.parsed, Kind.SEALED, 0))
        self.become(Life.SEALED)

    def adopt(self) -> bool:
        """Take the place of a writer that is no more; False where it lives. Held until `release`. Raises OSError.

        By a head that is opened anew: a network file system then asks how long it is.
        """
        fd = open_shared(self.head)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            close_quietly(fd)
            if isinstance(error, BlockingIOError):
                return False
            raise
        close_quietly(self.head_fd)
        self.head_fd = fd
        return True

    def release(self) -> None:
        """Others may take over what this process has adopted."""
        if self.is_sealed:
            self.close()
        elif self.head_fd >= 0:
            with suppress(OSError):
                fcntl.flock(self.head_fd, fcntl.LOCK_UN)

    def cut_head(self, permit: Permit) -> None:
        """End the head behind its last whole record, as its writer is no more. Raises OSError."""
        os.ftruncate(self.head_fd, self.parsed)

    def unlink(self, permit: Permit) -> None:
        """Remove both files, the head first: data without a head is a left-over. Missing ones are no matter.

        Raises OSError.
        """
        for path in (self.head, self.data):
            try:
                path.unlink()
            except OSError as error:
                if not is_gone(error):
                    raise

    def close(self) -> None:
        """Close both files, which ends the lock as well. Safe to call twice, and raises nothing."""
        fds = self.head_fd, self.data_fd
        self.head_fd = self.data_fd = -1
        close_quietly(*fds)


def _state(fd: int, record: int) -> tuple[bool, int]:
    raw = os.pread(fd, 8, record + STATE_AT)
    linked = os.fstat(fd).st_nlink > 0
    return linked and int.from_bytes(raw[:4], "little") == LIVE, int.from_bytes(raw[4:], "little")


def settle(fd: int) -> None:
    """Wait until what was written to a file is on stable storage. Raises WritesLost.

    By a descriptor from before the writes: the kernel reports a failed one once, and calls the pages clean.
    """
    try:
        os.fdatasync(fd)
    except OSError as error:
        raise WritesLost(error.errno, error.strerror) from error


def _was_ours(start: bytes, fd: int) -> bool:
    """Whether a damaged first line was one of this format: it still begins so, never reached the disk, or a whole
    record follows. Segments of another format are left alone. Raises OSError.
    """
    if start[:12] == Preamble(bytes(32), NO_BOOT).encode()[:12] or not any(start):
        return True
    return next_record(fd, PREAMBLE_BYTES - 1, os.fstat(fd).st_size) is not None


def punch(fd: int, offset: int, nbytes: int) -> bool:
    """Give the blocks of a range back to the file system; False where it never can."""
    done = _libc.fallocate(fd, _PUNCH | _KEEP_SIZE, offset, nbytes) == 0
    return done or ctypes.get_errno() not in (errno.EOPNOTSUPP, errno.ENOSYS)


def sync_folder(folder: Path) -> None:
    """Make the names in a directory safe from a power cut. Raises OSError; some file systems do it by themselves."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        close_quietly(fd)


def _whole(fd: int, data: bytes, offset: int) -> None:
    """Write all of `data`, or raise."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
