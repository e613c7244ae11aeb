"""A TraceReader makes ReplayRequests of one format of traces: all lines are checked first, prompts read when due.

What it keeps of a request between the two is when it comes and on which line it stands, and of a block its number.
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

#: Tokens that one hash id stands for, where neither the trace nor its reader says. "Block" is the traces' word.
BLOCK_TOKENS = 512
#: Tokens are numbers of 31 bits, and no two blocks of a trace share one.
MOST_DISTINCT_TOKENS = 2**31


class ReplayTraceError(KvmoverError, ValueError):
    """A trace that cannot be read: the message names the file, the line and the value."""


def in_blocks(tokens: int, block_tokens: int) -> list[int]:
    """Lengths of the blocks that `tokens` tokens are: whole ones, and what is left."""
    whole, rest = divmod(tokens, block_tokens)
    return [block_tokens] * whole + [rest] * bool(rest)


class ReplayRequest(msgspec.Struct, frozen=True, gc=False):
    """One request of the trace; the prompt's tokens are made when asked for.

    `timestamp` is in milliseconds from the beginning of the trace. Blocks of equal ids hold equal tokens: the first of
    `hash_ids` the first `block_tokens` tokens, and so on, the last block cut short at `input_length`. Where others are
    short too, `block_lengths` has the tokens of each.
    """

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    block_tokens: int = BLOCK_TOKENS
    block_lengths: tuple[int, ...] = ()

    @property
    def arrived_s(self) -> float:
        """Seconds from the beginning of the trace."""
        return self.timestamp / 1000

    def lengths(self) -> Sequence[int]:
        """Tokens of each block."""
        if self.block_lengths:
            return self.block_lengths
        return in_blocks(self.input_length, self.block_tokens)

    def tokens(self) -> npt.NDArray[np.int32]:
        """The prompt: token i of block h is h * block_tokens + i, so no two blocks share one."""
        firsts = np.array(self.hash_ids, np.int32) * self.block_tokens
        if not self.block_lengths:
            within = np.arange(self.block_tokens, dtype=np.int32)
            return (firsts[:, None] + within).reshape(-1)[: self.input_length]
        lengths = np.array(self.block_lengths, np.int32)
        begins = np.cumsum(lengths, dtype=np.int32) - lengths
        return np.repeat(firsts - begins, lengths) + np.arange(self.input_length, dtype=np.int32)


#: No context window comes near; a wrong number must not become an allocation.
MOST_LENGTH_TOKENS = 2**24

Length: TypeAlias = Annotated[int, Meta(ge=1, le=MOST_LENGTH_TOKENS)]
OutputLength: TypeAlias = Annotated[int, Meta(ge=0, le=MOST_LENGTH_TOKENS)]
#: msgspec's bounds are those of int64, so the upper half of 64 bits comes unchecked.
HashId: TypeAlias = Annotated[int, Meta(ge=0)]
#: A time or a delay, in the unit that its name has. JSON has no infinity.
Time: TypeAlias = Annotated[float, Meta(ge=0, le=1e15)]


class TraceTurn(NamedTuple):
    """When one request comes, in milliseconds from the beginning of its session, and where it stands in the file.

    `end_ms` is when it was answered, as far as the trace says; `part` is which of its line's requests it is.
    """

    at_ms: float
    end_ms: float
    line: int
    part: int = 0


class TraceSession(NamedTuple):
    """Requests of one conversation or task, in order of arrival. `begins_ms` is None where the trace does not say."""

    begins_ms: float | None
    turns: tuple[TraceTurn, ...]


class Prompt(NamedTuple):
    """A request but for its time; fields as in ReplayRequest."""

    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    block_lengths: tuple[int, ...] = ()


#: The text of a line, by its number; the first is 1.
Lines: TypeAlias = Callable[[int], bytes]


class TraceReader(ABC):
    """One trace being read. Methods raise ReplayTraceError, or msgspec's, without the place: who calls them adds it."""

    #: Tokens that a hash id stands for.
    block_tokens: int

    @property
    @abstractmethod
    def distinct_blocks(self) -> int:
        """Blocks that are not equal to each other, of all that was scanned."""

    @abstractmethod
    def scan(self, number: int, line: bytes) -> None:
        """Check a line that is not empty, and keep what `sessions` needs of it."""

    @abstractmethod
    def sessions(self) -> list[TraceSession]:
        """All of the trace, after the last line was scanned."""

    @abstractmethod
    def prompts(self, session: TraceSession, lines: Lines) -> Iterator[Prompt]:
        """The prompts of its turns, in their order."""


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """A format by its name: which first lines look like it, and how it is read.

    `reader` gets the tokens of a block, or None where nobody gave them; where the trace has them, others are refused.
    """

    name: str
    claims: Callable[[Mapping[str, Any]], bool]
    reader: Callable[[int | None], TraceReader]


class BlockNumbers:
    """Numbers for hash ids of any size: the ids themselves where all are below `limit`, so that nothing is kept.

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
        """Ids of one prompt."""
        numbers = self._numbers
        for block in ids:
            numbers.setdefault(block, len(numbers))
        self._count = len(numbers)

    def settle(self) -> None:
        """All were added."""
        if max(self._numbers, default=0) < self._limit:
            self._numbers.clear()

    def of(self, ids: Iterable[int]) -> tuple[int, ...]:
        """The numbers of ids that were added before `settle`."""
        return tuple(map(self._numbers.__getitem__, ids)) if self._numbers else tuple(ids)


def block_tokens_of(said: int, given: int | None) -> int:
    """The trace's own block size, which a given one must be equal to."""
    if given is not None and given != said:
        raise ReplayTraceError(f"a block is {said} tokens in this trace, and {given} were given")
    return said


def checked_blocks(hash_ids: int, input_length: int, block_tokens: int) -> None:
    """Raise ReplayTraceError unless there is one id for every block of the prompt, a part of one counted whole."""
    blocks = -(-input_length // block_tokens)
    if hash_ids != blocks:
        raise ReplayTraceError(
            f"{hash_ids} hash_ids for input_length {input_length}, so {blocks} blocks of {block_tokens} tokens"
        )
