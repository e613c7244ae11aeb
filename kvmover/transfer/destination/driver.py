"""Runs the destination's state machines of one rank: leases regions, scatters chunks, answers sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmover import ranges
from kvmover.errors import PlanError
from kvmover.plan.cost import Route
from kvmover.transfer.core import Core
from kvmover.transfer.destination import machine
from kvmover.transfer.destination.attempts import Id, ReceiveAttempt, ReceiveRequest, attempt_of, cause_of, close
from kvmover.transfer.destination.credits import Credits
from kvmover.transfer.destination.quarantine import Isolated, Quarantine, Retransmissions
from kvmover.transfer.destination.reads import Reading, Reads
from kvmover.transfer.destination.state import (
    Action,
    Ask,
    EndReceive,
    Event,
    Free,
    Heard,
    Isolate,
    Lease,
    Leased,
    Mismatch,
    Read,
    ReadEnded,
    ReadSettled,
    Receiving,
    Scatter,
    Scattered,
    Send,
    WriterChunk,
)
from kvmover.transfer.events import Cancel, PeerGone, Tick
from kvmover.transfer.memory.copier import Work
from kvmover.transfer.memory.regions import at_rest, logical, region
from kvmover.transfer.meter import Count, Gauge, Stage
from kvmover.transfer.peers.table import Peer
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.wire import decoded
from kvmover.transfer.result import Transfer
from kvmover.transfer.tombstones import TtlMap

#: Attempts that are remembered as over, so that a source that missed how they ended can be told.
MAX_ENDED = 65536


@dataclass(slots=True, eq=False)
class DestinationDriver:
    """The receiving half of a mover."""

    core: Core
    reads: Reads
    quarantine: Quarantine
    generation: int
    _attempts: dict[Id, ReceiveAttempt] = field(default_factory=dict[Id, ReceiveAttempt])
    _ended: TtlMap[Id, str | None] = field(default_factory=lambda: TtlMap["Id", "str | None"](MAX_ENDED))
    _credits: Credits[Id, WriterChunk] = field(default_factory=Credits[Id, WriterChunk])
    _retransmissions: Retransmissions = field(default_factory=Retransmissions)

    def receive(self, wanted: ReceiveRequest) -> None:
        """Ask every source rank of an engine for its part. Raises before anything is asked."""
        request = wanted.transfer.request
        if any(open_request == request for open_request, _ in self._attempts):
            raise PlanError(f"request {request} is already being received")
        attempt = attempt_of(self.core, wanted, self.generation + 1)
        self.generation += 1
        self._attempts[attempt.id] = attempt
        for name, want in attempt.wants.items():
            self.core.post(name, want)
        self._apply(attempt, *machine.start(attempt.state))

    def hear(self, peer: Peer, message: wire.About) -> None:
        """A message from a source. One about an attempt that is over is answered with how it ended."""
        attempt = self._attempts.get((message.request, message.generation))
        if attempt is None:
            self._late(peer, message)
            return
        if not isinstance(message, wire.ToDestination | wire.Abort):
            self.core.meter.add(Count.LATE_MESSAGES)
            return
        if isinstance(message, wire.Offered) and message.pages and not self._take_tables(attempt, peer.name, message):
            return
        if isinstance(message, wire.Aux) and peer.name in attempt.state.awaited_aux:
            attempt.aux[peer.card.place.rank] = message.payload  # not of an engine whose rank has the same number
        self._step(attempt, Heard(peer.name, message))

    def _late(self, peer: Peer, message: wire.About) -> None:
        id_ = message.request, message.generation
        if isinstance(message, wire.Drained):
            self._free(self.quarantine.drained((peer.name, *id_)))
            return
        self.core.meter.add(Count.LATE_MESSAGES)
        self._retransmissions.heard((peer.name, *id_))
        if isinstance(message, wire.Kept):
            return
        reason = self._ended.get(id_) if id_ in self._ended else "this attempt is over"
        if isinstance(message, wire.Abort):  # answered by Drained, and that by nothing: no answer is answered for ever
            reason = reason or message.reason
        self.core.say(peer.name, wire.Done(*id_) if reason is None else wire.Abort(*id_, reason))

    def _take_tables(self, attempt: ReceiveAttempt, peer: str, offer: wire.Offered) -> bool:
        """Page tables of a source whose pages we read; False, and the attempt fails, where they cannot be right."""
        if peer not in attempt.lanes:
            return False
        try:
            tables = decoded(offer.pages)
            attempt.lanes[peer].check_pages(attempt.lanes[peer].src, tables)
        except ValueError as error:
            self._step(attempt, Heard(peer, wire.Abort(*attempt.id, f"page tables of {peer}: {error}")))
            return False
        attempt.theirs[peer] = tables
        return True

    def knows(self, message: wire.About) -> bool:
        id_ = message.request, message.generation
        return id_ in self._attempts or id_ in self._ended

    def lost(self, peer: str, reason: str) -> None:
        self._retransmissions.lost(peer)
        for attempt in list(self._attempts.values()):
            self._step(attempt, PeerGone(peer, reason))

    def abort(self, transfer: Transfer, reason: str) -> None:
        for attempt in list(self._attempts.values()):
            if attempt.transfer is transfer:
                self._step(attempt, Cancel(reason))

    def close(self, reason: str) -> None:
        """Fail what is open and tell its sources."""
        for attempt in list(self._attempts.values()):
            self._step(attempt, Cancel(reason))

    def poll(self) -> None:
        """Deadlines, regions for chunks that wait for one, and what may be given back late."""
        now = self.core.clock()
        for attempt in list(self._attempts.values()):
            self._step(attempt, Tick())
        arena = self.core.incoming.arena
        while (granted := self._credits.lease(arena)) is not None:
            id_, key, offset = granted
            attempt = self._attempts[id_]
            self.core.meter.took(Stage.CREDIT_WAIT, now - attempt.asked.pop(key))
            self._step(attempt, Leased(*key, offset))
        for reading in self.reads.settled():
            self._settled(reading)
        ask, freed = self.quarantine.poll(now)
        self._free(freed)
        for peer, request, generation in ask:
            if self.core.peers.get(peer) is not None:
                self.core.meter.add(Count.RESENT_MESSAGES)
                reason = self.quarantine.reason((peer, request, generation))
                self.core.say(peer, wire.Abort(request, generation, reason))
        for (peer, request, generation), want in self._retransmissions.again(now, self.core.config.resend_s):
            self.core.meter.add(Count.RESENT_MESSAGES)
            self.core.post(peer, want)
            self.core.say(peer, wire.Done(request, generation))
        self._ended.expire(now)

    def gauges(self) -> dict[Gauge, int]:
        arena = self.core.incoming.arena
        return {
            Gauge.OPEN_RECEIVES: len(self._attempts),
            Gauge.CHUNKS_WAITING_FOR_CREDIT: len(self._credits),
            Gauge.READS_UNDER_WAY: len(self.reads.flights),
            Gauge.ATTEMPTS_IN_LIMBO: len(self.quarantine),
            Gauge.INCOMING_ARENA_BYTES: arena.nbytes,
            Gauge.INCOMING_LEASED_BYTES: arena.leased_bytes,
            Gauge.INCOMING_QUARANTINED_BYTES: arena.quarantined_bytes,
        }

    def waits_on(self) -> set[str]:
        return {peer for attempt in self._attempts.values() for peer in attempt.state.sources}

    def read(self, reading: Reading, event: ReadEnded) -> None:
        """What the reader says becomes of a read."""
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

    def _step(self, attempt: ReceiveAttempt, event: Event) -> None:
        before = attempt.state
        state, actions = machine.step(before, event, self.core.clock())
        if __debug__ and state.finished:
            state.check()
        if before.reason is None and state.reason is not None:
            attempt.cause = cause_of(event)
            self._credits.forget(attempt.id)
        if len(state.landed) > len(before.landed):
            self._landed(attempt, event)
        self._apply(attempt, state, actions)

    def _landed(self, attempt: ReceiveAttempt, event: Event) -> None:
        """Count a chunk that is in the pages, by whatever way it came there."""
        match event:
            case Heard(peer, wire.Chunk(chunk=chunk)) | ReadEnded(peer, chunk) | Scattered(peer, chunk):
                self.core.meter.add(Count.RECEIVED_CHUNKS)
                self.core.meter.add(Count.RECEIVED_BYTES, attempt.lanes[peer].chunks[chunk].nbytes)
            case _:
                raise AssertionError(f"{event} lands nothing")

    def _apply(self, attempt: ReceiveAttempt, state: Receiving, actions: Sequence[Action]) -> None:
        attempt.state = state
        arena = self.core.incoming.arena
        for action in actions:
            match action:
                case Send(peer, message):
                    self.core.say(peer, message)
                case Ask(peer):
                    self.core.meter.add(Count.RESENT_MESSAGES)
                    self.core.post(peer, attempt.wants[peer])
                case Lease(peer, chunk):
                    attempt.asked[peer, chunk] = self.core.clock()
                    self._credits.ask(attempt.id, (peer, chunk), attempt.lanes[peer].chunks[chunk].span_bytes)
                case Read():
                    self._read(attempt, action)
                case Scatter(peer, chunk, offset):
                    self._scatter(attempt, peer, chunk, offset)
                case Free(offset):
                    arena.release(offset)
                case Isolate(peer, offset):
                    arena.quarantine(offset)
                    self._isolate(attempt, peer).offsets.append(offset)
                case Mismatch():
                    attempt.resent += 1
                    self.core.meter.add(Count.MISMATCHED_CHUNKS)
                case EndReceive(reason, held):
                    self._finish(attempt, reason, held)

    def _read(self, attempt: ReceiveAttempt, read: Read) -> None:
        reading = Reading(attempt.id, read.peer, read.chunk)
        lane, theirs = attempt.lanes[read.peer], attempt.theirs.get(read.peer)
        if not attempt.state.sources[read.peer].direct:
            span_bytes = lane.chunks[read.chunk].span_bytes
            self.reads.packed(reading, read.remote, read.offset, span_bytes)
        elif theirs is None:
            missing = f"{read.peer} did not say where its pages are"
            self._step(attempt, ReadEnded(read.peer, read.chunk, missing))
        elif attempt.routes[read.peer] is Route.MAPPED:
            self.reads.mapped(reading, lane.direct_boxes(read.chunk, theirs, attempt.pages))
        else:
            self.reads.direct(reading, lane.direct_boxes(read.chunk, theirs, attempt.pages))

    def _scatter(self, attempt: ReceiveAttempt, peer: str, chunk: int, offset: int | None) -> None:
        lane, core, begun = attempt.lanes[peer], self.core, self.core.clock()
        plan, first = lane.chunks[chunk], offset or 0
        packed = core.incoming.tensor[first : first + plan.span_bytes]

        def done(digest: int | None) -> None:
            seconds = core.clock() - begun
            core.meter.took(Stage.SCATTER, seconds)
            if offset is not None and (source := core.peers.get(peer)) is not None:
                core.links.scattered(source.card.host, plan.nbytes, seconds)
            self._step(attempt, Scattered(peer, chunk, digest))

        with ranges.span(ranges.SCATTER, attempt.state.request, plan.nbytes):
            regions = [
                region(box, [packed], core.pools[component].tensors)
                for component, box in lane.scatter_boxes(chunk, attempt.pages)
            ]
            logicals = None
            if (peer, chunk) in attempt.state.digests:
                logicals = [logical(m, r) for m, r in zip(lane.marks(chunk), regions, strict=True)]
            if offset is None:
                regions = [at_rest(r, "dst") for r in regions]
            core.copier.run(Work(regions, logicals, "dst"), core.soon(done))

    def _isolate(self, attempt: ReceiveAttempt, peer: str) -> Isolated:
        """What a peer's writes may still touch of an attempt that ends."""
        key = (peer, *attempt.id)
        isolated = self.quarantine.get(key)
        if isolated is None:
            reads = {chunk for name, chunk in attempt.state.reading if name == peer}
            isolated = Isolated(attempt.state.reason or "", attempt.seats[peer], reads=reads)
            self.quarantine.hold(key, isolated)
        return isolated

    def _finish(self, attempt: ReceiveAttempt, reason: str | None, held: frozenset[str]) -> None:
        config, now = self.core.config, self.core.clock()
        for peer in held:
            self._isolate(attempt, peer).transfer = attempt.transfer
        del self._attempts[attempt.id]
        until = self.core.remembered_until()
        self._ended.keep(attempt.id, reason, until)
        for peer, source in attempt.state.sources.items():
            if reason is None and source.idle and peer not in attempt.state.gone:
                self._retransmissions.said((peer, *attempt.id), attempt.wants[peer], now + config.resend_s, until)
        close(attempt, self.core, held)
