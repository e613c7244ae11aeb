"""The control messages, as versioned msgpack, and the checks that keep a bad one from doing harm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from kvmover.errors import ProtocolError
from kvmover.plan.cost import Route
from kvmover.plan.legs import Replicas
from kvmover.transfer.protocol.content import Content

VERSION = 5
_HEAD = b"kvm" + bytes([VERSION])

#: How a sealed message begins (see `auth`), and what a seal adds to it at most.
SEALED = b"kvs\x01"
SEAL_BYTES = 64

#: A page table of 260,000 pages fits; nothing larger is decoded. NIXL carries notes of this size, and a seal, in order.
MAX_MESSAGE_BYTES = (1 << 20) - SEAL_BYTES

#: Messages that travel in one note at most: what a poll says to one peer, and no more than a peer should do at once.
MAX_BATCH = 256

#: Page tables of one message, which has a few numbers and a name of at most 1 KiB beside them.
MAX_TABLE_BYTES = MAX_MESSAGE_BYTES - (4 << 10)

#: Lengths of a request's name and of a reason, in characters.
MAX_REQUEST_CHARACTERS = 256
MAX_REASON_CHARACTERS = 1024

#: Chunks of one lane, and grants in one message. 16,384 chunks of the default 32 MiB are 512 GiB.
MAX_CHUNKS = 16384
MAX_GRANTS = 4096

#: Ranks of a fleet, and components of a model.
MAX_RANKS = 65536
MAX_COMPONENTS = 256

#: What all addresses, lengths and counts stay below, so that no sum of two of them leaves 64 bits.
MOST = (1 << 63) - 1

Natural = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=MOST)]
RankNumber = Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
Tables = Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_COMPONENTS)]
Ranges = Annotated[tuple[tuple[Natural, Natural], ...], msgspec.Meta(max_length=MAX_CHUNKS)]

#: Of one page's hash, and of all that one message asks for: 16,384 pages.
PAGE_HASH_BYTES = 32
MAX_ASKED_BYTES = 16384 * PAGE_HASH_BYTES

#: First tokens, logprobs and the like: whatever an engine hands over with a request, from one rank.
MAX_AUX_BYTES = 64 << 10


class Verb(StrEnum):
    """Who moves the bytes: the source writes (push), or the destination reads (pull)."""

    PUSH = "push"
    PULL = "pull"


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of all control messages. Unknown fields are ignored, so a newer peer may add some.

    What is decoded is within the bounds of its fields; what is made here is held to them where it is made.
    """


class WriteLease(msgspec.Struct, frozen=True, array_like=True):
    """Destination to source: you may write into my memory until `span_us` after you stamped `echo_us`, on your clock.

    `term` counts up. Memory that was granted under an earlier one is not yours any more. Microseconds; all 0: nothing
    was heard that could be echoed.
    """

    term: Natural = 0
    echo_us: Natural = 0
    span_us: Natural = 0

    @property
    def until_us(self) -> int:
        """When the lease ends, by the clock of the source."""
        return self.echo_us + self.span_us


class Hello(Message, frozen=True, tag="Hello"):
    """The sender's card (see `handshake`), so that a peer that was not told of us can answer.

    `stamp_us`, here and elsewhere: the sender's clock, which a WriteLease echoes.
    """

    card: bytes
    stamp_us: Natural = 0


class Ping(Message, frozen=True, tag="Ping"):
    """Are you there? Sending it fails when the peer is gone, and a live one answers with Pong."""

    lease: WriteLease = WriteLease()


class Pong(Message, frozen=True, tag="Pong"):
    """Here."""

    stamp_us: Natural = 0


class NoSeat(Message, frozen=True, tag="NoSeat"):
    """You have no seat here, and why: your Hello was turned away. A longer reason is cut."""

    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARACTERS)]

    def __post_init__(self) -> None:
        _cut_reason(self)


class Registered(Message, frozen=True, tag="Registered"):
    """Destination to source: memory of mine was registered anew, for the `registration`-th time. `transport` is what my
    card would say now; with what you know of me writes to it fail.
    """

    transport: bytes
    registration: Natural


