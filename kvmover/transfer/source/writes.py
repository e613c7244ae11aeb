"""Posts: packs granted chunks into staging memory, writes them or leaves them there to be read, and follows each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvmover import ranges
from kvmover.errors import PlanError, TransportError
from kvmover.kernels.region import Region
from kvmover.plan.cost import Route
from kvmover.transfer.core import Core
from kvmover.transfer.memory.copier import Work
from kvmover.transfer.memory.in_flight import InFlight
from kvmover.transfer.memory.mapped import Mapped
from kvmover.transfer.memory.regions import Ends, at_rest, between, descriptors, join, logical, part, region
from kvmover.transfer.meter import Count, Gauge, Stage
from kvmover.transfer.peers.table import Peer
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.lane import Lane
from kvmover.transfer.protocol.wire import Verb
from kvmover.transfer.source.state import Event, Gathered, Post, Posted, Settled, WriteFailed, Written
from kvmover.transport.base import Completed, Descriptors, Failed

if TYPE_CHECKING:
    import torch

#: One page table a component: page ids in the order of the request.
Pages = tuple[npt.NDArray[np.int64], ...]


class OwnTables(PlanError):
    """The page tables that the engine sent are not those of the request: both sides must hear of it."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """What one attempt moves from where to where. `want`: what the destination asked for.

    `target`: its page tables where chunks are written from pool to pool, and `mapped` its pools where we copy into
    them; None elsewhere.
    """

    want: wire.Want
    peer: Peer
    lane: Lane
    source: Pages
    target: Pages | None
    mapped: Mapped | None = None

    def note(self, part_: Part) -> bytes:
        want = self.want
        return wire.encode(wire.Chunk(want.request, want.generation, part_.chunk, part_.round, part_.digest))


@dataclass(slots=True, eq=False)
class Part:
    """A chunk of a job on its way: asked for in `round`, `staged` at an offset of our arena where it is packed."""

    job: Job
    chunk: int
    offset: int
    round: int
    since: float
    staged: int | None = None
    digest: int | None = None
    runs: int = 1


@dataclass(slots=True, eq=False)
class Writes:
    """What a rank gives out. `tell` hears of each chunk: Posted, then Written, Staged or WriteFailed, then Settled."""

    core: Core
    tell: Callable[[Job, Event], None]
    flights: InFlight[Part]
    _queue: deque[Part] = field(default_factory=deque[Part])
    _staged: dict[tuple[Job, int], Part] = field(default_factory=dict["tuple[Job, int]", Part])

    def check(self, job: Job) -> None:
        """Raise PlanError, before anything is sent, for page tables or chunks that do not fit."""
        try:
            job.lane.check_pages(job.lane.src, job.source)
        except PlanError as error:
            raise OwnTables(str(error)) from error
        if job.target is not None:
            job.lane.check_pages(job.lane.dst, job.target)
        if job.want.route is not Route.PACKED:
            return
        largest = max((chunk.span_bytes for chunk in job.lane.chunks), default=0)
        if largest and not self.core.outgoing.arena.fits(largest):
            raise PlanError(f"a chunk of {largest} bytes is over the source's arena")

    def post(self, job: Job, grant: Post) -> None:
        """Queue a chunk; it goes out when there is room to pack it."""
        self._queue.append(Part(job, grant.chunk, grant.offset, grant.round, self.core.clock()))

    def forget(self, job: Job) -> None:
        """Drop what is queued of an attempt that ended."""
        self._queue = deque(entry for entry in self._queue if entry.job is not job)

    def unstage(self, job: Job, chunk: int) -> None:
        """A chunk that waited to be read waits no more."""
        entry = self._staged.pop((job, chunk), None)
        if entry is not None:
            self._release(entry)

    def gauges(self) -> dict[Gauge, int]:
        return {
            Gauge.CHUNKS_WAITING_FOR_STAGING: len(self._queue),
            Gauge.CHUNKS_WAITING_TO_BE_READ: len(self._staged),
            Gauge.WRITES_UNDER_WAY: len(self.flights),
            Gauge.OUTGOING_ARENA_BYTES: self.core.outgoing.arena.nbytes,
            Gauge.OUTGOING_LEASED_BYTES: self.core.outgoing.arena.leased_bytes,
        }

    def poll(self) -> None:
        """Writes that settled late, and chunks that wait for staging memory."""
        for entry in self.flights.settled():
            self._release(entry)
            self.tell(entry.job, Settled(entry.chunk))
        while self._queue:
            entry = self._queue.popleft()  # first: what a start that fails tells may `forget`, and replace the queue
            if not self._start(entry):
                self._queue.appendleft(entry)
                return
            if self.core.copier.inline:
                return  # its write goes before the next is packed, into a region that is free by then and in the cache

    def handle(self, event: Completed | Failed) -> bool:
        """The end of a write on this side; False for an operation of somebody else."""
        landing = self.flights.end(event, self.core.clock())
        if landing is None:
            return False
        entry = landing.what
        if landing.quiescent:
            self._release(entry)
        if landing.reason is not None:
            self.tell(entry.job, WriteFailed(entry.chunk, landing.reason, landing.quiescent))
            return True
        meter, moved = self.core.meter, entry.job.lane.chunks[entry.chunk].nbytes
        if isinstance(event, Completed):
            self.core.links.wrote(entry.job.peer.card.host, event, moved, entry.runs)
        meter.took(Stage.WIRE, landing.seconds)
        meter.add(Count.SENT_CHUNKS)
        meter.add(Count.SENT_BYTES, moved)
        self.tell(entry.job, Written(entry.chunk))
        return True

    def _start(self, entry: Part) -> bool:
        """Begin a chunk, or return False while there is no room to pack it."""
        job, core = entry.job, self.core
        if job.want.route is Route.PACKED:
            entry.staged = core.outgoing.arena.lease(job.lane.chunks[entry.chunk].span_bytes)
            if entry.staged is None:
                return False
        core.meter.took(Stage.STAGING_WAIT, core.clock() - entry.since)
        core.meter.routes[job.want.route.value] += 1
        self.tell(job, Posted(entry.chunk))
        if entry.staged is not None:
            self._gather(entry, entry.staged)
        elif job.mapped is not None and job.target is not None:
            boxes = job.lane.direct_boxes(entry.chunk, job.source, job.target)
            self._copy(between(boxes, [pool.tensors for pool in core.pools], job.mapped), entry)
        elif job.want.digests:
            self._copy([at_rest(r, "src") for r in self._regions(entry, core.outgoing.tensor)], entry)
        else:
            self._gathered(entry, None)
        return True

    def _gather(self, entry: Part, staged: int) -> None:
        span_bytes = entry.job.lane.chunks[entry.chunk].span_bytes
        with ranges.span(ranges.GATHER, entry.job.want.request, span_bytes):
            self._copy(self._regions(entry, self.core.outgoing.tensor[staged : staged + span_bytes]), entry)

    def _regions(self, entry: Part, packed: torch.Tensor) -> list[Region]:
        """From the pools to a packed chunk."""
        return [
            region(box, self.core.pools[component].tensors, [packed])
            for component, box in entry.job.lane.gather_boxes(entry.chunk, entry.job.source)
        ]

    def _copy(self, regions: list[Region], entry: Part) -> None:
        core, job, begun = self.core, entry.job, self.core.clock()
        marks = job.lane.marks(entry.chunk) if job.want.digests else None
        logicals = None if marks is None else [logical(m, r) for m, r in zip(marks, regions, strict=True)]

        def done(digest: int | None) -> None:
            seconds = core.clock() - begun
            core.meter.took(Stage.GATHER, seconds)
            if entry.staged is not None:
                core.links.gathered(job.peer.card.host, job.lane.chunks[entry.chunk].nbytes, seconds)
            elif job.mapped is not None:
                core.links.copied(job.peer.card.host, job.lane.chunks[entry.chunk].nbytes, seconds)
            self._gathered(entry, digest)

        core.copier.run(Work(regions, logicals), core.soon(done))

    def _gathered(self, entry: Part, digest: int | None) -> None:
        """Write a chunk, or say where it lies."""
        job, entry.digest = entry.job, digest
        if job.want.verb is Verb.PULL:
            self._staged[job, entry.chunk] = entry
            self.tell(job, Gathered(entry.chunk, entry.staged or 0, digest))
            return
        if digest is not None:  # if the note is lost, the chunk is told of again with it
            self.tell(job, Posted(entry.chunk, digest))
        if job.mapped is not None:
            self._landed(entry)
            return
        begun = self.core.clock()
        ends = self._direct(entry, job.target) if job.target is not None else self._packed(entry)
        try:
            with ranges.span(ranges.POST, job.want.request, ends[0].nbytes):
                note = self.core.auth.sign(job.peer.name, job.note(entry))
                ticket = self.core.transport.write(job.peer.name, *ends, note, self.core.config.deadline_s)
        except TransportError as error:  # refused before anything was posted: the chunk failed, quietly
            self._release(entry)
            self.tell(job, WriteFailed(entry.chunk, str(error), True))
            return
        now = self.core.clock()
        self.core.meter.took(Stage.POST, now - begun)
        entry.runs = ends[0].count
        self.core.meter.add(Count.DESCRIPTORS, entry.runs)
        self.flights.add(ticket, entry, now)

    def _landed(self, entry: Part) -> None:
        """A copy of our own put a chunk into the peer's pages. The note comes after: to send it takes a system call,
        and to hear of it another, so who hears of the bytes sees them.
        """
        core, job = self.core, entry.job
        core.post(job.peer.name, job.note(entry))
        core.meter.add(Count.SENT_CHUNKS)
        core.meter.add(Count.SENT_BYTES, job.lane.chunks[entry.chunk].nbytes)
        self.tell(job, Written(entry.chunk))

    def _packed(self, entry: Part) -> tuple[Descriptors, Descriptors]:
        assert entry.staged is not None, "a packed chunk is staged before it is written"
        span_bytes = entry.job.lane.chunks[entry.chunk].span_bytes
        to = part(entry.job.peer.card.arena, entry.offset, span_bytes)
        return part(self.core.outgoing.memory, entry.staged, span_bytes), to

    def _direct(self, entry: Part, target: Pages) -> tuple[Descriptors, Descriptors]:
        """Local and remote descriptors of a chunk that goes from pool to pool."""
        own, peer = self.core.card, entry.job.peer.card
        tables: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
        for component, box in entry.job.lane.direct_boxes(entry.chunk, entry.job.source, target):
            tables.append(descriptors(box, Ends.of(own.allocations[component], peer.allocations[component])))
        local, remote = zip(*tables, strict=True)
        return join(own.arena, local), join(peer.arena, remote)

    def _release(self, entry: Part) -> None:
        if entry.staged is not None:
            self.core.outgoing.arena.release(entry.staged)
            entry.staged = None
