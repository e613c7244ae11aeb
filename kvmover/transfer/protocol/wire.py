"""The control messages, as versioned msgpack, with the bounds that a decoded message is held to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from kvmover.errors import ProtocolError
from kvmover.foreign_text import printable
from kvmover.plan.cost import Route
from kvmover.plan.legs import Replicas
from kvmover.transfer.protocol.content import Content

#: The first bytes of a note, in every protocol version: the framing never changes.
_HEAD = b"kvm\x01"

#: First bytes of a sealed message (see `auth`), and the most bytes that a seal adds.
SEALED = b"kvs\x01"
SEAL_BYTES = 64

#: A page table of 260,000 pages fits; larger messages are refused undecoded. NIXL carries notes of this size and a
#: seal, in order.
MAX_MESSAGE_BYTES = (1 << 20) - SEAL_BYTES

#: Most messages in one note: enough for one poll's messages to a peer, and bounded work for that peer.
MAX_BATCH = 256

#: Bytes of the page tables of one message; the rest is a few numbers and a name of at most 1 KiB.
MAX_TABLE_BYTES = MAX_MESSAGE_BYTES - (4 << 10)

#: Characters of a request's name and of a reason.
MAX_REQUEST_CHARACTERS = 256
MAX_REASON_CHARACTERS = 1024

#: Chunks of one lane, and grants in one message. 16,384 chunks of the default 32 MiB are 512 GiB.
MAX_CHUNKS = 16384
MAX_GRANTS = 4096

#: Ranks of a fleet, and components of a model.
MAX_RANKS = 65536
MAX_COMPONENTS = 256

#: Bound of all addresses, lengths and counts: a sum of two fits 64 bits.
MOST = (1 << 63) - 1

Natural = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=MOST)]
RankNumber = Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
Tables = Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_COMPONENTS)]
Ranges = Annotated[tuple[tuple[Natural, Natural], ...], msgspec.Meta(max_length=MAX_CHUNKS)]

#: Bytes of one page's hash, and of all hashes in one Query: 16,384 pages.
PAGE_HASH_BYTES = 32
MAX_ASKED_BYTES = 16384 * PAGE_HASH_BYTES

#: Bytes of the payload (first token, logprobs) that an engine hands over with a request, from one rank.
MAX_AUX_BYTES = 64 << 10


class Verb(StrEnum):
    """The direction of control: the source writes the bytes (PUSH), or the destination reads them (PULL)."""

    PUSH = "push"
    PULL = "pull"


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """The base of all control messages. Unknown fields are ignored, so a newer peer may add some.

    Decoding checks the bounds of fields; constructing a message doesn't: its caller keeps to them.
    """


class WriteLease(msgspec.Struct, frozen=True, array_like=True):
    """A permission to write into the destination's memory until `span_us` after the source stamped `echo_us`, on the
    source's clock.

    `term` counts up, and ends grants made under an earlier term. Times in microseconds; all 0: no stamp was heard that
    could be echoed.
    """

    term: Natural = 0
    echo_us: Natural = 0
    span_us: Natural = 0

    @property
    def until_us(self) -> int:
        """The end of the lease, by the clock of the source."""
        return self.echo_us + self.span_us


class Hello(Message, frozen=True, tag="Hello"):
    """The sender's card (see `handshake`), so that a peer that was not told of the sender can answer.

    `stamp_us`, here and elsewhere: the sender's clock, which a WriteLease echoes.
    """

    card: bytes
    stamp_us: Natural = 0


class Ping(Message, frozen=True, tag="Ping"):
    """A probe of a peer: sending it fails if the peer is gone, and a live peer answers with Pong."""

    lease: WriteLease = WriteLease()


class Pong(Message, frozen=True, tag="Pong"):
    """The answer to Ping."""

    stamp_us: Natural = 0


class NoSeat(Message, frozen=True, tag="NoSeat"):
    """A refusal of a Hello: the peer is not connected. `reason` is printable, and cut to its bound."""

    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARACTERS)]

    def __post_init__(self) -> None:
        _cut_reason(self)


class Registered(Message, frozen=True, tag="Registered"):
    """A notice from destination to source: part of its arena was registered anew, for the `registration`-th time.
    `transport` replaces that of its card: writes with the old one fail.
    """

    transport: bytes
    registration: Natural


class Query(Message, frozen=True, tag="Query"):
    """A lookup of pages at a peer. `hashes`: 32 bytes each, of consecutive pages of the asked side's page size, from
    page number `first` of a prompt. The pages found can be received as `request`.
    """

    request: Annotated[str, msgspec.Meta(max_length=MAX_REQUEST_CHARACTERS)]
    hashes: Annotated[bytes, msgspec.Meta(max_length=MAX_ASKED_BYTES)]
    first: Natural = 0


class Holding(Message, frozen=True, tag="Holding"):
    """The answer to Query: pages from its `first` up to number `pages` of the prompt are held, and `request` offers
    them.
    """

    request: Annotated[str, msgspec.Meta(max_length=MAX_REQUEST_CHARACTERS)]
    pages: Natural


class About(Message, frozen=True):
    """The base of messages about one attempt at one request. The destination numbers its attempts by `generation`."""

    request: Annotated[str, msgspec.Meta(max_length=MAX_REQUEST_CHARACTERS)]
    generation: Natural


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """A region for chunk `chunk` at `offset` of the destination's arena. `round` counts how often the chunk was asked
    for.
    """

    chunk: Natural
    offset: Natural
    round: Natural = 0


class Want(About, frozen=True, tag="Want"):
    """A request from destination to source for tokens [start, stop). Both sides derive the chunks from it. Resending it
    asks the source to repeat its last answer.

    `chunk_layers`: a chunk stays within one group of so many layers (0: one group). `pages`: on the direct route of a
    push, one int32 little-endian page table a component; empty otherwise. A table may hold only the request's first
    pages: resending it with longer tables adds pages. `aux`: source ranks whose payload is awaited, the same for all
    ranks of the destination. `lease`: also covers the pages of a direct push. `grant`: a region for the only chunk,
    which is then written or staged as soon as it is ready, without Offered and Granted. `content`: the destination's
    prompt; a source with another prompt answers with Abort.
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
    """An acknowledgement from source to destination: it keeps this Want until there are bytes to move. For `keeps_ms`
    milliseconds from now it needn't be resent, unless page tables have grown past their first `named` pages.
    """

    keeps_ms: Natural
    named: Annotated[tuple[Natural, ...], msgspec.Meta(max_length=MAX_COMPONENTS)] = ()


