"""LentFiles are open data files of a folder by the name of their segment, the least recently used closed first.

Files are lent to reads and writes: a descriptor stays open during each, since its number may be reused for another
file, which the read would then continue in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvmover.store.files import Files, OpenFile, is_gone
from kvmover.store.guard_lock import GuardLock
from kvmover.store.segment import DATA

#: Files kept open for the next read; more are open while more are in use.
_OPEN_FILES = 128


@dataclass(slots=True, eq=False)
class _Lent:
    """A lent file. `doomed`: closed once the last user is done."""

    file: OpenFile
    users: int = 0
    doomed: bool = False


class LentFiles:
    """The data files of one folder, opened by `files`."""

    def __init__(self, folder: Path, files: Files, lock: GuardLock) -> None:
        self._folder, self._files, self._lock = folder, files, lock
        self._open: OrderedDict[str, _Lent] = OrderedDict()
        self._over: list[OpenFile] = []

    @contextmanager
    def lend(self, names: Iterable[str]) -> Generator[dict[str, OpenFile]]:
        """Lend files that stay open until the end of the `with` block; absent files are left out.

        Holds the lock only to open them. Raises OSError if an existing file cannot be opened, which is no evidence
        against its objects.
        """
        lent: dict[str, OpenFile] = {}
        try:
            with self._lock:
                for name in names:
                    if file := self._borrow(name):
                        lent[name] = file
            yield lent
        finally:
            with self._lock:
                for name in lent:
                    self._give_back(name)
            self.close_ended()

    def has(self, name: str) -> bool:
        """Returns True if the file is open."""
        return name in self._open

    def busy(self, name: str) -> bool:
        """Returns True if a read or write uses the file. Call under the lock."""
        return name in self._open and self._open[name].users > 0

    def end(self, name: str) -> None:
        """Mark a removed file, which `close_ended` closes once unused. Call under the lock."""
        if name in self._open:
            self._open[name].doomed = True
            if not self._open[name].users:
                self._end(name)

    def close_ended(self) -> None:
        """Close ended files. Call without the lock: the last close of a removed file frees it, 256 MiB in 47 ms."""
        with self._lock:
            over, self._over = self._over, []
        for file in over:
            self._files.close_file(file)

    def _borrow(self, name: str) -> OpenFile | None:
        one = self._open.get(name)
        if one is None:
            try:
                one = self._open[name] = _Lent(self._files.open(self._folder / (name + DATA)))
            except OSError as error:
                if is_gone(error):
                    return None
                raise
        one.users += 1
        self._open.move_to_end(name)
        for other in list(self._open)[: max(0, len(self._open) - _OPEN_FILES)]:
            if not self._open[other].users:
                self._end(other)
        return one.file

    def _give_back(self, name: str) -> None:
        one = self._open[name]
        one.users -= 1
        if one.doomed and not one.users:
            self._end(name)

    def close(self) -> None:
        """Close all files. Precondition: every loan has ended."""
        with self._lock:
            for name in list(self._open):
                self._end(name)
        self.close_ended()

    def _end(self, name: str) -> None:
        self._over.append(self._open.pop(name).file)
