"""Chunks that share the tables of their request, in Triton's interpreter: the same bytes and digests as one by one.

Collected by pytest with TRITON_INTERPRET=1, beside the kernels' own cases.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from kvmover.kernels.copy_engine import CopyEngine
from kvmover.kernels.launch import Upload
from kvmover.kernels.region import RegionError
from kvmover.layout import Codec, Component, Fleet, PoolSpec
from kvmover.plan.legs import Replicas
from kvmover.regions import BoundMemory
from kvmover.transfer.memory.chunk_tables import ChunkCopy, ChunkTables
from kvmover.transfer.memory.copier import Copier
from kvmover.transfer.memory.descriptors import at_rest, between, logical, packing
from kvmover.transfer.memory.programs import OwnMemory, Rules, Way, programs_between
from kvmover.transfer.memory.work import Programs, Work
from kvmover.transfer.protocol.chunks import Cut, End, Lane, plans_between
from tests.proofs import family

ARENA_BYTES, PAGES = 1 << 16, 40
KV, LATENT = Component.attention(2, 4, 32, "bfloat16"), Component.mla(2, 72, "bfloat16")


@dataclass(frozen=True)
class Case:
    """A request from rank 0 to rank 0, for tokens `start` to `stop`; the first component is stored as `codecs` say."""

    name: str
    components: tuple[Component, ...]
    src: Fleet
    dst: Fleet
    start: int = 0
    stop: int = 83
    chunk_bytes: int = 3072
    layers: int = 0
    codecs: tuple[Codec | None, Codec | None] = (None, None)

    def __str__(self) -> str:
        return self.name

    def end(self, side: int) -> End:
        fleet, codec = (self.src, self.dst)[side], self.codecs[side]
        first, *others = self.components
        kept = first if codec is None else first.kept_as(codec), *others
        pools = (
            PoolSpec.dense(each, fleet.shard(each, 0, 1), PAGES, fleet.page_tokens, ("NHD", "HND")[side])
            for each in kept
        )
        return End(fleet, 0, tuple(pools))


CASES = [
    Case("equal pages", (KV,), Fleet(page_tokens=16), Fleet(page_tokens=16)),
    Case("TP2 to TP4, pages out of step", (KV,), Fleet(tp=2, page_tokens=16), Fleet(tp=4, page_tokens=24), 21, 99),
    Case("one unit a chunk", (KV,), Fleet(page_tokens=16), Fleet(page_tokens=16), chunk_bytes=1),
    Case("layers apart", (KV,), Fleet(page_tokens=16), Fleet(page_tokens=32), layers=1),
    Case("rows of 144 bytes", (LATENT,), Fleet(page_tokens=16), Fleet(page_tokens=64), 5, 200, 6000),
    Case("two components", (KV, LATENT), Fleet(page_tokens=16), Fleet(page_tokens=16), chunk_bytes=5000),
    Case("to fp8", (KV,), Fleet(page_tokens=16), Fleet(page_tokens=16), codecs=(None, Codec.fp8("bfloat16", 32))),
    Case("from fp8", (KV,), Fleet(page_tokens=16), Fleet(page_tokens=24), codecs=(Codec.fp8("bfloat16", 32), None)),
    Case(
        "parts of a row in words of their own",
        (KV,),
        Fleet(page_tokens=16),
        Fleet(page_tokens=16),
        codecs=(None, Codec.fp8("bfloat16", 16, 16)),
    ),
]


class Machine:
    """The memory of both ranks: random numbers in the pools, poison elsewhere."""

    def __init__(self, case: Case, ends: tuple[End, End]) -> None:
        generator = torch.Generator().manual_seed(3)

        def random(nbytes: int) -> torch.Tensor:
            return torch.randint(0, 120, (nbytes,), dtype=torch.uint8, generator=generator)

        self.pools = [
            [tuple(random(spec.allocation_bytes) for _ in range(spec.allocations)) for spec in end.pools]
            for end in ends
        ]
        self.arena = torch.full((ARENA_BYTES,), 0xA5, dtype=torch.uint8)
        self.bound = [[BoundMemory(tensors) for tensors in pools] for pools in self.pools]
        self.packed = BoundMemory((self.arena,))

    def bytes(self) -> list[torch.Tensor]:
        """All memory."""
        return [self.arena, *(tensor for pools in self.pools for tensors in pools for tensor in tensors)]


class Request:
    """A request whose chunks one machine copies one by one, as defined, and another with shared tables."""

    def __init__(self, case: Case, way: Way, resting: bool, compiled: bool, digests: bool) -> None:
        self.way, self.resting, self.digests = way, resting, digests
        self.ends = case.end(0), case.end(1)
        components = tuple(pool.component for pool in self.ends[0].pools)
        plans = plans_between(components, case.src, case.dst, range(case.start, case.stop), Replicas.STRIPE)
        self.lane = Lane.between(plans, *self.ends, Cut(case.chunk_bytes, case.layers))
        random = np.random.default_rng(1)
        reads = self.lane.source_reads, self.lane.target_reads
        self.ids = [[random.permutation(PAGES)[:count] for count in each] for each in reads]
        self.defined, self.sharing = Machine(case, self.ends), Machine(case, self.ends)
        self.programs = self._programs() if compiled else None
        self.tables, self.copier = ChunkTables(), Copier(torch.device("cpu"), None)
        self.lane.check_pages(self.lane.src, self.ids[0])
        self.lane.check_pages(self.lane.dst, self.ids[1])

    def _programs(self) -> Programs | None:
        pools = [tuple(pools) for pools in self.sharing.bound]
        own, other = pools if self.way in (Way.GATHER, Way.WRITE) else reversed(pools)
        memory = OwnMemory(own, self.sharing.packed, self.sharing.packed, other)
        return programs_between(self.way, *self.ends, memory, Rules(Replicas.STRIPE, 2, self.digests))

    def work(self, machine: Machine, chunk: int, staged: int) -> Work:
        lane, (source, target) = self.lane, machine.bound
        marks = lane.marks(chunk) if self.digests else None
        packed = machine.packed.window(staged, lane.chunks[chunk].span_bytes)
        if self.way is Way.GATHER:
            boxes = [(box, source[number], packed) for number, box in lane.gather_boxes(chunk, self.ids[0])]
            work = packing(boxes, marks, "src")
        elif self.way is Way.SCATTER:
            boxes = [(box, packed, target[number]) for number, box in lane.scatter_boxes(chunk, self.ids[1])]
            work = packing(boxes, marks, "dst")
        else:
            regions = between(lane.direct_boxes(chunk, *self.ids), source, target)
            return Work(regions, None if marks is None else list(map(logical, marks, regions)))
        return at_rest(work) if self.resting else work

    def copy(self, chunk: int, staged: int) -> None:
        """Copy a chunk in both machines; all of their memory and the digests are equal then."""
        wanted: list[int | None] = []
        self.copier.run(self.work(self.defined, chunk, staged), wanted.append)
        pools = self.way in (Way.WRITE, Way.READ)
        src = self.ids[0] if pools or self.way is Way.GATHER else None
        dst = self.ids[1] if pools or self.way is Way.SCATTER else None
        stretch = self.lane.stretch(chunk, src, dst)
        work = partial(self.work, self.sharing, chunk)
        offset = 0 if pools or self.resting else staged
        part = ChunkCopy(work, offset, self.digests, self.tables, lambda: stretch, self.programs)
        total = torch.zeros(1, dtype=torch.int64) if self.digests else None
        if stretch is None:
            self.copier.run(part.here(), lambda digest: None if total is None else total.fill_(_signed(digest)))
        else:
            for launch, shift in self.tables.launches(part, stretch, 2, CopyEngine.AUTO, total):
                launch.run(shift, *(() if total is None or not launch.outputs else (total,)))
        assert wanted == [None if total is None else int(total[0]) % (1 << 64)]
        for defined, shared in zip(self.defined.bytes(), self.sharing.bytes(), strict=True):
            assert torch.equal(defined, shared)

    def all(self, seed: int) -> None:
        """Copy all chunks in any order, each to any place."""
        random = np.random.default_rng(seed)
        for chunk in random.permutation(len(self.lane.chunks)).tolist():
            room = ARENA_BYTES - self.lane.chunks[chunk].span_bytes
            self.copy(chunk, int(random.integers(0, room // 256)) * 256)


def _signed(digest: int | None) -> int:
    assert digest is not None
    return digest - (1 << 64 if digest >> 63 else 0)


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The words of each table that goes to the device."""
    found = list[int]()
    upload: Callable[..., Any] = Upload.to_device

    def counted(self: Upload, table: Any) -> Any:
        found.append(len(table))
        return upload(self, table)

    monkeypatch.setattr(Upload, "to_device", counted)
    return found


