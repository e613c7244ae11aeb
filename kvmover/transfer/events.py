"""What both state machines take beside messages: time, the engine's cancellation, the loss of a peer."""

from __future__ import annotations

import msgspec


class Patience(msgspec.Struct, frozen=True):
    """How long to wait, in seconds: for the end, for sources to drain after a failure, and before asking again."""

    deadline_s: float
    drain_s: float
    resend_s: float


class Tick(msgspec.Struct, frozen=True):
    """Time passed."""


class Cancel(msgspec.Struct, frozen=True):
    """The engine gives the request up."""

    reason: str


class PeerGone(msgspec.Struct, frozen=True):
    """The transport lost a peer. Whether it can still write, or read, is unknown."""

    peer: str
    reason: str
