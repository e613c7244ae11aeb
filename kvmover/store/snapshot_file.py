"""A SnapshotFile shares columns of numbers among the processes of one user and host: written once, mapped by all.

It lies in memory (/dev/shm), never beside the store: a mapped file of a disk or a network ends the process whose read
fails. One process has the turn to write, by a lock on the draft; its death leaves the draft without a lock, and the
turn to the next. A whole draft is renamed and never written again. Each process that maps it holds a shared lock, and
the last removes it; files that a killed process left are removed by the next writer of any.

Layout: magic, XXH3 of all bytes behind it, bytes of the description; the description; each column from a page boundary.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64, xxh3_64_intdigest

from kvmover.prepared import prepared
from kvmover.store.files import close_quietly, write_whole
from kvmover.store.number_columns import GrowingNumbers, SavedColumn

#: The directory of snapshots: memory, which has no errors of a device.
MEMORY = Path("/dev/shm")

_MAGIC = b"KVSNAP01"
_HEAD = struct.Struct("<8sQQ")
_CHECKED_AT = 16

#: Most of the free memory of the directory that a snapshot takes: collective libraries need theirs.
_SHARE = 4

#: Seconds to wait for another process's snapshot, and between two looks.
_PATIENCE_S, _LOOK_S = 30, 0.01

#: Looks, a millisecond apart, at a file whose lock another process holds for a moment.
_LOOKS = 20


class _Section(msgspec.Struct, frozen=True, array_like=True):
    """A column's name, numpy type, count, and byte offset from the first column."""

    name: str
    code: str
    count: int
    offset: int


@prepared
class _Description(msgspec.Struct, frozen=True):
    contents: msgspec.Raw
    sections: list[_Section]


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotUse:
    """A process's use of a snapshot, by a shared lock on the open file."""

    path: Path
    fd: int

    def end(self) -> None:
        """Release the file, and remove it if no other process uses it. Mapped columns stay valid. Called once."""
        with suppress(OSError):
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(self.path, self.fd)
        close_quietly(self.fd)


@dataclass(frozen=True, slots=True, eq=False)
class MappedSnapshot:
    """A mapped snapshot: its use, the writer's `contents`, and columns that are shared until written."""

    use: SnapshotUse
    contents: bytes
    columns: Mapping[str, SavedColumn]


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotTurn:
    """The only right to write a snapshot, held by a lock on its draft."""

    file: SnapshotFile
    fd: int

    def publish(self, contents: bytes, columns: Mapping[str, npt.NDArray[Any]]) -> MappedSnapshot | None:
        """Write and map a snapshot. Returns None if memory is short or the system refuses. Ends the turn."""
        try:
            self.file.remove_unused()
            _write(self.fd, contents, columns)
            self.file.draft.rename(self.file.path)
            fcntl.flock(self.fd, fcntl.LOCK_SH)
            return _mapped(self.file.path, self.fd)
        except (OSError, ValueError):
            self.end()
            return None

    def end(self) -> None:
        """Give up the turn."""
        _remove(self.file.draft, self.fd)
        close_quietly(self.fd)


class SnapshotFile:
    """A place of one snapshot, for the processes of this user that call it by the same `identity`."""

    def __init__(self, identity: bytes, folder: Path) -> None:
        """`folder`: a directory in memory."""
        self._folder, self._prefix = folder, f"kvmover-store-{os.geteuid()}-"
        name = self._prefix + sha256(_MAGIC + identity).hexdigest()[:32]
        self.path, self.draft = folder / f"{name}.snapshot", folder / f"{name}.draft"

    def find(self) -> MappedSnapshot | None:
        """Map the snapshot. Returns None if there is none, or it is another user's, or not whole, and then removed."""
        fd = -1
        try:
            fd = _open(self.path, os.O_RDONLY)
            _lock_shared(fd)
            return _mapped(self.path, fd)
        except OSError:
            close_quietly(fd)
        except ValueError:
            _remove(self.path, fd)
            close_quietly(fd)
        return None

    def wait(self, accept: Callable[[MappedSnapshot], bool]) -> MappedSnapshot | SnapshotTurn | None:
        """Returns a snapshot that `accept` takes, or the turn to write one; waits while another process has that.

        Returns None if the other process takes too long. Raises OSError if the system refuses the turn.
        """
        until_s = time.monotonic() + _PATIENCE_S
        while True:
            turn = self._turn()  # before the look, so that no snapshot appears between them
            found = self.find()
            if found and accept(found):
                if turn:
                    turn.end()
                return found
            if found:
                if turn:  # so that nobody else who waits looks at it
                    _remove(self.path, found.use.fd)
                found.use.end()
            if turn or time.monotonic() > until_s:
                return turn
            time.sleep(_LOOK_S)

    def _turn(self) -> SnapshotTurn | None:
        """Take the turn, unless another process has it, or one that died left its draft, which is removed.

        Raises OSError.
        """
        fd = _open(self.draft, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.fstat(fd)
            if not found.st_size and self.draft.lstat().st_ino == found.st_ino:
                return SnapshotTurn(self, fd)
            _remove(self.draft, fd)
        except (FileNotFoundError, BlockingIOError):
            pass
        except OSError:
            close_quietly(fd)
            raise
        close_quietly(fd)
        return None

    def remove_unused(self) -> None:
        """Remove files of this user's snapshots that no process has locked: their processes were killed."""
        for path in self._folder.glob(f"{self._prefix}*"):
            fd = -1
            with suppress(OSError):
                fd = _open(path, os.O_RDONLY)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path, fd)
            close_quietly(fd)