class Offered(About, frozen=True, tag="Offered"):
    """A notice from source to destination: chunks in the ranges `ready` [first, stop) may be moved, so their regions
    will be used at once.

    Resent for chunks whose lease ended before they were written. `registration`: the newest registration of the
    destination's arena that the source knows.
    """

    ready: Ranges
    stamp_us: Natural = 0
    registration: Natural = 0


class Granted(About, frozen=True, tag="Granted"):
    """A credit from destination to source: arena regions for some chunks, until `lease` ends. Resending it asks for
    their state. `registration`: the one that the source must know to reach the regions.
    """

    grants: Annotated[tuple[Grant, ...], msgspec.Meta(max_length=MAX_GRANTS)]
    lease: WriteLease = WriteLease()
    registration: Natural = 0


class Chunk(About, frozen=True, tag="Chunk"):
    """A completion from source to destination, delivered after the chunk's bytes. The writer is the peer that sent it.

    `digest`: over the chunk's rows in the source's pool (see `kernels.digest_reference`).
    """

    chunk: Natural
    round: Natural = 0
    digest: int | None = None


class Staged(About, frozen=True, tag="Staged"):
    """A notice from source to destination, in a pull: the chunk can be read, at `offset` of the source's arena or from
    its pages.

    `pages`: on the direct route, new pages of the source's tables; `first_pages` counts the pages sent before (empty: 0
    each).
    """

    chunk: Natural
    offset: Natural
    round: Natural = 0
    digest: int | None = None
    pages: Tables = ()
    first_pages: Annotated[tuple[Natural, ...], msgspec.Meta(max_length=MAX_COMPONENTS)] = ()


class Taken(About, frozen=True, tag="Taken"):
    """An acknowledgement from destination to source, in a pull: the chunk was read, and its staging memory is free.

    The read brings it, as a note behind its bytes, or Done instead.
    """

    chunk: Natural
    round: Natural = 0


class Aux(About, frozen=True, tag="Aux"):
    """A payload from source to destination that the engine hands over beside the cache."""

    payload: Annotated[bytes, msgspec.Meta(max_length=MAX_AUX_BYTES)]


class Done(About, frozen=True, tag="Done"):
    """A notice from destination to source: all bytes have landed, and the source may forget the request."""


class Kept(About, frozen=True, tag="Kept"):
    """The answer of a source to Done, in a pull: its memory kept the request's bytes until the reads ended."""


class Abort(About, frozen=True, tag="Abort"):
    """The end of this attempt, sent by either side. `reason` is printable, and cut to its bound."""

    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON_CHARACTERS)]

    def __post_init__(self) -> None:
        _cut_reason(self)


