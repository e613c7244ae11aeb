"""A Mover is one rank's end of every transfer: connect peers, offer or request KV, poll, and read results."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec
import numpy.typing as npt

from kvmover.errors import KvmoverError, LayoutError, ProtocolError, TransportError
from kvmover.layout.pool import Pool
from kvmover.plan.calibration import Calibration
from kvmover.transfer import nvtx_ranges as ranges
from kvmover.transfer.arguments import (
    ReceiveArguments,
    SendArguments,
    card_of,
    check_fits,
    check_sent,
    check_wanted,
    checked_pools,
    contents_of,
    gate_of,
    page_tables,
    payload_of,
    request_name,
    transfer_of,
)
from kvmover.transfer.config import MoverConfig, Pace
from kvmover.transfer.core import Core, TimerKind, assembled
from kvmover.transfer.destination.destination_attempts import ReceiveRequest
from kvmover.transfer.destination.destination_driver import DestinationDriver, Reads
from kvmover.transfer.destination.quarantine import Quarantine, WriteLeases
from kvmover.transfer.memory.descriptors import InFlight
from kvmover.transfer.memory.registrations import Registrations, Renewals
from kvmover.transfer.meter import Count, Gauge, Meter, Snapshot
from kvmover.transfer.peers.asks import Asks
from kvmover.transfer.peers.connections import Connections, Reconnector, check_own_card
from kvmover.transfer.peers.peer_table import Peer
from kvmover.transfer.peers.processes import PeerProcess
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.auth import MessageAuth, Unverified
from kvmover.transfer.protocol.content import Content
from kvmover.transfer.protocol.handshake import Model, Place
from kvmover.transfer.result import Ending, Gate, Service, Transfer
from kvmover.transfer.source.source_driver import SourceDriver
from kvmover.transfer.source.writes import Writes
from kvmover.transport.base import Event, Note, Transport

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

#: The pace of polls in `wait`. A poller slows a peer that copies on the next core: 176 MB were pushed in 108 ms beside
#: a poll every 1 ms, in 130 ms beside one every 0.1 ms. Two busy pollers starve each other.
WAITING = Pace()

#: Timers run in one poll; more wait for the next polls, so that each stays short.
MAX_TIMERS = 32

#: Messages handled in one poll, up to the note that reaches this; more wait for the next polls.
MAX_HEARD = 256


class Mover:
    """One rank's pools and its connections. Not thread-safe; all work happens within calls of its methods, mostly
    `poll`.

    `pools`: one a component, in the model's order, registered with the transport until `close`. The mover allocates two
    arenas of `config.arena_bytes` on the pools' device. Raises LayoutError for pools that don't fit the fleet.
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
        pools = checked_pools(model, place, pools)
        if not place.generation:
            place = msgspec.structs.replace(place, generation=time.time_ns())
        core = assembled(transport, place, pools, self._config, clock)
        self._join(model, core, Quarantine(), WriteLeases(self._config.lease_s, self._config.linger_s))
        self._thread: threading.Thread | None = None
        self._closed: str | None = None

    def _join(self, model: Model, core: Core, quarantine: Quarantine, leases: WriteLeases) -> None:
        """Make both halves of the mover. `quarantine`, `leases`: memory that peers may still write from an earlier
        life.
        """
        self._model, self._core, self._transport, transport = model, core, core.transport, core.transport
        check_own_card(model, core)
        registrations = Registrations(core)
        self._writes = Writes(
            core, lambda job, event: self._source.ended(job, event), InFlight(transport), registrations
        )
        self._source = SourceDriver(core, self._writes)
        self.asks = Asks(core)
        self._reads = Reads(core, lambda read, event: self._destination.read(read, event), InFlight(transport))
        renewals, generation = Renewals(core, quarantine), core.card.place.generation
        self._destination = DestinationDriver(core, self._reads, quarantine, leases, renewals, generation)
        self._reconnector = Reconnector(self._config.backoff, self._config.silence_s)
        self._connections = Connections(
            core, model, self._destination.leases, self._reconnector, self._lose, self._destination.greeted
        )
        self._events: deque[Event] = deque()
        self._when_due = self._calls_when_due()
        self._forget_the_past(None)
        self._moved_s = 0.0

    def _calls_when_due(self) -> dict[TimerKind, Callable[[Any], None]]:
        return {
            TimerKind.PEER: self._connections.check_on,
            TimerKind.DIAL: self._connections.dial,
            TimerKind.REFUSED: self._connections.let_go,
            TimerKind.RECEIVE: self._destination.tick,
            TimerKind.FAREWELL: self._destination.repeat_farewell,
            TimerKind.QUARANTINE: self._destination.look_at_quarantine,
            TimerKind.SEND: self._source.tick,
            TimerKind.REQUEST: self._source.end_of_time,
            TimerKind.EARLY: self._source.drop_early,
            TimerKind.TOMBSTONES: self._forget_the_past,
            TimerKind.ASK: self.asks.tick,
        }

    @property
    def meter(self) -> Meter:
        """Counts and times since the mover was made."""
        return self._core.meter

    @property
    def config(self) -> MoverConfig:
        """The configuration of new requests; `configure` changes it."""
        return self._config

    @property
    def device(self) -> torch.device:
        """The device of the pools."""
        return self._core.copier.device

    def hand_to(self, thread: threading.Thread) -> None:
        """Let only `thread` send, receive and poll while it runs. Raises KvmoverError while another thread does."""
        if self._thread is not None and self._thread.is_alive():
            raise KvmoverError(f"{self._thread.name} has a thread that drives it already")
        self._thread = thread

    def _check_thread(self) -> None:
        owner = self._thread
        if owner is not None and owner is not threading.current_thread() and owner.is_alive():
            raise KvmoverError(f"{owner.name} is driven by a thread of its own: call the Progress or SharedMover")

    def _check_open(self) -> None:
        if self._thread is not None:
            self._check_thread()
        if self._closed is not None:
            raise TransportError(f"the mover of {self._core.card.place.text()} is closed: {self._closed}")

    def watch(self, call: Callable[[Ending], None]) -> None:
        """Call `call` with each transfer that ends from now on, in the polling thread, between two steps."""
        self._core.watchers.append(call)

    def snapshot(self) -> Snapshot:
        """Returns a copy of counts and gauges, for exporters."""
        core = self._core
        known = {Gauge.PEERS: self._connections.living(), Gauge.DIALLED_PEERS: len(self._reconnector)}
        return Snapshot(
            *core.card.place.seat, core.meter.copy(), {**self._source.gauges(), **self._destination.gauges(), **known}
        )

    def calibrations(self) -> Sequence[Calibration]:
        """Returns the measured speeds of the path to each host, which `plan.calibration.save` stores for `kvmover
        plan`.
        """
        return self._core.links.calibrations(self._config.costs, self._core.clock())

    @property
    def card(self) -> bytes:
        """The handshake bytes that a peer needs to connect. The engine carries them to it."""
        return self._core.auth.sign_card(self._connections.card)

    def configure(self, config: MoverConfig) -> None:
        """Use `config` from the next request on. Raises LayoutError for another size of the arenas, and for adding or
        removing keys; keys themselves may change under traffic. Raises EngineUnavailable for a copy engine that the
        pools' device lacks.
        """
        if config.arena_bytes != self._config.arena_bytes:
            raise LayoutError(f"arenas of {self._config.arena_bytes} bytes cannot become {config.arena_bytes}")
        seal = self._core.auth
        if isinstance(seal, MessageAuth) != (config.keys is not None):
            raise LayoutError("a mover seals its messages from its beginning to its end, or never")
        self._core.copier.configure(config.sms, config.engine)
        if isinstance(seal, MessageAuth) and config.keys is not None:
            seal.keys = config.keys
        self._config = self._core.config = config
        self._destination.leases.lease_s, self._destination.leases.linger_s = config.lease_s, config.linger_s
        self._core.liveness.ping_s, self._core.liveness.silence_s = config.ping_s, config.silence_s
        self._reconnector.policy, self._reconnector.answer_s = config.backoff, config.silence_s
        self._core.timers.set((TimerKind.DIAL, None), -math.inf)

    def connect(self, card: bytes) -> str:
        """Connect the peer behind `card`, send it this side's card, and return its name.

        Raises PeerRefused with both sides' values for a peer with another model: seal (with keys) and digests are
        checked before the rest of its card is decoded. Raises PeerReplaced for a process whose rank id a newer process
        has, or had until `linger_s` ago, and PeerAhead for a generation too far in the future; the connection is not
        opened then. A peer that has no seat for this side sends the reason, and is lost.
        """
        return self._connections.connect(card_of(card))

    def disconnect(self, engine: str, rank: int | None = None) -> None:
        """Disconnect one rank of `engine`, or all (None), and stop dialling: for an engine out of service.

        Open transfers with them fail with `peer_lost`; unknown ranks are ignored. `connect` or a Hello undoes it, of
        these processes or of another at their rank id, of any generation.
        """
        self._check_thread()
        for each in self._core.peers.ranks(engine) if rank is None else {rank} & self._core.peers.ranks(engine):
            reason = f"this side disconnected rank {each} of {engine}"
            self._lose(self._core.peers.at(engine, each).name, reason, logging.INFO)
        self._core.peers.vacate(engine, self._core.peers.seen(engine) if rank is None else {rank})
        self._connections.forget(engine, rank)

    def ranks(self, engine: str) -> frozenset[int]:
        """Returns the connected ranks of an engine; empty for an unknown or lost one."""
        return self._core.peers.ranks(engine)

    def processes(self, engine: str) -> tuple[PeerProcess, ...]:
        """Returns the connected processes of an engine, by rank: each can be asked whether it is known dead."""
        return self._core.peers.processes(engine, self._core.mappings.machine)

    def send(
        self,
        request: str,
        pages: Sequence[npt.ArrayLike],
        gates: Sequence[Gate] | None = None,
        aux: bytes | None = None,
        deadline_s: float | None = None,
        service: Service = Service.ONCE,
        content: Content | None = None,
    ) -> Transfer:
        """Offer a request whose KV is in `pages`: one page table a component, ids in the order of the request.

        Ids are whole numbers in lists, ranges, arrays or tensors on the host. Raises PlanError for other ids, ids
        outside this rank's pools, an empty table of a rank that must hold some of the request, and a name that is being
        sent. Each destination rank that shares a part of this rank may fetch it until the transfer ends. `gates`:
        events that must pass before more is read, for a request still being computed: `pages` may be its beginning,
        even empty (see `produced`); None: all of it is there. `aux`: at most 64 KiB, sent to each destination rank that
        asks this rank for it, exactly once. The pages belong to the transfer until it has ended, and longer while
        `transfer.quarantined`. For an hour after the end, destinations that ask are told how the request ended: send
        its name again before they ask again, or `reopen` it. `deadline_s`: seconds from now; None: as configured.
        `service`: ONCE ends with the first engine that has all it wants; an engine that asks later is told that it was
        served, though the pages are still there. If two engines will come, both after the offer, use REPEATED.
        `content`: the KV's prompt; a destination with another prompt is refused before a byte moves, and the request
        goes on.
        """
        self._check_open()
        given = SendArguments.of(request, pages, gates, aux, deadline_s, service, content)
        check_sent(given, self._core.pools, self._core.end.fleet)
        transfer = Transfer(given.request, self._core.clock(), given.content)
        seconds = given.deadline_s or self._config.deadline_s
        self._source.send(transfer, given.pages, given.gates, given.aux, seconds, given.service)
        return transfer

    def produced(
        self,
        transfer: Transfer,
        gate: Gate,
        pages: Sequence[npt.ArrayLike] | None = None,
        contents: Sequence[Content] = (),
    ) -> None:
        """Add a gate to a request that was sent with `gates`, which may be empty: `gates=[]` promises no tokens yet.

        `pages`: appended to its page tables, one list a component, as in `send`; lists may be empty. A prefill in
        chunks names each chunk's pages as it computes them: those of 512 tokens by `produced(transfer, Gate(event,
        tokens=512), [[4, 9]])`, and so on. Tokens move once their gate has passed and their pages are named. The
        deadline starts anew. Raises PlanError, and adds neither gate nor pages, for page ids as in `send`, a request
        sent without gates, and a gate of fewer tokens than an earlier one. Ignored once the transfer has ended.
        `contents`: for a request that decodes, one for each longer prefix.
        """
        tables = None if pages is None else page_tables(pages)
        self._source.produced(transfer_of(transfer), gate_of(gate), tables, contents_of(contents))

    def attach(self, transfer: Transfer, payload: bytes) -> None:
        """Set the `aux` of a request that was sent without: the first token is known after the last layer. Raises
        PlanError for a second payload, or one over 64 KiB.
        """
        self._source.attach(transfer_of(transfer), payload_of(payload))

    def refuse(self, request: str, reason: str) -> None:
        """Refuse to send `request`: destinations that ask, or have asked, get `reason` instead of waiting."""
        self._source.refuse(request_name(request), reason)

    def reopen(self, request: str) -> None:
        """Let destinations that ask for `request` wait: it will be sent again after it ended or was refused."""
        self._source.reopen(request_name(request))

    def waiting(self, request: str) -> list[tuple[Place, range, Content | None]]:
        """Returns (rank, positions, prompt) of each destination rank that asked for a request before it was sent."""
        return self._source.early.waiting(request_name(request))

    def receive(
        self,
        request: str,
        engine: str,
        positions: range,
        pages: Sequence[npt.ArrayLike] | None,
        aux_from: Sequence[int] = (),
        deadline_s: float | None = None,
        content: Content | None = None,
    ) -> Transfer:
        """Request `positions` of a request from `engine`, and land them in `pages`.

        `positions.stop` is the length of the request; tokens before `positions.start` are here already and are not
        sent. Page tables cover the request from its beginning; None: pages are named as they are allocated, by
        `allocated`. `aux_from`: ranks of `engine` whose payload the transfer waits for, the same on every rank of this
        fleet. `deadline_s`: seconds from now; None: as configured. `content`: the whole prompt; a source with another
        prompt ends the transfer. Raises PlanError, LayoutError or PeerUnknown before any message: for page ids as in
        `send`, a page in which two parts would land or that another receive may still write, and more positions than
        the pools have pages.
        """
        self._check_open()
        given = ReceiveArguments.of(request, engine, positions, pages, aux_from, deadline_s, content)
        check_fits(positions, self._core.pools, self._core.end.fleet)
        if given.pages is not None:
            check_wanted(given.pages, self._core.pools, positions, self._core.end.fleet)
        transfer = Transfer(given.request, self._core.clock(), given.content)
        seconds = given.deadline_s or self._config.deadline_s
        wanted = ReceiveRequest(transfer, engine, positions, given.pages, seconds, given.aux_from)
        self._destination.receive(wanted)
        return transfer

    def allocated(self, transfer: Transfer, pages: Sequence[npt.ArrayLike]) -> None:
        """Append pages to the page tables of a request that was received with None.

        One list a component, as in `receive`; lists may be empty. Tokens move once they have pages, within the deadline
        of the transfer: of 8 pages, `allocated(transfer, [[4, 9]])` lets the first two land. The pages belong to the
        transfer from here on. Raises PlanError, and adds no page, for page ids as in `receive`, more pages than the
        request needs, and a request that was received with its pages. Ignored once the transfer has ended or is
        failing.
        """
        self._destination.allocated(transfer_of(transfer), page_tables(pages))

    def abort(self, transfer: Transfer, reason: str) -> None:
        """Abort a transfer: it ends, with `reason` on both sides, once no write can touch its pages any more."""
        self._source.abort(transfer_of(transfer), reason)
        self._destination.abort(transfer, reason)

    def forget(self, engine: str, rank: int) -> None:
        """Declare a rank's process dead, as an orchestrator does that deleted its pod: disconnect it, stop dialling,
        and free at once the memory that it might have written.

        Earlier processes of that rank are forgotten too. A forgotten process must not be alive: its writes are not
        guarded against.
        """
        self._check_thread()
        seat, reason = (engine, rank), f"rank {rank} of {engine} is dead, this side was told"
        self._core.peers.bury(engine, rank)
        self._destination.forget(seat, reason)
        name = self._core.peers.seated(seat)
        if name is not None:
            self._lose(name, reason)
        self._connections.forget(engine, rank)

    def poll(self) -> bool:
        """Advance all transfers without blocking for longer than copies on the CPU take.

        Its cost grows with events since the last poll and due timers, not with open requests. Messages to a peer since
        the last poll leave together, in one note if they fit. Returns True if messages came in, went out or work was
        done: poll again soon then.
        """
        if self._thread is not None:
            self._check_thread()
        core, events = self._core, self._events
        meter, began, left = core.meter, core.clock(), MAX_HEARD
        before = meter.beats
        meter.counts[Count.POLLS] += 1
        events += self._transport.poll()
        while events and left > 0:  # one at a time: an error loses only its own event
            event = events.popleft()
            if isinstance(event, Note):
                left -= self._hear(event)
            elif not self._reads.handle(event) and not core.links.handle(event, core.clock()):
                self._writes.handle(event)
        core.copier.poll()
        due = core.timers.take(core.clock(), MAX_TIMERS)
        for what, whose in due:
            self._when_due[what](whose)
        self._destination.poll()
        self._source.poll()
        if core.losses:
            core.tell_losses()
        self._writes.poll()
        while core.later:
            core.later.popleft()()
        if core.outbox or core.lost:
            self._flush()
        if meter.beats != before:
            before_s, self._moved_s = self._moved_s, core.moving_s
            core.links.polled(core.clock() - began - (self._moved_s - before_s))
        return meter.beats != before or len(due) == MAX_TIMERS or bool(events or core.losses)

    def _flush(self) -> None:
        """Send queued messages. Peers found lost are reported to both halves, which may send more."""
        self._core.flush()
        while self._core.lost:
            self._lose(*self._core.lost.popleft())
            self._core.flush()

    def to_expected_end_s(self) -> float:
        """Returns the seconds to the nearest moment, ahead or passed, at which costs have a transfer end; math.inf:
        none is known. A poller sleeps by it: see `Pace`.
        """
        return self._core.expected_ends.distance_s(self._core.clock())

    def wait(self, transfers: Sequence[Transfer]) -> None:
        """Poll until all transfers have ended; each has a deadline. Sleeps between polls like a Progress."""
        since = self._core.clock()
        while not all(transfer.ended for transfer in transfers):
            if self.poll():
                since = self._core.clock()
            else:
                with ranges.span(ranges.WAIT, ""):
                    time.sleep(WAITING.nap_s(self._core.clock() - since, len(transfers), self.to_expected_end_s()))

    def close(self, reason: str = "this side closed") -> None:
        """Fail open transfers with `reason`, and close the transport: registrations, peers and handles.

        Later calls of `send` and `receive` raise TransportError.
        """
        self._end(reason)
        self._destination.quarantine.clear()

    def rejoin(self, make: Callable[[], Transport], model: Model, reason: str) -> None:
        """Close, and join again over the same pools as a new process: with `model`, whose weights computed the pools'
        KV from now on, and a new transport from `make`, under a new name.

        Open transfers fail with `reason` on both sides; connected peers are told, and are connected again. Later Wants
        for requests offered before are told how these ended. Pages that a peer may still write stay `quarantined` until
        it can't. Configuration, counts, watchers and the holder of `asks` stay. Raises LayoutError for other
        components, before any change; an exception of the transport leaves the mover closed.
        """
        self._check_open()
        if model.components != self._model.components:
            raise LayoutError(f"pools of {self._model.text()} cannot become those of {model.text()}")
        core, holder, before, offered = self._core, self.asks.holder, self._destination, self._source
        core.copier.settle()
        while core.later:
            core.later.popleft()()
        before.close(reason)
        self._source.close(reason)
        for name in core.peers.names():
            core.say(name, wire.NoSeat(reason))
        self._end(reason)
        before.drop(reason)
        place = msgspec.structs.replace(core.card.place, generation=max(core.wall_ns(), core.card.place.generation + 1))
        anew = assembled(make(), place, core.pools, self._config, core.clock, core)
        self._join(model, anew, before.quarantine, before.leases)
        self._destination.claims, self.asks.holder = before.claims, holder
        self._destination.watch_quarantine()
        self._source.go_on_from(offered)
        self._closed = None

    def _end(self, reason: str) -> None:
        """Fail open transfers, disconnect all peers, and close the transport."""
        self._closed = self._closed or reason
        self._destination.close(reason)
        self._source.close(reason)
        self.asks.close()
        self._core.flush()
        for name in list(self._core.liveness.awaited):
            self._lose(name, reason, logging.INFO)
        while self._core.losses:
            self._core.tell_losses()
        self._core.flush()
        self._connections.close()
        self._source.drop()

    def __enter__(self) -> Mover:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _hear(self, note: Note) -> int:
        """Handle a note. Returns its number of messages, at least 1. Malformed bytes are counted and dropped."""
        try:
            payload = self._core.auth.verify(note.peer, note.payload)
        except Unverified as error:  # not counted as a sign of life
            self.meter.left_unopened(error.refusal)
            self._core.warn(note.peer, error.refusal, f"dropped a message: {error}")
            return 1
        self._connections.heard(note.peer)
        try:
            messages = wire.split(payload)
        except ProtocolError as error:
            return self._malformed(note.peer, f"message from {note.peer}: {error}")
        for encoded in messages:
            try:
                message = wire.decode(encoded)
            except ProtocolError as error:
                self._malformed(note.peer, f"message from {note.peer}: {error}")
            else:
                self._told(note.peer, message)
        return max(1, len(messages))

    def _malformed(self, name: str, words: str) -> int:
        self.meter.add(Count.MALFORMED_MESSAGES)
        self._core.warn(name, Count.MALFORMED_MESSAGES, f"dropped a {words}")
        return 1

    def _told(self, name: str, message: wire.AnyMessage) -> None:
        """Handle a message. An exception ends its attempt only."""
        try:
            self._answer(name, message)
        except Exception as error:
            wrong = self._core.fault(message.request if isinstance(message, wire.About) else "", error)
            if isinstance(message, wire.Want):  # the destination would wait for its deadline
                self._core.say(name, wire.Abort(message.request, message.generation, wrong))

    def _answer(self, name: str, message: wire.AnyMessage) -> None:
        if isinstance(message, wire.Hello):
            self._connections.welcome(name, message)
            return
        peer = self._core.peers.get(name)
        if peer is None:
            self._malformed(name, f"{type(message).__name__} from {name}, who is not connected")
            return
        self._lend(peer, message)
        if isinstance(message, wire.Ping):
            self._core.say(peer.name, wire.Pong(self._core.stamp_us()))
        elif isinstance(message, wire.NoSeat):
            self._connections.refused(peer, message.reason)
        elif isinstance(message, wire.Registered):
            self._writes.registrations.heard(peer.name, message)
        elif isinstance(message, wire.Query | wire.Holding):
            self.asks.hear(peer, message)
        elif isinstance(message, wire.ToSource):
            self._source.hear(peer, message)
        elif isinstance(message, wire.ToDestination):
            self._destination.hear(peer, message)
        elif isinstance(message, wire.Abort):
            (self._destination if self._destination.knows(message) else self._source).hear(peer, message)

    def _lend(self, peer: Peer, message: wire.AnyMessage) -> None:
        """Take the lease, clock stamp or registration number that a message carries."""
        match message:
            case wire.Ping(lease=lease) | wire.Want(lease=lease) | wire.Granted(lease=lease):
                self._writes.renew(peer.name, lease)
            case wire.Pong(stamp_us=stamp_us):
                self._destination.leases.heard(peer.name, stamp_us, self._core.clock())
            case wire.Offered(stamp_us=stamp_us, registration=registration):
                self._destination.leases.heard(peer.name, stamp_us, self._core.clock())
                self._destination.renewals.offered(peer.name, registration)
            case _:
                pass

    def _forget_the_past(self, _: None) -> None:
        """Expire tombstones of ended attempts and requests, once a second."""
        now = self._core.clock()
        self._destination.expire(now)
        self._source.expire(now)
        self._core.timers.set((TimerKind.TOMBSTONES, None), now + 1.0)

    def _lose(self, name: str, reason: str, level: int = logging.WARNING) -> None:
        self._connections.part(name, reason, level)
        self._destination.lost(name, reason)
        self._source.lost(name, reason)
        self._core.tell_losses()
        self.asks.lost(name)
