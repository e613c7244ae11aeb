"""An Index lists the objects of a namespace known to this process, and the order in which pages were last used.

Pure bookkeeping of the head files. It may lag other processes and need not be right: every read checks its bytes.
A store has millions of objects and every process knows all of them, so they are columns of numbers, some 110 bytes an
object, which ranks of one host can share (`saved`, `load`); a StoredObject or a Page is made on request. SegmentRows
find the objects of one segment; `Alike` are pages made of the same parts, which are read in the same way: in columns.
"""

from __future__ import annotations

import random
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import msgspec
import numpy as np
import numpy.typing as npt

from kvmover.cache.prefix import PageOrder
from kvmover.store.number_columns import NumberColumns, PageTable, SavedColumn
from kvmover.store.objects import Watcher
from kvmover.store.part import PartKey
from kvmover.store.record import BLOCK_BYTES, LIVE, RECORDS_AT, RecordTable, decode_part, encode_part
from kvmover.store.store_results import Stat
from kvmover.store.stored import Holdings, Page, Placed, Places, Rows, StoredObject, padded


@dataclass(frozen=True, slots=True, eq=False)
class Alike:
    """A group of pages whose objects have the same `parts`; arrays have shape (parts, pages).

    `items`: positions of these pages in the request. `segments`: segment numbers of the index.
    """

    items: Rows
    parts: tuple[PartKey, ...]
    segments: Rows
    offsets: Places
    sizes: Places


def alike_pages(
    rows: Rows, pages: NumberColumns, objects: NumberColumns, parts: Sequence[tuple[PartKey, ...]], sizes: Places
) -> Iterator[Alike]:
    """Group pages by parts. `rows`: page rows, -1 if absent. `parts`, `sizes`: decode the columns' numbers."""
    numbers = np.where(rows >= 0, pages.column("parts")[rows], 0)
    of = objects.column
    known: list[int] = np.unique(numbers[numbers > 0]).tolist()
    for number in known:
        items = np.flatnonzero(numbers == number)
        chain = [pages.column("first")[rows[items]]]
        while len(chain) < len(parts[number]):
            chain.append(of("next")[chain[-1]])
        placed = np.stack(chain[::-1])  # the newest is the first of a chain
        offsets = of("offset")[placed].astype(np.int64) * BLOCK_BYTES
        yield Alike(items, parts[number], of("segment")[placed], offsets, sizes[of("kind")[placed]])


