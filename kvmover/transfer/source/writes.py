"""The writes of a source: granted chunks are packed into staging memory, then written or left there to be read."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from kvmover.errors import LeaseOver, PlanError, TransportError
from kvmover.plan.cost import Route
from kvmover.transfer import nvtx_ranges as ranges
from kvmover.transfer.core import Core
from kvmover.transfer.memory.chunk_tables import ChunkCopy, ChunkTables
from kvmover.transfer.memory.descriptors import (
    InFlight,
    at_rest,
    between,
    descriptors,
    logical,
    packing,
    part,
)
from kvmover.transfer.memory.mapped import Mapped
from kvmover.transfer.memory.programs import Way
from kvmover.transfer.memory.registrations import Registrations
from kvmover.transfer.memory.work import Work
from kvmover.transfer.meter import Count, Gauge, Spent, Stage
from kvmover.transfer.peers.peer_table import Peer
from kvmover.transfer.protocol import wire
from kvmover.transfer.protocol.chunks import Lane
from kvmover.transfer.protocol.wire import Verb
from kvmover.transfer.source.source_machine import (
    Event,
    Faulted,
    Gathered,
    Lapsed,
    Post,
    Posted,
    Settled,
    WriteFailed,
    Written,
)
from kvmover.transport.base import Completed, Descriptors, Failed

if TYPE_CHECKING:
    pass

#: One page table a component: page ids in the order of the request.
Pages = tuple[npt.NDArray[np.int64], ...]


class OwnTables(PlanError):
    """An error of the page tables that this side's engine sent: both sides must learn of it."""


class Job(msgspec.Struct, frozen=True, eq=False):
    """The transfer of one attempt. `want`: the destination's request.

    `source`: this side's page tables so far, a list shared with the request. `target`: the destination's tables so far,
    for writes from pool to pool, and `mapped` its pools if they are mapped into this process; else None. `tables`: of
    the launches of its chunks.
    """

    want: wire.Want
    peer: Peer
    lane: Lane
    source: Sequence[npt.NDArray[np.int64]]
    target: list[npt.NDArray[np.int64]] | None
    mapped: Mapped | None = None
    spent_s: Spent = msgspec.field(default_factory=partial(Spent, float))
    tables: ChunkTables = msgspec.field(default_factory=ChunkTables)

    def check_source(self, chunk: int | None = None) -> None:
        """Raise OwnTables if this side's page tables don't cover a chunk (None: all chunks), or name a page outside its
        pool.
        """
        try:
            if chunk is None:
                self.lane.check_pages(self.lane.src, self.source)
            else:
                self.lane.check_chunk(chunk, self.source)
        except PlanError as error:
            raise OwnTables(str(error)) from error

    def name_target(self, tables: Pages) -> None:
        """Take longer page tables of the destination. Raises PlanError, and takes no table."""
        assert self.target is not None, "chunks are written from pool to pool"
        self.lane.check_named(self.lane.dst, tables)
        self.target[:] = [max(pair, key=len) for pair in zip(self.target, tables, strict=True)]

    @property
    def way(self) -> Way:
        """The direction in which chunks are copied here, or read for their digests."""
        return Way.GATHER if self.mapped is None else Way.WRITE

    @property
    def named(self) -> tuple[int, ...]:
        """Returns the number of page ids named so far in each table of the destination; () if chunks go through an
        arena.
        """
        return tuple(map(len, self.target or ()))

    def note(self, part_: Part) -> bytes:
        """Returns the encoded Chunk message of a part."""
        want = self.want
        return wire.encode(wire.Chunk(want.request, want.generation, part_.chunk, part_.round, part_.digest))


@dataclass(slots=True, eq=False)
class Part:
    """A chunk under way: granted in `round` under a lease of `term`, to memory of a `registration`.

    `staged`: the offset of a packed chunk in this side's arena. `posting`: the transport's write call has not returned;
    if it raises now, the write may be under way. `moving_s`: `Core.moving_s` when it was posted.
    """

    job: Job
    chunk: int
    offset: int
    round: int
    term: int
    registration: int
    since: float
    staged: int | None = None
    digest: int | None = None
    runs: int = 1
    posting: bool = False
    moving_s: float = 0.0


