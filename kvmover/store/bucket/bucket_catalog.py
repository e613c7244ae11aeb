"""A BucketCatalog is one process's index of a namespace in a bucket, and refreshes it from listings.

Lookups read memory only. Listings find segments of other writers: the youngest every `_LOOK_S` seconds, all every
`_SURVEY_S`, in the bucket's threads and in upkeep. Failed requests leave the index unchanged and count in `lagged`.
"""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import Lock, RLock

from kvmover.store.boot import HostBoot
from kvmover.store.bucket.choice import Listing
from kvmover.store.bucket.compaction import decode_catalog, segments_within
from kvmover.store.bucket.sealed import DATA, DEAD, HEAD, Dead, SealedSegment, decode_uses, read_head, segment_name
from kvmover.store.bucket.service import BucketEntry, ObjectBucket
from kvmover.store.deletion import DeletionDoor, Permit
from kvmover.store.files import reason_of
from kvmover.store.index import Index
from kvmover.store.stored import StoredObject

#: Seconds between listings of the youngest segments, and of all segments.
_LOOK_S, _SURVEY_S = 3.0, 300.0

#: A listing of the youngest begins this many seconds ago: it allows for slow filling plus clock skew of writers.
_LATE_S = 900

#: Heads fetched at a time: about 100 MB of memory.
_HEADS = 32

#: Up to this many unknown segments are read by their heads; with more, unread catalogs are read first.
_FEW_HEADS = 8

#: Bytes read from the beginning of a catalog to list its segments.
_CONTENTS_BYTES = 1 << 20


@dataclass(slots=True, eq=False)
class KeptSegment:
    """A segment of the bucket. `dead`: deletions known here; `told`: deletions in its `.dead` object, version `tag`."""

    name: str
    data_bytes: int
    head_bytes: int
    objects: int
    dead: Dead = field(default_factory=Dead)
    told: Dead = field(default_factory=Dead)
    tag: str = ""


