"""OneCallFiles is the way to files that CONTRIBUTING's recipe makes: a system call a run, and nothing clever."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from kvmover.store.files import SHORT, Access, FileRun, HostMemory, Look, Make, OpenFile, reason_of
from kvmover.transport import Memory


class OneCallFiles:
    """Reads and writes each run by itself, through the page cache."""

    name = "a call a run"
    group_bytes = 1 << 20

    def __init__(self) -> None:
        self._memory = HostMemory()

    def register(self, memory: Memory) -> None:
        self._memory.add(memory)

    def deregister(self, memory: Memory) -> None:
        self._memory.remove(memory)

    def view(self, address: int, nbytes: int) -> memoryview:
        return self._memory.view(address, nbytes)

    def views(self, runs: Sequence[FileRun]) -> list[memoryview]:
        return self._memory.views(runs)

    def open(self, path: Path) -> OpenFile:
        return OpenFile(path, Access.BUFFERED)

    def close_file(self, file: OpenFile) -> None:
        file.close()

    def read(self, runs: Sequence[FileRun]) -> list[str]:
        return [self._move(os.preadv, run, view) for run, view in zip(runs, self.views(runs), strict=True)]

    def write(self, runs: Sequence[FileRun]) -> list[str]:
        return [self._move(os.pwritev, run, view) for run, view in zip(runs, self.views(runs), strict=True)]

    def read_each(self, groups: Sequence[Sequence[FileRun]], look: Look) -> None:
        for number, runs in enumerate(groups):
            look(number, self.read(runs))

    def write_each(self, makes: Sequence[Make], look: Look) -> None:
        for number, make in enumerate(makes):
            look(number, self.write(make()))

    def close(self) -> None:
        self._memory = HostMemory()

    @staticmethod
    def _move(call, run: FileRun, view: memoryview) -> str:
        done = 0
        while done < run.nbytes:
            try:
                step = call(run.file.fd, [view[done:]], run.offset + done)
            except OSError as error:
                return reason_of(error)
            if not step:
                return f"{SHORT} {done} of {run.nbytes} bytes"
            done += step
        return ""
