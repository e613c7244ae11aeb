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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvmover.c_core import NATIVE
from kvmover.errors import LayoutError
from kvmover.layout import Span, Stripe
from kvmover.store.namespace import HASH_BYTES
from kvmover.store.part import PageBox, PartKey, part_key

#: Bytes of a digest: XXH3 (64 bits) of a cell, so that a read of some heads and layers can be checked.
#:
#: Measured on one core of a 2-core machine, 16 KiB cells: XXH3 32 GB/s, zlib's CRC-32 6.9, SHA-256 2.1, BLAKE2b 1.5,
#: where a copy into the page cache runs at 3.4 GB/s. It guards against torn, stale and misplaced bytes, not against an
#: adversary with write access to the store.
DIGEST_BYTES = 8

MAGIC = int.from_bytes(b"KVRC", "little")
LIVE, DEAD = int.from_bytes(b"LIVE", "little"), 0
#: Byte offsets of state and stamp in a record.
STATE_AT, STAMP_AT = 8, 12

_OUTER = struct.Struct("<IIIIQ")
_INNER = struct.Struct("<IIQQ32s32s8I")
#: The same for many records at once.
_FIELDS = np.dtype(
    {
        "names": ["bytes", "state", "stamp", "kind", "cells", "offset", "payload", "page", "part"],
        "formats": ["<u4", "<u4", "<u4", "<u4", "<u4", "<u8", "<u8", ("u1", 32), ("<u8", 8)],
        "offsets": [4, 8, 12, 24, 28, 32, 40, 48, 80],
        "itemsize": _OUTER.size + _INNER.size,
    }
)
_CHECKED = np.dtype({"names": ["magic", "bytes", "check"], "formats": ["<u4", "<u4", "<u8"], "offsets": [0, 4, 16]})
Column = npt.NDArray[np.int64]
Truths = npt.NDArray[np.bool_]

#: Odd factors that hash a part's eight words; colliding words are treated as no part.
_MIX = np.array([3, 5, 7, 9, 11, 13, 15, 17], np.uint64) ** np.uint64(21)
#: Records of a head begin at multiples of this.
RECORDS_AT = 8

#: Bytes of a record without digests.
FIXED_BYTES = _OUTER.size + _INNER.size

#: Most cells of an object: 1024 heads x 1024 layers, 8 MiB of digests a record.
_CELLS = 1 << 20

#: Alignment of payload offsets, and their upper bound.
BLOCK_BYTES = 4096
_FAR = 1 << 43

_PREAMBLE = struct.Struct("<8sII32s16s8xQ")
_FORMAT = b"KVMOVER1"
PREAMBLE_BYTES = _PREAMBLE.size


class Kind(IntEnum):
    """A kind of record: an object, payload below an offset is durable, or the end of the segment."""

    OBJECT = 1
    SYNCED = 2
    SEALED = 3


@dataclass(frozen=True, slots=True)
class Preamble:
    """The first 80 bytes of a head file: the namespace of its objects, and the boot on which they were written."""

    namespace: bytes
    boot: bytes

    def encode(self) -> bytes:
        """Returns PREAMBLE_BYTES bytes, of which the last eight are the XXH3 of the others."""
        head = _PREAMBLE.pack(_FORMAT, 1, PREAMBLE_BYTES, self.namespace, self.boot, 0)
        return head[:-8] + xxh3_64_intdigest(head[:-8]).to_bytes(8, "little")

    @classmethod
    def decode(cls, data: bytes) -> Preamble | None:
        """Decode a preamble; None if it is damaged or of another format."""
        if len(data) < PREAMBLE_BYTES:
            return None
        magic, version, nbytes, namespace, boot, check = _PREAMBLE.unpack_from(data)
        if (magic, version, nbytes) != (_FORMAT, 1, PREAMBLE_BYTES):
            return None
        return cls(namespace, boot) if check == xxh3_64_intdigest(data[: PREAMBLE_BYTES - 8]) else None

    @staticmethod
    def is_of_another_format(data: bytes) -> bool:
        """Returns True if a preamble is whole and of another format.

        Magic, number and check stay in place in every format, so that no release takes a later one for damaged.
        """
        if len(data) < PREAMBLE_BYTES:
            return False
        magic, version, *_, check = _PREAMBLE.unpack_from(data)
        is_whole = magic[:7] == _FORMAT[:7] and check == xxh3_64_intdigest(data[: PREAMBLE_BYTES - 8])
        return is_whole and (magic, version) != (_FORMAT, 1)


