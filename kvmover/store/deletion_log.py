"""A DeletionLog tells processes which objects were deleted: one small file of a namespace, that all append to.

It only saves time. The truth is the state in each header, so lost, torn or repeated rows do no harm: whatever looks odd
sends the reader back to the headers. The file is kept open: one `fstat` says that there is nothing new.
"""

from __future__ import annotations

import errno
import os
import struct
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from xxhash import xxh3_64_intdigest

from kvmover.store.files import close_quietly, is_gone, open_shared

#: A row: a segment, the place of a record in its head, and a check.
_ROW = struct.Struct("<25s7xQ")
_ROW_BYTES = _ROW.size + 8

#: Beyond this many bytes a cleaner starts the file anew.
_LONG_BYTES = 4 << 20

#: (segment, place of the record in its head) of an object.
Deleted = tuple[str, int]


class DeletionLog:
    """The log of one namespace, read from where it ended when it was opened: what it said before is in the headers."""

    def __init__(self, path: Path) -> None:
        """Raises nothing: where the file cannot be had, it is asked for again at each `poll`."""
        self._path = path
        self._fd, self._read = -1, 0
        with suppress(OSError):
            self._open()
            self._read = self._whole_bytes()

    def append(self, gone: Iterable[Deleted]) -> None:
        """Objects that were deleted. Failure to tell is no failure to delete."""
        rows = [_ROW.pack(segment.encode(), record) for segment, record in gone]
        with suppress(OSError):
            if self._fd < 0 or not os.fstat(self._fd).st_nlink:
                self._open()
            os.write(self._fd, b"".join(row + _check_of(row) for row in rows))

    def poll(self) -> list[Deleted] | None:
        """What was deleted since the last call. None where only the headers can say. Raises OSError.

        A file that another has taken the place of is read to its end, and then the other from its beginning.
        """
        if self._fd < 0:
            try:
                self._open()
            except OSError as error:
                if is_gone(error) or error.errno == errno.EROFS:  # nobody has deleted anything here
                    return []
                raise
        try:
            found = os.fstat(self._fd)
        except OSError as error:
            if not is_gone(error):
                raise
            self._open()  # what the other said at its end is lost
            return None
        if found.st_size < self._read:
            self._open()
            return None
        old = self._rows(found.st_size)
        if found.st_nlink or old is None:
            return old
        try:
            self._open()
        except OSError as error:
            if is_gone(error):  # a directory that is gone has no news, nor headers
                return old
            raise
        fresh = self._rows(os.fstat(self._fd).st_size)
        return None if fresh is None else old + fresh

    def shorten(self) -> None:
        """Start the file anew once it is long: every process reads the old one to its end first."""
        with suppress(OSError):
            if self._fd >= 0 and os.fstat(self._fd).st_size > _LONG_BYTES:
                fresh = self._path.with_name(f"{uuid.uuid4().hex}.tmp")
                fresh.touch()
                fresh.replace(self._path)

    def close(self) -> None:
        """Close the file, which stays. Safe to call twice."""
        fd, self._fd = self._fd, -1
        close_quietly(fd)

    def _open(self) -> None:
        """The file that has the name now, from its beginning on."""
        fresh = open_shared(self._path, os.O_CREAT | os.O_APPEND)
        self.close()
        self._fd, self._read = fresh, 0

    def _whole_bytes(self) -> int:
        size = os.fstat(self._fd).st_size
        return size - size % _ROW_BYTES

    def _rows(self, size: int) -> list[Deleted] | None:
        if size - self._read < _ROW_BYTES:
            return []
        data = os.pread(self._fd, size - self._read, self._read)
        rows = [data[at : at + _ROW_BYTES] for at in range(0, len(data) - _ROW_BYTES + 1, _ROW_BYTES)]
        self._read += len(rows) * _ROW_BYTES
        if any(_check_of(row[: _ROW.size]) != row[_ROW.size :] for row in rows):
            return None
        return [(name.rstrip(b"\0").decode("ascii", "replace"), at) for name, at in map(_ROW.unpack_from, rows)]


def _check_of(row: bytes) -> bytes:
    return xxh3_64_intdigest(row).to_bytes(8, "little")
