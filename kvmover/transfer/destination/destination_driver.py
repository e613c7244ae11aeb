"""The driver of a rank's receiving state machines: it reserves regions, scatters chunks, reads and replies."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
from msgspec.structs import replace

from kvmover.errors import PlanError, TransportError
from kvmover.plan.cost import Route
from kvmover.plan.lower import Box
from kvmover.shared_memory import MapMode
from kvmover.transfer import nvtx_ranges as ranges
from kvmover.transfer.core import Core, TimerKind
from kvmover.transfer.destination import destination_machine
from kvmover.transfer.destination.claims import PageClaims
from kvmover.transfer.destination.credits import Credits, EagerGrants
from kvmover.transfer.destination.destination_attempts import (
    Id,
    ReceiveAttempt,
    ReceiveRequest,
    attempt_of,
    cause_of,
    close,
    spliced,
)
from kvmover.transfer.destination.destination_machine import (
    Action,
    Allocated,
    Ask,
    EndReceive,
    Event,
    Free,
    Greeted,
    Heard,
    Isolate,
    Mismatch,
    OwnFault,
    PeerDead,
    Read,
    ReadEnded,
    ReadSettled,
    Receiving,
    Reserve,
    Reserved,
    Scatter,
    Scattered,
    Send,
    WriterChunk,
)
from kvmover.transfer.destination.open_receives import OpenReceives
from kvmover.transfer.destination.quarantine import Isolated, Key, Quarantine, Retransmissions, WriteLeases
from kvmover.transfer.events import Cancel, PeerGone, Tick
from kvmover.transfer.memory.chunk_tables import ChunkCopy, ChunkTables
from kvmover.transfer.memory.descriptors import InFlight, at_rest, between, descriptors, packing, part
from kvmover.transfer.memory.programs import Way
from kvmover.transfer.memory.registrations import Renewals
from kvmover.transfer.memory.work import Work
from kvmover.transfer.meter import Count, Gauge, Spent, Stage
from kvmover.transfer.peers.peer_table import Peer
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.chunks import Lane
from kvmover.transfer.protocol.wire import Verb, decoded
from kvmover.transfer.result import Cause, Transfer
from kvmover.transfer.source.writes import Pages
from kvmover.transfer.tombstones import TtlMap
from kvmover.transport.base import Completed, Descriptors, Failed


class Reading(msgspec.Struct, frozen=True, eq=False):
    """A read of a chunk from `peer`, by the attempt `id` (request, generation). `note`: the encoded message that
    reaches the peer after the bytes were read. `spent_s`: times of that attempt. `nbytes` in `runs`: posted, at
    `Core.moving_s`.
    """

    id: tuple[str, int]
    peer: str
    chunk: int
    note: bytes
    spent_s: Spent
    nbytes: int = 0
    runs: int = 0
    moving_s: float = 0.0


@dataclass(slots=True, eq=False)
class Reads:
    """The reads of a rank. `tell` is called with the end of each.

    `_waiting` [source]: packed chunks that the link's windows have no room for. `_packed` [source, ticket]: bytes of
    those under way.
    """

    core: Core
    tell: Callable[[Reading, ReadEnded], None]
    flights: InFlight[Reading]
    _waiting: dict[str, deque[tuple[Reading, int, int, int]]] = field(
        default_factory=dict[str, "deque[tuple[Reading, int, int, int]]"]
    )
    _packed: dict[str, dict[int, int]] = field(default_factory=dict[str, "dict[int, int]"])

    def under_way(self) -> list[Reading]:
        """Returns all reads that touch memory or will."""
        return [*self.flights.under_way(), *(entry[0] for waiting in self._waiting.values() for entry in waiting)]

    def packed(self, reading: Reading, remote: int, offset: int, span_bytes: int) -> None:
        """Read from `remote` of the source's staging memory to `offset` of this side's arena, once the link's window
        has room for it.
        """
        peer = self.core.peers.get(reading.peer)
        if peer is None:
            self._refuse(reading, f"{reading.peer} is not connected")
        elif not 0 <= remote <= peer.card.staging.nbytes - span_bytes:
            self._refuse(reading, f"{reading.peer} staged a chunk at {remote}, outside of its staging memory")
        else:
            self._waiting.setdefault(peer.name, deque()).append((reading, remote, offset, span_bytes))
            self._next(peer)

    def _next(self, peer: Peer) -> None:
        """Post a source's packed reads, as many as two windows have room for: the reads of one end together, and those
        of the other are on their way meanwhile.
        """
        waiting, under_way = self._waiting.pop(peer.name, None), self._packed.setdefault(peer.name, {})
        while waiting:
            reading, remote, offset, span_bytes = waiting[0]
            most_bytes = 2 * self.core.costs(peer.card.host).window_bytes if under_way else math.inf
            if sum(under_way.values()) + span_bytes > most_bytes:
                self._waiting[peer.name] = waiting
                return
            waiting.popleft()
            local = part(self.core.incoming.memory, offset, span_bytes)
            ticket = self._post(reading, local, part(peer.card.staging, remote, span_bytes))
            if ticket is not None:
                under_way[ticket] = span_bytes
        if not under_way:
            del self._packed[peer.name]

    def direct(self, reading: Reading, boxes: Sequence[tuple[int, Box]]) -> None:
        """Read from the source's pages to this side's pages."""
        peer = self.core.peers.get(reading.peer)
        if peer is None:
            self._refuse(reading, f"{reading.peer} is not connected")
            return
        remote, local = descriptors(boxes, peer.card, self.core.card)
        self._post(reading, local, remote)

    def mapped(self, reading: Reading, lane: Lane, src: Pages, dst: Pages, tables: ChunkTables) -> None:
        """Copy from the source's pages, mapped into this process, to this side's pages. `src`, `dst`: page tables."""
        core, peer = self.core, self.core.peers.get(reading.peer)
        theirs = core.mappings.pools(peer, MapMode.READ) if peer else None
        if peer is None or theirs is None:
            self._refuse(reading, f"the pools of {reading.peer} are not mapped")
            return
        begun, host, chunk = core.clock(), peer.card.host, reading.chunk

        def done(_: int | None) -> None:
            seconds = core.clock() - begun
            core.meter.took(Stage.WIRE, seconds, reading.spent_s)
            core.links.copied(host, lane.chunks[chunk].nbytes, seconds)
            core.post(reading.peer, reading.note)
            self.tell(reading, ReadEnded(reading.peer, reading.chunk))

        def work(_: int) -> Work:
            return Work(between(lane.direct_boxes(chunk, src, dst), theirs, core.bound))

        kept = core.compiler.programs(peer.name, Way.READ)
        stretch = partial(lane.stretch, chunk, src, dst)
        core.copier.copy(ChunkCopy(work, 0, False, tables, stretch, kept), core.soon(done))

    def _refuse(self, reading: Reading, reason: str) -> None:
        """Fail a read before it is posted. `tell` is called later from the mover's loop, outside the current step."""
        ended = ReadEnded(reading.peer, reading.chunk, reason)
        self.core.later.append(lambda: self.tell(reading, ended))

    def _post(self, reading: Reading, local: Descriptors, remote: Descriptors) -> int | None:
        """Post a read. Returns its ticket; None if the transport refused it."""
        core, begun = self.core, self.core.clock()
        try:
            note = core.auth.sign(reading.peer, reading.note)
            ticket = core.transport.read(reading.peer, local, remote, note, core.config.deadline_s)
        except TransportError as error:
            self._refuse(reading, str(error))
            return None
        now = core.clock()
        core.meter.took(Stage.POST, now - begun, reading.spent_s)
        core.meter.add(Count.DESCRIPTORS, local.count)
        posted = replace(reading, nbytes=local.nbytes, runs=local.count, moving_s=core.moving_s)
        self.flights.add(ticket, posted, now)
        return ticket

    def lost(self, peer: str) -> None:
        """Fail the reads that wait for a lost source."""
        for reading, *_ in self._waiting.pop(peer, ()):
            self._refuse(reading, f"{peer} is lost")

    def handle(self, event: Completed | Failed) -> bool:
        """Handle the end of a read. Returns False for an operation that is not of these reads."""
        landing = self.flights.end(event, self.core.clock())
        if landing is None:
            return False
        reading, peer = landing.what, self.core.peers.get(landing.what.peer)
        if isinstance(event, Completed):
            self.core.meter.took(Stage.WIRE, landing.seconds, reading.spent_s)
            if peer is not None:
                posted_s, hidden_s = self.core.clock() - landing.seconds, self.core.moving_s - reading.moving_s
                self.core.links.moved(peer.card.host, event, reading.nbytes, reading.runs, posted_s, hidden_s)
        if reading.peer in self._packed:
            self._ended(reading.peer, event.ticket)
        self.tell(reading, ReadEnded(reading.peer, reading.chunk, landing.reason, landing.quiescent))
        return True

    def _ended(self, name: str, ticket: int) -> None:
        """Let the reads that wait for the end of a packed one follow it, unless their source is lost."""
        self._packed[name].pop(ticket, None)
        peer = self.core.peers.get(name)
        if peer is not None:
            self._next(peer)
        elif not self._packed[name]:
            del self._packed[name]


