"""Limbo: memory of ended attempts that a peer may still write, until it is known that no peer does. Integers and names.

A region or a page is given back when the very process that may write it says that it has drained, or when that process
is known to be dead, its place taken by another, for longer than a NIC retries. Else it stays out of use: whatever a
clock says, a stopped process may wake up and write.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvmover.transfer.result import Transfer

#: Between two questions to a peer whether it has drained at last.
ASK_S = 1.0


@dataclass(slots=True, eq=False)
class Ward:
    """What one peer's writes, or our own `reads` from it, may still touch: arena regions and a transfer's pages.

    `seat`: the engine and rank of the peer. `until`: when it ends by itself, known once another sits there.
    """

    reason: str
    seat: tuple[str, int]
    offsets: list[int] = field(default_factory=list[int])
    reads: set[int] = field(default_factory=set[int])
    transfer: Transfer | None = None
    until: float | None = None


#: A peer by its transport name, and an attempt.
Key = tuple[str, str, int]


@dataclass(slots=True, eq=False)
class Limbo:
    """Wards by (peer, request, generation). `_seated`: who sits where, and since when."""

    linger_s: float
    _wards: dict[Key, Ward] = field(default_factory=dict[Key, Ward])
    _seated: dict[tuple[str, int], tuple[str, float]] = field(
        default_factory=dict[tuple[str, int], "tuple[str, float]"]
    )
    _next: float = 0.0

    def hold(self, key: Key, ward: Ward) -> None:
        """Keep what a peer may still write, which may be dead already: its successor was seen before we gave up."""
        self._wards[key] = ward
        name, since = self._seated.get(ward.seat, (key[0], 0.0))
        if name != key[0] and not ward.reads:
            ward.until = since + self.linger_s

    def get(self, key: Key) -> Ward | None:
        return self._wards.get(key)

    def drained(self, key: Key) -> list[int]:
        """The peer has answered at last: offsets to release."""
        ward = self._wards.get(key)
        if ward is None or ward.reads:
            return []
        return self._release(key)

    def settled(self, key: Key, chunk: int) -> list[int]:
        """A read of ours has ended: offsets to release."""
        ward = self._wards.get(key)
        if ward is None or chunk not in ward.reads:
            return []
        ward.reads.discard(chunk)
        return [] if ward.reads else self._release(key)

    def seated(self, seat: tuple[str, int], name: str, now: float) -> None:
        """`name` sits there now: wards of another process end when nothing that it posted can be under way."""
        if self._seated.get(seat, ("", 0.0))[0] != name:
            self._seated[seat] = name, now
        for key, ward in self._wards.items():
            if ward.seat == seat and key[0] != name and not ward.reads and ward.until is None:
                ward.until = now + self.linger_s

    def poll(self, now: float) -> tuple[list[Key], list[int]]:
        """(attempts to ask about again, offsets to release)."""
        freed = [
            offset
            for key in [key for key, ward in self._wards.items() if ward.until is not None and now >= ward.until]
            for offset in self._release(key)
        ]
        if now < self._next:
            return [], freed
        self._next = now + ASK_S
        return [key for key, ward in self._wards.items() if ward.until is None and not ward.reads], freed

    def reason(self, key: Key) -> str:
        return self._wards[key].reason

    def clear(self) -> None:
        """Nothing touches memory any more: the transport is closed."""
        for key in list(self._wards):
            self._release(key)

    def _release(self, key: Key) -> list[int]:
        ward = self._wards.pop(key)
        if ward.transfer is not None and all(other.transfer is not ward.transfer for other in self._wards.values()):
            ward.transfer.held = False
        return ward.offsets

    def __len__(self) -> int:
        return len(self._wards)
