"""The segments under a store, for tests that look at files and headers."""

from __future__ import annotations

from kvmover.store import PageStore
from kvmover.store.deletion import Look, Seen, TwoLooks
from kvmover.store.segment_objects import SegmentObjects


def segments_of(store: PageStore) -> SegmentObjects:
    assert isinstance(store.objects, SegmentObjects)
    return store.objects


#: Grounds on which a test has an object deleted as bad.
LOOKS = TwoLooks(Look(Seen.READ, "digest"), Look(Seen.ANEW, "digest"), 1)