#: Ended attempts that are remembered, so that a source that missed the end can be told.
MAX_ENDED = 65536


@dataclass(slots=True, eq=False)
class DestinationDriver:
    """The receiving half of a mover. `_room`: the arena or its queue changed since the last attempt to reserve.

    `_unasked`: sources whose Want waits until kernels for their chunks are compiled.
    """

    core: Core
    reads: Reads
    quarantine: Quarantine
    leases: WriteLeases
    renewals: Renewals
    generation: int
    claims: PageClaims = field(init=False)
    _attempts: OpenReceives = field(default_factory=OpenReceives)
    _ended: TtlMap[Id, str | None] = field(default_factory=lambda: TtlMap["Id", "str | None"](MAX_ENDED))
    _credits: Credits[Id, WriterChunk] = field(default_factory=Credits[Id, WriterChunk])
    _eager: EagerGrants = field(default_factory=EagerGrants)
    _retransmissions: Retransmissions = field(default_factory=Retransmissions)
    _unasked: set[tuple[Id, str]] = field(default_factory=set["tuple[Id, str]"])
    _room: bool = False

    def __post_init__(self) -> None:
        self.claims = PageClaims(self.core.end.pools)

    def receive(self, wanted: ReceiveRequest) -> None:
        """Send each source rank of an engine its Want. Raises PlanError, PeerUnknown or LayoutError before that."""
        request = wanted.transfer.request
        if request in self._attempts:
            raise PlanError(f"request {request} is already being received")
        attempt = attempt_of(self.core, wanted, self.generation + 1, self.leases, self.claims, self._eagerly)
        self.generation += 1
        self._attempts.add(attempt)
        for name in attempt.wants:
            self.core.awaits(name)
            self._ask(attempt, name)
        self._expect(attempt)
        self._apply(attempt, *destination_machine.start(attempt.state))

    def _expect(self, attempt: ReceiveAttempt) -> None:
        """Expect the sources' last chunks, unless pages are to be named first."""
        for name, lane in attempt.lanes.items() if attempt.most is None else ():
            if lane.nbytes and (peer := self.core.peers.get(name)) is not None:
                self.core.expect(peer.card.host, attempt.routes[name], lane)

    def allocated(self, transfer: Transfer, pages: Pages) -> None:
        """Name more pages of a request that was received without all of them. Raises PlanError. Ignored once it has
        ended or fails.
        """
        attempt = self._attempts.of(transfer)
        if attempt is None or attempt.state.reason is not None:
            return
        chunks = attempt.name(self.core, pages, self.claims)
        for peer in attempt.ask_anew(self.leases):
            self._ask(attempt, peer)
        self._step(attempt, Allocated(chunks))

    def _ask(self, attempt: ReceiveAttempt, peer: str) -> None:
        """Send a source its Want once kernels for its chunks are compiled; `poll` never waits for the compiler."""
        if self.core.compiler.is_ready(peer, *attempt.ways(peer)):
            self._unasked.discard((attempt.id, peer))
            self.core.post(peer, attempt.wants[peer])
        else:
            self._unasked.add((attempt.id, peer))

    def _eagerly(self, source: str, nbytes: int) -> int | None:
        """Returns the offset of a region to send with a Want, or None, also while chunks wait for regions."""
        return self._eager.reserve(self.core.incoming.arena, source, nbytes) if self._credits.idle else None

    def hear(self, peer: Peer, message: wire.About) -> None:
        """Handle a message of a source. An ended attempt is answered with how it ended."""
        attempt = self._attempts.get((message.request, message.generation))
        if attempt is None:
            self._late(peer, message)
            return
        if not isinstance(message, wire.ToDestination | wire.Abort):
            self.core.meter.add(Count.LATE_MESSAGES)
            return
        if isinstance(message, wire.Staged) and not self._takes_tables(attempt, peer.name, message):
            return
        if isinstance(message, wire.Noted) and not attempt.has_noted(peer.name, message):
            return
        if isinstance(message, wire.Aux) and peer.name in attempt.state.awaited_aux:
            attempt.aux[peer.card.place.rank] = message.payload  # of this attempt's source only
        self._step(attempt, Heard(peer.name, message))

    def _late(self, peer: Peer, message: wire.About) -> None:
        id_ = message.request, message.generation
        if isinstance(message, wire.Drained):
            self._free(self.quarantine.drained((peer.name, *id_)))
            return
        self.core.meter.add(Count.LATE_MESSAGES)
        if not isinstance(message, wire.Offered):  # still offering: it missed our Done or Abort; resend
            self._retransmissions.heard((peer.name, *id_))
        if isinstance(message, wire.Kept):
            return
        reason = self._ended.get(id_) if id_ in self._ended else "this attempt is over"
        if isinstance(message, wire.Abort):  # answered by Drained, which gets no answer: the exchange ends
            reason = reason or message.reason
        self.core.say(peer.name, wire.Done(*id_) if reason is None else wire.Abort(*id_, reason))

    def _takes_tables(self, attempt: ReceiveAttempt, peer: str, staged: wire.Staged) -> bool:
        """Take the page tables of a source that is read from pages. Returns False, and fails the attempt, if they are
        invalid.

        Returns False too if earlier tables were lost: the source repeats all of them when it gets no answer.
        """
        source, known = attempt.state.sources.get(peer), attempt.theirs.get(peer, ())
        if source is None or not source.is_read_from_pages:
            return source is not None
        lane = attempt.lanes[peer]
        try:
            tables = spliced(known, decoded(staged.pages), staged.first_pages, lane.source_reads)
            if tables is None:
                return False
            chunk = staged.chunk
            if chunk < len(lane.chunks) and (peer, chunk) not in attempt.state.ready:  # else the machine fails it
                lane.check_chunk(chunk, tables)
        except ValueError as error:
            self._step(attempt, Heard(peer, wire.Abort(*attempt.id, f"page tables of {peer}: {error}")))
            return False
        attempt.theirs[peer] = tables
        return True

    def knows(self, message: wire.About) -> bool:
        """Returns True for a message of an attempt that is open here or has ended here."""
        id_ = message.request, message.generation
        return self._attempts.get(id_) is not None or id_ in self._ended

    def lost(self, peer: str, reason: str) -> None:
        """Handle the loss of a peer: attempts that need more from it fail for `reason`, others go on."""
        self._retransmissions.lost(peer)
        self.renewals.lost(peer)
        self.reads.lost(peer)
        self._room = True  # its regions may be revoked by a new registration
        tell = partial(self._tell_loss, PeerGone(peer, reason))
        self.core.losses.append(map(tell, self._attempts.from_peer(peer)))

    def _tell_loss(self, loss: PeerGone, id_: Id) -> None:
        attempt = self._attempts.get(id_)
        if attempt is not None:
            self._step(attempt, loss)

    def forget(self, seat: tuple[str, int], reason: str) -> None:
        """Handle the death of a rank's process: its attempts fail, and memory that it might write is freed at once."""
        for attempt in self._attempts:
            for peer in [peer for peer, place in attempt.seats.items() if place == seat]:
                self._step(attempt, PeerDead(peer, reason))
        self._free(self.quarantine.forget(seat))

    def greeted(self, peer: str) -> None:
        """Handle a peer's Hello: it may have lost Wants that it had noted, so they are resent."""
        for id_ in self._attempts.from_peer(peer):
            attempt = self._attempts.get(id_)
            if attempt is not None and peer in attempt.state.noted:
                self._step(attempt, Greeted(peer))

    def abort(self, transfer: Transfer, reason: str) -> None:
        """Abort a transfer's attempts. It ends once no write or read of it is in flight.

        Sources are told at once: a read that ends in the next poll would tell them Done before.
        """
        attempt = self._attempts.of(transfer)
        if attempt is not None:
            self._step(attempt, Cancel(reason))
            for peer in attempt.state.sources:
                self.core.flush_to(peer)

    def close(self, reason: str) -> None:
        """Fail all open attempts for `reason`, and tell their sources."""
        for attempt in self._attempts:
            self._step(attempt, Cancel(reason))

    def drop(self, reason: str) -> None:
        """End all remaining attempts: the transport is closed. Memory that peers may still write stays quarantined."""
        for attempt in self._attempts:
            while self._attempts.get(attempt.id) is not None:
                self._fault(attempt, reason)
        self._free(self.quarantine.outlive())

    def poll(self) -> None:
        """Send Wants whose kernels are ready, reserve regions for queued chunks, and handle reads that settled late."""
        for id_, peer in sorted(self._unasked) if self._unasked else ():
            attempt = self._attempts.get(id_)
            if attempt is not None:
                self._ask(attempt, peer)
            else:
                self._unasked.discard((id_, peer))
        if self._room:
            self._reserve()
        for reading in self.reads.flights.settled() if self.reads.flights.unsettled else ():
            self._settled(reading)

    def _reserve(self) -> None:
        """Reserve regions for queued chunks as far as there is room, and grant them."""
        for offset in self.renewals.renew():
            self._eager.freed(offset)
        arena = self.core.incoming.arena
        reserved: dict[tuple[ReceiveAttempt, str], list[tuple[int, int]]] = {}
        while (found := self._credits.reserve(arena)) is not None:
            id_, (peer, chunk), offset = found
            attempt = self._attempts.get(id_)
            assert attempt is not None, f"{id_} has ended, and asks for regions"
            waited_s = self.core.clock() - attempt.asked.pop((peer, chunk))
            self.core.meter.took(Stage.CREDIT_WAIT, waited_s, attempt.spent_s)
            reserved.setdefault((attempt, peer), []).append((chunk, offset))
        self._room = False
        for (attempt, peer), regions in reserved.items():  # granted in one message
            self._step(attempt, Reserved(peer, tuple(regions)))

    def tick(self, id_: Id) -> None:
        """Run an attempt's timer: its deadline, or a resend."""
        attempt = self._attempts.get(id_)
        if attempt is not None:
            self._step(attempt, Tick())

    def look_at_quarantine(self, key: Key) -> None:
        """Free an attempt's memory that can't be written any more, or resend Abort to its peer, which has not drained.
        Memory under reads waits for their end.
        """
        now = self.core.clock()
        self._free(self.quarantine.expired(key, now))
        isolated = self.quarantine.get(key)
        if isolated is None or isolated.reads:
            return
        peer, request, generation = key
        if self.core.peers.get(peer) is not None:
            self.core.meter.add(Count.RESENT_MESSAGES)
            self.core.say(peer, wire.Abort(request, generation, isolated.reason))
        self.core.timers.set((TimerKind.QUARANTINE, key), isolated.due(now))

    def watch_quarantine(self) -> None:
        """Look at all isolated memory in the next polls: the timers are new."""
        for key in self.quarantine:
            self.core.timers.set((TimerKind.QUARANTINE, key), self.core.clock())

    def repeat_farewell(self, key: Key) -> None:
        """Resend Want and Done to a source that had no chunk and has not replied."""
        peer, request, generation = key
        want = self._retransmissions.again(key, self.core.clock(), self.core.config.resend_s)
        if want is not None:
            self.core.meter.add(Count.RESENT_MESSAGES)
            self.core.post(peer, want)
            self.core.say(peer, wire.Done(request, generation))
        self.core.timers.set((TimerKind.FAREWELL, key), self._retransmissions.due(key))

    def expire(self, now: float) -> None:
        """Forget ended attempts, leases and claims past their time."""
        self._ended.expire(now)
        self.leases.expire(now)
        self.claims.sweep()

    def gauges(self) -> dict[Gauge, int]:
        """Returns current counts, for exporters."""
        arena = self.core.incoming.arena
        return {
            Gauge.OPEN_RECEIVES: len(self._attempts),
            Gauge.CHUNKS_WAITING_FOR_CREDIT: len(self._credits),
            Gauge.READS_UNDER_WAY: len(self.reads.flights),
            Gauge.ATTEMPTS_IN_LIMBO: len(self.quarantine),
            Gauge.INCOMING_ARENA_BYTES: arena.nbytes,
            Gauge.INCOMING_RESERVED_BYTES: arena.reserved_bytes,
            Gauge.INCOMING_QUARANTINED_BYTES: arena.quarantined_bytes,
        }

    def read(self, reading: Reading, event: ReadEnded) -> None:
        """Apply the end of a read to its attempt, or to its quarantine."""
        attempt = self._attempts.get(reading.id)
        if attempt is not None:
            self._step(attempt, event)
        elif event.quiescent:
            self._settled(reading)

    def _settled(self, reading: Reading) -> None:
        attempt = self._attempts.get(reading.id)
        if attempt is not None:
            self._step(attempt, ReadSettled(reading.peer, reading.chunk))
        else:
            self._free(self.quarantine.settled((reading.peer, *reading.id), reading.chunk))

    def _free(self, offsets: Sequence[int]) -> None:
        for offset in offsets:
            self.core.incoming.arena.release(offset)
            self._eager.freed(offset)
            self._room = True

    def _step(self, attempt: ReceiveAttempt, event: Event) -> None:
        """Advance an attempt. An exception ends this attempt only."""
        try:
            self._advance(attempt, event)
        except Exception as error:
            self._fault(attempt, self.core.fault(attempt.state.request, error))

    def _advance(self, attempt: ReceiveAttempt, event: Event) -> None:
        before = attempt.state
        state, actions = destination_machine.step(before, event, self.core.clock())
        if __debug__ and state.finished:
            state.check()
        if before.reason is None and state.reason is not None:
            attempt.cause = cause_of(event)
            self._credits.forget(attempt.id)
            self._room = True  # another request may have its turn
        if len(state.landed) > len(before.landed):
            self._landed(attempt, event)
        self._apply(attempt, state, actions)

    def _fault(self, attempt: ReceiveAttempt, reason: str) -> None:
        """Fail an attempt after an exception. A second one ends it at once, and all its memory is quarantined."""
        attempt.faults += 1
        if self._attempts.get(attempt.id) is None:
            return
        if attempt.faults == 1:
            reading = frozenset((r.peer, r.chunk) for r in self.reads.under_way() if r.id == attempt.id)
            self._step(attempt, OwnFault(reason, frozenset(attempt.copying), reading))
            return
        attempt.cause = attempt.cause or Cause.FAULT
        self._credits.forget(attempt.id)
        for (peer, _), offset in attempt.state.regions.items():
            self._act(attempt, Isolate(peer, offset))
        attempt.state = replace(attempt.state, reason=attempt.state.reason or reason, finished=True)
        self._finish(attempt, attempt.state.reason, frozenset(attempt.state.sources))

    def _landed(self, attempt: ReceiveAttempt, event: Event) -> None:
        """Count a chunk that has reached the pages, by any route."""
        match event:
            case Heard(peer, wire.Chunk(chunk=chunk)) | ReadEnded(peer, chunk) | Scattered(peer, chunk):
                self.core.meter.add(Count.RECEIVED_CHUNKS)
                self.core.meter.add(Count.RECEIVED_BYTES, attempt.lanes[peer].chunks[chunk].nbytes)
            case _:
                raise AssertionError(f"{event} lands nothing")

    def _apply(self, attempt: ReceiveAttempt, state: Receiving, actions: Sequence[Action]) -> None:
        attempt.state = state
        if self._attempts.of(attempt.transfer) is attempt:
            self.core.timers.set((TimerKind.RECEIVE, attempt.id), destination_machine.due(state))
        wrong = None
        for action in actions:  # each action runs, even if another fails
            try:
                self._act(attempt, action)
            except Exception as error:
                why = self.core.fault(state.request, error)
                wrong = wrong or why
        if wrong is not None:
            self._fault(attempt, wrong)

    def _act(self, attempt: ReceiveAttempt, action: Action) -> None:
        match action:
            case Send(peer, wire.Granted() as granted):
                source = attempt.state.sources[peer]
                if source.verb is Verb.PUSH and not source.direct:
                    granted = self.renewals.granted(peer, granted)
                self.core.say(peer, replace(granted, lease=self.leases.renewed(peer)))
            case Send(peer, message):
                self.core.say(peer, message)
            case Ask(peer):
                self.core.meter.add(Count.RESENT_MESSAGES)
                self._ask(attempt, peer)
            case Reserve(peer, chunk):
                attempt.asked[peer, chunk] = self.core.clock()
                self._credits.ask(attempt.id, peer, (peer, chunk), attempt.lanes[peer].chunks[chunk].span_bytes)
                self._room = True
            case Read():
                self._read(attempt, action)
            case Scatter(peer, chunk, offset):
                self._scatter(attempt, peer, chunk, offset)
            case Free(offset):
                self._free([offset])
            case Isolate(peer, offset):
                self.core.incoming.arena.quarantine(offset)
                self._isolate(attempt, peer).offsets.append(offset)
                self._room = True
            case Mismatch():
                attempt.resent += 1
                self.core.meter.add(Count.MISMATCHED_CHUNKS)
            case EndReceive(reason, quarantined):
                self._finish(attempt, reason, quarantined)

    def _read(self, attempt: ReceiveAttempt, read: Read) -> None:
        reading = Reading(attempt.id, read.peer, read.chunk, wire.encode(read.after), attempt.spent_s)
        lane, theirs = attempt.lanes[read.peer], attempt.theirs.get(read.peer)
        if not attempt.state.sources[read.peer].direct:
            span_bytes = lane.chunks[read.chunk].span_bytes
            self.reads.packed(reading, read.remote, read.offset, span_bytes)
        elif theirs is None:
            missing = f"{read.peer} did not say where its pages are"
            self._step(attempt, ReadEnded(read.peer, read.chunk, missing))
        elif attempt.routes[read.peer] is Route.MAPPED:
            self.reads.mapped(reading, lane, theirs, attempt.pages, attempt.tables[read.peer])
        else:
            self.reads.direct(reading, lane.direct_boxes(read.chunk, theirs, attempt.pages))

    def _scatter(self, attempt: ReceiveAttempt, peer: str, chunk: int, offset: int | None) -> None:
        lane, core, begun = attempt.lanes[peer], self.core, self.core.clock()
        plan, digests = lane.chunks[chunk], (peer, chunk) in attempt.state.digests

        def work(staged: int) -> Work:
            packed = core.incoming.bound.window(staged, plan.span_bytes)
            boxes = [
                (box, packed, core.bound[component]) for component, box in lane.scatter_boxes(chunk, attempt.pages)
            ]
            copied = packing(boxes, lane.marks(chunk) if digests else None, "dst")
            return at_rest(copied) if offset is None else copied

        def done(digest: int | None) -> None:
            attempt.copying.discard((peer, chunk))
            seconds = core.clock() - begun
            core.meter.took(Stage.SCATTER, seconds, attempt.spent_s)
            if offset is not None and (source := core.peers.get(peer)) is not None:
                core.links.scattered(source.card.host, plan.nbytes, seconds)
            self._step(attempt, Scattered(peer, chunk, digest))

        with ranges.span(ranges.SCATTER, attempt.state.request, plan.nbytes):
            stretch = partial(lane.stretch, chunk, None, attempt.pages)
            kept = core.compiler.programs(peer, Way.SCATTER)
            core.copier.copy(
                ChunkCopy(work, offset or 0, digests, attempt.tables[peer], stretch, kept), core.soon(done)
            )
            attempt.copying.add((peer, chunk))

    def _isolate(self, attempt: ReceiveAttempt, peer: str) -> Isolated:
        """Returns the quarantine entry of a peer for an ending attempt, made at the first call."""
        key = (peer, *attempt.id)
        isolated = self.quarantine.get(key)
        if isolated is None:
            reads = {chunk for name, chunk in attempt.state.reading if name == peer}
            until = math.inf if reads else self.leases.retire(peer)
            isolated = Isolated(attempt.state.reason or "", attempt.seats[peer], until, reads=reads)
            if (writer := attempt.writers.get(peer)) is not None:
                isolated.until, isolated.lives = math.inf, writer.lives
            self.quarantine.hold(key, isolated)
            self.core.timers.set((TimerKind.QUARANTINE, key), self.core.clock())
        return isolated

    def _finish(self, attempt: ReceiveAttempt, reason: str | None, quarantined: frozenset[str]) -> None:
        config, now = self.core.config, self.core.clock()
        for peer in sorted(quarantined):  # terms are assigned in this order, equal in every process
            self.quarantine.keep(self._isolate(attempt, peer), attempt.transfer)
        self._attempts.remove(attempt)
        self.core.timers.cancel((TimerKind.RECEIVE, attempt.id))
        for peer in attempt.state.sources:
            self.core.awaits_no_more(peer)
        until = self.core.remembered_until()
        self._ended.keep(attempt.id, reason, until)
        for peer, source in attempt.state.sources.items():
            if reason is None and not source.chunks and peer not in attempt.state.gone:
                key = (peer, *attempt.id)
                self._retransmissions.said(key, attempt.wants[peer], now + config.resend_s, until)
                self.core.timers.set((TimerKind.FAREWELL, key), self._retransmissions.due(key))
        close(attempt, self.core, quarantined)
        self.claims.give(attempt.transfer)
