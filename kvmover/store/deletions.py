"""DeletionLog: which objects were deleted, between processes: one small file of a namespace, that all append to.

It only saves time. The truth is the state in each header, so lost, torn or repeated rows do no harm: whatever looks odd
sends the reader back to the headers.
"""

from __future__ import annotations

import os
import struct
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from xxhash import xxh3_64_intdigest

_ROW = struct.Struct("<25s7xQ")
_ROW_BYTES = _ROW.size + 8

#: Beyond this many bytes a cleaner starts the file anew.
_LONG_BYTES = 4 << 20


class DeletionLog:
    """What this process has read of the file, which is kept open: one `fstat` says that there is nothing new."""

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
        self._read = size - size % _ROW_BYTES

    def append(self, gone: Iterable[tuple[str, int]]) -> None:
        """Objects, by segment and record, that were deleted. Failure to tell is no failure to delete."""
        rows = [_ROW.pack(segment.encode(), record) for segment, record in gone]
        with suppress(OSError):
            if not os.fstat(self._fd).st_nlink:
                self._open()
            os.write(self._fd, b"".join(row + _check(row) for row in rows))

    def poll(self) -> list[tuple[str, int]] | None:
        """What was deleted since the last call. None where only the headers can say: a new file, or a damaged one."""
        found = os.fstat(self._fd)
        if not found.st_nlink or found.st_size < self._read:
            with suppress(OSError):  # a directory that is gone has no news, nor headers
                self._open()
            return None
        if found.st_size - self._read < _ROW_BYTES:
            return []
        data = os.pread(self._fd, found.st_size - self._read, self._read)
        rows = [data[at : at + _ROW_BYTES] for at in range(0, len(data) - _ROW_BYTES + 1, _ROW_BYTES)]
        self._read += len(rows) * _ROW_BYTES
        if any(_check(row[: _ROW.size]) != row[_ROW.size :] for row in rows):
            return None
        return [(name.rstrip(b"\0").decode("ascii", "replace"), at) for name, at in (_ROW.unpack_from(r) for r in rows)]

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


def _check(row: bytes) -> bytes:
    return xxh3_64_intdigest(row).to_bytes(8, "little")
