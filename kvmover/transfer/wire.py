"""The control messages, as versioned msgpack, and the checks that keep a bad one from doing harm."""

from __future__ import annotations

import msgspec

from kvmover.errors import ProtocolError
from kvmover.plan.cost import Route
from kvmover.plan.legs import Replicas

VERSION = 1
_HEAD = b"kvm" + bytes([VERSION])

#: A page table of 260,000 pages fits; nothing larger is decoded. NIXL carries notes of this size in order.
MAX_MESSAGE_BYTES = 1 << 20


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all control messages. Unknown fields are ignored, so a newer peer may add some."""


class Hello(Message, frozen=True):
    """The sender's card (see `handshake`), so that a peer that was not told of us can answer."""

    card: bytes


class Refused(Message, frozen=True):
    """The handshake ended: why."""

    reason: str


class Ping(Message, frozen=True):
    """Are you there? Sending it fails when the peer is gone; nothing is answered."""


class About(Message, frozen=True):
    """Base of messages about one attempt at one request. The destination numbers its attempts."""

    request: str
    generation: int


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """Chunk `chunk` may be written at `offset` of the destination's arena."""

    chunk: int
    offset: int


class Want(About, frozen=True):
    """Destination to source: send me positions [start, stop). Both sides derive the chunks from it.

    `pages`: for the direct route, one int32 little-endian page table a component; empty when packed.
    """

    start: int
    stop: int
    route: Route
    replicas: Replicas
    chunk_bytes: int
    pages: tuple[bytes, ...] = ()


class Offered(About, frozen=True):
    """Source to destination: the request is here, so regions for it will be used at once."""


class Granted(About, frozen=True):
    """Destination to source: arena regions for some chunks."""

    grants: tuple[Grant, ...]


class Chunk(About, frozen=True):
    """Source to destination, arriving after the chunk's bytes. The writer is the peer it came from."""

    chunk: int


class Done(About, frozen=True):
    """Destination to source: everything landed, you may forget the request."""


class Abort(About, frozen=True):
    """Either way: this attempt is over, and why."""

    reason: str


class Drained(About, frozen=True):
    """Source to destination: no write of this attempt is in flight and none will be posted."""


AnyMessage = Hello | Refused | Ping | Want | Offered | Granted | Chunk | Done | Abort | Drained

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """The bytes of a message. Raises ProtocolError for more than a peer would decode."""
    payload = _HEAD + _encoder.encode(message)
    if len(payload) > MAX_MESSAGE_BYTES:
        kind = type(message).__name__
        raise ProtocolError(f"{kind} of {len(payload)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    return payload


def decode(payload: bytes) -> AnyMessage:
    """The message in `payload`. Raises ProtocolError, and nothing else, whatever the bytes."""
    if len(payload) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {len(payload)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    if payload[:3] != _HEAD[:3]:
        raise ProtocolError(f"not a kvmover message: starts with {payload[:4]!r}")
    if payload[3:4] != _HEAD[3:]:
        raise ProtocolError(f"message version {payload[3:4].hex() or 'missing'}, this side speaks {VERSION}")
    try:
        return _decoder.decode(payload[len(_HEAD) :])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed message of {len(payload)} bytes: {error}") from error
