"""The cleanup empties namespaces unused for long: above all those of replaced weights."""

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
    """Empty the namespaces under `root` that no process has written, read or opened for `unused_s`; returns them.

    Spares the folder named `spare`, and namespaces that a living process on this machine writes. Manifests stay.
    Raises StoreError if `root` cannot be read; files that cannot be removed are left to a later call.
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
    """Returns the earlier of the file system's and this machine's time (s): a fast clock empties no namespace.

    Raises OSError.
    """
    trial = root / f"{uuid.uuid4().hex}.tmp"
    trial.touch()
    try:
        return min(time.time(), trial.stat().st_mtime)
    finally:
        trial.unlink(missing_ok=True)


def _cleared(folder: Path, before_s: float, door: DeletionDoor) -> bool:
    """Remove all segments of a namespace unused since `before_s`; True if removed. Raises OSError."""
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
    """Returns the last time (s) that a header was written or stamped, or the namespace opened by its model.

    Raises OSError if any file's time is unknown, since that use may be recent.
    """
    paths = [folder / (name + HEAD) for name in names]
    if MANIFEST in names_in(folder):
        paths.append(folder / MANIFEST)
    return max(path.stat().st_mtime for path in paths)


def _is_written(folder: Path, name: str) -> bool:
    """Returns True if the writer of a segment lives. Raises OSError."""
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
