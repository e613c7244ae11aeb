"""Kernels are compiled when a peer is seated, in a thread: whatever requests come, none is compiled in a poll."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from kvmover.kernels import convert, cuda_driver, digest, launch, rows
from kvmover.kernels.ahead_of_time import Worker
from kvmover.kernels.code_store import Code
from kvmover.kernels.copy_engine import CopyEngine
from kvmover.kernels.launch import Program, RowConfig
from kvmover.kernels.table import UNSPECIALIZED
from kvmover.layout import Codec, CodecPart, Component, Fleet, PoolSpec
from kvmover.plan.cost import RDMA
from kvmover.plan.legs import Replicas
from kvmover.regions import BoundMemory
from kvmover.transfer.memory.chunk_tables import over
from kvmover.transfer.memory.descriptors import at_rest, between, logical, packing
from kvmover.transfer.memory.programs import Compiler, OwnMemory, Rules, Way, programs_between
from kvmover.transfer.memory.work import Programs, Work, launches
from kvmover.transfer.protocol.chunks import Cut, End, Lane, Stretch, plans_between
from tests.counting_driver import CountingDriver
from tests.proofs import family

LLAMA = (Component.attention(80, 8, 128, "bfloat16"),)
MLA = (Component.mla(61, 576, "bfloat16"),)
SPARSE = (Component.mla(61, 656, "uint8"), Component("index keys", 61, 1, 1, 132, "uint8"))
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
RULES = Rules(Replicas.STRIPE, 8, digests=True)
ARENA_BYTES = 64 << 20
KERNELS: tuple[Any, ...] = (
    rows.move_kernel,
    digest.digest_kernel,
    convert.convert_kernel,
    convert.convert_and_digest_kernel,
)


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
    """A flagship pair: what goes from rank 0 of one fleet to rank 0 of another. `codecs`: how the first component is
    stored at either end, where not as it is meant."""

    components: tuple[Component, ...]
    src: Fleet
    dst: Fleet
    orders: tuple[str, str] = ("NHD", "NHD")
    codecs: tuple[Codec | None, Codec | None] = (None, None)

    def ends(self) -> tuple[End, End]:
        return self._end(self.src, 0), self._end(self.dst, 1)

    def kept(self, side: int) -> tuple[Component, ...]:
        codec = self.codecs[side]
        first, *others = self.components
        return first if codec is None else first.kept_as(codec), *others

    def _end(self, fleet: Fleet, side: int) -> End:
        pages = 16384 // fleet.page_tokens
        pools = (
            PoolSpec.dense(
                component,
                fleet.shard(component, 0, 1),
                pages,
                fleet.page_rows(component),
                self.orders[side],
                ("layer", "kv"),
            )
            for component in self.kept(side)
        )
        return End(fleet, 0, tuple(pools))


#: DeepSeek-V3.2 in bfloat16, whose index keys are as they are at either end.
LATENTS = (*MLA, SPARSE[1])
FP8, NVFP4 = Codec.fp8("bfloat16", 128), Codec.nvfp4("bfloat16", 128)
TP = Fleet(tp=2, page_tokens=64), Fleet(tp=8, page_tokens=64)
UNLIKE = Fleet(tp=4, page_tokens=16), Fleet(tp=2, page_tokens=64)
ONE = Fleet(page_tokens=64), Fleet(page_tokens=64)
FLAGSHIPS = {
    "Llama TP2 to TP8": Shape(LLAMA, *TP),
    "Llama TP4 to TP2": Shape(LLAMA, *UNLIKE, ("NHD", "HND")),
    "MLA 64 to 64": Shape(MLA, *ONE),
    "MLA 16 to 64": Shape(MLA, Fleet(page_tokens=16), Fleet(page_tokens=64)),
    "V3.2 656 + 132 B": Shape(SPARSE, *ONE),
    "Llama bf16 to fp8": Shape(LLAMA, *TP, codecs=(None, FP8)),
    "Llama fp8 to bf16": Shape(LLAMA, *UNLIKE, ("NHD", "HND"), (FP8, None)),
    "Llama bf16 to NVFP4": Shape(LLAMA, *UNLIKE, ("NHD", "HND"), (None, NVFP4)),
    "Llama NVFP4 to fp8": Shape(LLAMA, *TP, codecs=(NVFP4, FP8)),
    "V3.2 bf16 to 656 B": Shape(LATENTS, *ONE, codecs=(None, Codec.fp8_ds_mla())),
    "V3.2 656 B to bf16": Shape(LATENTS, *ONE, codecs=(Codec.fp8_ds_mla(), None)),
}


def memory_of(end: End, first: int, mapped: tuple[BoundMemory, ...] = ()) -> OwnMemory:
    pools = tuple(
        BoundMemory(
            tuple(Addresses(spec.allocation_bytes, first + (64 * number + i << 36)) for i in range(spec.allocations))
        )  # pyright: ignore
        for number, spec in enumerate(end.pools, 1)
    )
    arenas = (BoundMemory((Addresses(ARENA_BYTES, first + at),)) for at in (0, ARENA_BYTES))  # pyright: ignore
    return OwnMemory(pools, *arenas, mapped)


def memories_of(shape: Shape) -> tuple[OwnMemory, OwnMemory]:
    """Of both ranks, each of which has mapped the other's pools."""
    ends = shape.ends()
    alone = [memory_of(end, side << 50) for side, end in enumerate(ends, 1)]
    source, target = (replace(own, mapped=other.pools) for own, other in zip(alone, reversed(alone), strict=True))
    return source, target


