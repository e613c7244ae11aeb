"""Weka's traces, which AgentX replays: a JSON object a line for a coding conversation, with nested ones inside.

A line has `id`, `block_size` (tokens), `hash_id_scope` "local" (ids are its own) and `requests`. A request is of `type`
"n" or "s" (streamed) and has `t` (s from the line's beginning), `in` and `out` (tokens), `hash_ids` and `api_time` (s).
One of `type` "subagent" has a `t` and `requests`, whose `t` count from it or from the beginning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, field

from kvmover.tools.replay.trace_reader import (
    HashId,
    Length,
    Lines,
    OutputLength,
    Prompt,
    ReplayTraceError,
    Time,
    TraceFormat,
    TraceReader,
    TraceSession,
    TraceTurn,
    block_tokens_of,
)

#: Tolerance in seconds between two times rounded separately.
_ROUNDED_S = 1e-6


class _Asked(msgspec.Struct, gc=False):
    t: Time
    input_length: Length = field(name="in")
    output_length: OutputLength = field(name="out")
    hash_ids: tuple[HashId, ...] = ()
    api_time: Time | None = None


class _Normal(_Asked, tag="n", gc=False):
    """A request answered in one piece."""


class _Streamed(_Asked, tag="s", gc=False):
    """A request answered token by token."""


_Request: TypeAlias = _Normal | _Streamed


class _Subagent(msgspec.Struct, tag="subagent", gc=False):
    t: Time
    requests: tuple[_Request, ...] = ()


class _Session(msgspec.Struct, gc=False):
    id: str
    block_size: Annotated[int, Meta(ge=1, le=2**20)]
    hash_id_scope: Literal["local"]
    requests: tuple[_Normal | _Streamed | _Subagent, ...]

    def flat(self) -> list[tuple[_Request, float | None]]:
        """Returns all requests in line order, each with the `t` of its `_Subagent` entry, or None."""
        found = list[tuple[_Request, float | None]]()
        for entry in self.requests:
            if isinstance(entry, _Subagent):
                found += [(request, entry.t) for request in entry.requests]
            else:
                found.append((entry, None))
        return found


class _Seen(NamedTuple):
    """A scanned line: the number of its first block, and (t, the `_Subagent`'s t, api_time) of each request, s."""

    first_block: int
    times: tuple[tuple[float, float | None, float], ...]


class WekaReader(TraceReader):
    """A reader of Weka's traces. A `t` in a `_Subagent` counts from that entry's own if any in the file is below it."""

    def __init__(self, block_tokens: int | None = None) -> None:
        self._given = block_tokens
        self.block_tokens = 0
        self._blocks = 0
        self._decoder = msgspec.json.Decoder(_Session)
        self._seen = dict[int, _Seen]()
        self._relative = False

    @property
    def distinct_blocks(self) -> int:
        """Returns the distinct ids of every line, plus the blocks without one."""
        return self._blocks

    def scan(self, number: int, line: bytes) -> None:
        """See TraceReader."""
        session = self._decoder.decode(line)
        self.block_tokens = block_tokens_of(session.block_size, self.block_tokens or self._given)
        requests = session.flat()
        if not requests:
            raise ReplayTraceError(f"session {session.id!r} has no request")
        for at, (request, marker_s) in enumerate(requests):
            self._check(session.id, at, request)
            self._relative = self._relative or (marker_s is not None and request.t < marker_s - _ROUNDED_S)
        times = tuple((request.t, marker_s, request.api_time or 0.0) for request, marker_s in requests)
        self._seen[number] = _Seen(self._blocks, times)
        self._blocks += _numbered([request for request, _ in requests], self.block_tokens)[1]

    def _check(self, session: str, at: int, request: _Request) -> None:
        """Raise ReplayTraceError unless there is an id for every block, for every whole block, or for no block."""
        ids, whole = len(request.hash_ids), request.input_length // self.block_tokens
        if ids not in (0, whole, -(-request.input_length // self.block_tokens)):
            raise ReplayTraceError(
                f"session {session!r} request {at}: {ids} hash_ids for {request.input_length} tokens, so {whole} whole"
                f" blocks of {self.block_tokens}"
            )

    def sessions(self) -> list[TraceSession]:
        """See TraceReader. A `TraceSession` begins with its first request, at a time that Weka's traces leave open."""
        return [TraceSession(None, self._turns(number, seen)) for number, seen in self._seen.items()]

    def _turns(self, line: int, seen: _Seen) -> tuple[TraceTurn, ...]:
        starts_s = [
            t if marker_s is None else t + marker_s if self._relative else max(t, marker_s)
            for t, marker_s, _ in seen.times
        ]
        first_s = min(starts_s)
        turns = [
            TraceTurn((start - first_s) * 1000, (start - first_s + api_time) * 1000, line, part)
            for part, (start, (_, _, api_time)) in enumerate(zip(starts_s, seen.times, strict=True))
        ]
        return tuple(sorted(turns, key=lambda turn: (turn.at_ms, turn.part)))

    def prompts(self, session: TraceSession, lines: Lines) -> Iterator[Prompt]:
        """See TraceReader. The blocks of a line are held until its last prompt."""
        line = session.turns[0].line
        requests = [request for request, _ in self._decoder.decode(lines(line)).flat()]
        first = self._seen[line].first_block
        blocks, _ = _numbered(requests, self.block_tokens)
        lengths = [(request.input_length, request.output_length) for request in requests]
        del requests
        for turn in session.turns:
            yield Prompt(*lengths[turn.part], tuple((blocks[turn.part] + first).tolist()))


def _numbered(requests: list[_Request], block_tokens: int) -> tuple[list[npt.NDArray[np.int64]], int]:
    """Returns the block numbers of each request, from 0 without gaps, and their count.

    A partial block, or a block without an id, equals no other: the traces do not define an id of a partial block.
    """
    whole = [min(len(request.hash_ids), request.input_length // block_tokens) for request in requests]
    ids = np.array(
        [block for request, end in zip(requests, whole, strict=True) for block in request.hash_ids[:end]], np.uint64
    )
    distinct, numbers = np.unique(ids, return_inverse=True)
    fresh, numbered, at = len(distinct), list[npt.NDArray[np.int64]](), 0
    for request, end in zip(requests, whole, strict=True):
        private = -(-request.input_length // block_tokens) - end
        own = np.arange(fresh, fresh + private, dtype=np.int64)
        numbered.append(np.concatenate([numbers[at : at + end].astype(np.int64), own]))
        fresh, at = fresh + private, at + end
    return numbered, fresh


def _has_requests(first: Mapping[str, Any]) -> bool:
    return "requests" in first


WEKA = TraceFormat("weka", _has_requests, WekaReader)
