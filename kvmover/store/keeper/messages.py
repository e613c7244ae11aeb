"""The protocol between a client and a keeper: one request, one answer, each one packet of a unix socket. Pure.

Answers that grant memory carry descriptors: writable for the slab that the client fills, read-only for other slabs and
for the journal.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from kvmover.store.namespace import HASH_BYTES

#: The least and the most version of packets that this release speaks; a trailing field needs no version.
SPEAKS = (1, 1)

#: Upper limit of a packet, which fits the default send buffer of a unix socket on Linux.
PACKET_BYTES = 128 << 10

#: Namespaces per answer to ListNamespaces.
LISTED = 16

#: Slabs per OpenSlabs request; Linux limits a packet to 253 descriptors.
OPENED = 128

Bytes = Annotated[int, Meta(ge=0, lt=1 << 43)]
Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
PageHash = Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]


class KeeperRefusal(StrEnum):
    """The kind of a refusal.

    FENCED: a newer generation of the fleet has attached. FULL: no room. GONE: the slab was taken back. INVALID: the
    request violates the protocol.
    """

    FENCED = "fenced"
    FULL = "full"
    GONE = "gone"
    INVALID = "invalid"


class KeeperPacket(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The base of all requests and answers. Trailing fields that a later release adds are ignored."""


class Attach(KeeperPacket, frozen=True, tag="Attach"):
    """A request to attach to a namespace, required before all others but ListNamespaces.

    `speaks`: the least and the most version of the client. `manifest`: the namespace's description, or b"". `fleet`,
    `generation`: the owner, which fences older generations of its fleet; "" and 0 fence no client and are never fenced.
    """

    speaks: tuple[Number, Number]
    namespace: PageHash
    manifest: Annotated[bytes, Meta(max_length=4096)]
    fleet: Annotated[str, Meta(max_length=128)] = ""
    generation: Number = 0


class AllocateSlab(KeeperPacket, frozen=True, tag="AllocateSlab"):
    """A request for a slab to fill, which seals the client's previous slab.

    Its size is `slab_bytes`, capped by the keeper's slab size, but at least `nbytes`. Slabs not in `keep` may be
    evicted for it. `quota_bytes`: limit of all slabs of the namespace.
    """

    nbytes: Bytes
    slab_bytes: Bytes
    quota_bytes: Bytes | None
    keep: list[Number]


class CommittedObject(KeeperPacket, frozen=True, tag="CommittedObject"):
    """An object written whole to a slab: byte range, page hash, encoded part, and 8 bytes of digest per cell."""

    offset: Bytes
    nbytes: Bytes
    page: PageHash
    part: Annotated[bytes, Meta(min_length=64, max_length=64)]
    digests: bytes


class CommitObjects(KeeperPacket, frozen=True, tag="CommitObjects"):
    """A request to publish objects, by rising offsets, that this client has written to its slab."""

    slab: Number
    objects: list[CommittedObject]


class OpenSlabs(KeeperPacket, frozen=True, tag="OpenSlabs"):
    """A request for read-only descriptors of slabs."""

    slabs: Annotated[list[Number], Meta(max_length=OPENED)]


class FollowJournal(KeeperPacket, frozen=True, tag="FollowJournal"):
    """A request for the current journal, after an ENDED entry."""


class RemoveObjects(KeeperPacket, frozen=True, tag="RemoveObjects"):
    """A request to remove bad objects of a slab. `records`: places of their rows."""

    slab: Number
    records: list[Number]


class NoteUses(KeeperPacket, frozen=True, tag="NoteUses"):
    """A notice that pages were read, in this order. It gets no answer unless refused."""

    pages: list[PageHash]


class TrimNamespace(KeeperPacket, frozen=True, tag="TrimNamespace"):
    """A request to delete pages last used before second `before`, then evict slabs.

    Eviction ends when `free_bytes` are freed (expired bytes included) and at most `quota_bytes` are held.
    """

    before: Number | None
    quota_bytes: Bytes | None
    free_bytes: Bytes


class ClearNamespace(KeeperPacket, frozen=True, tag="ClearNamespace"):
    """A request to delete every page of the namespace."""


class ListNamespaces(KeeperPacket, frozen=True, tag="ListNamespaces"):
    """A request for up to LISTED manifests, from number `first` on."""

    first: Number


class Welcome(KeeperPacket, frozen=True, tag="Welcome"):
    """The answer to Attach, with the journal. `base`: place of its first byte. `slab_bytes`: the keeper's slab size.

    `version`: of packets, the highest that both sides speak. `journal`: of the journal's entries.
    """

    base: Number
    slab_bytes: Bytes
    version: Number
    journal: Number


class SlabToFill(KeeperPacket, frozen=True, tag="SlabToFill"):
    """The answer to AllocateSlab, with a writable slab of `nbytes` bytes."""

    slab: Number
    nbytes: Bytes


class SlabsToRead(KeeperPacket, frozen=True, tag="SlabsToRead"):
    """The answer to OpenSlabs, with read-only descriptors of the existing ones, in this order."""

    slabs: list[Number]


class JournalToFollow(KeeperPacket, frozen=True, tag="JournalToFollow"):
    """The answer to FollowJournal, with the journal, whose first byte has place `base`."""

    base: Number


class Agreed(KeeperPacket, frozen=True, tag="Agreed"):
    """The answer to CommitObjects and RemoveObjects: done."""


class Trimmed(KeeperPacket, frozen=True, tag="Trimmed"):
    """The answer to TrimNamespace: pages and bytes deleted."""

    expired_pages: int
    evicted_pages: int
    freed_bytes: int


class Cleared(KeeperPacket, frozen=True, tag="Cleared"):
    """The answer to ClearNamespace: pages deleted."""

    pages: int


class Listed(KeeperPacket, frozen=True, tag="Listed"):
    """The answer to ListNamespaces, unordered; fewer than LISTED manifests end the list."""

    manifests: list[bytes]


class Refused(KeeperPacket, frozen=True, tag="Refused"):
    """A refusal: the request had no effect beyond sealing or eviction. `words`: a message for people."""

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

#: Answers that always carry a descriptor.
GRANTS = (Welcome, SlabToFill, JournalToFollow)

_REQUESTS, _ANSWERS = msgspec.msgpack.Decoder(Request), msgspec.msgpack.Decoder(Answer)


def encode(said: Request | Answer) -> bytes:
    """Encode a request or answer as one packet."""
    return msgspec.msgpack.encode(said)


def decode_request(packet: bytes) -> Request | None:
    """Decode a request; None if the packet is malformed."""
    try:
        return _REQUESTS.decode(packet)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def decode_answer(packet: bytes) -> Answer | None:
    """Decode an answer; None if the packet is malformed."""
    try:
        return _ANSWERS.decode(packet)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
