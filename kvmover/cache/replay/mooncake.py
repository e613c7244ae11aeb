"""Mooncake's traces: one JSON object a line for a request, with the whole prompt (FAST'25) or with what is new in it.

A row has `input_length` and `output_length` (tokens) and `hash_ids`, one for every block of the prompt, the last one
cut short. It has `timestamp` (ms), or, after the first row of a `session_id`, `delay` (ms after the row before). In a
delta trace the prompt is that of the row before, its output, and then the blocks of this row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from kvmover.cache.replay.trace_reader import (
    BLOCK_TOKENS,
    MOST_DISTINCT_TOKENS,
    MOST_LENGTH_TOKENS,
    BlockNumbers,
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
    checked_blocks,
    in_blocks,
)


class _Row(msgspec.Struct, gc=False):
    input_length: Length
    output_length: OutputLength
    hash_ids: tuple[HashId, ...]
    timestamp: Time | None = None
    session_id: str | int | None = None
    delay: Time | None = None
    delay_ms: Time | None = None
    #: Of rows that came before agentic Mooncake had a header: when they come is another question.
    wait_for: list[str] | None = None


class _Session:
    """What is known of a session while its rows are read."""

    def __init__(self, begins_ms: float | None) -> None:
        self.begins_ms = begins_ms
        self.turns = list[TraceTurn]()


class MooncakeReader(TraceReader):
    """Rows that hold their whole prompt. Rows without a session are a session each."""

    def __init__(self, block_tokens: int | None = None) -> None:
        self.block_tokens = block_tokens or BLOCK_TOKENS
        self._decoder = msgspec.json.Decoder(_Row)
        self._sessions = dict[str, _Session]()
        self._numbers = BlockNumbers(MOST_DISTINCT_TOKENS // self.block_tokens)

    @property
    def distinct_blocks(self) -> int:
        """Ids that were seen."""
        return len(self._numbers)

    def scan(self, number: int, line: bytes) -> None:
        """See TraceReader."""
        row = self._decoder.decode(line)
        checked_blocks(len(row.hash_ids), row.input_length, self.block_tokens)
        if row.wait_for is not None:
            raise ReplayTraceError(
                "a row with wait_for is agentic, and this file has no header that says which version"
            )
        name = f"line {number}" if row.session_id is None else f"session {row.session_id!r}"
        session = self._sessions.get(name)
        if session is None:
            session = self._sessions[name] = _Session(row.timestamp)
        at_ms = _arrival_ms(session, row)
        session.turns.append(TraceTurn(at_ms, at_ms, number))
        self._scanned(name, number, row)

    def _scanned(self, _name: str, _number: int, row: _Row) -> None:
        self._numbers.add(row.hash_ids)

    def sessions(self) -> list[TraceSession]:
        """See TraceReader."""
        self._numbers.settle()
        return [TraceSession(each.begins_ms, tuple(each.turns)) for each in self._sessions.values()]

    def prompts(self, session: TraceSession, lines: Lines) -> Iterator[Prompt]:
        """See TraceReader."""
        for turn in session.turns:
            row = self._decoder.decode(lines(turn.line))
            yield Prompt(row.input_length, row.output_length, self._numbers.of(row.hash_ids))


def _arrival_ms(session: _Session, row: _Row) -> float:
    """From the session's beginning. A time of its own is what happened, and is taken before a delay."""
    if row.delay is not None and row.delay_ms is not None:
        raise ReplayTraceError(f"delay {row.delay} and delay_ms {row.delay_ms} in one row")
    delay_ms = row.delay if row.delay is not None else row.delay_ms
    if not session.turns:
        if row.timestamp is None and row.session_id is None:
            raise ReplayTraceError("a row without session_id needs a timestamp")
        if delay_ms:
            raise ReplayTraceError(f"delay {delay_ms} in the first row of session {row.session_id!r}")
        return 0.0
    before_ms = session.turns[-1].at_ms
    if row.timestamp is None or session.begins_ms is None:
        return before_ms + (delay_ms or 0.0)
    at_ms = row.timestamp - session.begins_ms
    if at_ms < before_ms:
        raise ReplayTraceError(
            f"timestamp {row.timestamp} is before {session.begins_ms + before_ms}, of the row before in its session"
        )
    return at_ms


class MooncakeDeltaReader(MooncakeReader):
    """Rows that hold what is new. Nobody knows which tokens an output was, so each is equal to itself alone."""

    def __init__(self, block_tokens: int | None = None) -> None:
        super().__init__(block_tokens)
        self._numbers = BlockNumbers(0)
        #: By the line of a row: which blocks its output is, counted over all outputs.
        self._outputs = dict[int, int]()
        self._output_blocks = 0
        self._prompt_tokens = dict[str, int]()

    @property
    def distinct_blocks(self) -> int:
        """Ids that were seen, and the outputs in blocks of their own."""
        return len(self._numbers) + self._output_blocks

    def _scanned(self, name: str, number: int, row: _Row) -> None:
        super()._scanned(name, number, row)
        prompt_tokens = self._prompt_tokens.get(name, 0) + row.input_length
        if prompt_tokens > MOST_LENGTH_TOKENS:
            raise ReplayTraceError(f"the prompt of {name} has come to {prompt_tokens:,} tokens")
        self._prompt_tokens[name] = prompt_tokens + row.output_length
        self._outputs[number] = self._output_blocks
        self._output_blocks += -(-row.output_length // self.block_tokens)

    def prompts(self, session: TraceSession, lines: Lines) -> Iterator[Prompt]:
        """See TraceReader."""
        blocks, lengths, first_output = list[int](), list[int](), len(self._numbers)
        for turn in session.turns:
            row = self._decoder.decode(lines(turn.line))
            blocks += self._numbers.of(row.hash_ids)
            lengths += in_blocks(row.input_length, self.block_tokens)
            yield Prompt(sum(lengths), row.output_length, tuple(blocks), tuple(lengths))
            answer, first = in_blocks(row.output_length, self.block_tokens), first_output + self._outputs[turn.line]
            blocks += range(first, first + len(answer))
            lengths += answer


def _has_rows(first: Mapping[str, Any]) -> bool:
    return "hash_ids" in first


def _has_sessions(first: Mapping[str, Any]) -> bool:
    return "hash_ids" in first and first.get("session_id") is not None


MOONCAKE = TraceFormat("mooncake", _has_rows, MooncakeReader)
#: Nothing in a row tells this from rows with sessions and whole prompts, so its name must be given.
MOONCAKE_DELTA = TraceFormat("mooncake-delta", _has_sessions, MooncakeDeltaReader)