#: A direction, whether chunks are only digested where they lie, and whether they are digested.
WAYS = [
    *((way, False, digests) for way in (Way.GATHER, Way.SCATTER, Way.WRITE) for digests in (False, True)),
    *((way, True, True) for way in (Way.GATHER, Way.SCATTER)),
]
ALL = [
    (case, *way, compiled)
    for case in CASES
    for way in WAYS
    for compiled in (False, True)
    if not any(case.codecs) or (way[0] is not Way.WRITE and not way[1])
]


@pytest.mark.parametrize(
    ("case", "way", "resting", "digests", "compiled"), family(ALL, few=ALL[3::21], proved=ALL[::6]), ids=str
)
def test_chunks_with_shared_tables_are_copied_as_one_by_one(
    case: Case, way: Way, resting: bool, digests: bool, compiled: bool, uploads: list[int]
) -> None:
    request = Request(case, way, resting, compiled, digests)
    kinds = {
        stretch.kind
        for chunk in range(len(request.lane.chunks))
        if (stretch := request.lane.stretch(chunk, request.ids[0], request.ids[1]))
    }
    request.all(0)
    once = len(uploads)
    assert len(kinds) <= once <= 2 * len(kinds), "a launch that digests apart has a table of its own"
    request.all(1)  # sent again, elsewhere
    assert len(uploads) == once


