"""The programs of a peer: the kernels that copies for it can need, loaded in a thread once it is connected.

A kernel takes most of a second to compile, for which `poll` must not stop. The kernels follow from the pools and page
sizes of both sides, and serve the chunks of any request. Where a wheel brought general kernels, copies begin with them
while a peer's own are compiled.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
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
    from kvmover.kernels.launch import Program

log = logging.getLogger(__name__)

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


def kept_programs(programs: Programs, device: torch.device) -> Programs | None:
    """Returns the kernels, loaded on a device without a compiler: in place of each that would have to be compiled the
    general one that serves as much. None if one has none.
    """
    from kvmover.kernels.general import general

    found: dict[str, Program] = {}
    for each in fields(Programs):
        program: Program | None = getattr(programs, each.name)
        if program is not None and program.kept_function(device) is None:
            program = general(program)
            if program is None or program.kept_function(device) is None:
                return None
        if program is not None:
            found[each.name] = program
    return Programs(**found)


@dataclass(frozen=True, slots=True)
class _Kept:
    """The programs of a peer and direction, and those of them that need no compiler. `whole`: copies can begin."""

    made_for: Programs | None
    kept: Programs | None

    @property
    def whole(self) -> bool:
        return self.made_for is None or self.kept is not None


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

    `_kept`: programs for which nothing is compiled, in use until a peer's own are. `_before`: programs in use while a
    peer's are made anew.
    """

    device: torch.device
    _thread: ThreadPoolExecutor | None = None
    _worker: Worker = field(init=False)
    _seats: dict[str, _Seat] = field(default_factory=dict[str, "_Seat"])
    _begun: dict[tuple[str, Way], Future[Programs | None]] = field(
        default_factory=dict["tuple[str, Way]", "Future[Programs | None]"]
    )
    _kept: dict[tuple[str, Way], Future[_Kept]] = field(default_factory=dict["tuple[str, Way]", "Future[_Kept]"])
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
            self._kept[peer, way] = self._thread.submit(self._without_compiler, way, *ends, memory, seat.rules)
        for way in Way:  # after all that needs no compiler
            self._begun[peer, way] = self._thread.submit(self._compile, self._kept[peer, way])
        self._thread.submit(self._worker.rest)

    def digested(self, peer: str) -> None:
        """Start compiling kernels with digests for a peer whose chunks have them. Returns at once."""
        seat = self._seats.get(peer)
        if seat is not None and not seat.rules.digests:
            self.seated(peer, seat.own, seat.theirs, seat.memory, _digesting(seat.rules))

    def _without_compiler(self, way: Way, src: End, dst: End, memory: OwnMemory, rules: Rules) -> _Kept:
        programs = programs_between(way, src, dst, memory.bound_anew(), rules)
        return _Kept(programs, None if programs is None else kept_programs(programs, self.device))

    def _compile(self, known: Future[_Kept]) -> Programs | None:
        """Returns the peer's own programs, compiled; or those that are in use if they cannot be."""
        found = known.result()
        try:
            for program in found.made_for.all() if found.made_for else ():
                program.function(self.device, self._worker.compile)
        except RuntimeError as error:  # of the compiling process, or of the driver
            if found.kept is None:
                raise
            log.warning("general kernels stay in use: %s", error)
            return found.kept
        return found.made_for

    def _at_hand(self, peer: str, way: Way) -> _Kept | None:
        """Returns the programs that need no compiler; None if some do, or if it is not known yet."""
        kept = self._kept.get((peer, way))
        if kept is None or not kept.done() or kept.cancelled() or kept.exception() is not None:
            return None
        return kept.result() if kept.result().whole else None

    def is_ready(self, peer: str, *ways: Way) -> bool:
        """Returns True if copies for a peer wait for no compilation in these directions. It may have failed: then
        `programs` raises.
        """
        return not self._begun or all(
            begun.done() or self._at_hand(peer, way) is not None
            for way in ways
            if (begun := self._begun.get((peer, way))) is not None
        )

    def programs(self, peer: str, way: Way) -> Programs | None:
        """Returns the newest programs of a peer and direction: its own once they are compiled, until then general ones.
        Waits for the first ones unless `is_ready`. Raises the compiler's exception.
        """
        begun = self._begun.get((peer, way))
        if begun is not None and not begun.done():
            if (found := self._at_hand(peer, way)) is not None:
                return found.kept
            begun = self._before.get((peer, way), begun)
        return None if begun is None else begun.result()

    def parted(self, peer: str) -> None:
        """Forget a peer. Compiled kernels stay."""
        self._seats.pop(peer, None)
        for way in Way:
            for each in (self._begun, self._kept, self._before):
                each.pop((peer, way), None)

    def close(self) -> None:
        """Cancel queued compilations, and end the compiling process."""
        if self._thread is not None:
            for begun in (*self._begun.values(), *self._kept.values()):
                begun.cancel()
            self._thread.shutdown(wait=False)  # it runs what is queued: the worker's rest


def _digesting(rules: Rules) -> Rules:
    return replace(rules, digests=True)
