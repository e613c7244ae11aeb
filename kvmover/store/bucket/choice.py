"""The choice of a bucket's left-overs: listed objects that no process will read again. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvmover.store.bucket.compaction import CATALOG
from kvmover.store.bucket.sealed import DATA, DEAD, HEAD, USED, segment_of
from kvmover.store.bucket.service import BucketEntry
from kvmover.store.record import BLOCK_BYTES

#: Age in seconds at which a `.data` or `.head` without its other half is a left-over: writers need minutes.
ALONE_S = 3600
#: Age in seconds at which a `.used` object is a left-over: a living reader rewrites its own more often.
_SILENT_S = 86_400


@dataclass(frozen=True, slots=True)
class Listing:
    """The objects of a namespace by segment name; catalogs and uses by object name."""

    heads: dict[str, BucketEntry]
    data: dict[str, BucketEntry]
    dead: dict[str, BucketEntry]
    catalogs: dict[str, BucketEntry]
    uses: dict[str, BucketEntry]

    @property
    def all(self) -> tuple[dict[str, BucketEntry], ...]:
        """Each kind in deletion order: heads go first, so that readers never index missing data."""
        return self.heads, self.catalogs, self.data, self.dead, self.uses

    @classmethod
    def of(cls, entries: Iterable[BucketEntry]) -> Listing:
        """Sort entries by the last component of their names; foreign objects are skipped."""
        found = cls({}, {}, {}, {}, {})
        of_segments = {HEAD: found.heads, DATA: found.data, DEAD: found.dead}
        for entry in entries:
            name = entry.name.rpartition("/")[2]
            if segment := segment_of(name):
                of_segments[segment[1]][segment[0]] = entry
            elif name.endswith(CATALOG):
                found.catalogs[name] = entry
            elif name.endswith(USED):
                found.uses[name] = entry
        return found


@dataclass(frozen=True, slots=True)
class LeftOver:
    """An object that no process will read: its name, and the name of its missing other half ("" for `.used`).

    `blocks`: its size in blocks, the upper bound of page objects stored in it.
    """

    name: str
    lacks: str
    blocks: int


def left_overs(listing: Listing, now_s: float) -> list[LeftOver]:
    """Return the objects of a listing that lack their other half, and old `.used` objects.

    Ages count from the youngest listed object if that is before `now_s`, so that a local clock running ahead ages no
    object.
    """
    now_s = min(now_s, max((entry.modified_s for entries in listing.all for entry in entries.values()), default=now_s))
    pairs = (
        (listing.heads, listing.data.keys(), DATA, ALONE_S),
        (listing.data, listing.heads.keys(), HEAD, ALONE_S),
        (listing.dead, listing.heads.keys(), HEAD, ALONE_S),
        (listing.uses, frozenset[str](), "", _SILENT_S),
    )
    return [
        LeftOver(entry.name, entry.name.rpartition(".")[0] + half if half else "", entry.nbytes // BLOCK_BYTES)
        for entries, others, half, age_s in pairs
        for segment, entry in sorted(entries.items())
        if segment not in others and now_s - entry.modified_s > age_s
    ]
