"""A ReplayTrace reads a public trace of any known format in order of arrival, twice: to check it, and to serve it.

Its memory grows with the number of requests and of distinct blocks, and never with their tokens.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from kvmover.tools.replay.mooncake_trace import AGENTIC_MOONCAKE, MOONCAKE, MOONCAKE_DELTA
from kvmover.tools.replay.trace_reader import (
    MOST_DISTINCT_TOKENS,
    Prompt,
    ReplayRequest,
    ReplayTraceError,
    TraceFormat,
    TraceSession,
)
from kvmover.tools.replay.weka_trace import WEKA

TRACE_FORMATS = {each.name: each for each in (MOONCAKE, MOONCAKE_DELTA, AGENTIC_MOONCAKE, WEKA)}


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Options for facts that a trace leaves open.

    `format`: a name of TRACE_FORMATS, needed only if the first line fits two of them. `block_tokens`: tokens of a hash
    id; 512 if neither the trace nor this gives it. `sessions`: so many conversations run at a time, each next one
    begins when one ends, whatever the trace says. Raises ReplayTraceError for an unknown format or a number below 1.
    """

    format: str | None = None
    block_tokens: int | None = None
    sessions: int | None = None

    def __post_init__(self) -> None:
        if self.format is not None and self.format not in TRACE_FORMATS:
            raise ReplayTraceError(f"no trace format {self.format}: there are {', '.join(TRACE_FORMATS)}")
        for name, number in (("a block", self.block_tokens), ("sessions at a time", self.sessions)):
            if number is not None and number < 1:
                raise ReplayTraceError(f"{number} of {name}: at least 1")


class ReplayTrace:
    """The requests of a file, readable any number of times. The constructor raises ReplayTraceError for a bad file.

    The file must stay unchanged while requests are read from it.
    """

    def __init__(self, path: Path, options: TraceOptions) -> None:
        self.path = path
        self._begins = array("q")
        self._reader = _format_of(path, options).reader(options.block_tokens)
        with _opened(path) as file:
            begin = 0
            for number, line in enumerate(file, start=1):
                self._begins.append(begin)
                begin += len(line)
                if line.strip():
                    with _named(path, number, line):
                        self._reader.scan(number, line)
        with _named(path):
            self._sessions = self._reader.sessions()
        distinct_tokens = self._reader.distinct_blocks * self._reader.block_tokens
        if distinct_tokens > MOST_DISTINCT_TOKENS:
            raise ReplayTraceError(
                f"{path.name} has {self.distinct_blocks:,} distinct blocks of {self.block_tokens} tokens, and a replay"
                f" tells {MOST_DISTINCT_TOKENS:,} tokens apart"
            )
        if not self._sessions:
            raise ReplayTraceError(f"{path.name} holds no request")
        with _named(path):
            self._order = in_order(self._sessions, options.sessions)

    @property
    def block_tokens(self) -> int:
        """Returns the tokens of a hash id."""
        return self._reader.block_tokens

    @property
    def backward(self) -> int:
        """Returns the number of sessions whose time is before that of the line above; they are replayed by time."""
        begins = [session.begins_ms for session in self._sessions if session.begins_ms is not None]
        return sum(later < earlier for earlier, later in pairwise(begins))

    @property
    def distinct_blocks(self) -> int:
        """Returns the number of distinct blocks."""
        return self._reader.distinct_blocks

    def __len__(self) -> int:
        """Returns the number of requests of the whole trace."""
        return len(self._order)

    def __iter__(self) -> Iterator[ReplayRequest]:
        """Yield requests in order of arrival. Only the prompts of running conversations are held."""
        running = dict[int, Iterator[Prompt]]()
        with _opened(self.path) as file:

            def line_at(number: int) -> bytes:
                file.seek(self._begins[number - 1])
                return file.readline()

            for arrived_ms, session, turn in self._order:
                turns = self._sessions[session].turns
                if turn == 0:
                    running[session] = self._reader.prompts(self._sessions[session], line_at)
                with _named(self.path, turns[turn].line):
                    length, output_length, blocks, lengths = next(running[session])
                if turn == len(turns) - 1:
                    del running[session]
                yield ReplayRequest(arrived_ms, length, output_length, blocks, self._reader.block_tokens, lengths)