@dataclass(slots=True, eq=False)
class Writes:
    """The queue and the writes of a rank. `tell` takes each chunk's events: Posted, then Written, Gathered or
    WriteFailed, then Settled; or Lapsed. `_leases` [peer]: until when this rank may write there.

    Destinations take turns. Each may hold as many bytes of staging memory as it leaves free for others, or one chunk,
    so a stopped or slow reader stalls no other; of packed writes, no more than the window of its link.
    `_reserved` [destination]: its bytes.
    """

    core: Core
    tell: Callable[[Job, Event], None]
    flights: InFlight[Part]
    registrations: Registrations
    _leases: dict[str, wire.WriteLease] = field(default_factory=dict[str, wire.WriteLease])
    _queue: OrderedDict[str, deque[Part]] = field(default_factory=OrderedDict[str, "deque[Part]"])
    _reserved: Counter[str] = field(default_factory=Counter[str])
    _staged: dict[tuple[Job, int], Part] = field(default_factory=dict["tuple[Job, int]", Part])

    def check(self, job: Job) -> None:
        """Raise PlanError if the destination's page tables or the chunks' sizes don't fit, before any message."""
        if job.target is not None:
            job.lane.check_named(job.lane.dst, job.target)
        if job.want.route is not Route.PACKED:
            return
        largest = max((chunk.span_bytes for chunk in job.lane.chunks), default=0)
        if largest and not self.core.outgoing.arena.fits(largest):
            raise PlanError(f"a chunk of {largest} bytes is over the source's arena")

    def post(self, job: Job, grant: Post) -> None:
        """Queue a chunk; it is begun once staging memory is free."""
        waiting = self._queue.setdefault(job.peer.name, deque())
        now = self.core.clock()
        waiting.append(Part(job, grant.chunk, grant.offset, grant.round, grant.term, grant.registration, now))

    def renew(self, peer: str, lease: wire.WriteLease) -> None:
        """Extend a destination's lease. A lease of an earlier term or an earlier end is ignored."""
        known = self._leases.get(peer)
        newer = known is None or (lease.term, lease.until_us) > (known.term, known.until_us)
        kept = self._leases[peer] = lease if newer or known is None else known
        assert kept is lease or (kept.term, kept.until_us) >= (lease.term, lease.until_us), (
            f"{peer} granted {lease}, and {kept} is kept"
        )

    def lost(self, peer: str) -> None:
        """Drop a lost destination's lease and registrations."""
        self._leases.pop(peer, None)
        self.registrations.lost(peer)

    def _until(self, entry: Part) -> float:
        """Returns when the permission to write a chunk ends, in seconds of this side's clock; -inf without one."""
        lease = self._leases.get(entry.job.peer.name)
        return lease.until_us / 1e6 if lease is not None and lease.term == entry.term else -math.inf

    def _lapse(self, entry: Part) -> None:
        """Drop a chunk whose lease ended: the source then offers it again."""
        self._release(entry)
        self.core.meter.add(Count.LAPSED_CHUNKS)
        self.tell(entry.job, Lapsed(entry.chunk))

    def forget(self, job: Job) -> None:
        """Drop an ended attempt's queued chunks."""
        waiting = self._queue.pop(job.peer.name, None)
        if waiting and (left := deque([entry for entry in waiting if entry.job is not job])):
            self._queue[job.peer.name] = left

    def drop(self, job: Job) -> None:
        """Drop an ended attempt's queued chunks, and those staged to be read."""
        self.forget(job)
        for chunk in [chunk for other, chunk in self._staged if other is job]:
            self.unstage(job, chunk)

    def _do(self, entry: Part, act: Callable[..., None], *arguments: object) -> None:
        """Run a step of a chunk. An exception fails its attempt only, and frees its staging memory unless it was being
        posted.
        """
        try:
            act(entry, *arguments)
        except Exception as error:
            wrong = self.core.fault(entry.job.want.request, error)
            if not entry.posting:
                self._release(entry)
            self.tell(entry.job, Faulted(entry.chunk, wrong, not entry.posting))

    def unstage(self, job: Job, chunk: int) -> None:
        """Free the staging memory of a chunk that waited to be read."""
        entry = self._staged.pop((job, chunk), None)
        if entry is not None:
            self._release(entry)

    def gauges(self) -> dict[Gauge, int]:
        """Returns current counts of waiting and active chunks, for exporters."""
        return {
            Gauge.CHUNKS_WAITING_FOR_STAGING: sum(map(len, self._queue.values())),
            Gauge.CHUNKS_WAITING_TO_BE_READ: len(self._staged),
            Gauge.WRITES_UNDER_WAY: len(self.flights),
            Gauge.OUTGOING_ARENA_BYTES: self.core.outgoing.arena.nbytes,
            Gauge.OUTGOING_RESERVED_BYTES: self.core.outgoing.arena.reserved_bytes,
        }

    def poll(self) -> None:
        """Handle writes that settled late, and begin chunks that wait for staging memory."""
        if self.registrations.waiting:
            self.registrations.poll()
        for entry in self.flights.settled() if self.flights.unsettled else ():
            self._release(entry)
            self.tell(entry.job, Settled(entry.chunk))
        begun = bool(self._queue)
        while begun:
            begun = False
            for peer in list(self._queue):  # a turn each; `tell` may call `forget` and change the queue
                begun |= self._turn(peer)
                if begun and self.core.copier.inline:
                    return  # its write goes before the next is packed, into a region that is free and in the cache

    def _turn(self, peer: str) -> bool:
        """Begin a destination's first chunk. Returns False if no chunk waits or staging memory is full."""
        waiting = self._queue.get(peer)
        if not waiting:
            return False
        entry = waiting.popleft()
        if not self._start(entry):
            waiting.appendleft(entry)
            return False
        if self._queue.get(peer) is waiting:  # to the back
            del self._queue[peer]
            if waiting:
                self._queue[peer] = waiting
        return True

    def handle(self, event: Completed | Failed) -> bool:
        """Handle the end of a write. Returns False for an operation that is not of these writes."""
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
            posted_s, hidden_s = self.core.clock() - landing.seconds, self.core.moving_s - entry.moving_s
            self.core.links.moved(entry.job.peer.card.host, event, moved, entry.runs, posted_s, hidden_s)
        meter.took(Stage.WIRE, landing.seconds, entry.job.spent_s)
        meter.add(Count.SENT_CHUNKS)
        meter.add(Count.SENT_BYTES, moved)
        self.tell(entry.job, Written(entry.chunk))
        return True

    def _start(self, entry: Part) -> bool:
        """Begin a chunk. Returns False while it has to wait for registration, kernels or staging memory."""
        job, core = entry.job, self.core
        assert entry.staged is None, f"chunk {entry.chunk} is begun twice: it is packed at {entry.staged} already"
        if job.want.verb is Verb.PUSH and core.clock() >= self._until(entry):  # checked before packing
            self._lapse(entry)
            return True
        if self.registrations.waits(job.peer.name) or not core.compiler.is_ready(job.peer.name, job.way):
            return False
        if entry.registration > self.registrations.known(job.peer.name):  # Registered was lost; it comes with the grant
            self._lapse(entry)
            return True
        if job.want.route is Route.PACKED:
            entry.staged = self._reserve(job, job.lane.chunks[entry.chunk].span_bytes)
            if entry.staged is None:
                return False
        core.meter.took(Stage.STAGING_WAIT, core.clock() - entry.since, job.spent_s)
        core.meter.routes[job.want.route] += 1
        self.tell(job, Posted(entry.chunk))
        self._do(entry, self._begin)
        return True

    def _reserve(self, job: Job, span_bytes: int) -> int | None:
        """Returns the offset of a region for a destination's chunk, or None while its share, the window for writes to
        it, or the arena is full.
        """
        arena, name = self.core.outgoing.arena, job.peer.name
        if reserved := self._reserved.get(name, 0):
            most_bytes = arena.nbytes - arena.reserved_bytes
            if job.want.verb is Verb.PUSH:
                most_bytes = min(most_bytes, self.core.costs(job.peer.card.host).window_bytes)
            if reserved + span_bytes > most_bytes:
                return None
        offset = arena.reserve(span_bytes)
        if offset is not None:
            self._reserved[name] += span_bytes
        assert self._reserved.total() <= arena.reserved_bytes, (
            f"{self._reserved} are counted of {arena.reserved_bytes} bytes"
        )
        return offset

    def _begin(self, entry: Part) -> None:
        if entry.staged is not None:
            span_bytes = entry.job.lane.chunks[entry.chunk].span_bytes
            with ranges.span(ranges.GATHER, entry.job.want.request, span_bytes):
                self._copy(entry, partial(self._packing, entry))
        elif entry.job.mapped is not None and entry.job.target is not None:
            self._copy(entry, partial(self._mapping, entry, entry.job.target, entry.job.mapped), entry.job.target)
        elif entry.job.want.digests:
            self._copy(entry, lambda _: at_rest(self._packing(entry, 0)))
        else:
            self._gathered(entry, None)

    def _packing(self, entry: Part, staged: int) -> Work:
        """Returns the copy from the pools to a packed chunk."""
        lane, pools = entry.job.lane, self.core.bound
        packed = self.core.outgoing.bound.window(staged, lane.chunks[entry.chunk].span_bytes)
        boxes = [(box, pools[component], packed) for component, box in lane.gather_boxes(entry.chunk, entry.job.source)]
        return packing(boxes, lane.marks(entry.chunk) if entry.job.want.digests else None, "src")

    def _mapping(self, entry: Part, target: Sequence[npt.NDArray[np.int64]], mapped: Mapped, _: int) -> Work:
        """Returns the copy from the pools to the peer's mapped pools."""
        lane = entry.job.lane
        regions = between(lane.direct_boxes(entry.chunk, entry.job.source, target), self.core.bound, mapped)
        return Work(regions, list(map(logical, lane.marks(entry.chunk), regions)) if entry.job.want.digests else None)

    def _copy(
        self, entry: Part, work: Callable[[int], Work], target: Sequence[npt.NDArray[np.int64]] | None = None
    ) -> None:
        """Start a chunk's copy. `work`: see `ChunkCopy`. `target`: page tables of the destination's mapped pools."""
        core, job, begun = self.core, entry.job, self.core.clock()

        def done(digest: int | None) -> None:
            seconds = core.clock() - begun
            core.meter.took(Stage.GATHER, seconds, job.spent_s)
            if entry.staged is not None:
                core.links.gathered(job.peer.card.host, job.lane.chunks[entry.chunk].nbytes, seconds)
            elif job.mapped is not None:
                core.links.copied(job.peer.card.host, job.lane.chunks[entry.chunk].nbytes, seconds)
            self._do(entry, self._gathered, digest)

        stretch = partial(job.lane.stretch, entry.chunk, job.source, target)
        programs = core.compiler.programs(job.peer.name, job.way)
        copy = ChunkCopy(work, entry.staged or 0, job.want.digests, job.tables, stretch, programs)
        core.copier.copy(copy, core.soon(done))

    def _gathered(self, entry: Part, digest: int | None) -> None:
        """Write a gathered chunk, or stage it to be read."""
        job, entry.digest = entry.job, digest
        is_packed = job.want.route is Route.PACKED
        assert is_packed == (entry.staged is not None), f"chunk {entry.chunk} of a {job.want.route} transfer is staged"
        if job.want.verb is Verb.PULL:
            self._staged[job, entry.chunk] = entry
            self.tell(job, Gathered(entry.chunk, entry.staged or 0, digest))
            return
        if digest is not None:  # a resent Chunk carries it too
            self.tell(job, Posted(entry.chunk, digest))
        if job.mapped is not None:
            self._landed(entry)
            return
        self.core.flush_to(job.peer.name)  # keeps this note behind the messages of this poll
        begun = self.core.clock()
        ends = self._direct(entry, job.target) if job.target is not None else self._packed(entry)
        try:
            with ranges.span(ranges.POST, job.want.request, job.lane.chunks[entry.chunk].nbytes):
                note = self.core.auth.sign(job.peer.name, job.note(entry))
                deadline_s, until = self.core.config.deadline_s, self._until(entry)
                entry.posting = True
                ticket = self.core.transport.write(job.peer.name, *ends, note, deadline_s, until)
        except LeaseOver:
            entry.posting = False
            self._lapse(entry)
            return
        except TransportError as error:  # refused before posting: the write is quiescent
            entry.posting = False
            self._release(entry)
            self.tell(job, WriteFailed(entry.chunk, str(error), True))
            return
        now = self.core.clock()
        self.core.meter.took(Stage.POST, now - begun, job.spent_s)
        entry.runs, entry.moving_s = ends[0].count, self.core.moving_s
        self.core.meter.add(Count.DESCRIPTORS, entry.runs)
        self.flights.add(ticket, entry, now)

    def _landed(self, entry: Part) -> None:
        """Send Chunk after a copy into the peer's mapped pages. Sending and receiving take a system call each, so the
        peer sees the bytes once it has the message.
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

    def _direct(self, entry: Part, target: Sequence[npt.NDArray[np.int64]]) -> tuple[Descriptors, Descriptors]:
        """Returns local and remote descriptors of a chunk that goes from pool to pool."""
        boxes = entry.job.lane.direct_boxes(entry.chunk, entry.job.source, target)
        return descriptors(boxes, self.core.card, entry.job.peer.card)

    def _release(self, entry: Part) -> None:
        if entry.staged is not None:
            self.core.outgoing.arena.release(entry.staged)
            entry.staged = None
            peer, span_bytes = entry.job.peer.name, entry.job.lane.chunks[entry.chunk].span_bytes
            assert self._reserved[peer] >= span_bytes, f"{peer} releases {span_bytes} bytes of {self._reserved[peer]}"
            self._reserved[peer] -= span_bytes
            if not self._reserved[peer]:
                del self._reserved[peer]
