"""The reader of a head file takes it in pieces of 512 KiB, however long the file is or claims to be."""

from __future__ import annotations

import os
from collections.abc import Iterator

from kvmover.store.record import (
    FIXED_BYTES,
    MAGIC,
    PREAMBLE_BYTES,
    RECORDS_AT,
    RecordTable,
    claimed_bytes,
    decode_table,
)

#: Bytes per read, which takes some milliseconds.
SOME_BYTES = 512 << 10

_MAGIC = MAGIC.to_bytes(4, "little")


def some_records(fd: int, at: int, end: int) -> RecordTable | None:
    """Read the whole records in one piece of a head from byte `at`; None if no record begins there. Raises OSError.

    `end`: size of the file, bytes.
    """
    data = os.pread(fd, min(end - at, SOME_BYTES), at)
    claimed = claimed_bytes(data, 0)
    if SOME_BYTES < claimed <= end - at:
        data = os.pread(fd, claimed, at)
    table = decode_table(data, at)
    return table if table.end > at else None


def next_record(fd: int, at: int, end: int) -> int | None:
    """Returns the byte after `at` where a damaged head's next whole record begins, or None. Raises OSError.

    Records begin at multiples of RECORDS_AT, which a false magic seldom does; and a record must claim a length.
    """
    start = at + 1
    while end - start >= FIXED_BYTES:
        data = os.pread(fd, min(end - start, SOME_BYTES), start)
        if len(data) < FIXED_BYTES:
            return None
        found = data.find(_MAGIC)
        while found >= 0:
            place = start + found
            is_likely = found + FIXED_BYTES > len(data) or claimed_bytes(data, found)
            if place % RECORDS_AT == 0 and is_likely and some_records(fd, place, end) is not None:
                return place
            found = data.find(_MAGIC, found + 1)
        start += len(data) - len(_MAGIC) + 1  # a magic may lie across two pieces
    return None


def whole_records(fd: int, end: int) -> Iterator[RecordTable | None]:
    """Yield all records of a head, some at a time; None for each damaged stretch, a torn end among them.

    Raises OSError.
    """
    at = PREAMBLE_BYTES
    while at < end:
        table = some_records(fd, at, end)
        yield table
        following = next_record(fd, at, end) if table is None else table.end
        if following is None:
            return
        at = following