class Drained(About, frozen=True, tag="Drained"):
    """A promise from source to destination: this attempt has no write in flight and will post no more."""


def _cut_reason(message: NoSeat | Abort) -> None:
    msgspec.structs.force_setattr(message, "reason", printable(message.reason, MAX_REASON_CHARACTERS))


ToSource = Want | Granted | Taken | Done
ToDestination = Noted | Offered | Chunk | Staged | Aux | Kept | Drained
AnyMessage = Hello | Ping | Pong | NoSeat | Registered | Query | Holding | ToSource | ToDestination | Abort


@dataclass(frozen=True, slots=True)
class Dialect:
    """The protocol versions that a side `speaks`, [least, most], and what each has brought.

    `since`: the version that brought a message, for all later than version 1. A field with a default needs no version:
    peers that lack it ignore it.
    """

    speaks: tuple[int, int] = (1, 1)
    since: Mapping[type, int] = field(default_factory=dict[type, int])

    def knows(self, version: int, message: AnyMessage) -> bool:
        """Returns True if a peer that speaks `version` knows the message."""
        return self.since.get(type(message), 1) <= version


#: The protocol versions of this release.
CURRENT = Dialect()

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)
_splitter = msgspec.msgpack.Decoder(list[msgspec.Raw])


def encode(message: AnyMessage) -> bytes:
    """Returns the bytes of a message. Raises ProtocolError if they exceed MAX_MESSAGE_BYTES."""
    payload = _HEAD + _encoder.encode(message)
    if len(payload) > MAX_MESSAGE_BYTES:
        kind = type(message).__name__
        raise ProtocolError(f"{kind} of {len(payload)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    return payload


def notes(messages: Sequence[bytes]) -> Iterator[bytes]:
    """Yields encoded messages to one peer, in order, in as few notes as fit: a single message as it is, several as an
    array.
    """
    first, nbytes = 0, 0
    for at, message in enumerate(messages):
        nbytes += len(message) - len(_HEAD)
        if at > first and (at - first == MAX_BATCH or nbytes > MAX_MESSAGE_BYTES - len(_HEAD) - 3):
            yield _note(messages[first:at])
            first, nbytes = at, len(message) - len(_HEAD)
    if messages:
        yield _note(messages[first:])


def _note(messages: Sequence[bytes]) -> bytes:
    """Returns one message as it is, or the array of several; the array's head takes up to 3 bytes."""
    if len(messages) == 1:
        return messages[0]
    count = len(messages)
    array = bytes([0x90 | count]) if count < 16 else b"\xdc" + count.to_bytes(2)
    return b"".join((_HEAD, array, *(message[len(_HEAD) :] for message in messages)))


def split(note: bytes) -> Sequence[bytes]:
    """Returns the encoded messages of a note, in order. Raises ProtocolError for a malformed array or one of too many
    messages.
    """
    kind = note[len(_HEAD) : len(_HEAD) + 1]
    if not note.startswith(_HEAD) or not (b"\x90" <= kind <= b"\x9f" or kind in (b"\xdc", b"\xdd")):
        return (note,)  # one message, or bytes that `decode` refuses
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
    """Returns the message in `payload`. Raises ProtocolError, and no other error, for all other bytes."""
    if len(payload) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {len(payload)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    if payload.startswith(SEALED):
        raise ProtocolError("a sealed message, and this side has no shared key")
    if payload[:3] != _HEAD[:3]:
        raise ProtocolError(f"not a kvmover message: starts with {payload[:4]!r}")
    if payload[3:4] != _HEAD[3:]:
        raise ProtocolError(f"message framing {payload[3:4].hex() or 'missing'}, this side reads 01")
    try:
        return _decoder.decode(payload[len(_HEAD) :])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"malformed message of {len(payload)} bytes: {error}") from error


#: Bytes of one page id in a message.
PAGE_ID_BYTES = 4


def encoded(pages: Sequence[npt.NDArray[np.int64]]) -> tuple[bytes, ...]:
    """Returns page tables as messages carry them: int32, little endian."""
    return tuple([table.astype("<i4").tobytes() for table in pages])


def lengths(tables: Sequence[bytes]) -> tuple[int, ...]:
    """Returns the number of pages in each encoded table."""
    return tuple(len(table) // PAGE_ID_BYTES for table in tables)


def decoded(tables: Sequence[bytes]) -> tuple[npt.NDArray[np.int64], ...]:
    """Returns the page tables. Raises ValueError if a table's bytes are not a multiple of PAGE_ID_BYTES."""
    return tuple([np.frombuffer(table, "<i4").astype(np.int64) for table in tables])
