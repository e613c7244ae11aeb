"""Two independent checks of a folder establish that a file is absent, or that a segment holds no live object.

A single check never justifies deleting shared data: a listing may be stale, a file that one process cannot open may
open for the next, and an error proves neither presence nor absence.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvmover.store.boot import NO_BOOT
from kvmover.store.deletion import DELETIONS, EMPTY, DeletionDoor, Look, Permit, Seen, TwoLooks
from kvmover.store.files import close_quietly, is_absent, open_shared
from kvmover.store.head import whole_records
from kvmover.store.record import BLOCK_BYTES, DIGEST_BYTES, FIXED_BYTES, LIVE, PREAMBLE_BYTES
from kvmover.store.segment import DATA, HEAD, Life, Segment

STILLBORN, ORPHAN = "head without a first line", "data without a head"
TORN = "torn header"

#: A byte range of a data file: offset and length.
ByteRange = tuple[int, int]


@dataclass(frozen=True, slots=True)
class WholeHead:
    """The contents of a head file, read through a freshly opened descriptor.

    `living`: offset and bytes of each live object's payload. `end`: the byte after the last whole record. `damages`:
    number of stretches that hold no whole record, a torn end among them.
    """

    nbytes: int
    end: int
    living: list[ByteRange]
    damages: int
    sealed: bool

    @property
    def torn(self) -> TwoLooks:
        """Grounds to truncate the head after its last whole record, beyond which it is unreadable to every reader."""
        return TwoLooks(Look(Seen.READ, TORN), Look(Seen.ANEW, TORN), _records_in(self.nbytes - self.end))


def _records_in(nbytes: int) -> int:
    """Returns the most objects that an unreadable stretch of `nbytes` of a head can describe; 0 for a mark."""
    return nbytes // (FIXED_BYTES + DIGEST_BYTES)


def read_head_anew(segment: Segment) -> WholeHead:
    """Read a whole head file, in pieces. Raises OSError."""
    fd = open_shared(segment.head)
    try:
        nbytes, end, living, damages, sealed = os.fstat(fd).st_size, PREAMBLE_BYTES, list[ByteRange](), 0, False
        for table in whole_records(fd, nbytes):
            if table is None:
                damages += 1
                continue
            alive = table.where(table.state == LIVE)
            living += zip(alive.offset.tolist(), alive.nbytes.tolist(), strict=True)
            end, sealed = table.end, sealed or table.sealed
    finally:
        close_quietly(fd)
    return WholeHead(nbytes, end, living, damages, sealed)


def names_in(folder: Path) -> set[str]:
    """List the file names in `folder`. Raises OSError."""
    with os.scandir(folder) as entries:
        return {entry.name for entry in entries}


def why_empty(segment: Segment) -> TwoLooks | None:
    """Returns grounds to remove a finished segment whose head was read whole and has no live object.

    None if an object lives, the checks disagree, or the segment is unsealed and another's. Raises OSError.
    """
    named_bytes, found = os.lstat(segment.head).st_size, read_head_anew(segment)
    if found.living or found.nbytes != named_bytes or not (found.sealed or segment.is_ours):
        return None
    return TwoLooks(Look(Seen.NAME, "whole"), Look(Seen.ANEW, EMPTY), DELETIONS if found.damages else 0)


def is_data_missing(segment: Segment) -> bool:
    """Returns True if a listing has the segment's head file but not its data file. Raises OSError."""
    names = names_in(segment.folder)
    return segment.name + HEAD in names and segment.name + DATA not in names


def why_orphan(folder: Path, name: str) -> TwoLooks | None:
    """Returns grounds to remove a data file without a head: a listing lacked the head, and so does its path.

    None if the head exists. Raises OSError.
    """
    try:
        os.lstat(folder / (name + HEAD))
    except OSError as error:
        if not is_absent(error):
            raise
        blocks = os.lstat(folder / (name + DATA)).st_size // BLOCK_BYTES
        return TwoLooks(Look(Seen.LISTING, ORPHAN), Look(Seen.NAME, ORPHAN), blocks)
    return None


def remove_orphan(folder: Path, name: str, permit: Permit) -> None:
    """Remove a data file without a head, unless already removed. Raises OSError."""
    (folder / (name + DATA)).unlink(missing_ok=True)


def remove_stillborn(folder: Path, name: str, door: DeletionDoor, now_s: float) -> None:
    """Remove a segment whose head lacks its preamble, unless its writer lives. Raises OSError.

    Holds the head's lock meanwhile: a writer that has just created the head then picks another name.
    """
    fd = -1
    try:
        fd = open_shared(folder / (name + HEAD))
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_short = len(os.pread(fd, PREAMBLE_BYTES, 0)) < PREAMBLE_BYTES
        if is_short and os.lstat(folder / (name + HEAD)).st_size < PREAMBLE_BYTES:
            looks = TwoLooks(Look(Seen.ANEW, STILLBORN), Look(Seen.NAME, STILLBORN), 0)
            if permit := door.ask(looks, 1, now_s):
                Segment(folder, name, NO_BOOT, Life.SEALED).unlink(permit)
    except BlockingIOError:
        return
    finally:
        close_quietly(fd)


def gaps(nbytes: int, held: Sequence[ByteRange]) -> list[ByteRange]:
    """Returns the gaps between the `held` ranges, rounded up to whole blocks, in a file's first `nbytes` bytes.

    >>> gaps(5 * 4096, [(4096, 100), (8192, 4096), (4096, 4096)])
    [(0, 4096), (12288, 8192)]
    """
    found: list[ByteRange] = []
    end = 0
    for offset, size in sorted(held):
        if offset > end:
            found.append((end, offset - end))
        end = max(end, offset + -(-size // BLOCK_BYTES) * BLOCK_BYTES)
    if nbytes > end:
        found.append((end, nbytes - end))
    return found
