"""A Migration names one move of a running request to another engine, and what its two sides tell each other of it.

Nothing here is a message of the protocol: announcements, the hand-over and the answer are payloads (`aux`) of transfers
whose names are made of the request's, and so arrive exactly once, or fail on both sides with a reason.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from kvmover.errors import PlanError, ProtocolError
from kvmover.migrate.rounds import Round
from kvmover.transfer.arguments import request_name
from kvmover.transfer.protocol.content import Content
from kvmover.transfer.protocol.wire import MAX_AUX_BYTES, MAX_RANKS, Natural, Positive

#: Of a payload beside what an announcement says itself.
MAX_PAYLOAD_BYTES = MAX_AUX_BYTES - 256

#: No migration has more rounds: so many characters of a name are its number.
MAX_ROUNDS = 1000


class Party(msgspec.Struct, frozen=True):
    """One side of a migration: an engine, and how many ranks it has."""

    engine: str
    ranks: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]

    @property
    def everyone(self) -> range:
        """The numbers of its ranks."""
        return range(self.ranks)


class Migration(msgspec.Struct, frozen=True):
    """One move of `request` from `source` to `target`, begun when `tokens` were in the source's pages.

    `generation`: the source counts the moves of a request, so that nothing of one that failed is taken for a later one.
    `payload`: what the target's engine needs to go on from there, as it is understood by both, at most 65,280 bytes.
    `content`: the prompt and the answer so far, `tokens` tokens, each side's as it knows the request. A target whose
    content is another's declines before a byte moves; None on both sides: the name alone counts, as in Mover.send.
    All ranks of both sides are given an equal one; to the target it travels by the engine's own means.
    Raises PlanError for a name that is too long, or a payload, and for content of another length.
    """

    request: str
    generation: Natural
    source: Party
    target: Party
    tokens: Positive
    payload: bytes = b""
    content: Content | None = None

    def __post_init__(self) -> None:
        request_name(self.round_name(MAX_ROUNDS))
        check_payload(self.payload)
        if self.tokens < 1:
            raise PlanError(f"{self.request} has {self.tokens} tokens; one that is moved has computed some")
        if self.content is not None and self.content.tokens != self.tokens:
            raise PlanError(f"{self.request} has {self.tokens} tokens, and its content is of {self.content.tokens}")

    def encode(self) -> bytes:
        """For the target."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, encoded: bytes) -> Migration:
        """Raises ProtocolError for what is none."""
        return _decoded(encoded, cls)

    @property
    def first_round(self) -> Round:
        """All that was written when it began."""
        return Round(0, 0, self.tokens)

    def content_of(self, tokens: int) -> Content | None:
        """Returns what the request is of at so many tokens: it is known by those that it began to move with."""
        return None if self.content is None else msgspec.structs.replace(self.content, tokens=tokens)

    def round_name(self, number: int) -> str:
        """The transfer of a round's tokens; of the last one, the hand-over comes beside them."""
        return f"{self.request}/{self.generation}/round {number}"

    def announcement_name(self, number: int) -> str:
        """The transfer that says which tokens a round has."""
        return f"{self.request}/{self.generation}/next {number}"

    @property
    def decision_name(self) -> str:
        """The transfer, back from the target, that says which side has the request."""
        return f"{self.request}/{self.generation}/decision"


class Announcement(msgspec.Struct, frozen=True):
    """Source to target: the round that comes next, and `payload` as of `tokens` tokens."""

    round: Round
    tokens: Natural
    payload: bytes

    def encode(self) -> bytes:
        """As `aux`."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, encoded: bytes) -> Announcement:
        """Raises ProtocolError for what is none."""
        return _decoded(encoded, cls)


class Decision(msgspec.Struct, frozen=True):
    """Target to source: whether the request of this `content` is the target's. Where it is not, why."""

    taken: bool
    reason: str = ""
    content: Content | None = None

    def encode(self) -> bytes:
        """As `aux`."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, encoded: bytes) -> Decision:
        """Raises ProtocolError for what is none."""
        return _decoded(encoded, cls)


def check_payload(payload: bytes) -> None:
    """Raise PlanError for one that fits no announcement."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise PlanError(f"a payload of {len(payload)} bytes is over the limit of {MAX_PAYLOAD_BYTES}")


_Kind = TypeVar("_Kind", Migration, Announcement, Decision)


def _decoded(encoded: bytes, kind: type[_Kind]) -> _Kind:
    try:
        return msgspec.msgpack.decode(encoded, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, PlanError) as error:
        raise ProtocolError(f"no {kind.__name__} in {len(encoded)} bytes: {error}") from error
