"""Seals: control messages and cards that only holders of a shared key can have written, each of them once.

A sealed message is `kvs`, the version of this format, a number, a tag and the message. The tag is HMAC-SHA256 (RFC
2104) over the purpose, both ends' names, the number and the message. A transport name carries a generation and is never
used again, so a seal of a process that is over, or for one, opens nothing; among two that live, numbers only grow, and
a window of them tells what came before from what is late (RFC 4303, section 3.4.3). Nothing here keeps a clock.

Writes and reads of memory are the network's own, and are not sealed: see docs/threat-model.md.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from enum import StrEnum

from kvmover.errors import KvmoverError, LayoutError, PeerRefused
from kvmover.transfer.protocol.wire import SEAL_BYTES, SEALED

#: Numbers that may arrive after a later one did. A write's note comes when its bytes have landed, and grants, pings and
#: notes of smaller writes overtake it.
WINDOW = 4096

_TAG = 32
_HEAD = len(SEALED) + 8
assert _HEAD + _TAG <= SEAL_BYTES

#: Shorter ones can be guessed from one message that was overheard.
LEAST_KEY_BYTES = 16
#: A random key of 16 hexadecimal digits has fewer three times in 10**5, any longer one never.
LEAST_DIFFERENT_BYTES = 6

_MESSAGE, _CARD = b"kvmover message", b"kvmover card"


class Refusal(StrEnum):
    """Why a message was not opened. A forged one has another key's tag, other ends, or other bytes."""

    UNSEALED = "unsealed"
    FORGED = "forged"
    REPEATED = "repeated"
    STALE = "stale"


class Unverified(KvmoverError):
    """A message that no holder of the key wrote to us, or that was here before."""

    def __init__(self, refusal: Refusal, words: str) -> None:
        super().__init__(words)
        self.refusal = refusal


