"""A record is one entry of a segment's head file: an object's header with its digests, or another mark. Pure.

All little endian, each record a multiple of 8 bytes from a multiple of 8:

     0  u32  magic              "KVRC"
     4  u32  bytes              of the whole record
     8  u32  state              LIVE; anything else is dead. Changes in place.
    12  u32  stamp              second of the last read or of the write. Changes in place.
    16  u64  check              XXH3 of all bytes from 24 on, seeded with the record's place in its file
    24  u32  kind               1 object, 2 synced, 3 sealed
    28  u32  cells              of an object
    32  u64  offset             of the payload in the data file; of kind 2: all payload below is on stable storage
    40  u64  payload bytes
    48  32B  page hash
    80  32B  digest of namespace and component
   112  u32  heads: first, count; layers: first, count; tokens: start, count, step, width
   144  u64  digest of each cell

The seed ties a record to its place, so that a copy of one at another place, or an old block that the file system brings
back, is no record.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from xxhash import xxh3_64_intdigest

from kvmover.c_core import NATIVE
from kvmover.errors import LayoutError
from kvmover.layout import Span, Stripe
from kvmover.store.namespace import HASH_BYTES
from kvmover.store.part import PageBox, PartKey, part_key

#: Bytes of one digest: XXH3 (64 bits) of a cell, so that who reads some heads and layers can check them.
#:
#: Measured on one core of a 2-core machine, 16 KiB cells: XXH3 32 GB/s, zlib's CRC-32 6.9, SHA-256 2.1, BLAKE2b 1.5,
#: where a copy into the page cache runs at 3.4 GB/s. It guards against torn, stale and misplaced bytes, not against an
#: adversary who can write to the store.
DIGEST_BYTES = 8

#: The C core takes the digests of all cells of a payload in one call, without Python's lock where that pays; the xxhash
#: package takes a call a cell, which costs more than the hashing below 4 KiB. Cells up to this long are the package's.
SHORT_CELL_BYTES = 240

MAGIC = int.from_bytes(b"KVRC", "little")
LIVE, DEAD = int.from_bytes(b"LIVE", "little"), 0
#: Where state and stamp are in a record.
STATE_AT, STAMP_AT = 8, 12

_OUTER = struct.Struct("<IIIIQ")
_INNER = struct.Struct("<IIQQ32s32s8I")
#: Bytes of a record without digests.
FIXED_BYTES = _OUTER.size + _INNER.size

#: No object has more cells: 8 Mi of digests a record, 1024 heads x 1024 layers.
_CELLS = 1 << 20

_PREAMBLE = struct.Struct("<8sII32s16s8xQ")
_FORMAT = b"KVMOVER1"
PREAMBLE_BYTES = _PREAMBLE.size


class Kind(IntEnum):
    """What a record says: an object is there, payload below an offset is on stable storage, or nothing follows."""

    OBJECT = 1
    SYNCED = 2
    SEALED = 3


@dataclass(frozen=True, slots=True)
class Preamble:
    """The first 80 bytes of a head file: whose objects these are, and on which boot of which machine written."""

    namespace: bytes
    boot: bytes

    def encode(self) -> bytes:
        """PREAMBLE_BYTES bytes, the last eight of which are their XXH3."""
        head = _PREAMBLE.pack(_FORMAT, 1, PREAMBLE_BYTES, self.namespace, self.boot, 0)
        return head[:-8] + xxh3_64_intdigest(head[:-8]).to_bytes(8, "little")

    @classmethod
    def decode(cls, data: bytes) -> Preamble | None:
        """None for what is no preamble of this version."""
        if len(data) < PREAMBLE_BYTES:
            return None
        magic, version, nbytes, namespace, boot, check = _PREAMBLE.unpack_from(data)
        if (magic, version, nbytes) != (_FORMAT, 1, PREAMBLE_BYTES):
            return None
        return cls(namespace, boot) if check == xxh3_64_intdigest(data[: PREAMBLE_BYTES - 8]) else None


@dataclass(frozen=True, slots=True)
class Record:
    """One record, at byte `at` of its head file."""

    kind: Kind
    at: int
    state: int
    stamp: int
    offset: int
    nbytes: int
    page: bytes
    part: PartKey | None
    digests: bytes

    @property
    def record_bytes(self) -> int:
        """Bytes that the record takes of its head file; the next one follows."""
        return FIXED_BYTES + len(self.digests)


_BOXES: dict[bytes, PartKey | None] = {}


def _part(raw: bytes) -> PartKey | None:
    """The part that 64 bytes of a record name, or None. There are few in a store: each is made once."""
    if raw not in _BOXES:
        if len(_BOXES) > 4096:
            _BOXES.clear()
        component, *numbers = struct.unpack("<32s8I", raw)
        try:
            heads, layers = Span(*numbers[0:2]), Span(*numbers[2:4])
            _BOXES[raw] = part_key(component, PageBox(heads, layers, Stripe(*numbers[4:8])))
        except LayoutError:
            _BOXES[raw] = None
    return _BOXES[raw]


def encode_object(at: int, stamp: int, place: tuple[int, int], page: bytes, part: PartKey, digests: bytes) -> bytes:
    """The header of an object whose record goes to byte `at`. `place`: offset and bytes of the payload."""
    box = part.box
    cells = len(digests) // DIGEST_BYTES
    tokens = box.tokens.quad()
    spans = (box.heads.start, box.heads.count, box.layers.start, box.layers.count)
    inner = _INNER.pack(Kind.OBJECT, cells, *place, page, part.component, *spans, *tokens) + digests
    return _seal(at, stamp, inner)


def encode_mark(at: int, kind: Kind, offset: int) -> bytes:
    """SYNCED up to `offset`, or SEALED."""
    return _seal(at, 0, _INNER.pack(kind, 0, offset, 0, bytes(HASH_BYTES), bytes(HASH_BYTES), *([0] * 8)))


def _seal(at: int, stamp: int, inner: bytes) -> bytes:
    return _OUTER.pack(MAGIC, _OUTER.size + len(inner), LIVE, stamp, xxh3_64_intdigest(inner, at)) + inner


def decode(data: bytes | memoryview, at: int, base: int = 0) -> Record | None:
    """The record at byte `at` of a file, whose bytes from `base` on are `data`; None where there is no whole one."""
    start = at - base
    if start < 0 or start + FIXED_BYTES > len(data):
        return None
    magic, nbytes, state, stamp, check = _OUTER.unpack_from(data, start)
    if magic != MAGIC or nbytes < FIXED_BYTES or start + nbytes > len(data):
        return None
    inner = bytes(data[start + _OUTER.size : start + nbytes])
    if xxh3_64_intdigest(inner, at) != check:
        return None
    kind, cells, offset, payload, page, *_ = _INNER.unpack_from(inner)
    if kind == Kind.OBJECT:
        part, digests = _part(inner[56:120]), inner[_INNER.size :]
        if part is None or not 0 < cells <= _CELLS or len(digests) != cells * DIGEST_BYTES:
            return None
        if part.box.cells != cells or not payload or payload % cells:
            return None
        return Record(Kind.OBJECT, at, state, stamp, offset, payload, page, part, digests)
    if kind not in (Kind.SYNCED, Kind.SEALED) or nbytes != FIXED_BYTES:
        return None
    return Record(Kind(kind), at, state, stamp, offset, 0, b"", None, b"")


def decode_all(data: bytes, base: int) -> Iterator[Record]:
    """Whole records from byte `base` on, up to the first that is not."""
    at = base
    while record := decode(data, at, base):
        yield record
        at += record.record_bytes


def next_whole(data: bytes, at: int, base: int) -> int | None:
    """Where the next whole record after byte `at` begins: what is left of a head file with a damaged middle."""
    magic = MAGIC.to_bytes(4, "little")
    start = data.find(magic, at - base + 1)
    while start >= 0:
        if decode(data, base + start, base):
            return base + start
        start = data.find(magic, start + 1)
    return None


def table(payload: memoryview, cells: int) -> bytes:
    """The digests of `cells` equal cells of `payload`, 8 bytes each, little endian."""
    if NATIVE is not None and len(payload) > SHORT_CELL_BYTES * cells:
        return NATIVE.cell_digests(payload, cells)
    if cells == 1:
        return xxh3_64_intdigest(payload).to_bytes(8, "little")
    size = len(payload) // cells
    numbers = [xxh3_64_intdigest(payload[at : at + size]) for at in range(0, cells * size, size)]
    return struct.pack(f"<{cells}Q", *numbers)


def holds(payload: memoryview, count: int, digests: bytes, first: int) -> bool:
    """Whether `payload`, `count` cells, is what digests `first` to `first + count` of a table were taken of."""
    return table(payload, count) == digests[first * DIGEST_BYTES : (first + count) * DIGEST_BYTES]
