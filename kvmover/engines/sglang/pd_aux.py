"""AuxRows are the rows of SGLang's metadata buffers beside the cache: the first token and its log probabilities."""

from __future__ import annotations

import ctypes
import math
import struct
from typing import Any

from kvmover.engines.common import FirstToken, ToldLogprobs

#: Indices of SGLang's first metadata buffers (`MetadataBuffers.get_buf_infos`), in this order.
_TOKEN, _CACHED, _LOGPROB, _LOGPROB_TOKEN, _TOP, _TOP_TOKENS = range(6)


class AuxRows:
    """The rows of the metadata buffers (first token, log probabilities), as one payload.

    `rooms`: index of the buffer with the rooms, from the end: -1 is the last.
    """

    def __init__(self, args: Any, rooms: int = -1) -> None:
        self._buffers = list(zip(args.aux_data_ptrs, args.aux_item_lens, strict=True))
        self._rooms = rooms

    @property
    def nbytes(self) -> int:
        """Bytes of one row of all buffers together."""
        return sum(nbytes for _, nbytes in self._buffers)

    def take(self, index: int) -> bytes:
        """Returns a copy of row `index` of each buffer, one behind the other."""
        return b"".join(ctypes.string_at(pointer + index * nbytes, nbytes) for pointer, nbytes in self._buffers)

    def put(self, index: int, payload: bytes) -> None:
        """Write a payload of `take` to row `index`. Raises ValueError if its length is not `nbytes`."""
        if len(payload) != self.nbytes:
            raise ValueError(f"{len(payload)} bytes beside the cache; this side's buffers take {self.nbytes}")
        at = 0
        for pointer, nbytes in self._buffers:
            ctypes.memmove(pointer + index * nbytes, payload[at : at + nbytes], nbytes)
            at += nbytes

    def land(self, index: int, told: ToldLogprobs | None, room: int, payload: bytes) -> None:
        """Write a received payload to row `index`, of the request in `room`.

        `told` None: the payload is SGLang's; else it is a FirstToken of an engine of another make. Raises ValueError or
        ProtocolError for other bytes.
        """
        if told is None:
            self.put(index, payload)
        else:
            self.put_first(index, told.beside(FirstToken.decode(payload)), room)

    def put_first(self, index: int, first: FirstToken, room: int) -> None:
        """Write the row of a request that an engine of another make has prefilled; values that it does not tell are 0.

        `room` marks the row as written, and as this request's. An unknown log probability is NaN.
        """
        for pointer, nbytes in self._buffers:
            ctypes.memset(pointer + index * nbytes, 0, nbytes)
        top = [*first.top[: self._buffers[_TOP][1] // 4]]
        unknown = [math.nan] * (self._buffers[_TOP][1] // 4 - len(top))
        likely = math.nan if first.logprob is None else first.logprob
        self._write(_TOKEN, index, "i", [first.token])
        self._write(_CACHED, index, "i", [first.cached_tokens])
        self._write(_LOGPROB, index, "f", [likely])
        self._write(_LOGPROB_TOKEN, index, "i", [first.token])
        self._write(_TOP, index, "f", [*(likelihood for _, likelihood in top), *unknown])
        self._write(_TOP_TOKENS, index, "i", [token for token, _ in top])
        self._write(self._rooms, index, "Q", [room])

    def _write(self, buffer: int, index: int, kind: str, values: list[Any]) -> None:
        pointer, nbytes = self._buffers[buffer]
        packed = struct.pack(f"<{len(values)}{kind}", *values)
        ctypes.memmove(pointer + index * nbytes, packed, len(packed))
