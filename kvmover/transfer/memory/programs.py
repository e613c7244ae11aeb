"""Programs: the kernels that the copies between this rank and a peer can need, compiled in a thread once it is seated.

A kernel takes most of a second to compile, in which a poll would answer nobody. Which ones it will be follows from the
pools and page sizes of both sides; whatever requests come, their chunks are moved by these.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvmover.kernels.copy_engine import CopyEngine
from kvmover.plan.legs import Replicas
from kvmover.regions import BoundMemory
from kvmover.transfer.memory.copier import Programs, Work
from kvmover.transfer.memory.descriptors import Placed, packing
from kvmover.transfer.protocol.chunks import Cut, End, Lane, Marks, plans_between

if TYPE_CHECKING:
    import torch

    from kvmover.kernels.launch import Program

#: Pages of each rank in the request that programs are made for, so that whole pages are nearly all of its bytes.
SAMPLE_PAGES = 16

#: More than that request has: how it is cut does not change its rows.
_ONE_CHUNK_BYTES = 1 << 50


class Way(StrEnum):
    """Which copies of a chunk: from pools to the arena, or from the arena to pools."""

    GATHER = "gather"
    SCATTER = "scatter"


@dataclass(frozen=True, slots=True)
class Rules:
    """What the programs between two ranks follow from, beside their pools. `digests`: whether chunks have digests.
    `engine`: what copies.
    """

    replicas: Replicas
    sms: int | None
    digests: bool
    engine: CopyEngine = CopyEngine.AUTO


@dataclass(frozen=True, slots=True, eq=False)
class OwnMemory:
    """Memory of the rank that copies: pools [component], and the arenas that it gathers into and scatters from."""

    pools: tuple[BoundMemory, ...]
    outgoing: BoundMemory
    incoming: BoundMemory

    def bound_anew(self) -> OwnMemory:
        """The same for another thread: what is worked out of a BoundMemory is kept in it."""
        pools = tuple(BoundMemory(each.tensors) for each in self.pools)
        return OwnMemory(pools, BoundMemory(self.outgoing.tensors), BoundMemory(self.incoming.tensors))


def programs_between(way: Way, src: End, dst: End, memory: OwnMemory, rules: Rules) -> Programs | None:
    """The kernels for chunks of any request from `src` to `dst`, at the source in a gather, else at the destination;
    None where nothing goes that way.
    """
    from kvmover.kernels import bulk, convert, digest, rows
    from kvmover.kernels.table import EVEN, LISTED

    work = _sample(way, src, dst, memory, rules.replicas)
    regions, logicals, sms = work.regions, work.logicals or (), rules.sms
    if not work.digested:
        return None
    pool, packed = int(LISTED.value), int(EVEN.value)  # pyright: ignore
    kinds, end = ((pool, packed), "src") if way is Way.GATHER else ((packed, pool), "dst")
    engine = rules.engine
    if engine is CopyEngine.AUTO:  # as the Copier chooses
        engine = CopyEngine.ROWS if rules.digests else bulk.measured(regions, sms, work.digested[0].src.device)
    row_sms = None if engine is CopyEngine.GREEN else sms
    by_rows = regions and engine in (CopyEngine.ROWS, CopyEngine.GREEN)
    found = Programs(
        rows.standing_program(regions, kinds, row_sms) if by_rows else None,
        convert=convert.standing_program(work.conversions, kinds, sms) if work.conversions else None,
    )
    if rules.digests and regions:
        marks = logicals[: len(regions)]
        if way is Way.GATHER and engine is CopyEngine.ROWS:
            found = replace(found, digest=digest.standing_program(regions, marks, kinds, sms))
        found = replace(found, rest_digest=digest.standing_program(regions, marks, (pool, pool), sms, end))
    if rules.digests and work.conversions:
        wire = digest.standing_program(work.digested, logicals, (packed, packed), sms, work.end)
        found = replace(found, wire_digest=wire)
    return found


def _sample(way: Way, src: End, dst: End, memory: OwnMemory, replicas: Replicas) -> Work:
    """What is done for a request of whole pages and one token more: nearly all bytes are in whole pages, and the tail
    has rows aligned as badly as any.
    """
    page_tokens = max(src.fleet.page_tokens, dst.fleet.page_tokens)
    tokens = SAMPLE_PAGES * max(src.fleet.size, dst.fleet.size) * page_tokens + 1
    components = tuple(pool.component for pool in src.pools)
    plans = plans_between(components, src.fleet, dst.fleet, range(tokens), replicas)
    lane = Lane.between(plans, src, dst, Cut(_ONE_CHUNK_BYTES))
    placed, marks = list[Placed](), list[Marks]()
    for number, chunk in enumerate(lane.chunks):
        marks += lane.marks(number)
        if way is Way.GATHER:
            packed = memory.outgoing.window(0, chunk.span_bytes)
            boxes = lane.gather_boxes(number, _pages(lane.source_reads, src))
            placed += [(box, memory.pools[component], packed) for component, box in boxes]
        else:
            packed = memory.incoming.window(0, chunk.span_bytes)
            boxes = lane.scatter_boxes(number, _pages(lane.target_reads, dst))
            placed += [(box, packed, memory.pools[component]) for component, box in boxes]
    return packing(placed, marks, "src" if way is Way.GATHER else "dst")


def _pages(reads: Sequence[int], end: End) -> list[npt.NDArray[np.int64]]:
    """Page tables that are long enough, of pages that the pools have."""
    return [np.arange(count, dtype=np.int64) % spec.pages for count, spec in zip(reads, end.pools, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class _Seat:
    """What the programs of a peer were last made from."""

    own: End
    theirs: End
    memory: OwnMemory
    rules: Rules


@dataclass(slots=True, eq=False)
class Compiler:
    """Programs by peer, compiled in one thread, each once. On a CPU there are none."""

    device: torch.device
    _thread: ThreadPoolExecutor | None = None
    _seats: dict[str, _Seat] = field(default_factory=dict[str, "_Seat"])
    _begun: dict[tuple[str, Way], Future[Programs | None]] = field(
        default_factory=dict["tuple[str, Way]", "Future[Programs | None]"]
    )
    _compiled: set[Program] = field(default_factory=set["Program"])

    def seated(self, peer: str, own: End, theirs: End, memory: OwnMemory, rules: Rules) -> None:
        """A peer is connected: begin to compile what is copied for it. Returns at once."""
        if self.device.type == "cpu":
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "kvmover-compiler")
        self._seats[peer] = _Seat(own, theirs, memory, rules)
        for way, ends in ((Way.GATHER, (own, theirs)), (Way.SCATTER, (theirs, own))):
            self._begun[peer, way] = self._thread.submit(self._compile, way, *ends, memory, rules)

    def digested(self, peer: str) -> None:
        """Chunks have digests, which is the destination's to choose: begin to compile these where nobody has. Returns
        at once."""
        seat = self._seats.get(peer)
        if seat is not None and not seat.rules.digests:
            self.seated(peer, seat.own, seat.theirs, seat.memory, replace(seat.rules, digests=True))

    def _compile(self, way: Way, src: End, dst: End, memory: OwnMemory, rules: Rules) -> Programs | None:
        programs = programs_between(way, src, dst, memory.bound_anew(), rules)
        for program in programs.all() if programs else ():
            if program not in self._compiled:
                program.compile(self.device)
                self._compiled.add(program)
        return programs

    def is_ready(self, peer: str, way: Way) -> bool:
        """Whether copies for a peer need wait for no compiler."""
        begun = self._begun.get((peer, way))
        return begun is None or begun.done()

    def programs(self, peer: str, way: Way) -> Programs | None:
        """What copies for a peer run. Waits where the first one comes before it is compiled; raises what that did."""
        begun = self._begun.get((peer, way))
        return None if begun is None else begun.result()

    def parted(self, peer: str) -> None:
        """A peer is gone. What is compiled stays."""
        self._seats.pop(peer, None)
        for way in Way:
            self._begun.pop((peer, way), None)

    def close(self) -> None:
        """Begin with nothing more."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
