"""Early: destinations that asked for a request before the engine called `send`, and what they said since."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from kvmover.transfer.peers.table import Peer
from kvmover.transfer.protocol import wire
from kvmover.transfer.tombstones import TtlMap

#: What comes on top is refused or dropped, so that a peer cannot fill the memory: wants of all peers, bytes of the page
#: tables in them, and messages after one of them.
MAX_WANTS = 65536
MAX_TABLE_BYTES = 256 << 20
MAX_MESSAGES = 16


@dataclass(slots=True, eq=False)
class Early:
    """One destination that waits, its Want, and messages that followed it."""

    peer: Peer
    want: wire.Want
    deadline: float
    said: list[wire.About] = field(default_factory=list[wire.About])


@dataclass(slots=True)
class EarlyWants:
    """The newest Want of each (request, peer), and requests of which one who had asked was lost, by why."""

    _early: dict[str, dict[str, Early]] = field(default_factory=dict[str, dict[str, Early]])
    _waiting: Counter[str] = field(default_factory=Counter[str])
    _lost: TtlMap[str, str] = field(default_factory=lambda: TtlMap[str, str](MAX_WANTS))
    _wants: int = 0
    _table_bytes: int = 0

    def wait(self, peer: Peer, want: wire.Want, deadline: float) -> bool:
        """Keep a Want until its request is sent; False where too many are kept."""
        waiting = self._early.get(want.request, {})
        before = waiting.get(peer.name)
        if before is not None and before.want.generation >= want.generation:
            if before.want.generation == want.generation:
                before.deadline = deadline
            return True
        table_bytes = self._table_bytes + _bytes(want) - (_bytes(before.want) if before is not None else 0)
        if table_bytes > MAX_TABLE_BYTES or (before is None and self._wants >= MAX_WANTS):
            return False
        self._wants += before is None
        self._waiting[peer.name] += before is None
        self._table_bytes = table_bytes
        self._lost.forget(want.request)
        self._early.setdefault(want.request, waiting)[peer.name] = Early(peer, want, deadline)
        return True

    def follow(self, peer: Peer, message: wire.About) -> bool:
        """Keep what is said about a Want that waits; False where none does."""
        early = self._early.get(message.request, {}).get(peer.name)
        if early is None or early.want.generation != message.generation:
            return False
        if len(early.said) < MAX_MESSAGES:
            early.said.append(message)
        return True

    def withdraw(self, peer: Peer, message: wire.About) -> bool:
        """A destination has given up waiting; False where it did not wait."""
        early = self._early.get(message.request, {}).get(peer.name)
        if early is None or early.want.generation != message.generation:
            return False
        self._drop(message.request, peer.name)
        return True

    def take(self, request: str) -> list[Early]:
        """All who wait for a request, which then wait no more."""
        taken = list(self._early.get(request, {}).values())
        for early in taken:
            self._drop(request, early.peer.name)
        return taken

    @property
    def peers(self) -> Collection[str]:
        """All who wait for anything: nothing comes of what is kept for them if they are not there any more."""
        return self._waiting.keys()

    def lost(self, peer: str, reason: str) -> list[str]:
        """Drop what a peer waits for, and say of which requests; these are remembered as long as its Wants would be."""
        if peer not in self._waiting:
            return []
        dropped = [request for request, waiting in self._early.items() if peer in waiting]
        for request in dropped:
            self._lost.keep(request, reason, self._early[request][peer].deadline)
            self._drop(request, peer)
        return dropped

    def loss(self, request: str) -> str | None:
        """Why one who had asked for a request is not there any more, if nobody has asked since; told once."""
        reason = self._lost.get(request)
        self._lost.forget(request)
        return reason

    def due(self, request: str, peer: str) -> float:
        """When the Want of a peer is dropped; math.inf where there is none."""
        early = self._early.get(request, {}).get(peer)
        return math.inf if early is None else early.deadline

    def drop_late(self, request: str, peer: str, now: float) -> bool:
        """Drop a Want whose time is over; False where there is none."""
        late = now >= self.due(request, peer)
        if late:
            self._drop(request, peer)
        return late

    def expire(self, now: float) -> None:
        """Forget losses that are remembered long enough."""
        self._lost.expire(now)

    def _drop(self, request: str, peer: str) -> None:
        self._table_bytes -= _bytes(self._early[request].pop(peer).want)
        self._wants -= 1
        self._waiting[peer] -= 1
        if not self._waiting[peer]:
            del self._waiting[peer]
        if not self._early[request]:
            del self._early[request]

    def __len__(self) -> int:
        return self._wants


def _bytes(want: wire.Want) -> int:
    return sum(map(len, want.pages))
