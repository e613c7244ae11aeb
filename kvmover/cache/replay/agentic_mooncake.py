"""Agentic Mooncake, version 2: a header, then requests of plays, each after others of its play and a tool's delay.

The header is `schema` "dynamo.agentic_mooncake", `version`, `block_size` (tokens) and `hash_id_scope` "local": equal
ids are equal blocks in all of the file. A row has `request_id`, `play_id`, `input_length`, `output_length`, `hash_ids`,
`not_before_ms` and `dependencies`: on another row's `dispatch` or `completion`, and `delay_ms` after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from kvmover.cache.replay.trace_reader import (
    MOST_DISTINCT_TOKENS,
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
)

SCHEMA = "dynamo.agentic_mooncake"
VERSION = 2

_Name = Annotated[str, Meta(min_length=1)]


class _Header(msgspec.Struct, gc=False):
    schema: str
    version: int
    block_size: Annotated[int, Meta(ge=1, le=2**20)]
    hash_id_scope: Literal["local"]


class _Dependency(msgspec.Struct, gc=False):
    request_id: _Name
    trigger: Literal["dispatch", "completion"]
    delay_ms: Time


class _Row(msgspec.Struct, gc=False):
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
    """An edge of a play: which request, whether its end is waited for, and for how long after."""

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
    """A play is a session. A request takes the time that its row says an API took, or none."""

    def __init__(self, block_tokens: int | None = None) -> None:
        self._given = block_tokens
        self.block_tokens = 0
        self._numbers = BlockNumbers(0)
        self._rows = msgspec.json.Decoder(_Row)
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
        """See TraceReader. The order of plays is that of their ordinals, or else of their first rows."""
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
    """When each request of a play comes, in milliseconds from its beginning: after all that it waits for."""
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