class Key:
    """A secret that neither its text nor an error shows."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        if len(secret) < LEAST_KEY_BYTES:
            raise LayoutError(f"a key of {len(secret)} bytes; it must have at least {LEAST_KEY_BYTES}")
        if secret[:1] == b"<" and secret[-1:] == b">":
            raise LayoutError("a key in angle brackets is a placeholder, which everybody knows: openssl rand -hex 32")
        if (different := len(set(secret))) < LEAST_DIFFERENT_BYTES:
            raise LayoutError(f"a key of {different} different bytes; a secret has at least {LEAST_DIFFERENT_BYTES}")
        self._secret = secret

    def tag(self, *parts: bytes) -> bytes:
        """Of the parts and of where one ends: none can give a byte to its neighbour."""
        text = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        return hmac.digest(self._secret, text, "sha256")

    def __repr__(self) -> str:
        return "Key(...)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and hmac.compare_digest(self._secret, other._secret)

    def __hash__(self) -> int:
        return hash(Key)


@dataclass(frozen=True, slots=True)
class Keys:
    """`seals` is what we write with; messages under it and under those of `accepted` are read.

    To change keys under traffic: let every side accept the new one, then every side seal with it and accept the old
    one, then forget that.
    """

    seals: Key
    accepted: tuple[Key, ...] = ()

    def write(self, *parts: bytes) -> bytes:
        """The tag that the first key writes under `parts`, of 32 bytes."""
        return self.seals.tag(*parts)

    def wrote(self, tag: bytes, *parts: bytes) -> bool:
        """Whether one of the keys did. Every key is tried in the same time, whatever the tag."""
        return sum(hmac.compare_digest(tag, key.tag(*parts)) for key in (self.seals, *self.accepted)) > 0


@dataclass(slots=True)
class Window:
    """Which numbers of one sender were seen: the highest, and a bit for each of the WINDOW before it, itself first."""

    highest: int = -1
    seen: int = 0

    def look(self, number: int) -> Refusal | None:
        """Whether `number` is one to refuse. Looking changes nothing: a forged number must not move the window."""
        behind = self.highest - number
        if behind < 0:
            return None
        if behind >= WINDOW:
            return Refusal.STALE
        return Refusal.REPEATED if self.seen >> behind & 1 else None

    def mark(self, number: int) -> None:
        """Note that message `number` was read."""
        ahead = number - self.highest
        if ahead > 0:
            self.highest = number
            self.seen = (self.seen << ahead if ahead < WINDOW else 0) & ((1 << WINDOW) - 1) | 1
        else:
            self.seen |= 1 << -ahead


class NoAuth:
    """What stands in for a MessageAuth where no key is configured: messages go as they are."""

    def sign(self, peer: str, message: bytes) -> bytes:
        """The message as it is."""
        return message

    def verify(self, peer: str, sealed: bytes) -> bytes:
        """The message as it came."""
        return sealed

    def sign_card(self, card: bytes) -> bytes:
        """The card as it is."""
        return card

    def verify_card(self, sealed: bytes) -> bytes:
        """The card as it came. Raises PeerRefused for a sealed one."""
        if sealed.startswith(SEALED):
            raise PeerRefused("the peer's card is sealed, and this side has no shared key")
        return sealed


@dataclass(slots=True, eq=False)
class MessageAuth:
    """One process's end, `name` being its transport's. Numbers and windows are kept for every peer, for ever: a peer
    that is lost and comes back under its name goes on where it was. A peer takes 1 KB; signing 100 bytes 4 us, opening
    them 6 us, a page table of 1 MiB 2.4 ms.
    """

    keys: Keys
    name: str
    _next: dict[str, int] = field(default_factory=dict[str, int])
    _windows: dict[str, Window] = field(default_factory=dict[str, Window])

    def sign(self, peer: str, message: bytes) -> bytes:
        """`message` for `peer` and nobody else. Every call gives other bytes, which are read once."""
        number = self._next.get(peer, 0)
        self._next[peer] = number + 1
        counted = number.to_bytes(8, "big")
        tag = self.keys.write(_MESSAGE, self.name.encode(), peer.encode(), counted, message)
        return b"".join((SEALED, counted, tag, message))

    def verify(self, peer: str, sealed: bytes) -> bytes:
        """What `peer` said to us. Raises Unverified, whatever the bytes, and has then changed nothing."""
        counted, tag, message = _parts(sealed, f"a message from {peer}")
        if not self.keys.wrote(tag, _MESSAGE, peer.encode(), self.name.encode(), counted, message):
            raise Unverified(Refusal.FORGED, f"a message from {peer} has a seal that is not of a key of ours")
        number, window = int.from_bytes(counted, "big"), self._windows.get(peer, Window())
        refusal = window.look(number)
        if refusal is not None:
            raise Unverified(refusal, f"message {number} from {peer} is {refusal}: the last one was {window.highest}")
        window.mark(number)
        self._windows[peer] = window
        return message

    def sign_card(self, card: bytes) -> bytes:
        """A card for whoever has the key, as often as they like: who connects to an old one finds nobody there."""
        return b"".join((SEALED, bytes(8), self.keys.write(_CARD, card), card))

    def verify_card(self, sealed: bytes) -> bytes:
        """Raises PeerRefused."""
        try:
            _, tag, card = _parts(sealed, "the peer's card")
        except Unverified as error:
            raise PeerRefused(str(error)) from None
        if not self.keys.wrote(tag, _CARD, card):
            raise PeerRefused("the peer's card has a seal that is not of a key of ours")
        return card


def _parts(sealed: bytes, what: str) -> tuple[bytes, bytes, bytes]:
    """Number, tag and what they are of."""
    if not sealed.startswith(SEALED) or len(sealed) < _HEAD + _TAG:
        raise Unverified(Refusal.UNSEALED, f"{what} has no seal, and this side has a shared key")
    return sealed[len(SEALED) : _HEAD], sealed[_HEAD : _HEAD + _TAG], sealed[_HEAD + _TAG :]


def authentication(keys: Keys | None, name: str) -> MessageAuth | NoAuth:
    """What a mover of that transport name speaks through."""
    return NoAuth() if keys is None else MessageAuth(keys, name)
