"""A TraceReader makes ReplayRequests of one format of traces: all lines are checked first, prompts read when due.

In between it keeps a request's arrival and line, and a block's number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from kvmover.errors import KvmoverError

#: Tokens of a hash id if neither the trace nor the options give it. "Block" is the traces' word.
BLOCK_TOKENS = 512
#: Tokens are numbers of 31 bits, and distinct blocks of a trace share no token.
MOST_DISTINCT_TOKENS = 2**31


class ReplayTraceError(KvmoverError, ValueError):
    """An unreadable trace: the message names the file, the line and the value."""


def in_blocks(tokens: int, block_tokens: int) -> list[int]:
    """Returns the lengths of the blocks of `tokens` tokens: whole ones, and the rest."""
    whole, rest = divmod(tokens, block_tokens)
    return [block_tokens] * whole + [rest] * bool(rest)


class ReplayRequest(msgspec.Struct, frozen=True, gc=False):
    """A request of the trace; the prompt's tokens are made on demand.

    `timestamp`: milliseconds from the beginning of the trace. Blocks of equal ids hold equal tokens: the first of
    `hash_ids` the first `block_tokens` tokens, and so on, the last block cut short at `input_length`. `block_lengths`:
    tokens of each block, if others are short too.
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    block_tokens: int = BLOCK_TOKENS
    block_lengths: tuple[int, ...] = ()

    @property
    def arrived_s(self) -> float:
        """Returns the arrival in seconds from the beginning of the trace."""
        return self.timestamp / 1000

    def lengths(self) -> Sequence[int]:
        """Returns the tokens of each block."""
        if self.block_lengths:
            return self.block_lengths
        return in_blocks(self.input_length, self.block_tokens)

    def tokens(self) -> npt.NDArray[np.int32]:
        """Returns the prompt: token i of block h is h * block_tokens + i, so that blocks share no token."""
        firsts = np.array(self.hash_ids, np.int32) * self.block_tokens
        if not self.block_lengths:
            within = np.arange(self.block_tokens, dtype=np.int32)
            return (firsts[:, None] + within).reshape(-1)[: self.input_length]
        lengths = np.array(self.block_lengths, np.int32)
        begins = np.cumsum(lengths, dtype=np.int32) - lengths
        return np.repeat(firsts - begins, lengths) + np.arange(self.input_length, dtype=np.int32)


#: Above any context window; a wrong number must not become an allocation.
MOST_LENGTH_TOKENS = 2**24

Length: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_LENGTH_TOKENS)]
OutputLength: TypeAlias = Annotated[int, Meta(ge=0, le=MOST_LENGTH_TOKENS)]
#: msgspec's bounds are those of int64, so the upper half of 64 bits is unchecked.
HashId: TypeAlias = Annotated[int, Meta(ge=0)]
#: A time or a delay, in the unit of its name. JSON has no infinity.
Time: TypeAlias = Annotated[float, Meta(ge=0, le=1e15)]


class TraceTurn(NamedTuple):
    """A request's arrival, in milliseconds from the beginning of its `TraceSession`, and its place in the file.

    `end_ms`: its end, as far as the trace says; `part`: its index among the line's requests.
    """

    at_ms: float
    end_ms: float
    line: int
    part: int = 0


class TraceSession(NamedTuple):
    """Requests of a conversation or task, in order of arrival. `begins_ms` is None if the trace does not give it."""

    begins_ms: float | None
    turns: tuple[TraceTurn, ...]


class Prompt(NamedTuple):
    """A request without its time; fields as in ReplayRequest."""

    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    block_lengths: tuple[int, ...] = ()


#: Returns the text of a line, by its number from 1.
Lines: TypeAlias = Callable[[int], bytes]


class TraceReader(ABC):
    """A trace being read. Methods raise ReplayTraceError or msgspec's errors; the caller adds file and line."""

    #: Tokens of a hash id.
    block_tokens: int

    @property
    @abstractmethod
    def distinct_blocks(self) -> int:
        """Returns the number of distinct blocks scanned."""

    @abstractmethod
    def scan(self, number: int, line: bytes) -> None:
        """Check a nonempty line, and keep its facts for `sessions`."""

    @abstractmethod
    def sessions(self) -> list[TraceSession]:
        """Returns all of the trace, after the last line was scanned."""

    @abstractmethod
    def prompts(self, session: TraceSession, lines: Lines) -> Iterator[Prompt]:
        """Yield the prompts of its turns, in order."""


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """A format by its name: a test of the first line, and a reader.

    `reader` gets the tokens of a block, or None if not given; a reader refuses a number other than the trace's.
    """

    name: str
    claims: Callable[[Mapping[str, Any]], bool]
    reader: Callable[[int | None], TraceReader]


class BlockNumbers:
    """Numbers for hash ids of any size: the ids themselves, without a table, if all are below `limit`.

    >>> numbers = BlockNumbers(limit=100)
    >>> numbers.add([7, 2**63, 7])
    >>> numbers.settle()
    >>> len(numbers), numbers.of([2**63, 7])
    (2, (1, 0))
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._numbers = dict[int, int]()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, ids: Iterable[int]) -> None:
        """Add the ids of a prompt."""
        numbers = self._numbers
        for block in ids:
            numbers.setdefault(block, len(numbers))
        self._count = len(numbers)

    def settle(self) -> None:
        """End adding: drops the table if all ids are below `limit`."""
        if max(self._numbers, default=0) < self._limit:
            self._numbers.clear()

    def of(self, ids: Iterable[int]) -> tuple[int, ...]:
        """Returns the numbers of ids that were added before `settle`."""
        return tuple(map(self._numbers.__getitem__, ids)) if self._numbers else tuple(ids)


def block_tokens_of(said: int, given: int | None) -> int:
    """Returns the trace's own block size. Raises ReplayTraceError if a different one was given."""
    if given is not None and given != said:
        raise ReplayTraceError(f"a block is {said} tokens in this trace, and {given} were given")
    return said


def checked_blocks(hash_ids: int, input_length: int, block_tokens: int) -> None:
    """Raise ReplayTraceError unless there is one id for every block of the prompt, a partial one included."""
    blocks = -(-input_length // block_tokens)
    if hash_ids != blocks:
        raise ReplayTraceError(
            f"{hash_ids} hash_ids for input_length {input_length}, so {blocks} blocks of {block_tokens} tokens"
        )