@dataclass(frozen=True)
class Copy:
    """What a chunk of a request needs on one side."""

    way: Way
    work: Work

    def programs(self, known: Programs) -> Iterator[Program]:
        """The kernels that it runs; and what reads its pages where they lie, as the direct route does."""
        total = torch.zeros(1, dtype=torch.int64) if self.work.logicals is not None else None
        rests = total is not None and not known.convert and self.way in (Way.GATHER, Way.SCATTER)
        works = [self.work, at_rest(self.work)] if rests else [self.work]
        for work in works:
            for ready in launches(work.using(known), RULES.sms, total):
                yield ready.program


def copies(shape: Shape, requests: int, seed: int) -> Iterator[Copy]:
    """All chunks of random requests by every route, half of them with a digest. Most requests have a prefix already."""
    random = np.random.default_rng(seed)
    src, dst = shape.ends()
    source, target = memories_of(shape)
    components = tuple(pool.component for pool in src.pools)
    for _ in range(requests):
        total = int(random.integers(50, 9000))
        page = dst.fleet.page_tokens
        start = 0 if random.random() < 0.3 else int(random.integers(0, total)) // page * page
        plans = plans_between(components, src.fleet, dst.fleet, range(start, total), Replicas.STRIPE)
        lane = Lane.between(plans, src, dst, Cut(RDMA.chunk_bytes))
        ids = [[random.permutation(spec.pages) for spec in end.pools] for end in (src, dst)]
        lane.check_pages(lane.src, ids[0])
        lane.check_pages(lane.dst, ids[1])
        for number, chunk in enumerate(lane.chunks):
            at = int(random.integers(0, (ARENA_BYTES - chunk.span_bytes) // 256)) * 256
            marks = lane.marks(number) if random.random() < 0.5 else None
            packed = source.outgoing.window(at, chunk.span_bytes)
            gathered = [(box, source.pools[c], packed) for c, box in lane.gather_boxes(number, ids[0])]
            yield Copy(Way.GATHER, shared(packing(gathered, marks, "src"), lane.stretch(number, ids[0], None)))
            packed = target.incoming.window(at, chunk.span_bytes)
            scattered = [(box, packed, target.pools[c]) for c, box in lane.scatter_boxes(number, ids[1])]
            yield Copy(Way.SCATTER, shared(packing(scattered, marks, "dst"), lane.stretch(number, None, ids[1])))
            if not lane.converts:
                boxes = lane.direct_boxes(number, *ids)
                written = between(boxes, source.pools, source.mapped)
                yield Copy(Way.WRITE, Work(written, None if marks is None else list(map(logical, marks, written))))
                yield Copy(Way.READ, Work(between(boxes, target.mapped, target.pools)))


def shared(work: Work, stretch: Stretch | None) -> Work:
    """Every other chunk of one piece takes part in its request's tables."""
    return work if stretch is None or stretch.first % 2 else over(work, stretch)


def known_of(shape: Shape) -> dict[Way, Programs]:
    ends, (source, target) = shape.ends(), memories_of(shape)
    memory = {Way.GATHER: source, Way.SCATTER: target, Way.WRITE: source, Way.READ: target}
    found = {way: programs_between(way, *ends, memory[way], RULES) for way in Way}
    return {way: programs for way, programs in found.items() if programs is not None}


@pytest.mark.parametrize(
    ("name", "requests"),
    family(
        [(name, n) for n in (20, 200, 1000) for name in FLAGSHIPS],
        few=[(name, 20) for name in FLAGSHIPS],
        proved=[(name, 200) for name in FLAGSHIPS],
    ),
)
def test_the_kernels_of_a_peer_serve_every_request(name: str, requests: int) -> None:
    shape = FLAGSHIPS[name]
    known = known_of(shape)
    needed = {program for copy in copies(shape, requests, 0) for program in copy.programs(known[copy.way])}
    compiled = {program for programs in known.values() for program in programs.all()}
    assert needed <= compiled
    assert len(compiled) <= 10


#: Forms of rows of so many numbers, narrow and wide, with parts and scales of every kind.
FORMS = {
    24: ("f32", "fp8", "k-v"),
    64: ("bf16", "f16", "f32", "half", "fp8", "k-v", "nvfp4"),
    576: ("bf16", "fp8", "nvfp4", "ds-mla", "v-in-4"),
}
WAYS = [(dim, *pair) for dim, forms in FORMS.items() for pair in permutations(forms, 2)]
IN_FOUR = CodecPart(512, "float4_e2m1fn_x2", 16, "float8_e4m3fn")


def form(name: str, dim: int) -> Codec:
    return {
        "bf16": lambda: Codec.plain("bfloat16", dim),
        "f16": lambda: Codec("bfloat16", (CodecPart(dim, "float16"),)),
        "f32": lambda: Codec("bfloat16", (CodecPart(dim, "float32"),)),
        "half": lambda: Codec("bfloat16", (CodecPart(dim // 2, "float16"), CodecPart(dim // 2, "float8_e4m3fn"))),
        "fp8": lambda: Codec.fp8("bfloat16", dim),
        "k-v": lambda: Codec.fp8("bfloat16", dim // 2, dim // 2),
        "nvfp4": lambda: Codec.nvfp4("bfloat16", dim),
        "ds-mla": Codec.fp8_ds_mla,
        "v-in-4": lambda: Codec("bfloat16", (IN_FOUR, CodecPart(64, "float32"))),
    }[name]()


@pytest.mark.parametrize(("dim", "reads", "writes"), family(WAYS, few=WAYS[::11]))
def test_any_two_forms_are_converted_by_the_kernels_of_a_peer(dim: int, reads: str, writes: str) -> None:
    """Pages that do not divide each other, tokens of every number, and layers in one allocation each."""
    codecs = form(reads, dim), form(writes, dim)
    meant = Component.attention(3, 4, dim, "bfloat16")
    shape = Shape((meant,), Fleet(tp=4, page_tokens=48), Fleet(tp=2, page_tokens=32), ("NHD", "HND"), codecs)
    known = known_of(shape)
    needed = {program for copy in copies(shape, 20, dim) for program in copy.programs(known[copy.way])}
    compiled = {program for programs in known.values() for program in programs.all()}
    assert convert.convert_kernel in {program.kernel for program in needed}
    assert needed <= compiled
    assert len(compiled) <= 10


@pytest.mark.parametrize("name", FLAGSHIPS)
def test_nearly_all_bytes_are_moved_by_code_for_their_rows(name: str) -> None:
    shape = FLAGSHIPS[name]
    known = known_of(shape)
    moved = {False: 0, True: 0}
    for copy in copies(shape, 20, 1):
        program = known[copy.way].move
        if program is not None and copy.work.regions:
            launch = rows.describe(copy.work.regions, program.config.block_bytes, program.shapes)
            for region, words in zip(copy.work.regions, launch.header.tolist(), strict=True):
                moved[program.shapes[words[rows.SHAPE.value]].grains > 0] += region.nbytes
    assert moved[True] > 30 * moved[False]


@pytest.mark.parametrize("name", FLAGSHIPS)
def test_a_chunk_of_either_side_is_copied_and_digested_in_one_launch(name: str) -> None:
    """One more if a part of it is converted, which digests those rows too."""
    shape = FLAGSHIPS[name]
    known = known_of(shape)
    for copy in copies(shape, 5, 2):
        if copy.work.logicals is None or copy.way is Way.READ:
            continue
        found = launches(copy.work.using(known[copy.way]), RULES.sms, torch.zeros(1, dtype=torch.int64))
        copied = [digest.digest_kernel] if copy.work.regions else []
        converted = [convert.convert_and_digest_kernel] if copy.work.conversions else []
        assert [launch.program.kernel for launch in found] == converted + copied


@pytest.mark.parametrize("engine", list(CopyEngine))
def test_what_is_compiled_is_what_the_engine_runs(engine: CopyEngine) -> None:
    """A row mover under no budget for a green context, none for other engines, and digests fused with the row mover's
    copy alone."""
    src, dst = FLAGSHIPS["Llama TP2 to TP8"].ends()
    by_rows = programs_between(Way.GATHER, src, dst, memory_of(src, 1 << 50), RULES)
    programs = programs_between(Way.GATHER, src, dst, memory_of(src, 1 << 50), replace(RULES, engine=engine))
    assert by_rows is not None
    assert programs is not None
    assert programs.rest_digest is not None
    assert programs.rest_digest == by_rows.rest_digest  # of pages where they lie
    if engine in (CopyEngine.AUTO, CopyEngine.ROWS):
        assert programs == by_rows
        return
    assert programs.digest is None
    assert dict(programs.rest_digest.constants)["COPY"] == 0
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


@pytest.fixture(autouse=True)
def ring(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The GPUs for which this thread's ring was taken."""
    taken, here = list[torch.device](), launch.Upload.here
    monkeypatch.setattr(cuda_driver, "library", CountingDriver)
    monkeypatch.setattr(launch.Upload, "here", lambda device: taken.append(device) if device == GPU else here(device))
    return taken


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountingDriver]:
    """Triton compiles for an H100 that is not there, whose driver loads what it is given, and forgets it afterwards."""
    import triton
    from triton.backends.compiler import GPUTarget

    driver = CountingDriver()

    class Driver:
        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    monkeypatch.setattr(launch, "on", lambda device: nullcontext())
    monkeypatch.setattr(launch, "_functions", {})
    monkeypatch.setattr(launch, "architecture", lambda device: 90)
    monkeypatch.setattr(cuda_driver, "library", lambda: driver)
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    for kernel in KERNELS:
        kernel.device_caches.clear()
    yield driver
    for kernel in KERNELS:
        kernel.device_caches.clear()


def compiled_kernels() -> int:
    return sum(len(kernel.device_caches[0][0]) for kernel in KERNELS if 0 in kernel.device_caches)


@pytest.mark.filterwarnings("ignore")  # Triton's own
@pytest.mark.parametrize("name", ["V3.2 656 + 132 B", "V3.2 bf16 to 656 B"])
def test_what_is_loaded_when_a_peer_is_seated_is_what_its_copies_launch(
    name: str, no_gpu: CountingDriver, ring: list[torch.device]
) -> None:
    """A copy finds its code loaded, and nothing is compiled in this process."""
    shape = FLAGSHIPS[name]
    ends, (memory, _) = shape.ends(), memories_of(shape)
    compiler, rules = Compiler(GPU), replace(RULES, digests=False)
    try:
        for peer in ("decode-0", "decode-1"):  # the second is as the first: nothing more is loaded
            compiler.seated(peer, *ends, memory, rules)
        known = {way: found for way in Way if (found := compiler.programs("decode-1", way)) is not None}
    finally:
        compiler.close()
    loaded = list(no_gpu.calls)
    assert loaded[0] == "cuThreadExchangeStreamCaptureMode 1", "an engine may capture a graph meanwhile"
    assert loaded.count("cuModuleLoadData") == len({program for each in known.values() for program in each.all()})
    assert ring == [GPU], "once, and in the thread that seats peers"
    ring.clear()
    for copy in copies(shape, 2, 3):
        if copy.way in (Way.GATHER, Way.WRITE):
            for ready in launches(structs.replace(copy.work, logicals=None).using(known[copy.way]), RULES.sms, None):
                ready.program.function(GPU)
    assert no_gpu.calls == loaded
    assert compiled_kernels() == 0


def newest(compiler: Compiler, peer: str, way: Way) -> Programs | None:
    """What is compiled for a peer, once all is that was begun."""
    deadline = time.monotonic() + 20
    while not compiler.is_ready(peer, *Way):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return compiler.programs(peer, way)


def test_a_peer_that_greets_again_has_nothing_compiled_anew_and_keeps_its_digests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[Program] = []
    monkeypatch.setattr(Program, "function", lambda self, *_: compiled.append(self))
    monkeypatch.setattr(Program, "kept_function", lambda self, _: None)
    shape, compiler, rules = FLAGSHIPS["MLA 16 to 64"], Compiler(GPU), replace(RULES, digests=False)
    ends, (memory, _) = shape.ends(), memories_of(FLAGSHIPS["MLA 16 to 64"])
    compiler.seated("decode-0", *ends, memory, rules)
    compiler.digested("decode-0")
    known = {way: newest(compiler, "decode-0", way) for way in Way}
    before = len(compiled)
    compiler.seated("decode-0", *ends, replace(memory), rules)
    assert compiler.is_ready("decode-0", *Way)
    assert all(compiler.programs("decode-0", way) is known[way] for way in Way)
    assert len(compiled) == before
    write = known[Way.WRITE]
    assert write is not None
    assert write.digest is not None
    compiler.close()


def test_copies_go_on_while_digests_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without digests that are under way when another one asks for them."""
    gate = threading.Event()
    gate.set()
    monkeypatch.setattr(Program, "function", lambda self, *_: gate.wait(20))
    monkeypatch.setattr(Program, "kept_function", lambda self, _: None)
    compiler, shape = Compiler(GPU), FLAGSHIPS["MLA 16 to 64"]
    compiler.seated("decode-0", *shape.ends(), memories_of(shape)[0], replace(RULES, digests=False))
    plain = newest(compiler, "decode-0", Way.WRITE)
    gate.clear()
    compiler.digested("decode-0")
    assert not compiler.is_ready("decode-0", Way.WRITE)
    assert compiler.programs("decode-0", Way.WRITE) is plain
    gate.set()
    after = newest(compiler, "decode-0", Way.WRITE)
    assert plain is not None
    assert after is not None
    assert plain == replace(after, digest=None)
    assert after.digest is not None
    compiler.close()


@pytest.mark.usefixtures("no_gpu")
def test_digests_that_a_peer_asks_for_are_compiled_when_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Program] = []

    def compile_one(worker: Worker, program: Program, architecture: int) -> Code:
        compiled.append(program)
        return Code(b"kernel", "kernel", 128, 0)

    monkeypatch.setattr(launch, "find", lambda name: None)
    monkeypatch.setattr(Worker, "compile", compile_one)
    src, dst = FLAGSHIPS["V3.2 bf16 to 656 B"].ends()
    compiler = Compiler(GPU)
    compiler.digested("decode-0")  # who is not connected
    compiler.seated("decode-0", src, dst, memory_of(src, 1 << 50), replace(RULES, digests=False))
    plain = compiler.programs("decode-0", Way.GATHER)
    for _ in range(2):
        compiler.digested("decode-0")
    gather, scatter = (newest(compiler, "decode-0", way) for way in (Way.GATHER, Way.SCATTER))
    assert plain is not None
    assert gather is not None
    assert scatter is not None
    assert plain == replace(gather, digest=None, convert_digest=None, rest_digest=None)
    assert {gather.digest, gather.convert_digest} < set(compiled)
    assert sorted(map(id, compiled)) == sorted(map(id, set(compiled))), "each is compiled once"
    assert set(compiled) == {*gather.all(), *scatter.all()}
    compiler.parted("decode-0")
    compiler.digested("decode-0")
    assert compiler.programs("decode-0", Way.GATHER) is None
    compiler.close()


def test_counts_are_not_compiled_in() -> None:
    config = RowConfig()
    for kernel in KERNELS:
        names = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
        assert names == {*UNSPECIALIZED}
    assert rows.program((), config).options.keys() == {"SHAPES", "BLOCK", "num_warps"}
