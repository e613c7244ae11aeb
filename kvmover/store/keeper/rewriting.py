"""A journal that has grown is written anew, of what is so now: as long as its living objects need. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from kvmover.store.index import Index
from kvmover.store.keeper.journal import (
    AddedObject,
    JournalChange,
    encode_added,
    encode_entry,
    page_and_digests,
    places_of,
    slab_number,
)
from kvmover.store.keeper.state import KeptNamespace
from kvmover.store.record import RecordTable

#: A journal grows to this before it is looked at, and to so many times what it would be.
_LEAST_BYTES, _TIMES = 1 << 20, 4

#: Places in an index are numbers of 32 bits, of 8 bytes each: beyond, they begin again.
_PLACES = 1 << 35


def is_overgrown(kept: KeptNamespace) -> bool:
    """Whether most of a journal is about what is no more."""
    living_bytes = kept.index.holdings.objects * kept.added_bytes // max(1, kept.added)
    return kept.end - kept.base > max(_LEAST_BYTES, _TIMES * living_bytes)


def rewritten(kept: KeptNamespace, journal: bytes, now: int, proved: Collection[str] = ()) -> bytes:
    """A journal of what `kept` has, whose journal so far is `journal`, and of which slabs are `proved`.

    `kept` follows it from here on.
    """
    base = kept.end if kept.end < _PLACES // 2 else 0
    names = sorted({each.segment for _, page in kept.index.pages() for each in page.objects})
    index, entries, at, count, nbytes = Index(), list[bytes](), base, 0, 0
    for name in names:
        table = kept.index.table(name)
        objects = _objects_of(table, journal, kept.base)
        entries.append(encode_added(objects, at, now, slab_number(name)))
        index.add_table(name, replace(table, at=places_of(at, len(objects))), now)
        count, nbytes = count + len(objects), nbytes + len(entries[-1])
        at += len(entries[-1])
        if name in proved:
            entries.append(encode_entry(JournalChange.PROVED, at, now, slab_number(name)))
            at += len(entries[-1])
    index.sort()
    kept.index, kept.base, kept.end, kept.added, kept.added_bytes = index, base, at, count, nbytes
    return b"".join(entries)


def _objects_of(table: RecordTable, journal: bytes, base: int) -> list[AddedObject]:
    """All objects of a slab, with the digests that `journal` has of them."""
    objects: list[AddedObject] = []
    columns = np.stack([table.at, table.offset, table.nbytes, table.part, table.stamp], 1)
    numbers: list[list[int]] = columns.tolist()
    for row, (at, offset, nbytes, part, stamp) in enumerate(numbers):
        page, digests = page_and_digests(lambda place, count: journal[place - base : place - base + count], at)
        assert page == table.page[row].tobytes()
        objects.append(AddedObject(offset, nbytes, page, table.parts[part], stamp, digests))
    return objects