class BucketCatalog:
    """The segments of one folder of a bucket, and their index. `lock` is held briefly, never during a request."""

    def __init__(self, bucket: ObjectBucket, folder: str, namespace: bytes, machine: HostBoot) -> None:
        self.bucket, self.folder, self.namespace, self.machine = bucket, folder, namespace, machine
        self.lock = RLock()
        self.index = Index()
        #: Permits every deletion that other processes see.
        self.door = DeletionDoor(machine.now())
        self.segments: dict[str, KeptSegment] = {}
        #: Names of the segments in each catalog object; None while the catalog is unread.
        self.catalogs: dict[str, list[str] | None] = {}
        self.dropped: Counter[str] = Counter()
        self.lagged: Counter[str] = Counter()
        self.listing = Listing.of(())
        self._refused: dict[str, str] = {}
        self._uses: dict[str, str] = {}
        self._learning = Lock()
        self._looked_s = self._surveyed_s = -_SURVEY_S

    def path(self, name: str) -> str:
        """Return the full object name of `name` within this namespace's folder."""
        return f"{self.folder}/{name}"

    @property
    def held_bytes(self) -> int:
        """Bytes of all known `.data` objects, dead payloads included."""
        return sum(segment.data_bytes for segment in self.segments.values())

    def lag(self, error: OSError) -> None:
        """Count a failed request by its reason; a later listing tries again."""
        self.lagged[reason_of(error)] += 1

    def refresh(self) -> None:
        """Start `look` in a thread of the bucket if the last one began more than `_LOOK_S` ago. Never raises."""
        if time.monotonic() - self._looked_s > _LOOK_S and not self._learning.locked():
            self._looked_s = time.monotonic()
            self.bucket.begin(self.look)

    def look(self) -> None:
        """Index the youngest segments of other writers, or call `survey` if due. Never raises OSError."""
        if time.monotonic() - self._surveyed_s > _SURVEY_S:
            self.survey()
            return
        after = segment_name(self.machine.now() - _LATE_S, bytes(4), 0)
        with self._learning:
            self._looked_s = time.monotonic()
            try:
                self._learn(Listing.of(self.bucket.list(self.folder, self.path(after))))
            except OSError as error:
                self.lag(error)

    def survey(self) -> bool:
        """List the whole namespace, index new segments and forget removed ones. Returns False if the listing failed."""
        with self._learning:
            self._looked_s = time.monotonic()
            with self.lock:
                known = set(self.segments)
            try:
                listing = Listing.of(self.bucket.list(self.folder))
            except OSError as error:
                self.lag(error)
                return False
            with self.lock:
                self.listing = listing
                for name in known - listing.heads.keys():
                    self.forget(name)
                self.catalogs = {name: self.catalogs.get(name) for name in listing.catalogs}
            if self._learn(listing):
                self._surveyed_s = time.monotonic()
            return True

    def _learn(self, listing: Listing) -> bool:
        """Read new segments, deletions and uses. Returns True if every request succeeded."""
        before = self.lagged.total()
        fresh = self._fresh(listing)
        if len(fresh) > _FEW_HEADS:
            for name in sorted(self.catalogs, reverse=True):
                if self.catalogs[name] is None:
                    self._read_catalog(name, listing)
            fresh = self._fresh(listing)
        for first in range(0, len(fresh), _HEADS):
            self._read_heads(fresh[first : first + _HEADS], listing)
        self._read_dead(listing)
        self._read_uses(listing)
        return self.lagged.total() == before

    def _read_heads(self, names: Sequence[str], listing: Listing) -> None:
        """Fetch these segments' heads concurrently and index their objects."""
        heads = self.bucket.gather([partial(self.bucket.get, self.path(name + HEAD)) for name in names])
        for name, head in zip(names, heads, strict=True):
            if isinstance(head, OSError):
                if head.errno != errno.ENOENT:
                    self.lag(head)
                continue
            found = read_head(name, head, self.namespace)
            self._take(found if isinstance(found, str) else [found], [name], listing)

    def _fresh(self, listing: Listing) -> list[str]:
        with self.lock:
            known = self.segments.keys()
            return [n for n, e in listing.heads.items() if n not in known and self._refused.get(n) != e.tag]

    def _read_catalog(self, name: str, listing: Listing) -> None:
        """Read a catalog and index those of its segments that are listed and still unknown."""
        try:
            data = self.bucket.get(self.path(name))
        except OSError as error:
            self.lag(error)
            return
        found = decode_catalog(data, self.namespace)
        if found is None:
            self.dropped["damaged catalog"] += 1
        self.catalogs[name] = [each.name for each in found or ()]
        fresh = set(self._fresh(listing))
        self._take([each for each in found or () if each.name in fresh], (), listing)

    def read_contents(self) -> None:
        """Read the segment names of catalogs not read yet, from their first bytes. Raises OSError."""
        for name in [name for name, within in self.catalogs.items() if within is None]:
            within = segments_within(bytes(self.bucket.read(self.path(name), 0, _CONTENTS_BYTES)))
            with self.lock:
                self.catalogs[name] = within or []

    def _take(self, found: Sequence[SealedSegment] | str, names: Sequence[str], listing: Listing) -> None:
        """Index segments whose listed `.data` has the stated length; or refuse `names` for the reason `found`.

        A refused segment is skipped until its head's tag changes.
        """
        if isinstance(found, str):
            self._refuse(names, found, listing)
            return
        for each in found:
            data = listing.data.get(each.name)
            if data is not None and data.nbytes != each.data_bytes:
                self._refuse([each.name], "truncated", listing)
                continue
            with self.lock:  # one segment at a time: the scheduler's lookups wait for this lock
                if each.name not in self.segments:
                    kept = KeptSegment(each.name, each.data_bytes, each.head_bytes, each.objects)
                    self.segments[each.name] = kept
                    self.index.add_table(each.name, each.table, self.machine.now())

    def _refuse(self, names: Iterable[str], reason: str, listing: Listing) -> None:
        for name in names:
            self._refused[name] = listing.heads[name].tag
            self.dropped[reason] += 1

    def _read_dead(self, listing: Listing) -> None:
        """Read changed `.dead` objects of known segments and drop the objects they list."""
        with self.lock:
            kept = [(self.segments[n], e) for n, e in listing.dead.items() if n in self.segments]
            kept = [(segment, entry) for segment, entry in kept if segment.tag != entry.tag]
        answers = self.bucket.gather([partial(self.bucket.get, entry.name) for _, entry in kept])
        for (segment, entry), data in zip(kept, answers, strict=True):
            if isinstance(data, OSError):
                self.lag(data)
                continue
            told = Dead.decode(data)
            with self.lock:
                segment.tag = entry.tag
                if told:
                    self.heard(segment, told)

    def heard(self, segment: KeptSegment, told: Dead) -> None:
        """Apply deletions that a segment's `.dead` lists. Under the lock."""
        segment.told = told
        segment.dead.join(told)
        gone = [each.record for each in self.index.objects(segment.name) if told.has(each.offset)]
        self.index.remove_at(segment.name, gone)

    def _read_uses(self, listing: Listing) -> None:
        """Read changed `.used` objects of other processes. Stamps in the future are ignored."""
        kept: list[BucketEntry] = [e for n, e in listing.uses.items() if self._uses.get(n) != e.tag]
        answers = self.bucket.gather([partial(self.bucket.get, entry.name) for entry in kept])
        latest = self.machine.now()
        for entry, data in zip(kept, answers, strict=True):
            if isinstance(data, OSError):
                self.lag(data)
                continue
            self._uses[entry.name.rpartition("/")[2]] = entry.tag
            with self.lock:
                self.used({page: stamp for page, stamp in decode_uses(data).items() if stamp <= latest})

    def used(self, stamps: dict[bytes, int]) -> None:
        """Raise last-use times (s) of pages to `stamps` where these are later. Under the lock."""
        known = self.index.stamps_of(list(stamps))
        late = sorted((stamp, page) for (page, stamp), was in zip(stamps.items(), known, strict=True) if stamp > was)
        for stamp, page in late:
            self.index.use([page], stamp)

    def forget(self, name: str) -> None:
        """Drop a segment that has left the bucket, with its objects. Under the lock."""
        self.index.drop(name)
        self.segments.pop(name, None)

    def delete(self, objects: Sequence[StoredObject], permit: Permit) -> int:
        """Delete objects from the index; upkeep later writes `.dead`. Returns their bytes in blocks. Under the lock."""
        for each in objects:
            if segment := self.segments.get(each.segment):
                segment.dead.kill([each.offset])
        return self.index.remove(objects)

    def names_of(self, segment: str) -> list[str]:
        """Return the object names of a segment in deletion order: head first."""
        return [self.path(segment + suffix) for suffix in (HEAD, DATA, DEAD)]
