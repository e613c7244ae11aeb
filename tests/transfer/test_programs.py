"""Kernels are compiled when a peer is seated, in a thread: whatever requests come, none is compiled in a poll."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from kvmover.kernels import digest, rows
from kvmover.kernels.copy_engine import CopyEngine
from kvmover.kernels.launch import Program, RowConfig
from kvmover.kernels.region import Region
from kvmover.layout import Component, Fleet, PoolSpec
from kvmover.plan.cost import RDMA
from kvmover.plan.legs import Replicas
from kvmover.regions import BoundMemory, bound
from kvmover.transfer.memory.copier import Programs
from kvmover.transfer.memory.descriptors import logical
from kvmover.transfer.memory.programs import Compiler, OwnMemory, Rules, Way, programs_between
from kvmover.transfer.protocol.chunks import Cut, End, Lane, plans_between
from tests.proofs import family

LLAMA = (Component.attention(80, 8, 128, "bfloat16"),)
MLA = (Component.mla(61, 576, "bfloat16"),)
SPARSE = (Component.mla(61, 656, "uint8"), Component("index keys", 61, 1, 1, 132, "uint8"))
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
RULES = Rules(Replicas.STRIPE, 8, digests=True)
ARENA_BYTES = 64 << 20


@dataclass(frozen=True)
class Addresses:
    """A tensor that has an address and a size, and no bytes."""

    nbytes: int
    address: int
    device: torch.device = CPU

    def data_ptr(self) -> int:
        return self.address

    def numel(self) -> int:
        return self.nbytes

    def dim(self) -> int:
        return 1

    def element_size(self) -> int:
        return 1

    def is_contiguous(self) -> bool:
        return True

    def __getitem__(self, part: slice) -> Addresses:
        return Addresses(part.stop - part.start, self.address + part.start)


@dataclass(frozen=True)
class Shape:
    """A flagship pair: what goes from rank 0 of one fleet to rank 0 of another."""

    components: tuple[Component, ...]
    src: Fleet
    dst: Fleet
    orders: tuple[str, str] = ("NHD", "NHD")

    def ends(self) -> tuple[End, End]:
        return self._end(self.src, self.orders[0]), self._end(self.dst, self.orders[1])

    def _end(self, fleet: Fleet, order: str) -> End:
        pages = 16384 // fleet.page_tokens
        shards = [(component, fleet.shard(component, 0, 1)) for component in self.components]
        pools = (
            PoolSpec.dense(component, shard, pages, fleet.page_tokens, order, ("layer", "kv"))
            for component, shard in shards
        )
        return End(fleet, 0, tuple(pools))


FLAGSHIPS = {
    "Llama TP2 to TP8": Shape(LLAMA, Fleet(tp=2, page_tokens=64), Fleet(tp=8, page_tokens=64)),
    "Llama TP4 to TP2": Shape(LLAMA, Fleet(tp=4, page_tokens=16), Fleet(tp=2, page_tokens=64), ("NHD", "HND")),
    "MLA 64 to 64": Shape(MLA, Fleet(page_tokens=64), Fleet(page_tokens=64)),
    "MLA 16 to 64": Shape(MLA, Fleet(page_tokens=16), Fleet(page_tokens=64)),
    "V3.2 656 + 132 B": Shape(SPARSE, Fleet(page_tokens=64), Fleet(page_tokens=64)),
}


def memory_of(end: End, first: int) -> OwnMemory:
    pools = tuple(
        BoundMemory(
            tuple(Addresses(spec.allocation_bytes, first + (64 * number + i << 36)) for i in range(spec.allocations))
        )  # pyright: ignore
        for number, spec in enumerate(end.pools, 1)
    )
    arenas = (BoundMemory((Addresses(ARENA_BYTES, first + at),)) for at in (0, ARENA_BYTES))  # pyright: ignore
    return OwnMemory(pools, *arenas)


@dataclass(frozen=True)
class Copy:
    """What a chunk of a request needs on one side."""

    way: Way
    regions: list[Region]
    logicals: list[digest.Logical]

    def programs(self, known: Programs) -> Iterator[Program]:
        """The kernels that it runs: a copy, and with a digest."""
        assert known.move is not None
        assert known.digest is not None
        launch = rows.describe(self.regions, known.move.config.block_bytes, known.move.shapes)
        yield replace(known.move, shapes=launch.shapes)
        regions = [digest.at_end(each, "dst") for each in self.regions] if self.way is Way.SCATTER else self.regions
        outs, block_bytes = [0] * len(regions), known.digest.config.block_bytes
        launch = digest.describe(regions, self.logicals, outs, block_bytes, known.digest.shapes)
        yield replace(known.digest, shapes=launch.shapes)


def copies(shape: Shape, requests: int, seed: int) -> Iterator[Copy]:
    """All chunks of random requests, of which most have a prefix already."""
    random = np.random.default_rng(seed)
    src, dst = shape.ends()
    source, target = memory_of(src, 1 << 50), memory_of(dst, 2 << 50)
    for _ in range(requests):
        total = int(random.integers(50, 9000))
        page = dst.fleet.page_tokens
        start = 0 if random.random() < 0.3 else int(random.integers(0, total)) // page * page
        plans = plans_between(shape.components, src.fleet, dst.fleet, range(start, total), Replicas.STRIPE)
        lane = Lane.between(plans, src, dst, Cut(RDMA.chunk_bytes))
        ids = [[random.permutation(spec.pages) for spec in end.pools] for end in (src, dst)]
        for number, chunk in enumerate(lane.chunks):
            at = int(random.integers(0, (ARENA_BYTES - chunk.span_bytes) // 256)) * 256
            packed = source.outgoing.window(at, chunk.span_bytes)
            gathered = [bound(box, source.pools[c], packed) for c, box in lane.gather_boxes(number, ids[0])]
            packed = target.incoming.window(at, chunk.span_bytes)
            scattered = [bound(box, packed, target.pools[c]) for c, box in lane.scatter_boxes(number, ids[1])]
            marks = lane.marks(number)
            for way, regions in ((Way.GATHER, gathered), (Way.SCATTER, scattered)):
                yield Copy(way, regions, [logical(*each) for each in zip(marks, regions, strict=True)])


def known_of(shape: Shape) -> dict[Way, Programs]:
    src, dst = shape.ends()
    found = {
        Way.GATHER: programs_between(Way.GATHER, src, dst, memory_of(src, 1 << 50), RULES),
        Way.SCATTER: programs_between(Way.SCATTER, src, dst, memory_of(dst, 2 << 50), RULES),
    }
    return {way: programs for way, programs in found.items() if programs is not None}


@pytest.mark.parametrize(
    ("name", "requests"),
    family([(name, n) for n in (20, 1000) for name in FLAGSHIPS], few=[(name, 20) for name in FLAGSHIPS]),
)
def test_the_kernels_of_a_peer_serve_every_request(name: str, requests: int) -> None:
    shape = FLAGSHIPS[name]
    known = known_of(shape)
    needed = {program for copy in copies(shape, requests, 0) for program in copy.programs(known[copy.way])}
    compiled = {program for programs in known.values() for program in programs.all()}
    assert needed <= compiled
    assert len(compiled) <= 10


@pytest.mark.parametrize("name", FLAGSHIPS)
def test_nearly_all_bytes_are_moved_by_code_for_their_rows(name: str) -> None:
    shape = FLAGSHIPS[name]
    known = known_of(shape)
    moved = {False: 0, True: 0}
    for copy in copies(shape, 20, 1):
        program = known[copy.way].move
        assert program is not None
        launch = rows.describe(copy.regions, program.config.block_bytes, program.shapes)
        for region, words in zip(copy.regions, launch.header.tolist(), strict=True):
            moved[program.shapes[words[rows.SHAPE.value]].grains > 0] += region.nbytes
    assert moved[True] > 30 * moved[False]


@pytest.mark.parametrize("engine", list(CopyEngine))
def test_what_is_compiled_is_what_the_engine_runs(engine: CopyEngine) -> None:
    """A row mover under no budget for a green context, none for other engines, and digests fused with the row mover's
    copy alone."""
    src, dst = FLAGSHIPS["Llama TP2 to TP8"].ends()
    by_rows = programs_between(Way.GATHER, src, dst, memory_of(src, 1 << 50), RULES)
    programs = programs_between(Way.GATHER, src, dst, memory_of(src, 1 << 50), replace(RULES, engine=engine))
    assert by_rows is not None
    assert programs is not None
    assert programs.digest is not None
    if engine in (CopyEngine.AUTO, CopyEngine.ROWS):
        assert programs == by_rows
        return
    assert dict(programs.digest.constants)["COPY"] == 0
    moves = [] if programs.move is None else [programs.move.config]
    assert moves == ([RowConfig()] if engine is CopyEngine.GREEN else [])


def test_an_arena_that_cannot_be_read_in_words_has_kernels_of_its_own() -> None:
    """Nothing is assumed of alignment: what serves follows from the addresses."""
    src, dst = FLAGSHIPS["Llama TP2 to TP8"].ends()
    memory = memory_of(src, 4 + (1 << 50))
    programs = programs_between(Way.GATHER, src, dst, memory, RULES)
    assert programs is not None
    assert programs.move is not None
    assert {shape.access_bytes for shape in programs.move.shapes} == {4}


def test_ranks_between_which_nothing_goes_have_no_kernels() -> None:
    fleet = Fleet(tp=8, page_tokens=64)
    shape = Shape(LLAMA, fleet, fleet)
    src, _ = shape.ends()
    other = End(fleet, 5, src.pools)
    assert programs_between(Way.GATHER, src, other, memory_of(src, 1 << 50), RULES) is None


def test_on_a_cpu_nothing_is_compiled() -> None:
    src, dst = FLAGSHIPS["MLA 64 to 64"].ends()
    compiler = Compiler(CPU)
    compiler.seated("decode-0", src, dst, memory_of(src, 1 << 50), RULES)
    assert compiler.is_ready("decode-0", Way.GATHER)
    assert compiler.programs("decode-0", Way.GATHER) is None
    compiler.close()


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton compiles for an H100 that is not there, and forgets it afterwards."""
    from contextlib import nullcontext

    import triton
    from triton.backends.compiler import GPUTarget

    from kvmover.kernels import launch

    class Driver:
        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    monkeypatch.setattr(launch, "on", lambda device: nullcontext())
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    kernels: tuple[Any, ...] = rows.move_kernel, digest.digest_kernel
    for kernel in kernels:
        kernel.device_caches.clear()
    yield
    for kernel in kernels:
        kernel.device_caches.clear()


