"""Left-overs of a bucket: objects that a listing shows and no process will ask for again. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvmover.store.bucket.compaction import CATALOG
from kvmover.store.bucket.sealed import DATA, DEAD, HEAD, USED, segment_of
from kvmover.store.bucket.service import BucketEntry
from kvmover.store.record import BLOCK_BYTES

#: A head follows its data within minutes: what has stayed alone for so long belongs to nobody.
ALONE_S = 3600
#: Nobody who still tells of its uses is silent for so long.
_SILENT_S = 86_400


@dataclass(frozen=True, slots=True)
class Listing:
    """What lies in a namespace, by segment; catalogs and uses by name."""

    heads: dict[str, BucketEntry]
    data: dict[str, BucketEntry]
    dead: dict[str, BucketEntry]
    catalogs: dict[str, BucketEntry]
    uses: dict[str, BucketEntry]

    @property
    def all(self) -> tuple[dict[str, BucketEntry], ...]:
        """Each kind, in the order in which they may be deleted: nobody then believes what he cannot read."""
        return self.heads, self.catalogs, self.data, self.dead, self.uses

    @classmethod
    def of(cls, entries: Iterable[BucketEntry]) -> Listing:
        """By what follows the last `/` of each name; what no kvmover writes is left out."""
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
    """An object that nobody will ever ask for: by its name, and that of the other half which it lacks, or "" if none.

    `blocks`: so many objects may have their bytes in it.
    """

    name: str
    lacks: str
    blocks: int


def left_overs(listing: Listing, now_s: float) -> list[LeftOver]:
    """Returns the files without their other half, by a listing, and uses of writers that are gone.

    Ages count from the youngest object of the listing where that is before `now_s`: a clock that is ahead here makes
    nothing old.
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
