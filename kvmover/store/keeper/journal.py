"""A journal says what a keeper has of a namespace: entries that are appended and never change. Pure.

All little endian, each entry a multiple of 8 bytes:

     0  4B   magic      "KVKJ"
     4  u32  change     see `JournalChange`
     8  u32  bytes      of what follows byte 40
    12  u32  stamp      second of the change
    16  u64  slab       its number; 0 where none is meant
    24  u32  rows       of what follows
    28  u32  0
    32  u64  check      XXH3 of what follows, seeded with the XXH3 of these bytes up to here, seeded with their place
    40  ADDED: a row of 128 bytes an object, and then the digests of all; REMOVED: places of rows, u64 each; USED: page
        hashes

A row, so that who attaches takes all of them in at once:

     0  u64  offset     of the payload in the slab
     8  u64  bytes      of the payload
    16  u64  digests    place of the digests of its cells, 8 bytes each; without cells, of the row that has them
    24  32B  page hash
    56  64B  part       as in a record of a head file
   120  u32  stamp      second of the last use or of the write
   124  u32  cells      0 of an object that was carried to another slab

A place is a byte of the journal counted from its `base`, where the one before ended: no two rows of a namespace have
one place, whichever journal they are in.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvmover.store.part import PartKey
from kvmover.store.record import DIGEST_BYTES, LIVE, RecordTable, decode_part, encode_part

_HEAD = struct.Struct("<4sIIIQII")
_MAGIC = b"KVKJ"
ENTRY_BYTES = _HEAD.size + 8

_ROW = np.dtype(
    [
        *[(name, "<u8") for name in ("offset", "nbytes", "digests")],
        *[("page", "u1", 32), ("part", "<u8", 8), ("stamp", "<u4"), ("cells", "<u4")],
    ]
)
ROW_BYTES = _ROW.itemsize


class JournalChange(IntEnum):
    """Objects were ADDED to a slab or REMOVED from it; a slab was DROPPED; pages were USED; the journal has ENDED, and
    another says all that is so now; a sealed slab was PROVED: all that it has is what its digests say.
    """

    ADDED = 1
    REMOVED = 2
    DROPPED = 3
    USED = 4
    ENDED = 5
    PROVED = 6


class JournalEntry(msgspec.Struct, frozen=True):
    """One change. `at`: the place of its payload, which begins with so many `rows`."""

    change: JournalChange
    at: int
    stamp: int
    slab: int
    rows: int
    payload: memoryview

    @property
    def end(self) -> int:
        """The place of the next entry."""
        return self.at + len(self.payload)


@dataclass(frozen=True, slots=True)
class AddedObject:
    """An object as a row says it. `digests`: or the place of the row that has them."""

    offset: int
    nbytes: int
    page: bytes
    part: PartKey
    stamp: int
    digests: bytes | int


def encode_entry(
    change: JournalChange, at: int, stamp: int, slab: int = 0, payload: bytes = b"", rows: int = 0
) -> bytes:
    """An entry, whole, which goes to place `at`."""
    head = _HEAD.pack(_MAGIC, change, len(payload), stamp, slab, rows, 0)
    return head + _check(head, payload, at).to_bytes(8, "little") + payload


def _check(head: bytes | memoryview, payload: bytes | memoryview, at: int) -> int:
    return xxh3_64_intdigest(payload, xxh3_64_intdigest(head, at))


def encode_added(objects: Sequence[AddedObject], at: int, stamp: int, slab: int) -> bytes:
    """The entry, for place `at`, that adds objects to a slab: their rows are at `places_of`."""
    rows = np.zeros(len(objects), _ROW)
    digests = [b"" if isinstance(each.digests, int) else each.digests for each in objects]
    cells = [len(each) // DIGEST_BYTES for each in digests]
    behind = at + ENTRY_BYTES + rows.nbytes + np.cumsum([0, *cells[:-1]]) * DIGEST_BYTES
    rows["offset"], rows["nbytes"] = [each.offset for each in objects], [each.nbytes for each in objects]
    there = [each.digests if isinstance(each.digests, int) else 0 for each in objects]
    rows["digests"] = np.where(np.array(cells) > 0, behind, there)
    rows["page"] = np.frombuffer(b"".join(each.page for each in objects), np.uint8).reshape(-1, 32)
    rows["part"] = np.frombuffer(b"".join(encode_part(each.part) for each in objects), "<u8").reshape(-1, 8)
    rows["stamp"], rows["cells"] = [each.stamp for each in objects], cells
    payload = rows.tobytes() + b"".join(digests)
    return encode_entry(JournalChange.ADDED, at, stamp, slab, payload, len(objects))


def places_of(at: int, count: int) -> npt.NDArray[np.int64]:
    """Where the rows of an entry at place `at` are."""
    return at + ENTRY_BYTES + np.arange(count, dtype=np.int64) * ROW_BYTES


def decode_entries(data: bytes, at: int) -> Iterator[JournalEntry]:
    """The whole entries that `data` begins with, at place `at`. Raises ValueError for what is none."""
    start, view = 0, memoryview(data)
    while start + ENTRY_BYTES <= len(data):
        magic, change, nbytes, stamp, slab, rows, _ = _HEAD.unpack_from(data, start)
        if magic != _MAGIC or nbytes % 8:
            raise ValueError(f"no entry of a journal at {at + start}")
        body = start + ENTRY_BYTES
        if body + nbytes > len(data):
            return
        check = int.from_bytes(view[start + _HEAD.size : body], "little")
        payload = view[body : body + nbytes]
        fits = rows * ROW_BYTES <= nbytes and bool(rows) == (change == JournalChange.ADDED)
        if not fits or check != _check(view[start : start + _HEAD.size], payload, at + start):
            raise ValueError(f"a damaged entry of a journal at {at + start}")
        yield JournalEntry(JournalChange(change), at + body, stamp, slab, rows, payload)
        start = body + nbytes


def table_of(entries: Sequence[JournalEntry]) -> RecordTable:
    """The objects of all entries that ADDED some, one after the other."""
    counts = [entry.rows for entry in entries]
    rows = np.frombuffer(b"".join(entry.payload[: entry.rows * ROW_BYTES] for entry in entries), _ROW)
    before = np.repeat(np.cumsum([0, *counts[:-1]]), counts)
    at = np.repeat([entry.at for entry in entries], counts) + (np.arange(len(rows)) - before) * ROW_BYTES
    parts, part = _parts_of(np.ascontiguousarray(rows["part"]))
    return RecordTable(
        at=at,
        state=np.full(len(rows), LIVE),
        stamp=rows["stamp"].astype(np.int64),
        offset=rows["offset"].astype(np.int64),
        nbytes=rows["nbytes"].astype(np.int64),
        page=rows["page"],
        part=part,
        parts=parts,
        end=entries[-1].end,
    )


def _parts_of(raw: npt.NDArray[np.uint64]) -> tuple[tuple[PartKey, ...], npt.NDArray[np.int64]]:
    """The parts that rows name, and which of them each does. Raises ValueError for what names none.

    Neighbours mostly name one: only where that changes it is looked at.
    """
    changes = np.flatnonzero(np.concatenate([[True], (raw[1:] != raw[:-1]).any(1)]))
    numbers: dict[bytes, int] = {}
    which = [numbers.setdefault(raw[row].tobytes(), len(numbers)) for row in changes.tolist()]
    parts = [part for each in numbers if (part := decode_part(each))]
    if len(parts) < len(numbers):
        raise ValueError("a row of a journal that names no part")
    return tuple(parts), np.repeat(which, np.diff(changes, append=len(raw))).astype(np.int64)


def removed_places(entry: JournalEntry) -> list[int]:
    """Places of the rows whose objects an entry REMOVED. Raises ValueError for a number that is no place."""
    places = np.frombuffer(entry.payload, "<i8")
    if (places < 0).any():
        raise ValueError(f"an entry of a journal at {entry.at} that removes what is at no place")
    return places.tolist()


def runs_of(entries: Iterable[JournalEntry]) -> list[tuple[str, slice]]:
    """The slab of each entry, and where its objects are in their table."""
    runs, first = list[tuple[str, slice]](), 0
    for entry in entries:
        runs.append((slab_name(entry.slab), slice(first, first + entry.rows)))
        first += entry.rows
    return runs


def page_and_digests(read: Callable[[int, int], bytes], place: int) -> tuple[bytes, bytes]:
    """What the row at a place says, where `read` gives so many bytes from a place on; nothing where there is no row."""
    page, digests, cells = b"", place, 0
    while not cells:
        raw, at = read(digests, ROW_BYTES), digests
        if len(raw) < ROW_BYTES:
            return b"", b""
        (row,) = np.frombuffer(raw, _ROW)
        page, digests, cells = row["page"].tobytes(), int(row["digests"]), int(row["cells"])
        if not cells and digests >= at:  # what was carried was there before
            return b"", b""
    return page, read(digests, cells * DIGEST_BYTES)


def slab_name(number: int) -> str:
    """How an index names a slab.

    >>> slab_name(7), slab_number(slab_name(7))
    ('0000000000000007', 7)
    """
    return f"{number:016x}"


def slab_number(name: str) -> int:
    """The number that a name stands for."""
    return int(name, 16)
