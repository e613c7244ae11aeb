"""The formats of a sealed segment in an object store: head, data, deletions and last uses.

Pure. A head has the record format of file segments and is sealed from the start, with no boot; a present `.head`
implies a complete `.data`. Both are immutable: deletions (`.dead`) and uses (`.used`) are separate objects that any
process may overwrite. A lost race between two writers may forget a deletion or a use, and never invents an object.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvmover.store.boot import NO_BOOT
from kvmover.store.namespace import HASH_BYTES
from kvmover.store.part import PartKey
from kvmover.store.record import (
    BLOCK_BYTES,
    FIXED_BYTES,
    LIVE,
    PREAMBLE_BYTES,
    Kind,
    Preamble,
    RecordTable,
    decode_table,
    encode_mark,
    encode_object,
)
from kvmover.store.stored import StoredObject, padded

HEAD, DATA, DEAD, USED = ".head", ".data", ".dead", ".used"
_NAME = re.compile(r"([0-9a-f]{16}-[0-9]{8})(\.head|\.data|\.dead)")

_DEAD_FORMAT, _USED_FORMAT = b"KVMDEAD1", b"KVMUSED1"
_CHECK = struct.Struct("<Q")
_USE = np.dtype([("page", np.uint8, HASH_BYTES), ("stamp", "<u4")])

#: Last uses that one process publishes: a few MiB.
USES = 1 << 16

Places = npt.NDArray[np.int64]


def segment_name(second: int, writer: bytes, number: int) -> str:
    """Return a segment's name: second of its begin, 4 bytes of writer, number. Later segments sort later.

    >>> segment_name(1_700_000_000, bytes(4), 7)
    '6553f10000000000-00000007'
    """
    return f"{second & 0xFFFFFFFF:08x}{writer[:4].hex()}-{number:08}"


def segment_of(name: str) -> tuple[str, str] | None:
    """Split an object's name into segment and suffix; None if it belongs to no segment."""
    found = _NAME.fullmatch(name)
    return (found[1], found[2]) if found else None


@dataclass(slots=True, eq=False)
class FillingSegment:
    """A segment being filled in memory: payloads padded to whole blocks, and their records.

    `payload` is mapped with all `room_bytes` at once and takes memory only as written, so views of it stay valid.
    """

    name: str
    namespace: bytes
    room_bytes: int
    begun_s: float
    payload: mmap.mmap = field(init=False)
    end: int = 0
    objects: dict[int, StoredObject] = field(default_factory=dict[int, StoredObject])
    _records: dict[int, bytes] = field(default_factory=dict[int, bytes])
    _at: int = PREAMBLE_BYTES

    def __post_init__(self) -> None:
        self.payload = mmap.mmap(-1, self.room_bytes)

    def fits(self, nbytes: int) -> bool:
        """Return True if a payload of `nbytes` has room."""
        return self.end + padded(nbytes) <= self.room_bytes

    def add(self, payload: memoryview, page: bytes, part: PartKey, digests: bytes, stamp: int) -> StoredObject:
        """Append a copy of a payload. Returns its object. Requires `fits(len(payload))`."""
        offset, nbytes = self.end, len(payload)
        assert self.fits(nbytes), f"{nbytes} bytes behind {self.end} of {self.room_bytes}"
        self.payload[offset : offset + nbytes] = payload
        record = encode_object(self._at, stamp, (offset, nbytes), page, part, digests)
        each = StoredObject(self.name, self._at, offset, nbytes, page, part, stamp)
        self._records[self._at] = record
        self.objects[self._at] = each
        self._at += len(record)
        self.end += padded(nbytes)
        return each

    def digests_at(self, record: int) -> bytes:
        """Return the digests of the object whose record begins at byte `record` of the head."""
        return self._records[record][FIXED_BYTES:]

    def data(self) -> memoryview:
        """Return a view of the bytes of `.data`: all payloads."""
        return memoryview(self.payload)[: self.end]

    def head(self) -> bytes:
        """Return the bytes of `.head`: preamble, all records, a SYNCED mark up to `end`, and a SEALED mark."""
        marks = encode_mark(self._at, Kind.SYNCED, self.end)
        sealed = encode_mark(self._at + len(marks), Kind.SEALED, 0)
        return b"".join((Preamble(self.namespace, NO_BOOT).encode(), *self._records.values(), marks, sealed))


