"""A journal that has grown is written anew, of what is so now: as long as its living objects need. Pure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvmover.store.index import Index
from kvmover.store.keeper.journal import ENTRY_BYTES, JournalChange, encode_entry, slab_number
from kvmover.store.keeper.state import KeptNamespace
from kvmover.store.record import DIGEST_BYTES, FIXED_BYTES, encode_object

#: A journal grows to this before it is looked at, and to so many times what it would be.
_LEAST_BYTES, _TIMES = 1 << 20, 4

#: Places in an index are numbers of 32 bits, of 8 bytes each: beyond, they begin again.
_PLACES = 1 << 35


def is_overgrown(kept: KeptNamespace) -> bool:
    """Whether most of a journal is about what is no more."""
    living_bytes = kept.index.holdings.objects * kept.added_bytes // max(1, kept.added)
    return kept.end - kept.base > max(_LEAST_BYTES, _TIMES * living_bytes)


def rewritten(kept: KeptNamespace, journal: bytes, now: int) -> bytes:
    """A journal of what `kept` has, whose journal so far is `journal`; `kept` follows it from here on."""
    base = kept.end if kept.end < _PLACES // 2 else 0
    names = sorted({each.segment for _, page in kept.index.pages() for each in page.objects})
    index, entries, at, count, nbytes = Index(), list[bytes](), base, 0, 0
    for name in names:
        table = kept.index.table(name)
        places, records, place = list[int](), list[bytes](), at + ENTRY_BYTES
        columns = zip(table.at.tolist(), table.stamp.tolist(), table.offset.tolist(), strict=True)
        for row, (old, stamp, offset) in enumerate(columns):
            part, start = table.parts[int(table.part[row])], old - kept.base + FIXED_BYTES
            digests = journal[start : start + part.box.cells * DIGEST_BYTES]
            where = offset, int(table.nbytes[row])
            records.append(encode_object(place, stamp, where, table.page[row].tobytes(), part, digests))
            places.append(place)
            place += len(records[-1])
        entries.append(encode_entry(JournalChange.ADDED, now, slab_number(name), b"".join(records)))
        index.add_table(name, replace(table, at=np.array(places, np.int64)), now)
        at, count, nbytes = place, count + len(records), nbytes + place - at - ENTRY_BYTES
    index.sort()
    kept.index, kept.base, kept.end, kept.added, kept.added_bytes = index, base, at, count, nbytes
    return b"".join(entries)
