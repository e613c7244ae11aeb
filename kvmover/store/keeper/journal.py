"""A journal says what a keeper has of a namespace: entries that are appended and never change. Pure.

All little endian, each entry a multiple of 8 bytes:

     0  4B   magic      "KVKJ"
     4  u32  change     see `JournalChange`
     8  u32  bytes      of what follows byte 24
    12  u32  stamp      second of the change
    16  u64  slab       its number; 0 where none is meant
    24  ADDED: records of objects, as in a head file, seeded with their places in the journal; REMOVED: their places,
        u64 each; USED: page hashes

A place is a byte of the journal counted from its `base`, where the one before ended: no two records of a namespace have
one place, whichever journal they are in.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum

import msgspec

_HEAD = struct.Struct("<4sIIIQ")
_MAGIC = b"KVKJ"
ENTRY_BYTES = _HEAD.size


class JournalChange(IntEnum):
    """Objects were ADDED to a slab or REMOVED from it; a slab was DROPPED; pages were USED; the journal has ENDED, and
    another says all that is so now.
    """

    ADDED = 1
    REMOVED = 2
    DROPPED = 3
    USED = 4
    ENDED = 5


class JournalEntry(msgspec.Struct, frozen=True):
    """One change. `at`: the place of its payload."""

    change: JournalChange
    at: int
    stamp: int
    slab: int
    payload: bytes


def encode_entry(change: JournalChange, stamp: int, slab: int = 0, payload: bytes = b"") -> bytes:
    """An entry, whole."""
    return _HEAD.pack(_MAGIC, change, len(payload), stamp, slab) + payload


def decode_entries(data: bytes, at: int) -> Iterator[JournalEntry]:
    """The whole entries that `data` begins with, at place `at`. Raises ValueError for what is none."""
    start = 0
    while start + ENTRY_BYTES <= len(data):
        magic, change, nbytes, stamp, slab = _HEAD.unpack_from(data, start)
        if magic != _MAGIC or nbytes % 8:
            raise ValueError(f"no entry of a journal at {at + start}")
        end = start + ENTRY_BYTES + nbytes
        if end > len(data):
            return
        yield JournalEntry(
            JournalChange(change), at + start + ENTRY_BYTES, stamp, slab, data[start + ENTRY_BYTES : end]
        )
        start = end


def slab_name(number: int) -> str:
    """How an index names a slab.

    >>> slab_name(7), slab_number(slab_name(7))
    ('0000000000000007', 7)
    """
    return f"{number:016x}"


def slab_number(name: str) -> int:
    """The number that a name stands for."""
    return int(name, 16)
