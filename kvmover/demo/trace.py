"""A Mooncake trace becomes tokens of a small model: equal hash ids become equal tokens, so shared prefixes stay.

The trace is one JSON object a line: `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`, one for
every 512 tokens of the prompt, here called a page; the last one is cut at `input_length`. Source: FAST25-release in
github.com/kvcache-ai/Mooncake.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import msgspec

from kvmover.errors import KvmoverError

#: Tokens that one hash id of the trace stands for.
TRACE_PAGE_TOKENS = 512
_WORD = 2**64 - 1


class TraceError(KvmoverError, ValueError):
    """A trace that cannot be read: the message names the line and the value."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of the trace: its prompt, and how many tokens were answered."""

    timestamp_ms: int
    tokens: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class TraceScale:
    """How a trace is made smaller: tokens are taken modulo `vocab`, and every length is multiplied by `factor`.

    A page of 512 tokens becomes `page_tokens` tokens, whatever request it is in: pages that were equal stay equal.
    Pages that were different stay different as long as vocab ** page_tokens is far above their number.
    """

    vocab: int
    factor: float = 1.0

    def __post_init__(self) -> None:
        if self.vocab < 2 or not 0 < self.factor <= 1:
            raise TraceError(f"a scale needs two words and a factor in (0, 1], got {self}")

    @property
    def page_tokens(self) -> int:
        return self.of(TRACE_PAGE_TOKENS)

    def of(self, tokens: int) -> int:
        """A length after scaling: at least one token, unless there was none."""
        return max(1, round(tokens * self.factor)) if tokens else 0


class _Line(msgspec.Struct, frozen=True):
    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(path: Path, scale: TraceScale) -> Iterator[TraceRequest]:
    """The requests of a trace in file order, read as they are asked for. Empty lines are skipped.

    Raises TraceError for a file that cannot be read and for a line that is no request.
    """
    decoder = msgspec.json.Decoder(_Line, strict=True)
    try:
        file = path.open("rb")
    except OSError as error:
        raise TraceError(f"cannot read the trace {path}: {error.strerror}") from error
    with file as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                entry = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise TraceError(f"{path.name} line {number}: {error}: {line[:40]!r}") from error
            _check(entry, f"{path.name} line {number}")
            yield TraceRequest(entry.timestamp, _tokens(entry, scale), scale.of(entry.output_length))


def _check(entry: _Line, where: str) -> None:
    for name, value, least in (
        ("timestamp", entry.timestamp, 0),
        ("input_length", entry.input_length, 1),
        ("output_length", entry.output_length, 0),
        ("smallest of hash_ids", min(entry.hash_ids, default=0), 0),
    ):
        if value < least:
            raise TraceError(f"{where}: {name} {value} is below {least}")
    pages = -(-entry.input_length // TRACE_PAGE_TOKENS)
    if len(entry.hash_ids) != pages:
        raise TraceError(
            f"{where}: {len(entry.hash_ids)} hash_ids for input_length {entry.input_length}, which is {pages} pages"
        )


def _tokens(entry: _Line, scale: TraceScale) -> tuple[int, ...]:
    tokens: list[int] = []
    for hash_id in entry.hash_ids:
        tokens += page_of(hash_id, scale)
    rest = entry.input_length - (len(entry.hash_ids) - 1) * TRACE_PAGE_TOKENS
    return tuple(tokens[: (len(entry.hash_ids) - 1) * scale.page_tokens + scale.of(rest)])


@lru_cache(maxsize=4096)
def page_of(hash_id: int, scale: TraceScale) -> tuple[int, ...]:
    """The tokens of one page: token i is mix(hash_id * 512 + i) modulo the vocabulary."""
    first = hash_id * TRACE_PAGE_TOKENS
    return tuple(_mix(first + token) % scale.vocab for token in range(scale.page_tokens))


def _mix(value: int) -> int:
    """The finaliser of splitmix64: without it, one page of 512 tokens would be another, shifted, modulo 512."""
    value = (value + 0x9E3779B97F4A7C15) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)
