"""LentFiles are open data files of a folder by the name of their segment, the least recently used closed first.

They are lent to reads and writes: a descriptor is never closed under one of them, since its number is soon that of
another file, which the read would then go on in.
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
    """`doomed`: to be closed when the last user is done."""

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
        """Files that stay open until the end of the block; those that are not there are left out.

        The lock is held only to open: reads go on without it. Raises OSError where this process cannot
        open a file that is there, which says nothing about its objects.
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
        """Whether the file is open."""
        return name in self._open

    def busy(self, name: str) -> bool:
        """Whether somebody is at work in the file. Under the lock."""
        return name in self._open and self._open[name].users > 0

    def end(self, name: str) -> None:
        """The file is gone from its folder: `close_ended` closes it as soon as nobody uses it. Under the lock."""
        if name in self._open:
            self._open[name].doomed = True
            if not self._open[name].users:
                self._end(name)

    def close_ended(self) -> None:
        """Close what nobody will use. Not under the lock: who closes a removed file last frees it, 256 MiB in 47 ms."""
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
        """Close all files, which nobody uses."""
        with self._lock:
            for name in list(self._open):
                self._end(name)
        self.close_ended()

    def _end(self, name: str) -> None:
        self._over.append(self._open.pop(name).file)