def _open(path: Path, flags: int) -> int:
    """Open a file of this user alone. Raises OSError."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(f"{path} is not a file of this user alone")
    except OSError:
        close_quietly(fd)
        raise
    return fd


def _lock_shared(fd: int) -> None:
    """Take a shared lock. Raises OSError if another process holds the file alone for long."""
    for _ in range(_LOOKS):
        with suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        time.sleep(0.001)
    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _remove(path: Path, fd: int) -> None:
    """Remove a path if it still names the open file, and the system lets it: a copy is lost, and no page."""
    with suppress(OSError):
        if path.lstat().st_ino == os.fstat(fd).st_ino:
            path.unlink()


def _pages(nbytes: int) -> int:
    """Returns `nbytes` rounded up to whole pages of memory."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _write(fd: int, contents: bytes, columns: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write a whole snapshot into an empty file. Raises OSError, also if it would take too much of the free memory."""
    sections, nbytes = list[_Section](), 0
    for name, numbers in columns.items():
        sections.append(_Section(name, numbers.dtype.str, len(numbers), nbytes))
        nbytes += _pages(numbers.nbytes)
    described = msgspec.msgpack.encode(_Description(msgspec.Raw(contents), sections))
    start = _HEAD.size + len(described)
    free = os.fstatvfs(fd)
    if (_pages(start) + nbytes) * _SHARE > free.f_bavail * free.f_frsize:
        raise OSError(f"a snapshot of {_pages(start) + nbytes} bytes is too much of the memory that is free")
    length, digest = struct.pack("<Q", len(described)), xxh3_64()
    pieces = [length, described, bytes(_pages(start) - start)]
    for numbers in columns.values():
        pieces += [np.ascontiguousarray(numbers).view(np.uint8).data, bytes(-numbers.nbytes % mmap.PAGESIZE)]
    at = _CHECKED_AT
    for piece in pieces:
        digest.update(piece)
        write_whole(fd, piece, at)
        at += len(piece)
    write_whole(fd, _HEAD.pack(_MAGIC, digest.intdigest(), len(described))[:_CHECKED_AT], 0)


def _mapped(path: Path, fd: int) -> MappedSnapshot:
    """Map the columns of a snapshot. Raises ValueError if a byte of it is wrong, OSError if it cannot be mapped."""
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as whole:
        if len(whole) < _HEAD.size:
            raise ValueError("a snapshot has no head")
        magic, check, length = _HEAD.unpack_from(whole)
        start = _pages(_HEAD.size + length)
        with memoryview(whole) as data, data[_CHECKED_AT:] as checked:
            if magic != _MAGIC or start > len(whole) or xxh3_64_intdigest(checked) != check:
                raise ValueError("a snapshot is not whole")
        described = msgspec.msgpack.decode(whole[_HEAD.size : _HEAD.size + length], type=_Description)
    columns = dict[str, SavedColumn]()
    for each in described.sections:
        nbytes = np.dtype(each.code).itemsize * each.count
        columns[each.name] = SavedColumn(GrowingNumbers.mapped(each.code, fd, start + each.offset, nbytes), each.count)
    return MappedSnapshot(SnapshotUse(path, fd), bytes(described.contents), columns)
