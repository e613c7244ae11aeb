"""The control messages, as versioned msgpack, and the checks that keep a bad one from doing harm."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec
import numpy as np
import numpy.typing as npt

from kvmover.errors import ProtocolError
from kvmover.plan.cost import Route
from kvmover.plan.legs import Replicas

VERSION = 3
_HEAD = b"kvm" + bytes([VERSION])

#: How a sealed message begins (see `auth`), and what a seal adds to it at most.
SEALED = b"kvs\x01"
SEAL_BYTES = 64

#: A page table of 260,000 pages fits; nothing larger is decoded. NIXL carries notes of this size, and a seal, in order.
MAX_MESSAGE_BYTES = (1 << 20) - SEAL_BYTES


#: First tokens, logprobs and the like: whatever an engine hands over with a request, from one rank.
MAX_AUX_BYTES = 64 << 10


class Verb(StrEnum):
    """Who moves the bytes: the source writes (push), or the destination reads (pull)."""

    PUSH = "push"
    PULL = "pull"


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of all control messages. Unknown fields are ignored, so a newer peer may add some."""


class Hello(Message, frozen=True):
    """The sender's card (see `handshake`), so that a peer that was not told of us can answer."""

    card: bytes


class Ping(Message, frozen=True):
    """Are you there? Sending it fails when the peer is gone, and a live one answers with Pong."""


class Pong(Message, frozen=True):
    """Here."""


class About(Message, frozen=True):
    """Base of messages about one attempt at one request. The destination numbers its attempts."""

    request: str
    generation: int


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """Chunk `chunk` has a region at `offset` of the destination's arena. `round` counts how often it was asked for."""

    chunk: int
    offset: int
    round: int = 0


class Want(About, frozen=True):
    """Destination to source: send me tokens [start, stop). Both sides derive the chunks from it; said again, it asks
    for what was said in answer.

    `chunk_layers`: no chunk holds layers of two groups of so many (0: one group). `pages`: for the direct route of a
    push, one int32 little-endian page table a component; empty otherwise. `aux`: source ranks whose payload is awaited,
    the same for all ranks of the destination.
    """

    start: int
    stop: int
    route: Route
    replicas: Replicas
    chunk_bytes: int
    pages: tuple[bytes, ...] = ()
    chunk_layers: int = 0
    verb: Verb = Verb.PUSH
    digests: bool = False
    aux: tuple[int, ...] = ()


class Offered(About, frozen=True):
    """Source to destination: chunks in the ranges `ready` [first, stop) may be moved, so regions will be used at once.

    `pages`: for the direct route of a pull, of the source's page tables what was not said before: so many pages of
    each, which `first_pages` counts (none: 0 of each).
    """

    ready: tuple[tuple[int, int], ...]
    pages: tuple[bytes, ...] = ()
    first_pages: tuple[int, ...] = ()


class Granted(About, frozen=True):
    """Destination to source: arena regions for some chunks. Said again, it asks for what became of them."""

    grants: tuple[Grant, ...]


class Chunk(About, frozen=True):
    """Source to destination, arriving after the chunk's bytes. The writer is the peer it came from.

    `digest`: of the chunk's rows as they were in the source's pool (see `kernels.digest_reference`).
    """

    chunk: int
    round: int = 0
    digest: int | None = None


class Staged(About, frozen=True):
    """Source to destination, in a pull: the chunk lies at `offset` of the source's arena, or in its pages; read it."""

    chunk: int
    offset: int
    round: int = 0
    digest: int | None = None


class Taken(About, frozen=True):
    """Destination to source, in a pull: the chunk was read, its staging memory is free."""

    chunk: int
    round: int = 0


class Aux(About, frozen=True):
    """Source to destination: what the engine hands over beside the cache."""

    payload: bytes


class Done(About, frozen=True):
    """Destination to source: everything landed, you may forget the request."""


class Kept(About, frozen=True):
    """Source to destination, in a pull, after Done: nothing of it was reused while you read it."""


class Abort(About, frozen=True):
    """Either way: this attempt is over, and why."""

    reason: str


class Drained(About, frozen=True):
    """Source to destination: no write of this attempt is in flight and none will be posted."""


ToSource = Want | Granted | Taken | Done
ToDestination = Offered | Chunk | Staged | Aux | Kept | Drained
AnyMessage = Hello | Ping | Pong | ToSource | ToDestination | Abort

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
    if payload.startswith(SEALED):
        raise ProtocolError("a sealed message, and this side has no shared key")
    if payload[:3] != _HEAD[:3]:
        raise ProtocolError(f"not a kvmover message: starts with {payload[:4]!r}")
    if payload[3:4] != _HEAD[3:]:
        raise ProtocolError(f"message version {payload[3:4].hex() or 'missing'}, this side speaks {VERSION}")
    try:
        return _decoder.decode(payload[len(_HEAD) :])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed message of {len(payload)} bytes: {error}") from error


#: Of one page id in a message.
PAGE_ID_BYTES = 4


def encoded(pages: Sequence[npt.NDArray[np.int64]]) -> tuple[bytes, ...]:
    return tuple(table.astype("<i4").tobytes() for table in pages)


def lengths(tables: Sequence[bytes]) -> tuple[int, ...]:
    """How many pages each of some encoded tables names."""
    return tuple(len(table) // PAGE_ID_BYTES for table in tables)


def decoded(tables: Sequence[bytes]) -> tuple[npt.NDArray[np.int64], ...]:
    """Raises ValueError where the bytes are no whole number of integers."""
    return tuple(np.frombuffer(table, "<i4").astype(np.int64) for table in tables)
