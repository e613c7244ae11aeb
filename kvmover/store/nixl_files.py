"""NixlFiles reads and writes files through NIXL's storage plugins: many requests in flight, and system calls for the
rest.

A plugin answers for a request as a whole, without an errno, and some NIXL releases report a short transfer as done
(nixl#1696). So a failed request is repeated run by run by PlainFiles, which gives each run its own error; and callers
check the bytes they read.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kvmover.errors import TransportUnavailable
from kvmover.store.files import (
    DIRECT_BYTES,
    Access,
    FileRun,
    Files,
    Look,
    Make,
    OpenFile,
    PlainFiles,
    close_quietly,
    file_system_of,
    is_aligned,
    reason_of,
)
from kvmover.transport import Memory, NixlAgent, nixl_release, nixl_version, start_agent

log = logging.getLogger(__name__)

#: Descriptors of one request. A request beyond the plugin's pool (64 to 65536) breaks its queue for good.
_IN_FLIGHT = 4096
_POOL = 65536

#: Runs of this size fill a disk's queue one by one. Smaller neighbours are joined up to `_REQUEST_BYTES`: 8 MiB in a
#: row came at 2.4 GB/s as requests of 1 MiB, at 2.1 as requests of 64 KiB, and at 2.2 in one call.
_LARGE_BYTES, _REQUEST_BYTES = 256 << 10, 1 << 20

#: Bytes digested while the next `_AHEAD` groups of this size are under way. Pages of 64 KiB, 128 at a time, were read
#: at 3.0 GB/s in groups of 4 MiB or less, and at 2.3 in one of 8.
_GROUP_BYTES, _AHEAD = 4 << 20, 2

#: Bytes registered for each file: NIXL refuses a descriptor beyond the registration, and files grow.
_FILE_BYTES = 1 << 46

#: Requests advance only while their state is read: the first reads have no pause between them.
_EAGER_POLLS, _PAUSE_S = 200, 20e-6


class StoragePlugin(StrEnum):
    """The NIXL plugins that read and write files.

    Any other name raises TransportUnavailable: plugins that store whole objects, such as OBJ, cannot append to a
    segment. GDS gives what POSIX does here: digests are taken on the host, so data never bypasses it.
    """

    POSIX = "POSIX"
    GDS = "GDS"
    GDS_MT = "GDS_MT"

    @classmethod
    def _missing_(cls, value: object) -> StoragePlugin:
        raise TransportUnavailable(
            f"a page store cannot be kept by NIXL's plugin {value}: it appends to files, which"
            f" {', '.join(cls)} do; OBJ, AZURE_BLOB and INFINIA store whole objects"
        )


#: libaio, with a pool and a queue that fit the cap above. `use_posix_aio` fails for good after one error (NIXL 1.5.1).
_PARAMETERS = {StoragePlugin.POSIX: {"use_aio": "true", "ios_pool_size": str(_POOL), "kernel_queue_size": "256"}}


#: The first release that reports a transfer shorter than it was asked for; an older one calls it done.
_REPORTS_SHORT_SINCE = (1, 5)


class NixlFiles(Files):
    """Files read and written past the page cache, where the file system allows it and a run is aligned; else by
    PlainFiles.

    Buffered files gain no speed from a queue, because libaio copies inside the submitting call.
    """

    def __init__(self, plugin: StoragePlugin = StoragePlugin.POSIX) -> None:
        """Raises TransportUnavailable with the name of a plugin that does not load; `kvmover doctor` names the missing
        library. Raises it before NIXL 1.5, too.
        """
        self._plugin = plugin = StoragePlugin(plugin)
        if nixl_release() < _REPORTS_SHORT_SINCE:
            raise TransportUnavailable(
                f"NIXL {nixl_version()} reports a short transfer of a file as done: a page store takes 1.5 or newer"
            )
        self._agent: NixlAgent = start_agent("kvmover-store", [], 0)
        self._nixl: Any = self._agent.nixl
        try:
            self._nixl.create_backend(plugin.value, _PARAMETERS.get(plugin, {}))
        except self._agent.errors as error:
            raise TransportUnavailable(
                f"NIXL's plugin {plugin} does not start: {error}; `kvmover doctor` names the library that it misses"
            ) from error
        self._plain = PlainFiles(Access.DIRECT)
        self._memory: dict[Memory, Any] = {}
        self._files: dict[OpenFile, Any] = {}

    @property
    def name(self) -> str:
        return f"NIXL {self._plugin}"

    @property
    def group_bytes(self) -> int:
        return _GROUP_BYTES

    def register(self, memory: Memory) -> None:
        self._plain.register(memory)
        rows = [(memory.address, memory.nbytes, memory.device, "")]
        self._memory[memory] = self._nixl.register_memory(rows, memory.kind.value)

    def deregister(self, memory: Memory) -> None:
        self._plain.deregister(memory)
        self._nixl.deregister_memory(self._memory.pop(memory))

    def view(self, address: int, nbytes: int) -> memoryview:
        return self._plain.view(address, nbytes)

    def views(self, runs: Sequence[FileRun]) -> list[memoryview]:
        return self._plain.views(runs)

    def open(self, path: Path) -> OpenFile:
        file = self._plain.open(path)
        if file.direct >= 0:
            self._files[file] = self._nixl.register_memory([(0, _FILE_BYTES, file.direct, "")], "FILE")
        return file

    def close_file(self, file: OpenFile) -> None:
        """Deregister the file, then close it: its descriptor number is soon reused by another file."""
        if registered := self._files.pop(file, None):
            self._nixl.deregister_memory(registered)
        file.close()

    def read(self, runs: Sequence[FileRun]) -> list[str]:
        return self._begin("READ", runs)()

    def write(self, runs: Sequence[FileRun]) -> list[str]:
        return self._begin("WRITE", runs)()

    def read_each(self, groups: Sequence[Sequence[FileRun]], look: Look) -> None:
        _look_in_order(_ahead(groups, lambda runs: self._begin("READ", runs)), look)

    def write_each(self, makes: Sequence[Make], look: Look) -> None:
        _look_in_order(_ahead((make() for make in makes), lambda runs: self._begin("WRITE", runs)), look)

    def close(self) -> None:
        for file in list(self._files):
            self.close_file(file)
        for memory in list(self._memory):
            self.deregister(memory)
        self._plain.close()

    def _begin(self, verb: Literal["READ", "WRITE"], runs: Sequence[FileRun]) -> Callable[[], list[str]]:
        """Start `runs`. Returns a function that waits for them and returns an error or "" for each."""
        plain = self._plain.read if verb == "READ" else self._plain.write
        if verb == "WRITE":
            self._grow(runs)
        mine = [piece for piece in _pieces(runs) if self._takes(runs[piece.start].file)]
        parts = [mine[first : first + _IN_FLIGHT] for first in range(0, len(mine), _IN_FLIGHT)]
        begun = [(part, self._post(verb, [_joined(runs, piece) for piece in part])) for part in parts]
        chosen = {number for piece in mine for number in piece}
        others = [number for number in range(len(runs)) if number not in chosen]
        beside = self._beside(plain, [runs[number] for number in others])

        def answer() -> list[str]:
            reasons = [""] * len(runs)
            failed = [n for part, request in begun if not self._wait(request) for piece in part for n in piece]
            again = plain([runs[number] for number in failed])
            for numbers, answers in ((others, beside()), (failed, again)):
                for number, reason in zip(numbers, answers, strict=True):
                    reasons[number] = reason
            return reasons

        return answer

    def _takes(self, file: OpenFile) -> bool:
        return file.direct_works and file in self._files

    def _beside(
        self, plain: Callable[[Sequence[FileRun]], list[str]], runs: Sequence[FileRun]
    ) -> Callable[[], list[str]]:
        """Start the runs that PlainFiles takes, in a thread; a single run is done by the caller when it waits."""
        return self._plain.pool.submit(plain, runs).result if len(runs) > 1 else lambda: plain(runs)

    def _grow(self, runs: Sequence[FileRun]) -> None:
        """Extend files before writing: writes past the end wait for each other on ext4 (16 KiB: 0.26 GB/s, not 1.3)."""
        for file in {run.file for run in runs if run.file in self._files}:
            end = max(run.offset + run.nbytes for run in runs if run.file is file)
            with suppress(OSError):
                if os.fstat(file.fd).st_size < end:
                    os.ftruncate(file.fd, end)

    def _post(self, verb: str, runs: Sequence[FileRun]) -> Any:
        """Returns a request in flight, or None if NIXL refuses it."""
        local = np.array([(run.address, run.nbytes, 0) for run in runs], np.uint64)
        remote = np.array([(run.offset, run.nbytes, run.file.direct) for run in runs], np.uint64)
        handle: Any = None
        try:
            lists = self._nixl.get_xfer_descs(local, "DRAM"), self._nixl.get_xfer_descs(remote, "FILE")
            handle = self._nixl.initialize_xfer(verb, *lists, self._agent.name)
            self._nixl.transfer(handle)
        except self._agent.errors:
            if handle is not None:
                handle.release()
            return None
        return handle

    def _wait(self, handle: Any) -> bool:
        """Returns True if the whole request moved. Has no deadline of its own, like any read of a disk: the kernel has
        one.
        """
        if handle is None:
            return False
        polls = 0
        try:
            while (state := self._nixl.check_xfer_state(handle)) == "PROC":
                polls += 1
                if polls > _EAGER_POLLS:
                    time.sleep(_PAUSE_S)
            return state == "DONE"
        except self._agent.errors:
            return False
        finally:
            handle.release()


def _ahead(
    groups: Iterable[Sequence[FileRun]], begin: Callable[[Sequence[FileRun]], Callable[[], list[str]]]
) -> Generator[list[str]]:
    """Yield the reasons of each group, with the next `_AHEAD` groups begun.

    All begun groups are awaited, also if the consumer stops or raises.
    """
    waiting: deque[Callable[[], list[str]]] = deque()
    try:
        for runs in groups:
            waiting.append(begin(runs))
            if len(waiting) > _AHEAD:
                yield waiting.popleft()()
        while waiting:
            yield waiting.popleft()()
    finally:
        for ended in waiting:
            ended()


def _look_in_order(answers: Generator[list[str]], look: Look) -> None:
    """Call `look` for each group in order. If it raises, begun groups are awaited first."""
    with closing(answers):
        for number, reasons in enumerate(answers):
            look(number, reasons)


def _pieces(runs: Sequence[FileRun]) -> list[range]:
    """Returns the numbers of the runs that form each request: neighbours in file and memory.

    Small runs that are neighbours in the file and scattered in memory are left to PlainFiles, for which one vectored
    call is faster. 16 KiB each, 128 at a time: 1.9 GB/s written in one call, 1.3 as 128 requests; scattered in the
    file, 2.1 GB/s are read as requests and 0.3 one by one.
    """
    pieces: list[range] = []
    first, nbytes = 0, 0
    for number, run in enumerate(runs):
        before = runs[number - 1]
        joins = number > first and _follows(before, run) and run.address == before.address + before.nbytes
        if not joins or nbytes + run.nbytes > _REQUEST_BYTES or not is_aligned(run) or not is_aligned(before):
            pieces.append(range(first, number))
            first, nbytes = number, 0
        nbytes += run.nbytes
    pieces = [*pieces[1:], range(first, len(runs))] if runs else []
    small = [not is_aligned(runs[piece.start]) or _size(runs, piece) < _LARGE_BYTES for piece in pieces]
    # Piece by piece, True if a vectored call is to take it together with the next.
    tied = [
        all(small[number : number + 2]) and _follows(runs[here.stop - 1], runs[here.stop])
        for number, here in enumerate(pieces[:-1])
    ]
    free = [not before and not after for before, after in zip([False, *tied], [*tied, False], strict=True)]
    return [piece for piece, alone in zip(pieces, free, strict=False) if alone and is_aligned(runs[piece.start])]


def _size(runs: Sequence[FileRun], piece: range) -> int:
    last = runs[piece.stop - 1]
    return last.offset + last.nbytes - runs[piece.start].offset


def _joined(runs: Sequence[FileRun], piece: range) -> FileRun:
    first = runs[piece.start]
    return first if len(piece) == 1 else FileRun(first.file, first.offset, first.address, _size(runs, piece))


def _follows(run: FileRun, other: FileRun) -> bool:
    return run.file is other.file and run.offset + run.nbytes == other.offset


def files_for(folder: Path) -> Files:
    """Returns the files for a directory: NIXL's POSIX plugin where O_DIRECT works, else plain system calls.

    Memory file systems are their own page cache; file systems without O_DIRECT have no other path.
    """
    if file_system_of(folder) in ("tmpfs", "ramfs"):
        return PlainFiles()
    if why := _no_direct(folder):
        log.info("pages in %s go through the page cache: a transfer with O_DIRECT says %s", folder, why)
        return PlainFiles()
    try:
        return NixlFiles()
    except TransportUnavailable:
        return PlainFiles(Access.DIRECT)


def _no_direct(folder: Path) -> str:
    """Returns "" if O_DIRECT works, else the error. A block is written and read, since some file systems allow only the
    open.
    """
    trial = folder / f".kvmover-direct-{uuid.uuid4().hex}"
    fd = -1
    try:
        fd = os.open(trial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        with mmap.mmap(-1, DIRECT_BYTES) as block:
            whole = os.pwritev(fd, [block], 0) == os.preadv(fd, [block], 0) == DIRECT_BYTES
        return "" if whole else "only a part was moved"
    except OSError as error:
        return reason_of(error)
    finally:
        close_quietly(fd)
        with suppress(OSError):
            trial.unlink()
