"""A public trace is read as requests: how long each prompt is, and which blocks of it are equal to whose.

Mooncake's format (FAST25-release in github.com/kvcache-ai/Mooncake): one JSON object a line with `timestamp` (ms),
`input_length`, `output_length` (tokens) and `hash_ids`, one for every 512 tokens of the prompt, the last cut short at
`input_length`. Equal ids mean equal content of the whole prefix up to and including the block.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from kvmover.errors import KvmoverError

#: Tokens that one hash id stands for. "Block" is the trace's word.
BLOCK_TOKENS = 512
#: Ids from here on would give tokens that 31 bits cannot hold.
_IDS = 2**31 // BLOCK_TOKENS


class ReplayTraceError(KvmoverError, ValueError):
    """A trace that cannot be read: the message names the line and the value."""


class ReplayRequest(msgspec.Struct, frozen=True, gc=False):
    """One request of the trace; the prompt's tokens are made when asked for."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    @property
    def arrived_s(self) -> float:
        """Seconds from the beginning of the trace."""
        return self.timestamp / 1000

    def tokens(self) -> npt.NDArray[np.int32]:
        """The prompt: token i of block h is h * 512 + i, so no two blocks share one."""
        firsts = np.array(self.hash_ids, np.int32) * BLOCK_TOKENS
        return (firsts[:, None] + _BLOCK).reshape(-1)[: self.input_length]


_BLOCK = np.arange(BLOCK_TOKENS, dtype=np.int32)


def read_trace(path: Path) -> list[ReplayRequest]:
    """The requests in the order of the file. Empty lines are skipped; ReplayTraceError for a line that is none."""
    decoder = msgspec.json.Decoder(ReplayRequest)
    requests = list[ReplayRequest]()
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ReplayTraceError(f"cannot read {path}: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path.name} line {number}"
        try:
            request = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ReplayTraceError(f"{where}: {error}: {line[:40]!r}") from error
        _check(request, where)
        requests.append(request)
    if not requests:
        raise ReplayTraceError(f"{path.name} holds no request")
    return requests


def _check(request: ReplayRequest, where: str) -> None:
    if request.input_length < 1 or request.output_length < 0 or request.timestamp < 0:
        raise ReplayTraceError(
            f"{where}: input_length {request.input_length} is below 1, or output_length {request.output_length}"
            f" or timestamp {request.timestamp} below 0"
        )
    blocks = -(-request.input_length // BLOCK_TOKENS)
    if len(request.hash_ids) != blocks:
        raise ReplayTraceError(
            f"{where}: {len(request.hash_ids)} hash_ids for input_length {request.input_length}, so {blocks} blocks"
        )
    if min(request.hash_ids) < 0 or max(request.hash_ids) >= _IDS:
        raise ReplayTraceError(f"{where}: hash_ids are from 0 to {_IDS - 1}, got {request.hash_ids[:20]}")
