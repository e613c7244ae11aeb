"""A Segment is a data file of payloads and a head file of their headers. One process appends to both.

An object exists from the moment its header is whole in the head file, which is written after the payload. Places in a
data file are never reused: a described payload is still there or, once the object was evicted, zeros.
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
from kvmover.store.files import close_quietly, is_absent, is_gone, open_shared, write_whole
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

#: Bytes of a record's adjacent state and stamp.
_STATE_BYTES = 8
_DEAD = DEAD.to_bytes(4, "little")

_PUNCH, _KEEP_SIZE = 2, 1
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class WritesLost(OSError):
    """The error of lost writes. A second sync would report success all the same."""


def segments_in(folder: Path) -> set[str]:
    """List the segments with a head in `folder`; empty if the folder was removed. Raises OSError."""
    try:
        with os.scandir(folder) as entries:
            return {found[1] for entry in entries if (found := _HEADS.fullmatch(entry.name))}
    except OSError as error:
        if is_gone(error) and not folder.exists():
            return set()
        raise


class Life(Enum):
    """The state of a segment in this process.

    WRITTEN: this process appends to it. FULL: this process appends to another, and owes this segment a sync and a seal.
    FOLLOWED: another process may append, so its head is polled. SEALED: closed to appends for good.
    """

    WRITTEN = "written"
    FULL = "full"
    FOLLOWED = "followed"
    SEALED = "sealed"


#: Allowed transitions.
_NEXT = {
    Life.WRITTEN: (Life.FULL,),
    Life.FULL: (Life.SEALED,),
    Life.FOLLOWED: (Life.SEALED,),
    Life.SEALED: (),
}


@dataclass(slots=True, eq=False)
class Segment:
    """A pair of files as this process sees it. `parsed`: bytes of the head file decoded so far.

    `head_fd` is open until the segment is sealed, `data_fd` only in the writing process: a descriptor opened before the
    writes is told of every failed one.
    """

    folder: Path
    name: str
    boot: bytes
    life: Life
    head_fd: int = -1
    data_fd: int = -1
    parsed: int = PREAMBLE_BYTES
    synced: int = 0
    #: Places allocated here whose objects have neither got a header nor failed.
    awaited: int = 0
    #: Objects with headers whose payload may be lost in a crash of their machine.
    waiting: list[StoredObject] = field(default_factory=list[StoredObject])

    @property
    def head(self) -> Path:
        """Returns the path of the head file."""
        return self.folder / (self.name + HEAD)

    @property
    def data(self) -> Path:
        """Returns the path of the data file."""
        return self.folder / (self.name + DATA)

    @property
    def is_ours(self) -> bool:
        """Returns True if this process appends to it or owes it a seal, and so knows its contents."""
        return self.life in (Life.WRITTEN, Life.FULL)

    @property
    def is_done(self) -> bool:
        """Returns True if it may be removed once empty: writes have ended and no object waits."""
        return self.life in (Life.FULL, Life.SEALED) and not self.awaited and not self.waiting

    @property
    def is_sealed(self) -> bool:
        """Returns True if the segment is closed to appends for good."""
        return self.life is Life.SEALED

    def become(self, life: Life) -> None:
        """Move to an allowed next state; sealing closes all descriptors."""
        assert life in _NEXT[self.life], f"{self.name} is {self.life} and cannot be {life}"
        self.life = life
        if life is Life.SEALED:
            self.close()

    @classmethod
    def create(cls, folder: Path, name: str, preamble: Preamble) -> Segment | None:
        """Create a pair of empty files, locked while this process lives. None if the name is taken.

        Raises OSError. The head is made and locked first, since any process may remove data without a head.
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
            write_whole(fd, preamble.encode(), 0)
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
        """Open a segment of any process. None if unfinished or gone; a reason if it is not of this namespace.

        Raises OSError if the head cannot be read. A segment with a damaged preamble counts as another machine's: the
        folder identifies its namespace, and each object is checked before it is trusted.
        """
        fd = -1
        try:
            fd = open_shared(folder / (name + HEAD))
            start = os.pread(fd, PREAMBLE_BYTES, 0)
            found = Preamble.decode(start)
            if len(start) < PREAMBLE_BYTES:
                reason = None
            elif found is None:
                ours = not Preamble.is_of_another_format(start) and _was_ours(start, fd)
                reason = "" if ours else "another format"
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
        """Returns True if `error` says that a file is absent and the head's path is too. Raises OSError."""
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
        """Yield a descriptor of the head for a `with` block. Raises OSError."""
        if self.head_fd >= 0:
            yield self.head_fd
            return
        fd = open_shared(self.head)
        try:
            yield fd
        finally:
            close_quietly(fd)

    def tail(self) -> RecordTable | None:
        """Read some whole records from `parsed` on; None if there are no more. Raises OSError.

        Returns them again until `take` consumes them.
        """
        if self.is_sealed:
            return None
        return some_records(self.head_fd, self.parsed, os.fstat(self.head_fd).st_size)

    def take(self, table: RecordTable) -> None:
        """Consume a table from `tail`: advance `parsed` and apply its marks."""
        self.parsed, self.synced = table.end, max(self.synced, table.synced)
        if table.sealed:
            self.become(Life.SEALED)

    def skip_damage(self) -> bool:
        """Skip a damaged record; False if no whole record follows. Only for segments without a writer.

        Raises OSError.
        """
        found = next_record(self.head_fd, self.parsed, os.fstat(self.head_fd).st_size)
        self.parsed = found or self.parsed
        return found is not None

    def torn_bytes(self) -> int:
        """Returns the bytes of the head beyond `parsed`. Raises OSError."""
        with self.opened() as fd:
            return max(0, os.fstat(fd).st_size - self.parsed)

    def data_bytes(self) -> int:
        """Returns the size of the data file, bytes; 0 if absent. Raises OSError for other errors."""
        try:
            return self.data.stat().st_size
        except OSError as error:
            if is_absent(error):
                return 0
            raise

    def digests(self, wanted: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read the digests of each (record, cells) pair from the head file, unchecked.

        Raises OSError.
        """
        with self.opened() as fd:
            return self._near(fd, [(record + FIXED_BYTES, cells * DIGEST_BYTES) for record, cells in wanted])

    @staticmethod
    def _near(fd: int, wanted: Sequence[tuple[int, int]]) -> list[bytes]:
        """Read each (offset, bytes) range, neighbours in one call; short beyond the file's end. Raises OSError."""
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
        """Returns for each record, ascending, if its object is live, and its stamp (s).

        All objects of a removed segment are dead. Raises OSError if the head cannot be read.
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
        """Returns an object's liveness and stamp through a new descriptor, which a network file system revalidates."""
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
        """Mark objects as dead in the head; the caller informs processes that know them. Raises OSError."""
        write = os.pwrite
        with self.opened() as fd:
            for record in records:
                if write(fd, _DEAD, record + STATE_AT) < len(_DEAD):
                    write_whole(fd, _DEAD, record + STATE_AT)

    def stamp(self, record: int, second: int) -> None:
        """Write last-use time `second` into an object's header, in place. Raises OSError."""
        with self.opened() as fd:
            write_whole(fd, second.to_bytes(4, "little"), record + STAMP_AT)

    def append(self, blob: bytes) -> None:
        """Append whole records at `parsed`. On OSError the head is unchanged for every reader."""
        try:
            write_whole(self.head_fd, blob, self.parsed)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self.head_fd, self.parsed)
            raise
        self.parsed += len(blob)

    def mark_synced(self, offset: int) -> None:
        """Append a mark that the payload below byte `offset` is durable. Raises OSError."""
        self.append(encode_mark(self.parsed, Kind.SYNCED, offset))
        self.synced = offset

    def settle(self) -> None:
        """Sync another process's segment without a mark, which only its writer appends.

        Raises WritesLost, and OSError if a file cannot be opened. Files removed meanwhile are skipped.
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
        """Append the SEALED mark and close the segment to appends. Raises OSError."""
        self.append(encode_mark(self.parsed, Kind.SEALED, 0))
        self.become(Life.SEALED)

    def adopt(self) -> bool:
        """Lock the segment of a dead writer until `release`; False if the writer lives. Raises OSError.

        Opens the head anew, so that a network file system revalidates its length.
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
        """Release an adopted segment to other processes."""
        if self.is_sealed:
            self.close()
        elif self.head_fd >= 0:
            with suppress(OSError):
                fcntl.flock(self.head_fd, fcntl.LOCK_UN)

    def cut_head(self, permit: Permit) -> None:
        """Truncate a dead writer's head after its last whole record, at `parsed`. Raises OSError."""
        os.ftruncate(self.head_fd, self.parsed)

    def unlink(self, permit: Permit) -> None:
        """Remove both files, the head first: data without a head is a left-over. Missing files are ignored.

        Raises OSError.
        """
        for path in (self.head, self.data):
            try:
                path.unlink()
            except OSError as error:
                if not is_gone(error):
                    raise

    def close(self) -> None:
        """Close both files and release the lock. Idempotent; never raises OSError."""
        fds = self.head_fd, self.data_fd
        self.head_fd = self.data_fd = -1
        close_quietly(*fds)


