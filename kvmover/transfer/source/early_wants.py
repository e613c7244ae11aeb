"""Early: destinations that asked for a request before the engine called `send`, and what they said since."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from kvmover.transfer.peers.table import Peer
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.content import Content
from kvmover.transfer.protocol.handshake import Place
from kvmover.transfer.tombstones import Budget, TtlMap

#: Messages after one Want; what comes on top is dropped, and said again.
MAX_MESSAGES = 16

#: Requests of which one who had asked was lost, the latest ones.
MAX_LOST = 65536


@dataclass(slots=True, eq=False)
class Early:
    """One destination that waits, its Want, and messages that followed it, all as bytes: decoded they take up to 20
    times as much. `version`: of several Wants of a generation the one that names most pages counts.
    """

    peer: Peer
    version: tuple[int, int]
    want: bytes
    deadline: float
    said: list[bytes] = field(default_factory=list[bytes])

    @property
    def generation(self) -> int:
        """Which try of the destination it is of."""
        return self.version[0]

    def messages(self) -> list[wire.AnyMessage]:
        """The Want and what followed it."""
        return [wire.decode(each) for each in (self.want, *self.said)]


@dataclass(slots=True)
class EarlyWants:
    """The newest Want of each (request, peer), and requests of which one who had asked was lost, by engine and why.

    All that is kept is of the peer's `budget`.
    """

    budget: Budget = field(default_factory=Budget)
    _early: dict[str, dict[str, Early]] = field(default_factory=dict[str, dict[str, Early]])
    _waiting: Counter[str] = field(default_factory=Counter[str])
    _lost: TtlMap[str, dict[str, str]] = field(default_factory=lambda: TtlMap[str, dict[str, str]](MAX_LOST))
    _wants: int = 0

    def wait(self, peer: Peer, want: wire.Want, deadline: float) -> bool:
        """Keep a Want until its request is sent; False where too much is kept for the peer."""
        before = self._early.get(want.request, {}).get(peer.name)
        version = want.generation, sum(wire.lengths(want.pages))
        if before is not None and before.version >= version:
            if before.generation == want.generation:
                before.deadline = deadline
            return True
        early = Early(peer, version, wire.encode(want), deadline)
        if before is not None:
            self._give(before)
        if not self.budget.take(peer.name, len(early.want)):
            if before is not None:
                self._forget(want.request, peer.name)
            return False
        if before is None:
            self._wants += 1
            self._waiting[peer.name] += 1
        (self._lost.get(want.request) or {}).pop(peer.card.place.engine, None)
        self._early.setdefault(want.request, {})[peer.name] = early
        return True

    def follow(self, peer: Peer, message: wire.ToSource) -> bool:
        """Keep what is said about a Want that waits; False where none does."""
        early = self._early.get(message.request, {}).get(peer.name)
        if early is None or early.generation != message.generation:
            return False
        if len(early.said) < MAX_MESSAGES:
            said = wire.encode(message)
            if self.budget.take(peer.name, len(said)):
                early.said.append(said)
        return True

    def withdraw(self, peer: Peer, message: wire.About) -> bool:
        """A destination has given up waiting; False where it did not wait."""
        early = self._early.get(message.request, {}).get(peer.name)
        if early is None or early.generation != message.generation:
            return False
        self._drop(message.request, peer.name)
        return True

    def waiting(self, request: str) -> list[tuple[Place, range, Content | None]]:
        """Returns the ranks that wait for a request, the positions that they want, and the prompt that they mean."""
        waits = self._early.get(request, {}).values()
        wants = ((early.peer.card.place, wire.decode(early.want)) for early in waits)
        of = ((place, want) for place, want in wants if isinstance(want, wire.Want))
        return [(place, range(want.start, want.stop), want.content) for place, want in of]

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
            early = self._early[request][peer]
            known = self._lost.get(request) or {}
            self._lost.keep(request, {**known, early.peer.card.place.engine: reason}, early.deadline)
            self._drop(request, peer)
        return dropped

    def loss(self, request: str) -> dict[str, str]:
        """By engine, why one who had asked for a request is not there any more, if nobody of it has asked since; told
        once.
        """
        lost = self._lost.get(request) or {}
        self._lost.forget(request)
        return lost

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
        self._give(self._early[request][peer])
        self._forget(request, peer)

    def _give(self, early: Early) -> None:
        for each in (early.want, *early.said):
            self.budget.give(early.peer.name, len(each))

    def _forget(self, request: str, peer: str) -> None:
        del self._early[request][peer]
        self._wants -= 1
        self._waiting[peer] -= 1
        if not self._waiting[peer]:
            del self._waiting[peer]
        if not self._early[request]:
            del self._early[request]

    def __len__(self) -> int:
        return self._wants