@dataclass(slots=True, eq=False)
class SegmentRows:
    """The objects of one segment: header offsets, ascending, in units of RECORDS_AT, and rows, -1 if removed.

    Those of a loaded index lie in its columns until one is added.
    """

    number: int
    records: array[int] | memoryview[int] = field(default_factory=lambda: array("I"))
    rows: array[int] | memoryview[int] = field(default_factory=lambda: array("i"))
    live: int = 0
    held_bytes: int = 0

    def add(self, records: Places, rows: Rows) -> None:
        """Add objects with ascending `records`, nearly always beyond the present ones."""
        numbers = (records // RECORDS_AT).astype(np.uint32)
        known = self.records if isinstance(self.records, array) else array("I", self.records.tobytes())
        known_rows = self.rows if isinstance(self.rows, array) else array("i", self.rows.tobytes())
        self.records, self.rows = known, known_rows
        if not known or numbers[0] > known[-1]:
            known.frombytes(numbers.tobytes())
            known_rows.frombytes(rows.tobytes())
            return
        for record, row in zip(numbers.tolist(), rows.tolist(), strict=True):
            at = bisect_left(known, record)
            known.insert(at, record)
            known_rows.insert(at, row)

    def place(self, record: int) -> int:
        """Returns the column position of the live object with its header at byte `record`, or -1."""
        record //= RECORDS_AT
        at = bisect_left(self.records, record)
        return at if at < len(self.records) and self.records[at] == record and self.rows[at] >= 0 else -1

    def at(self, records: Places) -> tuple[Places, Rows]:
        """Returns column positions and rows of the live objects with headers at these bytes."""
        known = np.frombuffer(self.records, np.uint32)
        if not len(known):
            return np.zeros(0, np.int64), np.zeros(0, np.int32)
        wanted = records // RECORDS_AT
        places = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        places = places[known[places] == wanted]
        rows = np.frombuffer(self.rows, np.int32)[places]
        return places[rows >= 0], rows[rows >= 0]

    def remove(self, places: Places) -> None:
        """Mark the objects at these column positions as removed."""
        np.frombuffer(self.rows, np.int32)[places] = -1

    def take(self) -> Rows:
        """Returns the rows of the live objects."""
        rows = np.array(self.rows, np.int32)
        return rows[rows >= 0]


class SavedIndex(msgspec.Struct, frozen=True):
    """An index without its columns of numbers, to be saved beside them.

    `kinds`, `parts`: encoded parts. `segments`: name, number, rows, live objects and held bytes of each. `ends`: the
    least and most recently used page. `holdings`: objects, payload bytes, held bytes.
    """

    names: list[str]
    kinds: list[tuple[bytes, int]]
    parts: list[list[bytes]]
    segments: list[tuple[str, int, int, int, int]]
    ends: tuple[int, int]
    holdings: tuple[int, int, int]


def _part(raw: bytes) -> PartKey:
    part = decode_part(raw)
    if part is None:
        raise ValueError(f"no part is encoded as {raw.hex()}")
    return part


#: Most pages unlinked from the order of use one by one; more are unlinked in bulk.
_FEW = 64


class Index:
    """An index of pages by hash, least recently used first, and of objects by segment and record."""

    def __init__(self, order: PageOrder | None = None) -> None:
        """`order`: in which pages are evicted, if not the least recently used first."""
        self._order = order
        #: An object: its header's offset, in `RECORDS_AT`; its segment; its payload's offset, in blocks; its kind, its
        #: page, and the page's next one.
        self._objects = NumberColumns(record="I", offset="I", segment="i", kind="i", page="i", next="i", stamp="I")
        #: A page: the object that was added last, its parts, and the pages used just before and after it.
        self._pages = NumberColumns(first="i", parts="i", before="i", after="i", stamp="I")
        self._table = PageTable(random.SystemRandom().randrange(1 << 64))
        self._oldest = self._newest = -1
        self._segments: dict[str, SegmentRows] = {}
        self.names: list[str] = []  # of segments; a removed segment keeps its number
        self._kinds: list[tuple[PartKey, int]] = []
        self._kind_numbers: dict[tuple[PartKey, int], int] = {}
        self._parts: list[tuple[PartKey, ...]] = [()]
        self._parts_numbers: dict[tuple[PartKey, ...], int] = {(): 0}
        self._watched: WeakSet[Watcher] = WeakSet()
        self.holdings = Holdings()

    def saved(self) -> tuple[SavedIndex, dict[str, npt.NDArray[Any]]]:
        """Returns the whole index: a value, and columns by name, valid until the index changes."""
        held, segments = self.holdings, self._segments.items()
        value = SavedIndex(
            names=self.names,
            kinds=[(encode_part(part), nbytes) for part, nbytes in self._kinds],
            parts=[list(map(encode_part, parts)) for parts in self._parts],
            segments=[(name, each.number, len(each.rows), each.live, each.held_bytes) for name, each in segments],
            ends=(self._oldest, self._newest),
            holdings=(held.objects, held.payload_bytes, held.held_bytes),
        )
        columns = {f"object {name}": numbers for name, numbers in self._objects.saved().items()}
        columns |= {f"page {name}": numbers for name, numbers in self._pages.saved().items()}
        columns |= {f"table {name}": numbers for name, numbers in self._table.saved().items()}
        records, rows = np.zeros(0, np.uint32), np.zeros(0, np.int32)
        columns["records"] = np.concatenate([records, *(np.array(each.records, np.uint32) for _, each in segments)])
        columns["rows"] = np.concatenate([rows, *(np.array(each.rows, np.int32) for _, each in segments)])
        return value, columns

    def load(self, saved: SavedIndex, columns: Mapping[str, SavedColumn]) -> Index:
        """Returns a saved index in this one's order of eviction, which writes to the memory of `columns`.

        Raises ValueError for an unknown part.
        """
        found = Index(self._order)
        for prefix, table in (("object ", found._objects), ("page ", found._pages), ("table ", found._table)):
            mine = {name.removeprefix(prefix): each for name, each in columns.items() if name.startswith(prefix)}
            table.load(mine)
        found.names = saved.names
        found._kinds = [(_part(raw), nbytes) for raw, nbytes in saved.kinds]
        found._kind_numbers = {kind: number for number, kind in enumerate(found._kinds)}
        found._parts = [tuple(map(_part, parts)) for parts in saved.parts]
        found._parts_numbers = {parts: number for number, parts in enumerate(found._parts)}
        records, rows, first = columns["records"].memory.view, columns["rows"].memory.view, 0
        for name, number, count, live, held_bytes in saved.segments:
            some = slice(first, first + count)
            found._segments[name] = SegmentRows(number, records[some], rows[some], live, held_bytes)
            first += count
        found._oldest, found._newest = saved.ends
        found.holdings = Holdings(*saved.holdings)
        return found

    def __contains__(self, page: bytes) -> bool:
        return self._table.find(page) >= 0

    def __len__(self) -> int:
        return len(self._table)

    @property
    def held_bytes(self) -> int:
        """Returns the bytes of all payload blocks."""
        return self.holdings.held_bytes

    def get(self, page: bytes) -> Page | None:
        """Returns the page of this hash, or None. Does not count as a use."""
        row = self._table.find(page)
        return self._page(row, page) if row >= 0 else None

    def missing(self, pages: Sequence[bytes]) -> list[bool]:
        """Returns True for each page that is absent."""
        return (self._table.find_many(pages) < 0).tolist()

    def get_many(self, pages: Sequence[bytes]) -> list[Page | None]:
        """Returns `get` of each page, in a tenth of the time."""
        rows = self._table.find_many(pages).tolist()
        return [self._page(row, page) if row >= 0 else None for row, page in zip(rows, pages, strict=True)]

    def parts_of(self, pages: Sequence[bytes]) -> list[tuple[PartKey, ...]]:
        """Returns the parts of each page's objects, () if absent: enough for a look-up."""
        rows = self._table.find_many(pages)
        numbers = np.where(rows >= 0, self._pages.column("parts")[rows], 0)
        return [self._parts[number] for number in numbers.tolist()]

    def asked(self, pages: Sequence[bytes]) -> None:
        """Note a prompt whose pages were looked up, in its order."""
        if self._order is not None:
            self._order.expect(pages)

    def stamps_of(self, pages: Sequence[bytes]) -> list[int]:
        """Returns the last-use time (s) of each page known here; 0 if absent."""
        rows = self._table.find_many(pages)
        return np.where(rows >= 0, self._pages.column("stamp")[rows], 0).tolist()

    def pages(self) -> Iterator[tuple[bytes, Page]]:
        """Yield pages, least recently used first. The page yielded last may be used or removed meanwhile."""
        row = self._oldest
        while row >= 0:
            after = self._pages.after[row]
            page = self._table.key(row)
            yield page, self._page(row, page)
            row = after

    def objects(self, segment: str) -> list[StoredObject]:
        """Returns the live objects of a segment, by header offset."""
        mine = self._segments.get(segment)
        return [self._object(row) for row in mine.take().tolist()] if mine else []

    def empty(self, segment: str) -> bool:
        """Returns True if no object of the segment is known to live."""
        mine = self._segments.get(segment)
        return mine is None or not mine.live

    def live_bytes(self, segment: str) -> int:
        """Returns the payload bytes, in whole blocks, of a segment's live objects."""
        mine = self._segments.get(segment)
        return mine.held_bytes if mine else 0

    def records(self, segment: str) -> Places:
        """Returns the header offsets, bytes, of a segment's live objects, ascending."""
        mine = self._segments.get(segment)
        rows = mine.take() if mine else np.zeros(0, np.int32)
        return self._objects.column("record")[rows].astype(np.int64) * RECORDS_AT

    def next_records(self, segment: str, start: int, most: int) -> tuple[Places, int | None]:
        """Returns the header offsets, bytes, of the live ones among the next `most` objects from byte `start` on, and
        the byte from which others follow, or None.
        """
        mine = self._segments.get(segment)
        if mine is None or not len(mine.rows):
            return np.zeros(0, np.int64), None
        known, rows = np.frombuffer(mine.records, np.uint32), np.frombuffer(mine.rows, np.int32)
        first = int(np.searchsorted(known, np.uint32(start // RECORDS_AT)))
        some, more = slice(first, first + most), known[first + most : first + most + 1].tolist()
        return known[some][rows[some] >= 0].astype(np.int64) * RECORDS_AT, more[0] * RECORDS_AT if more else None

    def table(self, segment: str) -> RecordTable:
        """Returns a segment's live objects as a record table by ascending header offset, without marks."""
        mine = self._segments.get(segment)
        rows = mine.take() if mine else np.zeros(0, np.int32)
        of = self._objects.column
        kinds, parts = of("kind")[rows], tuple(part for part, _ in self._kinds)
        return RecordTable(
            at=of("record")[rows].astype(np.int64) * RECORDS_AT,
            state=np.full(len(rows), LIVE),
            stamp=self._pages.column("stamp")[of("page")[rows]].astype(np.int64),
            offset=of("offset")[rows].astype(np.int64) * BLOCK_BYTES,
            nbytes=np.array([nbytes for _, nbytes in self._kinds] or [0], np.int64)[kinds],
            page=self._table.keys(of("page")[rows]),
            part=kinds.astype(np.int64),
            parts=parts,
            end=0,
        )

    def at(self, segment: str, record: int) -> StoredObject | None:
        """Returns the object with its header at byte `record` of the segment's head file, or None."""
        mine = self._segments.get(segment)
        place = mine.place(record) if mine else -1
        return self._object(mine.rows[place]) if mine and place >= 0 else None

    def coldest(self, most: int, nbytes: int, kept: Collection[int], before: float | None = None) -> Rows:
        """Returns rows of the pages to evict next: at most `most`, until they hold `nbytes` together.

        Stops at the first page in `kept`, and at the first last used at or after second `before`, which are asked for
        by use alone. By another order, pages that it does not know go first: used by nobody since this process opened.
        """
        found = self._least_used(most, nbytes, kept, before)
        if self._order is None or before is not None:
            return found
        order = self._order
        unknown = [row for row in found.tolist() if self._table.key(row) not in order]
        if unknown:
            return np.array(unknown, np.int32)
        held = frozenset(self.hashes(np.array(list(kept), np.int32)))
        return self.pages_at(order.victims(len(found), held.__contains__))

    def _least_used(self, most: int, nbytes: int, kept: Collection[int], before: float | None) -> Rows:
        kept = frozenset(kept)
        of, objects, held = self._pages, self._objects, [padded(nbytes) for _, nbytes in self._kinds]
        found: list[int] = []
        page = self._oldest
        while page >= 0 and nbytes > 0 and len(found) < most and page not in kept:
            if before is not None and of.stamp[page] >= before:
                break
            found.append(page)
            row = of.first[page]
            while row >= 0:
                nbytes -= held[objects.kind[row]]
                row = objects.next[row]
            page = of.after[page]
        return np.array(found, np.int32)

    def alike(self, pages: Sequence[bytes]) -> Iterator[Alike]:
        """Group the present ones of `pages` by the parts of their objects."""
        sizes = np.array([nbytes for _, nbytes in self._kinds] or [0], np.int64)
        return alike_pages(self._table.find_many(pages), self._pages, self._objects, self._parts, sizes)

    def pages_at(self, pages: Sequence[bytes]) -> Rows:
        """Returns rows of the present `pages`."""
        rows = self._table.find_many(pages)
        return rows[rows >= 0]

    def hashes(self, pages: Rows) -> list[bytes]:
        """Returns the hashes of the pages in these rows."""
        return [self._table.key(page) for page in pages.tolist()]

    def stamps_at(self, pages: Rows) -> Places:
        """Returns the last-use time (s) of the pages in these rows."""
        return self._pages.column("stamp")[pages].astype(np.int64)

    def placed(self, pages: Rows) -> Placed:
        """Returns all objects of the pages in these rows."""
        rows = self._pages.column("first")[pages]
        found, after = [rows[:0]], self._objects.column("next")
        while len(rows := rows[rows >= 0]):
            found.append(rows)
            rows = after[rows]
        return self._placed(np.concatenate(found))

    def placed_in(self, segment: str, records: Places | None = None) -> Placed:
        """Returns the live objects of a segment: all, or those with headers at bytes `records`."""
        mine = self._segments.get(segment)
        if mine is None:
            return self._placed(np.zeros(0, np.int32))
        return self._placed(mine.take() if records is None else mine.at(records)[1])

    def _placed(self, rows: Rows) -> Placed:
        of = self._objects.column
        segments, records = of("segment")[rows], of("record")[rows]
        order = np.lexsort((records, segments))
        rows, segments, records = rows[order], segments[order], records[order]
        sizes = np.array([nbytes for _, nbytes in self._kinds] or [0], np.int64)[of("kind")[rows]]
        return Placed(
            rows=rows,
            pages=of("page")[rows],
            segments=segments,
            records=records.astype(np.int64) * RECORDS_AT,
            offsets=of("offset")[rows].astype(np.int64) * BLOCK_BYTES,
            held=-(-sizes // BLOCK_BYTES) * BLOCK_BYTES,
            stamps=of("stamp")[rows].astype(np.int64),
            names=self.names,
        )

    def watch(self, watcher: Watcher) -> None:
        """Tell `watcher` of pages that lose an object; held by weak reference."""
        self._watched.add(watcher)

    def add(self, objects: Iterable[StoredObject]) -> None:
        """Add complete objects; an object known already stays unchanged."""
        fresh = [each for each in objects if self.at(each.segment, each.record) is None]
        for segment in dict.fromkeys(each.segment for each in fresh):
            mine = sorted((each for each in fresh if each.segment == segment), key=lambda each: each.record)
            self._add(
                [(segment, slice(0, len(mine)))],
                b"".join(each.page for each in mine),
                np.array([self._kind(each.part, each.nbytes) for each in mine], np.int32),
                np.array([[each.record, each.offset, each.stamp] for each in mine], np.int64).T,
            )

    def add_table(self, segment: str, table: RecordTable, now: int) -> None:
        """Add unknown objects of a segment by their records. Stamps beyond second `now` are clamped to it."""
        self.add_tables([(segment, slice(0, len(table)))], table, now)

    def add_tables(self, runs: Sequence[tuple[str, slice]], table: RecordTable, now: int) -> None:
        """Add a table as `add_table` does, for several segments: `runs` gives each segment's slice of the rows."""
        if not len(table):
            return
        pairs, which = np.unique(np.bitwise_or(table.nbytes << 20, table.part), return_inverse=True)
        numbers: list[int] = pairs.tolist()
        kinds = [self._kind(table.parts[pair & 0xFFFFF], pair >> 20) for pair in numbers]
        places = np.stack([table.at, table.offset, np.minimum(table.stamp, now)])
        self._add(runs, table.page.tobytes(), np.array(kinds, np.int32)[which.reshape(-1)], places)

    def _add(self, runs: Sequence[tuple[str, slice]], pages: bytes, kinds: Rows, places: Places) -> None:
        """Add new objects. `places`: record, offset, stamp of each; records ascend within each segment."""
        records, offsets, stamps = places
        rows = self._objects.take(len(kinds))
        page_rows, fresh = self._table.put_many(pages)
        self._new_pages(fresh)
        of = self._objects.column
        of("record")[rows], of("offset")[rows] = records // RECORDS_AT, offsets // BLOCK_BYTES
        of("stamp")[rows] = stamps
        of("kind")[rows], of("page")[rows] = kinds, page_rows
        self._chain(rows, page_rows, kinds)
        np.maximum.at(self._pages.column("stamp"), page_rows, stamps.astype(np.uint32))
        sizes = np.array([nbytes for _, nbytes in self._kinds], np.int64)[kinds]
        held = np.concatenate([[0], np.cumsum(-(-sizes // BLOCK_BYTES) * BLOCK_BYTES)])
        for segment, some in runs:
            mine = self._segments.get(segment)
            if mine is None:
                mine = self._segments[segment] = SegmentRows(len(self.names))
                self.names.append(segment)
            of("segment")[rows[some]] = mine.number
            mine.add(records[some], rows[some])
            mine.live += some.stop - some.start
            mine.held_bytes += int(held[some.stop] - held[some.start])
        self.holdings.objects += len(rows)
        self.holdings.payload_bytes += int(sizes.sum())
        self.holdings.held_bytes += int(held[-1])

    def _new_pages(self, fresh: Rows) -> None:
        """Append pages without objects as the most recently used."""
        if not len(fresh):
            return
        self._pages.grow(int(fresh.max()) + 1)
        of = self._pages.column
        of("first")[fresh], of("parts")[fresh], of("stamp")[fresh] = -1, 0, 0
        of("before")[fresh] = np.concatenate([[self._newest], fresh[:-1]])
        of("after")[fresh] = np.concatenate([fresh[1:], [-1]])
        first, last = int(fresh[0]), int(fresh[-1])
        if self._newest >= 0:
            self._pages.after[self._newest] = first
        else:
            self._oldest = first
        self._newest = last

    def _chain(self, rows: Rows, pages: Rows, kinds: Rows) -> None:
        """Prepend objects to their pages' chains, in batches with at most one object of each page."""
        left = np.arange(len(rows))
        first, after, parts = self._pages.column("first"), self._objects.column("next"), self._pages.column("parts")
        while len(left):
            _, once = np.unique(pages[left], return_index=True)
            turn = left[np.sort(once)]
            mine = pages[turn]
            after[rows[turn]] = first[mine]
            first[mine] = rows[turn]
            pairs, which = np.unique(parts[mine].astype(np.int64) << 32 | kinds[turn], return_inverse=True)
            numbers = [self._with(pair >> 32, pair & 0xFFFFFFFF) for pair in pairs.tolist()]
            parts[mine] = np.array(numbers, np.int32)[which.reshape(-1)]
            left = np.setdiff1d(left, turn, assume_unique=True)

    def _with(self, parts: int, kind: int) -> int:
        return self._parts_number((*self._parts[parts], self._kinds[kind][0]))

    def remove(self, objects: Iterable[StoredObject]) -> int:
        """Remove objects. Returns the bytes of the blocks of those that were present."""
        by_segment: dict[str, list[int]] = {}
        for each in objects:
            by_segment.setdefault(each.segment, []).append(each.record)
        return sum(self.remove_at(segment, records) for segment, records in by_segment.items())

    def remove_at(self, segment: str, records: Iterable[int]) -> int:
        """Remove objects as `remove` does, by the byte offsets of their headers in the segment's head file."""
        return self.remove_placed(self.placed_in(segment, np.unique(np.fromiter(records, np.int64))))

    def remove_placed(self, gone: Placed) -> int:
        """Remove objects as `remove` does, by their rows, and tell the watchers."""
        for name, some in gone.by_segment():
            mine = self._segments[name]
            mine.remove(mine.at(gone.records[some])[0])
            mine.live -= some.stop - some.start
            mine.held_bytes -= int(gone.held[some].sum())
        rows, held = gone.rows, int(gone.held.sum())
        sizes = np.array([nbytes for _, nbytes in self._kinds] or [0], np.int64)[self._objects.column("kind")[rows]]
        self.holdings.objects -= len(rows)
        self.holdings.payload_bytes -= int(sizes.sum())
        self.holdings.held_bytes -= held
        pages, counts = np.unique(gone.pages, return_counts=True)
        lost = self.hashes(pages) if self._watched else []
        parts = self._pages.column("parts")[pages]
        few, which = np.unique(parts, return_inverse=True)
        numbers: list[int] = few.tolist()
        kinds = np.array([len(self._parts[number]) for number in numbers], np.int64)[which.reshape(-1)]
        self._forget_pages(pages[kinds == counts])
        if not (kinds == counts).all():
            going = set(rows.tolist())
            for page in pages[kinds != counts].tolist():
                self._unchain(page, going)
        self._objects.give_back(rows)
        for watcher in self._watched:
            for page in lost:
                watcher.lost(page)
        return held

    def _forget_pages(self, pages: Rows) -> None:
        """Remove pages without objects from the order of use and the hash table."""
        if len(pages) <= _FEW:
            for page in pages.tolist():
                self._unlink(page)
        else:
            self._unlink_many(pages)
        if self._order is not None:
            for page in self.hashes(pages):
                self._order.discard(page)
        self._table.remove_many(pages)

    def _unchain(self, page: int, gone: set[int]) -> None:
        """Remove objects from a page that keeps others."""
        left = [row for row in self._rows_of(page) if row not in gone]
        for here, behind in zip(left, [-1, *left], strict=False):
            self._objects.next[here] = behind
        self._pages.first[page] = left[-1]
        kinds = self._objects.kind
        self._pages.parts[page] = self._parts_number(tuple(self._kinds[kinds[row]][0] for row in left))

    def _rows_of(self, page: int) -> list[int]:
        """Returns rows of a page's objects, in the order added."""
        rows: list[int] = []
        row = self._pages.first[page]
        while row >= 0:
            rows.append(row)
            row = self._objects.next[row]
        return rows[::-1]

    def _unlink(self, page: int) -> None:
        self._join(self._pages.before[page], self._pages.after[page])

    def _join(self, before: int, after: int) -> None:
        """Link two pages as neighbours in the order of use; -1 is an end."""
        if before >= 0:
            self._pages.after[before] = after
        else:
            self._oldest = after
        if after >= 0:
            self._pages.before[after] = before
        else:
            self._newest = before

    def _unlink_many(self, pages: Rows) -> None:
        """Unlink many pages: a single run is skipped as a whole, several runs in doubling steps."""
        before, after = self._pages.column("before"), self._pages.column("after")
        number = np.zeros(len(before) + 1, np.int32)  # index -1 reads the last entry
        number[pages] = np.arange(1, len(pages) + 1, dtype=np.int32)
        first, last = pages[number[before[pages]] == 0], pages[number[after[pages]] == 0]
        if len(first) == 1:
            self._join(int(before[first[0]]), int(after[last[0]]))
            return

        def nearest(links: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
            """Returns for each page the nearest page along `links` that stays, or -1."""
            ends = links[pages]
            while True:
                going: Rows = np.flatnonzero((ends >= 0) & (number[ends] > 0))
                if not len(going):
                    return ends
                ends[going] = ends[number[ends[going]] - 1]

        front, behind = nearest(before), nearest(after)
        after[front[front >= 0]] = behind[front >= 0]
        before[behind[behind >= 0]] = front[behind >= 0]
        if (front < 0).any():
            self._oldest = int(behind[front < 0][0])
        if (behind < 0).any():
            self._newest = int(front[behind < 0][0])

    def drop(self, segment: str) -> None:
        """Forget a removed segment and its objects."""
        self.remove_placed(self.placed_in(segment))
        self._segments.pop(segment, None)

    def drop_some(self, segment: str, most: int) -> bool:
        """Forget at most `most` objects of a segment. Returns False once it had no object left and is forgotten."""
        mine = self._segments.get(segment)
        rows = mine.take() if mine else np.zeros(0, np.int32)
        if len(rows):
            self.remove_placed(self._placed(rows[:most]))
            return True
        self._segments.pop(segment, None)
        return False

    def stamped(self, each: StoredObject, stamp: int) -> None:
        """Record that an object's header now has the last-use time `stamp` (s)."""
        mine = self._segments.get(each.segment)
        place = mine.place(each.record) if mine else -1
        if mine and place >= 0:
            self._objects.stamp[mine.rows[place]] = stamp

    def stamp(self, pages: Sequence[bytes], stamp: int) -> None:
        """Raise the pages' last-use time to `stamp` (s) without changing their order."""
        rows = self.pages_at(pages)
        stamps = self._pages.column("stamp")
        stamps[rows] = np.maximum(stamps[rows], stamp)

    def use(self, pages: Sequence[bytes], stamp: int) -> list[int]:
        """Move pages used at second `stamp` to the most recently used end, in this order; skip absent pages.

        Returns the rows of the present pages. A `stamp` of 0 moves them and is no use.
        """
        if self._order is not None and stamp:
            self._order.use([page for page in pages if page in self])
        before, after, stamps = self._pages.before, self._pages.after, self._pages.stamp
        rows = self.pages_at(pages).tolist()
        for row in rows:
            if stamp > stamps[row]:
                stamps[row] = stamp
            if row != self._newest:
                self._unlink(row)
                before[row], after[row] = self._newest, -1
                after[self._newest] = row
                self._newest = row
        return rows

    @property
    def span_s(self) -> tuple[int, int]:
        """Returns the last-use times (s) of the least and most recently used page; zeros if the index is empty."""
        if self._oldest < 0:
            return 0, 0
        return self._pages.stamp[self._oldest], self._pages.stamp[self._newest]

    def stat(self, segments: int, held_bytes: int, head_bytes: int) -> Stat:
        """Returns the namespace's statistics, with the given counts from its engine."""
        oldest_s, newest_s = self.span_s
        held = self.holdings
        return Stat(len(self), held.objects, segments, held.payload_bytes, held_bytes, head_bytes, oldest_s, newest_s)

    def sort(self) -> None:
        """Order pages by last-use time, the only order known of pages found on opening."""
        rows = self._table.rows()
        if not len(rows):
            return
        rows = rows[np.argsort(self._pages.column("stamp")[rows], kind="stable")]
        self._pages.column("before")[rows] = np.concatenate([[-1], rows[:-1]])
        self._pages.column("after")[rows] = np.concatenate([rows[1:], [-1]])
        self._oldest, self._newest = int(rows[0]), int(rows[-1])

    def _page(self, row: int, page: bytes) -> Page:
        objects = [self._object(each, page) for each in self._rows_of(row)]
        return Page(objects, self._pages.stamp[row], self._parts[self._pages.parts[row]])

    def _object(self, row: int, page: bytes | None = None) -> StoredObject:
        of = self._objects
        part, nbytes = self._kinds[of.kind[row]]
        page = self._table.key(of.page[row]) if page is None else page
        name, stamp = self.names[of.segment[row]], of.stamp[row]
        record, offset = of.record[row] * RECORDS_AT, of.offset[row] * BLOCK_BYTES
        return StoredObject(name, record, offset, nbytes, page, part, stamp)

    def _kind(self, part: PartKey, nbytes: int) -> int:
        number = self._kind_numbers.setdefault((part, nbytes), len(self._kinds))
        if number == len(self._kinds):
            self._kinds.append((part, nbytes))
        return number

    def _parts_number(self, parts: tuple[PartKey, ...]) -> int:
        number = self._parts_numbers.setdefault(parts, len(self._parts))
        if number == len(self._parts):
            self._parts.append(parts)
        return number