def _state(fd: int, record: int) -> tuple[bool, int]:
    raw = os.pread(fd, 8, record + STATE_AT)
    linked = os.fstat(fd).st_nlink > 0
    return linked and int.from_bytes(raw[:4], "little") == LIVE, int.from_bytes(raw[4:], "little")


def settle(fd: int) -> None:
    """Sync a file's writes to stable storage. Raises WritesLost.

    `fd` must predate the writes: the kernel reports a failed write once, then calls the pages clean.
    """
    try:
        os.fdatasync(fd)
    except OSError as error:
        raise WritesLost(error.errno, error.strerror) from error


def _was_ours(start: bytes, fd: int) -> bool:
    """Returns True if a damaged preamble was of this format, so that other formats are left alone.

    It still begins so, is all zeros (never reached the disk), or a whole record follows. Raises OSError.
    """
    if start[:12] == Preamble(bytes(32), NO_BOOT).encode()[:12] or not any(start):
        return True
    return next_record(fd, PREAMBLE_BYTES - 1, os.fstat(fd).st_size) is not None


def punch(fd: int, offset: int, nbytes: int) -> bool:
    """Free the blocks of a byte range; False if the file system does not support it."""
    done = _libc.fallocate(fd, _PUNCH | _KEEP_SIZE, offset, nbytes) == 0
    return done or ctypes.get_errno() not in (errno.EOPNOTSUPP, errno.ENOSYS)


def sync_names(folder: Path) -> None:
    """Make the names in a namespace's directory durable, and its own, which whoever made it may have failed to sync:
    without it a power cut takes all. Raises OSError.
    """
    sync_folder(folder)
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a directory durable. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        close_quietly(fd)