def read_trace(path: Path, options: TraceOptions | None = None) -> ReplayTrace:
    """Returns the requests of a trace, fully checked; empty lines are skipped. Raises ReplayTraceError."""
    return ReplayTrace(path, options or TraceOptions())


def in_order(sessions: Sequence[TraceSession], at_a_time: int | None = None) -> list[tuple[float, int, int]]:
    """Returns (arrival in ms, `TraceSession`, turn) of all requests, as indices, by arrival and then `TraceSession`.

    Conversations begin at their own times, or, with `at_a_time`, so many run and the next begins when one ends. Raises
    ReplayTraceError if the times are still open.

    >>> from kvmover.tools.replay.trace_reader import TraceTurn
    >>> one = TraceSession(None, (TraceTurn(0.0, 0.0, 1), TraceTurn(30.0, 50.0, 2)))
    >>> in_order([one, one, one], at_a_time=2)[-2:]
    [(50.0, 2, 0), (80.0, 2, 1)]
    """
    begins = _said(sessions) if at_a_time is None else _one_after_another(sessions, at_a_time)
    found = [
        (begin + turn.at_ms, number, at)
        for number, (begin, session) in enumerate(zip(begins, sessions, strict=True))
        for at, turn in enumerate(session.turns)
    ]
    return sorted(found)


def _said(sessions: Sequence[TraceSession]) -> list[float]:
    begins = [session.begins_ms for session in sessions if session.begins_ms is not None]
    if len(begins) < len(sessions):
        silent = next(session for session in sessions if session.begins_ms is None)
        raise ReplayTraceError(
            f"line {silent.turns[0].line}: nothing says when this session begins: --sessions N runs N at a time"
        )
    return begins


def _one_after_another(sessions: Sequence[TraceSession], at_a_time: int) -> list[float]:
    if all(len(session.turns) == 1 for session in sessions):
        raise ReplayTraceError(
            "every session is one request, so the trace alone can say when they come: not --sessions"
        )
    free, begins = [0.0] * min(at_a_time, len(sessions)), list[float]()
    for session in sessions:
        begin = heapq.heappop(free)
        begins.append(begin)
        heapq.heappush(free, begin + max(turn.end_ms for turn in session.turns))
    return begins


def _format_of(path: Path, options: TraceOptions) -> TraceFormat:
    """Returns the named format, or the only one that the first line fits. Raises ReplayTraceError otherwise."""
    if options.format is not None:
        return TRACE_FORMATS[options.format]
    with _opened(path) as file:
        number, line = next(((at, line) for at, line in enumerate(file, start=1) if line.strip()), (0, b""))
    if not number:
        raise ReplayTraceError(f"{path.name} holds no request")
    with _named(path, number, line):
        first = msgspec.json.decode(line, type=dict[str, Any])
        able = [each for each in TRACE_FORMATS.values() if each.claims(first)]
        if not able:
            raise ReplayTraceError(
                f"a line of none of {', '.join(TRACE_FORMATS)}, with {', '.join(first) or 'nothing'}"
            )
        if len(able) > 1:
            raise ReplayTraceError(f"{' and '.join(each.name for each in able)} look alike: name one by --format")
    return able[0]


@contextmanager
def _opened(path: Path) -> Generator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise ReplayTraceError(f"cannot read {path}: {error.strerror}") from error


@contextmanager
def _named(path: Path, number: int = 0, line: bytes = b"") -> Generator[None]:
    """Add file and line to decoding and trace errors raised within, as ReplayTraceError."""
    where = f"{path.name} line {number}" if number else path.name
    try:
        yield
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ReplayTraceError(f"{where}: {error}" + (f": {line[:40]!r}" if line else "")) from error
    except ReplayTraceError as error:
        raise ReplayTraceError(f"{where}: {error}") from error
