"""A compacted catalog is one object that lists the records of many heads without digests, for a fast start.

Pure. A million objects take tens of MB in a catalog and 600 MB in heads; a read fetches digests from the heads by
range. A catalog is written once under a fresh name and may be stale: segments missing from it are read by their heads,
and readers skip its removed segments.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvmover.prepared import prepared
from kvmover.store.bucket.sealed import SealedSegment
from kvmover.store.namespace import HASH_BYTES
from kvmover.store.part import PartKey
from kvmover.store.record import BLOCK_BYTES, LIVE, RECORDS_AT, RecordTable, decode_part, encode_part

CATALOG = ".catalog"

_FORMAT = b"KVMCAT01"
_CHECK_BYTES = 8
#: Segments outside all catalogs that make a new catalog worth writing.
LOOSE = 32

Numbers = npt.NDArray[np.int64]


class _Listed(msgspec.Struct, frozen=True):
    """A segment of a catalog. `rows`: its rows in the columns; `objects`: objects once written to it, dead included."""

    name: str
    data_bytes: int
    head_bytes: int
    objects: int
    rows: int


@prepared
class _Contents(msgspec.Struct, frozen=True):
    """The part of a catalog before its columns.

    `kinds`: (index in `parts`, payload bytes). `pages`: distinct hashes. `columns`: compressed bytes of each column.
    """

    namespace: bytes
    segments: list[_Listed]
    parts: list[bytes]
    kinds: list[tuple[int, int]]
    pages: int
    columns: list[int]


def encode_catalog(namespace: bytes, segments: Sequence[SealedSegment]) -> bytes:
    """Encode `segments` of one namespace as a catalog; their objects keep the order of the heads."""
    tables = [each.table for each in segments]
    parts: dict[PartKey, int] = {}
    kinds: dict[tuple[int, int], int] = {}
    numbered = [_kinds(table, parts, kinds) for table in tables]
    pages = np.concatenate([table.page for table in tables] or [np.zeros((0, HASH_BYTES), np.uint8)])
    names, rows = _told_apart(pages)
    columns = [
        _delta([table.at // RECORDS_AT for table in tables]),
        _delta([table.offset // BLOCK_BYTES for table in tables]),
        _packed([table.stamp for table in tables], "<u4"),
        _packed(numbered, "<u4"),
        _delta([rows]),
        names.tobytes(),
    ]
    contents = _Contents(
        namespace,
        [_Listed(each.name, each.data_bytes, each.head_bytes, each.objects, len(each.table)) for each in segments],
        [encode_part(part) for part in parts],
        list(kinds),
        len(names),
        [len(column) for column in columns],
    )
    head = msgspec.msgpack.encode(contents)
    whole = b"".join((_FORMAT, len(head).to_bytes(8, "little"), head, *columns))
    return whole + xxh3_64_intdigest(whole).to_bytes(_CHECK_BYTES, "little")


def _kinds(table: RecordTable, parts: dict[PartKey, int], kinds: dict[tuple[int, int], int]) -> Numbers:
    """Return each row's index in `kinds`, adding new parts and (part, bytes) kinds to the shared dicts."""
    numbers = np.array([parts.setdefault(part, len(parts)) for part in table.parts], np.int64)
    pairs, which = np.unique(np.stack([numbers[table.part], table.nbytes]), axis=1, return_inverse=True)
    known = [kinds.setdefault((int(part), int(nbytes)), len(kinds)) for part, nbytes in pairs.T.tolist()]
    return np.array(known, np.int64)[which.reshape(-1)]


