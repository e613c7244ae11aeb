"""FirstToken carries the token sampled by a prefill to a decode engine of another make."""

from __future__ import annotations

import logging
from typing import Annotated

import msgspec

from kvmover.errors import ProtocolError
from kvmover.prepared import prepared

log = logging.getLogger(__name__)

#: Every engine numbers tokens in 32 bits, and returns at most `_MOST_TOP` alternatives.
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_MOST_TOP = 1024


@prepared
class FirstToken(msgspec.Struct, frozen=True, tag="FirstToken"):
    """The token behind the prompt. `cached_tokens` counts prompt tokens that the prefill found cached.

    `logprob` is the natural logarithm of its probability, None if the engine gives its transfer none. `top` has token
    and logarithm of the likeliest tokens, as many as the request asked for.
    """

    token: TokenId
    cached_tokens: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0
    logprob: float | None = None
    top: Annotated[tuple[tuple[TokenId, float], ...], msgspec.Meta(max_length=_MOST_TOP)] = ()

    def encode(self) -> bytes:
        """Returns the payload that goes beside the KV."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, payload: bytes) -> FirstToken:
        """Returns the token in a payload. Raises ProtocolError for other bytes."""
        try:
            return msgspec.msgpack.decode(payload, type=cls)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"{len(payload)} bytes beside the KV are no first token: {error}") from error


@prepared
class ToldLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities of the first token that a router passes on, for a prefill engine that gives its transfer none.

    They are request parameters, which clients write.
    """

    kvmover_first_logprob: float | None = None
    kvmover_first_top_logprobs: Annotated[tuple[tuple[TokenId, float], ...], msgspec.Meta(max_length=_MOST_TOP)] = ()

    def beside(self, first: FirstToken) -> FirstToken:
        """Returns `first`, with these log probabilities if it has none."""
        if first.logprob is not None:
            return first
        return msgspec.structs.replace(first, logprob=self.kvmover_first_logprob, top=self.kvmover_first_top_logprobs)


def told_logprobs(params: object, request: str) -> ToldLogprobs:
    """Returns the log probabilities in a request's parameters. Malformed ones are logged and ignored."""
    if not params:
        return ToldLogprobs()
    try:
        return msgspec.convert(params, ToldLogprobs, strict=False)
    except msgspec.ValidationError as error:
        log.warning("the first token's log probabilities of %s: %s", request, error)
        return ToldLogprobs()
