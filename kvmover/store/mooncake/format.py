"""What lies in a pool of memory, as keys and bytes: objects with their header and digests, entries of lists. Pure."""

from __future__ import annotations

from functools import lru_cache

from xxhash import xxh3_64_digest, xxh3_128_digest

from kvmover.store.part import PartKey
from kvmover.store.record import (
    DIGEST_BYTES,
    FIXED_BYTES,
    Kind,
    Record,
    decode,
    decode_part,
    encode_object,
    encode_part,
)

#: Payloads begin at multiples of this in their objects.
_ALIGNED = 64

#: A short list has at most so many entries.
ENTRIES = 256


@lru_cache(maxsize=4096)
def part_name(part: PartKey) -> str:
    """What stands for component and box in keys: 16 hexadecimal digits. The header says both in full."""
    return xxh3_128_digest(encode_part(part))[:8].hex()


def object_key(folder: str, page: bytes, part: PartKey) -> str:
    """`folder/page/box`: no rank and no machine is in it."""
    return f"{folder}/{page.hex()}/{part_name(part)}"


def header_bytes(cells: int) -> int:
    """Bytes before the payload of an object of so many cells.

    >>> header_bytes(32), header_bytes(1)
    (448, 192)
    """
    return -(-(FIXED_BYTES + cells * DIGEST_BYTES) // _ALIGNED) * _ALIGNED


def encode_header(page: bytes, part: PartKey, nbytes: int, stamp: int, digests: bytes) -> bytes:
    """The header of an object with `nbytes` bytes of payload: a record at byte 0, padded with zeros."""
    size = header_bytes(part.box.cells)
    return encode_object(0, stamp, (size, nbytes), page, part, digests).ljust(size, b"\0")


def decode_header(raw: bytes, page: bytes, part: PartKey) -> Record | None:
    """The record that an object begins with; None for a damaged one, or one of another page, component or box."""
    record = decode(raw, 0)
    if record is None or record.kind is not Kind.OBJECT or record.offset != header_bytes(part.box.cells):
        return None
    return record if record.page == page and record.part is part else None


def entry_key(name: str, number: int) -> str:
    """Of entry `number` of a list."""
    return f"{name}/{number:02x}"


def encode_box(part: PartKey) -> bytes:
    """An entry of the list of boxes: component and box as a record has them, and their XXH3."""
    raw = encode_part(part)
    return raw + xxh3_64_digest(raw)


def decode_box(entry: bytes) -> PartKey | None:
    """None for a damaged entry."""
    raw = entry[:-8]
    if len(raw) != FIXED_BYTES - 80 or xxh3_64_digest(raw) != entry[-8:]:
        return None
    return decode_part(raw)
