"""What happens to either side of a migration: a round lands or fails, the other side is known to have ended."""

from __future__ import annotations

import msgspec


class RoundLanded(msgspec.Struct, frozen=True):
    """On all ranks of this side: the round's bytes are in the target's pages, with the last one's the hand-over."""

    number: int


class RoundFailed(msgspec.Struct, frozen=True):
    """What was under way came to nothing on some rank of this side. The other side may not know, or know otherwise."""

    reason: str


class PartnerEnded(msgspec.Struct, frozen=True):
    """A process of the other engine is known to be dead, by the kernel or because this side was told. Its engine
    computes no step more of the request. Never said of who is only silent.
    """

    reason: str
