"""Events that both state machines take beside messages: time, the engine's cancellation, the loss of a peer."""

from __future__ import annotations

import zlib

import msgspec

#: Doublings of the wait before asking again for something that need not exist yet.
DOUBLINGS = 3

#: Each wait but the first is shortened by up to this part of it, so that waits that ended at once do not do so again.
JITTER = 0.25


class Patience(msgspec.Struct, frozen=True):
    """The waits of an attempt, in seconds: for its end, for sources to drain after a failure, and before a resend."""

    deadline_s: float
    drain_s: float
    resend_s: float

    def again_s(self, repeats: int, *names: str | int) -> float:
        """Return the seconds before asking again for a thing that may not exist yet, after `repeats` repeats.

        The first time `resend_s`; then twice as long each time, up to 8 times, shortened by up to a quarter by a hash
        of `names`: the same everywhere and always.
        """
        if not repeats:
            return self.resend_s
        hashed = zlib.crc32("/".join(map(str, (*names, repeats))).encode()) / (1 << 32)
        return self.resend_s * (1 << min(repeats, DOUBLINGS)) * (1 - JITTER * hashed)


class Tick(msgspec.Struct, frozen=True):
    """The passing of time."""


class Cancel(msgspec.Struct, frozen=True):
    """The cancellation of the request by the engine."""

    reason: str


class PeerGone(msgspec.Struct, frozen=True):
    """The loss of a peer by the transport. The peer may still be able to write or read."""

    peer: str
    reason: str