def _told_apart(pages: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.void], Numbers]:
    """Return the distinct hashes in order of first appearance, and each row's index in them.

    Indices mostly rise by one, which compresses well.
    """
    whole = np.ascontiguousarray(pages).view(f"V{HASH_BYTES}").reshape(-1)
    _, first, which = np.unique(whole, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return whole[first[order]], place[which.reshape(-1)]


def _packed(columns: Sequence[Numbers], kind: str) -> bytes:
    whole = np.concatenate(columns) if columns else np.zeros(0, np.int64)
    return zlib.compress(whole.astype(kind).tobytes(), 1)


def _delta(columns: Sequence[Numbers]) -> bytes:
    """Pack differences instead of positions: most records and payloads have the length of the one before."""
    return _packed([np.diff(each, prepend=0) for each in columns], "<i4")


def decode_catalog(data: bytes, namespace: bytes) -> list[SealedSegment] | None:
    """Return the segments of a catalog, or None if it is damaged or of another namespace."""
    whole, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
    if not data.startswith(_FORMAT) or xxh3_64_intdigest(whole).to_bytes(_CHECK_BYTES, "little") != check:
        return None
    at = len(_FORMAT) + 8
    stop = at + int.from_bytes(whole[len(_FORMAT) : at], "little")
    contents = msgspec.msgpack.decode(whole[at:stop], type=_Contents)
    parts = [decode_part(raw) for raw in contents.parts]
    if contents.namespace != namespace or None in parts:
        return None
    raw: list[bytes] = []
    for nbytes in contents.columns:
        raw.append(whole[stop : stop + nbytes])
        stop += nbytes
    ats, offsets, steps = (np.frombuffer(zlib.decompress(raw[n]), "<i4").astype(np.int64) for n in (0, 1, 4))
    stamps, kinds = (np.frombuffer(zlib.decompress(raw[n]), "<u4").astype(np.int64) for n in (2, 3))
    rows = np.cumsum(steps)
    pages = np.frombuffer(raw[5], np.uint8).reshape(-1, HASH_BYTES)
    part, nbytes = np.array(contents.kinds or [(0, 0)], np.int64).T
    known = tuple(part for part in parts if part)
    segments: list[SealedSegment] = []
    first = 0
    for each in contents.segments:
        mine = slice(first, first := first + each.rows)
        table = RecordTable(
            at=np.cumsum(ats[mine]) * RECORDS_AT,
            state=np.full(each.rows, LIVE),
            stamp=stamps[mine],
            offset=np.cumsum(offsets[mine]) * BLOCK_BYTES,
            nbytes=nbytes[kinds[mine]],
            page=pages[rows[mine]],
            part=part[kinds[mine]],
            parts=known,
            end=each.head_bytes,
            synced=each.data_bytes,
            sealed=True,
        )
        segments.append(SealedSegment(each.name, each.data_bytes, each.head_bytes, each.objects, table))
    return segments


def segments_within(data: bytes) -> list[str] | None:
    """Return a catalog's segment names from its first bytes, unchecked; None if `data` ends before all names."""
    at = len(_FORMAT) + 8
    stop = at + int.from_bytes(data[len(_FORMAT) : at], "little")
    if not data.startswith(_FORMAT) or stop > len(data):
        return None
    try:
        return [each.name for each in msgspec.msgpack.decode(data[at:stop], type=_Contents).segments]
    except msgspec.DecodeError:
        return None


@dataclass(frozen=True, slots=True)
class Compaction:
    """A plan of the next catalog: its segments, and the catalogs that it replaces."""

    segments: tuple[str, ...]
    replaces: tuple[str, ...]


def compaction(catalogs: Mapping[str, Sequence[str]], segments: Iterable[str]) -> Compaction | None:
    """Plan the next catalog of the living `segments`; None while fewer than `LOOSE` are outside all `catalogs`.

    `catalogs`: segment names of each. The plan takes all segments outside catalogs, then, smallest first, each catalog
    whose living segments are fewer than twice those taken so far. So catalogs stay few and rewrites rare.

    >>> few = [f"s{n:02}" for n in range(32)]
    >>> compaction({"old": ["a"], "large": [f"l{n:02}" for n in range(99)]}, [*few, "a"]).replaces
    ('large', 'old')
    >>> compaction({"old": few}, few) is None
    True
    """
    living = set(segments)
    left = {name: living.intersection(within) for name, within in catalogs.items()}
    chosen = living.difference(*left.values())
    if len(chosen) < LOOSE:
        return None
    replaced = [name for name, within in left.items() if not within]
    for name, within in sorted(left.items(), key=lambda each: (len(each[1]), each[0])):
        if within and len(within) < 2 * len(chosen):
            chosen |= within
            replaced.append(name)
    return Compaction(tuple(sorted(chosen)), tuple(sorted(replaced)))