@pytest.mark.parametrize("way", family([Way.GATHER, Way.SCATTER], few=[Way.SCATTER]))
def test_page_tables_that_grow_are_uploaded_once_each_time(way: Way, uploads: list[int]) -> None:
    request = Request(CASES[0], way, resting=False, compiled=True, digests=True)
    side = 0 if way is Way.GATHER else 1
    held, (whole,) = (request.lane.src, request.lane.dst)[side], request.ids[side]
    needs = request.lane.source_pages if side == 0 else request.lane.target_needs
    chunks = range(len(request.lane.chunks))
    for stop in (2, 4, len(whole)):
        request.ids[side] = [whole[:stop].copy()]
        ready = [chunk for chunk in chunks if needs(chunk)[0] <= stop]
        if side == 0:
            for chunk in ready:
                request.lane.check_chunk(chunk, request.ids[side])
        else:
            request.lane.check_named(held, request.ids[side])
        uploads.clear()
        for chunk in ready:
            request.copy(chunk, 256 * chunk)
        assert len(ready) > stop // 2
        assert len(uploads) == len({request.lane.chunks[chunk].nbytes for chunk in ready})


def test_a_page_that_is_written_twice_is_refused_for_the_whole_request(uploads: list[int]) -> None:
    request = Request(CASES[0], Way.SCATTER, resting=False, compiled=False, digests=False)
    request.ids[1][0][2] = request.ids[1][0][0]
    request.lane.check_pages(request.lane.dst, request.ids[1])
    with pytest.raises(RegionError, match="two units of a destination begin"):
        request.copy(1, 0)
    assert uploads == []