class Query(Message, frozen=True, tag="Query"):
    """Which pages do you hold? `hashes`: of pages one after the other, 32 bytes each, of the asked side's page size,
    the first of them number `first` of a prompt. What is held may be received as `request`.
    """

    request: Annotated[str, msgspec.Meta(max_length=MAX_REQUEST_CHARACTERS)]
    hashes: Annotated[bytes, msgspec.Meta(max_length=MAX_ASKED_BYTES)]
    first: Natural = 0


class Holding(Message, frozen=True, tag="Holding"):
    """The prompt's pages before number `pages` are held, as far as they were asked for, and `request` is offered."""

    request: Annotated[str, msgspec.Meta(max_length=MAX_REQUEST_CHARACTERS)]
    pages: Natural


class About(Message, frozen=True):
    """Base of messages about one attempt at one request. The destination numbers its attempts."""

    request: Annotated[str, msgspec.Meta(max_length=MAX_REQUEST_CHARACTERS)]
    generation: Natural


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """Chunk `chunk` has a region at `offset` of the destination's arena. `round` counts how often it was asked for."""

    chunk: Natural
    offset: Natural
    round: Natural = 0


class Want(About, frozen=True, tag="Want"):
    """Destination to source: send me tokens [start, stop). Both sides derive the chunks from it; said again, it asks
    for what was said in answer.

    `chunk_layers`: no chunk holds layers of two groups of so many (0: one group). `pages`: for the direct route of a
    push, one int32 little-endian page table a component; empty otherwise. A table may have the request's first pages
    only: said again with longer ones, it names more. `aux`: source ranks whose payload is awaited, the same for all
    ranks of the destination. `lease`: also grants the pages of a direct push. `grant`: a region for the only chunk, as
    if Granted came right behind: it goes without being offered, as soon as it is there. `content`: the prompt that the
    destination means; a source whose request is of another one answers with Abort.
    """

    start: Natural
    stop: Natural
    route: Route
    replicas: Replicas
    chunk_bytes: Positive
    pages: Tables = ()
    chunk_layers: Natural = 0
    verb: Verb = Verb.PUSH
    digests: bool = False
    aux: Annotated[tuple[RankNumber, ...], msgspec.Meta(max_length=MAX_RANKS)] = ()
    lease: WriteLease = WriteLease()
    grant: Grant | None = None
    content: Content | None = None


class Noted(About, frozen=True, tag="Noted"):
    """Source to destination: I know this Want and will answer it when there is something to move. Until `keeps_ms`
    milliseconds from now it need not be said again, unless with more than the first `named` pages of each page table.
    """

    keeps_ms: Natural
    named: Annotated[tuple[Natural, ...], msgspec.Meta(max_length=MAX_COMPONENTS)] = ()


class Offered(About, frozen=True, tag="Offered"):
    """Source to destination: chunks in the ranges `ready` [first, stop) may be moved, so regions will be used at once.

    Said again of chunks whose lease was over before they could be written. `pages`: for the direct route of a pull, of
    the source's page tables what was not said before: so many pages of each, which `first_pages` counts (none: 0 each).
    `registration`: the newest of the destination's that the source knows.
    """

    ready: Ranges
    pages: Tables = ()
    first_pages: Annotated[tuple[Natural, ...], msgspec.Meta(max_length=MAX_COMPONENTS)] = ()
    stamp_us: Natural = 0
    registration: Natural = 0


class Granted(About, frozen=True, tag="Granted"):
    """Destination to source: arena regions for some chunks, until `lease` is over. Said again, it asks for what became
    of them. `registration`: what the source must know to reach them."""

    grants: Annotated[tuple[Grant, ...], msgspec.Meta(max_length=MAX_GRANTS)]
    lease: WriteLease = WriteLease()
    registration: Natural = 0


class Chunk(About, frozen=True, tag="Chunk"):
    """Source to destination, arriving after the chunk's bytes. The writer is the peer it came from.

    `digest`: of the chunk's rows as they were in the source's pool (see `kernels.digest_reference`).
    """

    chunk: Natural
    round: Natural = 0
    digest: int | None = None


class Staged(About, frozen=True, tag="Staged"):
    """Source to destination, in a pull: the chunk lies at `offset` of the source's arena, or in its pages; read it."""

    chunk: Natural
    offset: Natural
    round: Natural = 0
    digest: int | None = None


class Taken(About, frozen=True, tag="Taken"):
    """Destination to source, in a pull: the chunk was read, its staging memory is free."""

    chunk: Natural
    round: Natural = 0


