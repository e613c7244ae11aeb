"""A Segment is a data file of payloads and the head file that says what is in it. One process writes both, appending.

An object exists from the moment its header is whole in the head file, which is written after the payload. Places in a
data file are never used twice: what a header once described is either still there or, if the object was evicted, zeros.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from uuid import UUID

from kvmover.store.record import (
    DEAD,
    LIVE,
    PREAMBLE_BYTES,
    STAMP_AT,
    STATE_AT,
    Kind,
    Preamble,
    Record,
    decode_all,
    encode_mark,
    next_whole,
)

HEAD, DATA = ".head", ".data"
_HEADS = re.compile(r"([0-9a-f]{16}-[0-9]{8})\.head")

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_PUNCH, _KEEP_SIZE = 2, 1
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


@dataclass(frozen=True, slots=True)
class Machine:
    """Which life of which machine this is: the question behind every object that was not synced.

    `boot`: 16 bytes that are equal for two processes if they share a kernel, and so its page cache.

    A process that is killed leaves what it wrote in the page cache, whole; a machine that loses power may keep a header
    and lose the payload. So objects of the same boot are believed, others only if they were synced, or once verified.
    """

    boot: bytes

    @staticmethod
    def now() -> int:
        """Seconds since 1970, as stamps count them."""
        return int(time.time())


@cache
def this_machine() -> Machine:
    """The machine that this process runs on, in this life: read once from `boot_id` of Linux."""
    return Machine(UUID(_BOOT_ID.read_text().strip()).bytes)


def segments_in(folder: Path) -> set[str]:
    """Names of the segments that have a head in `folder`; none where somebody removed it."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        return {found[1] for entry in entries if (found := _HEADS.fullmatch(entry.name))}
    return set()


