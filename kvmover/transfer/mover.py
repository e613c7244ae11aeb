"""Mover: one rank's end of every transfer. Connect peers, offer or ask for requests, poll, and read results."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import numpy.typing as npt

from kvmover import ranges
from kvmover.errors import KvmoverError, LayoutError, PeerRefused, ProtocolError, TransportError
from kvmover.layout.pool import Pool
from kvmover.plan.calibration import Calibration
from kvmover.transfer.arguments import (
    check_offered,
    check_wanted,
    checked_pools,
    page_tables,
    request_name,
    token_range,
)
from kvmover.transfer.config import MoverConfig
from kvmover.transfer.core import assembled
from kvmover.transfer.destination.attempts import ReceiveRequest
from kvmover.transfer.destination.driver import DestinationDriver
from kvmover.transfer.destination.quarantine import Quarantine
from kvmover.transfer.destination.reads import Reads
from kvmover.transfer.memory.in_flight import InFlight
from kvmover.transfer.meter import Count, Gauge, Meter, Snapshot
from kvmover.transfer.peers.liveness import Liveness
from kvmover.transfer.peers.reconnect import Reconnector
from kvmover.transfer.peers.table import Peer
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.auth import MessageAuth, Unverified
from kvmover.transfer.protocol.handshake import Model, Place, read_card, write_card
from kvmover.transfer.result import Ending, Gate, Transfer
from kvmover.transfer.source.driver import SourceDriver
from kvmover.transfer.source.writes import Writes
from kvmover.transport.base import Event, Note, Transport

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
        self._config = config or MoverConfig()
        self._model = model
        self._transport = transport
        pools = checked_pools(model, place, pools)
        self._core = assembled(transport, place, pools, self._config, clock)
        self._card = write_card(model, self._core.card)
        try:
            read_card(model, self._card)  # what peers would refuse us for, we refuse now
        except PeerRefused as error:
            raise LayoutError(str(error)) from error
        self._writes = Writes(self._core, lambda job, event: self._source.ended(job, event), InFlight(transport))
        self._source = SourceDriver(self._core, self._writes)
        self._reads = Reads(
            self._core, lambda reading, event: self._destination.read(reading, event), InFlight(transport)
        )
        self._destination = DestinationDriver(
            self._core, self._reads, Quarantine(self._config.linger_s), time.time_ns()
        )
        self._liveness = Liveness(self._config.ping_s, self._config.silence_s)
        self._reconnector = Reconnector(self._config.backoff, self._config.silence_s)
        self._events: deque[Event] = deque()
        self._thread: threading.Thread | None = None

    @property
    def meter(self) -> Meter:
        """Counts and times of everything this mover did."""
        return self._core.meter

    @property
    def config(self) -> MoverConfig:
        """The configuration that new requests get; `configure` changes it."""
        return self._config

    @property
    def device(self) -> torch.device:
        """Where the pools are."""
        return self._core.copier.device

    def hand_to(self, thread: threading.Thread) -> None:
        """Let nobody but `thread` send, receive and poll while it runs. Raises KvmoverError while another does."""
        if self._thread is not None and self._thread.is_alive():
            raise KvmoverError(f"{self._thread.name} has a thread that drives it already")
        self._thread = thread

    def _check_thread(self) -> None:
        owner = self._thread
        if owner is not None and owner is not threading.current_thread() and owner.is_alive():
            raise KvmoverError(f"{owner.name} is driven by a thread of its own: call the Progress or SharedMover")

    def watch(self, call: Callable[[Ending], None]) -> None:
        """Have `call` told of each transfer that ends from now on, in the thread that polls, between two steps."""
        self._core.watchers.append(call)

    def snapshot(self) -> Snapshot:
        """What this mover did and has under way, as a copy for exporters."""
        core = self._core
        known = {Gauge.PEERS: len(core.peers), Gauge.DIALLED_PEERS: len(self._reconnector)}
        return Snapshot(
            *core.card.place.seat, core.meter.copy(), {**self._source.gauges(), **self._destination.gauges(), **known}
        )

    def calibrations(self) -> Sequence[Calibration]:
        """What was measured of the way to each host; `plan.calibration.save` keeps it for `kvmover plan`."""
        return self._core.links.calibrations(self._config.costs, self._core.clock())

    @property
    def card(self) -> bytes:
        """The bytes that a peer needs to connect. The engine carries them there by its own means."""
        return self._core.auth.sign_card(self._card)

    def configure(self, config: MoverConfig) -> None:
        """Behave by `config` from the next request on. Raises LayoutError for another size of the arenas, and for keys
        where there were none, or none where there were: other keys are changed under traffic.
        """
        if config.arena_bytes != self._config.arena_bytes:
            raise LayoutError(f"arenas of {self._config.arena_bytes} bytes cannot become {config.arena_bytes}")
        seal = self._core.auth
        if isinstance(seal, MessageAuth) != (config.keys is not None):
            raise LayoutError("a mover seals its messages from its beginning to its end, or never")
        if isinstance(seal, MessageAuth) and config.keys is not None:
            seal.keys = config.keys
        self._config = self._core.config = config
        self._core.copier.sms = config.sms
        self._destination.quarantine.linger_s = config.linger_s
        self._liveness.ping_s, self._liveness.silence_s = config.ping_s, config.silence_s
        self._reconnector.policy, self._reconnector.answer_s = config.backoff, config.silence_s

    def connect(self, card: bytes) -> str:
        """Connect the peer behind `card`, tell it of us, and return its name.

        Raises PeerRefused with both sides' values when the peer does not hold the same model; nothing of its card is
        understood, loaded or sent before the digests were compared, and before that its seal where there are keys.
        """
        name = self._seat(self._core.auth.verify_card(card))
        self._liveness.greeted(name, self._core.clock())
        self._core.say(name, wire.Hello(self._card))
        return name

    def _seat(self, card: bytes) -> str:
        rank = read_card(self._model, card)
        name = self._transport.connect(rank.transport)
        self._destination.quarantine.seated(rank.place.seat, name, self._core.clock())
        self._reconnector.seated(rank.place.seat, name)
        peer = Peer(name, rank, card)
        before = self._core.peers.add(peer)
        self._core.links.connected(peer, self._core.clock())
        if before is not None:
            self._lose(before, f"rank {rank.place.rank} of {rank.place.engine} restarted as {name}")
        return name

    def ranks(self, engine: str) -> frozenset[int]:
        """The ranks of an engine that are connected now. Empty for one that nobody connected, or that was lost."""
        return self._core.peers.ranks(engine)

    def send(
        self,
        request: str,
        pages: Sequence[npt.ArrayLike],
        gates: Sequence[Gate] | None = None,
        aux: bytes | None = None,
    ) -> Transfer:
        """Offer a request whose KV is in `pages`: one page table a component, ids in the order of the request.

        Ids are whole numbers, in lists, ranges, arrays or tensors on the host. Raises PlanError for others, for those
        that are not of this rank's pools, and for an empty table of a rank that must hold some of the request.

        Every destination rank that holds a part of ours may fetch it until the transfer ends. `gates`: what has to pass
        before more is read, for a request that is still being computed (see `produced`); None: all of it is there.
        `aux`: at most 64 KiB that go to every destination rank that asks this rank for them, exactly once. The pages
        belong to the transfer until it has ended, and longer while `transfer.held`. Whoever asks for a request that has
        ended is told how, at once, for an hour: send its name again before it is asked for again, or `reopen` it.
        """
        self._check_thread()
        tables = page_tables(pages)
        check_offered(tables, self._core.pools, self._core.end.fleet)
        transfer = Transfer(request_name(request), self._core.clock())
        self._source.send(transfer, tables, gates, aux)
        return transfer

    def produced(self, transfer: Transfer, gate: Gate) -> None:
        """Add a gate to a request that was sent with some, as many as none: `gates=[]` promises nothing yet."""
        self._source.produced(transfer, gate)

    def attach(self, transfer: Transfer, payload: bytes) -> None:
        """Hand over the `aux` of a request that was sent without: the first token is known after the last layer."""
        self._source.attach(transfer, payload)

    def refuse(self, request: str, reason: str) -> None:
        """This rank will not send `request`: destinations that ask, or have asked, hear why instead of waiting."""
        self._source.refuse(request, reason)

    def reopen(self, request: str) -> None:
        """A request of this name will be sent though one was before, or was refused: destinations that ask wait."""
        self._source.reopen(request)

    def receive(
        self,
        request: str,
        engine: str,
        positions: range,
        pages: Sequence[npt.ArrayLike],
        aux_from: Sequence[int] = (),
    ) -> Transfer:
        """Ask `engine` for `positions` of a request and land them in `pages`.

        `positions.stop` is the length of the request; what lies before `positions.start` is here already and is not
        sent. Page tables cover the request from its beginning. `aux_from`: ranks of `engine` whose payload the transfer
        waits for, the same on every rank of this fleet. Raises PlanError, LayoutError or PeerUnknown before asking
        anything: for page ids as `send`, and for a page that two parts of the request would land in.
        """
        self._check_thread()
        tables, tokens = page_tables(pages), token_range(positions)
        check_wanted(tables, self._core.pools, tokens, self._core.end.fleet)
        transfer = Transfer(request_name(request), self._core.clock())
        self._destination.receive(ReceiveRequest(transfer, engine, tokens, tables, aux_from))
        return transfer

    def abort(self, transfer: Transfer, reason: str) -> None:
        """Give a transfer up: it ends, with `reason` on both sides, when no write can touch its pages any more."""
        self._source.abort(transfer, reason)
        self._destination.abort(transfer, reason)

    def poll(self) -> bool:
        """Advance every transfer as far as it can go, never blocking for longer than copies on the CPU take.

        Returns whether anything came in, went out or was done: if so, the next poll should not be long in coming.
        """
        self._check_thread()
        before = self.meter.beats
        self.meter.counts[Count.POLLS] += 1
        self._events += self._transport.poll()
        while self._events:  # one at a time: an error costs no event but the one it comes from
            event = self._events.popleft()
            if isinstance(event, Note):
                self._hear(event)
            elif not self._reads.handle(event) and not self._core.links.handle(event, self._core.clock()):
                self._writes.handle(event)
        self._core.copier.poll()
        self._destination.poll()
        self._source.poll()
        self._writes.poll()
        while self._core.later:
            self._core.later.popleft()()
        self._ping()
        self._dial()
        while self._core.lost:
            self._lose(*self._core.lost.popleft())
        return self.meter.beats != before

    def wait(self, transfers: Sequence[Transfer]) -> None:
        """Poll until all have ended; each has a deadline of its own, so this returns."""
        while not all(transfer.ended for transfer in transfers):
            if not self.poll():
                with ranges.span(ranges.WAIT, ""):
                    time.sleep(POLL_SLEEP_S)

    def close(self, reason: str = "this side closed") -> None:
        """Fail what is open with `reason`, and close the transport: registrations, peers and handles."""
        self._destination.close(reason)
        self._source.close(reason)
        for name in self._destination.waits_on() | self._source.waits_on():
            self._lose(name, reason)
        self._transport.close()
        self._source.drop()
        self._destination.quarantine.clear()

    def __enter__(self) -> Mover:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _hear(self, note: Note) -> None:
        """No message, whatever its bytes, ends the loop."""
        try:
            payload = self._core.auth.verify(note.peer, note.payload)
        except Unverified as error:  # not even a sign of life
            self.meter.refused(error.refusal)
            log.warning("dropped a message: %s", error)
            return
        self._liveness.heard(note.peer)
        if self._reconnector.heard(note.peer, self._core.clock()):
            self.meter.add(Count.RECONNECTS)
        try:
            message = wire.decode(payload)
        except ProtocolError as error:
            self.meter.add(Count.MALFORMED_MESSAGES)
            log.warning("dropped a message from %s: %s", note.peer, error)
            return
        if isinstance(message, wire.Hello):
            self._welcome(note.peer, message)
            return
        peer = self._core.peers.get(note.peer)
        if peer is None:
            self.meter.add(Count.MALFORMED_MESSAGES)
            log.warning("dropped a %s from %s, who is not connected", type(message).__name__, note.peer)
        elif isinstance(message, wire.Ping):
            self._core.say(peer.name, wire.Pong())
        elif isinstance(message, wire.ToSource):
            self._source.hear(peer, message)
        elif isinstance(message, wire.ToDestination):
            self._destination.hear(peer, message)
        elif isinstance(message, wire.Abort):
            (self._destination if self._destination.knows(message) else self._source).hear(peer, message)

    def _welcome(self, name: str, hello: wire.Hello) -> None:
        try:
            if self._seat(hello.card) != name:
                raise PeerRefused(f"{name} sent the card of another")
            self._core.say(name, wire.Pong())
        except (PeerRefused, TransportError) as error:
            self.meter.add(Count.REFUSED_PEERS)
            log.warning("refused %s: %s", name, error)

    def _ping(self) -> None:
        """A peer that died while it owes us something is noticed by a ping that cannot be sent, or is not answered."""
        awaited = self._destination.waits_on() | self._source.waits_on()
        ping, silent = self._liveness.due(awaited, self._core.clock())
        strangers, deaf = self._liveness.strangers(self._core.clock())
        for name in strangers:
            self._core.say(name, wire.Hello(self._card))
        for name in ping:
            self._core.say(name, wire.Ping())
        for name in (*silent, *deaf):
            self._core.lost.append((name, f"{name} has answered nothing for {self._config.silence_s} s"))

    def _dial(self) -> None:
        """Reach for lost peers again; what they say, or that they say nothing, decides."""
        now = self._core.clock()
        dial, silent = self._reconnector.due(now)
        for name in silent:
            self._core.lost.append((name, f"{name} does not answer"))
        for name, card in dial:
            try:
                self._core.say(self._seat(card), wire.Hello(self._card))
                self._core.say(name, wire.Ping())
            except (PeerRefused, TransportError) as error:
                self._reconnector.lost(name, card, read_card(self._model, card).place.seat, str(error), now)

    def _lose(self, name: str, reason: str) -> None:
        peer = self._core.peers.get(name)
        if peer is not None:
            self.meter.add(Count.LOST_PEERS)
            log.warning("lost %s: %s", name, reason)
            if self._core.peers.sits(peer):
                self._reconnector.lost(name, peer.encoded, peer.card.place.seat, reason, self._core.clock())
        self._core.peers.remove(name)
        self._core.mappings.forget(name)
        self._liveness.forget(name)
        self._transport.disconnect(name)
        self._destination.lost(name, reason)
        self._source.lost(name, reason)
