"""Reads: fetches chunks of a pull from a source's staging memory or pages, and follows each to its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvmover.errors import TransportError
from kvmover.plan.lower import Box
from kvmover.shared_memory import MapMode
from kvmover.transfer.core import Core
from kvmover.transfer.destination.state import ReadEnded
from kvmover.transfer.memory.copier import Work
from kvmover.transfer.memory.descriptors import Ends, between, descriptors, join, part
from kvmover.transfer.memory.in_flight import InFlight
from kvmover.transfer.memory.programs import Way
from kvmover.transfer.meter import Count, Spent, Stage
from kvmover.transport.base import Completed, Descriptors, Failed


@dataclass(frozen=True, slots=True)
class Reading:
    """A chunk that is read: of which attempt (request, generation), from whom; `spent_s`: the times of that attempt."""

    id: tuple[str, int]
    peer: str
    chunk: int
    spent_s: Spent = field(compare=False)


@dataclass(slots=True, eq=False)
class Reads:
    """The reads of a rank. `tell` hears how each ended."""

    core: Core
    tell: Callable[[Reading, ReadEnded], None]
    flights: InFlight[Reading]

    def packed(self, reading: Reading, remote: int, offset: int, span_bytes: int) -> None:
        """From `remote` of the source's staging memory to `offset` of our arena."""
        peer, arena = self.core.peers.get(reading.peer), self.core.incoming.memory
        if peer is None:
            self._refuse(reading, f"{reading.peer} is not connected")
        elif not 0 <= remote <= peer.card.staging.nbytes - span_bytes:
            self._refuse(reading, f"{reading.peer} staged a chunk at {remote}, outside of its staging memory")
        else:
            self._post(reading, part(arena, offset, span_bytes), part(peer.card.staging, remote, span_bytes))

    def direct(self, reading: Reading, boxes: Sequence[tuple[int, Box]]) -> None:
        """From the source's pages to ours."""
        peer, own = self.core.peers.get(reading.peer), self.core.card
        if peer is None:
            self._refuse(reading, f"{reading.peer} is not connected")
            return
        tables = [
            descriptors(box, Ends.of(peer.card.allocations[component], own.allocations[component]))
            for component, box in boxes
        ]
        remote, local = zip(*tables, strict=True)
        self._post(reading, join(own.arena, local), join(peer.card.arena, remote))

    def mapped(self, reading: Reading, boxes: Sequence[tuple[int, Box]]) -> None:
        """From the source's pages, which lie in memory of ours too, to ours: a copy of this rank's own."""
        core, peer = self.core, self.core.peers.get(reading.peer)
        theirs = core.mappings.pools(peer, MapMode.READ) if peer else None
        if peer is None or theirs is None:
            self._refuse(reading, f"the pools of {reading.peer} are not mapped")
            return
        begun, host = core.clock(), peer.card.host
        work = Work(between(boxes, theirs, core.bound), programs=core.compiler.programs(peer.name, Way.READ))

        def done(_: int | None) -> None:
            seconds = core.clock() - begun
            core.meter.took(Stage.WIRE, seconds, reading.spent_s)
            core.links.copied(host, sum(region.nbytes for region in work.regions), seconds)
            self.tell(reading, ReadEnded(reading.peer, reading.chunk))

        core.copier.run(work, core.soon(done))

    def _refuse(self, reading: Reading, reason: str) -> None:
        """Nothing was posted; said from the mover's loop, not from inside the step that asked."""
        ended = ReadEnded(reading.peer, reading.chunk, reason)
        self.core.later.append(lambda: self.tell(reading, ended))

    def _post(self, reading: Reading, local: Descriptors, remote: Descriptors) -> None:
        core, begun = self.core, self.core.clock()
        try:
            ticket = core.transport.read(reading.peer, local, remote, b"", core.config.deadline_s)
        except TransportError as error:
            self._refuse(reading, str(error))
            return
        now = core.clock()
        core.meter.took(Stage.POST, now - begun, reading.spent_s)
        core.meter.add(Count.DESCRIPTORS, local.count)
        self.flights.add(ticket, reading, now)

    def handle(self, event: Completed | Failed) -> bool:
        """The end of a read; False for an operation of somebody else."""
        landing = self.flights.end(event, self.core.clock())
        if landing is None:
            return False
        if landing.reason is None:
            self.core.meter.took(Stage.WIRE, landing.seconds, landing.what.spent_s)
        reading = landing.what
        self.tell(reading, ReadEnded(reading.peer, reading.chunk, landing.reason, landing.quiescent))
        return True

    def settled(self) -> list[Reading]:
        """Reads that failed earlier and can touch memory no longer."""
        return self.flights.settled()
