"""What a client and a keeper say to each other: one question, one answer, each a packet of a unix socket. Pure.

An answer that grants memory carries descriptors: to write, of a slab that the client is to fill; to read, of any other
slabs, and of the journal of a namespace.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from kvmover.store.namespace import HASH_BYTES

#: A change of meaning raises it; a keeper refuses who speaks another.
VERSION = 2

#: No packet is longer: it fits the send buffer of a unix socket as Linux makes it.
PACKET_BYTES = 128 << 10

#: Namespaces that one answer names.
LISTED = 16

#: Slabs that one answer opens; Linux lets no packet have more than 253 descriptors.
OPENED = 128

Bytes = Annotated[int, Meta(ge=0, lt=1 << 43)]
Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
PageHash = Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]


class KeeperRefusal(StrEnum):
    """Why a keeper does not do it: FENCED by a newer generation of the fleet; FULL; GONE: the slab was taken back;
    INVALID: what nobody says who keeps to the protocol.
    """

    FENCED = "fenced"
    FULL = "full"
    GONE = "gone"
    INVALID = "invalid"


class KeeperPacket(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """Base of all that is said."""


class Attach(KeeperPacket, frozen=True, tag="Attach"):
    """The first question but ListNamespaces: who asks, and of which namespace.

    `manifest`: what the namespace says of itself. `fleet` and `generation` say who owns what is written; "" and 0
    nobody, who is fenced by nobody.
    """

    version: int
    namespace: PageHash
    manifest: Annotated[bytes, Meta(max_length=4096)]
    fleet: Annotated[str, Meta(max_length=128)] = ""
    generation: Number = 0


class AllocateSlab(KeeperPacket, frozen=True, tag="AllocateSlab"):
    """A slab to fill, in place of the one before: for `nbytes` bytes at least, `slab_bytes` where there is room.

    Others are evicted for it, but none of `keep`. `quota_bytes`: what the namespace may hold.
    """

    nbytes: Bytes
    slab_bytes: Bytes
    quota_bytes: Bytes | None
    keep: list[Number]


class CommittedObject(KeeperPacket, frozen=True, tag="CommittedObject"):
    """An object that lies in a slab, whole: its place, page and part as records have them, and its cells' digests."""

    offset: Bytes
    nbytes: Bytes
    page: PageHash
    part: Annotated[bytes, Meta(min_length=64, max_length=64)]
    digests: bytes


class CommitObjects(KeeperPacket, frozen=True, tag="CommitObjects"):
    """Objects are whole in the slab that this client fills, in the order of their offsets: others may read them."""

    slab: Number
    objects: list[CommittedObject]


class OpenSlabs(KeeperPacket, frozen=True, tag="OpenSlabs"):
    """Slabs to read."""

    slabs: Annotated[list[Number], Meta(max_length=OPENED)]


class FollowJournal(KeeperPacket, frozen=True, tag="FollowJournal"):
    """The journal that is written now: the one before has ended."""


class RemoveObjects(KeeperPacket, frozen=True, tag="RemoveObjects"):
    """Objects that are bad, by the places of their records: nobody is to read them."""

    slab: Number
    records: list[Number]


class NoteUses(KeeperPacket, frozen=True, tag="NoteUses"):
    """Pages were read, in this order. Nothing is answered."""

    pages: list[PageHash]


class TrimNamespace(KeeperPacket, frozen=True, tag="TrimNamespace"):
    """Delete what nobody used since second `before`, then evict until `free_bytes` are free, and the namespace holds no
    more than `quota_bytes`.
    """

    before: Number | None
    quota_bytes: Bytes | None
    free_bytes: Bytes


class ClearNamespace(KeeperPacket, frozen=True, tag="ClearNamespace"):
    """Delete every page of the namespace."""


class ListNamespaces(KeeperPacket, frozen=True, tag="ListNamespaces"):
    """Manifests of namespaces, LISTED of them from number `first` on."""

    first: Number


class Welcome(KeeperPacket, frozen=True, tag="Welcome"):
    """With the journal, whose first byte has place `base`. `slab_bytes`: of a slab, where nobody asks for less."""

    base: Number
    slab_bytes: Bytes


class SlabToFill(KeeperPacket, frozen=True, tag="SlabToFill"):
    """With the slab, to write: `nbytes` bytes from the first on."""

    slab: Number
    nbytes: Bytes


class SlabsToRead(KeeperPacket, frozen=True, tag="SlabsToRead"):
    """With those of the slabs that are there, in this order, to read."""

    slabs: list[Number]


class JournalToFollow(KeeperPacket, frozen=True, tag="JournalToFollow"):
    """With the journal."""

    base: Number


class Agreed(KeeperPacket, frozen=True, tag="Agreed"):
    """Nothing is to be said of it."""


class Trimmed(KeeperPacket, frozen=True, tag="Trimmed"):
    """What went."""

    expired_pages: int
    evicted_pages: int
    freed_bytes: int


class Cleared(KeeperPacket, frozen=True, tag="Cleared"):
    """What went."""

    pages: int


class Listed(KeeperPacket, frozen=True, tag="Listed"):
    """In no order; fewer than LISTED are the last ones."""

    manifests: list[bytes]


class Refused(KeeperPacket, frozen=True, tag="Refused"):
    """Nothing was done. `words`: for people."""

    refusal: KeeperRefusal
    words: str


Request: TypeAlias = (
    Attach
    | AllocateSlab
    | CommitObjects
    | OpenSlabs
    | FollowJournal
    | RemoveObjects
    | NoteUses
    | TrimNamespace
    | ClearNamespace
    | ListNamespaces
)
Answer: TypeAlias = Welcome | SlabToFill | SlabsToRead | JournalToFollow | Agreed | Trimmed | Cleared | Listed | Refused

#: Answers that always bring a descriptor.
GRANTS = (Welcome, SlabToFill, JournalToFollow)

_REQUESTS, _ANSWERS = msgspec.msgpack.Decoder(Request), msgspec.msgpack.Decoder(Answer)


def encode(said: Request | Answer) -> bytes:
    """One packet."""
    return msgspec.msgpack.encode(said)


def decode_request(packet: bytes) -> Request | None:
    """None for what is none."""
    try:
        return _REQUESTS.decode(packet)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def decode_answer(packet: bytes) -> Answer | None:
    """None for what is none."""
    try:
        return _ANSWERS.decode(packet)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