@dataclass(frozen=True, slots=True, eq=False)
class SealedSegment:
    """A segment as its head or a catalog lists it. `data_bytes`: size of `.data`; `head_bytes`: size of `.head`.

    `objects`: number of objects written to it; deleted ones may be missing in `table`.
    """

    name: str
    data_bytes: int
    head_bytes: int
    objects: int
    table: RecordTable


def read_head(name: str, data: bytes, namespace: bytes) -> SealedSegment | str:
    """Decode the head of segment `name`. Returns the segment, or the reason to refuse it."""
    found = Preamble.decode(data)
    if found is None:
        return "another format" if Preamble.is_of_another_format(data) else "damaged header"
    if found.namespace != namespace:
        return "foreign namespace"
    table = decode_table(data[PREAMBLE_BYTES:], PREAMBLE_BYTES)
    if not table.sealed or table.end != len(data):
        return "damaged header"
    table = table.where((table.state == LIVE) & (table.offset + table.nbytes <= table.synced))
    return SealedSegment(name, table.synced, len(data), len(table), table)


class Dead:
    """A set of deleted objects of a segment, encoded as one bit per block of `.data` at which a payload may begin."""

    def __init__(self, bits: Iterable[int] = ()) -> None:
        self._blocks = set(bits)

    @classmethod
    def decode(cls, data: bytes) -> Dead | None:
        """Decode the bytes of `.dead`; None if damaged, which counts as no deletions."""
        body = _checked(data, _DEAD_FORMAT)
        if body is None:
            return None
        return cls(np.flatnonzero(np.unpackbits(np.frombuffer(body, np.uint8), bitorder="little")).tolist())

    def encode(self) -> bytes:
        """Encode as the bytes of `.dead`."""
        bits = np.zeros(max(self._blocks, default=-1) + 1, np.uint8)
        bits[list(self._blocks)] = 1
        return _with_check(_DEAD_FORMAT, np.packbits(bits, bitorder="little").tobytes())

    def kill(self, offsets: Iterable[int]) -> None:
        """Mark the objects whose payloads begin at these bytes of `.data` as deleted."""
        self._blocks.update(offset // BLOCK_BYTES for offset in offsets)

    def join(self, other: Dead) -> None:
        """Add the deletions of `other`."""
        self._blocks |= other._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __ge__(self, other: Dead) -> bool:
        return self._blocks >= other._blocks

    def has(self, offset: int) -> bool:
        """Return True if the object whose payload begins at byte `offset` is deleted."""
        return offset // BLOCK_BYTES in self._blocks

    def among(self, offsets: Places) -> npt.NDArray[np.bool_]:
        """Return a mask of the payloads, by byte offset, that are deleted."""
        return np.isin(offsets // BLOCK_BYTES, list(self._blocks))


def encode_uses(stamps: Mapping[bytes, int]) -> bytes:
    """Encode the latest `USES` last-use times (page hash to seconds) as the bytes of `.used`."""
    latest = sorted(stamps.items(), key=lambda each: each[1])[-USES:]
    rows = np.zeros(len(latest), _USE)
    if latest:
        rows["page"] = np.frombuffer(b"".join(page for page, _ in latest), np.uint8).reshape(-1, HASH_BYTES)
        rows["stamp"] = [stamp for _, stamp in latest]
    return _with_check(_USED_FORMAT, rows.tobytes())


def decode_uses(data: bytes) -> dict[bytes, int]:
    """Decode the bytes of `.used`: page hash to last-use second. Returns an empty dict if damaged."""
    body = _checked(data, _USED_FORMAT)
    if body is None or len(body) % _USE.itemsize:
        return {}
    rows = np.frombuffer(body, _USE)
    pages, stamps = rows["page"].tobytes(), rows["stamp"].tolist()
    return {pages[HASH_BYTES * n : HASH_BYTES * (n + 1)]: stamp for n, stamp in enumerate(stamps)}


def _with_check(magic: bytes, body: bytes) -> bytes:
    whole = magic + body
    return whole + _CHECK.pack(xxh3_64_intdigest(whole))


def _checked(data: bytes, magic: bytes) -> bytes | None:
    whole, check = data[: -_CHECK.size], data[-_CHECK.size :]
    if not data.startswith(magic) or len(data) < len(magic) + _CHECK.size:
        return None
    return whole[len(magic) :] if _CHECK.pack(xxh3_64_intdigest(whole)) == check else None
