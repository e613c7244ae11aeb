"""The takeover of dead writers' segments keeps whole objects and drops the rest by reason."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvmover.store.absence import TORN, gaps, read_head_anew, remove_orphan, remove_stillborn, why_orphan
from kvmover.store.deletion import Look, Seen, TwoLooks
from kvmover.store.fetch import look_again, suspects
from kvmover.store.files import is_shared
from kvmover.store.guard_lock import GuardLock, off_lock
from kvmover.store.objects import Verdict
from kvmover.store.segment import DATA, HEAD, Life, Segment, segments_in, sync_names
from kvmover.store.segment_catalog import SLICE, Catalog
from kvmover.store.stored import StoredObject

#: Seconds without a write after which another machine's head is taken over on a network file system: before, its end
#: may be invisible here and would be cut off.
_SILENCE_S = 10

#: The reason to free blocks between objects.
_HEADLESS = "payload without a header"


@dataclass(frozen=True, slots=True)
class _Judged:
    """The verdict on waiting objects: well ones, and bad ones with their reasons."""

    well: list[StoredObject]
    bad: list[tuple[StoredObject, str]]


class SegmentTakeover:
    """A takeover that judges and seals dead writers' segments in a catalog's folder, and removes left-over files."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._is_shared = is_shared(catalog.folder)

    @property
    def lock(self) -> GuardLock:
        """Returns the catalog's lock."""
        return self._catalog.lock

    @off_lock
    def recover(self) -> int:
        """Take over all segments of dead writers. Returns their number.

        Work that the system refuses is left to a later call, without an error.
        """
        catalog = self._catalog
        catalog.refresh()
        with self.lock:
            segments = list(catalog.segments.values())
        if not catalog.writable:
            return 0
        adopted = 0
        for segment in segments:
            if segment.life is Life.FOLLOWED or (segment.is_sealed and segment.waiting):
                try:
                    adopted += self._take_over(segment)
                except OSError as error:
                    catalog.lag(error)
        with suppress(OSError):
            self._remove_left_overs()
        with self.lock:
            for segment in catalog.segments.values():
                if segment.is_sealed:
                    catalog.discard(segment.name)
        catalog.sweep()
        return adopted

    def _remove_left_overs(self) -> None:
        """Remove heads whose writer died before the preamble, and data without a head. Raises OSError.

        Lists data first: a head is made before its data, so a segment made meanwhile is no left-over.
        """
        catalog, folder, now = self._catalog, self._catalog.folder, self._catalog.machine.now()
        data = list(folder.glob(f"*{DATA}"))
        heads = segments_in(folder)
        with self.lock:
            known = catalog.segments.keys() | catalog.refused
        for name in heads - known:
            if self._is_silent(folder / (name + HEAD)):
                remove_stillborn(folder, name, catalog.door, now)
        for path in data:
            if path.stem in heads or not self._is_silent(path):
                continue
            grounds = why_orphan(folder, path.stem)
            if grounds and (permit := catalog.door.ask(grounds, 1, now)):
                remove_orphan(folder, path.stem, permit)

    def _is_silent(self, path: Path) -> bool:
        """Returns True if all writes to a file are visible here: on a shared file system, after _SILENCE_S."""
        return not self._is_shared or time.time() - path.stat().st_mtime > _SILENCE_S

    def _take_over(self, segment: Segment) -> bool:
        """Judge and seal a dead writer's segment; False if the writer lives. Raises OSError.

        Objects keep waiting until all are judged, so that an error half way loses no object.
        """
        catalog = self._catalog
        theirs = segment.boot != catalog.machine.boot
        if theirs and not self._is_silent(segment.head):
            return False
        with self.lock:
            if segment.name not in catalog.segments or not segment.adopt():
                return False
        try:
            self._read_all(segment)
            with self.lock:
                waiting = list(segment.waiting)
            judged = self._judge(segment, waiting)
            is_synced = not segment.is_sealed and self._settled(segment)
            with self.lock:
                catalog.index.add(judged.well)
            refused = self._delete(segment, judged.bad)
            self._finish(segment, refused, is_synced)
            catalog.sweep()
        finally:
            with self.lock:
                segment.release()
        return True

    def _read_all(self, segment: Segment) -> None:
        """Read all records of a segment without a writer, also beyond damaged ones. Raises OSError."""
        catalog = self._catalog
        catalog.drain(segment)
        while not segment.is_sealed and segment.skip_damage():
            catalog.dropped["damaged header"] += 1
            catalog.drain(segment)
        if not segment.is_sealed and segment.torn_bytes():
            catalog.dropped[TORN] += 1

    def _judge(self, segment: Segment, waiting: Sequence[StoredObject]) -> _Judged:
        """Judge objects; a suspect is read anew. Objects deleted meanwhile are left out. Raises OSError."""
        judged = _Judged([], [])
        for each, is_suspect in suspects(self._catalog, segment.name, waiting):
            verdict, reason = look_again(self._catalog.folder, each) if is_suspect else (Verdict.WELL, "")
            if verdict is Verdict.WELL:
                judged.well.append(each)
            elif verdict is Verdict.BAD:
                judged.bad.append((each, reason))
        return judged

    def _settled(self, segment: Segment) -> bool:
        """Returns True if a dead writer's segment and its name are durable.

        Where a sync failed, what it lost stays readable until the machine's next crash: without a mark no flush counts
        on it, and another boot checks it.
        """
        try:
            segment.settle()
            sync_names(segment.folder)
        except OSError as error:
            self._catalog.lag(error)
            return False
        return True

    def _delete(self, segment: Segment, bad: Sequence[tuple[StoredObject, str]]) -> list[StoredObject]:
        """Kill bad objects as the door permits. Returns the refused ones, which wait on. Raises OSError.

        Only objects that their writer marked synced cost budget; the rest was never promised.
        """
        catalog, refused = self._catalog, list[StoredObject]()
        for first in range(0, len(bad), SLICE):
            with self.lock:
                for each, reason in bad[first : first + SLICE]:
                    promised = int(each.offset + each.nbytes <= segment.synced)
                    looks = TwoLooks(Look(Seen.READ, "not whole"), Look(Seen.ANEW, reason), promised)
                    if permit := catalog.door.ask(looks, 1, catalog.machine.now()):
                        segment.kill([each.record], permit)
                        catalog.dropped[reason] += 1
                    else:
                        refused.append(each)
        return refused

    @off_lock
    def _finish(self, segment: Segment, refused: list[StoredObject], is_synced: bool) -> None:
        """Seal a judged segment, marked if it is synced, and free the blocks between its objects: payloads without a
        header.

        Leaves it unchanged if a newly opened head disagrees, or a deletion was refused. Raises OSError.
        """
        catalog, now = self._catalog, self._catalog.machine.now()
        head = read_head_anew(segment)
        with self.lock:
            segment.waiting, size = refused, segment.data_bytes()
            if segment.name in catalog.segments:
                catalog.sizes.note(segment.name, size)
            if refused or head.end != segment.parsed or size < max(map(sum, head.living), default=0):
                return
            if not segment.is_sealed:
                permit = catalog.door.ask(head.torn, int(head.nbytes > head.end), now)
                if permit is None:
                    return
                segment.cut_head(permit)
                with suppress(OSError):
                    if is_synced:
                        segment.mark_synced(size)
                    segment.seal()
            held = head.living + [place[1:] for place in catalog.index.placed_in(segment.name).ranges()]
            looks = TwoLooks(Look(Seen.READ, _HEADLESS), Look(Seen.ANEW, _HEADLESS), 0)
            between = gaps(size, held) if held else []
            if between and (permit := catalog.door.ask(looks, 1, now)):
                catalog.free(segment.name, between, permit)
            catalog.discard(segment.name)
