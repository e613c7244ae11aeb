"""The segments under a store, for tests that look at files and headers."""

from __future__ import annotations

import struct

from xxhash import xxh3_64_intdigest

from kvmover.store import PageStore
from kvmover.store.deletion import Look, Seen, TwoLooks
from kvmover.store.objects import Verdict
from kvmover.store.segment_objects import SegmentObjects
from kvmover.store.stored import StoredObject


def segments_of(store: PageStore) -> SegmentObjects:
    assert isinstance(store.objects, SegmentObjects)
    return store.objects


def objects_in(segments: SegmentObjects) -> list[StoredObject]:
    """The stored objects of a store with one segment, in the order of its data file."""
    (name,) = segments.catalog.segments
    found = [segments.catalog.index.at(name, int(record)) for record in segments.catalog.index.records(name)]
    return sorted((each for each in found if each), key=lambda each: each.offset)


def later_format(head: bytes, magic: bytes, number: int) -> bytes:
    """A head as a later release may write it: another format by its magic or number, records as they are."""
    start = magic + struct.pack("<I", number) + head[12:72]
    return start + xxh3_64_intdigest(start).to_bytes(8, "little") + head[80:]


#: Grounds on which a test has an object deleted as bad.
LOOKS = TwoLooks(Look(Seen.READ, "digest"), Look(Seen.ANEW, "digest"), 1)


def condemn(store: PageStore, each: StoredObject) -> None:
    """An object is found to be bad: it is deleted for every process or, beyond the budget, only forgotten here."""
    segments = segments_of(store)
    permit = segments.permit(LOOKS)
    if permit is None:
        segments.drop(each, Verdict.SPARED)
    else:
        segments.condemn(each, permit)
