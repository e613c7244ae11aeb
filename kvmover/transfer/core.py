"""Core: what the two halves of a mover share, and the only way they reach the wire."""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kvmover.errors import PeerLost, PeerUnknown
from kvmover.layout.component import Component
from kvmover.layout.pool import Pool
from kvmover.transfer.config import MoverConfig
from kvmover.transfer.events import Patience
from kvmover.transfer.memory.arena import Arena
from kvmover.transfer.memory.copier import Copier
from kvmover.transfer.memory.in_flight import InFlight
from kvmover.transfer.memory.mapped import Mappings, shares
from kvmover.transfer.memory.regions import allocations
from kvmover.transfer.meter import Count, Meter
from kvmover.transfer.peers.links import Links
from kvmover.transfer.peers.table import Peers
from kvmover.transfer.protocol.auth import MessageAuth, NoAuth, authentication
from kvmover.transfer.protocol.handshake import Place, Rank
from kvmover.transfer.protocol.lane import End
from kvmover.transfer.protocol.wire import AnyMessage, encode
from kvmover.transfer.result import Ending, Result
from kvmover.transport.base import Memory, Transport
from kvmover.transport.memory import memory_of, union

if TYPE_CHECKING:
    import torch


log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Staging:
    """An arena with its memory."""

    tensor: torch.Tensor
    memory: Memory
    arena: Arena


@dataclass(slots=True, eq=False)
class Core:
    """The parts of a mover. `sandbox` is what peers may write to measure the way here, empty where they may not.
    `later` holds what must run outside the event being handled, in order.
    """

    transport: Transport
    config: MoverConfig
    end: End
    card: Rank
    pools: tuple[Pool, ...]
    copier: Copier
    outgoing: Staging
    incoming: Staging
    clock: Callable[[], float]
    links: Links
    sandbox: torch.Tensor
    mappings: Mappings
    auth: MessageAuth | NoAuth = field(default_factory=NoAuth)
    peers: Peers = field(default_factory=Peers)
    meter: Meter = field(default_factory=Meter)
    watchers: list[Callable[[Ending], None]] = field(default_factory=list["Callable[[Ending], None]"])
    lost: deque[tuple[str, str]] = field(default_factory=deque["tuple[str, str]"])
    later: deque[Callable[[], None]] = field(default_factory=deque["Callable[[], None]"])

    @property
    def components(self) -> tuple[Component, ...]:
        return tuple(pool.component for pool in self.end.pools)

    @property
    def patience(self) -> Patience:
        """What an attempt that begins now waits for, on either side."""
        return Patience(self.config.deadline_s, self.config.drain_s, self.config.resend_s)

    def remembered_until(self) -> float:
        """How long an attempt that ends now is remembered: a peer that missed its end has given it up by then."""
        return self.clock() + self.config.deadline_s + self.config.drain_s

    def say(self, peer: str, message: AnyMessage) -> None:
        """Send a control message. A peer that cannot be reached is reported lost: every wait on it then ends."""
        self.post(peer, encode(message))

    def post(self, peer: str, encoded: bytes) -> None:
        """As `say`, for a message that is bytes already."""
        self.meter.add(Count.MESSAGES)
        try:
            self.transport.notify(peer, self.auth.sign(peer, encoded))
        except (PeerLost, PeerUnknown) as error:
            self.lost.append((peer, str(error)))

    def ended(self, verb: Literal["send", "receive"], request: str, result: Result) -> None:
        """Tell those that watch. What one of them raises is its own affair: no transfer fails for it."""
        ending = Ending(*self.card.place.seat, verb, request, result)
        for watcher in self.watchers:
            try:
                watcher(ending)
            except Exception:
                log.exception("a watcher of transfers failed at %s", request, extra={"request": request})

    def soon(self, call: Callable[[int | None], None]) -> Callable[[int | None], None]:
        """`call`, but from the mover's loop instead of from inside whoever finishes."""
        return lambda digest: self.later.append(lambda: call(digest))


def assembled(
    transport: Transport, place: Place, pools: Sequence[Pool], config: MoverConfig, clock: Callable[[], float]
) -> Core:
    """Takes two arenas and the sandbox on the pools' device; whoever has the Core keeps them alive."""
    import torch

    device = pools[0].tensors[0].device
    outgoing, incoming = (_staging(config.arena_bytes, device) for _ in range(2))
    probed = torch.zeros(config.sandbox_bytes, dtype=torch.uint8, device=device)
    sandbox = memory_of(probed) if config.sandbox_bytes else None
    memories = tuple(allocations(pool) for pool in pools)
    ours = [outgoing.memory, incoming.memory, *([sandbox] if sandbox else [])]
    for memory in union((*(memory for pool in memories for memory in pool), *ours)):
        transport.register(memory)
    specs = tuple(pool.spec for pool in pools)
    shared = shares(memories)
    mappings = Mappings(bool(shared))
    card = Rank(
        place,
        specs,
        memories,
        incoming.memory,
        outgoing.memory,
        transport.metadata(),
        socket.gethostname(),
        sandbox,
        shared,
        mappings.machine if shared else "",
    )
    return Core(
        transport,
        config,
        End(place.fleet, place.rank, specs),
        card,
        tuple(pools),
        Copier(device, config.sms),
        outgoing,
        incoming,
        clock,
        Links(transport, type(transport).__name__, sandbox, InFlight(transport)),
        probed,
        mappings,
        authentication(config.keys, transport.name),
    )


def _staging(nbytes: int, device: torch.device) -> Staging:
    import torch

    tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return Staging(tensor, memory_of(tensor), Arena(nbytes))