class Aux(About, frozen=True, tag="Aux"):
    """Source to destination: what the engine hands over beside the cache."""

    payload: Annotated[bytes, msgspec.Meta(max_length=MAX_AUX_BYTES)]


class Done(About, frozen=True, tag="Done"):
    """Destination to source: everything landed, you may forget the request."""


class Kept(About, frozen=True, tag="Kept"):
    """Source to destination, in a pull, after Done: nothing of it was reused while you read it."""


class Abort(About, frozen=True, tag="Abort"):
    """Either way: this attempt is over, and why. A longer reason is cut."""

    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARACTERS)]

    def __post_init__(self) -> None:
        _cut_reason(self)


class Drained(About, frozen=True, tag="Drained"):
    """Source to destination: no write of this attempt is in flight and none will be posted."""


def _cut_reason(message: NoSeat | Abort) -> None:
    if len(message.reason) > MAX_REASON_CHARACTERS:
        msgspec.structs.force_setattr(message, "reason", f"{message.reason[: MAX_REASON_CHARACTERS - 3]}...")


ToSource = Want | Granted | Taken | Done
ToDestination = Noted | Offered | Chunk | Staged | Aux | Kept | Drained
AnyMessage = Hello | Ping | Pong | NoSeat | Registered | Query | Holding | ToSource | ToDestination | Abort

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)
_splitter = msgspec.msgpack.Decoder(list[msgspec.Raw])


def encode(message: AnyMessage) -> bytes:
    """The bytes of a message. Raises ProtocolError for more than a peer would decode."""
    payload = _HEAD + _encoder.encode(message)
    if len(payload) > MAX_MESSAGE_BYTES:
        kind = type(message).__name__
        raise ProtocolError(f"{kind} of {len(payload)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    return payload


def notes(messages: Sequence[bytes]) -> Iterator[bytes]:
    """Encoded messages to one peer, in order, as few notes: one message as it is, several as an array of their maps."""
    first, nbytes = 0, 0
    for at, message in enumerate(messages):
        nbytes += len(message) - len(_HEAD)
        if at > first and (at - first == MAX_BATCH or nbytes > MAX_MESSAGE_BYTES - len(_HEAD) - 3):
            yield _note(messages[first:at])
            first, nbytes = at, len(message) - len(_HEAD)
    if messages:
        yield _note(messages[first:])


def _note(messages: Sequence[bytes]) -> bytes:
    """An array's head takes 3 bytes at most."""
    if len(messages) == 1:
        return messages[0]
    count = len(messages)
    array = bytes([0x90 | count]) if count < 16 else b"\xdc" + count.to_bytes(2)
    return b"".join((_HEAD, array, *(message[len(_HEAD) :] for message in messages)))


def split(note: bytes) -> Sequence[bytes]:
    """The encoded messages of a note, in order. Raises ProtocolError where it is an array and not a whole one."""
    kind = note[len(_HEAD) : len(_HEAD) + 1]
    if not note.startswith(_HEAD) or not (b"\x90" <= kind <= b"\x9f" or kind in (b"\xdc", b"\xdd")):
        return (note,)  # one message, or what `decode` will refuse
    if len(note) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"note of {len(note)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    count = int.from_bytes(note[len(_HEAD) + 1 : len(_HEAD) + (3 if kind == b"\xdc" else 5)])
    if kind >= b"\xdc" and count > MAX_BATCH:  # before anything is unpacked
        raise ProtocolError(f"a note of {count} messages is over the limit of {MAX_BATCH}")
    try:
        return [_HEAD + bytes(message) for message in _splitter.decode(note[len(_HEAD) :])]
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"malformed note of {len(note)} bytes: {error}") from error


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
    """Page tables as messages carry them: int32, little endian."""
    return tuple(table.astype("<i4").tobytes() for table in pages)


def lengths(tables: Sequence[bytes]) -> tuple[int, ...]:
    """How many pages each of some encoded tables names."""
    return tuple(len(table) // PAGE_ID_BYTES for table in tables)


def decoded(tables: Sequence[bytes]) -> tuple[npt.NDArray[np.int64], ...]:
    """Raises ValueError where the bytes are no whole number of integers."""
    return tuple(np.frombuffer(table, "<i4").astype(np.int64) for table in tables)
