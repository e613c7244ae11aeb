"""A loopback network that damages bytes, loses or repeats notes and heals cuts, as a test tells it to."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from kvmover.transfer.protocol import wire
from kvmover.transport import LoopbackNetwork, LoopbackTransport

#: Of a note from, to and what it says: how often it arrives.
Copies = Callable[[str, str, wire.AnyMessage], int]
#: Of a one-sided operation by its number, counted from 0: whether one byte of it is wrong where it lands.
Spoils = Callable[[int], bool]


def once(source: str, target: str, message: wire.AnyMessage) -> int:
    return 1


class FaultyNetwork(LoopbackNetwork):
    """`operations` counts one-sided operations that landed, `spoiled` those that were damaged.

    `most`: so many operations land, later ones stay in flight until `deliver`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0
        self.spoiled = 0
        self.most: int | None = None
        self.spoils: Spoils = lambda number: False
        self.copies: Copies = once

    def heal(self, name: str) -> None:
        """Undo a cut: who was lost over it may be reached again."""
        self._cut.discard(name)

    def carry(self, sender: LoopbackTransport, flight: Any) -> None:
        if self.most is not None and self.operations >= self.most:
            self.hold()
        super().carry(sender, flight)

    def deliver(self) -> None:
        self.most = None
        super().deliver()

    def tell(self, sender: str, peer: str, note: bytes) -> None:
        for message in wire.split(note):
            for _ in range(self.copies(sender, peer, wire.decode(message))):
                super().tell(sender, peer, message)

    def _land(self, sender: LoopbackTransport, flight: Any) -> None:
        note, target = flight.note, self._members.get(flight.peer)
        flight.note = b""
        super()._land(sender, flight)
        if flight.error is not None:
            return
        if self.spoils(self.operations):
            self.spoiled += 1
            landed = flight.remote if flight.verb == "WRITE" else flight.local
            ctypes.c_ubyte.from_address(int(landed.table[-1, 0])).value ^= 0x40
        self.operations += 1
        if note and target is not None:
            self.tell(sender.name, flight.peer, note)
