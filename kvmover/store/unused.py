"""Namespaces that nobody has written or read for long are emptied: above all those of weights that were replaced."""

from __future__ import annotations

import fcntl
import logging
import time
import uuid
from pathlib import Path

from kvmover.errors import StoreError
from kvmover.store.absence import names_in
from kvmover.store.boot import NO_BOOT
from kvmover.store.bucket.namespaces import bucket_namespaces, empty_unused
from kvmover.store.deletion import DeletionDoor, Look, Seen, TwoLooks
from kvmover.store.files import close_quietly, is_absent, open_shared
from kvmover.store.manifest import MANIFEST, Found, namespaces
from kvmover.store.segment import HEAD, Life, Segment, segments_in

log = logging.getLogger(__name__)


def clear_unused(root: Path | str, unused_s: float, spare: str = "") -> list[Found]:
    """Empty the namespaces under `root` that no process has written, read or opened for `unused_s`: which they were.

    Never the one whose folder is called `spare`, nor one that a living process on this machine writes. Manifests stay.
    Raises StoreError where `root` cannot be looked at; what cannot be removed is removed another time.
    """
    found = bucket_namespaces(root) if isinstance(root, str) else namespaces(root)
    others = [each for each in found if each.name != spare]
    try:
        if isinstance(root, str):
            emptied = empty_unused(root, [each.name for each in found], unused_s, spare)
            cleared = [each for each in others if each.name in emptied]
        else:
            before_s = _now_s(root) - unused_s
            door = DeletionDoor(time.time())
            folders = [(each, each.folder) for each in others if isinstance(each.folder, Path)]
            cleared = [each for each, folder in folders if _cleared(folder, before_s, door)]
    except OSError as error:
        raise StoreError(f"cannot look for unused namespaces in {root}: {error.strerror}") from error
    for each in cleared:
        log.info("emptied %s of %s %s: unused", each.name, each.manifest.model, each.manifest.weights)
    return cleared


def _now_s(root: Path) -> float:
    """By the clock that stamps files, or by this machine's where that is behind: a clock that is ahead empties nothing.

    Raises OSError.
    """
    trial = root / f"{uuid.uuid4().hex}.tmp"
    trial.touch()
    try:
        return min(time.time(), trial.stat().st_mtime)
    finally:
        trial.unlink(missing_ok=True)


def _cleared(folder: Path, before_s: float, door: DeletionDoor) -> bool:
    """Remove all segments of a namespace without a use since `before_s`; whether there were any. Raises OSError."""
    names = segments_in(folder)
    if not names or _last_use_s(folder, names) >= before_s or any(_is_written(folder, name) for name in names):
        return False
    looks = TwoLooks(Look(Seen.TIMES, "unused"), Look(Seen.LOCK, "unused"), 0)
    permit = door.ask(looks, len(names), time.time())
    if permit is None:
        return False
    for name in names:
        Segment(folder, name, NO_BOOT, Life.SEALED).unlink(permit)
    return True


def _last_use_s(folder: Path, names: set[str]) -> float:
    """When somebody wrote or stamped a header, or opened the namespace by its model. Raises OSError where it is not
    said of each: it may have been a moment ago.
    """
    paths = [folder / (name + HEAD) for name in names]
    if MANIFEST in names_in(folder):
        paths.append(folder / MANIFEST)
    return max(path.stat().st_mtime for path in paths)


def _is_written(folder: Path, name: str) -> bool:
    """Whether the writer of a segment lives. Raises OSError."""
    fd = -1
    try:
        fd = open_shared(folder / (name + HEAD))
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if not is_absent(error):
            raise
    finally:
        close_quietly(fd)
    return False
