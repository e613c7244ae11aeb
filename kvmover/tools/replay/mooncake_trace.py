"""Mooncake's traces, FAST'25 and agentic: a JSON object a line for a request, with its prompt or the new part of it.

A row has `input_length` and `output_length` (tokens) and `hash_ids`, one for every block of the prompt, the last one
cut short. It has `timestamp` (ms), or, after the first row of a `session_id`, `delay` (ms after the row before). In a
delta trace the prompt is that of the row before, its output, and then the blocks of this row.

Agentic Mooncake, version 2: a header, then requests of plays, each after others of its play and a tool's delay. The
header is `schema` "dynamo.agentic_mooncake", `version`, `block_size` (tokens) and `hash_id_scope` "local": in all of a
file equal ids are equal blocks. A row has `request_id`, `play_id`, `input_length`, `output_length`, `hash_ids`,
`not_before_ms` and `dependencies`: on another row's `dispatch` or `completion`, and `delay_ms` after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from kvmover.prepared import prepared
from kvmover.tools.replay.trace_reader import (
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
    block_tokens_of,
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
    #: Set in rows of agentic Mooncake without a header, whose arrival times are undefined: refused.
    wait_for: list[str] | None = None


class _Session:
    """The state of a conversation while its rows are read."""

    def __init__(self, begins_ms: float | None) -> None:
        self.begins_ms = begins_ms
        self.turns = list[TraceTurn]()


class MooncakeReader(TraceReader):
    """A reader of rows that hold their whole prompt. A row without `session_id` is a `TraceSession` by itself."""

    def __init__(self, block_tokens: int | None = None) -> None:
        self.block_tokens = block_tokens or BLOCK_TOKENS
        self._decoder = msgspec.json.Decoder(_Row)
        self._sessions = dict[str, _Session]()
        self._numbers = BlockNumbers(MOST_DISTINCT_TOKENS // self.block_tokens)

    @property
    def distinct_blocks(self) -> int:
        """Returns the number of distinct ids seen."""
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
    """Returns ms from the first row of its `session_id`. A row's timestamp takes precedence over its delay.

    Raises ReplayTraceError for contradictory or missing times.
    """
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
    """A reader of rows that hold only the new part. Outputs have unknown tokens, so each equals only itself."""

    def __init__(self, block_tokens: int | None = None) -> None:
        super().__init__(block_tokens)
        self._numbers = BlockNumbers(0)
        #: By row's line: the index of its output's first block, over all outputs.
        self._outputs = dict[int, int]()
        self._output_blocks = 0
        self._prompt_tokens = dict[str, int]()

    @property
    def distinct_blocks(self) -> int:
        """Returns the number of distinct ids seen plus the outputs' own blocks."""
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
#: Its rows look like `MOONCAKE` rows with a `session_id`, so its name must be given.
MOONCAKE_DELTA = TraceFormat("mooncake-delta", _has_sessions, MooncakeDeltaReader)


SCHEMA = "dynamo.agentic_mooncake"
VERSION = 2

_Name = Annotated[str, Meta(min_length=1)]


@prepared
class _Header(msgspec.Struct, gc=False):
    schema: str
    version: int
    block_size: Annotated[int, Meta(ge=1, le=2**20)]
    hash_id_scope: Literal["local"]


class _Dependency(msgspec.Struct, gc=False):
    request_id: _Name
    trigger: Literal["dispatch", "completion"]
    delay_ms: Time


class _AgenticRow(msgspec.Struct, gc=False):
    request_id: _Name
    play_id: _Name
    input_length: Length
    output_length: OutputLength
    hash_ids: tuple[HashId, ...]
    not_before_ms: Time
    recorded_api_time_ms: Time | None = None
    source_play_ordinal: int | None = None
    dependencies: tuple[_Dependency, ...] = ()


class _After(NamedTuple):
    """An edge of a play: the request waited for, True if for its end, and the delay after it in ms."""

    request: str
    completed: bool
    delay_ms: float


@dataclass(frozen=True, slots=True)
class _Node:
    line: int
    not_before_ms: float
    api_time_ms: float
    after: tuple[_After, ...]