def compiled_kernels() -> int:
    kernels: tuple[Any, ...] = rows.move_kernel, digest.digest_kernel
    return sum(len(kernel.device_caches[0][0]) for kernel in kernels if 0 in kernel.device_caches)


@pytest.mark.filterwarnings("ignore")  # Triton's own
@pytest.mark.usefixtures("no_gpu")
def test_what_is_compiled_when_a_peer_is_seated_is_what_its_copies_launch() -> None:
    """By Triton's own keys. vLLM hangs a hook on every compile, which writes what is compiled in as JSON."""
    import triton

    shape = FLAGSHIPS["V3.2 656 + 132 B"]
    seen: list[dict[str, Any]] = []

    def hook(**told: Any) -> None:
        seen.append(json.loads(told["compile"]["specialization_data"]))

    src, dst = shape.ends()
    compiler, rules = Compiler(GPU), replace(RULES, digests=False)
    triton.knobs.runtime.jit_post_compile_hook = hook
    try:
        for name in ("decode-0", "decode-1"):  # the second is as the first: nothing more is compiled
            compiler.seated(name, src, dst, memory_of(src, 1 << 50), rules)
        gather = compiler.programs("decode-1", Way.GATHER)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
        compiler.close()
    assert gather is not None
    assert gather.move is not None
    assert len(seen) == compiled_kernels() == len({"gather", "scatter"})
    for copy in copies(shape, 2, 3):
        if copy.way is Way.GATHER:
            launch = rows.describe(copy.regions, gather.move.config.block_bytes, gather.move.shapes)
            program = rows.program(launch.shapes, gather.move.config)
            rows.move_kernel.warmup(torch.int64, launch.regions, launch.tiles, grid=(8,), **program.options)
    assert compiled_kernels() == len(seen)


def test_counts_are_not_compiled_in() -> None:
    config = RowConfig()
    kernels: tuple[Any, ...] = rows.move_kernel, digest.digest_kernel
    for kernel in kernels:
        names = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
        assert names == {"regions", "tiles"}
    assert rows.program((), config).options.keys() == {"SHAPES", "BLOCK", "num_warps"}