@dataclass(frozen=True, slots=True)
class Record:
    """A record at byte `at` of its head file."""

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
        """Returns the bytes of the record in its head file; the next record follows."""
        return FIXED_BYTES + len(self.digests)


_PART = struct.Struct("<32s8I")


def encode_part(part: PartKey) -> bytes:
    """Returns the 64 bytes of a record that name its part."""
    box = part.box
    spans = (box.heads.start, box.heads.count, box.layers.start, box.layers.count)
    return _PART.pack(part.component, *spans, *box.tokens.quad())


@lru_cache(4096)
def decode_part(raw: bytes) -> PartKey | None:
    """Decode the 64 bytes that name a part, or None. Cached: a store has few parts."""
    component, heads, head_count, layers, layer_count, *tokens = _PART.unpack(raw)
    try:
        box = PageBox(Span(heads, head_count), Span(layers, layer_count), Stripe(*tokens))
    except LayoutError:
        return None
    return part_key(component, box)


def encode_object(at: int, stamp: int, place: tuple[int, int], page: bytes, part: PartKey, digests: bytes) -> bytes:
    """Encode an object's header for byte `at` of the head. `place`: offset and bytes of the payload."""
    box = part.box
    cells = len(digests) // DIGEST_BYTES
    tokens = box.tokens.quad()
    spans = (box.heads.start, box.heads.count, box.layers.start, box.layers.count)
    inner = _INNER.pack(Kind.OBJECT, cells, *place, page, part.component, *spans, *tokens) + digests
    return _seal(at, stamp, inner)


def encode_mark(at: int, kind: Kind, offset: int) -> bytes:
    """Encode a mark for byte `at`: SYNCED up to byte `offset`, or SEALED."""
    return _seal(at, 0, _INNER.pack(kind, 0, offset, 0, bytes(HASH_BYTES), bytes(HASH_BYTES), *([0] * 8)))


def _seal(at: int, stamp: int, inner: bytes) -> bytes:
    return _OUTER.pack(MAGIC, _OUTER.size + len(inner), LIVE, stamp, xxh3_64_intdigest(inner, at)) + inner


def decode(data: bytes | memoryview, at: int, base: int = 0) -> Record | None:
    """Decode the record at byte `at` of a file with bytes `data` from `base` on; None if not whole."""
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
        part, digests = decode_part(inner[56:120]), inner[_INNER.size :]
        if part is None or not 0 < cells <= _CELLS or len(digests) != cells * DIGEST_BYTES:
            return None
        if part.box.cells != cells or not payload or payload % cells:
            return None
        return Record(Kind.OBJECT, at, state, stamp, offset, payload, page, part, digests)
    if kind not in (Kind.SYNCED, Kind.SEALED) or nbytes != FIXED_BYTES:
        return None
    return Record(Kind(kind), at, state, stamp, offset, 0, b"", None, b"")


def claimed_bytes(data: bytes, at: int) -> int:
    """Returns the unverified length claimed by a record at byte `at` of `data`; 0 if no record can begin there."""
    if at + FIXED_BYTES > len(data):
        return 0
    magic, nbytes, _, _, _ = _OUTER.unpack_from(data, at)
    kind, cells, *_ = _INNER.unpack_from(data, at + _OUTER.size)
    is_possible = (
        magic == MAGIC
        and Kind.OBJECT <= kind <= Kind.SEALED
        and cells <= _CELLS
        and nbytes == FIXED_BYTES + cells * DIGEST_BYTES
    )
    return nbytes if is_possible else 0


