"""Mover: one rank's end of every transfer. Connect peers, offer or ask for requests, poll, and read results."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvmover import ranges
from kvmover.errors import LayoutError, PeerRefused, ProtocolError, TransportError
from kvmover.layout.pool import Pool
from kvmover.transfer import wire
from kvmover.transfer.arena import Arena
from kvmover.transfer.copier import Copier
from kvmover.transfer.core import Core, Staging
from kvmover.transfer.handshake import Model, Place, Rank, read_card, write_card
from kvmover.transfer.inbound import Inbound
from kvmover.transfer.lane import End
from kvmover.transfer.memory import allocations
from kvmover.transfer.outbound import Outbound
from kvmover.transfer.peers import Peer
from kvmover.transfer.posts import Poster
from kvmover.transfer.result import MoverConfig, Transfer
from kvmover.transport.base import Note, Transport
from kvmover.transport.memory import memory_of

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

#: Between polls of a wait. Two hot pollers on two cores starve each other: a note's round trip grew from 0.1 to 112 ms.
POLL_SLEEP_S = 100e-6


class Mover:
    """One rank's pools and its connections. Not thread-safe; nothing happens between calls of `poll`.

    `pools`: one a component, in the model's order, registered with the transport until `close`. The mover takes two
    arenas of `config.arena_bytes` on the pools' device. Raises LayoutError for pools that do not fit the fleet.
    """

    def __init__(
        self,
        transport: Transport,
        model: Model,
        place: Place,
        pools: Sequence[Pool],
        config: MoverConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        import torch

        self._config = config or MoverConfig()
        self._model = model
        self._transport = transport
        device = pools[0].tensors[0].device
        staging: list[Staging] = []
        for _ in range(2):
            tensor = torch.empty(self._config.arena_bytes, dtype=torch.uint8, device=device)
            staging.append(Staging(tensor, memory_of(tensor), Arena(self._config.arena_bytes)))
        memories = tuple(allocations(pool) for pool in pools)
        for memory in (*(m for pool in memories for m in pool), *(s.memory for s in staging)):
            transport.register(memory)
        specs = tuple(pool.spec for pool in pools)
        rank = Rank(place, specs, memories, staging[1].memory, transport.metadata())
        self._card = write_card(model, rank)
        read_card(model, self._card)  # what peers would refuse us for, we refuse now
        end = End(place.fleet, place.rank, specs)
        copier = Copier(device, self._config.sms)
        self._core = Core(transport, self._config, end, rank, tuple(pools), copier, staging[0], staging[1], clock)
        self._poster = Poster(self._core, lambda job, event: self._outbound.ended(job, event))
        self._outbound = Outbound(self._core, self._poster)
        self._inbound = Inbound(self._core, time.time_ns())
        self._next_ping = clock()
        self.refused = 0
        self.malformed = 0

    @property
    def card(self) -> bytes:
        """What a peer needs to connect, for the engine to carry there by whatever road it has."""
        return self._card

    def configure(self, config: MoverConfig) -> None:
        """Behave by `config` from the next request on. Raises LayoutError for another size of the arenas."""
        if config.arena_bytes != self._config.arena_bytes:
            raise LayoutError(f"arenas of {self._config.arena_bytes} bytes cannot become {config.arena_bytes}")
        self._config = self._core.config = config
        self._core.copier.sms = config.sms

    def connect(self, card: bytes) -> str:
        """Connect the peer behind `card`, tell it of us, and return its name.

        Raises PeerRefused with both sides' values when the peer does not hold the same model; nothing of its card is
        understood, loaded or sent before the digests were compared.
        """
        name = self._seat(card)
        self._core.say(name, wire.Hello(self._card))
        return name

    def _seat(self, card: bytes) -> str:
        rank = read_card(self._model, card)
        name = self._transport.connect(rank.transport)
        before = self._core.peers.add(Peer(name, rank))
        if before is not None:
            self._lose(before, f"rank {rank.place.rank} of {rank.place.engine} restarted as {name}")
        return name

    def send(self, request: str, pages: Sequence[npt.ArrayLike], after: torch.cuda.Event | None = None) -> Transfer:
        """Offer a request whose KV is in `pages`: one page table a component, ids in the order of the request.

        Every destination rank that holds a part of ours may fetch it until the transfer ends. `after`: nothing is read
        before this event. The pages belong to the transfer until it has ended, and longer if `result.held`.
        """
        transfer = Transfer(request, self._core.clock())
        self._outbound.send(transfer, _tables(pages), after)
        return transfer

    def receive(self, request: str, engine: str, positions: range, pages: Sequence[npt.ArrayLike]) -> Transfer:
        """Ask `engine` for `positions` of a request and land them in `pages`.

        `positions.stop` is the length of the request; what lies before `positions.start` is here already and is not
        sent. Page tables cover the request from its beginning. Raises PlanError or PeerUnknown before asking anything.
        """
        if positions.step != 1 or positions.start < 0:
            raise LayoutError(f"positions {positions} are not a range of tokens")
        transfer = Transfer(request, self._core.clock())
        self._inbound.receive(transfer, engine, positions, _tables(pages))
        return transfer

    def abort(self, transfer: Transfer, reason: str) -> None:
        """Give a transfer up. It ends, with `reason` on both sides, when no write can touch its pages any more."""
        self._outbound.abort(transfer, reason)
        self._inbound.abort(transfer, reason)

    def poll(self) -> None:
        """Advance everything that can advance. Never blocks for longer than a copy on the CPU takes."""
        for event in self._transport.poll():
            if isinstance(event, Note):
                self._hear(event)
            else:
                self._poster.handle(event)
        self._core.copier.poll()
        self._inbound.poll()
        self._outbound.poll()
        self._poster.poll()
        while self._core.later:
            self._core.later.popleft()()
        self._ping()
        while self._core.lost:
            self._lose(*self._core.lost.popleft())

    def wait(self, transfers: Sequence[Transfer]) -> None:
        """Poll until all have ended; each has a deadline of its own, so this returns."""
        while not all(transfer.ended for transfer in transfers):
            self.poll()
            with ranges.span(ranges.WAIT, ""):
                time.sleep(POLL_SLEEP_S)

    def close(self) -> None:
        """Close the transport: registrations, peers and handles. Transfers still open end as failed."""
        reason = "this side closed"
        self._inbound.close(reason)
        self._outbound.close(reason)
        for name in self._inbound.waits_on() | self._outbound.waits_on():
            self._lose(name, reason)
        self._transport.close()
        self._outbound.drop()

    def _hear(self, note: Note) -> None:
        """No message, whatever its bytes, ends the loop."""
        try:
            message = wire.decode(note.payload)
        except ProtocolError as error:
            self.malformed += 1
            log.warning("dropped a message from %s: %s", note.peer, error)
            return
        if isinstance(message, wire.Hello):
            self._welcome(note.peer, message)
            return
        peer = self._core.peers.get(note.peer)
        if peer is None:
            self.malformed += 1
            log.warning("dropped a %s from %s, who is not connected", type(message).__name__, note.peer)
        elif isinstance(message, wire.Want | wire.Granted | wire.Done):
            self._outbound.hear(peer, message)
        elif isinstance(message, wire.Offered | wire.Chunk | wire.Drained):
            self._inbound.hear(peer, message)
        elif isinstance(message, wire.Abort):
            (self._inbound if self._inbound.knows(message) else self._outbound).hear(peer, message)

    def _welcome(self, name: str, hello: wire.Hello) -> None:
        try:
            if self._seat(hello.card) != name:
                raise PeerRefused(f"{name} sent the card of another")
        except (PeerRefused, TransportError) as error:
            self.refused += 1
            log.warning("refused %s: %s", name, error)

    def _ping(self) -> None:
        """A peer that died while it owes us something is noticed by a message that cannot be sent."""
        now = self._core.clock()
        if now < self._next_ping:
            return
        self._next_ping = now + self._config.ping_s
        for name in self._inbound.waits_on() | self._outbound.waits_on():
            self._core.say(name, wire.Ping())

    def _lose(self, name: str, reason: str) -> None:
        self._core.peers.remove(name)
        self._transport.disconnect(name)
        self._inbound.lost(name, reason)
        self._outbound.lost(name, reason)


def _tables(pages: Sequence[npt.ArrayLike]) -> tuple[npt.NDArray[np.int64], ...]:
    return tuple(np.asarray(table, np.int64).reshape(-1) for table in pages)
