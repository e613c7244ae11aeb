"""A DeletionLog tells processes which objects were deleted: one small file of a namespace, that all append to.

It only saves time. The truth is the state in each header, so lost, torn or repeated rows do no harm: whatever looks odd
sends the reader back to the headers. The file is kept open: one `fstat` says that there is nothing new.
"""

from __future__ import annotations

import errno
import os
import uuid
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvmover.store.files import close_quietly, is_gone, open_shared
from kvmover.store.stored import Placed, Places

#: A row: a segment, the place of a record in its head, and a check of both.
_ROW = np.dtype({"names": ["segment", "record", "check"], "formats": ["S25", "<u8", "<u8"], "offsets": [0, 32, 40]})
_CHECKED_BYTES = 40
_ROW_BYTES = _ROW.itemsize

#: Of the log that are read at a time: a few milliseconds.
_SOME_BYTES = _ROW_BYTES * 2048

#: Beyond this many bytes a cleaner starts the file anew.
_LONG_BYTES = 4 << 20

#: Segments, and in each the places of records in its head.
Deletions = list[tuple[str, Places]]


class DeletionLog:
    """The log of one namespace, read from where it ended when it was opened: what it said before is in the headers."""

    def __init__(self, path: Path) -> None:
        """Raises nothing: where the file cannot be had, it is asked for again at each `poll`."""
        self._path = path
        self._fd, self._read = -1, 0
        with suppress(OSError):
            self._open()
            self._read = self._whole_bytes()

    def append(self, gone: Placed) -> None:
        """Objects that were deleted. Failure to tell is no failure to delete."""
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
            if not os.fstat(self._fd).st_nlink:  # another has its name, and this one is not read to its end yet
                self._append_to_the_next(rows.tobytes())
                return
            os.write(self._fd, rows.tobytes())
            if os.fstat(self._fd).st_size == self._read + len(rows) * _ROW_BYTES:
                self._read += len(rows) * _ROW_BYTES  # nobody else wrote meanwhile

    def _append_to_the_next(self, rows: bytes) -> None:
        fd = open_shared(self._path, os.O_CREAT | os.O_APPEND)
        try:
            os.write(fd, rows)
        finally:
            close_quietly(fd)

    def poll(self) -> Deletions | None:
        """Some of what was deleted since the last call; [] where that is all. None where only the headers can say.

        Raises OSError.

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