def decode_all(data: bytes, base: int) -> Iterator[Record]:
    """Yield whole records from byte `base` on, up to the first damaged one."""
    at = base
    while record := decode(data, at, base):
        yield record
        at += record.record_bytes


@dataclass(frozen=True, slots=True, eq=False)
class RecordTable:
    """The objects among whole records, a column for each field: a million decode in about a second.

    `part[i]` indexes `parts`. `end`: the byte after the last whole record. `synced`, `sealed`: from marks, 0 and False
    without a mark.
    """

    at: Column
    state: Column
    stamp: Column
    offset: Column
    nbytes: Column
    page: npt.NDArray[np.uint8]
    part: Column
    parts: tuple[PartKey, ...]
    end: int
    synced: int = 0
    sealed: bool = False

    def __len__(self) -> int:
        return len(self.at)

    def where(self, chosen: npt.NDArray[np.bool_]) -> RecordTable:
        """Returns the objects for which `chosen` is true."""
        return replace(
            self,
            at=self.at[chosen],
            state=self.state[chosen],
            stamp=self.stamp[chosen],
            offset=self.offset[chosen],
            nbytes=self.nbytes[chosen],
            page=self.page[chosen],
            part=self.part[chosen],
        )


def decode_table(data: bytes, base: int) -> RecordTable:
    """Decode whole records from byte `base` on, up to the first damaged one, in columns."""
    starts = _whole_records(data, base)
    fixed = _fixed(data, starts)
    kinds, cells, nbytes = fixed["kind"].astype(np.int64), fixed["cells"].astype(np.int64), fixed["bytes"]
    payload, is_object = fixed["payload"].astype(np.int64), kinds == Kind.OBJECT
    parts, part, part_cells = _parts_of(fixed["part"])
    good: Truths = (
        (cells > 0) & (cells <= _CELLS) & (nbytes == FIXED_BYTES + cells * DIGEST_BYTES) & (part_cells == cells)
    )
    offsets = fixed["offset"]
    good &= (offsets % BLOCK_BYTES == 0) & (offsets < _FAR)
    good &= (payload > 0) & (payload < _FAR) & (payload % np.maximum(cells, 1) == 0)
    good = np.where(is_object, good, np.isin(kinds, (Kind.SYNCED, Kind.SEALED)) & (nbytes == FIXED_BYTES))
    count = len(good) if bool(good.all()) else int(np.argmin(good))
    fixed, starts, is_object, kinds = fixed[:count], starts[:count], is_object[:count], kinds[:count]
    objects = np.flatnonzero(is_object)
    offsets = offsets[:count].astype(np.int64)
    return RecordTable(
        at=starts[objects] + base,
        state=fixed["state"][objects].astype(np.int64),
        stamp=fixed["stamp"][objects].astype(np.int64),
        offset=offsets[objects],
        nbytes=payload[:count][objects],
        page=fixed["page"][objects],
        part=part[:count][objects],
        parts=parts,
        end=int(starts[-1] + fixed["bytes"][-1]) + base if count else base,
        synced=int(offsets[kinds == Kind.SYNCED].max(initial=0)),
        sealed=bool((kinds == Kind.SEALED).any()),
    )


def _whole_records(data: bytes, base: int) -> Column:
    """Returns the start offsets in `data` of consecutive records with right length and checksum."""
    runs, at = [np.zeros(0, np.int64)], 0
    while run := _whole_run(data, at, base):
        runs.append(np.arange(run.start, run.stop, run.step, dtype=np.int64))
        at = run.stop
    return np.concatenate(runs)


