"""FirstToken is what a prefill sampled, for a decode engine of another make that goes on behind it."""

from __future__ import annotations

import logging
from typing import Annotated

import msgspec

from kvmover.errors import ProtocolError

log = logging.getLogger(__name__)

#: Tokens are numbered in 32 bits by all engines, and none tells more alternatives than this.
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_MOST_TOP = 1024


class FirstToken(msgspec.Struct, frozen=True, tag="FirstToken"):
    """The token behind the prompt. `cached_tokens`: of the prompt, not computed by the prefill.

    `logprob`: natural logarithm of its probability; None where the engine tells its transfer none. `top`: token and the
    same of the likeliest, as many as were asked for.
    """

    token: TokenId
    cached_tokens: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0
    logprob: float | None = None
    top: Annotated[tuple[tuple[TokenId, float], ...], msgspec.Meta(max_length=_MOST_TOP)] = ()

    def encode(self) -> bytes:
        """The payload that goes beside the KV."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, payload: bytes) -> FirstToken:
        """Raises ProtocolError for bytes that are no first token."""
        try:
            return msgspec.msgpack.decode(payload, type=cls)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"{len(payload)} bytes beside the KV are no first token: {error}") from error


class ToldLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities of the first token that a router hands on, where the prefill's engine tells its transfer none.

    They stand among a request's parameters, which clients write.
    """

    kvmover_first_logprob: float | None = None
    kvmover_first_top_logprobs: Annotated[tuple[tuple[TokenId, float], ...], msgspec.Meta(max_length=_MOST_TOP)] = ()

    def beside(self, first: FirstToken) -> FirstToken:
        """`first` with what it lacks."""
        if first.logprob is not None:
            return first
        return msgspec.structs.replace(first, logprob=self.kvmover_first_logprob, top=self.kvmover_first_top_logprobs)


def told_logprobs(params: object, request: str) -> ToldLogprobs:
    """Those in a request's parameters. What makes no sense is said in the log and counts as not said."""
    if not params:
        return ToldLogprobs()
    try:
        return msgspec.convert(params, ToldLogprobs, strict=False)
    except msgspec.ValidationError as error:
        log.warning("the first token's log probabilities of %s: %s", request, error)
        return ToldLogprobs()
