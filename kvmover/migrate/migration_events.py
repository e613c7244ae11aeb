"""The events of both sides of a migration: a round landed or failed, the other side is known to have ended."""

from __future__ import annotations

import msgspec


class RoundLanded(msgspec.Struct, frozen=True):
    """The round's bytes are in the target's pages, on all ranks of this side."""

    number: int


class RoundFailed(msgspec.Struct, frozen=True):
    """A transfer failed on a rank of this side; the other may see it landed."""

    reason: str


class PartnerEnded(msgspec.Struct, frozen=True):
    """A process of the other engine is known to be dead, never by silence alone."""

    reason: str