def _whole_run(data: bytes, at: int, base: int) -> range:
    """Returns the start offsets of whole records of one length from byte `at` on, as a range."""
    nothing = range(0)
    if at + FIXED_BYTES > len(data):
        return nothing
    _, nbytes, _, _, _ = _OUTER.unpack_from(data, at)
    most = (len(data) - at) // nbytes if nbytes >= FIXED_BYTES else 0
    if not most:
        return nothing
    outer = np.ndarray(most, _CHECKED, data, at, nbytes)
    alike = (outer["magic"] == MAGIC) & (outer["bytes"] == nbytes)
    count = most if bool(alike.all()) else int(np.argmin(alike))
    places = range(at, at + count * nbytes, nbytes)
    # No Python loop over records: this is a quarter of the time of opening.
    firsts = range(at + _OUTER.size, places.stop + _OUTER.size, nbytes)
    inner = map(memoryview(data).__getitem__, map(slice, firsts, range(at + nbytes, places.stop + nbytes, nbytes)))
    digests = map(xxh3_64_intdigest, inner, range(base + at, base + places.stop, nbytes))
    checks = np.fromiter(digests, np.uint64, count)
    right = outer["check"][:count] == checks
    whole = count if bool(right.all()) else int(np.argmin(right))
    return places[:whole] if whole else nothing


#: Records gathered from a head at a time: an index for each of their bytes is made meanwhile.
_FEW = 4096


def _fixed(data: bytes, starts: Column) -> npt.NDArray[np.void]:
    """Returns the fixed fields of each record."""
    steps = np.diff(starts)
    if len(steps) and bool((steps == steps[0]).all()):  # all but the last are of one length
        return np.ndarray(len(starts), _FIELDS, data, int(starts[0]), int(steps[0])).copy()
    found = np.zeros(len(starts), _FIELDS)
    raw, rows = np.frombuffer(data, np.uint8), found.view(np.uint8).reshape(len(starts), FIXED_BYTES)
    for first in range(0, len(starts), _FEW):
        few = starts[first : first + _FEW]
        rows[first : first + _FEW] = raw[few[:, None] + np.arange(FIXED_BYTES)]
    return found


def _parts_of(raw: npt.NDArray[np.uint64]) -> tuple[tuple[PartKey, ...], Column, Column]:
    """Returns the distinct parts, the part index of each record, and its cells: 0 if it names no part."""
    mixed: Column = (raw * _MIX).sum(1, dtype=np.uint64)
    _, first, which = np.unique(mixed, return_index=True, return_inverse=True)
    which = which.reshape(-1)
    alike = (raw == raw[first][which]).all(1) if len(raw) else np.zeros(0, bool)
    known = [decode_part(raw[each].tobytes()) for each in first]
    cells = np.array([part.box.cells if part else 0 for part in known], np.int64)
    nobody = part_key(bytes(HASH_BYTES), PageBox(Span(0, 1), Span(0, 1), Stripe(0, 1, 1, 1)))
    return tuple(part or nobody for part in known), which, np.where(alike, cells[which], 0)


def tables(payloads: Sequence[memoryview], cells: int) -> list[bytes]:
    """Returns the digests of each payload's `cells` equal cells, 8 bytes each, little endian.

    The C core takes all payloads in one call, without Python's lock.
    """
    nbytes = cells * DIGEST_BYTES
    if NATIVE is not None:
        digests = NATIVE.cell_digests(list(payloads), cells)
        return [digests[at : at + nbytes] for at in range(0, len(digests), nbytes)]
    return [_digests(payload, cells) for payload in payloads]


def _digests(payload: memoryview, cells: int) -> bytes:
    size = len(payload) // cells
    numbers = [xxh3_64_intdigest(payload[cell * size : (cell + 1) * size]) for cell in range(cells)]
    return struct.pack(f"<{cells}Q", *numbers)


def table(payload: memoryview, cells: int) -> bytes:
    """Returns the digests of one payload, as `tables` does."""
    return tables([payload], cells)[0]


def holds(payload: memoryview, count: int, digests: bytes, first: int) -> bool:
    """Returns True if the `count` cells of `payload` match digests `first` to `first + count` of a table."""
    return table(payload, count) == digests[first * DIGEST_BYTES : (first + count) * DIGEST_BYTES]
