"""A ReplayRequest is one prompt of a trace: how long it is, and which blocks of it are equal to whose."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

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
