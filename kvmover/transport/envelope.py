"""Metadata travels in an envelope: the backend's bytes, their owner, and a digest, which NIXL does not check in
time.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvmover.errors import DescriptorError, PeerRefused
from kvmover.foreign_text import MOST_SAID, printable
from kvmover.prepared import prepared
from kvmover.transport.base import Memory, MemoryKind
from kvmover.transport.checks import Ranges

_FORMAT = "kvmover.transport/1"

#: The most characters of a transport's name: an engine's, and where it runs.
_MOST_NAME = 1024
_Natural = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Registration(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A registered range for peers, with its serial number in `Ranges`."""

    kind: MemoryKind
    address: _Natural
    nbytes: _Natural
    device: _Natural
    serial: _Natural


@prepared
class TransportCard(Struct, frozen=True, forbid_unknown_fields=True):
    """A transport's description for peers. `revision` grows with its registrations' every change."""

    backend: Annotated[str, Meta(min_length=1)]
    name: Annotated[str, Meta(min_length=1)]
    generation: Annotated[str, Meta(min_length=1)]
    revision: _Natural
    registrations: tuple[Registration, ...]
    agent: bytes

    @classmethod
    def of(cls, backend: str, name: str, ranges: Ranges, agent: bytes) -> TransportCard:
        """Make the card; `name` ends in its generation, and `agent` is the backend's bytes."""
        rows = tuple(Registration(m.kind, m.address, m.nbytes, m.device, serial) for m, serial in ranges.items())
        return cls(backend, name, name.rpartition(".")[2], ranges.revision, rows, agent)

    def ranges(self) -> Ranges:
        """Returns the peer's ranges. Raises DescriptorError if they overlap."""
        return Ranges((Memory(r.kind, r.address, r.nbytes, r.device), r.serial) for r in self.registrations)


@prepared
class _Sealed(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    format: str
    nbytes: int
    digest: bytes
    body: bytes


def seal(card: TransportCard) -> bytes:
    """Returns the card with its length and SHA-256, against damage, not forgery."""
    body = msgspec.msgpack.encode(card)
    return msgspec.msgpack.encode(_Sealed(_FORMAT, len(body), hashlib.sha256(body).digest(), body))


def unseal(metadata: bytes, backend: str) -> TransportCard:
    """Open metadata. Raises PeerRefused unless it is whole, of this format and of `backend`."""
    try:
        sealed = msgspec.msgpack.decode(metadata, type=_Sealed)
        if sealed.format != _FORMAT:
            raise PeerRefused(f"peer metadata is {printable(sealed.format, MOST_SAID)!r}, this side speaks {_FORMAT!r}")
        if sealed.nbytes != len(sealed.body) or sealed.digest != hashlib.sha256(sealed.body).digest():
            raise PeerRefused(f"peer metadata is corrupt: {len(sealed.body)} bytes of {sealed.nbytes}, or other bytes")
        card = msgspec.msgpack.decode(sealed.body, type=TransportCard)
        card.ranges()
    except (msgspec.DecodeError, UnicodeDecodeError, DescriptorError) as error:
        raise PeerRefused(
            f"peer metadata of {len(metadata)} bytes is malformed: {printable(str(error), MOST_SAID)}"
        ) from error
    if not card.name.isprintable() or len(card.name) > _MOST_NAME:
        raise PeerRefused(
            f"a peer calls itself {printable(card.name, MOST_SAID)}; names print, in {_MOST_NAME} characters"
        )
    if card.backend != backend:
        raise PeerRefused(f"peer {card.name} is on {printable(card.backend, MOST_SAID)}, this side on {backend}")
    if not card.name.endswith(f".{card.generation}"):
        raise PeerRefused(f"peer {card.name} does not carry its generation {printable(card.generation, MOST_SAID)}")
    return card
