"""Inbound: runs the receiver's state machines of one rank, leasing regions, scattering chunks and answering sources."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvmover import ranges
from kvmover.errors import PlanError
from kvmover.transfer import receiver, receiving, wire
from kvmover.transfer.asking import Asked, attempt_of
from kvmover.transfer.copier import Work
from kvmover.transfer.core import Core
from kvmover.transfer.credits import Credits
from kvmover.transfer.farewell import Farewells
from kvmover.transfer.limbo import Limbo, Ward
from kvmover.transfer.memory import at_rest, logical, region
from kvmover.transfer.meter import Count, Gauge, Stage
from kvmover.transfer.peers import Peer
from kvmover.transfer.reads import Reader, Reading
from kvmover.transfer.remembered import Remembered
from kvmover.transfer.result import Cause, Transfer
from kvmover.transfer.tables import decoded
from kvmover.transfer.wanted import CAUSES, Attempt, Id, close

#: Attempts that are remembered as over, so that a source that missed how they ended can be told.
MAX_ENDED = 65536


@dataclass(slots=True, eq=False)
class Inbound:
    """The receiving half of a mover."""

    core: Core
    reader: Reader
    limbo: Limbo
    generation: int
    _attempts: dict[Id, Attempt] = field(default_factory=dict[Id, Attempt])
    _ended: Remembered[Id, str | None] = field(default_factory=lambda: Remembered["Id", "str | None"](MAX_ENDED))
    _credits: Credits[Id, receiving.WriterChunk] = field(default_factory=Credits[Id, receiving.WriterChunk])
    _farewells: Farewells = field(default_factory=Farewells)

    def receive(self, asked: Asked) -> None:
        """Ask every source rank of an engine for its part. Raises before anything is asked."""
        request = asked.transfer.request
        if any(open_request == request for open_request, _ in self._attempts):
            raise PlanError(f"request {request} is already being received")
        attempt = attempt_of(self.core, asked, self.generation + 1)
        self.generation += 1
        self._attempts[attempt.id] = attempt
        for name, want in attempt.wants.items():
            self.core.post(name, want)
        self._apply(attempt, *receiver.start(attempt.state))

    def hear(self, peer: Peer, message: wire.About) -> None:
        """A message from a source. One about an attempt that is over is answered with how it ended."""
        attempt = self._attempts.get((message.request, message.generation))
        if attempt is None:
            self._late(peer, message)
            return
        match message:
            case wire.Offered(ready=ready, pages=pages):
                if pages and not self._take_tables(attempt, peer.name, pages):
                    return
                self._step(attempt, receiving.Offered(peer.name, ready))
            case wire.Chunk(chunk=chunk, round=round_, digest=digest):
                self._step(attempt, receiving.Arrived(peer.name, chunk, round_, digest))
            case wire.Staged(chunk=chunk, offset=offset, round=round_, digest=digest):
                self._step(attempt, receiving.Staged(peer.name, chunk, offset, round_, digest))
            case wire.Aux(payload=payload):
                if peer.name in attempt.state.awaited_aux:  # not of a rank of another engine that has the same number
                    attempt.aux[peer.card.place.rank] = payload
                self._step(attempt, receiving.AuxArrived(peer.name))
            case wire.Kept():
                self._step(attempt, receiving.Kept(peer.name))
            case wire.Abort(reason=reason):
                self._step(attempt, receiving.PeerAborted(peer.name, reason))
            case wire.Drained():
                self._step(attempt, receiving.PeerDrained(peer.name))
            case _:
                self.core.meter.add(Count.LATE_MESSAGES)

    def _late(self, peer: Peer, message: wire.About) -> None:
        id_ = message.request, message.generation
        if isinstance(message, wire.Drained):
            self._free(self.limbo.drained((peer.name, *id_)))
            return
        self.core.meter.add(Count.LATE_MESSAGES)
        self._farewells.heard((peer.name, *id_))
        if isinstance(message, wire.Kept):
            return
        reason = self._ended.get(id_) if id_ in self._ended else "this attempt is over"
        if isinstance(message, wire.Abort):  # answered by Drained, and that by nothing: no answer is answered for ever
            reason = reason or message.reason
        self.core.say(peer.name, wire.Done(*id_) if reason is None else wire.Abort(*id_, reason))

    def _take_tables(self, attempt: Attempt, peer: str, pages: tuple[bytes, ...]) -> bool:
        """Page tables of a source whose pages we read; False, and the attempt fails, where they cannot be right."""
        if peer not in attempt.lanes:
            return False
        try:
            tables = decoded(pages)
            attempt.lanes[peer].check_pages(attempt.lanes[peer].src, tables)
        except ValueError as error:
            self._step(attempt, receiving.PeerAborted(peer, f"page tables of {peer}: {error}"))
            return False
        attempt.theirs[peer] = tables
        return True

    def knows(self, message: wire.About) -> bool:
        id_ = message.request, message.generation
        return id_ in self._attempts or id_ in self._ended

    def lost(self, peer: str, reason: str) -> None:
        self._farewells.lost(peer)
        for attempt in list(self._attempts.values()):
            self._step(attempt, receiving.PeerGone(peer, reason))

    def abort(self, transfer: Transfer, reason: str) -> None:
        for attempt in list(self._attempts.values()):
            if attempt.transfer is transfer:
                self._step(attempt, receiving.Cancel(reason))

    def close(self, reason: str) -> None:
        """Fail what is open and tell its sources."""
        for attempt in list(self._attempts.values()):
            self._step(attempt, receiving.Cancel(reason))

    def poll(self) -> None:
        """Deadlines, regions for chunks that wait for one, and what may be given back late."""
        now = self.core.clock()
        for attempt in list(self._attempts.values()):
            self._step(attempt, receiving.Tick())
        arena = self.core.incoming.arena
        while (granted := self._credits.lease(arena)) is not None:
            id_, key, offset = granted
            attempt = self._attempts[id_]
            self.core.meter.took(Stage.CREDIT_WAIT, now - attempt.asked.pop(key))
            self._step(attempt, receiving.Leased(*key, offset))
        for reading in self.reader.settled():
            self._settled(reading)
        ask, freed = self.limbo.poll(now)
        self._free(freed)
        for peer, request, generation in ask:
            if self.core.peers.get(peer) is not None:
                self.core.meter.add(Count.RESENT_MESSAGES)
                reason = self.limbo.reason((peer, request, generation))
                self.core.say(peer, wire.Abort(request, generation, reason))
        for (peer, request, generation), want in self._farewells.again(now, self.core.config.resend_s):
            self.core.meter.add(Count.RESENT_MESSAGES)
            self.core.post(peer, want)
            self.core.say(peer, wire.Done(request, generation))
        self._ended.expire(now)

    def gauges(self) -> dict[Gauge, int]:
        arena = self.core.incoming.arena
        return {
            Gauge.OPEN_RECEIVES: len(self._attempts),
            Gauge.CHUNKS_WAITING_FOR_CREDIT: len(self._credits),
            Gauge.READS_UNDER_WAY: len(self.reader.flights),
            Gauge.ATTEMPTS_IN_LIMBO: len(self.limbo),
            Gauge.INCOMING_ARENA_BYTES: arena.nbytes,
            Gauge.INCOMING_LEASED_BYTES: arena.leased_bytes,
            Gauge.INCOMING_QUARANTINED_BYTES: arena.quarantined_bytes,
        }

    def waits_on(self) -> set[str]:
        return {peer for attempt in self._attempts.values() for peer in attempt.state.sources}

    def read(self, reading: Reading, event: receiving.ReadEnded) -> None:
        """What the reader says becomes of a read."""
        attempt = self._attempts.get(reading.id)
        if attempt is not None:
            self._step(attempt, event)
        elif event.quiescent:
            self._settled(reading)

    def _settled(self, reading: Reading) -> None:
        attempt = self._attempts.get(reading.id)
        if attempt is not None:
            self._step(attempt, receiving.ReadSettled(reading.peer, reading.chunk))
        else:
            self._free(self.limbo.settled((reading.peer, *reading.id), reading.chunk))

    def _free(self, offsets: Sequence[int]) -> None:
        for offset in offsets:
            self.core.incoming.arena.release(offset)

    def _step(self, attempt: Attempt, event: receiving.Event) -> None:
        before = attempt.state
        state, actions = receiver.step(before, event, self.core.clock())
        if before.reason is None and state.reason is not None:
            attempt.cause = CAUSES.get(type(event), Cause.PROTOCOL)
            self._credits.forget(attempt.id)
        if len(state.landed) > len(before.landed):
            self._landed(attempt, event)
        self._apply(attempt, state, actions)

    def _landed(self, attempt: Attempt, event: receiving.Event) -> None:
        """Count a chunk that is in the pages, by whatever way it came there."""
        match event:
            case receiving.Arrived(peer, chunk) | receiving.ReadEnded(peer, chunk) | receiving.Scattered(peer, chunk):
                self.core.meter.add(Count.RECEIVED_CHUNKS)
                self.core.meter.add(Count.RECEIVED_BYTES, attempt.lanes[peer].chunks[chunk].nbytes)
            case _:
                raise AssertionError(f"{event} lands nothing")

    def _apply(self, attempt: Attempt, state: receiving.Receiving, actions: Sequence[receiving.Action]) -> None:
        attempt.state = state
        arena = self.core.incoming.arena
        for action in actions:
            match action:
                case receiving.Send(peer, message):
                    self.core.say(peer, message)
                case receiving.Ask(peer):
                    self.core.meter.add(Count.RESENT_MESSAGES)
                    self.core.post(peer, attempt.wants[peer])
                case receiving.Lease(peer, chunk):
                    attempt.asked[peer, chunk] = self.core.clock()
                    self._credits.ask(attempt.id, (peer, chunk), attempt.lanes[peer].chunks[chunk].span_bytes)
                case receiving.Read():
                    self._read(attempt, action)
                case receiving.Scatter(peer, chunk, offset):
                    self._scatter(attempt, peer, chunk, offset)
                case receiving.Free(offset):
                    arena.release(offset)
                case receiving.Quarantine(peer, offset):
                    arena.quarantine(offset)
                    self._ward(attempt, peer).offsets.append(offset)
                case receiving.Mismatch():
                    attempt.resent += 1
                    self.core.meter.add(Count.MISMATCHED_CHUNKS)
                case receiving.Finish(reason, held):
                    self._finish(attempt, reason, held)

    def _read(self, attempt: Attempt, read: receiving.Read) -> None:
        reading = Reading(attempt.id, read.peer, read.chunk)
        lane, theirs = attempt.lanes[read.peer], attempt.theirs.get(read.peer)
        if not attempt.state.sources[read.peer].direct:
            span_bytes = lane.chunks[read.chunk].span_bytes
            self.reader.packed(reading, read.remote, read.offset, span_bytes)
        elif theirs is None:
            missing = f"{read.peer} did not say where its pages are"
            self._step(attempt, receiving.ReadEnded(read.peer, read.chunk, missing))
        else:
            self.reader.direct(reading, lane.direct_boxes(read.chunk, theirs, attempt.pages))

    def _scatter(self, attempt: Attempt, peer: str, chunk: int, offset: int | None) -> None:
        lane, core, begun = attempt.lanes[peer], self.core, self.core.clock()
        plan, first = lane.chunks[chunk], offset or 0
        packed = core.incoming.tensor[first : first + plan.span_bytes]

        def done(digest: int | None) -> None:
            seconds = core.clock() - begun
            core.meter.took(Stage.SCATTER, seconds)
            if offset is not None and (source := core.peers.get(peer)) is not None:
                core.links.scattered(source.card.host, plan.nbytes, seconds)
            self._step(attempt, receiving.Scattered(peer, chunk, digest))

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

    def _ward(self, attempt: Attempt, peer: str) -> Ward:
        """What a peer's writes may still touch of an attempt that ends."""
        key = (peer, *attempt.id)
        ward = self.limbo.get(key)
        if ward is None:
            reads = {chunk for name, chunk in attempt.state.reading if name == peer}
            ward = Ward(attempt.state.reason or "", attempt.seats[peer], reads=reads)
            self.limbo.hold(key, ward)
        return ward

    def _finish(self, attempt: Attempt, reason: str | None, held: frozenset[str]) -> None:
        config, now = self.core.config, self.core.clock()
        for peer in held:
            self._ward(attempt, peer).transfer = attempt.transfer
        del self._attempts[attempt.id]
        until = self.core.remembered_until()
        self._ended.keep(attempt.id, reason, until)
        for peer, source in attempt.state.sources.items():
            if reason is None and source.idle and peer not in attempt.state.gone:
                self._farewells.said((peer, *attempt.id), attempt.wants[peer], now + config.resend_s, until)
        close(attempt, self.core, held)
