"""The programs of a peer: the kernels that copies for it can need, compiled in a thread once it is connected.

A kernel takes most of a second to compile, for which `poll` must not stop. The kernels follow from the pools and page
sizes of both sides, and serve the chunks of any request.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvmover.kernels.copy_engine import BY_ROWS, CopyEngine
from kvmover.kernels.region import Region
from kvmover.plan.legs import Replicas
from kvmover.regions import BoundMemory
from kvmover.transfer.memory.descriptors import Placed, between, logical, packing
from kvmover.transfer.memory.mapped import Mapped
from kvmover.transfer.memory.work import Programs, Work, digests_conversions, undigested
from kvmover.transfer.protocol.chunks import Cut, End, Lane, Marks, plans_between

if TYPE_CHECKING:
    import torch

    from kvmover.kernels.ahead_of_time import Worker

#: One page table a component.
PageTables = list[npt.NDArray[np.int64]]

#: Pages of each rank in the sample request, so that whole pages are nearly all of its bytes.
SAMPLE_PAGES = 16

#: More bytes than the sample request has: the cut into chunks does not change its rows.
_ONE_CHUNK_BYTES = 1 << 50


class Way(StrEnum):
    """The direction of a chunk's copies: GATHER from pools to the arena, SCATTER from the arena to pools, WRITE from
    this rank's pools to a peer's mapped pools, READ the other way.
    """

    GATHER = "gather"
    SCATTER = "scatter"
    WRITE = "write"
    READ = "read"


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings, beside the pools, on which kernels between two ranks depend. `digests`: chunks have digests.
    `engine`: the copy engine.
    """

    replicas: Replicas
    sms: int | None
    digests: bool
    engine: CopyEngine = CopyEngine.AUTO


@dataclass(frozen=True, slots=True)
class OwnMemory:
    """The memory of the copying rank: pools [component], and the arenas that it gathers into and scatters from.

    `mapped`: the peer's pools [component]; empty unless they are mapped here.
    """

    pools: tuple[BoundMemory, ...]
    outgoing: BoundMemory
    incoming: BoundMemory
    mapped: Mapped = ()

    def bound_anew(self) -> OwnMemory:
        """Returns a copy for another thread: a BoundMemory caches results and is not shared."""
        pools, mapped = (tuple(BoundMemory(each.tensors) for each in part) for part in (self.pools, self.mapped))
        return OwnMemory(pools, BoundMemory(self.outgoing.tensors), BoundMemory(self.incoming.tensors), mapped)


def programs_between(way: Way, src: End, dst: End, memory: OwnMemory, rules: Rules) -> Programs | None:
    """Returns the kernels for chunks of any request from `src` to `dst`: those of the source for GATHER and WRITE, else
    of the destination. None if no chunk goes that way.
    """
    from kvmover.kernels import convert, rows
    from kvmover.kernels.table import EVEN, LISTED

    work = _sample(way, src, dst, memory, rules.replicas)
    regions, sms, engine = work.regions, rules.sms, rules.engine
    if not work.digested:
        return None
    pool, packed = int(LISTED.value), int(EVEN.value)  # pyright: ignore
    kinds = packed if way is Way.SCATTER else pool, packed if way is Way.GATHER else pool
    row_sms = None if engine is CopyEngine.GREEN else sms
    by_rows = regions and engine in BY_ROWS | {CopyEngine.GREEN}
    found = Programs(
        rows.standing_program(regions, kinds, row_sms) if by_rows else None,
        convert=convert.standing_program(work.conversions, kinds, sms) if work.conversions else None,
    )
    return _with_digests(found, way, work, kinds, rules) if rules.digests else found


def _with_digests(found: Programs, way: Way, work: Work, kinds: tuple[int, int], rules: Rules) -> Programs:
    """Returns the kernels with those that digest: fused with the copy, over rows at rest, or over converted rows."""
    from kvmover.kernels import convert, digest
    from kvmover.kernels.table import EVEN, LISTED

    pool, packed = int(LISTED.value), int(EVEN.value)  # pyright: ignore
    marks, sms = (work.logicals or ())[: len(work.regions)], rules.sms
    fused = way is not Way.READ and rules.engine in BY_ROWS
    if work.regions and fused:
        found = replace(found, digest=digest.standing_program(work.regions, marks, kinds, sms))
    if work.conversions:
        if digests_conversions(work):
            found = replace(found, convert_digest=convert.standing_program(work.conversions, kinds, sms, work.end))
        if left := undigested(work, rules.engine):
            regions, logicals = zip(*left, strict=True)
            found = replace(
                found, wire_digest=digest.standing_program(regions, logicals, (packed, packed), sms, work.end)
            )
    elif way in (Way.GATHER, Way.SCATTER) or (way is Way.WRITE and not fused):
        end = "dst" if way is Way.SCATTER else "src"
        found = replace(found, rest_digest=digest.standing_program(work.regions, marks, (pool, pool), sms, end))
    return found


def _sample(way: Way, src: End, dst: End, memory: OwnMemory, replicas: Replicas) -> Work:
    """Returns the work for a sample request of whole pages and one token: nearly all bytes are in whole pages, and the
    tail has rows of the worst alignment.
    """
    page_tokens = max(src.fleet.page_tokens, dst.fleet.page_tokens)
    tokens = SAMPLE_PAGES * max(src.fleet.size, dst.fleet.size) * page_tokens + 1
    components = tuple(pool.component for pool in src.pools)
    plans = plans_between(components, src.fleet, dst.fleet, range(tokens), replicas)
    lane = Lane.between(plans, src, dst, Cut(_ONE_CHUNK_BYTES))
    tables = _pages(lane.source_reads, src), _pages(lane.target_reads, dst)
    if way in (Way.WRITE, Way.READ):
        return _mapped_sample(way, lane, tables, memory)
    placed, marks = list[Placed](), list[Marks]()
    for number, chunk in enumerate(lane.chunks):
        marks += lane.marks(number)
        if way is Way.GATHER:
            packed = memory.outgoing.window(0, chunk.span_bytes)
            boxes = lane.gather_boxes(number, tables[0])
            placed += [(box, memory.pools[component], packed) for component, box in boxes]
        else:
            packed = memory.incoming.window(0, chunk.span_bytes)
            boxes = lane.scatter_boxes(number, tables[1])
            placed += [(box, packed, memory.pools[component]) for component, box in boxes]
    return packing(placed, marks, "src" if way is Way.GATHER else "dst")


