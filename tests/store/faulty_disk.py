"""A disk below one folder that fails at a chosen call, and knows what of its files a power cut would leave.

Every call that the files engine makes of the system is counted, and has an effect on real files. A write is safe once
a sync of its file has said so, and a name once a sync of its folder has. A sync that fails leaves writes that no later
one will make safe, as on Linux.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import io
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from kvmover.store import segment as segment_module

#: Where each call lives that can fail. `fallocate` is the C library's, which gives blocks back.
PLACES: dict[str, Any] = {
    **dict.fromkeys(("open", "close", "dup", "stat", "lstat", "fstat", "scandir", "mkdir", "unlink", "replace"), os),
    **dict.fromkeys(("pread", "preadv", "pwrite", "pwritev", "write", "ftruncate", "utime", "posix_fadvise"), os),
    **dict.fromkeys(("fsync", "fdatasync", "fstatvfs"), os),
    "flock": fcntl,
    "io.open": io,
    "fallocate": segment_module._libc,
}


class Trouble(Enum):
    """The ways in which a call fails. The system's are told, or cost nothing that is safe; the medium's do both."""

    EIO = "error"
    ESTALE = "stale handle"
    ENOENT = "no such name"
    EACCES = "not permitted"
    ENOSPC = "no space"
    AFTER = "done, and an error"
    SHORT = "half of it"
    GARBLED = "read with a wrong bit"
    UNLISTED = "a listing without names"
    LOST = "a write or a name that is not kept"
    TORN = "a write of which half is kept"
    ROT = "a write of which a bit changes"
    LYING = "a sync that is not done"

    @property
    def is_of_the_medium(self) -> bool:
        """Returns True if bytes or names are lost of which the disk said that they are there."""
        return self in (Trouble.LOST, Trouble.TORN, Trouble.ROT, Trouble.LYING)


READS, WRITES, SYNCS = ("pread", "preadv"), ("pwrite", "pwritev", "write"), ("fsync", "fdatasync")
_OPEN = Trouble.EIO, Trouble.ESTALE, Trouble.ENOENT, Trouble.EACCES, Trouble.ENOSPC
#: The troubles of each call.
TROUBLES: dict[str, tuple[Trouble, ...]] = {
    **dict.fromkeys(("open", "io.open"), _OPEN),
    **dict.fromkeys(("stat", "lstat", "unlink"), (Trouble.EIO, Trouble.ESTALE, Trouble.ENOENT)),
    **dict.fromkeys(("fstat", "flock"), (Trouble.EIO, Trouble.ESTALE)),
    "scandir": (Trouble.EIO, Trouble.ESTALE, Trouble.ENOENT, Trouble.UNLISTED),
    "mkdir": (Trouble.EIO, Trouble.ENOSPC, Trouble.AFTER),
    "replace": (Trouble.EIO, Trouble.ENOSPC, Trouble.AFTER, Trouble.LOST),
    **dict.fromkeys(("ftruncate", "fallocate", "utime"), (Trouble.EIO, Trouble.AFTER)),
    **dict.fromkeys(READS, (Trouble.EIO, Trouble.ESTALE, Trouble.SHORT, Trouble.GARBLED)),
    **dict.fromkeys(
        WRITES,
        (Trouble.EIO, Trouble.ENOSPC, Trouble.AFTER, Trouble.SHORT, Trouble.LOST, Trouble.TORN, Trouble.ROT),
    ),
    **dict.fromkeys(SYNCS, (Trouble.EIO, Trouble.AFTER, Trouble.LYING)),
}
#: Those that the store tells apart, for what takes many tries.
TOLD_APART = {
    Trouble.EIO,
    Trouble.ENOENT,
    Trouble.AFTER,
    Trouble.GARBLED,
    Trouble.UNLISTED,
    Trouble.TORN,
    Trouble.LYING,
}
CODES = {each: getattr(errno, each.name) for each in Trouble if hasattr(errno, each.name)}
REAL = {name: getattr(module, name.rpartition(".")[2]) for name, module in PLACES.items()}


class DiskCall(NamedTuple):
    """A call: its name, and the path below the folder that it is about, "" for the folder itself."""

    name: str
    path: str


Change = Callable[[bytearray], object]


@dataclass(slots=True, eq=False)
class _File:
    """A file: its bytes that are safe, and what was done to it since. `real`: its bytes are looked up when synced."""

    safe: bytearray = field(default_factory=bytearray)
    since: list[Change] = field(default_factory=list[Change])
    is_folder: bool = False
    real: bool = False

    def whole(self) -> bytearray:
        """Returns the bytes with all changes."""
        data = bytearray(self.safe)
        for change in self.since:
            change(data)
        return data


class FaultyDisk:
    """The disk below `root`. `troubles`: by number of the call, from 0 on. `calls`: all that were made.

    `hit`: paths that the medium lost something of.
    """

    def __init__(self, root: Path, troubles: Mapping[int, Trouble]) -> None:
        self.root, self.troubles = root, troubles
        self.calls, self.hit = list[DiskCall](), set[str]()
        self._paths, self._is_off = dict[int, str](), False
        #: Files by path now, and those that a power cut leaves; changes of names by folder.
        self._files, self._safe = dict[str, _File](), dict[str, _File]()
        self._renamed = dict[str, list[Callable[[dict[str, _File]], object]]]()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """All calls pass here for the length of a block."""
        with ExitStack() as stack:
            for name, module in PLACES.items():
                stack.enter_context(mock.patch.object(module, name.rpartition(".")[2], self._of(name)))
            yield

    def images(self) -> Iterator[dict[str, bytes | None]]:
        """Yields what different power cuts would leave: files by path, None for folders. Safe bytes alone, or those of
        heads, of payloads or of all files as well; safe names alone, or all.
        """
        seen = set[tuple[tuple[str, bytes | None], ...]]()
        latest = dict(self._safe)
        for changes in self._renamed.values():
            for change in changes:
                change(latest)
        for names in (self._safe, latest):
            for kept in ((), (".head", ".news"), (".data",), ("",)):
                image = dict[str, bytes | None]()
                for path, file in sorted(names.items()):
                    if (parent := path.rpartition("/")[0]) and parent not in image:
                        continue  # its folder is gone
                    data = file.whole() if path.endswith(kept) else file.safe
                    image[path] = None if file.is_folder else bytes(data)
                if (key := tuple(image.items())) not in seen:
                    seen.add(key)
                    yield image

    def power_cut(self) -> None:
        """Only safe bytes and names are left below the root."""
        image, self._is_off = next(self.images()), True
        shutil.rmtree(self.root)
        laid_out(image, self.root)
        self._is_off = False
        self._paths.clear()
        self._files = dict(self._safe)
        self._renamed.clear()
        for file in self._files.values():
            file.since.clear()

    # Calls.

    def _of(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            real = REAL[name]
            path = self._path(arguments[0]) if arguments else None
            if path is None:
                return real(*arguments, **options)
            trouble = None
            if name in TROUBLES:
                planned = self.troubles.get(len(self.calls))
                trouble = planned if planned in TROUBLES[name] else None
                self.calls.append(DiskCall(name, path))
            return self._done(name, path, trouble, lambda: real(*arguments, **options), arguments)

        return call

    def _path(self, of: Any) -> str | None:
        """Returns the path below the root that a call is about, or None for another file."""
        if isinstance(of, int):
            return self._paths.get(of)
        if self._is_off or not isinstance(of, str | os.PathLike):
            return None
        text, root = os.fspath(of), str(self.root)
        return text[len(root) :].lstrip("/") if text.startswith(root) else None

    def _done(
        self, name: str, path: str, trouble: Trouble | None, real: Callable[[], Any], given: Sequence[Any]
    ) -> Any:
        if trouble in CODES:
            return self._fails(name, path, CODES[trouble])
        if trouble is not None and trouble.is_of_the_medium:
            self.hit.add(path)
        if name in WRITES:
            found = self._write(name, path, trouble, given)
        elif name in READS:
            found = _read(name, trouble, given)
        elif name in SYNCS:
            found = self._sync(path, is_done=trouble is not Trouble.LYING)
        elif trouble is Trouble.UNLISTED:
            found = _NoNames()
        elif trouble is Trouble.LOST:  # a rename
            found = REAL["unlink"](given[0])
        else:
            found = real()
            self._changed(name, path, found, given)
        return self._fails(name, path, errno.EIO) if trouble is Trouble.AFTER else found

    def _fails(self, name: str, path: str, code: int) -> int:
        if name in SYNCS and path in self._files:
            self._files[path].since.clear()
        if name == "fallocate":
            ctypes.set_errno(code)
            return -1
        raise OSError(code, os.strerror(code))

    def _changed(self, name: str, path: str, found: Any, given: Sequence[Any]) -> None:
        """Note files that come, go, and change by other calls than writes."""
        if name == "open":
            self._paths[found] = path
            if given[1] & os.O_CREAT and path not in self._files:
                self._comes(path, _File())
        elif name == "io.open":
            self._paths[found.fileno()] = path
            if path not in self._files:
                self._comes(path, _File(real=True))
        elif name == "dup":
            self._paths[found] = path
        elif name == "close":
            self._paths.pop(given[0], None)
        elif name == "mkdir":
            self._comes(path, _File(is_folder=True))
        elif name == "unlink":
            self._files.pop(path, None)
            self._renames(path, lambda names: names.pop(path, None))
        elif name == "replace":
            target = self._path(given[1]) or ""
            file = self._files[target] = self._files.pop(path)
            self._renames(path, lambda names: (names.pop(path, None), names.update({target: file})))
        elif name == "ftruncate":
            self._files[path].since.append(lambda data: _resize(data, given[1]))
        elif name == "fallocate" and found == 0:
            self._files[path].since.append(lambda data: _blank(data, given[2], given[3]))

    def _comes(self, path: str, file: _File) -> None:
        self._files[path] = file
        self._renames(path, lambda names: names.update({path: file}))

    def _renames(self, path: str, change: Callable[[dict[str, _File]], object]) -> None:
        """A change of names, which a sync of their folder makes safe."""
        self._renamed.setdefault(path.rpartition("/")[0], []).append(change)

    def _write(self, name: str, path: str, trouble: Trouble | None, given: Sequence[Any]) -> int:
        fd, told = given[0], given[1]
        data = bytearray(b"".join(told) if name == "pwritev" else told)
        at, count = REAL["fstat"](fd).st_size if name == "write" else given[2], len(data)
        if trouble in (Trouble.SHORT, Trouble.TORN):
            del data[max(1, count // 2) :]
        elif trouble is Trouble.ROT:
            data[count // 2] ^= 4
        elif trouble is Trouble.LOST:
            data.clear()
        if data:
            REAL["write"](fd, data) if name == "write" else REAL["pwrite"](fd, data, at)
            self._files[path].since.append(lambda safe: _put(safe, at, data))
        return len(data) if trouble is Trouble.SHORT else count

    def _sync(self, path: str, *, is_done: bool) -> None:
        changes, file = self._renamed.pop(path, []), self._files.get(path)
        if is_done:
            for change in changes:
                change(self._safe)
            if file is not None and file.real:
                file.safe = bytearray((self.root / path).read_bytes())
            elif file is not None:
                file.safe = file.whole()
        if file is not None:
            file.since.clear()


class _NoNames:
    """A listing that has no name yet."""

    def __enter__(self) -> Iterator[os.DirEntry[str]]:
        return iter(())

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def __iter__(self) -> Iterator[os.DirEntry[str]]:
        return iter(())

    def close(self) -> None:
        """Nothing is open."""


def laid_out(image: Mapping[str, bytes | None], folder: Path) -> None:
    """Make a folder with these files."""
    folder.mkdir()
    for path, data in image.items():
        if data is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(data)


def _read(name: str, trouble: Trouble | None, given: Sequence[Any]) -> Any:
    if name == "pread":
        fd, nbytes, at = given
        data = bytearray(REAL["pread"](fd, max(1, nbytes // 2) if trouble is Trouble.SHORT else nbytes, at))
        if trouble is Trouble.GARBLED and data:
            data[len(data) // 2] ^= 4
        return bytes(data)
    fd, views, at = given
    if trouble is Trouble.SHORT:
        first = memoryview(views[0])
        return REAL["preadv"](fd, [first[: max(1, len(first) // 2)]], at)
    count = REAL["preadv"](fd, views, at)
    if trouble is Trouble.GARBLED and count:
        first = memoryview(views[0])
        first[len(first) // 2] ^= 4
    return count


def _put(data: bytearray, at: int, new: bytes | bytearray) -> None:
    _resize(data, max(len(data), at + len(new)))
    data[at : at + len(new)] = new


def _resize(data: bytearray, size: int) -> None:
    del data[size:]
    data.extend(bytes(size - len(data)))


def _blank(data: bytearray, at: int, nbytes: int) -> None:
    end = min(len(data), at + nbytes)
    data[at:end] = bytes(max(0, end - at))
