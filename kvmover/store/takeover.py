"""The segments of writers that are no more are taken over: what is whole is kept, the rest dropped with its reason."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from kvmover.store.catalog import SLICE, Catalog
from kvmover.store.files import is_shared
from kvmover.store.guard_lock import GuardLock, off_lock
from kvmover.store.objects import Verdict
from kvmover.store.second_look import look_again
from kvmover.store.segment import DATA, HEAD, Life, Segment, segments_in
from kvmover.store.stored import StoredObject

#: A head that another machine wrote is taken over once it has been silent for so long, on a network file system: its
#: end may not be seen here before, and would be cut off.
_SILENCE_S = 10


class SegmentTakeover:
    """Judges and seals what dead writers left in the folder of a catalog, and removes what is nobody's."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._is_shared = is_shared(catalog.folder)

    @property
    def lock(self) -> GuardLock:
        """The catalog's."""
        return self._catalog.lock

    @off_lock
    def recover(self) -> int:
        """Take over all segments of writers that are no more: how many there were.

        Raises nothing: what cannot be done now is done later.
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
        """Heads whose writer died before their first line, and data whose head is gone. Raises OSError.

        Data is listed first, since a head is made before its data: what is made meanwhile is no left-over.
        """
        folder = self._catalog.folder
        data = list(folder.glob(f"*{DATA}"))
        heads = segments_in(folder)
        with self.lock:
            known = self._catalog.segments.keys() | self._catalog.refused
        for name in heads - known:
            if self._is_silent(folder / (name + HEAD)):
                Segment.remove_stillborn(folder, name)
        for path in data:
            if path.stem not in heads and self._is_silent(path):
                path.unlink(missing_ok=True)

    def _is_silent(self, path: Path) -> bool:
        """Whether all that was written to a file is seen here: for a while nobody has, where machines share it."""
        return not self._is_shared or time.time() - path.stat().st_mtime > _SILENCE_S

    def _take_over(self, segment: Segment) -> bool:
        """Judge what a dead writer left, and seal it; False where the writer lives.

        What waits goes on waiting until all of it is judged: an error half way loses nothing. Raises OSError.
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
                waiting, size = list(segment.waiting), segment.data_bytes()
            bad = {each.record: self._flaw(each, size) for each in waiting}
            if not segment.is_sealed:
                with suppress(OSError):  # what is not synced is checked again after the next crash
                    segment.settle()
            for first in range(0, len(waiting), SLICE):
                self._judged(segment, waiting[first : first + SLICE], bad)
            with self.lock:
                self._finish(segment, size)
            catalog.sweep()
        finally:
            with self.lock:
                segment.release()
        return True

    def _read_all(self, segment: Segment) -> None:
        """Learn everything of a segment without a writer, behind damaged records too."""
        catalog = self._catalog
        catalog.drain(segment)
        while not segment.is_sealed and segment.skip_damage():
            catalog.dropped["damaged header"] += 1
            catalog.drain(segment)
        if not segment.is_sealed and segment.torn_bytes():
            catalog.dropped["torn header"] += 1

    def _flaw(self, each: StoredObject, size: int) -> str:
        """Why an object is not believed, or "". Raises OSError where the system does not say."""
        if each.offset + each.nbytes > size:
            return "truncated"
        verdict, reason = look_again(self._catalog.folder, each)
        return "" if verdict is Verdict.WELL else reason

    def _judged(self, segment: Segment, some: Sequence[StoredObject], bad: dict[int, str]) -> None:
        """Believe what is well, and kill what is bad. Raises OSError."""
        with self.lock:
            segment.kill(each.record for each in some if bad[each.record])
            self._catalog.index.add(each for each in some if not bad[each.record])
            self._catalog.dropped.update(bad[each.record] for each in some if bad[each.record])

    def _finish(self, segment: Segment, size: int) -> None:
        """Add nothing to a segment that was judged, and give back what lies between its objects: payloads whose
        headers its writer did not live to write. Raises OSError.
        """
        catalog = self._catalog
        if segment.name in catalog.segments:
            catalog.sizes.note(segment.name, size)
        segment.waiting = []
        if not segment.is_sealed:
            os.ftruncate(segment.head_fd, segment.parsed)
            with suppress(OSError):
                segment.mark_synced(size)
                segment.seal()
        end = 0
        for _, offset, nbytes in sorted(catalog.index.placed_in(segment.name).ranges()):
            if offset > end:
                catalog.free(segment.name, end, offset - end)
            end = offset + nbytes
        if end and size > end:
            catalog.free(segment.name, end, size - end)
        catalog.discard(segment.name)
