"""Two make-believe releases in one process: this one, and one before it that lacks the newest message and field.

The newest message is Noted, of version 2; the newest field is `Want.grant`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from kvmover.errors import ProtocolError
from kvmover.transfer.mover import Mover
from kvmover.transfer.protocol import wire

NOW = wire.Dialect((1, 2), {wire.Noted: 2})
BEFORE = wire.Dialect((1, 1))


class _Sent(list[bytes]):
    """The messages of one peer that have not left, as the release before writes them."""

    def append(self, encoded: bytes, /) -> None:
        message = wire.decode(encoded)
        if not isinstance(message, wire.Noted):
            super().append(wire.encode(_known(message)))


class _Outbox(dict[str, list[bytes]]):
    def setdefault(self, peer: str, default: Any = None, /) -> list[bytes]:
        return super().setdefault(peer, _Sent())


def _known(message: wire.AnyMessage) -> wire.AnyMessage:
    """A message without what the release before does not know of it."""
    if isinstance(message, wire.Noted):
        raise ProtocolError("the release before was told a message that it does not know")
    return replace(message, grant=None) if isinstance(message, wire.Want) else message


def becomes_this_release(mover: Mover) -> Counter[str]:
    """To be called before a card of it is made. Returns the kinds of all messages that it will hear, counted."""
    mover._core.dialect = NOW
    return _heard_by(mover, lambda message: message)


def becomes_the_release_before(mover: Mover) -> Counter[str]:
    """As above. It says nothing that the release before lacks, and hears nothing of it."""
    mover._core.dialect, mover._core.outbox = BEFORE, _Outbox()
    return _heard_by(mover, _known)


def _heard_by(mover: Mover, known: Callable[[wire.AnyMessage], wire.AnyMessage]) -> Counter[str]:
    heard: Counter[str] = Counter()
    told: Callable[[str, wire.AnyMessage], None] = mover._told

    def hear(name: str, message: wire.AnyMessage) -> None:
        heard[type(message).__name__] += 1
        told(name, known(message))

    mover._told = hear  # type: ignore[method-assign]
    return heard