def _mapped_sample(way: Way, lane: Lane, tables: tuple[PageTables, PageTables], memory: OwnMemory) -> Work:
    """Returns the sample work for mapped pools; empty without them, or if bytes are converted, which needs packing."""
    if lane.converts or not memory.mapped:
        return Work(())
    ends = (memory.pools, memory.mapped) if way is Way.WRITE else (memory.mapped, memory.pools)
    regions, marks = list[Region](), list[Marks]()
    for number in range(len(lane.chunks)):
        regions += between(lane.direct_boxes(number, *tables), *ends)
        marks += lane.marks(number)
    return Work(regions, list(map(logical, marks, regions)))


def _pages(reads: Sequence[int], end: End) -> PageTables:
    """Returns page tables that are long enough, of ids within the pools."""
    return [np.arange(count, dtype=np.int64) % spec.pages for count, spec in zip(reads, end.pools, strict=True)]


@dataclass(frozen=True, slots=True)
class _Seat:
    """The inputs from which a peer's programs were last compiled."""

    own: End
    theirs: End
    memory: OwnMemory
    rules: Rules


@dataclass(slots=True, eq=False)
class Compiler:
    """The programs by peer, loaded by one thread, for which a process of its own compiles. A CPU needs no programs.

    `_before`: programs in use while a peer's are compiled anew.
    """

    device: torch.device
    _thread: ThreadPoolExecutor | None = None
    _worker: Worker = field(init=False)
    _seats: dict[str, _Seat] = field(default_factory=dict[str, "_Seat"])
    _begun: dict[tuple[str, Way], Future[Programs | None]] = field(
        default_factory=dict["tuple[str, Way]", "Future[Programs | None]"]
    )
    _before: dict[tuple[str, Way], Future[Programs | None]] = field(
        default_factory=dict["tuple[str, Way]", "Future[Programs | None]"]
    )

    @property
    def compiles(self) -> bool:
        """True if copies run kernels on this device."""
        return self.device.type != "cpu"

    def seated(self, peer: str, own: End, theirs: End, memory: OwnMemory, rules: Rules) -> None:
        """Start compiling a connected peer's programs, if their inputs changed. Returns at once."""
        if not self.compiles:
            return
        known = self._seats.get(peer)
        seat = _Seat(own, theirs, memory, rules if known is None or not known.rules.digests else _digesting(rules))
        if seat == known:
            return
        if self._thread is None:
            from kvmover.kernels import cuda_driver
            from kvmover.kernels.ahead_of_time import Worker
            from kvmover.kernels.launch import Upload

            self._worker = Worker()
            Upload.here(self.device)  # of the thread that seats peers, which copies too
            first = cuda_driver.leave_captures_alone if self.device.type == "cuda" else None
            self._thread = ThreadPoolExecutor(1, "kvmover-compiler", first)
        self._seats[peer] = seat
        for way in Way:
            begun = self._begun.get((peer, way))
            if begun is not None and begun.done():
                self._before[peer, way] = begun
            ends = (own, theirs) if way in (Way.GATHER, Way.WRITE) else (theirs, own)
            self._begun[peer, way] = self._thread.submit(self._compile, way, *ends, memory, seat.rules)
        self._thread.submit(self._worker.rest)

    def digested(self, peer: str) -> None:
        """Start compiling kernels with digests for a peer whose chunks have them. Returns at once."""
        seat = self._seats.get(peer)
        if seat is not None and not seat.rules.digests:
            self.seated(peer, seat.own, seat.theirs, seat.memory, _digesting(seat.rules))

    def _compile(self, way: Way, src: End, dst: End, memory: OwnMemory, rules: Rules) -> Programs | None:
        programs = programs_between(way, src, dst, memory.bound_anew(), rules)
        for program in programs.all() if programs else ():
            program.function(self.device, self._worker.compile)
        return programs

    def is_ready(self, peer: str, *ways: Way) -> bool:
        """Returns True if no compilation for a peer is under way in these directions. It may have failed: then
        `programs` raises.
        """
        return not self._begun or all(
            begun.done() for way in ways if (begun := self._begun.get((peer, way))) is not None
        )

    def programs(self, peer: str, way: Way) -> Programs | None:
        """Returns the newest compiled programs of a peer and direction. Waits for the first ones unless `is_ready`.
        Raises the compiler's exception.
        """
        begun = self._begun.get((peer, way))
        if begun is not None and not begun.done():
            begun = self._before.get((peer, way), begun)
        return None if begun is None else begun.result()

    def parted(self, peer: str) -> None:
        """Forget a peer. Compiled kernels stay."""
        self._seats.pop(peer, None)
        for way in Way:
            self._begun.pop((peer, way), None)
            self._before.pop((peer, way), None)

    def close(self) -> None:
        """Cancel queued compilations, and end the compiling process."""
        if self._thread is not None:
            for begun in self._begun.values():
                begun.cancel()
            self._thread.shutdown(wait=False)  # it runs what is queued: the worker's rest


def _digesting(rules: Rules) -> Rules:
    return replace(rules, digests=True)
