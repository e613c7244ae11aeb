"""The run log has a JSON line for each transfer and each request that ended, for `kvmover report`.

A `run` line names the process of the lines after it. Times are Unix seconds, to read several ranks' files together.
"""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from os import SEEK_END
from pathlib import Path
from threading import Event, Lock, Thread
from types import TracebackType
from typing import IO, Literal

import msgspec

from kvmover import __version__
from kvmover.cache.ledger import Account
from kvmover.errors import KvmoverError
from kvmover.plan.cost import Route
from kvmover.transfer.meter import Stage
from kvmover.transfer.result import Cause, Ending

log = logging.getLogger(__name__)


class Line(msgspec.Struct, frozen=True, tag_field="type", omit_defaults=True):
    """The base of all lines. `time_s`: seconds since 1970."""

    time_s: float


class Run(Line, frozen=True, tag="run"):
    """The first line of a rank's process."""

    engine: str
    rank: int
    kvmover: str


class Moved(Line, frozen=True, tag="transfer"):
    """A transfer that ended. `cause` and `reason` are absent if it landed.

    `time_s`: its end. `seconds`: from its call until then. `nbytes`: payload of this rank's legs, landed or not.
    `runs`: the direct route's descriptors. `writes`: chunks, each one write or read. `peers`: ranks with chunks of it.
    `resent`: chunks whose digest did not match at first. `spent_s`: seconds of chunks in each stage.
    """

    seconds: float
    engine: str
    rank: int
    verb: Literal["send", "receive"]
    request: str
    cause: Cause | None = None
    reason: str | None = None
    nbytes: int = 0
    runs: int = 0
    writes: int = 0
    routes: tuple[Route, ...] = ()
    peers: int = 0
    resent: int = 0
    quarantined: bool = False
    spent_s: dict[Stage, float] = {}

    @property
    def landed(self) -> bool:
        """Returns True if every byte landed."""
        return self.reason is None

    @property
    def began_s(self) -> float:
        """Returns its beginning, Unix seconds."""
        return self.time_s - self.seconds


class Accounted(Line, frozen=True, tag="account"):
    """An attempt at a request that ended."""

    account: Account


AnyLine = Run | Moved | Accounted


class RunLog:
    """A writer of lines to a file, for a mover and a ledger: `mover.watch(log.transfer)`, `Ledger(sink=log.account)`.

    Any thread may call it, without waiting for the disk; a killed process loses milliseconds. A failed write ends the
    log, with a warning. Close it, or exit. Raises KvmoverError if the file cannot be opened.
    """

    def __init__(self, path: Path, engine: str, rank: int, clock: Callable[[], float] = time.time) -> None:
        try:
            self._file: IO[bytes] = path.open("ab", buffering=0)
        except OSError as error:
            raise KvmoverError(f"cannot write {path}: {error.strerror}") from error
        if not _ends_whole(path):
            self._file.write(b"\n")
        self._encoder = msgspec.json.Encoder()
        self._lines, self._lock, self._writing = bytearray(), Lock(), Lock()
        self._clock, self._path = clock, path
        self._more, self._is_over = Event(), False
        self._writer = Thread(target=self._run, daemon=True, name="kvmover-run-log")
        self._write(Run(clock(), engine, rank, __version__))
        self._writer.start()
        atexit.register(self.close)

    def transfer(self, ending: Ending) -> None:
        """Append a line for an ended transfer."""
        result = ending.result
        self._write(
            Moved(
                self._clock(),
                result.seconds,
                ending.engine,
                ending.rank,
                ending.verb,
                ending.request,
                result.cause,
                result.reason,
                result.nbytes,
                result.runs,
                result.writes,
                result.routes,
                result.peers,
                result.resent,
                result.quarantined,
                dict(result.spent_s),
            )
        )

    def account(self, account: Account) -> None:
        """Append a line for an ended request."""
        self._write(Accounted(self._clock(), account))

    def _write(self, line: AnyLine) -> None:
        with self._lock:
            if self._is_over:  # an engine that goes down may still end requests
                return
            self._encoder.encode_into(line, self._lines, len(self._lines))
            self._lines += b"\n"
        self._more.set()

    def _run(self) -> None:
        while self._more.wait() and not self._is_over:
            self._more.clear()
            self.flush()

    def flush(self) -> None:
        """Write all pending lines before returning."""
        with self._writing:
            with self._lock:
                lines, self._lines = self._lines, bytearray()
            try:
                while lines and not self._file.closed:
                    del lines[: self._file.write(lines)]
            except OSError as error:
                log.warning("the run log %s ends here: %s", self._path, error.strerror)
                self._file.close()
                self._is_over = True

    def close(self) -> None:
        """Flush and close the file. May be repeated."""
        with self._lock:
            self._is_over = True
        self._more.set()
        self._writer.join()
        self.flush()
        self._file.close()
        atexit.unregister(self.close)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Lines:
    """The lines of some files, in order of time. `cut`: lines left unfinished."""

    runs: tuple[Run, ...] = ()
    transfers: tuple[Moved, ...] = ()
    accounts: tuple[Accounted, ...] = ()
    cut: int = 0


_decoder = msgspec.json.Decoder(AnyLine)


@dataclass(slots=True)
class LineReader:
    """The lines of some run logs in order of time, one of each file in memory.

    `cut`: lines skipped as unfinished. Iterating raises KvmoverError with the file and number of an invalid line.
    """

    paths: Sequence[Path]
    cut: int = 0

    def __iter__(self) -> Iterator[AnyLine]:
        return merge(*map(self._lines_of, self.paths), key=lambda line: line.time_s)

    def _lines_of(self, path: Path) -> Iterator[AnyLine]:
        """Yields one file's lines. Only a line before a process's first may be unfinished."""
        error: KvmoverError | None = None
        for number, text in enumerate(self._texts_of(path), start=1):
            try:
                line = _decoder.decode(text)
            except (msgspec.DecodeError, UnicodeDecodeError) as wrong:
                if error is not None:
                    break
                error = KvmoverError(f"{path} line {number} is no line of a run log: {wrong}")
                continue
            if error is not None and not isinstance(line, Run):
                break
            self.cut += error is not None
            error = None
            yield line
        if error is not None:
            raise error

    def _texts_of(self, path: Path) -> Iterator[bytes]:
        try:
            with path.open("rb") as file:
                for text in file:
                    if not text.endswith(b"\n"):
                        self.cut += 1
                        return
                    yield text
        except OSError as error:
            raise KvmoverError(f"cannot read {path}: {error.strerror}") from error


def read_lines(paths: Iterable[Path]) -> Lines:
    """Read all lines of some run logs. Raises KvmoverError as LineReader."""
    reader = LineReader(tuple(paths))
    found = sorted(reader, key=lambda line: line.time_s)
    return Lines(
        tuple(line for line in found if isinstance(line, Run)),
        tuple(line for line in found if isinstance(line, Moved)),
        tuple(line for line in found if isinstance(line, Accounted)),
        reader.cut,
    )


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.seek(0, SEEK_END):
            return True
        file.seek(-1, SEEK_END)
        return file.read() == b"\n"
