"""A journal lists the objects that a keeper holds of a namespace: an append-only sequence of entries. Pure.

All little endian, each entry a multiple of 8 bytes:

     0  4B   magic      "KVKJ"
     4  u32  change     see `JournalChange`
     8  u32  bytes      of the payload, from byte 40 on
    12  u32  stamp      second of the change
    16  u64  slab       its number, or 0
    24  u32  rows       in the payload
    28  u32  version    of the format: 1
    32  u64  check      XXH3 of the payload, seeded with the XXH3 of bytes 0 to 32, seeded with the entry's place
    40  ADDED: a row of 128 bytes per object, then the digests of all; REMOVED: places of rows, u64 each; USED: page
        hashes

A row, of fixed size so that an attaching client decodes all rows at once:

     0  u64  offset     of the payload in the slab
     8  u64  bytes      of the payload
    16  u64  digests    place of its cells' digests, 8 bytes each; with `cells` 0, place of the row that has them
    24  32B  page hash
    56  64B  part       as in a record of a head file
   120  u32  stamp      second of the last use or of the write
   124  u32  cells      0 for an object carried over from another slab

A place is `base` plus a byte offset in the journal. A journal's `base` is the end of its predecessor, so that rows of
successive journals differ in place.
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

#: The version of entries that this release writes and reads.
JOURNAL = 1

_ROW = np.dtype(
    [
        *[(name, "<u8") for name in ("offset", "nbytes", "digests")],
        *[("page", "u1", 32), ("part", "<u8", 8), ("stamp", "<u4"), ("cells", "<u4")],
    ]
)
ROW_BYTES = _ROW.itemsize


class JournalChange(IntEnum):
    """A kind of entry.

    ADDED, REMOVED: objects of a slab. DROPPED: a slab with its objects. USED: pages were read. ENDED: a new journal
    replaces this one. PROVED: every object of a sealed slab matches its digests.
    """

    ADDED = 1
    REMOVED = 2
    DROPPED = 3
    USED = 4
    ENDED = 5
    PROVED = 6


class JournalEntry(msgspec.Struct, frozen=True):
    """A decoded entry. `at`: the place of its payload, which begins with `rows` rows."""

    change: JournalChange
    at: int
    stamp: int
    slab: int
    rows: int
    payload: memoryview

    @property
    def end(self) -> int:
        """Place of the next entry."""
        return self.at + len(self.payload)


@dataclass(frozen=True, slots=True)
class AddedObject:
    """The fields of a row. `digests`: the bytes, or the place of the row that has them."""

    offset: int
    nbytes: int
    page: bytes
    part: PartKey
    stamp: int
    digests: bytes | int


def encode_entry(
    change: JournalChange, at: int, stamp: int, slab: int = 0, payload: bytes = b"", rows: int = 0
) -> bytes:
    """Encode an entry to be written at place `at`."""
    head = _HEAD.pack(_MAGIC, change, len(payload), stamp, slab, rows, JOURNAL)
    return head + _check(head, payload, at).to_bytes(8, "little") + payload


def _check(head: bytes | memoryview, payload: bytes | memoryview, at: int) -> int:
    return xxh3_64_intdigest(payload, xxh3_64_intdigest(head, at))


def encode_added(objects: Sequence[AddedObject], at: int, stamp: int, slab: int) -> bytes:
    """Encode an ADDED entry for place `at`, whose rows are at `places_of(at, len(objects))`."""
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
    """Return the places of the `count` rows of an entry at place `at`."""
    return at + ENTRY_BYTES + np.arange(count, dtype=np.int64) * ROW_BYTES


def decode_entries(data: bytes, at: int) -> Iterator[JournalEntry]:
    """Yield the complete entries of `data`, which begins at place `at`; stop at an incomplete one.

    Raises ValueError for a foreign or damaged entry, or one of another version.
    """
    start, view = 0, memoryview(data)
    while start + ENTRY_BYTES <= len(data):
        magic, change, nbytes, stamp, slab, rows, version = _HEAD.unpack_from(data, start)
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
        if version != JOURNAL:
            raise ValueError(f"an entry of version {version} at {at + start} of a journal; this side reads {JOURNAL}")
        yield JournalEntry(JournalChange(change), at + body, stamp, slab, rows, payload)
        start = body + nbytes


def table_of(entries: Sequence[JournalEntry]) -> RecordTable:
    """Return the objects of ADDED `entries`, in order. Raises ValueError if a row names no part."""
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
    """Return the distinct parts, and each row's index in them. Raises ValueError if a row names no part.

    Only rows that differ from their predecessor are decoded, because neighbours mostly share a part.
    """
    changes = np.flatnonzero(np.concatenate([[True], (raw[1:] != raw[:-1]).any(1)]))
    numbers: dict[bytes, int] = {}
    which = [numbers.setdefault(raw[row].tobytes(), len(numbers)) for row in changes.tolist()]
    parts = [part for each in numbers if (part := decode_part(each))]
    if len(parts) < len(numbers):
        raise ValueError("a row of a journal that names no part")
    return tuple(parts), np.repeat(which, np.diff(changes, append=len(raw))).astype(np.int64)


def removed_places(entry: JournalEntry) -> list[int]:
    """Return the places of the rows in a REMOVED entry. Raises ValueError for a negative place."""
    places = np.frombuffer(entry.payload, "<i8")
    if (places < 0).any():
        raise ValueError(f"an entry of a journal at {entry.at} that removes what is at no place")
    return places.tolist()


def runs_of(entries: Iterable[JournalEntry]) -> list[tuple[str, slice]]:
    """Return the slab name of each entry, and the slice of its rows in `table_of(entries)`."""
    runs, first = list[tuple[str, slice]](), 0
    for entry in entries:
        runs.append((slab_name(entry.slab), slice(first, first + entry.rows)))
        first += entry.rows
    return runs


def page_and_digests(read: Callable[[int, int], bytes], place: int) -> tuple[bytes, bytes]:
    """Return page hash and digests of the row at `place`, or two empty bytes if no row is there.

    `read(place, nbytes)` returns journal bytes. Carried objects are followed to the row that has the digests.
    """
    page, digests, cells = b"", place, 0
    while not cells:
        raw, at = read(digests, ROW_BYTES), digests
        if len(raw) < ROW_BYTES:
            return b"", b""
        (row,) = np.frombuffer(raw, _ROW)
        page, digests, cells = row["page"].tobytes(), int(row["digests"]), int(row["cells"])
        if not cells and digests >= at:  # a carried row always refers back
            return b"", b""
    return page, read(digests, cells * DIGEST_BYTES)


def slab_name(number: int) -> str:
    """Return a slab's name in an index.

    >>> slab_name(7), slab_number(slab_name(7))
    ('0000000000000007', 7)
    """
    return f"{number:016x}"


def slab_number(name: str) -> int:
    """Return the slab number of a name."""
    return int(name, 16)
