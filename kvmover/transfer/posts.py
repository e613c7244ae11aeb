"""Posts: packs granted chunks into staging memory, writes them, and follows each write until it can touch nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvmover import ranges
from kvmover.errors import PlanError, TransportError
from kvmover.transfer import sender, wire
from kvmover.transfer.core import Core
from kvmover.transfer.lane import Lane
from kvmover.transfer.memory import Ends, descriptors, join, part, region
from kvmover.transfer.peers import Peer
from kvmover.transport.base import Completed, Descriptors, Failed

if TYPE_CHECKING:
    import torch

#: One page table a component: page ids in the order of the request.
Pages = tuple[npt.NDArray[np.int64], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """What one attempt writes where. `target`: the destination's page tables on the direct route, None when packed."""

    request: str
    generation: int
    peer: Peer
    lane: Lane
    source: Pages
    target: Pages | None
    after: torch.cuda.Event | None

    def produced(self) -> bool:
        """Whether the pages may be read: a write from pool to pool has no stream that could wait for their event."""
        return self.target is None or self.after is None or self.after.query()

    def note(self, chunk: int) -> bytes:
        return wire.encode(wire.Chunk(self.request, self.generation, chunk))


@dataclass(slots=True, eq=False)
class Poster:
    """The writes of a rank. `tell` hears what becomes of a chunk: Posted, then Written or WriteFailed, then Settled."""

    core: Core
    tell: Callable[[Job, sender.Event], None]
    _queue: deque[tuple[Job, int, int]] = field(default_factory=deque["tuple[Job, int, int]"])
    _writes: dict[int, tuple[Job, int, int | None]] = field(default_factory=dict[int, "tuple[Job, int, int | None]"])
    _unsettled: dict[int, tuple[Job, int, int | None]] = field(default_factory=dict[int, "tuple[Job, int, int | None]"])

    def check(self, job: Job) -> None:
        """Raise PlanError, before anything is sent, for page tables or chunks that do not fit."""
        for number, chunk in enumerate(job.lane.chunks):
            if job.target is not None:
                if len(job.target) != len(self.core.pools):
                    raise PlanError(f"{len(job.target)} page tables for {len(self.core.pools)} components")
                job.lane.direct_boxes(number, job.source, job.target)
                continue
            job.lane.gather_boxes(number, job.source)
            if not self.core.outgoing.arena.fits(chunk.span_bytes):
                raise PlanError(f"a chunk of {chunk.span_bytes} bytes is over the source's arena")

    def post(self, job: Job, chunk: int, offset: int) -> None:
        """Queue a chunk; it goes out when there is room to pack it."""
        self._queue.append((job, chunk, offset))

    def forget(self, job: Job) -> None:
        """Drop what is queued of an attempt that ended."""
        self._queue = deque(entry for entry in self._queue if entry[0] is not job)

    def poll(self) -> None:
        """Writes that settled late, and chunks that wait for staging memory."""
        still = self.core.transport.unsettled() if self._unsettled else frozenset[int]()
        for ticket in [ticket for ticket in self._unsettled if ticket not in still]:
            job, chunk, staged = self._unsettled.pop(ticket)
            self._unstage(staged)
            self.tell(job, sender.Settled(chunk))
        at = 0
        while at < len(self._queue):
            entry = self._queue[at]
            if not entry[0].produced():
                at += 1
                continue
            del self._queue[at]  # first: what a start that fails tells may `forget`, and replace the queue
            if not self._start(*entry):
                self._queue.insert(at, entry)
                return

    def handle(self, event: Completed | Failed) -> None:
        """The end of a write on this side."""
        job, chunk, staged = self._writes.pop(event.ticket)
        if isinstance(event, Failed) and not event.quiescent:
            self._unsettled[event.ticket] = (job, chunk, staged)
        else:
            self._unstage(staged)
        if isinstance(event, Failed):
            self.tell(job, sender.WriteFailed(chunk, str(event.error), event.quiescent))
        else:
            self.tell(job, sender.Written(chunk))

    def _start(self, job: Job, chunk: int, offset: int) -> bool:
        """Begin a chunk, or return False while there is no room to pack it."""
        if job.target is not None:
            self.tell(job, sender.Posted(chunk))
            self._write(job, chunk, self._direct(job, chunk, job.target), None)
            return True
        core, span_bytes = self.core, job.lane.chunks[chunk].span_bytes
        staged = core.outgoing.arena.lease(span_bytes)
        if staged is None:
            return False
        self.tell(job, sender.Posted(chunk))
        packed = core.outgoing.tensor[staged : staged + span_bytes]
        ends = (part(core.outgoing.memory, staged, span_bytes), part(job.peer.card.arena, offset, span_bytes))
        with ranges.span(ranges.GATHER, job.request, span_bytes):
            regions = [
                region(box, core.pools[component].tensors, [packed])
                for component, box in job.lane.gather_boxes(chunk, job.source)
            ]
            core.copier.copy(regions, core.soon(lambda: self._write(job, chunk, ends, staged)), job.after)
        return True

    def _direct(self, job: Job, chunk: int, target: Pages) -> tuple[Descriptors, Descriptors]:
        """Local and remote descriptors of a chunk that goes from pool to pool."""
        own, peer = self.core.card, job.peer.card
        tables: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
        for component, box in job.lane.direct_boxes(chunk, job.source, target):
            ends = Ends.of(own.allocations[component], peer.allocations[component])
            tables.append(descriptors(box, ends))
        local, remote = zip(*tables, strict=True)
        return join(own.arena, local), join(peer.arena, remote)

    def _write(self, job: Job, chunk: int, ends: tuple[Descriptors, Descriptors], staged: int | None) -> None:
        try:
            with ranges.span(ranges.POST, job.request, ends[0].nbytes):
                ticket = self.core.transport.write(job.peer.name, *ends, job.note(chunk), self.core.config.deadline_s)
        except TransportError as error:  # refused before anything was posted: the chunk failed, quietly
            self._unstage(staged)
            self.tell(job, sender.WriteFailed(chunk, str(error), True))
            return
        self._writes[ticket] = (job, chunk, staged)

    def _unstage(self, staged: int | None) -> None:
        if staged is not None:
            self.core.outgoing.arena.release(staged)
