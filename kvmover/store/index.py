"""An Index knows which objects a namespace has, as far as this process can, and in which order pages were last used.

Pure bookkeeping of what the head files say. It may be behind other processes and never has to be right: every read
checks the bytes it gets.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol
from weakref import WeakSet

import msgspec

from kvmover.store.part import PartKey

#: Payloads start at multiples of this.
BLOCK_BYTES = 4096


def padded(nbytes: int) -> int:
    """`nbytes` in whole blocks of a data file: 5,000 take 8,192."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


class StoredObject(msgspec.Struct, eq=False, gc=False):
    """One complete object: where it is, and what it must contain. `record` is the place of its header.

    It and Page are in no cycle, and there are millions: the garbage collector need not look at them.
    """

    segment: str
    record: int
    offset: int
    nbytes: int
    page: bytes
    part: PartKey
    digests: bytes
    stamp: int

    @property
    def held_bytes(self) -> int:
        """What it takes of its data file: whole blocks, so that it can be read directly and freed alone."""
        return padded(self.nbytes)

    @property
    def cells(self) -> int:
        """Cells of its box: heads x layers."""
        return self.part.box.cells

    @property
    def cell_bytes(self) -> int:
        """Bytes of one cell, `kv token dim`, as long as every other."""
        return self.nbytes // self.part.box.cells


class Page(msgspec.Struct, eq=False, gc=False):
    """All objects of a page, of every component and rank: they are used and evicted together.

    `stamp`: second of the last use that this process knows of. `parts`: of the objects, one each, in order.
    """

    objects: list[StoredObject]
    stamp: int = 0
    parts: tuple[PartKey, ...] = ()

    @property
    def nbytes(self) -> int:
        """Payload of all objects, without what fills up their last blocks."""
        return sum(each.nbytes for each in self.objects)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Known:
    """Pages that somebody has looked at and that have lost no object since."""

    pages: set[bytes] = field(default_factory=set[bytes])

    def lost(self, page: bytes) -> None:
        """See Watcher."""
        self.pages.discard(page)


class Watcher(Protocol):
    """Hears of losses, under the store's lock and in whichever thread learnt of them: it takes a note and returns."""

    def lost(self, page: bytes) -> None:
        """`page` has lost an object. Others may still cover for it."""
        ...


class Index:
    """Pages by hash, the least recently used first; objects by segment and record."""

    def __init__(self) -> None:
        self._pages: OrderedDict[bytes, Page] = OrderedDict()
        self._segments: dict[str, dict[int, StoredObject]] = {}
        self._live_bytes: dict[str, int] = {}
        self._parts: dict[tuple[PartKey, ...], tuple[PartKey, ...]] = {}
        self._watched: WeakSet[Watcher] = WeakSet()
        #: Blocks of all objects, payload only.
        self.held_bytes = 0

    def __contains__(self, page: bytes) -> bool:
        return page in self._pages

    def __len__(self) -> int:
        return len(self._pages)

    def get(self, page: bytes) -> Page | None:
        """The page of this hash, or None. Looking is no use: the order stays."""
        return self._pages.get(page)

    def pages(self) -> Iterator[tuple[bytes, Page]]:
        """The least recently used first."""
        return iter(self._pages.items())

    def objects(self, segment: str) -> Iterable[StoredObject]:
        """Of one segment, by their place."""
        return list(self._segments.get(segment, {}).values())

    def empty(self, segment: str) -> bool:
        """Whether nothing of it is known to live."""
        return not self._segments.get(segment)

    def live_bytes(self, segment: str) -> int:
        """Blocks of all objects of a segment."""
        return self._live_bytes.get(segment, 0)

    def watch(self, watcher: Watcher) -> None:
        """Tell `watcher` of pages that lose an object, as long as it lives."""
        self._watched.add(watcher)

    def add(self, each: StoredObject) -> None:
        """An object that is complete. One that is known already stays as it is."""
        mine = self._segments.setdefault(each.segment, {})
        if each.record in mine:
            return
        mine[each.record] = each
        self.held_bytes += each.held_bytes
        self._live_bytes[each.segment] = self._live_bytes.get(each.segment, 0) + each.held_bytes
        page = self._pages.get(each.page)
        if page is None:
            self._pages[each.page] = Page([each], each.stamp, self._shared(each.part))
            return
        page.objects.append(each)
        page.stamp = max(page.stamp, each.stamp)
        page.parts = self._shared(*page.parts, each.part)

    def remove(self, each: StoredObject) -> bool:
        """Whether it was there."""
        mine = self._segments.get(each.segment, {})
        if mine.get(each.record) is not each:
            return False
        del mine[each.record]
        self.held_bytes -= each.held_bytes
        self._live_bytes[each.segment] -= each.held_bytes
        page = self._pages[each.page]
        page.objects.remove(each)
        page.parts = self._shared(*(one.part for one in page.objects))
        if not page.objects:
            del self._pages[each.page]
        for watcher in self._watched:
            watcher.lost(each.page)
        return True

    def _shared(self, *parts: PartKey) -> tuple[PartKey, ...]:
        """The one tuple of these parts: pages have few kinds."""
        return self._parts.setdefault(parts, parts)

    def at(self, segment: str, record: int) -> StoredObject | None:
        """The object whose header is at byte `record` of the head file of `segment`, or None."""
        return self._segments.get(segment, {}).get(record)

    def drop(self, segment: str) -> list[StoredObject]:
        """Forget a segment that is gone; the objects it had."""
        gone = list(self._segments.get(segment, {}).values())
        for each in gone:
            self.remove(each)
        self._segments.pop(segment, None)
        return gone

    def use(self, page: bytes, stamp: int) -> None:
        """The page was read or written at second `stamp`: it is the last to go now. If it went meanwhile, so be it."""
        if entry := self._pages.get(page):
            entry.stamp = max(stamp, entry.stamp)
            self._pages.move_to_end(page)

    def oldest(self, after: int = 0) -> tuple[bytes, Page] | None:
        """Hash and page that were used least recently, but for `after` others; None where there are no more."""
        return next(islice(self._pages.items(), after, None), None)

    def sort(self) -> None:
        """By stamps, which is all that is known of the order of pages found on opening."""
        for page in sorted(self._pages, key=lambda page: self._pages[page].stamp):
            self._pages.move_to_end(page)
