"""What both state machines take beside messages: time, the engine's cancellation, the loss of a peer."""

from __future__ import annotations

import zlib

import msgspec

#: What asks for something that need not exist yet is said again after twice as long each time, so many times.
DOUBLINGS = 3

#: Each wait but the first is shortened by up to this part of it, so that what fell due at once does not do so again.
JITTER = 0.25


class Patience(msgspec.Struct, frozen=True):
    """How long to wait, in seconds: for the end, for sources to drain after a failure, and before asking again."""

    deadline_s: float
    drain_s: float
    resend_s: float

    def again_s(self, repeats: int, *names: str | int) -> float:
        """How long to wait before asking again for what may not exist yet, after asking `repeats` times more already.

        The first time `resend_s`; then twice as long each time, up to 8 times, shortened by up to a quarter by a hash
        of `names`: the same everywhere and always.
        """
        if not repeats:
            return self.resend_s
        hashed = zlib.crc32("/".join(map(str, (*names, repeats))).encode()) / (1 << 32)
        return self.resend_s * (1 << min(repeats, DOUBLINGS)) * (1 - JITTER * hashed)


class Tick(msgspec.Struct, frozen=True):
    """Time passed."""


class Cancel(msgspec.Struct, frozen=True):
    """The engine gives the request up."""

    reason: str


class PeerGone(msgspec.Struct, frozen=True):
    """The transport lost a peer. Whether it can still write, or read, is unknown."""

    peer: str
    reason: str
