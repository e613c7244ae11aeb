"""Ranks send these messages over SGLang's sockets before a transfer: who they are, and which requests have pages."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

#: First frame of every message of ours: SGLang's own share the socket.
TAG = b"KVMOVER"


class Call(msgspec.Struct, frozen=True, tag=True):
    """A decode rank introduces itself. `answer_to`: host and port; `key`: how it knows the prefill engine."""

    card: bytes
    answer_to: tuple[str, int]
    key: str


class Answer(msgspec.Struct, frozen=True, tag=True):
    """A prefill rank says what its engine is called, or why it does not serve the caller."""

    key: str
    engine: str
    refused: str = ""


class PagesReady(msgspec.Struct, frozen=True, tag="Asked"):
    """A decode rank, one of `ranks` that will ask, has pages for a request, all but its first `prefix_tokens`.

    The tag is the name that it had first: other releases know it by that.
    """

    room: int
    rank: str
    ranks: int
    prefix_tokens: int


Message = Call | Answer | PagesReady

_decode = msgspec.msgpack.Decoder(Message).decode


def frames(message: Message) -> list[bytes]:
    """The two frames of a message on SGLang's socket."""
    return [TAG, msgspec.msgpack.encode(message)]


def read(received: Sequence[bytes]) -> Message | None:
    """The message, or None for frames that are not ours or make no sense."""
    if len(received) != 2 or received[0] != TAG:
        return None
    try:
        return _decode(received[1])
    except msgspec.MsgspecError:
        return None
