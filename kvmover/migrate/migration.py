"""A Migration is one move of a running request to another engine, and defines the payloads that its two sides exchange.

It adds no protocol message: announcements, the hand-over and the answer are payloads (`aux`) of transfers named after
the request, and so arrive exactly once, or fail on both sides with a reason.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from kvmover.errors import PlanError, ProtocolError
from kvmover.migrate.rounds import Round
from kvmover.prepared import prepared
from kvmover.transfer.arguments import request_name
from kvmover.transfer.protocol.content import Content
from kvmover.transfer.protocol.wire import MAX_AUX_BYTES, MAX_RANKS, Natural, Positive

#: Longest payload: an announcement's own fields take the rest.
MAX_PAYLOAD_BYTES = MAX_AUX_BYTES - 256

#: Most rounds of a migration: it bounds the digits in a transfer's name.
MAX_ROUNDS = 1000


class Party(msgspec.Struct, frozen=True):
    """One side of a migration."""

    engine: str
    ranks: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]

    @property
    def everyone(self) -> range:
        """Returns the numbers of its ranks."""
        return range(self.ranks)


@prepared
class Migration(msgspec.Struct, frozen=True):
    """One move of `request` from `source` to `target`, begun when `tokens` were in the source's pages.

    `generation`: the source's count of moves of this request. `payload`: data by which the target's engine continues,
    at most 65,280 bytes. `content`: the prompt and the answer so far, `tokens` tokens. A target with other content
    declines before a byte moves; None on both sides: the name alone counts. All ranks of both sides get an equal
    Migration. Raises PlanError for a name or payload that is too long, and for content of another length.
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
        """Returns the migration as bytes."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, encoded: bytes) -> Migration:
        """Decode a migration. Raises ProtocolError for malformed bytes."""
        return _decoded(encoded, cls)

    @property
    def first_round(self) -> Round:
        """Returns the round of the tokens written by then."""
        return Round(0, 0, self.tokens)

    def content_of(self, tokens: int) -> Content | None:
        """Returns the content at `tokens` tokens, of the same identity."""
        return None if self.content is None else msgspec.structs.replace(self.content, tokens=tokens)

    def round_name(self, number: int) -> str:
        """Returns the name of a round's transfer."""
        return f"{self.request}/{self.generation}/round {number}"

    def announcement_name(self, number: int) -> str:
        """Returns the name of a round's announcing transfer."""
        return f"{self.request}/{self.generation}/next {number}"

    @property
    def decision_name(self) -> str:
        """Returns the name of the decision's transfer."""
        return f"{self.request}/{self.generation}/decision"


@prepared
class Announcement(msgspec.Struct, frozen=True):
    """A message to the target: the next round, and `payload` as of `tokens` tokens."""

    round: Round
    tokens: Natural
    payload: bytes

    def encode(self) -> bytes:
        """Returns it as `aux`."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, encoded: bytes) -> Announcement:
        """Decode `aux`. Raises ProtocolError for malformed bytes."""
        return _decoded(encoded, cls)


@prepared
class Decision(msgspec.Struct, frozen=True):
    """A message to the source: `taken` if the request of this `content` is the target's, else the reason."""

    taken: bool
    reason: str = ""
    content: Content | None = None

    def encode(self) -> bytes:
        """Returns it as `aux`."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, encoded: bytes) -> Decision:
        """Decode `aux`. Raises ProtocolError for malformed bytes."""
        return _decoded(encoded, cls)


def check_payload(payload: bytes) -> None:
    """Raise PlanError for a payload above MAX_PAYLOAD_BYTES."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise PlanError(f"a payload of {len(payload)} bytes is over the limit of {MAX_PAYLOAD_BYTES}")


_Kind = TypeVar("_Kind", Migration, Announcement, Decision)


def _decoded(encoded: bytes, kind: type[_Kind]) -> _Kind:
    try:
        return msgspec.msgpack.decode(encoded, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, PlanError) as error:
        raise ProtocolError(f"no {kind.__name__} in {len(encoded)} bytes: {error}") from error