@dataclass(slots=True, eq=False)
class Segment:
    """One pair of files as this process sees it. `parsed` bytes of the head file were understood."""

    folder: Path
    name: str
    head_fd: int
    boot: bytes
    parsed: int = PREAMBLE_BYTES
    synced: int = 0
    sealed: bool = False
    #: Whether its writer, this process, has gone on to another.
    full: bool = False
    #: Objects that were announced and may not have reached the disk before a crash of their machine.
    waiting: list[Record] = field(default_factory=list[Record])

    @property
    def head(self) -> Path:
        """The file of headers."""
        return self.folder / (self.name + HEAD)

    @property
    def data(self) -> Path:
        """The file of payloads."""
        return self.folder / (self.name + DATA)

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
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(os.open(folder / (name + DATA), flags, 0o666))
            _whole(fd, preamble.encode(), 0)
            if os.fstat(fd).st_nlink:
                return cls(folder, name, fd, preamble.boot)
        except BlockingIOError:
            pass  # a cleaner took the empty head for a left-over, before the lock
        except OSError:
            os.close(fd)
            for suffix in (DATA, HEAD):
                with suppress(OSError):
                    (folder / (name + suffix)).unlink()
            raise
        os.close(fd)
        return None

    @classmethod
    def find(cls, folder: Path, name: str, namespace: bytes) -> Segment | str | None:
        """A segment of some process. None while it is being made; the reason where it is none of this namespace."""
        try:
            fd = os.open(folder / (name + HEAD), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        start = os.pread(fd, PREAMBLE_BYTES, 0)
        preamble = Preamble.decode(start)
        if preamble and preamble.namespace == namespace:
            return cls(folder, name, fd, preamble.boot)
        os.close(fd)
        if len(start) < PREAMBLE_BYTES:
            return None
        return "foreign namespace" if preamble else "damaged preamble"

    @staticmethod
    def remove_stillborn(folder: Path, name: str) -> None:
        """Remove a pair whose head never got its preamble, unless its writer lives."""
        try:
            fd = os.open(folder / (name + HEAD), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return
        with suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_size < PREAMBLE_BYTES:
                for suffix in (HEAD, DATA):
                    (folder / (name + suffix)).unlink(missing_ok=True)
        os.close(fd)

    def tail(self) -> list[Record]:
        """Records that were added since the last call, as far as they are whole."""
        size = os.fstat(self.head_fd).st_size
        if size <= self.parsed:
            return []
        records = list(decode_all(os.pread(self.head_fd, size - self.parsed, self.parsed), self.parsed))
        for record in records:
            self.parsed = record.at + record.record_bytes
            self.synced = max(self.synced, record.offset if record.kind is Kind.SYNCED else 0)
            self.sealed |= record.kind is Kind.SEALED
        return records

    def skip_damage(self) -> bool:
        """Go on behind a damaged record; False where nothing whole follows. Only for segments without a writer."""
        rest = os.pread(self.head_fd, os.fstat(self.head_fd).st_size - self.parsed, self.parsed)
        found = next_whole(rest, self.parsed, self.parsed)
        self.parsed = found or self.parsed
        return found is not None

    def data_bytes(self) -> int:
        """Size of the data file; 0 where there is none."""
        try:
            return self.data.stat().st_size
        except FileNotFoundError:
            return 0

    def states(self) -> dict[int, tuple[int, int]]:
        """State and stamp of every object, by the place of its record, as the file has them now."""
        data = os.pread(self.head_fd, self.parsed - PREAMBLE_BYTES, PREAMBLE_BYTES)
        return {r.at: (r.state, r.stamp) for r in decode_all(data, PREAMBLE_BYTES) if r.kind is Kind.OBJECT}

    def state(self, record: int) -> tuple[bool, int]:
        """Whether the object of that record is alive, and its stamp. Nothing lives in a segment that was removed."""
        raw = os.pread(self.head_fd, 8, record + STATE_AT)
        linked = os.fstat(self.head_fd).st_nlink > 0
        return linked and int.from_bytes(raw[:4], "little") == LIVE, int.from_bytes(raw[4:], "little")

    def kill(self, record: int) -> None:
        """Raises OSError. Nobody finds the object from here on; processes that know it are told by the caller."""
        _whole(self.head_fd, DEAD.to_bytes(4, "little"), record + STATE_AT)

    def stamp(self, record: int, second: int) -> None:
        """Write second `second` of a use into an object's header, in place. Raises OSError."""
        _whole(self.head_fd, second.to_bytes(4, "little"), record + STAMP_AT)

    def append(self, blob: bytes) -> None:
        """Add whole records at `parsed`. On OSError the head is as it was, to every reader."""
        try:
            _whole(self.head_fd, blob, self.parsed)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self.head_fd, self.parsed)
            raise
        self.parsed += len(blob)

    def sync(self, offset: int) -> None:
        """Make the payload below `offset` safe from a power cut, then say so. Raises OSError, before it says so."""
        fd = os.open(self.data, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)
        self.append(encode_mark(self.parsed, Kind.SYNCED, offset))
        self.synced = offset
        os.fdatasync(self.head_fd)

    def seal(self) -> None:
        """Nothing is added from here on. Raises OSError."""
        self.append(encode_mark(self.parsed, Kind.SEALED, 0))
        self.sealed = True

    def adopt(self) -> bool:
        """Take the place of a writer that is no more; False where it lives. Held until `close`."""
        try:
            fcntl.flock(self.head_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        """Others may take over what this process has adopted or finished."""
        if self.head_fd >= 0:
            fcntl.flock(self.head_fd, fcntl.LOCK_UN)

    def unlink(self) -> None:
        """Remove both files, the head first: data without a head is a left-over. Missing ones are no matter."""
        for path in (self.head, self.data):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the head file, which ends the lock as well. Safe to call twice."""
        if self.head_fd >= 0:
            os.close(self.head_fd)
        self.head_fd = -1


def punch(fd: int, offset: int, nbytes: int) -> bool:
    """Give the blocks of a range back to the file system; False where it cannot."""
    return _libc.fallocate(fd, _PUNCH | _KEEP_SIZE, offset, nbytes) == 0


def _whole(fd: int, data: bytes, offset: int) -> None:
    """Write all of `data`, or raise."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)
