"""Two looks at a folder, of different kinds, say that something is not there, or that nothing lives in it.

What one look says is no ground to delete anything for others: a listing may be of a while ago, a file that one process
cannot open is there for the next, and an error says nothing at all.
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

#: Where something begins in a data file, and its bytes.
ByteRange = tuple[int, int]


@dataclass(frozen=True, slots=True)
class WholeHead:
    """Returns the words of a head by a descriptor that was opened for it.

    `living`: offset and bytes of the payloads of objects that live. `end`: where the last whole record ends. `damages`:
    stretches that are no whole record, a torn end among them.
    """

    nbytes: int
    end: int
    living: list[ByteRange]
    damages: int
    sealed: bool

    @property
    def torn(self) -> TwoLooks:
        """Grounds to cut off what follows the last whole record, which who reads on could not read either."""
        return TwoLooks(Look(Seen.READ, TORN), Look(Seen.ANEW, TORN), _records_in(self.nbytes - self.end))


def _records_in(nbytes: int) -> int:
    """Returns how many objects a stretch of a head may describe that cannot be read; those of a mark are none."""
    return nbytes // (FIXED_BYTES + DIGEST_BYTES)


def read_head_anew(segment: Segment) -> WholeHead:
    """Read all of a head, in pieces. Raises OSError."""
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
    """Names of the files that a listing of `folder` has. Raises OSError."""
    with os.scandir(folder) as entries:
        return {entry.name for entry in entries}


def why_empty(segment: Segment) -> TwoLooks | None:
    """Grounds to remove a finished segment: its head has no object that lives, and all of it was read. None where
    something lives, or the looks do not agree. Raises OSError.
    """
    named_bytes, found = os.lstat(segment.head).st_size, read_head_anew(segment)
    if found.living or found.nbytes != named_bytes or not (found.sealed or segment.is_ours):
        return None
    return TwoLooks(Look(Seen.NAME, "whole"), Look(Seen.ANEW, EMPTY), DELETIONS if found.damages else 0)


def is_data_missing(segment: Segment) -> bool:
    """Returns whether a listing has a segment's head without its data, which did not open. Raises OSError."""
    names = names_in(segment.folder)
    return segment.name + HEAD in names and segment.name + DATA not in names


def why_orphan(folder: Path, name: str) -> TwoLooks | None:
    """Grounds to remove data of which a listing has no head: nor has the head a name. Raises OSError.

    None where there is one.
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
    """Remove data without a head. Raises OSError; one that is gone is no matter."""
    (folder / (name + DATA)).unlink(missing_ok=True)


def remove_stillborn(folder: Path, name: str, door: DeletionDoor, now_s: float) -> None:
    """Remove a pair whose head never got its first line, unless its writer lives. Raises OSError.

    The lock is held meanwhile: a writer that has just made the head takes another name.
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
    """Returns the gaps between ranges of the first `nbytes` bytes of a file, whole blocks being held.

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