class AgenticMooncakeReader(TraceReader):
    """A reader of plays, each a `TraceSession`. A request takes its row's `recorded_api_time_ms`, or 0."""

    def __init__(self, block_tokens: int | None = None) -> None:
        self._given = block_tokens
        self.block_tokens = 0
        self._numbers = BlockNumbers(0)
        self._rows = msgspec.json.Decoder(_AgenticRow)
        self._plays = dict[str, dict[str, _Node]]()
        self._play_of = dict[str, str]()
        self._ordinals = dict[str, int | None]()

    @property
    def distinct_blocks(self) -> int:
        """Ids that were seen."""
        return len(self._numbers)

    def scan(self, number: int, line: bytes) -> None:
        """See TraceReader."""
        if not self.block_tokens:
            self._begin(line)
            return
        row = self._rows.decode(line)
        checked_blocks(len(row.hash_ids), row.input_length, self.block_tokens)
        if row.request_id in self._play_of:
            raise ReplayTraceError(f"request_id {row.request_id!r} a second time")
        if self._ordinals.setdefault(row.play_id, row.source_play_ordinal) != row.source_play_ordinal:
            raise ReplayTraceError(
                f"source_play_ordinal {row.source_play_ordinal} in play {row.play_id!r}, which is"
                f" {self._ordinals[row.play_id]}"
            )
        self._play_of[row.request_id] = row.play_id
        after = tuple(_After(each.request_id, each.trigger == "completion", each.delay_ms) for each in row.dependencies)
        node = _Node(number, row.not_before_ms, row.recorded_api_time_ms or 0.0, after)
        self._plays.setdefault(row.play_id, {})[row.request_id] = node
        self._numbers.add(row.hash_ids)

    def _begin(self, line: bytes) -> None:
        header = msgspec.json.decode(line, type=_Header)
        if (header.schema, header.version) != (SCHEMA, VERSION):
            raise ReplayTraceError(
                f"version {header.version} of {header.schema}; read is version {VERSION} of {SCHEMA}"
            )
        self.block_tokens = block_tokens_of(header.block_size, self._given)
        self._numbers = BlockNumbers(MOST_DISTINCT_TOKENS // self.block_tokens)

    def sessions(self) -> list[TraceSession]:
        """See TraceReader. Plays are ordered by their ordinals, otherwise by their first rows."""
        self._numbers.settle()
        names, ordinals = list(self._plays), self._ordinals
        known = {name: ordinal for name, ordinal in ordinals.items() if ordinal is not None}
        if known and (len(known) < len(names) or len(set(known.values())) < len(names)):
            raise ReplayTraceError(
                f"source_play_ordinal is given {len(known)} times, not once for each of {len(names)} plays"
            )
        if known:
            names.sort(key=known.__getitem__)
        made = [self._session(name) for name in names]
        self._plays.clear()
        self._play_of.clear()
        return made

    def _session(self, play: str) -> TraceSession:
        nodes = self._plays[play]
        for name, node in nodes.items():
            for edge in node.after:
                other = self._play_of.get(edge.request)
                if other != play:
                    where = "no request" if other is None else f"a request of play {other!r}"
                    raise ReplayTraceError(f"line {node.line}: {name!r} waits for {edge.request!r}, which is {where}")
        begins_ms = min((node.not_before_ms for node in nodes.values() if not node.after), default=0.0)
        times = _arrivals(nodes, begins_ms)
        turns = [TraceTurn(at_ms, at_ms + nodes[name].api_time_ms, nodes[name].line) for name, at_ms in times.items()]
        return TraceSession(begins_ms, tuple(sorted(turns, key=lambda turn: (turn.at_ms, turn.line))))

    def prompts(self, session: TraceSession, lines: Lines) -> Iterator[Prompt]:
        """See TraceReader."""
        for turn in session.turns:
            row = self._rows.decode(lines(turn.line))
            yield Prompt(row.input_length, row.output_length, self._numbers.of(row.hash_ids))


def _arrivals(nodes: Mapping[str, _Node], begins_ms: float) -> dict[str, float]:
    """Returns the arrival (ms from the play's beginning) of each request, after all its dependencies.

    Raises ReplayTraceError if requests wait in a circle.
    """
    order = TopologicalSorter({name: [edge.request for edge in node.after] for name, node in nodes.items()})
    times = dict[str, float]()
    try:
        for name in order.static_order():
            node = nodes[name]
            at_ms = max(0.0, node.not_before_ms - begins_ms)
            for edge in node.after:
                done_ms = nodes[edge.request].api_time_ms if edge.completed else 0.0
                at_ms = max(at_ms, times[edge.request] + done_ms + edge.delay_ms)
            times[name] = at_ms
    except CycleError as error:
        circle: list[str] = error.args[1]
        order_said = " before ".join(map(repr, circle))
        raise ReplayTraceError(f"line {nodes[circle[0]].line}: requests wait in a circle: {order_said}") from error
    return times


def _has_schema(first: Mapping[str, Any]) -> bool:
    return first.get("schema") == SCHEMA


AGENTIC_MOONCAKE = TraceFormat("agentic-mooncake", _has_schema, AgenticMooncakeReader)
